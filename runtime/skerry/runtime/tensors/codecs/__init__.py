"""Converts elements to bytes on the wire, and adds them up again: one file for each wire type of `tensors.byte_layout`.

elements    none and bf16: a cast, element by element
blocks      what the quantizing codecs share: a scale for each block, encoding, decoding, adding
int8 int4 int2    how the codes of a block are made and packed
sparse      the largest elements alone, with their positions

Decoded values and sums have the same bits on every processor: a scale has 8 significant bits and a code at most 7, so
their product is exact in float32, and it makes no difference whether a processor fuses it with the sum. An encoder may
differ between processors, because the bytes that it has written are what counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.runtime.tensors.codecs import int2, int4, int8, sparse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.runtime.tensors.codecs.blocks import BlockFormat, WireFormat

DEVICE_FORMATS: Final[Mapping[str, BlockFormat]] = {
    "int8x254": int8.FORMAT,
    "int4x252": int4.FORMAT,
    "int2x248": int2.FORMAT,
}
"""Those that a device can encode, too."""
BLOCK_FORMATS: Final[Mapping[str, WireFormat]] = {**DEVICE_FORMATS, "sparse100x6400": sparse.FORMAT}
"""The wire types that are blocks; all others are elements of a dtype."""
