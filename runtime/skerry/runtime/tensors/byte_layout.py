"""Computes the position of every byte of a list of tensors, from their names, dtypes, shapes and the codec.

A tensor is a row of items: its elements, or with a quantizing codec blocks of elements with a scale. Tensors follow one
another in order, each at a multiple of 64 bytes or of its items, in parts of `Index.part_bytes`; a tensor that crosses
the end of a part is cut there into slices. The size of an item is a power of two, so no cut ever splits one. Therefore
equal index digests mean equal layouts, and any range of a contribution can be added to the same range of another. Needs
no torch and does no I/O.
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
from skerry.runtime.log.records import Codec, Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

Op: TypeAlias = Literal["avg", "sum", "max", "min", "keep"]
"""The reduction of a tensor. keep: it is state, never reduced (a checkpoint)."""

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


@dataclass(frozen=True)
class WireType:
    """An item of a tensor on the wire: its bytes, and the number of the tensor's elements in it."""

    item_bytes: int
    elements: int = 1


WIRE_TYPES: Final[Mapping[str, WireType]] = {
    **{name: WireType(size) for name, size in ITEM_BYTES.items()},
    "int8x254": WireType(256, 254),
    "int4x252": WireType(128, 252),
    "int2x248": WireType(64, 248),
    "sparse100x6400": WireType(128, 6400),
}
"""How elements are transmitted: as elements of a dtype, or in blocks that begin with a scale of 2 bytes."""
BLOCKS: Final[Mapping[Codec, str]] = {
    "int8": "int8x254",
    "int4": "int4x252",
    "int2": "int2x248",
    "sparse": "sparse100x6400",
}
_QUANTIZED: Final = frozenset({"float32", "float16", "bfloat16"})
MIN_QUANTIZED: Final = 4096
"""Smaller tensors (norms, biases) are a thousandth of a model, and their exactness is worth more than their bytes."""

ALIGNMENT: Final = 64
"""One cache line, and the widest vector load."""
BLOCK_BYTES: Final = 1 << 20
"""Each block has a digest: small enough to stay in a core's cache while it is verified and added."""
PART_BYTES: Final = 64 << 20
"""The largest body: large enough that the cost of requests is small, small enough to repeat after a failure."""
UNITS: Final = 32
"""So many parts of a contribution in layout 2, if they then have MIN_UNIT_BYTES to MAX_UNIT_BYTES."""
MIN_UNIT_BYTES: Final = 256 << 10
"""Four requests of this size at once fill 100 Mbit/s at 30 ms. Below BLOCK_BYTES in all, a single part is faster."""
MAX_UNIT_BYTES: Final = 8 << 20
_PAGE_BYTES: Final = 4096
"""Units below BLOCK_BYTES are a multiple of it: no item is split, and no unit is much smaller than the others."""
MAX_SLICES: Final = 4096
"""Slices in one part. With the limits on names and shapes a header stays below MAX_HEADER_BYTES."""
MAX_PARTS: Final = 1 << 15
"""Parts of a list of tensors (2 TiB): more do not fit the record that lists them."""
MAX_NAME_BYTES: Final = 256
MAX_DIMS: Final = 16
MAX_COUNT: Final = 1 << 62
"""The largest accepted size: sums of a few of them still fit 64 bits unsigned."""

