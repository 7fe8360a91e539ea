"""The view of a run at one time, shared by `status`, the live table and programs. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from skerry.runtime.log.run_record import is_over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.runtime.log.records import Phase

Status: TypeAlias = Literal["done", "retry", "failed", "stopped"]
Mark: TypeAlias = Literal["trained", "cut", "late", "abstained", "absent", "killed"]
"""A replica's part in a closed round, as in `round_history.Part`. killed: absent after a start that ended without an
outcome."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that a replica runs on, as far as it is known."""

    cloud: str | None = None
    region: str | None = None
    machine: str | None = None
    accelerator: str | None = None
    accelerators: int = 0
    spot: bool | None = None


@dataclass(frozen=True, kw_only=True)
class MachineTime:
    """The hours of all starts on machines of one kind, and the bytes of their rounds. running: those that run now."""

    machine: Machine | None
    hours: float
    running: int
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """The last reported values of one slot. None if not reported yet.

    silent_s: the time since its heartbeat changed, on the observer's clock; None before the second reading, 0 for a
    replica that has ended. silent: its last heartbeat reports work and is too old: the process hangs, or is dead.
    tokens_per_s: in the last half minute; of a replica whose heartbeat was read once, since its start. step: inner
    steps in the current round. marks: its part in each of RunView.recent; None where it is not expected. in_rounds,
    of_rounds: the closed rounds with its contribution, and those that it could take part in. share: of a whole round,
    in the last one with its contribution. starts: of its process.
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
    step: int | None = None
    marks: tuple[Mark | None, ...] = ()
    in_rounds: int = 0
    of_rounds: int = 0
    share: float | None = None
    starts: int = 0
    machine: Machine | None = None

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
class RoundView:
    """A closed round. members: replicas in its average; replicas: those of the run at that time.

    seconds: since the round before was closed. loss: mean of the replicas' mean losses, each over its inner steps.
    phases: seconds by phase, mean of the replicas that reported them. slowest: the replica that trained longest, and
    by how much longer than the mean, if several reported it.
    """

    round: int
    closed_at: float | None
    seconds: float | None
    members: int
    replicas: int
    loss: float | None
    phases: Mapping[str, float] = field(hash=False)
    slowest: tuple[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """An event in plain words. at: seconds since the epoch. about: the slot or the round. bad: it needs attention."""

    at: float
    about: str
    text: str
    bad: bool = False


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run at one time. closed: rounds that have a commit. rounds: None for an endless run.

    work: trained for these rounds, in rounds of one replica. due: the work at which the run ends; None if it ends after
    `rounds`. participants: the replicas in the average of the last closed round.

    now_at: the time of this view, in seconds since the epoch. elapsed_s: since the run was created; of a finished run,
    until its last round was closed. running_s: the part of it in which a replica ran; None without starts. left_s:
    until the end at the pace of the last rounds; None if unknown. losses: the mean loss of closed rounds, (round,
    loss), at most LOSS_POINTS of the whole run. recent: the last closed rounds, the oldest first. steps_per_round:
    inner steps of a whole round. time_shares: parts of the replicas' time in the recent rounds, by phase, with `away`
    for the rounds that a replica was absent from. events: the newest first.
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
    now_at: float = 0.0
    elapsed_s: float | None = None
    running_s: float | None = None
    left_s: float | None = None
    steps_per_round: int = 0
    losses: tuple[tuple[int, float], ...] = ()
    recent: tuple[RoundView, ...] = ()
    time_shares: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    machine_times: tuple[MachineTime, ...] = ()
    events: tuple[RunEvent, ...] = ()

    @property
    def finished(self) -> bool:
        """True if the run has reached its end."""
        return is_over(self.rounds, self.due, self.closed, self.work)

    @property
    def done_share(self) -> float | None:
        """The share of the run's rounds, or of its work, that is done; below 1 until the run is finished."""
        if self.rounds is None:
            return None
        if self.finished:
            return 1.0
        by_rounds = self.closed / self.rounds
        return min(0.999, by_rounds if self.due is None else min(by_rounds, self.work / self.due))
