"""Compares what a run may do with replicas of unlike speed, by the wall-clock time to a given loss.

    scripts/bench staleness [--seeds 6] [--rounds 60] [--only FLEET...] [--plot FILE] [--json]

Fleets: four replicas of speeds 1:1:2:4 and two of 1:4; the number is how much longer an inner step takes. Ways:

skerry      the defaults: a round waits for late replicas for a quarter of its length, and a slow replica ends its round
            early, to contribute in time the steps that it has, with their share as its weight
grace 2s    the same with `faults.grace: 2s`, a tenth of a round: enough where an upload takes less than a second
waiting     every round waits for every replica (min_replicas is the number of replicas), as data parallel does
dropping    a round closes as soon as the fast replicas have contributed; what slow ones have trained is not used

The steps that each replica contributes to a round, and the time at which it closes, come from a simulation of the
shipped protocol in virtual time (a round of the fastest replica takes 20 s). The training is real: a small GPT, the
same first weights and batches for all ways, so that ways are compared seed by seed. The outer optimizer is the default
of a spec.

time        seconds until the held-out loss is reached that the worst way has at its end, interpolated between rounds;
            all ways have the same time in all. ratio: to skerry's, mean over seeds, with its standard error
counted     share of the inner steps that each replica could take in that time which is in the average

What a replica trains without contributing it is not trained here: it would not change the shared model.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from common.options import picture
from common.simulated_rounds import Round, simulate
from common.stacked import RunPlan, Stack, add_model_options, text_digest

from skerry.runtime.protocol.quorum import Grace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

STEPS, ROUND_S = 24, 20.0
FLEETS: Mapping[str, tuple[int, ...]] = {"1:1:2:4": (1, 1, 2, 4), "1:4": (1, 4)}
WAYS = ("skerry", "grace 2s", "waiting", "dropping")


def rounds_of(way: str, speeds: Sequence[int], count: int) -> list[Round]:
    """The rounds of a way that close within the time of `count` rounds of the fastest replica."""
    fast = speeds.count(min(speeds))
    settings = {
        "skerry": {"min_replicas": 1, "grace": Grace()},
        "grace 2s": {"min_replicas": 1, "grace": Grace(cap_s=2.0)},
        "waiting": {"min_replicas": len(speeds), "grace": Grace()},
        "dropping": {"min_replicas": fast, "grace": Grace(floor_s=0.5, cap_s=0.5, share=0.0), "ends_early": False},
    }[way]
    train_s = [ROUND_S * speed for speed in speeds]
    rounds = simulate(train_s, rounds=count, sync_every=STEPS, **settings)  # type: ignore[arg-type]
    return [closed for closed in rounds if closed.closed_s <= count * ROUND_S]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One way of a fleet. curve: mean held-out loss by the time at which a round closed."""

    fleet: str
    way: str
    rounds: int
    seconds: float
    ratio: float
    error: float
    loss: float
    counted: tuple[float, ...]
    curve: tuple[tuple[float, float], ...]


def reached(curve: Sequence[tuple[float, float]], target: float) -> float:
    """The time at which a curve is first at or below the target; interpolated."""
    before = curve[0]
    for point in curve:
        if point[1] <= target:
            span = before[1] - point[1]
            return point[0] if span <= 0 else before[0] + (point[0] - before[0]) * (before[1] - target) / span
        before = point
    raise ValueError(f"the loss {target} is not reached")


