"""The format of a payload object. Only this module writes and checks it.

    magic, version, length of the header   8 + 8 + 8 bytes, little-endian
    header                                 JSON: the tensors' slices, one xxh3-128 digest for each block of the body
    zeros                                  up to a multiple of 64
    body                                   little-endian items, elements or blocks (see `layout`)

Version 2 is the same with a codec that quantizes: a skerry that does not know these codecs says so.

The object's name is the digest of everything before the body, and the header contains the digest of every block.
Therefore any range can be verified before it is used, and equal names mean equal bytes. This protects against
accidental damage. Values are checked before they are trusted, or before memory is allocated for them. Needs no torch
and no pickle; does no I/O.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Final, Literal

import xxhash
from pydantic import FailFast, Field

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log.record_parsing import Record
from skerry.runtime.log.records import Count, Part, Xxh128
from skerry.runtime.tensors.byte_layout import (
    ALIGNMENT,
    BLOCK_BYTES,
    MAX_PARTS,
    MAX_SLICES,
    PART_BYTES,
    WIRE_TYPES,
    Codec,
    Index,
    Op,
    PartLayout,
    Slice,
    TensorSpec,
    aligned,
    item_count,
    wire_type,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "Header",
    "Index",
    "PartLayout",
    "Slice",
    "TensorSpec",
    "build_header",
    "check_parts",
    "check_whole",
    "index_from_headers",
    "read_header",
]

MAGIC: Final = b"skerry\r\n"
"""The line end detects a transfer that changed line ends, as in PNG."""
VERSIONS: Final[Mapping[Codec, int]] = {"none": 1, "bf16": 1, "int8": 2, "int4": 2, "int2": 2, "sparse": 3}
MAX_HEADER_BYTES: Final = 4 << 20
"""MAX_SLICES slices with the longest names and shapes fit."""

_PREAMBLE: Final = struct.Struct("<8sQQ")
_NO_DIGEST: Final = "0" * 32
_DIGESTS: Final = re.compile(rb'"[0-9a-f]{32}"(,"[0-9a-f]{32}")*')
Limit = Annotated[int, Field(ge=1, le=MAX_PARTS)]


class SliceRecord(Record):
    """A slice as the header stores it: its tensor, its items, its bytes in the body."""

    tensor: Count
    name: str
    dtype: str
    shape: Annotated[tuple[Count, ...], FailFast()]
    op: Op
    first: Count
    count: Count
    begin: Count
    end: Count

    @property
    def spec(self) -> TensorSpec:
        """The complete tensor of this slice."""
        return TensorSpec(self.name, self.dtype, self.shape, self.op)

    @property
    def place(self) -> Slice:
        """The position alone."""
        return Slice(self.tensor, self.first, self.count, self.begin, self.end)


class Header(Record):
    """A payload's header. `blocks` is last: everything before it is the same in all contributions with this index."""

    codec: Codec
    index: Xxh128
    part: Count
    parts: Limit
    block_bytes: Literal[1048576] = BLOCK_BYTES
    body_bytes: Annotated[int, Field(ge=0, le=PART_BYTES)]
    slices: Annotated[tuple[SliceRecord, ...], FailFast(), Field(min_length=1, max_length=MAX_SLICES)]
    blocks: Annotated[tuple[Xxh128, ...], FailFast()]


def header_bytes(index: Index, layout: PartLayout) -> int:
    """The number of bytes before the body: the same for every contribution with this index."""
    return len(_header_data(index, layout.number, (_NO_DIGEST,) * layout.blocks))


def build_header(index: Index, layout: PartLayout, blocks: Sequence[str]) -> tuple[bytes, Part]:
    """Build all bytes before the body, from the body's block digests, and the record that names the object."""
    if len(blocks) != layout.blocks:
        raise Invalid(f"wrong number of block digests: part={layout.number} {len(blocks)} for {layout.blocks}")
    data = _header_data(index, layout.number, tuple(blocks))
    digest = xxhash.xxh3_128_hexdigest(data)
    return data, Part(digest=digest, header_bytes=len(data), total_bytes=len(data) + layout.body_bytes)


