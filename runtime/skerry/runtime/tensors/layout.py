"""Computes the position of every byte of a list of tensors, from their names, dtypes, shapes and the codec.

Tensors follow one another in order, each at a multiple of 64 bytes, in parts of at most PART_BYTES; a tensor that
crosses the end of a part is cut there into slices. Therefore equal index digests mean equal layouts, and any range of a
contribution can be added to the same range of another. Needs no torch and does no I/O.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

import xxhash

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

Op: TypeAlias = Literal["avg", "sum", "max", "min", "keep"]
"""The reduction of a tensor. keep: it is state, never reduced (a checkpoint)."""
Codec: TypeAlias = Literal["none", "bf16"]
"""none: bytes are unchanged. bf16: float32 is transmitted as bfloat16, all other dtypes unchanged."""

ITEM_BYTES: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Every supported dtype. All sizes divide ALIGNMENT, so a cut never splits an element."""

ALIGNMENT: Final = 64
"""One cache line, and the widest vector load."""
BLOCK_BYTES: Final = 1 << 20
"""Each block has a digest: small enough to stay in a core's cache while it is verified and added."""
PART_BYTES: Final = 64 << 20
"""The largest body: large enough that the cost of requests is small, small enough to repeat after a failure."""
MAX_SLICES: Final = 4096
"""Slices in one part. With the limits on names and shapes a header stays below MAX_HEADER_BYTES."""
MAX_PARTS: Final = 1 << 15
"""Parts of a list of tensors (2 TiB): more do not fit the record that lists them."""
MAX_NAME_BYTES: Final = 256
MAX_DIMS: Final = 16
MAX_COUNT: Final = 1 << 62
"""The largest accepted size: sums of a few of them still fit 64 bits unsigned."""

OPS: Final[tuple[str, ...]] = get_args(Op)
CODECS: Final[tuple[str, ...]] = get_args(Codec)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as all replicas must agree on it. dtype: torch's name without the prefix, like "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    op: Op = "avg"

    @property
    def count(self) -> int:
        """Number of elements; 1 for shape ()."""
        return math.prod(self.shape)

    def check(self) -> None:
        """Raises Invalid, naming the tensor and the field, if it is not supported."""
        tensor = f"tensor={self.name[:MAX_NAME_BYTES]!r}"
        if not self.name or not self.name.isprintable() or len(self.name.encode()) > MAX_NAME_BYTES:
            raise Invalid(f"name must be 1 to {MAX_NAME_BYTES} bytes of printable text: {tensor}")
        if self.dtype not in ITEM_BYTES:
            allowed = ", ".join(ITEM_BYTES)
            raise Invalid(f"dtype is not supported: {tensor} dtype={self.dtype[:32]!r} allowed={allowed}")
        if self.op not in OPS:
            raise Invalid(f"op is unknown: {tensor} op={self.op[:32]!r} allowed={', '.join(OPS)}")
        if len(self.shape) > MAX_DIMS or any(not 0 <= size <= MAX_COUNT for size in self.shape):
            raise Invalid(f"shape is out of range: {tensor} shape={self.shape[:MAX_DIMS]} dims={len(self.shape)}")
        # Sizes of 0 count as 1: torch computes strides from the other dimensions of an empty tensor too.
        if math.prod(max(1, size) for size in self.shape) * ITEM_BYTES[self.dtype] > MAX_COUNT:
            raise Invalid(f"shape is too large: {tensor} shape={self.shape}")


@dataclass(frozen=True)
class Slice:
    """Elements [first, first + count) of tensor number `tensor`, at bytes [begin, end) of a body or a piece."""

    tensor: int
    first: int
    count: int
    begin: int
    end: int


