"""Measures what training with skerry costs in quality: held-out loss at equal tokens, against training without it.

    scripts/bench quality [--results FILE] [--arm NAME...] [--codec NAME...] [--seeds 20] [--rounds 40]
                          [--sync-every 10] [--plot FILE] [--json]

All arms see as many tokens, but for the last; all have the same first weights, and replica i the same batches in all.

one process      one model sees the batches of all four replicas one after the other: four times as many steps
data parallel    four replicas average their gradients in every step
skerry           four replicas average their pseudo-gradients once a round (DiLoCo), codec none
codec NAME       the same with another codec, by reduce-scatter: of int8, int4 and int2 the average is quantized, too
kills            the same while replicas are killed (seeded, in a simulation of the shipped protocol): rounds close with
                 fewer replicas, or with a part of their steps, and more rounds make up for it (faults.make_up)
one replica      one of the four, alone: a quarter of the tokens in the same time. What averaging has to beat

Every arm is tuned the same way: on two seeds that are not in the figures, it is trained with each of its settings (the
inner learning rate, and of the arms with an outer step also its learning rate and momentum) and keeps the best ones.
With --codec only skerry, codec bf16 and the named codecs are compared, and the ratios are to codec bf16: what remains
is the noise that any other rounding makes.

--results FILE keeps what each arm measured, so that a run that was stopped continues, --arm adds an arm, and --plot
alone draws what is there. An arm that was measured with other options, or of another text, is refused.

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
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from common.options import picture
from common.simulated_rounds import Round, simulate
from common.stacked import MODEL, RunPlan, Stack, add_model_options, text_digest
from pydantic import TypeAdapter

from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.tensors.byte_layout import Index
from skerry.runtime.tensors.error_feedback import DECAY
from skerry.runtime.tensors.payload_encoder import encode, spec_of
from skerry.runtime.tensors.reduce import Source, average
from skerry.runtime.tensors.sum_by_pieces import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from skerry.runtime.log.records import Codec

REPLICAS, ROUND_S, TUNING_SEEDS, LOOKS = 4, 20.0, (1000, 1001), 8
BASE, CONTROL = "data parallel", "codec bf16"
CODECS: Sequence[Codec] = ("bf16", "int8", "int4", "int2", "sparse")
PUBLISHED: Sequence[Codec] = ("int8", "int4", "int2")
"""Their averages are published as int8, if they are made by reduce-scatter."""
ORDER = ("one process", BASE, "skerry", *(f"codec {codec}" for codec in CODECS), "kills", "one replica")
CURVES = {
    "one process": ("#7f7f7f", ":"),
    BASE: ("#1f3b73", "-"),
    "skerry": ("#d95f02", "-"),
    "kills": ("#c51b7d", "--"),
    "one replica": ("#7f7f7f", "-"),
}
KEPT = ("seeds", "rounds", "sync_every", *MODEL)
RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
STEPS = (  # outer learning rate and momentum
    (0.3, 0.5),
    (0.3, 0.7),
    (0.5, 0.3),
    (0.5, 0.5),
    (0.5, 0.7),
    (0.7, 0.3),
    (0.7, 0.5),
    (0.7, 0.7),
    (1.0, 0.0),
    (1.0, 0.5),
)
INNER: Sequence[Mapping[str, float]] = tuple({"lr": lr} for lr in RATES)
OUTER: Sequence[Mapping[str, float]] = tuple(
    {"lr": rate, "outer_lr": lr, "outer_momentum": momentum} for rate in RATES[1:] for lr, momentum in STEPS
)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train. settings: what it is tuned over. tuned: the settings that were best, once they are known."""

    name: str
    plan: RunPlan
    settings: Sequence[Mapping[str, float]]
    tuned: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of an arm. rounds: closed ones; short: of these, how many have less than all steps. published:
    averages were quantized, too.

    tokens: at each look, a share of data parallel's at its end. curve: the mean loss of the seeds there. losses: of
    each seed at the end.
    """

    settings: dict[str, float]
    rounds: int
    short: int
    tokens: list[float]
    losses: list[float]
    curve: list[float]
    cpu_seconds: float
    published: bool = False


@dataclass(frozen=True, kw_only=True)
class Document:
    """All measured arms, and what they have in common. text_sha256: another version of Python has another text."""

    text_sha256: str
    options: dict[str, float]
    arms: dict[str, Measured]


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
        **{_named(codec): (with_codec(plan, codec), OUTER) for codec in CODECS},
        "kills": (replace(plan, rounds=killed(steps, rounds)), OUTER),
        "one replica": (replace(plan, rounds=lone, synchronous=True), INNER),
    }
    wanted = {"skerry", CONTROL, *map(_named, options.codec)} if options.codec else named
    return [
        Arm(name=name, plan=replace(plan, name=name), settings=settings, tuned={})
        for name, (plan, settings) in named.items()
        if name in wanted
    ]


def with_codec(plan: RunPlan, codec: Codec) -> RunPlan:
    """The same with the contributions of this codec, and the averages that reduce-scatter publishes of them."""
    return replace(
        plan,
        encoded=encoding(codec),
        published=encoding("int8") if codec in PUBLISHED else None,
        feedback=DECAY * (codec == "sparse"),
    )


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


def losses(plans: Sequence[RunPlan], options: argparse.Namespace, what: str, looks: int = 1) -> list[list[float]]:
    """The held-out loss of each run, at `looks` times between its start and its end, and as the last one at its end."""
    stack = Stack(plans, options)
    ends = {stack.rounds * (look + 1) // looks for look in range(looks)}
    seen: list[list[float]] = []
    for number in range(stack.rounds):
        stack.round(number)
        if number + 1 in ends:
            seen.append(stack.held_out())
        print(f"\r{what}: round {number + 1} of {stack.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [list(run) for run in zip(*seen, strict=True)]


def tuned(arm: Arm, options: argparse.Namespace) -> Arm:
    """The arm with the settings that have the smallest mean loss on the seeds for tuning."""
    tries = list(itertools.product(arm.settings, TUNING_SEEDS))
    plans = [replace(arm.plan, seed=seed, **settings) for settings, seed in tries]  # type: ignore[arg-type]
    by_settings: dict[int, list[float]] = {}
    for (settings, _), (*_, loss) in zip(tries, losses(plans, options, f"tune {arm.name}"), strict=True):
        by_settings.setdefault(arm.settings.index(settings), []).append(loss)
    best = min(by_settings, key=lambda number: statistics.fmean(by_settings[number]))
    return replace(arm, tuned=arm.settings[best], plan=replace(arm.plan, **arm.settings[best]))  # type: ignore[arg-type]


def measure(arm: Arm, options: argparse.Namespace) -> Measured:
    """Tune the arm, then train all seeds of it."""
    began, ready = time.process_time(), tuned(arm, options)
    plans = [replace(ready.plan, seed=seed) for seed in range(options.seeds)]
    curves = losses(plans, options, f"train {arm.name}", LOOKS)
    rounds = ready.plan.rounds
    taken = [sum(sum(closed.steps) for closed in rounds[: len(rounds) * (look + 1) // LOOKS]) for look in range(LOOKS)]
    whole = options.rounds * options.sync_every * REPLICAS
    return Measured(
        settings=dict(ready.tuned),
        rounds=len(rounds),
        short=sum(closed.steps != rounds[0].steps for closed in rounds),
        tokens=[round(steps / whole, 4) for steps in taken],
        losses=[round(curve[-1], 5) for curve in curves],
        curve=[round(statistics.fmean(look), 4) for look in zip(*curves, strict=True)],
        cpu_seconds=round(time.process_time() - began, 1),
        published=arm.plan.published is not None,
    )


def interval(values: Sequence[float], draws: int = 10_000) -> tuple[float, float]:
    """The 95 % interval of the mean: percentiles of the means of seeded draws with replacement."""
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(len(values), (draws, len(values)), generator=generator)
    means = torch.tensor(values, dtype=torch.float64)[picked].mean(dim=1).sort().values
    return means[int(0.025 * draws)].item(), means[int(0.975 * draws) - 1].item()


def compare(measured: Mapping[str, Measured], against: str) -> list[Result]:
    """Each arm's losses to those of another arm, seed by seed."""
    results: list[Result] = []
    for name, arm in measured.items():
        logs = [math.log(mine / base) for mine, base in zip(arm.losses, measured[against].losses, strict=True)]
        low, high = interval(logs)
        results.append(
            Result(
                arm=name,
                base=against,
                loss=round(statistics.fmean(arm.losses), 4),
                ratio=round(math.exp(statistics.fmean(logs)), 4),
                low=round(math.exp(low), 4),
                high=round(math.exp(high), 4),
                tokens=arm.tokens[-1],
                settings=arm.settings,
                ratios=tuple(round(math.exp(value), 5) for value in logs),
            )
        )
    return results


