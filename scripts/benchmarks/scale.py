"""One outer exchange of 2 to 1,000 replicas in virtual time, with the shipped code: seconds, bytes, requests, memory.

    scripts/bench scale [--replicas 2 4 8 16] [--codec int8] [--reduction reduce_scatter all_gather auto]
                        [--megabytes 40] [--mbit 50] [--rtt 30] [--plot FILE] [--json]

Every replica is behind a link of its own to one store in memory (see common/virtual_link.py). All begin to contribute
at the same moment; an exchange is over when the last one has its average and the round is closed. Round 0 waits for
replicas to appear, so round 1 is measured; with auto round 2, because round 1 may be the first with another reduction.
Figures are of the busiest replica. Computing takes no time: what is measured is the schedule of requests, and how much
of it is waiting.

of_ideal   the time in which the link carries the bytes of the schedule without any round trip (see wan.py), as a share
memory     buffers of the exchange beyond the contribution itself, and the answers of the store that it holds at once
rss        resident memory of this process at its peak, less that before the first exchange and less what the store got
           since, with the encoded contribution: the part of a replica, for all of them have their peaks together

All replicas have the same tensor in one place, so that a thousand of them fit this machine. 16 replicas take a
minute; more of them, up to 1,000, take N times as long.
"""
# ruff: noqa: PLC0415  loads what it measures late
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch
from common.options import picture
from common.virtual_link import Link, LinkStore, Traffic, fibers_for_threads

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the simulation is part of the tests

from tests.simulation.scenario import calm
from tests.simulation.search import quiet
from tests.simulation.session import join_simulated_run
from tests.simulation.world import Process, SimulatedClock, World

from skerry.runtime.log.records import GENESIS, Codec, Reduction
from skerry.runtime.protocol.exchange_view import ExchangeId
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.obstore_clients import REMOTE
from skerry.runtime.training.work_counter import Trained

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS = 2
START_S = 100.0
"""Of virtual time between two rounds: all replicas have joined, or closed the last one."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One exchange. megabytes: of float32."""

    replicas: int
    codec: Codec
    reduction: Literal["auto"] | Reduction
    megabytes: float
    mbit: float
    rtt_s: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of the busiest replica, in the measured round. to_float32: of what an all-gather of float32 reads."""

    replicas: int
    codec: Codec
    reduction: Reduction
    seconds: float
    ideal_s: float
    of_ideal: float
    uploaded_mb: float
    downloaded_mb: float
    to_float32: float
    reads: int
    writes: int
    memory_mb: float
    rss_mb: float
    phases: dict[str, float]
    simulated_in_s: float


@dataclass(kw_only=True)
class _Finished:
    """One replica's measured round."""

    seconds: float
    traffic: Traffic
    memory_bytes: int
    phases: dict[str, float]
    reduction: Reduction


