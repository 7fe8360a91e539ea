"""Measures what training with skerry costs in quality: held-out loss at equal tokens, against training without it.

    scripts/bench quality [--seeds 20] [--rounds 40] [--sync-every 20] [--codec NAME...] [--plot FILE] [--json]

All arms see as many tokens, but for the last; all have the same first weights, and replica i the same batches in all.

one process      one model sees the batches of all four replicas one after the other: four times as many steps
data parallel    four replicas average their gradients in every step
skerry           four replicas average their pseudo-gradients once a round (DiLoCo), codec none
codec NAME       the same with another codec: the bytes that a contribution of it has
kills            the same while replicas are killed (seeded, in a simulation of the shipped protocol): rounds close with
                 fewer replicas, or with a part of their steps, and more rounds make up for it (faults.make_up)
one replica      one of the four, alone: a quarter of the tokens in the same time. What averaging has to beat

Every arm is tuned the same way: on seeds that are not in the figures, it is trained with each of its settings (the
outer learning rate and momentum; for the arms without an outer step the inner learning rate) and keeps the best one.
With --codec only skerry, codec bf16 and the named codecs are compared, and the ratios are to codec bf16: what remains
is the noise that any other rounding makes.

The held-out loss is in nats a byte. The ratio of an arm to data parallel is the geometric mean over paired seeds, with
its 95 % interval (bootstrap). Seeds of one arm differ by several percent: three of them tell nothing below one
percent. The model is small and the run short, so the figures are of this toy, not of language models.
"""
# ruff: noqa: N803  tensor names end in their dims
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
from common.options import picture
from common.simulated_rounds import Round, simulate
from common.stacked import RunPlan, Stack, add_model_options, text_digest

from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.tensors.error_feedback import DECAY
from skerry.runtime.tensors.layout import Index
from skerry.runtime.tensors.payload_encoder import encode, spec_of
from skerry.runtime.tensors.piece_sums import Workspace
from skerry.runtime.tensors.reduce import Source, average

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from skerry.runtime.log.records import Codec

REPLICAS, ROUND_S, TUNING_SEEDS = 4, 20.0, (1000, 1001, 1002)
BASE, CONTROL = "data parallel", "codec bf16"
CODECS: Sequence[Codec] = ("bf16", "int8", "int4", "int2", "sparse")
OUTER: Sequence[Mapping[str, float]] = tuple(
    {"outer_lr": lr, "outer_momentum": momentum} for lr, momentum in itertools.product((0.5, 0.7, 1.0), (0.0, 0.5, 0.9))
)
INNER: Sequence[Mapping[str, float]] = tuple({"lr": lr} for lr in (1e-3, 2e-3, 4e-3, 8e-3))


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train. settings: what it is tuned over. tuned: the settings that were best, once they are known."""

    name: str
    plan: RunPlan
    settings: Sequence[Mapping[str, float]]
    tuned: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of one arm. ratio: of its loss to that of `base`; low, high: the 95 % interval. tokens: in the
    shared model, as a share of data parallel's.
    """

    arm: str
    base: str
    loss: float
    ratio: float
    low: float
    high: float
    tokens: float
    settings: Mapping[str, float]
    ratios: tuple[float, ...]


def arms(options: argparse.Namespace) -> list[Arm]:
    """Those that the options ask for, not tuned yet."""
    steps, rounds = options.sync_every, options.rounds
    whole = [_whole(steps, REPLICAS, number) for number in range(rounds)]
    plan = RunPlan(name="", seed=0, rounds=whole, shards=REPLICAS, lr=options.lr)
    lone = [_whole(steps, 1, number) for number in range(rounds)]
    rotating = [_whole(steps * REPLICAS, 1, number) for number in range(rounds)]
    named = {
        "one process": (replace(plan, rounds=rotating, synchronous=True, rotates=True), INNER),
        BASE: (replace(plan, synchronous=True), INNER),
        "skerry": (plan, OUTER),
        **{
            _named(codec): (replace(plan, encoded=encoding(codec), feedback=DECAY * (codec == "sparse")), OUTER)
            for codec in CODECS
        },
        "kills": (replace(plan, rounds=killed(steps, rounds)), OUTER),
        "one replica": (replace(plan, rounds=lone, synchronous=True), INNER),
    }
    wanted = {"skerry", CONTROL, *map(_named, options.codec)} if options.codec else named
    return [
        Arm(name=name, plan=replace(plan, name=name), settings=settings, tuned={})
        for name, (plan, settings) in named.items()
        if name in wanted
    ]


def _named(codec: Codec) -> str:
    return f"codec {codec}"


def _whole(steps: int, replicas: int, number: int) -> Round:
    return Round(closed_s=(number + 1) * ROUND_S, steps=(steps,) * replicas, weights=(1.0,) * replicas)


def killed(steps: int, rounds: int) -> list[Round]:
    """The rounds of four replicas with kills, until as many inner steps are counted as in `rounds` without kills."""
    due = steps * rounds * REPLICAS
    simulated = simulate(
        [ROUND_S] * REPLICAS, rounds=2 * rounds, sync_every=steps, min_replicas=2, grace=Grace(), crash=0.002
    )
    counted = itertools.accumulate(sum(closed.steps) for closed in simulated)
    return [closed for closed, total in zip(simulated, counted, strict=True) if total - sum(closed.steps) < due]