def compare(fleet: str, options: argparse.Namespace) -> list[Result]:
    """Train all ways of a fleet for all seeds, as one stack."""
    speeds = FLEETS[fleet]
    rounds = {way: rounds_of(way, speeds, options.rounds) for way in WAYS}
    plans = [
        RunPlan(name=way, seed=seed, rounds=rounds[way], shards=len(speeds), lr=options.lr)
        for way in WAYS
        for seed in range(options.first, options.first + options.seeds)
    ]
    stack = Stack(plans, options)
    curves: list[list[tuple[float, float]]] = [[(0.0, loss)] for loss in stack.held_out()]
    for number in range(stack.rounds):
        stack.round(number)
        for plan, curve, loss in zip(plans, curves, stack.held_out(), strict=True):
            if number < len(plan.rounds):
                curve.append((plan.rounds[number].closed_s, loss))
        print(f"\r{fleet}: round {number + 1} of {stack.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [_result(fleet, way, rounds[way], plans, curves, options) for way in WAYS]


def _result(
    fleet: str,
    way: str,
    rounds: Sequence[Round],
    plans: Sequence[RunPlan],
    curves: Sequence[Sequence[tuple[float, float]]],
    options: argparse.Namespace,
) -> Result:
    by_seed: dict[int, dict[str, Sequence[tuple[float, float]]]] = {}
    for plan, curve in zip(plans, curves, strict=True):
        by_seed.setdefault(plan.seed, {})[plan.name] = curve
    times: list[float] = []
    ratios: list[float] = []
    for of_seed in by_seed.values():
        target = max(min(loss for _, loss in curve) for curve in of_seed.values())
        times.append(reached(of_seed[way], target))
        ratios.append(times[-1] / reached(of_seed["skerry"], target))
    mine = [of_seed[way] for of_seed in by_seed.values()]
    speeds, end_s = FLEETS[fleet], options.rounds * ROUND_S
    counted = [
        sum(closed.steps[index] for closed in rounds) / (STEPS * end_s / (ROUND_S * speed))
        for index, speed in enumerate(speeds)
    ]
    return Result(
        fleet=fleet,
        way=way,
        rounds=len(rounds),
        seconds=round(statistics.fmean(times), 1),
        ratio=round(statistics.fmean(ratios), 3),
        error=round(statistics.stdev(ratios) / len(ratios) ** 0.5, 3) if len(ratios) > 1 else 0.0,
        loss=round(statistics.fmean(curve[-1][1] for curve in mine), 4),
        counted=tuple(round(share, 3) for share in counted),
        curve=tuple(
            (round(points[0][0], 1), round(statistics.fmean(loss for _, loss in points), 4))
            for points in zip(*mine, strict=True)
        ),
    )


def describe(results: Sequence[Result]) -> str:
    """The results as a table."""
    lines = [f"{'fleet':8} {'way':9} {'rounds':>6} {'seconds':>8} {'ratio':>16} {'loss':>7}  counted of each replica"]
    for r in results:
        counted = ", ".join(f"{share:.0%}" for share in r.counted)
        ratio = f"{r.ratio:.3f} +- {r.error:.3f}"
        lines.append(f"{r.fleet:8} {r.way:9} {r.rounds:6} {r.seconds:8.1f} {ratio:>16} {r.loss:7.4f}  {counted}")
    return "\n".join(lines)


def draw(results: Sequence[Result], path: Path) -> None:
    """One panel a fleet: the loss of each way over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  matplotlib is needed here only
    from matplotlib.figure import Figure  # noqa: PLC0415

    fleets = list(dict.fromkeys(result.fleet for result in results))
    figure = Figure(figsize=(5 * len(fleets), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for fleet, panel in zip(fleets, figure.subplots(1, len(fleets), squeeze=False)[0], strict=True):
        for result in results:
            if result.fleet == fleet:
                later = result.curve[len(result.curve) // 10 + 1 :]
                panel.plot([at for at, _ in later], [loss for _, loss in later], label=result.way)
        panel.set_title(f"speeds {fleet}")
        panel.set_xlabel("seconds (simulated)")
        panel.set_ylabel("held-out loss, nats a byte")
        panel.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--only", nargs="+", choices=list(FLEETS), default=list(FLEETS))
    parser.add_argument("--plot", type=picture, metavar="FILE", help="a picture of the curves, .png or .svg")
    parser.add_argument("--seeds", type=int, default=6, help="how many; default: 6")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--rounds", type=int, default=60, help="of the fastest replica, all alone; default: 60")
    add_model_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, cpu = time.perf_counter(), time.process_time()
    results = [result for fleet in options.only for result in compare(fleet, options)]
    if options.plot:
        draw(results, options.plot)
    if not options.json:
        print(describe(results))
        return
    document = {
        "benchmark": "staleness",
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