def kept(path: Path | None, options: argparse.Namespace) -> Document:
    """The document at `path`, or an empty one. Raises SystemExit if other options or another text made it."""
    document = Document(text_sha256=text_digest(), options={name: getattr(options, name) for name in KEPT}, arms={})
    if path is None or not path.exists():
        return document
    read = TypeAdapter(Document).validate_json(path.read_bytes())
    if (read.text_sha256, read.options) != (document.text_sha256, document.options):
        raise SystemExit(f"{path}: measured with {read.options}, text {read.text_sha256[:12]}; name another file")
    return read


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


def draw(document: Document, path: Path) -> None:
    """The mean loss of each arm over its tokens, and its ratio to data parallel with a point for every seed."""
    import matplotlib as mpl  # noqa: PLC0415  needed here only
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    mpl.rcParams.update({"svg.hashsalt": "skerry", "svg.fonttype": "none", "font.size": 9})  # the same bytes every time
    results = [result for name in ORDER for result in compare(document.arms, BASE) if result.arm == name]
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    curves, ratios = figure.subplots(1, 2, width_ratios=(1, 1.15))
    for name, (color, line) in CURVES.items():
        if name not in document.arms:
            continue
        arm = document.arms[name]
        curves.plot(arm.tokens, arm.curve, line, color=color, marker=".", label=name, linewidth=1.6)
    curves.set(
        xlabel="tokens, of all replicas together (1: data parallel at its end)", ylabel="held-out loss, nats a byte"
    )
    curves.legend(frameon=False)
    for row, r in enumerate(results):
        color = CURVES[r.arm][0] if r.arm in CURVES else CURVES["skerry"][0]
        ratios.scatter(r.ratios, [row] * len(r.ratios), s=8, color=color, alpha=0.3, linewidths=0)
        off = [[r.ratio - r.low], [r.high - r.ratio]]
        ratios.errorbar([r.ratio], [row], xerr=off, fmt="o", color=color, markersize=4, capsize=3)
        text = f"{r.ratio:.3f}"
        ratios.annotate(
            text, (1, row), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points", va="center"
        )
    ratios.axvline(1.0, color="grey", linewidth=0.8)
    ratios.set_yticks(range(len(results)), [r.arm for r in results])
    ratios.invert_yaxis()
    ratios.set_xlabel("held-out loss at the end, ratio to data parallel (left is better)")
    for panel in (curves, ratios):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="x", color="#e5e5e5")
        panel.set_axisbelow(True)
    o = document.options
    figure.suptitle(
        f"4 replicas, {o['rounds']:g} rounds of {o['sync_every']:g} steps, {o['seeds']:g} paired seeds, 95 % intervals",
        fontsize=10,
    )
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Measure the arms that are not kept yet, then show all that the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="a picture of all arms, .png or .svg")
    parser.add_argument("--results", type=Path, metavar="FILE", help="a JSON file that keeps what was measured")
    parser.add_argument("--arm", nargs="+", choices=ORDER, default=[], help="measure only these")
    parser.add_argument("--seeds", type=int, default=20, help="how many; default: 20")
    parser.add_argument("--rounds", type=int, default=40, help="default: 40")
    parser.add_argument("--sync-every", type=int, default=10, help="inner steps of a round; default: 10")
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=[], help="compare only these, with bf16")
    add_model_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    document = kept(options.results, options)
    wanted = [arm for arm in arms(options) if not options.arm or arm.name in options.arm]
    for arm in wanted:
        known = document.arms.get(arm.name)
        if known is not None and known.published == (arm.plan.published is not None):
            continue
        document.arms[arm.name] = measure(arm, options)
        if options.results:
            options.results.write_text(json.dumps(asdict(document), indent=1) + "\n")
    against = CONTROL if options.codec else BASE
    if against not in document.arms:
        raise SystemExit(f"nothing to compare with: measure the arm {against!r}, too")
    if options.plot:
        draw(document, options.plot)
    results = compare(
        {arm.name: document.arms[arm.name] for arm in arms(options) if arm.name in document.arms}, against
    )
    if not options.json:
        print(describe(results))
        return
    cpu_s = sum(arm.cpu_seconds for arm in document.arms.values())
    facts = {"benchmark": "quality", "cores": os.cpu_count(), "cpu_seconds": round(cpu_s, 1)}
    facts |= {"text_sha256": document.text_sha256, "options": document.options}
    print(json.dumps({**facts, "results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
