"""One burst of tensors through one exchange and back: the only place where torch meets the round protocol.

All tensors of a burst travel in ONE contribution; nothing is contributed to an exchange that is decided already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.runtime.carry import kept_of
from skerry.runtime.codec.tensors import Encoder
from skerry.runtime.errors import Invalid
from skerry.runtime.events import emit
from skerry.runtime.exchange import Load
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
    from skerry.runtime.journal import Journal, Sealed
    from skerry.runtime.membership import Presence
    from skerry.runtime.records import Contribution, Decision


@dataclass(frozen=True, kw_only=True)
class Average:
    """What an exchange gave. digest: of the average's bytes. contributed: this slot is among the members."""

    decision: Sealed[Decision]
    digest: str
    contributed: bool
    seconds: dict[str, float]


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
    ) -> None:
        self._journal = journal
        self._exchange = exchange
        self._presence = presence
        self._clock = clock
        self._codec: Codec = codec
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
        contribute; like a tensor that is not finite, that is told as an abstention, and the average is still received.
        carry: takes what no record counts, and gives what it kept for this fragment before.
        Raises Fenced if a newer incarnation owns the slot, and what `Exchange.decide` and `average` raise.
        """
        started = self._clock.now()
        self._presence.fence()
        hosts = burst.hosts()
        index = burst.index(self._codec)
        encoded: Encoded | None = None
        if self._journal.decision(place.round, place.exchange) is None:
            if carry is not None and veto is None:
                trained = trained.plus(carry.add_to(trained.fragment, index, hosts))
            encoded = self._offer(place, hosts, index, veto, trained)
        offered = self._clock.now()
        abstention = self._presence.progress.abstains
        abstaining = abstention is not None and abstention.round == place.round
        decision = self._exchange.decide(place, index.digest, abstaining=abstaining, round_seconds=round_seconds)
        decided = self._clock.now()
        contributions = self._exchange.contributions(decision.record)
        contributed = any(one.slot == self._presence.slot for one in contributions)
        if carry is not None:
            carry.decided(trained.fragment, place.round, counted=contributed and encoded is None)
            if trained.inner_steps and not (contributed and encoded is not None) and not abstaining and veto is None:
                full_steps = max(one.inner_steps for one in contributions)
                carry.keep(kept_of(hosts, index, place.round, trained, full_steps))
                emit("delta_kept", {"round": place.round, "slot": self._presence.slot, "steps": trained.inner_steps})
        sources = self._sources(decision.record, contributions, encoded)
        averaged = average(self._journal.store, sources, index, hosts, workspace=self._workspace)
        burst.land()
        return Average(
            decision=decision,
            digest=averaged.digest,
            contributed=contributed,
            seconds={
                "upload": offered - started,
                "wait": decided - offered,
                "average": self._clock.now() - decided,
            },
        )

    def bring(self, place: Place, carry: Carry, fragment: int) -> bool:
        """Contribute what was kept for this fragment to a round that begins, before it is trained for.

        False: there is nothing, it is held back, the round is decided, or this slot has spoken for it already.
        """
        if not carry.keeps(fragment) or self._journal.decision(place.round, place.exchange) is not None:
            return False
        kept = carry.to_offer(fragment)
        if kept is None:
            return False
        encoded = self._encoder.encode(kept.scaled(), kept.index)
        load = Load(
            index=kept.index.digest,
            parts=encoded.parts,
            data=encoded.data,
            tokens=kept.tokens,
            inner_steps=kept.inner_steps,
            discount=kept.discount(by_tokens=self._journal.run.weighting == "tokens"),
        )
        if self._exchange.contribute(place, load).record.parts != encoded.parts:
            return False
        carry.offered(fragment, place.round)
        emit("delta_brought", {"round": place.round, "slot": self._presence.slot, "from_round": kept.round})
        return True

    def close(self) -> None:
        """End the reading threads and forget the buffers."""
        self._workspace.close()

    def _offer(
        self,
        place: Place,
        hosts: Sequence[torch.Tensor],
        index: Index,
        veto: str | None,
        trained: Trained,
    ) -> Encoded | None:
        """Contribute, or abstain. Returns what this call encoded if it stands in the log."""
        try:
            encoded = None if veto is not None else self._encoder.encode(hosts, index)
        except Invalid as error:
            encoded, veto = None, str(error)
        if encoded is None:
            reason = veto or "nothing to offer"
            emit("abstained", {"round": place.round, "slot": self._presence.slot, "reason": reason})
            self._presence.abstain(place.round, reason)
            return None
        self._presence.withdraw_abstention()
        load = Load(
            index=index.digest,
            parts=encoded.parts,
            data=encoded.data,
            tokens=trained.tokens,
            inner_steps=trained.inner_steps,
        )
        stands = self._exchange.contribute(place, load).record
        # An earlier attempt or incarnation may have spoken for this slot: then memory does not hold what counts.
        return encoded if stands.parts == encoded.parts else None

    def _sources(
        self, decision: Decision, contributions: Sequence[Contribution], encoded: Encoded | None
    ) -> list[Source]:
        return [
            Source(
                slot=share.slot,
                weight=share.weight,
                round=decision.round,
                parts=contribution.parts,
                local=encoded if encoded is not None and share.slot == self._presence.slot else None,
            )
            for share, contribution in zip(decision.members, contributions, strict=True)
        ]
