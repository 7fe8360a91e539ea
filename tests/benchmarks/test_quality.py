"""Tests the arithmetic of the benchmarks that train: equal to torch's own optimizers; rounds of the protocol."""
# ruff: noqa: N806  tensor names end in their dims

from __future__ import annotations

import argparse
import copy
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from common.simulated_rounds import Round, simulate
from common.stacked import MODEL, RunPlan, Stack, train
from pydantic import TypeAdapter
from quality import INNER, OUTER, Document, compare, encoding, interval, with_codec
from tests.runtime.tensors.test_reduce_scatter import Fleet

from skerry.infra.spec.model import Outer
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.tensors.byte_layout import Index, TensorSpec

if TYPE_CHECKING:
    from skerry.runtime.log.records import Codec

OPTIONS = argparse.Namespace(**MODEL)
STEPS = 3
BLOCKS = ("bf16", "int8", "int4", "int2")
ROOT = Path(__file__).parents[2]
# What a user may copy.
SAMPLES = (
    "*.md",
    "docs/*.md",
    "infra/*.md",
    "runtime/*.md",
    "images/*.md",
    "infra/examples/*.yaml",
    "infra/skerry/infra/**/sample.yaml",
    "runtime/examples/**/*.py",
    "runtime/skerry/runtime/recipes/*.py",
    "runtime/skerry/runtime/integrations/*.py",
    "runtime/skerry/serverless/*.py",
)
# With another outer step, and the reason.
OTHER_OUTER_STEPS = {
    "docs/extend.md": "shows how to change it",
    "runtime/README.md": "names the momentum of a measurement",
    "runtime/skerry/runtime/recipes/from_torchtitan.py": "torchtitan has its own, which none of its settings changes",
}
# Numbers, as in a spec, a call of the optimizer, a command, or argparse.
OUTER_RATE = r"(?m)(?:^  lr: |\blr[:=] ?(?=[\d.]+, momentum)|outer.lr\W{1,3}(?:type=float, default=)?)(\d*\.\d+)"
OUTER_MOMENTUM = r"momentum\W{1,3}(?:type=float, default=)?(\d*\.\d+)"


def whole(replicas: int, steps: int = STEPS) -> Round:
    return Round(closed_s=0.0, steps=(steps,) * replicas, weights=(1.0,) * replicas)


def held_out(model: torch.nn.Module) -> float:
    """As `Stack.held_out` computes it."""
    text_N = train.text(train.sources()[1])
    wide = argparse.Namespace(seed=99, batch=64, context=OPTIONS.context)
    with torch.no_grad():
        return sum(train.loss_of(model, train.batch(text_N, 0, step, wide)).item() for step in range(4)) / 4


def trained_by_torch(rounds: list[Round], seed: int) -> float:
    """DiLoCo with torch's own AdamW and SGD, one replica after the other."""
    options = argparse.Namespace(**{**MODEL, "seed": seed})
    shared = train.build(options)
    replicas = [copy.deepcopy(shared) for _ in rounds[0].steps]
    inner = [torch.optim.AdamW(model.parameters(), lr=OPTIONS.lr) for model in replicas]
    default = Outer(rounds=None)
    outer = torch.optim.SGD(shared.parameters(), lr=default.lr, momentum=default.momentum, nesterov=True)
    files, taken = train.sources()[0], [0] * len(replicas)
    for closed in rounds:
        for index, model in enumerate(replicas):
            text_N = train.text(files[index :: len(replicas)])
            for _ in range(closed.steps[index]):
                inner[index].zero_grad()
                train.loss_of(model, train.batch(text_N, index, taken[index], options)).backward()
                inner[index].step()
                taken[index] += 1
        for parameter, *copies in zip(shared.parameters(), *(model.parameters() for model in replicas), strict=True):
            deltas = [weight * (parameter - own) for weight, own in zip(closed.weights, copies, strict=True)]
            parameter.grad = sum(deltas, torch.zeros_like(parameter)).detach() / sum(closed.weights)
        outer.step()
        for model in replicas:
            model.load_state_dict(shared.state_dict())
    return held_out(shared)


def trained_by_stack(*plans: RunPlan) -> list[float]:
    stack = Stack(plans, OPTIONS)
    for number in range(stack.rounds):
        stack.round(number)
    return stack.held_out()


def test_stack_trains_as_torchs_own_optimizers_do() -> None:
    short = Round(closed_s=0.0, steps=(STEPS, 1), weights=(1.0, 0.25))
    absent = Round(closed_s=0.0, steps=(0, STEPS), weights=(0.0, 1.0))
    rounds = [whole(2), short, absent, whole(2)]
    plans = [RunPlan(name="", seed=seed, rounds=rounds, shards=2, lr=OPTIONS.lr) for seed in (0, 1)]

    assert trained_by_stack(*plans) == pytest.approx([trained_by_torch(rounds, seed) for seed in (0, 1)], rel=1e-4)


def test_defaults_of_the_spec_beat_a_replica_alone() -> None:
    """The outer momentum of DiLoCo's paper, 0.9, ends above it: Nesterov has had no time."""
    outer, rounds, steps = Outer(rounds=15), 15, 10
    settings = {"rounds": [whole(2, steps)] * rounds, "outer_lr": outer.lr, "outer_momentum": outer.momentum}
    alone = {"rounds": [whole(1, steps)] * rounds, "synchronous": True}
    plans = [
        RunPlan(name="", seed=seed, shards=2, lr=OPTIONS.lr, **fields)  # type: ignore[arg-type]
        for fields in (settings, alone)
        for seed in (0, 1)
    ]
    together_0, together_1, alone_0, alone_1 = trained_by_stack(*plans)

    assert max(together_0 / alone_0, together_1 / alone_1) < 0.995


