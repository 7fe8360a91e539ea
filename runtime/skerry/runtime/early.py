"""Looks, between two inner steps, whether the round at hand is over for this replica before its time.

When it is decides `pace`; how it is ended, `course`. Nothing waits for the store here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from skerry.runtime.errors import Retryable
from skerry.runtime.events import emit
from skerry.runtime.journal import Journal
from skerry.runtime.pace import Pace
from skerry.runtime.records import Record

if TYPE_CHECKING:
    from skerry.runtime.bursts import OpenRound
    from skerry.runtime.recording import Standing
    from skerry.runtime.seat import Seat

# Doublings of the time between two looks at the others while the store is away.
_SICK_LOOKS = 6


class Early(Record):
    """Whether the round at hand is over before its time: closed by the others, or ended with a share of its steps."""

    closed: bool = False
    share: Annotated[float, Field(gt=0, le=1)] | None = None


class Lookout:
    """One replica's view of the others while it trains. For the thread that trains; rank 0 looks for all ranks."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._train = seat.group.line("train")
        self._one_try = Journal(seat.store.insisting(0.0, seat.stop), seat.journal.run)
        self._pace = Pace(journal=self._one_try, clock=seat.clock, policy=seat.policy, slot=seat.presence.slot)
        self._look_again = 0.0
        self._sick_looks = 0

    def look(self, standing: Standing, at_hand: OpenRound, round_seconds: float | None, fragments: int) -> Early:
        """The others have closed the round; or they wait, and would not wait long enough; or, most times, neither.

        The same on all ranks. At most one look for each heartbeat; in an outage ever fewer.
        """
        return self._train.first("pace", lambda: self._look(standing, at_hand, round_seconds, fragments), Early)

    def _look(self, standing: Standing, at_hand: OpenRound, round_seconds: float | None, fragments: int) -> Early:
        now = self._seat.clock.now()
        if now < self._look_again:
            return Early()
        self._look_again = now + self._seat.look_every_s
        number, steps = standing.round, at_hand.inner_steps
        try:
            earlier = at_hand.earlier(number, fragments)
            share = self._pace.share(number, standing.previous, steps, at_hand.since, round_seconds, earlier)
            # Whoever sees no quorum need not list commits too: what closes a round has one before it.
            if self._pace.sees_quorum and self._one_try.head(number) > number:
                return Early(closed=True)
        except Retryable:  # training goes on to the sync point, which can wait
            self._sick_looks += 1
            self._look_again = now + 2 ** min(self._sick_looks, _SICK_LOOKS) * self._seat.look_every_s
            return Early()
        self._sick_looks = 0
        if share is not None:
            fields = {"round": number, "slot": self._seat.presence.slot, "steps": steps, "share": share}
            emit("round_cut_short", fields)
        return Early(share=share)