def encoding(codec: Codec) -> Callable[[Tensor], Tensor]:
    """The product's own encoding of a pseudo-gradient, and what a reader gets back."""

    def encoded(delta_N: Tensor) -> Tensor:
        index, result = Index((spec_of("delta", delta_N),), codec), torch.empty_like(delta_N)
        own = encode([delta_N], index)
        source = Source(slot="a", weight=1.0, round=0, parts=own.parts, local=own)
        average(MemoryStore(), [source], index, [result], workspace=Workspace())
        return result

    return encoded


def losses(plans: Sequence[RunPlan], options: argparse.Namespace, what: str) -> list[float]:
    """The held-out loss of each run at its end."""
    stack = Stack(plans, options)
    for number in range(stack.rounds):
        stack.round(number)
        print(f"\r{what}: round {number + 1} of {stack.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return stack.held_out()


def tuned(arm: Arm, options: argparse.Namespace) -> Arm:
    """The arm with the settings that have the smallest mean loss on the seeds for tuning."""
    tries = list(itertools.product(arm.settings, TUNING_SEEDS))
    plans = [replace(arm.plan, seed=seed, **settings) for settings, seed in tries]  # type: ignore[arg-type]
    by_settings: dict[int, list[float]] = {}
    for (settings, _), loss in zip(tries, losses(plans, options, f"tune {arm.name}"), strict=True):
        by_settings.setdefault(arm.settings.index(settings), []).append(loss)
    best = min(by_settings, key=lambda number: statistics.fmean(by_settings[number]))
    return replace(arm, tuned=arm.settings[best], plan=replace(arm.plan, **arm.settings[best]))  # type: ignore[arg-type]


def interval(values: Sequence[float], draws: int = 10_000) -> tuple[float, float]:
    """The 95 % interval of the mean: percentiles of the means of seeded draws with replacement."""
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(len(values), (draws, len(values)), generator=generator)
    means = torch.tensor(values, dtype=torch.float64)[picked].mean(dim=1).sort().values
    return means[int(0.025 * draws)].item(), means[int(0.975 * draws) - 1].item()


def measure(options: argparse.Namespace) -> list[Result]:
    """Tune every arm, then train all seeds of it."""
    seeds, against = range(options.seeds), CONTROL if options.codec else BASE
    ready = [tuned(arm, options) for arm in arms(options)]
    ends = {
        arm.name: losses([replace(arm.plan, seed=seed) for seed in seeds], options, f"train {arm.name}")
        for arm in ready
    }
    results: list[Result] = []
    for arm in ready:
        logs = [math.log(mine / base) for mine, base in zip(ends[arm.name], ends[against], strict=True)]
        low, high = interval(logs)
        taken = sum(sum(closed.steps) for closed in arm.plan.rounds)
        results.append(
            Result(
                arm=arm.name,
                base=against,
                loss=round(statistics.fmean(ends[arm.name]), 4),
                ratio=round(math.exp(statistics.fmean(logs)), 4),
                low=round(math.exp(low), 4),
                high=round(math.exp(high), 4),
                tokens=round(taken / (options.rounds * options.sync_every * REPLICAS), 3),
                settings=arm.tuned,
                ratios=tuple(round(math.exp(value), 5) for value in logs),
            )
        )
    return results


def describe(results: Sequence[Result]) -> str:
    """The results as a table."""
    against = f"to {results[0].base}"
    lines = [f"{'arm':14} {'tokens':>6} {'loss':>7} {against:>17} {'95 % interval':>17}  best settings"]
    for r in results:
        settings = ", ".join(f"{name}={value:g}" for name, value in r.settings.items())
        lines.append(
            f"{r.arm:14} {r.tokens:6.2f} {r.loss:7.4f} {r.ratio:17.4f} {f'{r.low:.4f} to {r.high:.4f}':>17}  {settings}"
        )
    return "\n".join(lines)


def draw(results: Sequence[Result], path: Path, options: argparse.Namespace) -> None:
    """Each arm's ratio to data parallel with its interval, and a point for every seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  matplotlib is needed here only
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 1.2 + 0.42 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for row, r in enumerate(results):
        panel.scatter(r.ratios, [row] * len(r.ratios), s=9, color="#9ecae1", zorder=1)
        panel.errorbar(
            [r.ratio],
            [row],
            xerr=[[r.ratio - r.low], [r.high - r.ratio]],
            fmt="o",
            color="#08519c",
            capsize=3,
            zorder=2,
        )
    panel.axvline(1.0, color="grey", linewidth=0.8)
    panel.set_yticks(range(len(results)), [r.arm for r in results])
    panel.invert_yaxis()
    panel.set_xlabel(f"held-out loss, ratio to {results[0].base} (left is better)")
    panel.set_title(
        f"4 replicas, {options.rounds} rounds of {options.sync_every} steps, {options.seeds} paired seeds", fontsize=9
    )
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="a picture of the ratios, .png or .svg")
    parser.add_argument("--seeds", type=int, default=20, help="how many; default: 20")
    parser.add_argument("--rounds", type=int, default=40, help="default: 40")
    parser.add_argument("--sync-every", type=int, default=20, help="inner steps of a round; default: 20")
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=[], help="compare only these, with bf16")
    add_model_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, cpu = time.perf_counter(), time.process_time()
    results = measure(options)
    if options.plot:
        draw(results, options.plot, options)
    if not options.json:
        print(describe(results))
        return
    document = {
        "benchmark": "quality",
        "cores": os.cpu_count(),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "text_sha256": text_digest(),
        "options": {name: value for name, value in vars(options).items() if name != "plot"},
        "results": [asdict(result) for result in results],
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
