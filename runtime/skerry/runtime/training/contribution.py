"""What the ranks of one replica offer together: each rank its own tensors, all of them as one contribution.

Nothing is offered unless every rank can offer its part. Knows nothing of when, nor of what becomes of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from skerry.runtime.codec.tensors import Encoder
from skerry.runtime.errors import Invalid
from skerry.runtime.exchange import Load
from skerry.runtime.ranks import fold
from skerry.runtime.records import Contribution, Count, Part, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from skerry.runtime.carry import Trained
    from skerry.runtime.codec.layout import Index
    from skerry.runtime.codec.tensors import Encoded
    from skerry.runtime.exchange import Exchange, Place
    from skerry.runtime.membership import Presence
    from skerry.runtime.ranks import Ranks


class _Brought(Record):
    """What one rank has uploaded, or why it has not. index: of its tensors."""

    index: str = ""
    parts: tuple[Part, ...] = ()
    tokens: Count = 0
    norm: float = 0.0
    reason: str | None = None


class Offered(Record):
    """This slot's contribution as it stands in the log, or why there is nothing to offer. norm: of what was brought.

    mine: it is what all ranks have just brought, and not an earlier attempt's or incarnation's.
    """

    contribution: Contribution | None = None
    mine: bool = False
    norm: float = 0.0
    reason: str | None = None


class Offering:
    """For the thread that runs exchanges, with a buffer that is kept between them."""

    def __init__(self, exchange: Exchange, presence: Presence, ranks: Ranks, max_norm: float | None) -> None:
        """max_norm: what is above it, over all ranks, is not offered; None offers all."""
        self._exchange = exchange
        self._presence = presence
        self._ranks = ranks
        self._max_norm = max_norm
        self._encoder = Encoder()

    def encode(self, tensors: Sequence[torch.Tensor], index: Index) -> Encoded:
        """This rank's tensors as they would travel. Earlier results become invalid. Raises Invalid."""
        return self._encoder.encode(tensors, index)

    def try_encode(self, tensors: Sequence[torch.Tensor], index: Index) -> tuple[Encoded | None, str | None]:
        """This rank's tensors as they would travel, if those of all ranks may; else why not."""
        encoded: Encoded | None = None

        def encode() -> _Brought:
            nonlocal encoded
            try:
                encoded = self.encode(tensors, index)
            except Invalid as error:
                return _Brought(reason=str(error))
            return _Brought(norm=encoded.norm)

        def judge(all_ranks: Sequence[_Brought]) -> Offered:
            return Offered(reason=self._fault(all_ranks))

        reason = self._ranks.consult("encode", encode, judge, Offered).reason
        return (encoded if reason is None else None), reason

    def offer(
        self,
        place: Place,
        index: Index,
        make: Callable[[], Encoded],
        trained: Trained,
        *,
        discount: float = 1.0,
        veto: str | None = None,
        uploads: bool = True,
    ) -> tuple[Encoded | None, Offered]:
        """Contribute what `make` gives on each rank. Returns this rank's part, and what stands in the log now.

        make: may raise Invalid; then there is nothing to offer, as there is with a veto. uploads: False if this slot's
        contribution stands already. Raises what `Exchange.contribute` raises.
        """
        encoded: Encoded | None = None

        def bring() -> _Brought:
            nonlocal encoded
            if veto is not None:
                return _Brought(reason=veto)
            try:
                encoded = make()
            except Invalid as error:
                return _Brought(reason=str(error))
            brought = _Brought(index=index.digest, parts=encoded.parts, tokens=trained.tokens, norm=encoded.norm)
            if self._ranks.size > 1 and uploads:
                self._exchange.upload(place.round, _load([brought], encoded, trained, discount))
            return brought

        def contribute(all_ranks: Sequence[_Brought]) -> Offered:
            reason = self._fault(all_ranks)
            if reason is not None or encoded is None:
                return Offered(reason=reason)
            self._presence.withdraw_abstention()
            load = _load(all_ranks, encoded, trained, discount)
            stands = self._exchange.contribute(place, load).record
            return Offered(contribution=stands, mine=stands.parts == tuple(load.parts), norm=_norm(all_ranks))

        offered = self._ranks.consult("offer", bring, contribute, Offered)
        return encoded, offered

    def _fault(self, all_ranks: Sequence[_Brought]) -> str | None:
        """Why this must not be offered, if one rank says so or it is too large."""
        reasons = [one.reason for one in all_ranks if one.reason is not None]
        return reasons[0] if reasons else too_large(_norm(all_ranks), self._max_norm)


def too_large(norm: float, limit: float | None) -> str | None:
    """Why this must not be offered, if it is above the limit."""
    return None if limit is None or norm <= limit else f"norm above the limit: norm={norm:.6g} max_norm={limit:g}"


def _norm(all_ranks: Sequence[_Brought]) -> float:
    return math.hypot(*(one.norm for one in all_ranks))


def _load(brought: Sequence[_Brought], encoded: Encoded, trained: Trained, discount: float) -> Load:
    """What all ranks bring, or the one that has encoded it."""
    return Load(
        index=fold([one.index for one in brought]),
        parts=[part for one in brought for part in one.parts],
        data=encoded.data,
        tokens=sum(one.tokens for one in brought),
        inner_steps=trained.inner_steps,
        share=trained.share,
        late=trained.late,
        discount=discount,
        norm=_norm(brought),
        ranks=tuple(len(one.parts) for one in brought) if len(brought) > 1 else (),
    )
