"""What executors on this machine have in common: the starts of a run's seats, how each ended, and its log file."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta
    from pathlib import Path

    from skerry.infra.executor import Ending, ReplicaHandle
    from skerry.infra.spec import Seat
    from skerry.infra.workspace import Workspace


@dataclass(kw_only=True)
class Start:
    """One start of a replica; ending: None while anything of it may run."""

    handle: ReplicaHandle
    ending: Ending | None = None


S = TypeVar("S", bound=Start)


class Starts(ABC, Generic[S]):
    """The half of a ServerlessExecutor that does not depend on what runs a replica. Thread-safe.

    Close it, or use it as a context manager. on_end: called once for every start that ended, from a thread of its own,
    after nothing of it is left.
    """

    def __init__(
        self, seats: Sequence[Seat], workspace: Workspace, on_end: Callable[[ReplicaHandle, Ending], None]
    ) -> None:
        self._seats = seats
        self._workspace = workspace
        self._on_end = on_end
        self._changed = threading.Condition()
        self._all: dict[ReplicaHandle, S] = {}
        self._waiters: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """Ask this start to stop cleanly, or end it at once. Ended is success."""

    @abstractmethod
    def _start(self, seat: Seat, attempt: int) -> ReplicaHandle:
        """Start a seat; a thread of `_waiters` sees to its end."""

    def relaunch(self, handle: ReplicaHandle) -> ReplicaHandle:
        """Start the seat of `handle`, which has ended, once more. Raises OSError or SkerryError if that cannot be."""
        return self._start(self._seats[handle.index], handle.attempt + 1)

    def poll(self, handle: ReplicaHandle) -> Ending | None:
        """How this start ended; None while anything of it may run."""
        with self._changed:
            return self._all[handle].ending

    def collect(self, handles: Sequence[ReplicaHandle], timeout: timedelta) -> list[Ending]:
        """How each ended, in the order given. Raises TimeoutError naming those that still run."""
        mine = [self._all[handle] for handle in handles]
        with self._changed:
            self._changed.wait_for(lambda: all(one.ending for one in mine), timeout.total_seconds())
            late = [one.handle.slot for one in mine if one.ending is None]
            if late:
                raise TimeoutError(f"still running after {timeout}: {', '.join(late)}")
            return [one.ending for one in mine if one.ending is not None]

    def logs(self, handle: ReplicaHandle) -> Iterator[str]:
        """The lines of this start's log file so far."""
        with self.log_file(handle).open(errors="replace") as log:
            for line in log:
                yield line.rstrip("\n")

    def log_file(self, handle: ReplicaHandle) -> Path:
        """Where the output of this start goes."""
        return self._workspace.log_file(handle.slot, handle.attempt)

    def close(self) -> None:
        """End every replica that is left; wait until nothing of it is, and `on_end` was called. May be repeated."""
        for one in list(self._all.values()):
            self.cancel(one.handle, kill=True)
        for waiter in self._waiters:
            waiter.join()

    def _check_count(self, n_replicas: int) -> None:
        if not 1 <= n_replicas <= len(self._seats):
            raise Invalid(f"cannot start {n_replicas} replicas: the run has {len(self._seats)} seats")

    def _start_first(self, n_replicas: int) -> list[ReplicaHandle]:
        """All or none."""
        handles: list[ReplicaHandle] = []
        try:
            for seat in self._seats[:n_replicas]:
                handles.append(self._start(seat, self._workspace.next_attempt(seat.slot)))  # noqa: PERF401  the except needs those made so far
        except (SkerryError, OSError):
            for handle in handles:
                self.cancel(handle, kill=True)
            raise
        return handles