OPS: Final[tuple[str, ...]] = get_args(Op)
CODECS: Final[tuple[Codec, ...]] = get_args(Codec)


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
    """Items [first, first + count) of tensor number `tensor`, at bytes [begin, end) of a body or a piece."""

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

        item_bytes: of every tensor on the wire (`Index.item_bytes`). Slices without items are left out.
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

    layout: 2 has parts that are each encoded, sent and reduced as one (see `log.run_record.Run`). Hashes by its digest,
    which is computed once: reuse the object between rounds.
    """

    tensors: tuple[TensorSpec, ...]
    codec: Codec = "none"
    layout: Layout = 1

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
        document += [self.layout] if self.layout > 1 else []
        return xxhash.xxh3_128_hexdigest(json.dumps(document, separators=(",", ":")).encode())

    @cached_property
    def codecs(self) -> Mapping[str, Codec]:
        """The digest of these tensors with each codec, to name the codec of another replica that has chosen its own."""
        return {Index(self.tensors, codec, self.layout).digest: codec for codec in CODECS}

    @cached_property
    def wire(self) -> tuple[str, ...]:
        """The wire type in which each tensor is transmitted."""
        return tuple(wire_type(spec, self.codec) for spec in self.tensors)

    @cached_property
    def item_bytes(self) -> tuple[int, ...]:
        """Bytes of one item of each tensor on the wire."""
        return tuple(WIRE_TYPES[name].item_bytes for name in self.wire)

    @cached_property
    def wire_bytes(self) -> tuple[int, ...]:
        """Bytes of each tensor on the wire."""
        return tuple(items * size for items, size in zip(self.items, self.item_bytes, strict=True))

    @cached_property
    def items(self) -> tuple[int, ...]:
        """Items of each tensor on the wire."""
        return tuple(item_count(spec, name) for spec, name in zip(self.tensors, self.wire, strict=True))

    def elements(self, piece: Slice) -> slice:
        """The elements of a slice in its tensor. The last item of a tensor may contain fewer than others."""
        each = WIRE_TYPES[self.wire[piece.tensor]].elements
        return slice(piece.first * each, min((piece.first + piece.count) * each, self.tensors[piece.tensor].count))

    @cached_property
    def expansion(self) -> int:
        """The number of bytes of sums for a transmitted byte: 2 for sixteen-bit floats, more for blocks."""
        wires = [WIRE_TYPES[name] for name in self.wire]
        return max([2, *(-(-4 * wire.elements // wire.item_bytes) for wire in wires if wire.elements > 1)])

    @cached_property
    def unit_bytes(self) -> int:
        """Bytes that are reduced as one: a part; in layout 1 a 64th of all, a multiple of BLOCK_BYTES."""
        most = MAX_UNIT_BYTES * 2 // self.expansion // BLOCK_BYTES * BLOCK_BYTES
        count = UNITS if self.layout == 2 else 64
        if self.layout == 1 or self._total > UNITS * BLOCK_BYTES or self._total <= BLOCK_BYTES:
            return max(BLOCK_BYTES, min(_rounded_up(-(-self._total // count), BLOCK_BYTES), most))
        return max(MIN_UNIT_BYTES, min(_rounded_up(-(-self._total // count), _PAGE_BYTES), most))

    @cached_property
    def part_bytes(self) -> int:
        """The largest body of a part."""
        if self.layout == 1:
            return PART_BYTES
        least = -(-self._total // (MAX_PARTS // 2))  # of a list that is very long
        if least <= self.unit_bytes:
            return self.unit_bytes
        return min(PART_BYTES, _rounded_up(least, BLOCK_BYTES))

    @cached_property
    def _total(self) -> int:
        """Bytes of all tensors and of the gaps between them, at most."""
        return sum(self.wire_bytes) + len(self.tensors) * max([ALIGNMENT, *self.item_bytes])

    @cached_property
    def parts(self) -> tuple[PartLayout, ...]:
        """The layout. No tensors, no parts. Raises Invalid beyond MAX_PARTS, before anything is laid out."""
        if self._total // PART_BYTES + len(self.tensors) // MAX_SLICES >= MAX_PARTS - 1:
            raise Invalid(f"list of tensors is too large: bytes={self._total} limit={MAX_PARTS * PART_BYTES}")
        most = self.part_bytes
        parts: list[PartLayout] = []
        slices: list[Slice] = []
        offset = 0

        def close() -> None:
            nonlocal slices, offset
            parts.append(PartLayout(len(parts), tuple(slices), slices[-1].end))
            slices, offset = [], 0

        for number, (items, size) in enumerate(zip(self.items, self.item_bytes, strict=True)):
            first, left = 0, items
            while True:
                offset = aligned(offset, size)
                if offset == most or len(slices) == MAX_SLICES:
                    close()
                count = min(left, (most - offset) // size)
                slices.append(Slice(number, first, count, offset, offset + count * size))
                offset += count * size
                first, left = first + count, left - count
                if not left:
                    break
        if slices:
            close()
        return tuple(parts)


def wire_type(spec: TensorSpec, codec: Codec) -> str:
    """The name of the wire type in which a tensor is transmitted: its dtype, or another key of WIRE_TYPES."""
    if codec == "bf16" and spec.dtype == "float32":
        return "bfloat16"
    if codec in BLOCKS and spec.op == "avg" and spec.dtype in _QUANTIZED and spec.count >= MIN_QUANTIZED:
        return BLOCKS[codec]
    return spec.dtype


def item_count(spec: TensorSpec, wire: str) -> int:
    """The number of items of a tensor that is transmitted as `wire`."""
    return -(-spec.count // WIRE_TYPES[wire].elements)


def _rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step


def aligned(offset: int, item_bytes: int) -> int:
    """The first byte from `offset` on where a tensor with items of this size may begin."""
    return _rounded_up(offset, max(ALIGNMENT, item_bytes))
