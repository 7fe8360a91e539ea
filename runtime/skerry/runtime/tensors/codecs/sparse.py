"""sparse100x6400: of 6,400 elements the 100 of largest magnitude, in 128 bytes. 0.16 bits an element. Experimental.

    scale         2 bytes, as in `blocks`
    low bits      75 bytes: number j, j + 25, j + 50 and j + 75 in 3 bytes, 6 bits each, little-endian
    high bits     25 bytes: bit (index >> 6) + r is set for the index of rank r (Elias-Fano)
    codes         25 bytes: entry j, j + 25, j + 50 and j + 75, 2 bits each: bit 0 says 7 instead of 5, bit 1 negative
    zero          1 byte

Indices ascend. An entry with an index of 6,400 or more is none: an element that is zero is never sent. What is not sent
must be added to the next contribution (`error_feedback`), so it is encoded in host memory only.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from skerry.runtime.tensors.byte_layout import WIRE_TYPES
from skerry.runtime.tensors.codecs.blocks import MIN_SCALE, exact_limit, read_scales, write_scales
from skerry.runtime.tensors.codecs.elements import cast

if TYPE_CHECKING:
    from skerry.runtime.tensors.byte_layout import WireType
    from skerry.runtime.tensors.codecs.blocks import Array

KEPT: Final = 100
_QUARTER: Final = KEPT // 4
_LOW_BITS: Final = 6
_LOW, _HIGH, _CODES = slice(2, 77), slice(77, 102), slice(102, 127)
_VALUES: Final = np.array([5, 7, -5, -7], dtype=np.float32)
_BETWEEN: Final = 6
_MEANS: Final = 0.187
"""The scale in means of the magnitudes that are sent: of least error for normal and for Laplace distributed values."""
_ROWS: Final = 40
"""A piece of 1 MB of floats."""


class SparseFormat:
    """The largest elements of each block, with their positions."""

    def __init__(self) -> None:
        self.wire: WireType = WIRE_TYPES["sparse100x6400"]
        self._limit = exact_limit(int(_VALUES.max()))

    def write(self, source: torch.Tensor, target: memoryview) -> None:
        """As in `WireFormat`."""
        each = self.wire.elements
        rows = np.frombuffer(target, dtype=np.uint8).reshape(-1, self.wire.item_bytes)
        values = np.empty((_ROWS, each), dtype=np.float32)
        for row in range(0, len(rows), _ROWS):
            piece = source[row * each : (row + _ROWS) * each]
            flat = values.reshape(-1)
            cast(piece, torch.from_numpy(flat[: piece.numel()]))
            flat[piece.numel() :] = 0
            inside = rows[row : row + _ROWS]
            self._write(values[: len(inside)], inside)

    def add(self, data: memoryview, total: Array, factor: float | None, *, first: bool) -> None:
        """As in `WireFormat`. Only elements that were sent are read and written."""
        sums = total.reshape(-1, self.wire.elements)
        rows = np.frombuffer(data, dtype=np.uint8, count=len(sums) * self.wire.item_bytes)
        rows = rows.reshape(-1, self.wire.item_bytes)
        scales = read_scales(rows, factor)
        if first:
            sums[:] = 0
        for row in range(0, len(rows), _ROWS):
            inside = slice(row, row + _ROWS)
            indices = _indices(rows[inside])
            values = _unpacked(rows[inside, _CODES]) * scales[inside, np.newaxis]
            sent = indices < self.wire.elements
            places = (np.nonzero(sent)[0], indices[sent])
            sums[inside][places] += values[sent]

    def _write(self, values: Array, rows: Array) -> None:
        """Encode [R, elements] floats into [R, item_bytes]."""
        chosen = _largest(values.view(np.uint32) & np.uint32(0x7FFFFFFF))
        row_of, column = np.nonzero(chosen)
        counts = chosen.sum(axis=1)
        rank = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        indices = np.full((len(values), KEPT), values.shape[1], dtype=np.uint32)
        sent = np.zeros((len(values), KEPT), dtype=np.float32)
        indices[row_of, rank], sent[row_of, rank] = column, values[row_of, column]
        magnitudes = np.abs(sent)
        # Relative to the largest, so that no sum overflows.
        largest = np.maximum(magnitudes.max(axis=1), np.float32(MIN_SCALE))
        relative = (magnitudes / largest[:, np.newaxis]).sum(axis=1) / np.maximum(counts, 1).astype(np.float32)
        scales = write_scales(rows, relative * largest * np.float32(_MEANS), self._limit)
        rows[:, -1] = 0
        low = (indices & np.uint32((1 << _LOW_BITS) - 1)).reshape(len(rows), 4, _QUARTER)
        words = low[:, 0] | low[:, 1] << np.uint32(6) | low[:, 2] << np.uint32(12) | low[:, 3] << np.uint32(18)
        rows[:, _LOW] = (
            words.astype("<u4").view(np.uint8).reshape(len(rows), _QUARTER, 4)[:, :, :3].reshape(len(rows), -1)
        )
        bits = np.zeros((len(rows), 8 * _QUARTER), dtype=np.uint8)
        np.put_along_axis(bits, (indices >> np.uint32(_LOW_BITS)).astype(np.int64) + np.arange(KEPT), 1, axis=1)
        rows[:, _HIGH] = np.packbits(bits, axis=1, bitorder="little")
        codes = (magnitudes > _BETWEEN * scales[:, np.newaxis]).view(np.uint8)
        codes |= np.signbit(sent).view(np.uint8) << np.uint8(1)
        quarters = codes.reshape(len(rows), 4, _QUARTER)
        rows[:, _CODES] = quarters[:, 0]
        for number in range(1, 4):
            rows[:, _CODES] |= quarters[:, number] << np.uint8(2 * number)


def _largest(magnitudes: Array) -> Array:
    """[R, E] magnitudes to booleans: KEPT of each row, fewer if the others are zero; of equal ones the first."""
    cut = np.partition(magnitudes, -KEPT, axis=1)[:, -KEPT, np.newaxis]
    chosen = magnitudes >= np.maximum(cut, np.uint32(1))
    tied = np.flatnonzero(chosen.sum(axis=1) > KEPT)
    if tied.size:
        above = magnitudes[tied] > cut[tied]
        equal = magnitudes[tied] == cut[tied]
        chosen[tied] = above | equal & (np.cumsum(equal, axis=1) <= KEPT - above.sum(axis=1, keepdims=True))
    return chosen


def _indices(rows: Array) -> Array:
    """[R, KEPT] positions in the block. Any bytes have some; those without KEPT high bits send nothing."""
    bits = np.unpackbits(rows[:, _HIGH], axis=1, bitorder="little")
    wrong = bits.sum(axis=1) != KEPT
    if wrong.any():
        bits[wrong] = np.arange(bits.shape[1]) >= KEPT  # all of them beyond the block
    high = np.nonzero(bits)[1].reshape(len(rows), KEPT) - np.arange(KEPT)
    threes = rows[:, _LOW].reshape(len(rows), _QUARTER, 3).astype(np.int64)
    words = threes[:, :, 0] | threes[:, :, 1] << 8 | threes[:, :, 2] << 16
    low = np.concatenate([words >> (_LOW_BITS * number) & ((1 << _LOW_BITS) - 1) for number in range(4)], axis=1)
    return (high << _LOW_BITS) + low


def _unpacked(codes: Array) -> Array:
    """[R, KEPT] numbers of packed codes."""
    return _VALUES[np.concatenate([codes >> np.uint8(2 * number) & np.uint8(3) for number in range(4)], axis=1)]


FORMAT: Final = SparseFormat()
