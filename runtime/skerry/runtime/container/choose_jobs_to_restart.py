"""Decides which lost jobs of a group are started again by its other replicas. Pure; does no I/O.

A heartbeat that does not change only makes a replica look: the job's own service says whether it has ended, and how. So
a replica that is alive and cannot reach the store is never doubled.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping  # noqa: TC003  a field of JobLoss
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from skerry.runtime.contract import Revival


class PeerJobState(enum.Enum):
    """The state of a job by its service."""

    LIVE = "live"
    """It waits, runs or is being stopped."""
    FAILED = "failed"
    ENDED = "ended"
    """It is done, or was stopped, by a request or by its time limit: never started again."""


@dataclass(frozen=True, kw_only=True)
class PeerJob:
    """A job of a slot. key: its name for the service. created_s: seconds since the epoch, by the service's clock."""

    slot: str
    key: str
    generation: int
    state: PeerJobState
    created_s: float


@dataclass(frozen=True, kw_only=True)
class JobLoss:
    """The end of a failed job. again: another start may succeed. is_cancelled: the operator wants no other start.

    description: of the job by its service, from which the next one is created.
    """

    again: bool
    reason: str
    is_cancelled: bool
    description: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Start:
    """The job to follow, and how it ended. generation: of the next one, which no job of the slot has had."""

    job: PeerJob
    loss: JobLoss
    generation: int


class PeerJobs(Protocol):
    """The jobs of a group in their service, by this job's own rights. Every method may raise a SkerryError."""

    def list(self) -> Sequence[PeerJob]:
        """All jobs of the group of which the service has a record."""
        ...

    def read_loss(self, job: PeerJob) -> JobLoss:
        """Read how a failed job ended."""
        ...

    def start_next(self, start: Start) -> str:
        """Create the job that follows a lost one, and return its name. Raises Conflict if it exists."""
        ...

    def superfluous(self) -> str | None:
        """The reason for which this job, if another replica has started it, must not run; None if it may."""
        ...


@dataclass(frozen=True, kw_only=True)
class Leave:
    """The slot gets no new job now. reason: for people."""

    reason: str


Decision: TypeAlias = Start | Leave


def slots_to_look_at(own: str, silent: Collection[str], expected: Collection[str]) -> list[str]:
    """The silent ones of the expected slots, if `own` is the lowest of the others; else none, in slot order.

    own: the slot of the caller, which lives. So of several live replicas one looks, and a silent one looks at none.
    """
    live = [slot for slot in expected if slot not in silent or slot == own]
    if min(live, key=keys.slot_order, default=own) != own:
        return []
    return sorted((slot for slot in silent if slot in expected and slot != own), key=keys.slot_order)


def decide(
    jobs: Sequence[PeerJob], read_loss: Callable[[PeerJob], JobLoss], now_s: float, revival: Revival
) -> Decision:
    """Decide about a silent slot. jobs: of the slot. read_loss: asked for the newest one, if it failed.

    now_s: seconds since the epoch. Of the restarts those count that the service has a record of, whatever began them.
    """
    if not jobs:
        return Leave(reason="its service has no record of a job")
    job = max(jobs, key=lambda each: (each.created_s, each.generation))
    if job.state is not PeerJobState.FAILED:
        is_live = job.state is PeerJobState.LIVE
        return Leave(reason=f"its job {job.key} {'has not ended' if is_live else 'is done, or was stopped'}")
    restarts = [each for each in jobs if each.generation > 0 and _is_recent(each, now_s, revival)]
    if len(restarts) >= revival.limit:
        return Leave(reason=f"its job {job.key} failed; {len(restarts)} of {revival.limit} restarts used")
    loss = read_loss(job)
    if loss.is_cancelled:
        return Leave(reason=f"its job {job.key} was cancelled")
    if not loss.again:
        return Leave(reason=f"its job {job.key} failed, and a restart cannot help: {loss.reason}")
    # A service may still have records from before a `skerry destroy`.
    return Start(job=job, loss=loss, generation=1 + max(each.generation for each in jobs))


def _is_recent(job: PeerJob, now_s: float, revival: Revival) -> bool:
    return revival.window_s is None or now_s - job.created_s < revival.window_s
