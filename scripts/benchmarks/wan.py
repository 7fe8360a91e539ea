"""One outer exchange over a slow link, and how near it is to the ideal: ours by both reductions, and torchft with gloo.

    scripts/bench wan [--mbit 50] [--rtt 30] [--replicas 4] [--megabytes 40] [--codec NAME...] [--turns 3]
                      [--hidden] [--plot FILE] [--json]

Each replica has a link of its own to an S3 server on this machine (see common/link.py: needs root). An exchange takes
as long as its slowest replica; the best of all turns counts, because the machine only ever adds time. ideal: the time
in which the link carries the bytes of the schedule, each step after the one before it, without any round trip:

all_gather       mine up, then the others' down
reduce_scatter   mine up, then the others' of my units down, then the others' reduced units down
torchft          2 (N-1)/N of float32 in each direction, at once; its Manager and gloo connect the replicas directly

--hidden instead trains with DiLoCo and one fragment of --megabytes in flight behind --delay inner steps of half a
second, and shows the share of an exchange that training did not wait for, by the receipts (common/behind_training.py).
"""
# ruff: noqa: S101, PLC0415  a benchmark asserts, and loads what it measures late

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from common import behind_training
from common.behind_training import FRAGMENTS, Hidden, HiddenCase
from common.link import Rate, address, enter, hub, links
from common.options import picture

from skerry.runtime.tensors.byte_layout import Index, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from multiprocessing.synchronize import Barrier
    from typing import TypeAlias

    from skerry.runtime.log.records import Codec, Reduction

    Exchange: TypeAlias = Callable[[torch.Tensor], tuple[int, int, dict[str, float]]]

ROOT: Final = Path(__file__).resolve().parents[2]
WARM_UP: Final = 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """One contestant. codec: None is torchft. place: of the S3 server or the Lighthouse, its port."""

    codec: Codec | None
    reduction: Reduction
    replicas: int
    elements: int
    turns: int
    port: int

    @property
    def name(self) -> str:
        """For people."""
        return "torchft, gloo" if self.codec is None else f"{self.reduction}, {self.codec}"


