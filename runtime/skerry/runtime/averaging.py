"""One burst of tensors through one exchange and back: the only place where torch meets the round protocol.

All tensors of a burst travel in ONE contribution; nothing is contributed to an exchange that is decided already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.runtime.codec.tensors import Encoder
from skerry.runtime.errors import Invalid
from skerry.runtime.events import emit
from skerry.runtime.exchange import Load
from skerry.runtime.reduce import Source, Workspace, average

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from skerry.runtime.bursts import Burst
    from skerry.runtime.clock import Clock
    from skerry.runtime.codec.layout import Codec, Index
    from skerry.runtime.codec.tensors import Encoded
    from skerry.runtime.exchange import Exchange, Place
    from skerry.runtime.journal import Journal, Sealed
    from skerry.runtime.membership import Presence
    from skerry.runtime.records import Decision


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
        veto: str | None = None,
        tokens: int = 0,
        inner_steps: int = 0,
        round_seconds: float | None = None,
    ) -> Average:
        """Contribute the burst, wait for the decision, and leave the average in the burst's tensors.

        An exchange that is decided already is followed: nothing is contributed. veto: why this replica must not
        contribute; like a tensor that is not finite, that is told as an abstention, and the average is still received.
        Raises Fenced if a newer incarnation owns the slot, and what `Exchange.decide` and `average` raise.
        """
        started = self._clock.now()
        self._presence.fence()
        hosts = burst.hosts()
        index = burst.index(self._codec)
        encoded: Encoded | None = None
        if self._journal.decision(place.round, place.exchange) is None:
            encoded = self._offer(place, hosts, index, veto, tokens=tokens, inner_steps=inner_steps)
        offered = self._clock.now()
        abstention = self._presence.progress.abstains
        abstaining = abstention is not None and abstention.round == place.round
        decision = self._exchange.decide(place, index.digest, abstaining=abstaining, round_seconds=round_seconds)
        decided = self._clock.now()
        sources = self._sources(decision.record, encoded)
        averaged = average(self._journal.store, sources, index, hosts, workspace=self._workspace)
        burst.land()
        return Average(
            decision=decision,
            digest=averaged.digest,
            contributed=any(source.slot == self._presence.slot for source in sources),
            seconds={
                "upload": offered - started,
                "wait": decided - offered,
                "average": self._clock.now() - decided,
            },
        )

    def close(self) -> None:
        """End the reading threads and forget the buffers."""
        self._workspace.close()

    def _offer(
        self,
        place: Place,
        hosts: Sequence[torch.Tensor],
        index: Index,
        veto: str | None,
        *,
        tokens: int,
        inner_steps: int,
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
        load = Load(index=index.digest, parts=encoded.parts, data=encoded.data, tokens=tokens, inner_steps=inner_steps)
        stands = self._exchange.contribute(place, load).record
        # An earlier attempt or incarnation may have spoken for this slot: then memory does not hold what counts.
        return encoded if stands.parts == encoded.parts else None

    def _sources(self, decision: Decision, encoded: Encoded | None) -> list[Source]:
        contributions = self._exchange.contributions(decision)
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
