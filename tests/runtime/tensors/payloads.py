"""A store with a chosen profile and chosen damage, and builders of stored payloads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
import xxhash

from skerry.runtime.log import keys
from skerry.runtime.log.records import Part
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.tensors.byte_layout import Index, TensorSpec
from skerry.runtime.tensors.payload_encoder import Encoder, spec_of
from skerry.runtime.tensors.reduce import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.store.interface import Profile, Span
    from skerry.runtime.tensors.byte_layout import Codec, Op

    Spoil: TypeAlias = Callable[[int, str, Span | None, memoryview], int | None]

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


class BusyStore(MemoryStore):
    """A memory store with the profile of a remote one; it counts reads and may damage their results.

    spoil: gets the number of the read (from 1), the key, the span and the bytes; it changes them, or returns how many
    of them are returned.
    """

    def __init__(
        self,
        *,
        streams: int = 1,
        piece_bytes: int = 1 << 20,
        spoil: Spoil | None = None,
    ) -> None:
        super().__init__()
        self._profile = replace(MemoryStore().profile, streams=streams, piece_bytes=piece_bytes)
        self.poll_cap = self._profile.poll_cap
        self.spoil = spoil
        self.reads = 0

    @property
    def profile(self) -> Profile:
        return replace(self._profile, poll_cap=self.poll_cap)

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        self.reads += 1
        number = self.reads
        view = super().read(key, span, into)
        if view is None or self.spoil is None:
            return view
        if view.readonly:
            view = memoryview(bytearray(view))
        length = self.spoil(number, key, span, view)
        return view if length is None else view[:length]


def flipping(position: int, prefix: str = "") -> Spoil:
    """Damages one bit of the byte at `position` of every object below a prefix, in every read of it."""

    def spoil(_number: int, key: str, span: Span | None, view: memoryview) -> None:
        start = 0 if span is None else span.start
        if key.startswith(prefix) and start <= position < start + len(view):
            view[position - start] ^= 1

    return spoil


def index_for(tensors: Sequence[torch.Tensor], codec: Codec = "none", op: Op = "avg") -> Index:
    return Index(tuple(spec_of(f"t{i}", tensor, op) for i, tensor in enumerate(tensors)), codec)


def publish(
    store: MemoryStore, slot: str, tensors: Sequence[torch.Tensor], index: Index, *, weight: float = 1.0
) -> Source:
    """Store a contribution of `slot` to round 0, encoded from copies."""
    encoded = Encoder().encode([tensor.clone() for tensor in tensors], index)
    for number, part in enumerate(encoded.parts):
        store.create(keys.payload(0, slot, part.digest), encoded.data(number))
    return Source(slot=slot, weight=weight, round=0, parts=encoded.parts, local=encoded)


def resealed(data: bytes, *, total_bytes: int | None = None) -> Part:
    """A record that names these header bytes, valid or not, as a hostile writer would publish it."""
    return Part(
        digest=xxhash.xxh3_128_hexdigest(data),
        header_bytes=len(data),
        total_bytes=len(data) if total_bytes is None else total_bytes,
    )


def filled(spec: TensorSpec, seed: int) -> torch.Tensor:
    """A tensor of this spec with random finite values."""
    generator = torch.Generator().manual_seed(seed)
    if spec.dtype in FLOATS:
        return torch.randn(spec.shape, generator=generator, dtype=torch.float64).to(getattr(torch, spec.dtype))
    low, high = (0, 2) if spec.dtype == "bool" else (0, 100)
    return torch.randint(low, high, spec.shape, generator=generator).to(getattr(torch, spec.dtype))
