"""Contributions that no replica can use, as a broken replica makes them: each must be refused before a proposal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import xxhash
from tests.simulation.training import SIZES, index_of

from skerry.runtime.protocol.exchange import ContributionDraft
from skerry.runtime.tensors.payload_encoder import encode

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from tests.simulation.world import Process

    from skerry.runtime.log.records import Part
    from skerry.runtime.protocol.exchange_view import ExchangeId
    from skerry.runtime.tensors.byte_layout import Index
    from skerry.runtime.training.open_session import Session


@dataclass(frozen=True, kw_only=True)
class _Object:
    """A payload object and the record that describes it."""

    part: Part
    body: bytes


def _longer(item: _Object) -> _Object:
    return _Object(part=item.part.model_copy(update={"total_bytes": item.part.total_bytes + 64}), body=item.body)


def _short(item: _Object) -> _Object:
    return _Object(part=item.part, body=item.body[:-1])


def _another_version(item: _Object) -> _Object:
    body = item.body[:8] + (2).to_bytes(8, "little") + item.body[16:]
    digest = xxhash.xxh3_128_hexdigest(body[: item.part.header_bytes])
    return _Object(part=item.part.model_copy(update={"digest": digest}), body=body)


def _as_it_is(item: _Object) -> _Object:
    return item


KINDS: Final[Mapping[str, Callable[[_Object], _Object]]] = {
    "a size that cannot be": _longer,
    "a body that is short": _short,
    "another version": _another_version,
    "other tensors": _as_it_is,
}


def contribute_poison(process: Process, session: Session, index: Index, place: ExchangeId, draw: random.Random) -> None:
    """Make it this slot's contribution, unless the exchange is decided or the slot has spoken."""
    if session.log.read_decision(place.round, place.exchange) is not None:
        return
    kind = draw.choice(list(KINDS))
    digest = index.digest
    if kind == "other tensors":
        index = index_of(len(index.parts), "tenzor")
    # Other bytes each time: under the name of an earlier one's sound payload, a short one would be sound as well.
    value = draw.random()
    encoded = encode([torch.full((size,), value) for size in SIZES], index)
    items = [
        KINDS[kind](_Object(part=part, body=b"".join(bytes(piece) for piece in encoded.data(number))))
        for number, part in enumerate(encoded.parts)
    ]
    process.world.fault("poison", process.name, kind)
    session.exchange.contribute(
        place,
        ContributionDraft(
            index=digest,
            parts=[item.part for item in items],
            data=lambda number: items[number].body,
            tokens=0,
            inner_steps=1,
        ),
    )
