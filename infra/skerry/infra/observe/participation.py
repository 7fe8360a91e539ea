"""The replicas that took part in which rounds of a run, why one did not, and what each trained. Pure.

Computed from the log's records alone, over all starts of a replica. The texts are those of `up`, `status` and `doctor`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from skerry.runtime.failure_text import shortened
from skerry.runtime.log.keys import slot_order

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from skerry.infra.observe.doctor.read_log import RunRecords
    from skerry.runtime.log.records import Contribution, Heartbeat, Outcome, Receipt

# A single round that ended early is the price of a slow step or of an evaluation; more than this is a pattern.
_OFTEN: Final = 3
_OFTEN_SHARE: Final = 0.25
# An outcome's reason may be a whole error message; the log of the replica has the rest.
_REASON_CHARACTERS: Final = 240
_REASONS: Final = 2


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one replica trained in the closed rounds, over all its starts. losses: means of its first and last round.

    uploaded_bytes, downloaded_bytes: of its rounds.
    """

    loss_first: float | None = None
    loss_last: float | None = None
    tokens: int = 0
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplicaParticipation:
    """One slot's part in the closed rounds. missing: the rounds whose average has no contribution of it.

    of: the rounds that it could take part in: all, or for a slot that joined a started run those since its first.
    last: the newest closed round. cut: its contributions of less than a whole round. starts: of its process. failed:
    its last start ended with an error. reasons: why starts of it ended before the run, the oldest first. abstained:
    rounds to which it chose not to contribute, by reason, in their order.
    """

    slot: str
    of: int
    last: int
    missing: tuple[int, ...]
    cut: int
    starts: int
    failed: bool
    reasons: tuple[str, ...]
    abstained: Mapping[str, tuple[int, ...]]
    figures: Figures = field(default_factory=Figures)

    @property
    def often_cut(self) -> bool:
        """True if many of its contributions are of less than a whole round."""
        return self.cut >= _OFTEN and self.cut >= _OFTEN_SHARE * (self.of - len(self.missing))

    @property
    def absent(self) -> bool:
        """True if it took no part in half or more of the rounds."""
        return bool(self.missing) and 2 * len(self.missing) >= self.of

    @property
    def text(self) -> str:
        """Its part in the rounds, in one line; empty if it took whole part in all of them at the first start."""
        parts: list[str] = []
        if self.missing:
            parts.append(f"missing in {len(self.missing)} of {self.of} rounds ({ranges(self.missing)})")
        if self.often_cut:
            parts.append(f"{self.cut} of its contributions are of less than a whole round")
        if self.starts > 1 and self.reasons:
            parts.append(f"{self.starts} starts")
        return ": ".join(filter(None, [", ".join(parts), self.why]))

    @property
    def why(self) -> str:
        """The reasons of its missing rounds and of the end of its last start; empty if none is known."""
        abstained = [
            f"{reason} (round{'s' if len(rounds) > 1 else ''} {ranges(rounds)})"
            for reason, rounds in self.abstained.items()
        ]
        return "; ".join([*abstained[:_REASONS], *self.reasons[-1:]])


@dataclass(frozen=True, kw_only=True)
class Participation:
    """The replicas of a run in slot order. rounds: closed ones. complete: those with every replica of the run."""

    rounds: int
    complete: int
    replicas: tuple[ReplicaParticipation, ...]

    @property
    def by_all(self) -> bool:
        """True if no replica failed, and each took part in more than half of the rounds."""
        return not any(replica.absent or replica.failed for replica in self.replicas)

    def headline(self, rounds: int | None) -> str:
        """The run in one line: 20 of 20 rounds; all 2 replicas in 3 of them. rounds: of the whole run, if it ends."""
        of = "" if rounds is None else f" of {max(rounds, self.rounds)}"
        return f"{self.rounds}{of} rounds; all {len(self.replicas)} replicas in {self.complete} of them"


@dataclass(kw_only=True)
class _OfSlot:
    """The records of one slot, by start or in the order of rounds."""

    starts: set[int] = field(default_factory=set[int])
    outcomes: dict[int, Outcome] = field(default_factory=dict[int, "Outcome"])
    contributions: list[Contribution] = field(default_factory=list["Contribution"])
    receipts: list[Receipt] = field(default_factory=list["Receipt"])
    heartbeat: Heartbeat | None = None


def participation(log: RunRecords) -> Participation:
    """Compute the part of each replica in the closed rounds. `valid_records` leaves out records of other runs."""
    members = _members_by_round(log)
    slots = _by_slot(log)
    founders = frozenset(() if log.run is None else log.run.slots)
    replicas = tuple(
        _replica(slot, slots[slot], members, founder=slot in founders) for slot in sorted(slots, key=slot_order)
    )
    absent = Counter(number for replica in replicas for number in replica.missing)
    return Participation(rounds=len(members), complete=sum(not absent[number] for number in members), replicas=replicas)


