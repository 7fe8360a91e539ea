"""The replicas that took part in which rounds of a run, and why one did not. Pure: computed from the log's records."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.runtime.log.keys import slot_order

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from skerry.infra.observe.doctor.read_log import RunRecords
    from skerry.runtime.log.records import Outcome

# A single round that ended early is the price of a slow step or of an evaluation; more than this is a pattern.
_OFTEN: Final = 3
_OFTEN_SHARE: Final = 0.25
# An outcome's reason may be a whole error message; the log of the replica has the rest.
_REASON_CHARACTERS: Final = 200
_REASONS: Final = 2


@dataclass(frozen=True, kw_only=True)
class ReplicaParticipation:
    """One slot's part in the closed rounds. missing: the rounds whose average has no contribution of it.

    of: the rounds that it could take part in: all, or for a slot that joined a started run those since its first. cut:
    its contributions of less than a whole round. starts: of its process.
    reasons: why starts of it ended before the run, the oldest first. abstained: rounds to which it chose not to
    contribute, by reason, in their order.
    """

    slot: str
    of: int
    missing: tuple[int, ...]
    cut: int
    starts: int
    reasons: tuple[str, ...]
    abstained: Mapping[str, tuple[int, ...]]

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
            parts.append(f"missing in {len(self.missing)} of {self.of} rounds ({_ranges(self.missing)})")
        if self.often_cut:
            parts.append(f"{self.cut} of its contributions are of less than a whole round")
        if self.reasons:
            parts.append(f"{self.starts} {'start' if self.starts == 1 else 'starts'}")
        why = [f"{reason} (rounds {_ranges(rounds)})" for reason, rounds in self.abstained.items()][:_REASONS]
        return ": ".join(filter(None, [", ".join(parts), "; ".join([*why, *self.reasons[-1:]])]))


@dataclass(frozen=True, kw_only=True)
class Participation:
    """The replicas of a run in slot order. rounds: closed ones. complete: those with every replica of the run."""

    rounds: int
    complete: int
    replicas: tuple[ReplicaParticipation, ...]

    @property
    def by_all(self) -> bool:
        """True if each replica took part in more than half of the rounds."""
        return not any(replica.absent for replica in self.replicas)


def participation(log: RunRecords) -> Participation:
    """Compute the part of each replica in the closed rounds. `valid_records` leaves out records of other runs."""
    members = _members_by_round(log)
    slots = set(() if log.run is None else log.run.slots)
    founders = frozenset(slots)
    slots.update(stored.record.slot for stored in log.members.values())
    replicas = tuple(_replica(log, slot, members, founder=slot in founders) for slot in sorted(slots, key=slot_order))
    absent = Counter(number for replica in replicas for number in replica.missing)
    return Participation(rounds=len(members), complete=sum(not absent[number] for number in members), replicas=replicas)


def _members_by_round(log: RunRecords) -> dict[int, set[str]]:
    """The slots in every decision of each closed round."""
    members: dict[int, set[str]] = {}
    for stored in log.decisions.values():
        number, slots = stored.record.round, {share.slot for share in stored.record.members}
        if number < log.closed:
            members[number] = members.get(number, slots) & slots
    return dict(sorted(members.items()))


def _replica(
    log: RunRecords, slot: str, members: Mapping[int, Collection[str]], *, founder: bool
) -> ReplicaParticipation:
    part = [number for number, slots in members.items() if slot in slots]
    first = 0 if founder else min(part, default=len(members))
    possible = [number for number in members if number >= first]
    cut = {
        stored.record.round
        for stored in log.contributions.values()
        if stored.record.slot == slot and stored.record.share < 1 and slot in members.get(stored.record.round, ())
    }
    starts = {stored.record.incarnation for stored in log.members.values() if stored.record.slot == slot}
    outcomes = {
        stored.record.incarnation: stored.record for stored in log.outcomes.values() if stored.record.slot == slot
    }
    return ReplicaParticipation(
        slot=slot,
        of=len(possible),
        missing=tuple(number for number in possible if slot not in members[number]),
        cut=len(cut),
        starts=len(starts),
        reasons=tuple(_reasons(sorted(starts), outcomes)),
        abstained=_abstained(log, slot, members),
    )


def _abstained(log: RunRecords, slot: str, members: Mapping[int, Collection[str]]) -> dict[str, tuple[int, ...]]:
    """Rounds without this slot by the reason in its receipts."""
    rounds: defaultdict[str, list[int]] = defaultdict(list)
    for stored in sorted(log.receipts.values(), key=lambda stored: stored.record.round):
        receipt = stored.record
        if receipt.slot == slot and receipt.abstained is not None and slot not in members.get(receipt.round, (slot,)):
            rounds[receipt.abstained[:_REASON_CHARACTERS]].append(receipt.round)
    return {reason: tuple(numbers) for reason, numbers in rounds.items()}


def _reasons(starts: Collection[int], outcomes: Mapping[int, Outcome]) -> Iterator[str]:
    if not starts:
        yield "it was never started"
    latest = max(starts, default=0)
    for incarnation in starts:
        outcome = outcomes.get(incarnation)
        if outcome is None and incarnation < latest:
            yield f"start {incarnation} ended without a record: killed, out of memory, or its machine was lost"
        elif outcome is None:
            yield f"start {incarnation} has no record of its end: it runs, was killed, or its machine was lost"
        elif outcome.status != "done":
            yield f"{outcome.reason[:_REASON_CHARACTERS]} (start {incarnation}, round {outcome.round})"


def _ranges(numbers: tuple[int, ...]) -> str:
    """Rounds as ranges: 3, 7-9. At most five ranges."""
    ranges: defaultdict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(numbers):
        ranges[number - index].append(number)
    texts = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges.values()]
    return ", ".join(texts if len(texts) <= 5 else [*texts[:4], f"and {len(texts) - 4} more ranges"])