@dataclass(frozen=True)
class PartLayout:
    """One payload object's body: its slices, in order of begin and of end."""

    number: int
    slices: tuple[Slice, ...]
    body_bytes: int

    @property
    def blocks(self) -> int:
        """The number of block digests in the header."""
        return -(-self.body_bytes // BLOCK_BYTES)

    def between(self, start: int, stop: int, item_bytes: tuple[int, ...]) -> tuple[Slice, ...]:
        """The slices in body bytes [start, stop), multiples of ALIGNMENT or the end; spans count from start.

        item_bytes: of every tensor on the wire (`Index.item_bytes`). Slices without elements are left out.
        """
        pieces: list[Slice] = []
        for whole in self.slices[bisect_right(self._ends, start) : bisect_left(self._begins, stop)]:
            begin, end = max(whole.begin, start), min(whole.end, stop)
            if begin < end:
                size = item_bytes[whole.tensor]
                first = whole.first + (begin - whole.begin) // size
                pieces.append(Slice(whole.tensor, first, (end - begin) // size, begin - start, end - start))
        return tuple(pieces)

    @cached_property
    def _begins(self) -> list[int]:
        return [piece.begin for piece in self.slices]

    @cached_property
    def _ends(self) -> list[int]:
        return [piece.end for piece in self.slices]


@dataclass(frozen=True)
class Index:
    """The tensors of one contribution or checkpoint, in order, and their codec. Raises Invalid if any is not supported.

    Hashes by its digest, which is computed once: reuse the object between rounds.
    """

    tensors: tuple[TensorSpec, ...]
    codec: Codec = "none"

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise Invalid(f"codec is unknown: codec={self.codec[:32]!r} allowed={', '.join(CODECS)}")
        names: set[str] = set()
        for spec in self.tensors:
            spec.check()
            if spec.name in names:
                raise Invalid(f"two tensors have the same name: tensor={spec.name!r}")
            names.add(spec.name)

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of the canonical JSON. Contributions can be averaged if and only if these are equal."""
        document = [self.codec, [[spec.name, spec.dtype, spec.shape, spec.op] for spec in self.tensors]]
        return xxhash.xxh3_128_hexdigest(json.dumps(document, separators=(",", ":")).encode())

    @cached_property
    def wire(self) -> tuple[str, ...]:
        """The dtype in which each tensor is transmitted."""
        return tuple(wire_dtype(spec.dtype, self.codec) for spec in self.tensors)

    @cached_property
    def item_bytes(self) -> tuple[int, ...]:
        """Bytes of one element of each tensor on the wire."""
        return tuple(ITEM_BYTES[dtype] for dtype in self.wire)

    @cached_property
    def parts(self) -> tuple[PartLayout, ...]:
        """The layout. No tensors, no parts. Raises Invalid beyond MAX_PARTS, before anything is laid out."""
        total = sum(spec.count * size + ALIGNMENT for spec, size in zip(self.tensors, self.item_bytes, strict=True))
        if total // PART_BYTES + len(self.tensors) // MAX_SLICES >= MAX_PARTS - 1:
            raise Invalid(f"list of tensors is too large: bytes={total} limit={MAX_PARTS * PART_BYTES}")
        parts: list[PartLayout] = []
        slices: list[Slice] = []
        offset = 0

        def close() -> None:
            nonlocal slices, offset
            parts.append(PartLayout(len(parts), tuple(slices), slices[-1].end))
            slices, offset = [], 0

        for number, (spec, size) in enumerate(zip(self.tensors, self.item_bytes, strict=True)):
            first, left = 0, spec.count
            while True:
                if offset == PART_BYTES or len(slices) == MAX_SLICES:
                    close()
                count = min(left, (PART_BYTES - offset) // size)
                slices.append(Slice(number, first, count, offset, offset + count * size))
                offset = _aligned(offset + count * size)
                first, left = first + count, left - count
                if not left:
                    break
        if slices:
            close()
        return tuple(parts)


def wire_dtype(dtype: str, codec: Codec) -> str:
    """The dtype in which a tensor of `dtype` is transmitted."""
    return "bfloat16" if codec == "bf16" and dtype == "float32" else dtype


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
