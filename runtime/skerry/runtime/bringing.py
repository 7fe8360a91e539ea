"""What a replica keeps of rounds that went on without it, on its way: from a save to the shelf, from there to the log.

`carry` is the shelf, `late` what all ranks agree to do with it; when, and in which thread, is said here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from skerry.runtime.bursts import Burst
from skerry.runtime.carry import Trained, full_steps_of, kept_of
from skerry.runtime.errors import Corrupt
from skerry.runtime.events import emit
from skerry.runtime.exchange import Place
from skerry.runtime.records import Count, Record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from skerry.runtime.carry import Carry
    from skerry.runtime.codec.layout import Codec
    from skerry.runtime.course import Course
    from skerry.runtime.seat import Seat
    from skerry.runtime.unfinished import Begun


class _Held(Record):
    """Why what is kept must not be brought."""

    veto: str | None


class _Length(Record):
    """How many inner steps a round takes."""

    steps: Count


class Bringing:
    """For the thread that trains; what touches the shelf runs in the exchange thread."""

    def __init__(self, seat: Seat, course: Course, carry: Carry | None, exchange_thread: Executor) -> None:
        """carry: the shelf; None: what is late is dropped."""
        self._seat = seat
        self._course = course
        self._shelf = carry
        self._thread = exchange_thread

    @property
    def carry(self) -> Carry | None:
        """The shelf, where there is one: only a pseudo-gradient stays useful after the others' outer step."""
        return self._shelf if self._course.state.has_fragments else None

    def forget(self) -> None:
        """It was trained on a state that was not the others'."""
        if self._shelf is not None:
            self._thread.submit(self._shelf.clear)

    def keep_begun(self, begun: Begun, late: Sequence[int], codec: Codec) -> None:
        """Keep what an earlier incarnation had begun. late: fragments whose exchange has passed since."""
        if self._shelf is None:
            return
        for fragment in late:
            steps, tokens = begun.trained[fragment]
            full_steps = self._full_steps(begun.next_of(fragment, len(begun.deltas)))
            burst = Burst()
            for tensor in begun.deltas[fragment]:
                burst.add(tensor, "avg")
            trained = Trained(tokens=tokens, inner_steps=steps, fragment=fragment)
            kept = kept_of(begun.deltas[fragment], burst.index(codec), begun.round, trained, max(steps, full_steps))
            self._thread.submit(self._seat.averager.late.keep, self._shelf, kept)

    def start(self) -> None:
        """Bring what the round's fragment has kept, before the round is trained for."""
        if (carry := self.carry) is not None:
            standing = self._course.standing
            fragment = standing.round % self._course.state.fragments
            self._thread.submit(self._bring, carry, Place(standing.round, 0, standing.previous), fragment)

    def _full_steps(self, round_number: int) -> int:
        """Inner steps of a whole round, as those took it who are counted; where nobody can tell, what the run says."""

        def look() -> _Length:
            try:
                decided = self._seat.journal.decision(round_number, 0)
                members = [] if decided is None else self._seat.exchange.contributions(decided.record)
            except Corrupt:
                members = []
            return _Length(steps=full_steps_of(members) if members else self._seat.journal.run.sync_every)

        return self._seat.group.line("train").first("how long a round is", look, _Length).steps

    def _bring(self, carry: Carry, place: Place, fragment: int) -> None:
        try:
            if self._may_bring(carry, fragment):
                self._seat.averager.bring(place, carry, fragment)
        except Exception as error:  # noqa: BLE001  a thread's entry: it stays kept, and what is fatal comes up in the exchange
            fields = {"round": place.round, "slot": self._seat.presence.slot, "error": str(error)}
            emit("delta_failed", fields, level=logging.WARNING, error=error)

    def _may_bring(self, carry: Carry, fragment: int) -> bool:
        """There may be something to bring, and this replica holds what the others hold."""
        if not carry.keeps(fragment) and carry.at_stake(fragment) is None:
            return False
        line = self._seat.group.line("exchange")
        return line.first("bring", lambda: _Held(veto=self._course.quarantine), _Held).veto is None
