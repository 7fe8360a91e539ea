"""One burst of tensors through one exchange and back: the only place where torch meets the round protocol.

All tensors of a burst travel in ONE contribution; nothing is contributed to an exchange that is decided already.
Every rank of a replica moves its own bytes; rank 0 makes the records, and all ranks end alike.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.runtime.carry import STALE, full_steps_of, kept_of, together
from skerry.runtime.codec.inspecting import fault_in
from skerry.runtime.codec.tensors import Encoder, norm_of
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.events import emit
from skerry.runtime.exchange import Load
from skerry.runtime.journal import Sealed
from skerry.runtime.ranks import fold
from skerry.runtime.records import Contribution, Count, Decision, Part, Record, Sha256, Xxh128
from skerry.runtime.reduce import Source, Workspace, average

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from skerry.runtime.bursts import Burst
    from skerry.runtime.carry import Carry, Kept, Trained
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

    norm: of what this call encoded, over all its floating point elements; None if it had nothing to offer.
    """

    decision: Sealed[Decision]
    digest: str
    contributed: bool
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


class _Brought(Record):
    """What one rank has uploaded, or why it has not."""

    parts: tuple[Part, ...] = ()
    tokens: Count = 0
    norm: float = 0.0
    reason: str | None = None


class _Offered(Record):
    """This slot's contribution as it stands in the log, or why the replica abstains. norm: of what was brought."""

    contribution: Contribution | None = None
    norm: float = 0.0
    reason: str | None = None


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
        self._max_norm = max_norm
        self._encoder = Encoder()
        self._workspace = Workspace()

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
            self._settle_past(place, carry, trained.fragment)
        opened = self._open(place, index)
        encoded, norm = None, None
        if not opened.decided:
            encoded, norm = self._offer(place, hosts, index, opened, veto, trained, carry)
        offered = self._clock.now()
        ruling = self._ranks.first(
            "decide", lambda: self._decide(place, opened, index, encoded, round_seconds), _Ruling
        )
        decided = self._clock.now()
        counted = _parts_of(self._presence.slot, ruling.contributions)
        late = None
        if carry is not None:
            carry.settle(trained.fragment, counted)
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
            self._keep(carry, late)
        return Average(
            decision=Sealed(ruling.decision, ruling.digest),
            digest=digest,
            contributed=counted is not None,
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
        self._settle_past(place, carry, fragment)
        if not carry.keeps(fragment) or self._journal.decision(place.round, place.exchange) is not None:
            return False
        kept = carry.to_offer(fragment)
        if kept is None:
            return False
        try:
            encoded = self._encoder.encode(kept.tensors, kept.index)
            reason = self._too_large(encoded.norm)
        except Invalid as error:
            encoded, reason = None, str(error)
        if encoded is None or reason is not None:
            # Later it would be no smaller.
            carry.drop(fragment)
            self._tell_dropped(place.round, reason or "not finite")
            return False
        load = Load(
            index=kept.index.digest,
            parts=encoded.parts,
            data=encoded.data,
            tokens=kept.tokens,
            inner_steps=kept.inner_steps,
            share=kept.share,
            discount=STALE,
            norm=encoded.norm,
        )
        carry.stake(fragment, place.round, place.exchange, encoded.parts)
        if self._exchange.contribute(place, load).record.parts != encoded.parts:
            return False
        emit("delta_brought", {"round": place.round, "slot": self._presence.slot, "from_round": kept.round})
        return True

    def close(self) -> None:
        """End the reading threads and forget the buffers."""
        self._workspace.close()

    def _open(self, place: Place, index: Index) -> _Opened:
        """What there is of this exchange, before anything is offered."""

        def look(issued: Sequence[_Issued]) -> _Opened:
            self._presence.fence()
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
        encoded: Encoded | None = None

        def bring() -> _Brought:
            nonlocal encoded, trained
            if veto is not None:
                return _Brought(reason=veto)
            try:
                encoded, trained = self._encode(place, hosts, index, trained, carry)
            except Invalid as error:
                return _Brought(reason=str(error))
            brought = _Brought(parts=encoded.parts, tokens=trained.tokens, norm=encoded.norm)
            if self._ranks.size > 1 and not opened.spoken:
                self._exchange.upload(place.round, _load([brought], opened.index, encoded, trained))
            return brought

        def contribute(all_ranks: Sequence[_Brought]) -> _Offered:
            norm = math.hypot(*(one.norm for one in all_ranks))
            reason = next((one.reason for one in all_ranks if one.reason is not None), None) or self._too_large(norm)
            if reason is not None or encoded is None:
                return _Offered(reason=reason)
            self._presence.withdraw_abstention()
            load = _load(all_ranks, opened.index, encoded, trained)
            return _Offered(contribution=self._exchange.contribute(place, load).record, norm=norm)

        offered = self._ranks.consult("offer", bring, contribute, _Offered)
        if offered.contribution is None:
            reason = offered.reason or "nothing to offer"
            emit("abstained", {"round": place.round, "slot": self._presence.slot, "reason": reason})
            self._presence.abstain(place.round, reason)
            return None, None
        self._presence.withdraw_abstention()
        # An earlier attempt or incarnation may have spoken for this slot: then memory does not hold what counts.
        stands = encoded is not None and self._mine(offered.contribution) == encoded.parts
        return (encoded, offered.norm) if stands else (None, None)

    def _encode(
        self, place: Place, hosts: Sequence[torch.Tensor], index: Index, trained: Trained, carry: Carry | None
    ) -> tuple[Encoded, Trained]:
        """These tensors and what was kept, if they can be offered together; else they alone, and it stays kept.

        Raises Invalid if they cannot be offered at all.
        """
        kept = None if carry is None else carry.to_add(trained.fragment, index)
        if carry is not None and kept is not None:
            with suppress(Invalid):  # these tensors alone may be good
                both = self._encoder.encode(together(hosts, kept), index)
                if self._too_large(both.norm) is None:
                    carry.stake(trained.fragment, place.round, place.exchange, both.parts)
                    return both, trained.plus(kept)
        return self._encoder.encode(hosts, index), trained

    def _settle_past(self, place: Place, carry: Carry, fragment: int) -> None:
        """What may stand in a round that was passed by a checkpoint: its decision tells whether it counts.

        What is at stake in this very round is settled once that is decided.
        """
        stake = carry.at_stake(fragment)
        if stake is None or stake.round == place.round:
            return
        decision = self._journal.decision(stake.round, stake.exchange)
        if decision is None:
            raise Corrupt(f"decision is gone: round={stake.round} exchange={stake.exchange}; the round was closed")
        members = self._exchange.contributions(decision.record)
        carry.settle(fragment, _parts_of(self._presence.slot, members))

    def _keep(self, carry: Carry, late: Kept) -> None:
        """Keep what came late, unless nobody could ever use it: it would spoil what it is added to."""
        reason = None if self._max_norm is None else self._too_large(norm_of(late.tensors))
        if reason is None and carry.keep(late):
            emit("delta_kept", {"round": late.round, "slot": self._presence.slot, "steps": late.inner_steps})
        else:
            self._tell_dropped(late.round, reason or "not finite")

    def _tell_dropped(self, round_number: int, reason: str) -> None:
        reason = f"what came late is dropped: {reason}"
        emit("abstained", {"round": round_number, "slot": self._presence.slot, "reason": reason})

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

    def _too_large(self, norm: float) -> str | None:
        """Why this must not be offered, if it is above the limit."""
        if self._max_norm is None or norm <= self._max_norm:
            return None
        return f"norm above the limit: norm={norm:.6g} max_norm={self._max_norm:g}"

    def _fault_in(self, contribution: Contribution, index: Index, encoded: Encoded | None) -> str | None:
        """Why a contribution cannot be averaged. What this call has just made is not read back."""
        parts = self._mine(contribution)
        if encoded is not None and contribution.slot == self._presence.slot and parts == encoded.parts:
            return None
        return fault_in(self._journal.store, contribution, parts, index)

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


def _load(brought: Sequence[_Brought], index: str, encoded: Encoded, trained: Trained) -> Load:
    """What all ranks bring, or the one that has encoded it."""
    return Load(
        index=index,
        parts=[part for one in brought for part in one.parts],
        data=encoded.data,
        tokens=sum(one.tokens for one in brought),
        inner_steps=trained.inner_steps,
        share=trained.share,
        norm=math.hypot(*(one.norm for one in brought)),
        ranks=tuple(len(one.parts) for one in brought) if len(brought) > 1 else (),
    )


def _parts_of(slot: str, contributions: Sequence[Contribution]) -> tuple[Part, ...] | None:
    """What counts for a slot; None if it is not among the members."""
    return next((one.parts for one in contributions if one.slot == slot), None)


def _ruling(decision: Sealed[Decision], contributions: Sequence[Contribution], me: Presence) -> _Ruling:
    return _Ruling(
        decision=decision.record,
        digest=decision.digest,
        contributions=tuple(contributions),
        repeats=any(one.slot == me.slot and one.incarnation != me.incarnation for one in contributions),
    )
