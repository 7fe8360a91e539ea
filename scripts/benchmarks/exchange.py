"""One outer exchange, side by side in one run: ours, the naive way, torchft over loopback, and a raw copy.

    scripts/bench exchange [--stores file s3] [--replicas 2 4] [--codec NAME...] [--reduction NAME...] [--quick]
                           [--turns 9] [--plot FILE] [--json]

ours      ObjectStoreManager: start_quorum, one allreduce a tensor, wait, should_commit; --codec and --reduction are of
          ours alone
naive     what published skeletons do: one torch.save object per tensor and rank, polled once a second; every replica
          reads all objects, tensor after tensor
torchft   torchft's Manager with Lighthouse and ProcessGroupGloo on loopback (no store at all)
raw       the same bytes through the same store and nothing else: write mine as new objects, read the others' into a
          kept buffer

Contestants take turns in the same processes, so that what the machine does meanwhile hits all of them. An exchange
takes as long as its slowest replica. What a turn stored is deleted after it, so that every turn writes new objects and
none pays for memory that the machine never touched. Absolute times mean nothing; ratios are the result.
"""
# ruff: noqa: S101, D101, D102, D103, PLC0415  a benchmark asserts, explains itself above, and loads what it measures late

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import torch
from common.options import picture

from skerry.runtime.log import keys
from skerry.runtime.log.records import Reduction
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.store import Span, Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.synchronize import Barrier

    from skerry.runtime.log.records import Codec

