"""What can be known of a run at one look: one value that `status`, the live table and programs share. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from skerry.runtime.records import is_over

if TYPE_CHECKING:
    from skerry.runtime.records import Phase

Status: TypeAlias = Literal["done", "retry", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """One slot's own last word. None is "not said yet".

    silent_s: how long its heartbeat has not changed, as seen by the observer's own clock; None before a second look.
    0 for a replica that has ended. silent: it says that it is at work, and that was too long ago: it hangs, or is gone.
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
        """Whether it says that it is."""
        return self.outcome is None and self.phase is not None and self.phase not in {"finished", "left", "failed"}


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Whether the replicas hold the same bits after the newest round that all of `slots` have receipts of.

    state: None if the receipts speak of the average only.
    """

    round: int
    slots: tuple[str, ...]
    average: bool
    state: bool | None


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run at one look. closed: rounds that have a commit. rounds: None for a run without an end.

    work: trained for these rounds, in rounds of one replica. due: how much it must be before the run ends; None: it
    ends with `rounds`. participants: how many replicas the last closed round averages.
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
        """Whether the last round is closed."""
        return is_over(self.rounds, self.due, self.closed, self.work)
