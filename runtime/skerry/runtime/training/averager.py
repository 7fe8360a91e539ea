"""One burst of tensors through one exchange and back: the only place where torch meets the round protocol.

All tensors of a burst travel in ONE contribution; nothing is contributed to an exchange that is decided already.
Every rank of a replica moves its own bytes; rank 0 makes the records, and all ranks end alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.runtime.carry import full_steps_of, kept_of
from skerry.runtime.codec.inspecting import fault_in, fault_in_unseen
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.events import emit
from skerry.runtime.journal import Sealed
from skerry.runtime.late import Late, own_of
from skerry.runtime.offering import Offering
from skerry.runtime.ranks import fold
from skerry.runtime.records import Contribution, Decision, Part, Record, Sha256, Xxh128
from skerry.runtime.reduce import Source, Workspace, average

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from skerry.runtime.bursts import Burst
    from skerry.runtime.carry import Carry, Trained
    from skerry.runtime.clock import Clock
    from skerry.runtime.codec.layout import Codec, Index
    from skerry.runtime.codec.tensors import Encoded
    from skerry.runtime.exchange import Exchange, Place
    from skerry.runtime.journal import Journal
    from skerry.runtime.membership import Presence
    from skerry.runtime.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Average:
    """What an exchange gave. digest: of the average's bytes. contributed: this slot is among the members.

    work: what its members have trained for it, in rounds of one replica. norm: of what this call encoded, over all its
    floating point elements; None if it had nothing to offer.
    """

    decision: Sealed[Decision]
    digest: str
    contributed: bool
    work: float
    norm: float | None
    seconds: dict[str, float]


class _Issued(Record):
    """One rank's tensors, or its average, by their digest."""

    digest: Xxh128


class _Opened(Record):
    """What rank 0 found. index: of all ranks' tensors. spoken: this slot's contribution is in the log already."""

    index: Xxh128
    decided: bool
    spoken: bool


class _Ruling(Record):
    """The decision, by its digest, and its members' contributions.

    repeats: what counts for this slot is an earlier incarnation's, which has trained this round before.
    """

    decision: Decision
    digest: Sha256
    contributions: tuple[Contribution, ...]
    repeats: bool


