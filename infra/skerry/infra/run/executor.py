"""The executor interface: start replicas, poll how each ended, stop them. Every kind of target implements it.

Usable without a spec or the command line. An executor never restarts a replica by itself; `restart_policy` decides
about that. Does no I/O.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

EntrypointArguments: TypeAlias = Sequence[str] | Mapping[str, str | float | None]
"""Words, or options by name (see `executors.entrypoint_to_command`)."""

# Shells and engines report a process that a signal ended as 128 plus the signal.
_SIGNALLED: Final = 128
_SIGNALS: Final = 64


@dataclass(frozen=True, kw_only=True)
class ReplicaHandle:
    """One start of a replica. job: the target's own id (a process id, a job ARN); unique per start.

    attempt: counts the starts of this slot at this target, from 0. backend: the kind of place that it runs in.
    """

    slot: str
    index: int
    attempt: int
    job: str
    backend: str = field(default="", compare=False)

    @property
    def rank(self) -> int:
        """The replica's index, 0 to the number of replicas - 1."""
        return self.index

    @property
    def metadata(self) -> Mapping[str, str | int]:
        """All that identifies this start at its backend."""
        return {"slot": self.slot, "attempt": self.attempt, "job": self.job}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The ending of a replica's start: with an exit code, or by a signal. Exactly one of the two is set.

    A job that its cloud stopped before it ran counts as ended by SIGTERM, one whose machine was lost by SIGKILL. why:
    the cloud's explanation, for people.
    """

    exit_code: int | None = None
    signal: int | None = None
    why: str = field(default="", compare=False)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.exit_code}"
        known = {number.value: number.name for number in signal.Signals}
        return f"signal {known.get(self.signal, self.signal)}"


def ending_from_exit_code(code: int, why: str = "") -> Ending:
    """The ending for a container's exit code; above 128 it is a signal, as in shells and engines."""
    if _SIGNALLED < code <= _SIGNALLED + _SIGNALS:
        return Ending(signal=code - _SIGNALLED, why=why)
    return Ending(exit_code=code, why=why)


def seconds_of(timeout: timedelta | float) -> float:
    """A time in seconds."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


class ServerlessExecutor(Protocol):
    """Jobs that cannot talk to each other. Thread-safe; every method may raise Retryable, Unauthorized or Invalid.

    A handle is plain data: another process with an executor of the same options can poll, collect, read and cancel by
    it. A context manager that closes at its end.
    """

    def launch_replicas(
        self, n_replicas: int, entrypoint: str, entrypoint_args: EntrypointArguments = ()
    ) -> list[ReplicaHandle]:
        """Start replicas 0 to `n_replicas` - 1, each running `entrypoint` with the contract's environment.

        entrypoint, entrypoint_args: a script, a dotted module or a command, and its words or options.
        All or none: if one cannot be started, the others are cancelled and the cause is raised. Raises Conflict while a
        replica of these slots still runs.
        """
        ...

    def poll(self, handle: ReplicaHandle) -> Ending | None:
        """The ending of this start; None while it is queued or runs. Raises Invalid if no record of it exists."""
        ...

    def collect(self, handles: Sequence[ReplicaHandle], timeout: timedelta | float) -> list[Ending]:
        """Wait for all to end; how each ended, in the order given. Raises TimeoutError if one still runs then.

        timeout: a number is in seconds.
        """
        ...

    def logs(self, handle: ReplicaHandle) -> Iterator[str]:
        """The log lines of this start so far, without line ends."""
        ...

    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """Ask this start to stop cleanly within the contract's stop budget, or kill it. Success if it has ended.

        A cloud without an immediate kill asks first, and kills after its own grace period.
        """
        ...

    def close(self) -> None:
        """Kill the replicas that were launched here and still run. Repeatable. To leave them running, do not close."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
