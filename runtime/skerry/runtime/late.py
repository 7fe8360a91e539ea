"""What becomes of what a replica keeps: on all of its ranks the same, for a part of a pseudo-gradient is none.

`carry` is one rank's shelf; here the ranks agree on what is put there, on what is taken from it to the log, and on what
the log says of it.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from skerry.runtime.carry import STALE, Trained, together
from skerry.runtime.codec.tensors import norm_of
from skerry.runtime.errors import Corrupt
from skerry.runtime.events import emit
from skerry.runtime.offering import too_large
from skerry.runtime.records import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from skerry.runtime.carry import Carry, Kept
    from skerry.runtime.codec.layout import Index
    from skerry.runtime.codec.tensors import Encoded
    from skerry.runtime.exchange import Exchange, Place
    from skerry.runtime.journal import Journal
    from skerry.runtime.offering import Offering
    from skerry.runtime.ranks import Ranks
    from skerry.runtime.records import Contribution


class _Flag(Record):
    """Yes or no, of one rank or of all."""

    value: bool


class _Weighed(Record):
    """One rank's part of what came late."""

    finite: bool
    norm: float


class _Judged(Record):
    """Why nobody could use it; None if it can be used."""

    reason: str | None


class Late:
    """For the thread that runs exchanges."""

    def __init__(
        self,
        journal: Journal,
        exchange: Exchange,
        offering: Offering,
        *,
        slot: str,
        ranks: Ranks,
        max_norm: float | None,
    ) -> None:
        """max_norm: what is above it, over all ranks, is not kept."""
        self._journal = journal
        self._exchange = exchange
        self._offering = offering
        self._slot = slot
        self._ranks = ranks
        self._max_norm = max_norm

    def bring(self, place: Place, carry: Carry, fragment: int) -> bool:
        """Contribute what was kept for this fragment to a round that begins, before it is trained for.

        False: there is nothing, it is held back, the round is decided, or this slot has spoken for it already; or
        nobody could use it, and it is dropped. Raises what the store raises; what was kept is safe then.
        """
        self.settle_past(place, carry, fragment)

        def look() -> _Flag:
            return _Flag(value=self._journal.decision(place.round, place.exchange) is not None)

        if not carry.keeps(fragment) or self._ranks.first("is it decided", look, _Flag).value:
            return False
        kept = carry.to_offer(fragment)
        if kept is None:
            return False
        encoded, reason = self._offering.try_encode(kept.tensors, kept.index)
        if encoded is None:
            # Later it would be no smaller.
            carry.drop(fragment)
            self._tell_dropped(place.round, reason or "not finite")
            return False
        carry.stake(fragment, place.round, place.exchange, encoded.parts)
        late = kept.work - kept.share
        trained = Trained(tokens=kept.tokens, inner_steps=kept.inner_steps, share=kept.share, late=late)
        _, offered = self._offering.offer(place, kept.index, lambda: encoded, trained, discount=STALE)
        if offered.mine and self._ranks.rank == 0:
            emit("delta_brought", {"round": place.round, "slot": self._slot, "from_round": kept.round})
        return offered.mine

    def add(
        self, place: Place, tensors: Sequence[torch.Tensor], index: Index, trained: Trained, carry: Carry
    ) -> tuple[Encoded | None, Trained]:
        """These tensors and what was kept, if they can be offered together; else None, and it stays kept."""
        kept = carry.to_add(trained.fragment, index)
        if kept is None:
            return None, trained
        encoded, _ = self._offering.try_encode(together(tensors, kept), index)
        if encoded is None:  # these tensors alone may be good
            return None, trained
        carry.stake(trained.fragment, place.round, place.exchange, encoded.parts)
        return encoded, trained.plus(kept)

    def settle_past(self, place: Place, carry: Carry, fragment: int) -> None:
        """What may stand in a round that was passed by a checkpoint: its decision tells whether it counts.

        What is at stake in this very round is settled once that is decided.
        """
        stake = carry.at_stake(fragment)
        if stake is None or stake.round == place.round:
            return

        def counted() -> Contribution | None:
            decision = self._journal.decision(stake.round, stake.exchange)
            if decision is None:
                raise Corrupt(f"decision is gone: round={stake.round} exchange={stake.exchange}; the round was closed")
            return own_of(self._exchange.contributions(decision.record), self._slot)

        try:
            self.settle(carry, fragment, counted)
        except Corrupt as error:  # nobody can tell any more whether it counts, and it must not count twice
            carry.settle(fragment, stake.parts)
            self._tell_dropped(stake.round, str(error))

    def settle(self, carry: Carry, fragment: int, counted: Callable[[], Contribution | None]) -> None:
        """What is at stake counts if every rank's part of it does. counted: what counts for this slot."""
        stake = carry.at_stake(fragment)
        if stake is None:
            return

        def counts() -> _Flag:
            member = counted()
            return _Flag(value=member is not None and member.of_rank(self._ranks.rank) == stake.parts)

        all_do = self._ranks.consult("settle", counts, _all, _Flag).value
        carry.settle(fragment, stake.parts if all_do else None)

    def keep(self, carry: Carry, late: Kept) -> None:
        """Keep what came late, unless nobody could ever use it: it would spoil what it is added to."""

        def weigh() -> _Weighed:
            finite = late.is_finite
            measured = finite and self._max_norm is not None
            return _Weighed(finite=finite, norm=min(norm_of(late.tensors), sys.float_info.max) if measured else 0.0)

        def judge(all_ranks: Sequence[_Weighed]) -> _Judged:
            if not all(one.finite for one in all_ranks):
                return _Judged(reason="not finite")
            return _Judged(reason=too_large(math.hypot(*(one.norm for one in all_ranks)), self._max_norm))

        reason = self._ranks.consult("keep", weigh, judge, _Judged).reason
        if reason is not None:
            self._tell_dropped(late.round, reason)
            return
        carry.keep(late)
        if self._ranks.rank == 0:
            emit("delta_kept", {"round": late.round, "slot": self._slot, "steps": late.inner_steps})

    def _tell_dropped(self, round_number: int, reason: str) -> None:
        if self._ranks.rank == 0:
            reason = f"what came late is dropped: {reason}"
            emit("abstained", {"round": round_number, "slot": self._slot, "reason": reason})


def own_of(contributions: Sequence[Contribution], slot: str) -> Contribution | None:
    """The one of `slot`."""
    return next((one for one in contributions if one.slot == slot), None)


def _all(ranks: Sequence[_Flag]) -> _Flag:
    return _Flag(value=all(one.value for one in ranks))
