"""Starts the replicas of a run on this machine and records how each start ended; the base of processes and containers.

`LocalProcessExecutor` and `DockerExecutor` of `executors` offer these starts to users, `Supervisor` restarts by them.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar

from skerry.infra.run.executor import ReplicaHandle
from skerry.runtime.contract import PLACE, Contract
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from pathlib import Path

    from skerry.infra.local.workspace import Workspace
    from skerry.infra.run.executor import Ending
    from skerry.infra.spec.model import ReplicaSlot


@dataclass(kw_only=True)
class ReplicaStart:
    """One start of a replica. ending: None while any process of it may run."""

    handle: ReplicaHandle
    ending: Ending | None = None


S = TypeVar("S", bound=ReplicaStart)


class ReplicaStarts(ABC, Generic[S]):
    """All starts of a run's replicas by this process. Thread-safe. Close it, or use it as a context manager.

    on_end: called once for every start that ended, from a thread of its own, after its last process ended.
    untracked: why processes.json could not be updated, if that ever failed; the replicas do not need it.
    """

    untracked: str | None = None

    def __init__(
        self,
        run_uri: str,
        replicas: Sequence[ReplicaSlot],
        workspace: Workspace,
        on_end: Callable[[ReplicaHandle, Ending], None],
    ) -> None:
        self._run_uri = run_uri
        self._replicas = replicas
        self._workspace = workspace
        self._on_end = on_end
        self._changed = threading.Condition()
        self._starts: dict[ReplicaHandle, S] = {}
        self._waiters: list[threading.Thread] = []
        self._command: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """Ask this start to stop cleanly, or end it at once. Succeeds if it has ended."""

    @abstractmethod
    def _start(self, replica: ReplicaSlot, attempt: int) -> ReplicaHandle:
        """Start a replica and pass the start to `_follow`."""

    @abstractmethod
    def _wait(self, start: S) -> None:
        """Wait until this start has ended, set its ending, and call `on_end`; runs in the thread of `_follow`."""

    def launch(self, n_replicas: int, command: Sequence[str]) -> list[ReplicaHandle]:
        """Start the first `n_replicas` replicas with this command: all, or none if one cannot be started."""
        if not 1 <= n_replicas <= len(self._replicas):
            raise Invalid(f"cannot start {n_replicas} replicas: the run has {len(self._replicas)}")
        self._command = tuple(command)
        handles: list[ReplicaHandle] = []
        try:
            for replica in self._replicas[:n_replicas]:
                handles.append(self._start(replica, self._workspace.next_attempt(replica.slot)))  # noqa: PERF401  the except needs those made so far
        except (SkerryError, OSError):
            for handle in handles:
                self.cancel(handle, kill=True)
            raise
        return handles

    def relaunch(self, handle: ReplicaHandle) -> ReplicaHandle:
        """Start the replica of `handle`, which has ended, once more. Raises OSError or SkerryError on failure."""
        return self._start(self._replica(handle.slot), handle.attempt + 1)

    def expect(self, replicas: Sequence[ReplicaSlot]) -> None:
        """These are all replicas of the run from now on. Starts and ends none; see `start`."""
        self._replicas = replicas

    def start(self, slot: str) -> ReplicaHandle:
        """Start a replica that was added to the run. Raises OSError or SkerryError on failure."""
        return self._start(self._replica(slot), self._workspace.next_attempt(slot))

    def _replica(self, slot: str) -> ReplicaSlot:
        return next(replica for replica in self._replicas if replica.slot == slot)

    def poll(self, handle: ReplicaHandle) -> Ending | None:
        """The ending of this start; None while any process of it may run."""
        with self._changed:
            return self._starts[handle].ending

    def wait(self, handles: Sequence[ReplicaHandle], timeout: timedelta) -> list[Ending | None]:
        """Wait until all have ended or the time is over; how each ended, in the order given."""
        starts = [self._starts[handle] for handle in handles]
        with self._changed:
            self._changed.wait_for(lambda: all(start.ending for start in starts), timeout.total_seconds())
            return [start.ending for start in starts]

    def log_file(self, handle: ReplicaHandle) -> Path:
        """The file that holds the output of this start."""
        return self._workspace.log_file(handle.slot, handle.attempt)

    def close(self) -> None:
        """Kill every replica that still runs; wait until its processes ended and `on_end` returned. Repeatable."""
        for start in list(self._starts.values()):
            self.cancel(start.handle, kill=True)
        for waiter in self._waiters:
            waiter.join()

    def _handle(self, replica: ReplicaSlot, attempt: int, job: str) -> ReplicaHandle:
        return ReplicaHandle(slot=replica.slot, index=replica.index, attempt=attempt, job=job)

    def _follow(self, start: S) -> threading.Thread:
        """Register a start; the thread that waits for its end, not yet running."""
        waiter = threading.Thread(target=self._wait, args=(start,), name=f"wait-{start.handle.slot}", daemon=True)
        with self._changed:
            self._starts[start.handle] = start
            self._waiters.append(waiter)
        return waiter

    def _variables(self, replica: ReplicaSlot) -> dict[str, str]:
        """The contract's variables, and this replica's share of the cores.

        Replicas that each use every core are several times slower together than those that share.
        """
        threads = replica.threads or max(1, len(os.sched_getaffinity(0)) // len(self._replicas))
        contract = Contract(run_uri=self._run_uri, slot=replica.slot, index=replica.index, replicas=len(self._replicas))
        return {"OMP_NUM_THREADS": str(threads), PLACE: replica.target.place.to_text(), **contract.environment()}


AnyStarts: TypeAlias = ReplicaStarts[Any]
