"""Reads which replicas took part in the rounds of a run: in all of them, or in each new one of a running run.

Never writes. `participation` has the meaning and the texts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.doctor.findings import NEXT
from skerry.infra.observe.history import read_history
from skerry.infra.observe.participation import count_parts, ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.observe.history import RunHistory
    from skerry.infra.observe.observer import Observer
    from skerry.infra.observe.participation import Participation, ReplicaParticipation
    from skerry.runtime.log.summarize_round import ReplicaRound, RoundHistory
    from skerry.runtime.store import Store

# So many absences that begin within so many rounds are one fault, and not one warning each.
_AGAIN: Final = 3
_RECENT: Final = 10
# Rounds within which the receipts of a round are written.
_RECEIPTS_TRAIL: Final = 2


def read_participation(store: Store) -> Participation:
    """The part of each replica in all closed rounds. Reads what `read_history` reads."""
    return participation_of(read_history(store))


def participation_of(history: RunHistory) -> Participation:
    """The part of each replica in all closed rounds, from a history that was read."""
    return count_parts(history.run.slots, history.rounds, history.starts, history.heartbeats)


class ParticipationFollower:
    """Warns when a replica begins to be missing in rounds, returns, or is cut short again and again. Not thread-safe.

    Follows the rounds that close after its first look, or all rounds of a new run. Reads nothing itself.
    """

    def __init__(self, observer: Observer, *, is_new: bool = False) -> None:
        """observer: has just made a view at every look."""
        self._observer = observer
        self._first = self._end = 0 if is_new else -1
        self._rounds: dict[int, RoundHistory] = {}
        self._before: dict[str, ReplicaParticipation] = {}

    def look(self) -> list[str]:
        """A line for each change in the rounds of which all records were read since the last look."""
        end, settled = self._end, self._observer.settled
        if end < 0:
            self._first = self._end = self._observer.closed
        if not 0 <= end < settled:
            return []
        self._end = settled
        # A receipt may be later than the next round.
        for item in self._observer.rounds(max(self._first, end - _RECEIPTS_TRAIL), settled):
            self._rounds[item.round] = replace(item, replicas=tuple(map(_without_figures, item.replicas)))
        rounds = [self._rounds[number] for number in sorted(self._rounds)]
        slots = self._observer.slots_at_start
        taken = count_parts(slots, rounds, self._observer.starts, self._observer.heartbeats)
        before, self._before = self._before, {replica.slot: replica for replica in taken.replicas}
        return [
            line for slot, now in self._before.items() for line in _changes(before.get(slot), now, last=settled - 1)
        ]


def _without_figures(replica: ReplicaRound) -> ReplicaRound:
    """Of a long run every round is kept."""
    return replace(replica, telemetry=None, seconds={})


def _changes(before: ReplicaParticipation | None, now: ReplicaParticipation, *, last: int) -> Iterator[str]:
    """The lines about one replica. last: the newest round.

    A replica that is missing again and again gets a line when that begins and when it ends, not two for each time.
    """
    earlier = () if before is None else before.missing
    new = now.missing[len(earlier) :]
    # A slot that was removed while it was missing stays so: it has no later round.
    away = now.missing[-1:] == (now.last,)
    was_away = before is not None and before.missing[-1:] == (before.last,)
    again, was_again = _again(now), before is not None and _again(before)
    if again:
        if not was_again:
            recent = sum(number > last - _RECENT for number in now.missing)
            yield f"{now.slot} is missing again and again, in {recent} of the last {_RECENT} rounds{_why(now, new)}"
    elif new and (not was_away or was_again):
        text = f"is missing since round {_gaps(now.missing)[-1][0]}" if away else f"missed round {ranges(new)}"
        yield f"{now.slot} {text}{_why(now, new)}"
    elif (was_away or was_again) and not away:
        missed = _gaps(now.missing)[-1]
        count = f"{len(missed)} missed round{'s' if len(missed) > 1 else ''}"
        yield f"{now.slot} takes part again in round {missed[-1] + 1}, after {count}"
    if now.often_cut and not now.often_late and (before is None or not before.often_cut):
        yield f"{now.slot}: {now.cut} of its contributions are of less than a whole round; {NEXT['often-cut-short']}"


def _why(part: ReplicaParticipation, new: Sequence[int]) -> str:
    """The reasons for its absence in the new rounds, after a colon; empty if none is known."""
    abstained = {reason: numbers for reason, numbers in part.abstained.items() if set(numbers) & set(new)}
    late = part.late if set(part.late) & set(new) else ()
    why = replace(part, abstained=abstained, late=late).why
    return f": {why}" if why else ""


def _again(part: ReplicaParticipation) -> bool:
    """True if it began to be missing several times in the last rounds."""
    return sum(gap[0] > part.last - _RECENT for gap in _gaps(part.missing)) >= _AGAIN


def _gaps(missing: Sequence[int]) -> list[list[int]]:
    """The missing rounds, neighbouring ones together."""
    gaps: list[list[int]] = []
    for number in missing:
        if gaps and gaps[-1][-1] == number - 1:
            gaps[-1].append(number)
        else:
            gaps.append([number])
    return gaps