def check_parts(parts: Sequence[Part], index: Index, owner: str) -> None:
    """Raises Invalid, naming owner and field, unless `parts` have the sizes of the index's layout."""
    if len(parts) != len(index.parts):
        raise Invalid(f"wrong number of parts: {owner} parts={len(parts)} expected={len(index.parts)}")
    for part, layout in zip(parts, index.parts, strict=True):
        expected = header_bytes(index, layout)
        if part.header_bytes != expected:
            raise Invalid(
                f"wrong size of header: {owner} part={layout.number} header_bytes={part.header_bytes} "
                f"expected={expected}"
            )
        if part.total_bytes != expected + layout.body_bytes:
            raise Invalid(
                f"wrong size of part: {owner} part={layout.number} total_bytes={part.total_bytes} "
                f"expected={expected + layout.body_bytes}"
            )


def check_header_size(part: Part, key: str) -> None:
    """Raises Corrupt if no header can have this size. Call it before allocating memory for the header."""
    if not _PREAMBLE.size <= part.header_bytes <= MAX_HEADER_BYTES or part.header_bytes % ALIGNMENT:
        raise Corrupt(f"bad size of header: key={key} header_bytes={part.header_bytes} limit={MAX_HEADER_BYTES}")


def read_header(
    data: memoryview, part: Part, key: str, *, index: Index | None = None, number: int | None = None
) -> Header:
    """Parse the header at the start of `data`, which `part` names, after all checks.

    index, number: the expected ones, if known. Raises Corrupt for damage and for a header that contradicts itself,
    Invalid for a sound header of another index or part; both name the key and the field (and the tensor).
    """
    check_header_size(part, key)
    if len(data) < part.header_bytes:
        raise Corrupt(f"header is truncated: key={key} bytes={len(data)} header_bytes={part.header_bytes}")
    head = data[: part.header_bytes]
    digest = xxhash.xxh3_128_hexdigest(head)
    if digest != part.digest:
        raise Corrupt(f"header is damaged: key={key} digest={digest} expected={part.digest}")
    if index is not None and number is not None and (known := _as_expected(head, index, number)) is not None:
        return known
    magic, version, length = _PREAMBLE.unpack_from(head)
    if magic != MAGIC:
        raise Corrupt(f"not a payload: key={key} magic={magic!r}")
    if version not in VERSIONS.values():
        known = ", ".join(map(str, sorted({*VERSIONS.values()})))
        raise Invalid(
            f"payload of another version: key={key} version={version} known={known}; use the same version of skerry"
        )
    end = _PREAMBLE.size + length
    if end > len(head) or len(head) - end >= ALIGNMENT or any(head[end:]):
        raise Corrupt(f"bad length of header: key={key} length={length} header_bytes={part.header_bytes}")
    header = Header.parse(head[_PREAMBLE.size : end], key)
    if version != VERSIONS[header.codec]:
        raise Corrupt(f"bad version: key={key} version={version} codec={header.codec}")
    _check_body(header, part, key)
    _check_slices(header, key)
    if index is not None:
        _check_expected(header, index, header.part if number is None else number, key)
    return header


def check_whole(data: memoryview, part: Part, key: str) -> Header:
    """The header of a whole payload object after all checks, those of every block included. Raises as `read_header`."""
    header = read_header(data, part, key)
    body = data[part.header_bytes :]
    if len(body) != header.body_bytes:
        raise Corrupt(f"payload is truncated: key={key} bytes={len(body)} expected={header.body_bytes}")
    for number, digest in enumerate(header.blocks):
        if xxhash.xxh3_128_hexdigest(body[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]) != digest:
            raise Corrupt(f"payload is damaged: key={key} block={number}")
    return header


