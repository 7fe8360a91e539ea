"""A long run of a tiny model: the cost of a round must not depend on how many rounds there were before.

    scripts/bench longrun [--rounds 5000] [--windows 10] [--stores file s3] [--json]

Two replicas in one process exchange one small tensor per round, with a checkpoint every ten rounds and garbage
collection as in any run. The rounds are divided into windows of equal length. Per window, over both replicas:

ms            median wall-clock time of a round
requests      to the store, per round, retries included
folders       that listings of a file:// store went through, per round
listed        entries that listings returned, per round
memory_mb     resident memory of the process at the window's end; descriptors: its open files
objects       files of a file:// store at the window's end; `inodes`: with its folders. Records stay for good, two to
              four for each round and replica; payloads and checkpoints do not
inodes_made   inodes by which a round of the window left the store larger

growth is the last window's figure by the second's (the first warms up), for what should stay flat. Times are of one
machine; growth is the result. The S3 server is the tests' own, in memory: its time includes its own Python.
"""
# ruff: noqa: D102, D103  it explains itself above

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from skerry.runtime.checkpointing.garbage_collector import Retention
from skerry.runtime.clock import SystemClock
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.store.obstore_clients import open_cloud_store
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from skerry.runtime.store import Entry, Store

ROOT = Path(__file__).resolve().parents[2]
REPLICAS = ("a", "b")
FLAT = ("ms", "requests", "folders", "listed", "memory_mb", "descriptors", "inodes_made")
S3_ENVIRONMENT = {
    "AWS_ALLOW_HTTP": "true",
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
}
COUNTS: Counter[str] = Counter()


@dataclass(frozen=True, kw_only=True)
class Window:
    """Figures of consecutive rounds; see the module."""

    rounds: int
    ms: float
    requests: float
    folders: float
    listed: float
    memory_mb: float
    descriptors: int
    objects: int
    inodes: int
    inodes_made: float


class CountingStore:
    """A store that counts what its listings return."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        entries = self._store.list(prefix, after)
        COUNTS["listed"] += len(entries)
        return entries


def _engine(folder: Path | None) -> Store:
    if folder is not None:
        return DirectoryStore(folder)
    return open_cloud_store("s3", "bench", "longrun/", environment=os.environ)


def count_folders() -> None:
    """Count the folders that this process reads from now on."""
    scandir = os.scandir

    def counted(*arguments: str) -> Iterator[os.DirEntry[str]]:
        COUNTS["folders"] += 1
        return scandir(*arguments)

    os.scandir = counted  # type: ignore[assignment]


def train(
    open_engine: Callable[[], Store], slot: str, rounds: int, together: threading.Barrier, times: list[float]
) -> None:
    """One replica."""
    weights = torch.zeros(16)

    def load(state: dict[str, torch.Tensor]) -> None:
        weights.copy_(state["weights"])

    manager = ObjectStoreManager(
        Retrying(cast("Store", CountingStore(open_engine())), SystemClock()),
        replica_id=slot,
        min_replica_size=len(REPLICAS),
        timeout=timedelta(seconds=60),
        heartbeat_interval=timedelta(seconds=1),
        grace=Grace(floor_s=5.0, cap_s=5.0),
        checkpoint_every=10,
        retention=Retention(age_s=1.0),
        state_dict=lambda: {"weights": weights},
        load_state_dict=load,
    )
    before = manager.session.store.usage
    done = 0
    while done < rounds:
        together.wait()
        began = time.perf_counter()
        manager.start_quorum()
        gradient = torch.full((16,), float(done % 7))
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            weights += gradient
            done += 1
        times.append(time.perf_counter() - began)
        usage = manager.session.store.usage
        for name in ("reads", "creates", "replaces", "lists", "deletes"):
            COUNTS["requests"] += getattr(usage, name) - getattr(before, name)
        before = usage
    manager.shutdown()


def objects_below(folder: Path | None) -> tuple[int, int]:
    if folder is None:
        return 0, 0
    files = folders = 0
    for _, below, names in os.walk(folder):
        files, folders = files + len(names), folders + len(below)
    return files, files + folders


def measure(open_engine: Callable[[], Store], folder: Path | None, rounds: int, windows: int) -> list[Window]:
    """Run both replicas; the last to the barrier closes a window."""
    size = rounds // windows
    result: list[Window] = []
    times: list[float] = []
    turns = 0
    COUNTS.clear()

    def at_the_barrier() -> None:
        nonlocal turns
        turns += 1
        if turns % size != 1 or turns == 1:
            return
        per_round = {name: round(COUNTS[name] / size, 2) for name in ("requests", "folders", "listed")}
        files, inodes = objects_below(folder)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        result.append(
            Window(
                rounds=turns - 1,
                ms=round(1000 * statistics.median(times), 2),
                memory_mb=round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1),
                descriptors=len(list(Path("/proc/self/fd").iterdir())),
                objects=files,
                inodes=inodes,
                inodes_made=round((inodes - (result[-1].inodes if result else 0)) / size, 2),
                **per_round,
            )
        )
        times.clear()
        COUNTS.clear()

    barrier = threading.Barrier(len(REPLICAS), action=at_the_barrier)
    with ThreadPoolExecutor(len(REPLICAS)) as pool:
        # One round more, whose start closes the last window.
        running = [pool.submit(train, open_engine, slot, size * windows + 1, barrier, times) for slot in REPLICAS]
        for future in running:
            future.result()
    return result


def growth(windows: list[Window]) -> dict[str, float | None]:
    """The last window by the second; None where the second is 0."""
    first, last = asdict(windows[1]), asdict(windows[-1])
    return {name: round(last[name] / first[name], 2) if first[name] else None for name in FLAT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--stores", nargs="+", choices=["file", "s3"], default=["file", "s3"])
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    options = parser.parse_args()
    if options.windows < 3 or options.rounds < 10 * options.windows:
        parser.error("at least 3 windows of at least 10 rounds")
    torch.set_num_threads(1)
    server = subprocess.Popen(  # noqa: S603  our own server
        [sys.executable, str(ROOT / "tests/support/s3server.py"), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    results: dict[str, dict[str, object]] = {}
    try:
        assert server.stdout is not None  # noqa: S101
        os.environ.update(S3_ENVIRONMENT, AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.stdout.readline().strip()}")
        count_folders()
        for store in options.stores:
            with tempfile.TemporaryDirectory(prefix="skerry-longrun-") as name:
                folder = Path(name) / "run" if store == "file" else None
                windows = measure(functools.partial(_engine, folder), folder, options.rounds, options.windows)
            results[store] = {"windows": [asdict(window) for window in windows], "growth": growth(windows)}
            if not options.json:
                print(store, *(field.name for field in fields(Window)))
                for window in windows:
                    print(*asdict(window).values())
                print("growth", growth(windows), flush=True)
    finally:
        server.kill()
        server.wait()
    if options.json:
        print(json.dumps({"benchmark": "longrun", "rounds": options.rounds, "stores": results}))


if __name__ == "__main__":
    main()