def ideal_s(codec: Codec | None, reduction: Reduction, replicas: int, elements: int, mbit: float) -> float:
    """The seconds in which the link carries the bytes of the schedule; see above."""
    others = (replicas - 1) / replicas
    mine = sum(Index((TensorSpec("t", "float32", (elements,)),), codec or "none").wire_bytes)
    reduced = mine if codec in {None, "none", "bf16"} else elements * 256 / 254
    steps = {"all_gather": mine + (replicas - 1) * mine, "reduce_scatter": mine + others * (mine + reduced)}
    sent = 2 * others * mine if codec is None else steps[reduction]
    return sent * 8 / (mbit * 1e6)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Seconds of an exchange. bytes: up and down of the busiest replica."""

    name: str
    seconds: float
    ideal_s: float
    of_ideal: float
    megabytes: float
    requests: int
    phases: dict[str, float]


def replica(case: Case, rank: int, barrier: Barrier, results: multiprocessing.Queue[object]) -> None:
    """One process, behind its link."""
    enter(rank)
    torch.set_num_threads(1)
    exchange = _torchft(case, rank) if case.codec is None else _ours(case, rank)
    tensor = torch.empty(case.elements)
    for turn in range(-WARM_UP, case.turns):
        tensor.fill_(float(rank + 1))
        barrier.wait()
        began = time.perf_counter()
        moved, requests, phases = exchange(tensor)
        results.put((turn, time.perf_counter() - began, moved, requests, phases))
        expected = (case.replicas + 1) / 2
        assert bool(((tensor - expected).abs() <= 0.6 * expected).all()), "wrong average"
        barrier.wait()
    os._exit(0)  # neither side's threads are of interest


def _ours(case: Case, rank: int) -> Exchange:
    from skerry.runtime.manager import ObjectStoreManager
    from skerry.runtime.store import open_store

    os.environ.update(
        AWS_ALLOW_HTTP="true",
        AWS_REGION="us-east-1",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",  # noqa: S106
        AWS_ENDPOINT_URL=f"http://{hub(rank)}:{case.port}",
    )
    store = open_store(f"s3://wan/{case.reduction}-{case.codec}")
    assert case.codec is not None
    manager = ObjectStoreManager(
        store,
        replica_id=f"r-{rank}",
        min_replica_size=case.replicas,
        timeout=timedelta(minutes=5),
        codec=case.codec,
        reduction=case.reduction,
    )

    def exchange(tensor: torch.Tensor) -> tuple[int, int, dict[str, float]]:
        before = store.usage
        manager.start_quorum()
        assert manager.allreduce(tensor).wait()
        assert manager.should_commit()
        spent = store.usage - before
        facts = manager.lifecycle.rounds._facts  # noqa: SLF001  the receipt's, before it is written
        return spent.uploaded_bytes + spent.downloaded_bytes, spent.requests, dict(facts.seconds) if facts else {}

    return exchange


def _torchft(case: Case, rank: int) -> Exchange:
    from torch.distributed import TCPStore
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    os.environ.update(GLOO_SOCKET_IFNAME="wan", RUST_LOG="error")
    rendezvous = TCPStore(address(rank), 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(minutes=5)),
        load_state_dict=lambda _: None,
        state_dict=dict,
        min_replica_size=case.replicas,
        use_async_quorum=False,
        replica_id=f"torchft_{rank}",
        store_addr=address(rank),
        store_port=rendezvous.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{hub(rank)}:{case.port}",
        hostname=address(rank),
        init_sync=False,
        timeout=timedelta(minutes=5),
    )

    def exchange(tensor: torch.Tensor) -> tuple[int, int, dict[str, float]]:
        manager.start_quorum()
        assert manager.allreduce(tensor).wait()
        assert manager.should_commit()
        return 0, 0, {"rendezvous_port": float(rendezvous.port)} if case.turns < 0 else {}

    return exchange


def run(case: Case, rate: Rate) -> Result:
    """All turns of one contestant."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(case.replicas), context.Queue()
    processes = [context.Process(target=replica, args=(case, rank, barrier, results)) for rank in range(case.replicas)]
    for process in processes:
        process.start()
    rows = [results.get(timeout=600) for _ in range(case.replicas * (case.turns + WARM_UP))]
    for process in processes:
        process.join(60)
    turns = [[row for row in rows if row[0] == turn] for turn in range(case.turns)]
    best = min(turns, key=lambda turn: max(row[1] for row in turn))
    slowest = max(best, key=lambda row: row[1])
    ideal = ideal_s(case.codec, case.reduction, case.replicas, case.elements, rate.mbit)
    return Result(
        name=case.name,
        seconds=round(slowest[1], 2),
        ideal_s=round(ideal, 2),
        of_ideal=round(ideal / slowest[1], 2),
        megabytes=round(max(row[2] for row in best) / 1e6, 1),
        requests=max(row[3] for row in best),
        phases={name: round(seconds, 2) for name, seconds in slowest[4].items()},
    )