def measure(case: Case) -> Result:
    """Simulate the exchange. Raises RuntimeError if a replica does not finish."""
    from wan import ideal_s

    began = time.perf_counter()
    rounds = ROUNDS + (case.reduction == "auto")
    world, engine = World(0), MemoryStore("memory://scale")
    tensor = torch.randn(int(case.megabytes * 1e6) // 4, generator=torch.Generator().manual_seed(0))
    first = tensor.clone()
    scenario = calm(case.replicas, rounds=rounds, min_replicas=case.replicas, heartbeat_s=5.0, deadline_s=3600.0)
    forced = None if case.reduction == "auto" else case.reduction
    terms = replace(scenario.terms, codec=case.codec, reduction=forced, propose_delay_s=None)
    settings = replace(
        scenario.settings[0], terms=terms, run=scenario.run.model_copy(update={"layout": 2, "codec": case.codec})
    )
    finished: list[_Finished] = []
    resident: list[int] = []

    def train(process: Process, link: Link) -> None:
        clock = SimulatedClock(world, 0.0, 1.0)
        session = join_simulated_run(process, LinkStore(world, engine, link, REMOTE), settings, clock)
        base, phases, reduction = GENESIS, dict[str, float](), forced
        for number in range(rounds):
            world.sleep(START_S * (number + 1) - world.now)
            if world.now == START_S * (number + 1):
                tensor.copy_(first)
            link.traffic = Traffic()
            if not resident:
                resident.extend([reset_peak(), stored_bytes(engine)])
            batch = session.batch()
            batch.add(tensor, "avg")
            place = ExchangeId(number, 0, base)
            average = session.averager.run(place, batch, trained=Trained(tokens=1, inner_steps=1))
            phases, reduction = average.seconds, average.decision.record.reduction
            base = session.exchange.close(
                place, [average.decision], work=float(number + 1), averages=[average.digest]
            ).digest
        ended = _Finished(
            seconds=world.now - START_S * rounds,
            traffic=link.traffic,
            # The product itself has no use for the size of its buffers.
            memory_bytes=session.averager._workspace.allocated_bytes + link.traffic.most_held_bytes,  # noqa: SLF001
            phases=phases,
            reduction=reduction or "all_gather",
        )
        finished.append(ended)
        process.over()

    with quiet(), fibers_for_threads(world):
        for slot in scenario.slots:
            process, link = Process(world, slot, slot), Link(rate=case.mbit * 1e6 / 8, rtt_s=case.rtt_s)
            process.spawn(lambda process=process, link=link: train(process, link))
        ended = world.run(START_S * (rounds + 1) + 3600, sys.maxsize)
        world.close()
    if len(finished) < case.replicas:
        raise RuntimeError(f"only {len(finished)} of {case.replicas} replicas have finished: {ended}")
    beyond = memory("VmHWM") - resident[0] - (stored_bytes(engine) - resident[1])
    slowest = max(finished, key=lambda replica: replica.seconds)
    ideal = ideal_s(case.codec, slowest.reduction, case.replicas, tensor.numel(), case.mbit)
    downloaded = max(each.traffic.downloaded_bytes for each in finished)
    return Result(
        replicas=case.replicas,
        codec=case.codec,
        reduction=slowest.reduction,
        seconds=round(slowest.seconds, 3),
        ideal_s=round(ideal, 3),
        of_ideal=round(ideal / slowest.seconds, 3),
        uploaded_mb=round(max(each.traffic.uploaded_bytes for each in finished) / 1e6, 2),
        downloaded_mb=round(downloaded / 1e6, 2),
        to_float32=round(4 * tensor.numel() * (case.replicas - 1) / downloaded, 2),
        reads=max(each.traffic.reads for each in finished),
        writes=max(each.traffic.writes for each in finished),
        rss_mb=round(beyond / case.replicas / 1e6, 1),
        memory_mb=round(max(each.memory_bytes for each in finished) / 1e6, 1),
        phases={name: round(seconds, 3) for name, seconds in slowest.phases.items()},
        simulated_in_s=round(time.perf_counter() - began, 1),
    )


def _alone(case: Case) -> Result:
    """Measure in a process of its own: pages that an earlier case has freed would hide what this one takes."""
    torch.set_num_threads(1)
    return measure(case)


def stored_bytes(store: MemoryStore) -> int:
    """The bytes of all objects."""
    return sum(entry.size for entry in store.list(""))


def reset_peak() -> int:
    """Reset the high-water mark of resident memory; the memory that is resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(field: str) -> int:
    """Bytes of a field of this process's status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def describe(result: Result) -> str:
    """One line."""
    phases = "  ".join(f"{name} {seconds:g}" for name, seconds in result.phases.items())
    return (
        f"N={result.replicas:<4} {result.codec:6} {result.reduction:14} {result.seconds:8.2f} s  "
        f"{result.of_ideal:4.0%} of ideal  up {result.uploaded_mb:6.1f} MB  down {result.downloaded_mb:7.1f} MB "
        f"({result.to_float32:.1f}x less than float32)  {result.reads} reads  {result.writes} writes  "
        f"{result.memory_mb:.0f} MB of buffers and answers  {result.rss_mb:.0f} MB resident  {phases}"
    )


def draw(results: Sequence[Result], path: Path, title: str) -> None:
    """Seconds, bytes read and requests by the number of replicas; a line for each codec and reduction."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    lines = dict.fromkeys((result.codec, result.reduction) for result in results)
    for panel, (name, label) in zip(
        panels, {"seconds": "seconds", "downloaded_mb": "MB read by a replica", "reads": "reads"}.items(), strict=True
    ):
        for codec, reduction in lines:
            chosen = [result for result in results if (result.codec, result.reduction) == (codec, reduction)]
            panel.loglog(
                [result.replicas for result in chosen],
                [getattr(result, name) for result in chosen],
                "o-",
                markersize=3,
                label=f"{reduction}, {codec}",
            )
        panel.set_xlabel("replicas")
        panel.set_title(label, fontsize=9)
    panels[0].legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8, 16], help="up to 1000; default: 2 4 8 16")
    parser.add_argument("--codec", nargs="+", choices=get_args(Codec), default=["int8"])
    parser.add_argument(
        "--reduction", nargs="+", choices=["auto", *get_args(Reduction)], default=["reduce_scatter", "all_gather"]
    )
    parser.add_argument("--megabytes", type=float, default=40, help="of float32; default: 40")
    parser.add_argument("--mbit", type=float, default=50, help="each direction of each link; default: 50")
    parser.add_argument("--rtt", type=float, default=30, help="milliseconds; default: 30")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="a picture, .svg or .png")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    options = parser.parse_args()
    results: list[Result] = []
    for codec, reduction, replicas in product(options.codec, options.reduction, options.replicas):
        if codec == "sparse" and reduction == "reduce_scatter":  # there is no such exchange
            continue
        case = Case(
            replicas=replicas,
            codec=codec,
            reduction=reduction,
            megabytes=options.megabytes,
            mbit=options.mbit,
            rtt_s=options.rtt / 1000,
        )
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            results.append(fresh.submit(_alone, case).result())
        if not options.json:
            print(describe(results[-1]), flush=True)
    title = (
        f"{options.megabytes:g} MB of float32, links of {options.mbit:g} Mbit/s and {options.rtt:g} ms, virtual time"
    )
    if options.plot is not None:
        draw(results, options.plot, title)
    if options.json:
        print(json.dumps({"benchmark": "scale", "title": title, "results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