def _by_slot(log: RunRecords) -> dict[str, _OfSlot]:
    slots: defaultdict[str, _OfSlot] = defaultdict(_OfSlot)
    for slot in () if log.run is None else log.run.slots:
        slots[slot] = _OfSlot()
    for stored in log.members.values():
        slots[stored.record.slot].starts.add(stored.record.incarnation)
    for stored in log.outcomes.values():
        slots[stored.record.slot].outcomes[stored.record.incarnation] = stored.record
    for stored in log.contributions.values():
        slots[stored.record.slot].contributions.append(stored.record)
    for stored in log.receipts.values():
        slots[stored.record.slot].receipts.append(stored.record)
    for stored in log.heartbeats.values():
        slots[stored.record.slot].heartbeat = stored.record
    return dict(slots)


def _members_by_round(log: RunRecords) -> dict[int, set[str]]:
    """The slots in every decision of each closed round."""
    members: dict[int, set[str]] = {}
    for stored in log.decisions.values():
        number, slots = stored.record.round, {share.slot for share in stored.record.members}
        if number < log.closed:
            members[number] = members.get(number, slots) & slots
    return dict(sorted(members.items()))


def _replica(
    slot: str, records: _OfSlot, members: Mapping[int, Collection[str]], *, founder: bool
) -> ReplicaParticipation:
    part = [number for number, slots in members.items() if slot in slots]
    first = 0 if founder else min(part, default=max(members, default=0) + 1)
    possible = [number for number in members if number >= first]
    missing = tuple(number for number in possible if slot not in members[number])
    cut = {
        contribution.round
        for contribution in records.contributions
        if contribution.share < 1 and slot in members.get(contribution.round, ())
    }
    last = records.outcomes.get(max(records.starts, default=0))
    # A receipt shows that it followed the round.
    away = bool(missing) and missing[-1] == possible[-1]
    away = away and all(receipt.round < missing[-1] for receipt in records.receipts)
    return ReplicaParticipation(
        slot=slot,
        of=len(possible),
        last=max(members, default=-1),
        missing=missing,
        cut=len(cut),
        starts=len(records.starts),
        failed=last is not None and last.status in {"failed", "retry"},
        reasons=tuple(_reasons(records, away=away)),
        abstained=_abstained(records.receipts, missing),
        figures=_figures(records),
    )


def _abstained(receipts: Iterable[Receipt], missing: Collection[int]) -> dict[str, tuple[int, ...]]:
    """Rounds without this slot by the reason in its receipts."""
    rounds: defaultdict[str, list[int]] = defaultdict(list)
    for receipt in sorted(receipts, key=lambda receipt: receipt.round):
        if receipt.abstained is not None and receipt.round in missing:
            rounds[shortened(receipt.abstained, _REASON_CHARACTERS)].append(receipt.round)
    return {reason: tuple(numbers) for reason, numbers in rounds.items()}


def _reasons(records: _OfSlot, *, away: bool) -> Iterator[str]:
    """The reasons for the ends of its starts, if they are no success and no stop that was made up for.

    away: the slot has no part in the last closed round, so its last start is not simply at work.
    """
    if not records.starts and not records.contributions:
        yield "it never joined the run"
    latest = max(records.starts, default=0)
    for incarnation in sorted(records.starts):
        outcome, start = records.outcomes.get(incarnation), f"start {incarnation + 1}" if latest else "it"
        if outcome is not None:
            stopped = outcome.status == "stopped" and not (away and incarnation == latest)
            if outcome.status != "done" and not stopped:
                yield _located(outcome)
        elif incarnation < latest:
            yield f"{start} ended without a record: killed, out of memory, or its machine was lost"
        elif away:
            notice = None if records.heartbeat is None else records.heartbeat.notice
            if notice is None or records.heartbeat is None or records.heartbeat.incarnation != incarnation:
                yield f"{start} has no record of its end: late, hanging, killed, or its machine was lost"
            else:
                yield shortened(notice, _REASON_CHARACTERS)


def _located(outcome: Outcome) -> str:
    """The reason of an outcome, with its round. A replica writes the round itself after the line of its script."""
    reason = shortened(outcome.reason, _REASON_CHARACTERS)
    return reason if f"round {outcome.round})" in reason else f"{reason} (round {outcome.round})"


def _figures(records: _OfSlot) -> Figures:
    contributed = {item.round: item.telemetry for item in records.contributions if item.telemetry is not None}
    missed = {item.round: item.telemetry for item in records.receipts if item.telemetry is not None}
    telemetry = [item for _, item in sorted((missed | contributed).items())]
    ended = [outcome for _, outcome in sorted(records.outcomes.items())]
    losses = [item.loss for item in telemetry if item.loss is not None]
    if not telemetry:  # of an older version
        losses = [loss for end in ended for loss in (end.loss_first, end.loss_last) if loss is not None]
    return Figures(
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        tokens=sum(item.tokens for item in telemetry or ended),
        uploaded_bytes=sum(receipt.uploaded_bytes for receipt in records.receipts),
        downloaded_bytes=sum(receipt.downloaded_bytes for receipt in records.receipts),
    )


def ranges(numbers: Iterable[int]) -> str:
    """Rounds as ranges: 3, 7-9. At most five ranges."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(numbers):
        groups[number - index].append(number)
    texts = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in groups.values()]
    return ", ".join(texts if len(texts) <= 5 else [*texts[:4], f"and {len(texts) - 4} more ranges"])