def index_from_headers(headers: Sequence[Header], keys: Sequence[str]) -> Index:
    """The index that these headers, in order of parts, describe together.

    Raises Corrupt, naming the key, unless they are exactly the parts of a list of tensors in its layout.
    """
    if not headers:
        return Index(())
    first = headers[0]
    try:
        tensors = _joined(headers, keys)
        index = Index(tensors, first.codec)
        if index.digest != first.index:
            index = Index(tensors, first.codec, 2)
        if index.digest != first.index:
            raise Corrupt(
                f"tensors do not match their digest: key={keys[0]} index={first.index} computed={index.digest}"
            )
        if len(index.parts) != len(headers):
            raise Corrupt(f"parts are missing: key={keys[0]} parts={len(headers)} expected={len(index.parts)}")
        for number, (header, key) in enumerate(zip(headers, keys, strict=True)):
            _check_expected(header, index, number, key)
    except Invalid as error:
        raise Corrupt(f"parts do not form a list of tensors: key={keys[0]} {error}") from error
    return index


def _joined(headers: Sequence[Header], keys: Sequence[str]) -> tuple[TensorSpec, ...]:
    """The tensors in order; one that continues in the next part is listed once."""
    specs: list[TensorSpec] = []
    for header, key in zip(headers, keys, strict=True):
        for piece in header.slices:
            if piece.tensor == len(specs):
                specs.append(piece.spec)
            elif piece.tensor != len(specs) - 1 or piece.spec != specs[-1]:
                raise Corrupt(f"slices do not join: key={key} tensor={piece.name!r} number={piece.tensor}")
    return tuple(specs)


def _as_expected(head: memoryview, index: Index, number: int) -> Header | None:
    """The header, if only its block digests differ from the known header of this part of `index`; otherwise None.

    Such a header needs no other check, which saves time for every replica in every round.
    """
    if number >= len(index.parts) or not index.parts[number].blocks:
        return None
    known = _known(index, number)
    begin = _PREAMBLE.size + len(_opening(index, number))
    listed = bytes(head[begin : begin + (len(_NO_DIGEST) + 3) * len(known.blocks) - 1])
    blocks = tuple(listed[1:-1].decode("ascii", "replace").split('","'))
    if len(blocks) != len(known.blocks) or not _DIGESTS.fullmatch(listed):
        return None
    return known.model_copy(update={"blocks": blocks}) if bytes(head) == _header_data(index, number, blocks) else None


@lru_cache(maxsize=1024)
def _known(index: Index, number: int) -> Header:
    """The header of a part, with zeros as block digests; all headers of the part differ only in these."""
    text = _opening(index, number) + ",".join([f'"{_NO_DIGEST}"'] * index.parts[number].blocks).encode() + b"]}"
    return Header.parse(text, "expected")


