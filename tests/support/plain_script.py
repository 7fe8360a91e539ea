"""A training script without `connect()`: its exchange waits for a replica that never comes, and the script ends.

Arguments: URI MODE. Prints what its own hooks do.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.daemon_executors import BackgroundThreads
from skerry.runtime.manager import ObjectStoreManager

if TYPE_CHECKING:
    from types import TracebackType


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    del trace
    print(f"own hook: {kind.__name__}: {error}", flush=True)  # noqa: T201


def fork_a_child() -> None:
    """As a data loader does. Its end is not the end of the replica."""
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)


def main() -> None:
    uri, mode = sys.argv[1:]
    sys.excepthook = report
    atexit.register(print, "own end", flush=True)
    manager = ObjectStoreManager(uri, replica_id="r-0", min_replica_size=2)
    manager.start_quorum()
    work = manager.allreduce(torch.ones(2))
    manager.disallow_state_dict_read()  # the exchange begins in the background
    clock = SystemClock()
    wait_until(
        clock, lambda: manager.presence.progress.phase == "sync" or None, clock.now() + 30, Backoff(first=0.01, cap=0.1)
    )
    fork_a_child()
    folder = Path(uri.removeprefix("file://")).parent
    (folder / "waiting").touch()
    if mode != "interrupt":
        wait_until(clock, lambda: (folder / "end").exists() or None, clock.now() + 30, Backoff(first=0.01, cap=0.1))
    if mode == "raise":
        raise RuntimeError("out of memory")
    if mode == "exit":
        sys.exit(3)
    if mode == "shutdown":
        slow = BackgroundThreads(1, "slow")
        slow.submit(lambda: (clock.pause(0.5), print("own job", flush=True)))  # noqa: T201
        manager.shutdown(wait=False)
        raise RuntimeError("late")
    work.wait()


if __name__ == "__main__":
    main()
