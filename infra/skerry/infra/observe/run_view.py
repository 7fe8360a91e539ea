"""The view of a run at one time, shared by `status`, the live table and programs. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from skerry.runtime.log.records import is_over

if TYPE_CHECKING:
    from skerry.runtime.log.records import Phase

Status: TypeAlias = Literal["done", "retry", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """The last reported values of one slot. None if not reported yet.

    silent_s: the time since its heartbeat changed, on the observer's clock; None before the second reading, 0 for a
    replica that has ended. silent: its last heartbeat reports work and is too old: the process hangs, or is dead.
    """

    slot: str
    incarnation: int | None = None
    phase: Phase | None = None
    silent_s: float | None = None
    round: int | None = None
    inner_step: int | None = None
    loss: float | None = None
    loss_first: float | None = None
    tokens: int = 0
    tokens_per_s: float | None = None
    waiting_for: tuple[str, ...] = ()
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    notice: str | None = None
    outcome: Status | None = None
    reason: str | None = None
    silent: bool = False

    @property
    def at_work(self) -> bool:
        """True if its last heartbeat reports work."""
        return self.outcome is None and self.phase is not None and self.phase not in {"finished", "left", "failed"}


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """True if replicas have equal bits after the newest round with receipts of all `slots`.

    state: None if the receipts cover the average only.
    """

    round: int
    slots: tuple[str, ...]
    average: bool
    state: bool | None


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run at one time. closed: rounds that have a commit. rounds: None for an endless run.

    work: trained for these rounds, in rounds of one replica. due: the work at which the run ends; None if it ends after
    `rounds`. participants: the replicas in the average of the last closed round.
    """

    run: str
    uri: str
    rounds: int | None
    closed: int
    work: float
    due: float | None
    participants: int | None
    replicas: tuple[ReplicaView, ...]
    agreement: Agreement | None

    @property
    def finished(self) -> bool:
        """True if the run has reached its end."""
        return is_over(self.rounds, self.due, self.closed, self.work)