def _check_body(header: Header, part: Part, key: str) -> None:
    if header.part >= header.parts:
        raise Corrupt(f"bad part: key={key} part={header.part} parts={header.parts}")
    if header.body_bytes != part.total_bytes - part.header_bytes:
        raise Corrupt(
            f"bad body_bytes: key={key} body_bytes={header.body_bytes} "
            f"total_bytes={part.total_bytes} header_bytes={part.header_bytes}"
        )
    blocks = -(-header.body_bytes // BLOCK_BYTES)
    if len(header.blocks) != blocks:
        raise Corrupt(f"bad blocks: key={key} blocks={len(header.blocks)} expected={blocks}")


def _check_slices(header: Header, key: str) -> None:
    """Raises Corrupt unless all slices are valid, in order, in range and without overlap."""
    offset, names = 0, set[str]()
    last = len(header.slices) - 1
    for position, piece in enumerate(header.slices):
        where = f"key={key} slices.{position} tensor={piece.name[:64]!r}"
        try:
            piece.spec.check()
        except Invalid as error:
            raise Corrupt(f"bad slice: {where} {error}") from error
        if piece.tensor != header.slices[0].tensor + position or piece.name in names:
            raise Corrupt(f"slices repeat or skip a tensor: {where} number={piece.tensor}")
        names.add(piece.name)
        wire = wire_type(piece.spec, header.codec)
        total, stop = item_count(piece.spec, wire), piece.first + piece.count
        cut = (position > 0 and piece.first > 0) or (position < last and stop < total)
        if stop > total or cut or (total and not piece.count):
            raise Corrupt(f"bad items: {where} first={piece.first} count={piece.count} items={total}")
        item_bytes = WIRE_TYPES[wire].item_bytes
        size, offset = piece.count * item_bytes, aligned(offset, item_bytes)
        if piece.begin != offset or piece.end != piece.begin + size or piece.end > header.body_bytes:
            raise Corrupt(
                f"bad span: {where} begin={piece.begin} end={piece.end} "
                f"expected={offset} to {offset + size} body_bytes={header.body_bytes}"
            )
        offset = piece.end
    if header.slices[last].end != header.body_bytes:
        raise Corrupt(f"bad body_bytes: key={key} body_bytes={header.body_bytes} used={header.slices[last].end}")


def _check_expected(header: Header, index: Index, number: int, key: str) -> None:
    if number >= len(index.parts):
        raise Invalid(f"not an expected part: key={key} part={number} parts={len(index.parts)}")
    layout = index.parts[number]
    if header.codec != index.codec:
        raise Invalid(f"another codec: key={key} codec={header.codec} expected={index.codec}")
    for position, (piece, expected) in enumerate(zip(header.slices, layout.slices, strict=False)):
        spec = index.tensors[expected.tensor]
        if piece.spec != spec:
            raise Invalid(
                f"another tensor: key={key} slices.{position} tensor={piece.name!r} dtype={piece.dtype} "
                f"shape={piece.shape} op={piece.op} "
                f"expected={spec.name!r} dtype={spec.dtype} shape={spec.shape} op={spec.op}"
            )
        if piece.place != expected:
            where = f"key={key} tensor={piece.name!r}"
            raise Invalid(f"tensor at another position: {where} position={piece.place} expected={expected}")
    if len(header.slices) != len(layout.slices):
        raise Invalid(f"other tensors: key={key} slices={len(header.slices)} expected={len(layout.slices)}")
    identity = (header.part, header.parts, header.index)
    if identity != (number, len(index.parts), index.digest):
        raise Invalid(
            f"part of another list of tensors: key={key} part={header.part} of {header.parts} index={header.index} "
            f"expected={number} of {len(index.parts)} index={index.digest}"
        )


def _header_data(index: Index, number: int, blocks: tuple[str, ...]) -> bytes:
    text = _opening(index, number) + ",".join(f'"{digest}"' for digest in blocks).encode() + b"]}"
    data = _PREAMBLE.pack(MAGIC, VERSIONS[index.codec], len(text)) + text
    return data + bytes(-len(data) % ALIGNMENT)


@lru_cache(maxsize=1024)
def _opening(index: Index, number: int) -> bytes:
    """The header's JSON up to the first block digest; cached, because it is the same in every round."""
    layout = index.parts[number]
    slices = tuple(_record(index.tensors[place.tensor], place) for place in layout.slices)
    header = Header(
        codec=index.codec,
        index=index.digest,
        part=number,
        parts=len(index.parts),
        body_bytes=layout.body_bytes,
        slices=slices,
        blocks=(),
    )
    return header.to_bytes().removesuffix(b"]}")


def _record(spec: TensorSpec, place: Slice) -> SliceRecord:
    return SliceRecord(
        tensor=place.tensor,
        name=spec.name,
        dtype=spec.dtype,
        shape=spec.shape,
        op=spec.op,
        first=place.first,
        count=place.count,
        begin=place.begin,
        end=place.end,
    )
