"""The replicas that took part in which rounds of a run, and why one did not. Pure: computed from the log's records."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.history import build_starts, closed_rounds, fill_in_absent
from skerry.runtime.log.keys import slot_order

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from skerry.infra.observe.doctor.read_log import RunRecords
    from skerry.infra.observe.history import Start
    from skerry.runtime.log.round_history import ReplicaRound, RoundHistory

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
    founders = () if log.run is None else log.run.slots
    return count_parts(founders, fill_in_absent(founders, closed_rounds(log)), build_starts(log))


def count_parts(founders: Collection[str], rounds: Sequence[RoundHistory], starts: Sequence[Start]) -> Participation:
    """Compute the part of each replica in rounds that name all replicas of the run. founders: slots of run.json."""
    parts: dict[str, list[tuple[int, ReplicaRound]]] = {slot: [] for slot in founders}
    parts |= {start.slot: [] for start in starts}
    for history in rounds:
        for replica in history.replicas:
            parts.setdefault(replica.slot, []).append((history.round, replica))
    return Participation(
        rounds=len(rounds),
        complete=sum(all(replica.in_average for replica in history.replicas) for history in rounds),
        replicas=tuple(
            _replica(slot, parts[slot], [start for start in starts if start.slot == slot])
            for slot in sorted(parts, key=slot_order)
        ),
    )


def _replica(slot: str, parts: Sequence[tuple[int, ReplicaRound]], starts: Sequence[Start]) -> ReplicaParticipation:
    abstained: defaultdict[str, list[int]] = defaultdict(list)
    for number, replica in parts:
        if replica.reason is not None:
            abstained[replica.reason[:_REASON_CHARACTERS]].append(number)
    return ReplicaParticipation(
        slot=slot,
        of=len(parts),
        missing=tuple(number for number, replica in parts if not replica.in_average),
        cut=sum(replica.part == "cut" for _, replica in parts),
        starts=len(starts),
        reasons=tuple(_reasons(starts)),
        abstained={reason: tuple(numbers) for reason, numbers in abstained.items()},
    )


def _reasons(starts: Sequence[Start]) -> Iterator[str]:
    if not starts:
        yield "it was never started"
    latest = max((start.incarnation for start in starts), default=0)
    for start in starts:
        incarnation, outcome = start.incarnation, start.outcome
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