def test_samples_have_the_outer_step_of_the_defaults() -> None:
    """Specs, scripts and pages: a copy of any of them begins with what was measured."""
    default = Outer(rounds=1)
    texts = {str(path.relative_to(ROOT)): path.read_text() for glob in SAMPLES for path in ROOT.glob(glob)}
    assert len(texts) > 50
    rates, momenta = (
        {name: re.findall(of, text) for name, text in texts.items()} for of in (OUTER_RATE, OUTER_MOMENTUM)
    )
    assert min(sum(map(len, figures.values())) for figures in (rates, momenta)) > 20
    others = {name for name, of_text in rates.items() if any(float(rate) != default.lr for rate in of_text)}
    others |= {name for name, of_text in momenta.items() if any(float(value) != default.momentum for value in of_text)}
    assert others == OTHER_OUTER_STEPS.keys()


def test_data_parallel_steps_with_the_mean_of_all_gradients() -> None:
    plan = RunPlan(name="", seed=0, rounds=[whole(4)] * 2, shards=4, lr=OPTIONS.lr, synchronous=True)
    options = argparse.Namespace(**{**MODEL, "seed": 0})
    model, files = train.build(options), train.sources()[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIONS.lr)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        for index in range(4):
            text_N = train.text(files[index::4])
            (train.loss_of(model, train.batch(text_N, index, step, options)) / 4).backward()
        optimizer.step()

    assert trained_by_stack(plan) == pytest.approx([held_out(model)], rel=1e-4)


def test_slow_replica_contributes_a_share_of_its_steps_in_most_rounds() -> None:
    rounds = simulate((20.0, 80.0), rounds=200, sync_every=24, min_replicas=1, grace=Grace())

    assert all(closed.steps[0] == 24 for closed in rounds)
    assert all(closed.weights[1] == closed.steps[1] / 24 < 1 for closed in rounds)
    assert sum(closed.steps[1] > 0 for closed in rounds) >= len(rounds) * 5 / 6
    assert rounds[:20] == simulate((20.0, 80.0), rounds=20, sync_every=24, min_replicas=1, grace=Grace())


def test_long_run_is_put_together_from_several() -> None:
    rounds = simulate((20.0, 20.0), rounds=30, sync_every=24, min_replicas=2, grace=Grace())

    assert len(rounds) == 30
    assert all(later.closed_s > earlier.closed_s for earlier, later in itertools.pairwise(rounds))


def test_encoding_is_the_bits_that_the_other_replicas_read() -> None:
    delta_N = torch.randn(1000, generator=torch.Generator().manual_seed(0))

    assert torch.equal(encoding("bf16")(delta_N), delta_N.bfloat16().float())
    assert torch.equal(encoding("none")(delta_N), delta_N)


@pytest.mark.parametrize("codec", BLOCKS)
def test_published_average_has_the_bits_of_reduce_scatter(codec: Codec) -> None:
    fleet = Fleet(Index((TensorSpec("delta", "float32", (50_000,)),), codec), 4)
    (result,), _ = fleet.reduce("r-0", patient=False)
    plan = with_codec(RunPlan(name="", seed=0, rounds=[whole(4)], shards=4, lr=OPTIONS.lr), codec)
    assert plan.encoded is not None
    mean_N = sum((plan.encoded(row[0]) for row in fleet.rows), torch.zeros(50_000)) / 4
    assert torch.equal(result, mean_N if plan.published is None else plan.published(mean_N))


def test_outer_step_is_taken_with_the_published_average() -> None:
    plan = RunPlan(name="", seed=0, rounds=[whole(2)], shards=2, lr=OPTIONS.lr)
    dropped, same = replace(plan, published=torch.zeros_like), replace(plan, published=torch.clone)
    first, trained = held_out(train.build(argparse.Namespace(**{**MODEL, "seed": 0}))), trained_by_stack(plan)
    assert trained_by_stack(dropped) == pytest.approx([first]) != trained
    assert trained_by_stack(same) == trained


def test_readme_and_its_picture_have_the_figures_of_the_results() -> None:
    """After `scripts/bench quality --results docs/quality.json --plot docs/quality.svg`."""
    document = TypeAdapter(Document).validate_json((ROOT / "docs/quality.json").read_bytes())
    files = ("README.md", "docs/quality.svg", "runtime/README.md")
    readme, picture, manual = ((ROOT / name).read_text().replace("**", "") for name in files)
    results = {result.arm: result for result in compare(document.arms, "data parallel")}

    assert {len(arm.losses) for arm in document.arms.values()} == {20}
    assert results.keys() >= {"one process", "skerry", "kills", "one replica"} | {f"codec {name}" for name in BLOCKS}
    assert max(results[name].high for name in results if name not in {"one replica", "codec sparse"}) <= 1.05
    for name, result in results.items():
        assert f"{result.ratio:.3f}" in picture
        if name != "data parallel":
            assert f"{result.ratio:.3f} ({result.low:.3f} to {result.high:.3f})" in readme, name
    for name, grid in (("data parallel", INNER), ("skerry", OUTER)):  # else better settings may lie beyond
        for key, value in results[name].settings.items():
            assert min(tried[key] for tried in grid) < value < max(tried[key] for tried in grid), (name, key)
    for result in compare(document.arms, "codec bf16"):
        if result.arm in {"skerry", *map("codec {}".format, BLOCKS), "codec sparse"} - {"codec bf16"}:
            assert f"{result.ratio:.4f} ({result.low:.4f} to {result.high:.4f})" in manual, result.arm


def test_interval_has_the_mean_in_it() -> None:
    low, high = interval([0.0, 0.1, 0.2, 0.3])

    assert 0.0 <= low < 0.15 < high <= 0.3
