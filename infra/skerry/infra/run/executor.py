"""The Executor seam: start replicas somewhere, learn how each ended, stop them. Every target's job half implements it.

Usable without a spec or the command line. An executor starts what it is told and reports; whether a replica is
started again is decided above it (`policy`). Does no I/O.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta

# A shell's and an engine's way to say that a signal ended a process.
_SIGNALLED: Final = 128
_SIGNALS: Final = 64


@dataclass(frozen=True, kw_only=True)
class ReplicaHandle:
    """One start of a replica. job: the target's own name for it (a process id, a job ARN); unique per start.

    attempt: counts the starts of this slot at this target, from 0.
    """

    slot: str
    index: int
    attempt: int
    job: str


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a start of a replica ended: with an exit code, or by a signal. Exactly one of the two is set.

    A job that a cloud stopped before it ran has ended by SIGTERM, one whose machine was lost by SIGKILL. why: what the
    cloud says of it, for people.
    """

    exit_code: int | None = None
    signal: int | None = None
    why: str = field(default="", compare=False)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.exit_code}"
        known = {number.value: number.name for number in signal.Signals}
        return f"signal {known.get(self.signal, self.signal)}"


def ending_of_code(code: int, why: str = "") -> Ending:
    """What a container's exit code tells: above 128 it names a signal, as shells and engines have it."""
    if _SIGNALLED < code <= _SIGNALLED + _SIGNALS:
        return Ending(signal=code - _SIGNALLED, why=why)
    return Ending(exit_code=code, why=why)


class ServerlessExecutor(Protocol):
    """Jobs that cannot talk to each other. Thread-safe; every method may raise Retryable, Unauthorized or Invalid.

    A handle is plain data: another process, with an executor that was told the same, polls, collects, reads and cancels
    by it. A context manager, which is closed at the end.
    """

    def launch_replicas(self, n_replicas: int, entrypoint: str, entrypoint_args: Sequence[str]) -> list[ReplicaHandle]:
        """Start replicas 0 to `n_replicas` - 1, each running `entrypoint` with the contract's environment.

        All or none: if one cannot be started, those that were are cancelled and the cause is raised. Raises Conflict
        while one of these slots still runs.
        """
        ...

    def poll(self, handle: ReplicaHandle) -> Ending | None:
        """How this start ended; None while it waits or runs. Raises Invalid if there is no record of it."""
        ...

    def collect(self, handles: Sequence[ReplicaHandle], timeout: timedelta) -> list[Ending]:
        """How each ended, in the order given. Raises TimeoutError if one still runs when the time is over."""
        ...

    def logs(self, handle: ReplicaHandle) -> Iterator[str]:
        """The lines that this start has written so far, without line ends."""
        ...

    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """Ask this start to stop cleanly within the contract's stop budget, or end it at once. Ended is success.

        A cloud that knows only the first asks, and kills what is left after its own grace.
        """
        ...

    def close(self) -> None:
        """End what was launched here and still runs. May be repeated. To leave replicas running, do not close."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