@contextmanager
def server_for(codec: Codec | None) -> Generator[int]:
    """The S3 server, or torchft's Lighthouse; its port, on all addresses."""
    if codec is None:
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=2, join_timeout_ms=1000)
        yield int(lighthouse.address().rsplit(":", 1)[1])
        lighthouse.shutdown()
        return
    server = subprocess.Popen(  # noqa: S603  our own server
        [sys.executable, str(ROOT / "tests/support/s3server.py"), "--port", "0", "--host", "0.0.0.0"],  # noqa: S104
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    yield int(server.stdout.readline())
    server.kill()
    server.wait()


def describe(result: Result) -> str:
    """One line."""
    phases = "  ".join(f"{name} {seconds:g}" for name, seconds in result.phases.items())
    return (
        f"{result.name:22} {result.seconds:6.2f} s  {result.of_ideal:4.0%} of ideal  {result.megabytes:6.1f} MB  "
        f"{result.requests:4} requests  {phases}"
    )


def draw(results: Sequence[Result], path: Path, title: str) -> None:
    """A bar for each contestant, and a mark at its ideal."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.42 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    rows = range(len(results))
    panel.barh(rows, [result.seconds for result in results], color="#9ecae1")
    panel.plot([result.ideal_s for result in results], rows, "|", markersize=18, color="#08519c")
    panel.set_yticks(rows, [result.name for result in results])
    panel.invert_yaxis()
    panel.set_xlabel("seconds; the line is the ideal of the schedule")
    panel.set_title(title, fontsize=9)
    figure.savefig(path, dpi=120)


def hide(options: argparse.Namespace, rate: Rate, chosen: Sequence[tuple[Codec | None, Reduction]]) -> None:
    """Measure and show how much of an exchange training hides."""
    results: list[Hidden] = []
    with links(options.replicas, rate):
        for codec, reduction in chosen:
            assert codec is not None
            with server_for(codec) as port:
                case = HiddenCase(
                    codec=codec,
                    reduction=reduction,
                    replicas=options.replicas,
                    elements=int(options.megabytes * 1e6) // 4,
                    rounds=options.rounds,
                    steps=options.delay + 2,
                    delay=options.delay,
                    step_s=0.5,
                    port=port,
                )
                results.append(behind_training.measure(case))
            if not options.json:
                print(behind_training.describe(results[-1]), flush=True)
    if options.json:
        title = (
            f"{options.replicas} replicas, {FRAGMENTS} fragments of {options.megabytes:g} MB, {options.mbit:g} Mbit/s, "
            f"{options.rtt:g} ms"
        )
        print(json.dumps({"benchmark": "wan", "title": title, "results": [vars(result) for result in results]}))


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=50, help="each direction of each link; default: 50")
    parser.add_argument("--rtt", type=float, default=30, help="milliseconds; default: 30")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=40, help="of float32; default: 40")
    parser.add_argument(
        "--codec", nargs="*", choices=["none", "bf16", "int8", "int4", "int2", "sparse"], default=["int8", "int4"]
    )
    parser.add_argument(
        "--reduction", nargs="*", choices=["reduce_scatter", "all_gather"], default=["reduce_scatter", "all_gather"]
    )
    parser.add_argument("--torchft", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--turns", type=int, default=3, help="exchanges of each contestant; default: 3")
    parser.add_argument("--hidden", action="store_true", help="measure how much training hides")
    parser.add_argument("--rounds", type=int, default=6, help="of --hidden; default: 6")
    parser.add_argument("--delay", type=int, default=24, help="inner steps of --hidden behind an exchange; default: 24")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="a picture, .svg or .png")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    options = parser.parse_args()
    if "sparse" in options.codec and not options.hidden:
        parser.error("sparse is for DiLoCo; add --hidden")
    rate = Rate(mbit=options.mbit, rtt_s=options.rtt / 1000)
    chosen: list[tuple[Codec | None, Reduction]] = [
        (codec, reduction)
        for codec in options.codec
        for reduction in options.reduction
        if codec != "sparse" or reduction == "all_gather"  # there is no other exchange of it
    ]
    if options.hidden:
        hide(options, rate, chosen)
        return
    if options.torchft:
        chosen.append((None, "all_gather"))
    results: list[Result] = []
    with links(options.replicas, rate):
        for codec, reduction in chosen:
            with server_for(codec) as port:
                case = Case(
                    codec=codec,
                    reduction=reduction,
                    replicas=options.replicas,
                    elements=int(options.megabytes * 1e6) // 4,
                    turns=options.turns,
                    port=port,
                )
                results.append(run(case, rate))
            if not options.json:
                print(describe(results[-1]), flush=True)
    title = f"{options.replicas} replicas, {options.megabytes:g} MB, {options.mbit:g} Mbit/s, {options.rtt:g} ms"
    if options.plot is not None:
        draw(results, options.plot, title)
    if options.json:
        print(json.dumps({"benchmark": "wan", "title": title, "results": [vars(result) for result in results]}))


if __name__ == "__main__":
    main()