class Averager:
    """Runs bursts through exchanges, one at a time, with buffers that are kept between them."""

    def __init__(
        self,
        *,
        journal: Journal,
        exchange: Exchange,
        presence: Presence,
        clock: Clock,
        codec: Codec,
        ranks: Ranks,
        max_norm: float | None = None,
    ) -> None:
        """ranks: how the ranks of this replica agree. max_norm: what is above it is not offered; None offers all."""
        self._journal = journal
        self._exchange = exchange
        self._presence = presence
        self._clock = clock
        self._codec: Codec = codec
        self._ranks = ranks
        self._workspace = Workspace()
        self._indices: tuple[str, ...] = ()
        self._offering = Offering(exchange, presence, ranks, max_norm)
        self.late = Late(journal, exchange, self._offering, slot=presence.slot, ranks=ranks, max_norm=max_norm)

    def run(
        self,
        place: Place,
        burst: Burst,
        *,
        trained: Trained,
        veto: str | None = None,
        round_seconds: float | None = None,
        carry: Carry | None = None,
    ) -> Average:
        """Contribute the burst, wait for the decision, and leave the average in the burst's tensors.

        An exchange that is decided already is followed: nothing is contributed. veto: why this replica must not
        contribute; like tensors that are not finite or too large, that is told as an abstention, and the average is
        still received. carry: gives what it kept for this fragment before, and takes what no record counts once the
        average is there; what was trained for a round that fails goes with the round.
        Raises Fenced if a newer incarnation owns the slot, and what `Exchange.decide` and `average` raise; Invalid only
        for what is this replica's own, or a store that is gone.
        """
        started = self._clock.now()
        hosts = burst.hosts()
        index = burst.index(self._codec)
        if carry is not None:
            self.late.settle_past(place, carry, trained.fragment)
        opened = self._open(place, index)
        encoded, norm = None, None
        if not opened.decided:
            encoded, norm = self._offer(place, hosts, index, opened, veto, trained, carry)
        offered = self._clock.now()
        ruling = self._ranks.first(
            "decide", lambda: self._decide(place, opened, index, encoded, round_seconds), _Ruling
        )
        decided = self._clock.now()
        counted = own_of(ruling.contributions, self._presence.slot)
        late = None
        if carry is not None:
            self.late.settle(carry, trained.fragment, lambda: counted)
            # What an earlier incarnation has trained and offered counts; the same data must not count again.
            is_late = (counted is None or encoded is None) and not ruling.repeats
            if is_late and trained.inner_steps and veto is None and not self._is_abstaining(place):
                late = kept_of(hosts, index, place.round, trained, full_steps_of(ruling.contributions))
        digest = self._ranks.consult(
            "average",
            lambda: self._average(ruling, burst, hosts, index, encoded),
            lambda all_ranks: _Issued(digest=fold([one.digest for one in all_ranks])),
            _Issued,
        ).digest
        if carry is not None and late is not None:
            self.late.keep(carry, late)
        return Average(
            decision=Sealed(ruling.decision, ruling.digest),
            digest=digest,
            contributed=counted is not None,
            # Rounded once: a plain sum of floats has other bits on other Pythons.
            work=math.fsum(one.work for one in ruling.contributions),
            norm=norm,
            seconds={
                "upload": offered - started,
                "wait": decided - offered,
                "average": self._clock.now() - decided,
            },
        )

    def bring(self, place: Place, carry: Carry, fragment: int) -> bool:
        """Contribute what was kept for this fragment to a round that begins, before it is trained for.

        False: there is nothing, it is held back, the round is decided, or this slot has spoken for it already; or
        nobody could use it, and it is dropped. Raises what the store raises; what was kept is safe then.
        """
        return self.late.bring(place, carry, fragment)

    def close(self) -> None:
        """End the reading threads and forget the buffers."""
        self._workspace.close()

    def _open(self, place: Place, index: Index) -> _Opened:
        """What there is of this exchange, before anything is offered."""

        def look(issued: Sequence[_Issued]) -> _Opened:
            self._presence.fence()
            self._indices = tuple(one.digest for one in issued)
            decided = self._journal.decision(place.round, place.exchange) is not None
            several = len(issued) > 1
            spoken = (
                several and self._journal.contribution(place.round, place.exchange, self._presence.slot) is not None
            )
            return _Opened(index=fold([one.digest for one in issued]), decided=decided, spoken=spoken)

        return self._ranks.consult("open", lambda: _Issued(digest=index.digest), look, _Opened)

    def _offer(
        self,
        place: Place,
        hosts: Sequence[torch.Tensor],
        index: Index,
        opened: _Opened,
        veto: str | None,
        trained: Trained,
        carry: Carry | None,
    ) -> tuple[Encoded | None, float | None]:
        """Contribute, or abstain. Returns what this rank encoded if it stands in the log, and all ranks' norm."""
        both: Encoded | None = None
        if carry is not None and veto is None:
            both, trained = self.late.add(place, hosts, index, trained, carry)
        encoded, offered = self._offering.offer(
            place,
            index,
            lambda: both or self._offering.encode(hosts, index),
            trained,
            veto=veto,
            uploads=not opened.spoken,
        )
        if offered.contribution is None:
            reason = offered.reason or "nothing to offer"
            emit("abstained", {"round": place.round, "slot": self._presence.slot, "reason": reason})
            self._presence.abstain(place.round, reason)
            return None, None
        self._presence.withdraw_abstention()
        # An earlier attempt or incarnation may have spoken for this slot: then memory does not hold what counts.
        return (encoded, offered.norm) if offered.mine else (None, None)

    def _decide(
        self,
        place: Place,
        opened: _Opened,
        index: Index,
        encoded: Encoded | None,
        round_seconds: float | None,
    ) -> _Ruling:
        """On rank 0: wait for the decision, and read what its members offer."""
        decision = self._exchange.decide(
            place,
            opened.index,
            abstaining=self._is_abstaining(place),
            round_seconds=round_seconds,
            inspect=lambda one: self._fault_in(one, index, encoded),
        )
        return _ruling(decision, self._exchange.contributions(decision.record), self._presence)

    def _average(
        self, ruling: _Ruling, burst: Burst, hosts: Sequence[torch.Tensor], index: Index, encoded: Encoded | None
    ) -> _Issued:
        """Leave this rank's average in the burst's tensors."""
        sources = self._sources(ruling, encoded)
        store = self._journal.store
        try:
            averaged = average(store, sources, index, hosts, workspace=self._workspace)
        except Invalid as error:
            # A sound payload of something else is as good as damaged. If the store is gone, this look says so.
            faults = (fault_in(store, one, self._mine(one), index) for one in ruling.contributions)
            fault = next((one for one in faults if one is not None), None)
            raise error if fault is None else Corrupt(fault) from error
        burst.land()
        return _Issued(digest=averaged.digest)

    def _is_abstaining(self, place: Place) -> bool:
        abstention = self._presence.progress.abstains
        return abstention is not None and abstention.round == place.round

    def _mine(self, contribution: Contribution) -> tuple[Part, ...]:
        """The parts that this rank averages."""
        return contribution.of_rank(self._ranks.rank)

    def _fault_in(self, contribution: Contribution, index: Index, encoded: Encoded | None) -> str | None:
        """Why a contribution cannot be averaged, by any rank. What this replica has just made is not read back."""
        parts = self._mine(contribution)
        if encoded is not None and contribution.slot == self._presence.slot and parts == encoded.parts:
            return None
        reason = fault_in(self._journal.store, contribution, parts, index)
        for rank, digest in list(enumerate(self._indices))[1:]:
            theirs = contribution.of_rank(rank)
            reason = reason or fault_in_unseen(self._journal.store, contribution, theirs, digest)
        return reason

    def _sources(self, ruling: _Ruling, encoded: Encoded | None) -> list[Source]:
        return [
            Source(
                slot=share.slot,
                weight=share.weight,
                round=ruling.decision.round,
                parts=self._mine(contribution),
                local=encoded if encoded is not None and share.slot == self._presence.slot else None,
            )
            for share, contribution in zip(ruling.decision.members, ruling.contributions, strict=True)
        ]


def _ruling(decision: Sealed[Decision], contributions: Sequence[Contribution], me: Presence) -> _Ruling:
    return _Ruling(
        decision=decision.record,
        digest=decision.digest,
        contributions=tuple(contributions),
        # What it brought before it trained holds nothing of this round.
        repeats=any(
            one.slot == me.slot and one.incarnation != me.incarnation and one.discount == 1.0 for one in contributions
        ),
    )
