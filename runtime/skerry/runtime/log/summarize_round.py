"""Summarizes a closed round from its records: the part of each replica in it, for people. Pure.

The run never depends on it. `skerry.runtime.log.roll_up` stores such summaries of many rounds in one object.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from skerry.runtime.log.keys import slot_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.log.records import Contribution, Decision, Receipt, Telemetry

EXPOSED: Final = "exposed"
"""In the seconds of a receipt: of the other phases together, those in which the training waited. Absent in old logs."""

Part: TypeAlias = Literal["trained", "cut", "late", "abstained", "absent"]
"""trained: in the average with a whole round. cut: with less than a whole round. late: not in the average, but with a
receipt. abstained: as late, by its own choice. absent: neither in the average nor with a receipt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRound:
    """One replica's part in one closed round.

    share: of a whole round, in the average; 0 if the replica is not in it. incarnation: None without any record of it.
    telemetry: None in old logs. seconds: of its receipt, by phase, and EXPOSED; empty without one. reason: of an
    abstention.
    """

    slot: str
    part: Part
    share: float = 0.0
    incarnation: int | None = None
    telemetry: Telemetry | None = None
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    requests: int = 0
    reason: str | None = None

    @property
    def exchange_s(self) -> tuple[float, float] | None:
        """Seconds of its exchange, and how many of them its training waited for; None in old logs."""
        whole = sum(seconds for phase, seconds in self.seconds.items() if phase != EXPOSED)
        return (whole, min(whole, self.seconds[EXPOSED])) if EXPOSED in self.seconds else None

    @property
    def in_average(self) -> bool:
        """True if the round's average has a contribution of this replica."""
        return self.part in {"trained", "cut"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundHistory:
    """One closed round. closed_at: seconds since the epoch by the store's clock; None if the store has none.

    replicas: in slot order. averages_equal, state_equal: of all receipts; None if there are fewer than two, and for the
    state if no receipt has one.
    """

    round: int
    closed_at: float | None
    replicas: tuple[ReplicaRound, ...]
    averages_equal: bool | None
    state_equal: bool | None


@dataclass(frozen=True, kw_only=True)
class RoundRecords:
    """The readable records of one closed round, of all of its exchanges."""

    decisions: Sequence[Decision] = ()
    contributions: Sequence[Contribution] = ()
    receipts: Sequence[Receipt] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRound:
    """A closed round and the records that its summary was made of; others may have been written later.

    contributions: how many there were of each slot, of the first exchanges. receipts: the slots with one.
    """

    history: RoundHistory
    contributions: Mapping[str, int]
    receipts: frozenset[str]

    @classmethod
    def of(cls, number: int, closed_at: float | None, records: RoundRecords) -> RecordedRound:
        """The summary of a round."""
        return cls(
            history=summarize_round(number, closed_at, records),
            contributions=Counter(contribution.slot for contribution in records.contributions),
            receipts=frozenset(receipt.slot for receipt in records.receipts),
        )

    def again(self, records: RoundRecords) -> RecordedRound:
        """The same summary from the records of the round, without those that were written later."""
        left = dict(self.contributions)
        contributions: list[Contribution] = []
        for contribution in sorted(records.contributions, key=lambda contribution: contribution.exchange):
            if left.get(contribution.slot, 0) > 0:
                left[contribution.slot] -= 1
                contributions.append(contribution)
        receipts = [receipt for receipt in records.receipts if receipt.slot in self.receipts]
        named = RoundRecords(decisions=records.decisions, contributions=contributions, receipts=receipts)
        return RecordedRound.of(self.history.round, self.history.closed_at, named)


def summarize_round(number: int, closed_at: float | None, records: RoundRecords) -> RoundHistory:
    """The summary of a round, of the replicas with any record of it; the others are absent."""
    decided = Counter(slot for decision in records.decisions for slot in {share.slot for share in decision.members})
    members = {slot for slot, count in decided.items() if count == len(records.decisions)}
    contributions: dict[str, list[Contribution]] = {}
    for contribution in records.contributions:
        contributions.setdefault(contribution.slot, []).append(contribution)
    receipts = {receipt.slot: receipt for receipt in records.receipts}
    averages = {receipt.averages for receipt in receipts.values()}
    states = {(receipt.scope, receipt.state) for receipt in receipts.values()}
    known_state = len(receipts) > 1 and any(state is not None for _, state in states)
    return RoundHistory(
        round=number,
        closed_at=closed_at,
        replicas=tuple(
            _replica(slot, contributions.get(slot, ()), receipts.get(slot), member=slot in members)
            for slot in sorted(members | contributions.keys() | receipts.keys(), key=slot_order)
        ),
        averages_equal=len(averages) == 1 if len(receipts) > 1 else None,
        state_equal=len(states) == 1 if known_state else None,
    )


def _replica(
    slot: str, contributions: Sequence[Contribution], receipt: Receipt | None, *, member: bool
) -> ReplicaRound:
    # Several exchanges have a contribution each. A member's contribution that does not parse counts as a whole round.
    share = min((contribution.share for contribution in contributions), default=1.0) if member else 0.0
    records = [record for record in (*contributions, receipt) if record is not None]
    return ReplicaRound(
        slot=slot,
        part=_part(share, receipt),
        share=share,
        incarnation=next((record.incarnation for record in records), None),
        telemetry=next((record.telemetry for record in records if record.telemetry is not None), None),
        seconds={} if receipt is None else dict(receipt.seconds),
        uploaded_bytes=0 if receipt is None else receipt.uploaded_bytes,
        downloaded_bytes=0 if receipt is None else receipt.downloaded_bytes,
        requests=0 if receipt is None else receipt.requests,
        reason=None if share or receipt is None else receipt.abstained,
    )


def _part(share: float, receipt: Receipt | None) -> Part:
    if share:
        return "trained" if share >= 1 else "cut"
    if receipt is None:
        return "absent"
    return "late" if receipt.abstained is None else "abstained"