ROOT = Path(__file__).resolve().parents[2]
MEGABYTE = 1_000_000
SHAPES = {"100x1MB": [MEGABYTE // 4] * 100, "1x100MB": [100 * MEGABYTE // 4]}
# The largest error of an average, to its value: all elements are equal, so two bits are half of one off. Sparse is for
# DiLoCo alone: see wan --hidden.
NAMES = ("store", "replicas", "shape", "codec", "reduction")
STEPS: Mapping[Codec, float] = {
    "none": 0.0,
    "bf16": 0.0,
    "int8": 1 / 127,
    "int4": 1 / 7,
    "int2": 0.6,
}
S3_ENVIRONMENT = {
    "AWS_ALLOW_HTTP": "true",
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "RUST_LOG": "error",  # torchft writes a page of logs for every quorum
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration. uri: a prefix of its own. torchft: address of the Lighthouse."""

    store: str
    uri: str
    replicas: int
    shape: str
    lighthouse: str
    naive: bool
    turns: int
    codec: Codec
    reduction: Literal["auto"] | Reduction


@dataclass(kw_only=True)
class Figures:
    """One replica's share of one exchange."""

    seconds: float
    cpu_seconds: float
    extra_bytes: int
    moved_bytes: int
    requests: int


class Contestant(Protocol):
    """Averages the tensors over all replicas, in place. Returns bytes moved and requests made, 0 where there are none.

    clean deletes what this replica stored in the last exchange.
    """

    def exchange(self, tensors: list[torch.Tensor]) -> tuple[int, int]: ...

    def clean(self) -> None: ...

    def close(self) -> None: ...


class Ours:
    def __init__(self, case: Case, rank: int) -> None:
        self._store, self._slot = open_store(f"{case.uri}/ours"), f"r-{rank}"
        self._manager = ObjectStoreManager(
            self._store,
            replica_id=self._slot,
            min_replica_size=case.replicas,
            timeout=timedelta(minutes=5),
            codec=case.codec,
            reduction=case.reduction,
        )

    def exchange(self, tensors: list[torch.Tensor]) -> tuple[int, int]:
        before = self._store.usage
        self._manager.start_quorum()
        for work in [self._manager.allreduce(tensor) for tensor in tensors]:
            assert work.wait()
        assert self._manager.should_commit()
        spent = self._store.usage - before
        return spent.uploaded_bytes + spent.downloaded_bytes, spent.requests

    def clean(self) -> None:
        for entry in self._store.list(keys.PAYLOADS):
            if f"/{self._slot}/" in entry.key:
                self._store.delete(entry.key)

    def close(self) -> None:
        self._manager.shutdown()


class Naive:
    """One object per tensor and rank, looked for once a second."""

    def __init__(self, case: Case, rank: int) -> None:
        self._store = open_store(f"{case.uri}/naive")
        self._replicas, self._rank, self._round = case.replicas, rank, 0

    def exchange(self, tensors: list[torch.Tensor]) -> tuple[int, int]:
        before = self._store.usage
        for i, tensor in enumerate(tensors):
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            self._store.replace(f"round_{self._round}/{i}/rank_{self._rank}.pt", buffer.getvalue())
            parts = [self._load(f"round_{self._round}/{i}/rank_{rank}.pt") for rank in range(self._replicas)]
            tensor.copy_(torch.stack(parts).mean(dim=0))
        self._round += 1
        spent = self._store.usage - before
        return spent.uploaded_bytes + spent.downloaded_bytes, spent.requests

    def _load(self, key: str) -> torch.Tensor:
        while (data := self._store.read(key)) is None:
            time.sleep(1.0)
        loaded: torch.Tensor = torch.load(io.BytesIO(bytes(data)), weights_only=True)
        return loaded

    def clean(self) -> None:
        pass

    def close(self) -> None:
        pass


class Torchft:
    def __init__(self, case: Case, rank: int) -> None:
        from torch.distributed import TCPStore
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        self._rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._manager: Manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
            load_state_dict=lambda _: None,
            state_dict=dict,
            min_replica_size=case.replicas,
            use_async_quorum=False,
            replica_id=f"torchft_{rank}",
            store_addr="127.0.0.1",
            store_port=self._rendezvous.port,
            rank=0,
            world_size=1,
            lighthouse_addr=case.lighthouse,
            hostname="127.0.0.1",
            init_sync=False,
        )

    def exchange(self, tensors: list[torch.Tensor]) -> tuple[int, int]:
        self._manager.start_quorum()
        for work in [self._manager.allreduce(tensor) for tensor in tensors]:
            assert work.wait()
        assert self._manager.should_commit()
        return 0, 0

    def clean(self) -> None:
        pass

    def close(self) -> None:
        self._manager.shutdown(wait=False)


class Raw:
    """Write my bytes as new objects, wait for the others', read theirs into a kept buffer. No digest, no sum."""

    def __init__(self, case: Case, rank: int, barrier: Barrier) -> None:
        self._store: Store = open_store(f"{case.uri}/raw")._store  # noqa: SLF001  the engine alone: only the bytes
        self._replicas, self._rank, self._round, self._barrier = case.replicas, rank, 0, barrier
        self._piece = torch.empty(self._store.profile.piece_bytes, dtype=torch.uint8)

    def exchange(self, tensors: list[torch.Tensor]) -> tuple[int, int]:
        views = [memoryview(t.view(torch.uint8).numpy()) for t in tensors]
        size, kept = sum(view.nbytes for view in views), memoryview(self._piece.numpy())
        self._store.create(f"{self._round}/{self._rank}", views)
        self._barrier.wait()
        requests = 1
        for other in range(self._replicas):
            for start in range(0, size if other != self._rank else 0, len(kept)):
                span = Span(start, min(size, start + len(kept)))
                result = self._store.read(f"{self._round}/{other}", span, kept)
                assert result is not None
                requests += 1
        self._round += 1
        return size * self._replicas, requests

    def clean(self) -> None:
        self._store.delete(f"{self._round - 1}/{self._rank}")

    def close(self) -> None:
        pass


def replica(
    case: Case, rank: int, barrier: Barrier, results: multiprocessing.Queue[tuple[int, str, int, Figures]]
) -> None:
    """One process: all contestants in turn, as often as the case says; the first turn of each warms up."""
    torch.set_num_threads(1)
    contestants: dict[str, Contestant] = {
        "raw": Raw(case, rank, barrier),
        "ours": Ours(case, rank),
        "torchft": Torchft(case, rank),
    }
    tensors = [torch.full((count,), float(rank + 1)) for count in SHAPES[case.shape]]
    expected = sum(range(1, case.replicas + 1)) / case.replicas
    for turn in range(-1, case.turns):
        for name, contestant in contestants.items():
            error = STEPS[case.codec] if name == "ours" else 0.0
            figures = measured(contestant, tensors, rank, barrier, None if name == "raw" else expected, error)
            results.put((rank, name, turn, figures))
    if case.naive:
        results.put((rank, "naive", 0, measured(Naive(case, rank), tensors, rank, barrier, expected)))
    barrier.wait()
    for contestant in contestants.values():
        contestant.close()


def measured(
    contestant: Contestant,
    tensors: list[torch.Tensor],
    rank: int,
    barrier: Barrier,
    expected: float | None,
    error: float = 0.0,
) -> Figures:
    for tensor in tensors:
        tensor.fill_(float(rank + 1))
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark of resident memory
    resident = memory("VmRSS")
    barrier.wait()
    began, cpu = time.perf_counter(), time.process_time()
    moved, requests = contestant.exchange(tensors)
    figures = Figures(
        seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - cpu,
        extra_bytes=max(0, memory("VmHWM") - resident),
        moved_bytes=moved,
        requests=requests,
    )
    barrier.wait()
    contestant.clean()
    if expected is not None:
        limit = error * expected
        assert all(bool(((tensor - expected).abs() <= limit).all()) for tensor in tensors), "wrong average"
    return figures


def memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def run(case: Case) -> dict[str, object]:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(case.replicas), context.Queue()
    processes = [context.Process(target=replica, args=(case, rank, barrier, results)) for rank in range(case.replicas)]
    for process in processes:
        process.start()
    expected = case.replicas * (3 * (case.turns + 1) + (1 if case.naive else 0))
    result = [results.get(timeout=600) for _ in range(expected)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0, f"a replica ended with {process.exitcode}"
    size = sum(SHAPES[case.shape]) * 4
    turns: dict[str, list[list[Figures]]] = {
        name: [
            [figures for _, n, turn, figures in result if (n, turn) == (name, number)]
            for number in range(1 if name == "naive" else case.turns)
        ]
        for name in ["ours", "raw", "torchft", *(["naive"] if case.naive else [])]
    }
    return {
        "store": case.store,
        "replicas": case.replicas,
        "shape": case.shape,
        "codec": case.codec,
        "reduction": case.reduction,
        "contestants": {name: summary(turns[name], size) for name in turns},
        "ours_to_raw": round(ratio(turns["ours"], turns["raw"]), 2),
        "ours_to_torchft": round(ratio(turns["ours"], turns["torchft"]), 2),
        **({"naive_to_ours": round(1 / ratio(turns["ours"], turns["naive"] * case.turns), 1)} if case.naive else {}),
    }


def ratio(ours: list[list[Figures]], foreign: list[list[Figures]]) -> float:
    """Median over turns of the slowest replica's seconds, ours to theirs in the same turn: what slows the machine for a
    while slows both.
    """
    return statistics.median(
        max(f.seconds for f in our) / max(f.seconds for f in their) for our, their in zip(ours, foreign, strict=True)
    )


def summary(turns: list[list[Figures]], size: int) -> dict[str, float]:
    """Medians over turns of the slowest (seconds) and the largest (the rest) replica."""

    def median(name: str) -> float:
        return statistics.median(max(asdict(f)[name] for f in turn) for turn in turns)

    return {
        "seconds": round(median("seconds"), 4),
        "seconds_min": round(min(max(f.seconds for f in turn) for turn in turns), 4),
        "cpu_seconds": round(median("cpu_seconds"), 4),
        "extra_memory_to_contribution": round(median("extra_bytes") / size, 2),
        "moved_to_contribution": round(median("moved_bytes") / size, 2),
        "requests": median("requests"),
    }


def cases(options: argparse.Namespace, folder: Path, s3: str, lighthouse: str) -> Iterator[Case]:
    bases = {"file": folder.as_uri(), "s3": s3}
    chosen = product(options.stores, options.replicas, SHAPES, options.codec, options.reduction)
    for store, replicas, shape, codec, reduction in chosen:
        yield Case(
            store=store,
            uri=f"{bases[store]}/{store}-{replicas}-{shape}-{codec}-{reduction}",
            replicas=replicas,
            shape=shape,
            lighthouse=lighthouse,
            naive=shape == "100x1MB" and not options.quick,
            turns=options.turns,
            codec=codec,
            reduction=reduction,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument("--quick", action="store_true", help="leave out the naive way (it takes minutes)")
    parser.add_argument("--turns", type=int, default=9, help="exchanges of each contestant and case")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--codec", nargs="+", choices=list(STEPS), default=["none"], help="of ours; default: none")
    reductions = ["auto", *get_args(Reduction)]
    parser.add_argument("--reduction", nargs="+", choices=reductions, default=["auto"], help="of ours; default: auto")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="a picture of the ratios, .svg or .png")
    parser.add_argument("--stores", nargs="+", choices=["file", "s3"], default=["file", "s3"])
    options = parser.parse_args()
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000)
    memory_disk = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  a folder of its own in it
    folder = Path(tempfile.mkdtemp(prefix="skerry-bench-", dir=memory_disk))
    server = subprocess.Popen(  # noqa: S603  our own server
        [sys.executable, str(ROOT / "tests/support/s3server.py"), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    os.environ.update(S3_ENVIRONMENT, AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.stdout.readline().strip()}")
    results: list[dict[str, object]] = []
    try:
        for case in cases(options, folder, "s3://bench", lighthouse.address()):
            results.append(run(case))
            shutil.rmtree(folder / case.uri.rsplit("/", 1)[-1], ignore_errors=True)
            if not options.json:
                print(describe(results[-1]), flush=True)
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
        lighthouse.shutdown()
    if options.plot is not None:
        draw(results, options.plot)
    if options.json:
        print(
            json.dumps({"benchmark": "exchange", "cores": os.cpu_count(), "turns": options.turns, "results": results})
        )


def draw(results: list[dict[str, object]], path: Path) -> None:
    """Our seconds in those of a raw copy and of torchft, for each case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.3 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    rows = range(len(results))
    panel.barh([row - 0.2 for row in rows], [result["ours_to_raw"] for result in results], 0.4, label="raw copy")
    panel.barh([row + 0.2 for row in rows], [result["ours_to_torchft"] for result in results], 0.4, label="torchft")
    panel.axvline(1.0, color="grey", linewidth=0.8)
    panel.set_yticks(rows, [" ".join(str(result[name]) for name in NAMES) for result in results])
    panel.invert_yaxis()
    panel.set_xlabel("time of our exchange, as a multiple of that of")
    panel.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def describe(result: dict[str, object]) -> str:
    naive = f"  naive {result['naive_to_ours']}x slower" if "naive_to_ours" in result else ""
    return (
        f"{result['store']:5} N={result['replicas']} {result['shape']:8} {result['codec']:4} {result['reduction']:14}"
        f"  ours/raw {result['ours_to_raw']}"
        f"  ours/torchft {result['ours_to_torchft']}{naive}"
    )


if __name__ == "__main__":
    main()
