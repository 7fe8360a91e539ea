"""Writes the contribution of a replica: each rank uploads its tensors, rank 0 writes one record.

A part is uploaded while the next one is encoded.

Nothing is contributed unless every rank can upload its part. The caller decides when; the log, what counts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

from skerry.runtime.errors import Invalid
from skerry.runtime.log.record_parsing import Record
from skerry.runtime.log.records import Contribution, Count, Part, Telemetry
from skerry.runtime.protocol.exchange import ContributionDraft
from skerry.runtime.ranks.interface import combine_digests
from skerry.runtime.store.parallel import BackgroundRequests
from skerry.runtime.tensors.payload_encoder import Encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from typing_extensions import Buffer

    from skerry.runtime.protocol.exchange import Exchange
    from skerry.runtime.protocol.exchange_view import ExchangeId
    from skerry.runtime.protocol.slot_claim_and_heartbeats import Presence
    from skerry.runtime.ranks.interface import Channel
    from skerry.runtime.store.interface import Store
    from skerry.runtime.tensors.byte_layout import Index
    from skerry.runtime.tensors.device_encoding import EncodedTensor
    from skerry.runtime.tensors.payload_encoder import Encoded
    from skerry.runtime.training.work_counter import Trained

    Send: TypeAlias = Callable[[Part, list[Buffer]], None]


class _Uploaded(Record):
    """One rank's upload, or the reason for its absence. index: of its tensors."""

    index: str = ""
    parts: tuple[Part, ...] = ()
    tokens: Count = 0
    norm: float = 0.0
    telemetry: Telemetry | None = None
    reason: str | None = None


class WrittenContribution(Record):
    """This slot's contribution as it is in the log, or the reason for abstaining. norm: over all ranks.

    mine: it is what all ranks have just uploaded, and not an earlier attempt's or incarnation's.
    """

    contribution: Contribution | None = None
    mine: bool = False
    norm: float = 0.0
    reason: str | None = None


class ContributionWriter:
    """Encodes, uploads and records contributions. For the exchange thread; its buffer is reused."""

    def __init__(
        self, store: Store, exchange: Exchange, presence: Presence, ranks: Channel, max_norm: float | None
    ) -> None:
        """max_norm: limit of the L2 norm over all ranks; None has no limit."""
        self._store = store
        self._exchange = exchange
        self._presence = presence
        self._ranks = ranks
        self._max_norm = max_norm
        self._encoder = Encoder()

    def encode(
        self,
        tensors: Sequence[torch.Tensor],
        index: Index,
        ready: Sequence[EncodedTensor | None] = (),
        send: Send | None = None,
    ) -> Encoded:
        """Encode this rank's tensors. Earlier results become invalid. Raises Invalid. For the others see `Encoder`."""
        return self._encoder.encode(tensors, index, ready, send)

    def write(
        self,
        place: ExchangeId,
        index: Index,
        make: Callable[[Send | None], Encoded],
        trained: Trained,
        *,
        veto: str | None = None,
        uploads: bool = True,
    ) -> tuple[Encoded | None, WrittenContribution]:
        """Contribute the result of `make` on each rank. Returns this rank's part, and the contribution in the log.

        make: gives each part to the function, as soon as it is complete, that it is called with. It may raise Invalid;
        then there is nothing to contribute, as there is with a veto. uploads: False if the log has this slot's
        contribution already; then the function is None. Raises what `Exchange.contribute` raises.
        """
        encoded: Encoded | None = None

        def upload() -> _Uploaded:
            nonlocal encoded
            if veto is not None:
                return _Uploaded(reason=veto)
            try:
                if uploads:
                    with BackgroundRequests(self._store) as requests:
                        encoded = make(
                            lambda part, data: requests.submit(lambda: self._exchange.put(place.round, part, data))
                        )
                else:
                    encoded = make(None)
            except Invalid as error:
                return _Uploaded(reason=str(error))
            return _Uploaded(
                index=index.digest,
                parts=encoded.parts,
                tokens=trained.tokens,
                norm=encoded.norm,
                telemetry=trained.telemetry,
            )

        def contribute(all_ranks: Sequence[_Uploaded]) -> WrittenContribution:
            reason = self._fault(all_ranks)
            if reason is not None or encoded is None:
                return WrittenContribution(reason=reason)
            self._presence.withdraw_abstention()
            load = _load(all_ranks, trained)
            stored = self._exchange.contribute(place, load).record
            return WrittenContribution(
                contribution=stored, mine=stored.parts == tuple(load.parts), norm=_norm(all_ranks)
            )

        written = self._ranks.reduce_on_rank0("offer", upload, contribute, WrittenContribution)
        return encoded, written

    def _fault(self, all_ranks: Sequence[_Uploaded]) -> str | None:
        """The reason for abstaining: of the first rank that has one, or that the norm is too large; else None."""
        reasons = [rank_result.reason for rank_result in all_ranks if rank_result.reason is not None]
        norm, limit = _norm(all_ranks), self._max_norm
        too_large = limit is not None and norm > limit
        return next(iter(reasons), f"norm above the limit: norm={norm:.6g} max_norm={limit:g}" if too_large else None)


def _norm(all_ranks: Sequence[_Uploaded]) -> float:
    return math.hypot(*(rank_result.norm for rank_result in all_ranks))


def _load(uploaded: Sequence[_Uploaded], trained: Trained) -> ContributionDraft:
    """Merge the parts of these ranks, which are uploaded, into one draft."""
    return ContributionDraft(
        index=combine_digests([rank_result.index for rank_result in uploaded]),
        parts=[part for rank_result in uploaded for part in rank_result.parts],
        data=None,
        tokens=sum(rank_result.tokens for rank_result in uploaded),
        inner_steps=trained.inner_steps,
        share=trained.share,
        norm=_norm(uploaded),
        ranks=tuple(len(rank_result.parts) for rank_result in uploaded) if len(uploaded) > 1 else (),
        telemetry=Telemetry.of_ranks([rank_result.telemetry for rank_result in uploaded]),
    )
