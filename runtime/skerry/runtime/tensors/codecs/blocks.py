"""Blocks: an item on the wire is a scale of 2 bytes (the upper half of a float32) and the codes of its elements.

An element is code * scale. A scale is rounded up, so the largest element never exceeds the largest code; and it is
limited, so the largest code is never infinite. The last block of a tensor is filled with zeros.

On the CPU everything is done by numpy in pieces that stay in a core's cache, and only in the calling thread. Tensors of
a device are encoded there with the same formulas as operations of torch, so that only their codes are copied.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np
import torch

from skerry.runtime.tensors.codecs.elements import cast

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from skerry.runtime.tensors.byte_layout import WireType

Array: TypeAlias = "npt.NDArray[Any]"

SCALE_BYTES: Final = 2
MIN_SCALE: Final = 1e-30
"""A block of smaller elements is all zeros: no subnormal number is ever computed, so none can be flushed to zero."""
_ROWS: Final = 1024
"""A piece of 1 MB of floats. Encoding is 2.2 times, adding 1.3 times as fast as with 128 (measured)."""
ROUND: Final = np.float32(3 << 22)
"""Adding it to a smaller number than 2^22 rounds that to an integer, half to even, in the lowest bits of the sum."""
_DEVICE_ROWS: Final = 1 << 15
"""A piece of 8 Mi elements: few calls, and temporary tensors of 32 MiB each."""


class WireFormat(Protocol):
    """A wire type that is no dtype: items of several elements, encoded and added in host memory."""

    @property
    def wire(self) -> WireType:
        """The sizes of an item."""
        ...

    def write(self, source: torch.Tensor, target: memoryview) -> None:
        """Encode [N] floats into [items * item_bytes] bytes. Elements that are not finite are undefined."""
        ...

    def add(self, data: memoryview, total: Array, factor: float | None, *, first: bool) -> None:
        """Add the decoded items at the start of `data`, times `factor`, to the floats of `total`; or set them (first).

        total: [items * elements] float32. The factor is applied to the scales, which then have 16 significant bits:
        it changes by less than 2^-15, and code * scale is still exact.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """A wire type of blocks, R at a time.

    largest: the largest code. scale: [R, elements] float32 to [R] float32, before it is rounded up. encode: elements
    divided by their scale, at most `largest`, which it may overwrite, into packed codes, [R, item_bytes - SCALE_BYTES]
    uint8. decode: packed codes into [R, elements] float32, as numbers. device_scale, device_encode: the same for torch.
    """

    wire: WireType
    largest: int
    scale: Callable[[Array], Array]
    encode: Callable[[Array, Array], None]
    decode: Callable[[Array, Array], None]
    device_scale: Callable[[torch.Tensor], torch.Tensor]
    device_encode: Callable[[torch.Tensor], torch.Tensor]

    def write(self, source: torch.Tensor, target: memoryview) -> None:
        """As in `WireFormat`."""
        each = self.wire.elements
        rows = np.frombuffer(target, dtype=np.uint8).reshape(-1, self.wire.item_bytes)
        scratch = np.empty((_ROWS, each), dtype=np.float32)
        for row in range(0, len(rows), _ROWS):
            piece = source[row * each : (row + _ROWS) * each]
            size, count = piece.numel(), -(-piece.numel() // each)
            scaled = scratch[:count]
            if size == scaled.size and piece.dtype == torch.float32:
                values = piece.numpy().reshape(count, each)
            else:
                values = scaled
                flat = scaled.reshape(-1)
                cast(piece, torch.from_numpy(flat[:size]))
                flat[size:] = 0
            inside = rows[row : row + count]
            scale = write_scales(inside, self.scale(values), self._limit)
            np.multiply(values, (np.float32(1) / scale)[:, np.newaxis], out=scaled)
            self.encode(scaled, inside[:, SCALE_BYTES:])

    def write_on_device(self, source: torch.Tensor) -> torch.Tensor:
        """The bytes of `write`, [items * item_bytes], for [N] floats on any device; computed and returned there."""
        each, items = self.wire.elements, -(-source.numel() // self.wire.elements)
        rows = torch.empty(items, self.wire.item_bytes, dtype=torch.uint8, device=source.device)
        for row in range(0, items, _DEVICE_ROWS):
            values = source[row * each : (row + _DEVICE_ROWS) * each].float()
            target = rows[row : row + _DEVICE_ROWS]
            values = torch.nn.functional.pad(values, (0, len(target) * each - values.numel())).view(-1, each)
            scale = self.device_scale(values).clamp(MIN_SCALE, float(self._limit))
            bits = (scale.view(torch.int32) + 0xFFFF) & -0x10000
            inverse = torch.ones_like(scale) / bits.view(torch.float32)
            target[:, :SCALE_BYTES] = (bits >> 16).to(torch.int16).view(torch.uint8).view(-1, SCALE_BYTES)
            target[:, SCALE_BYTES:] = self.device_encode(values * inverse[:, None])
        return rows.view(-1)

    @cached_property
    def _limit(self) -> np.float32:
        return exact_limit(self.largest)

    def add(self, data: memoryview, total: Array, factor: float | None, *, first: bool) -> None:
        """As in `WireFormat`."""
        sums = total.reshape(-1, self.wire.elements)
        rows = np.frombuffer(data, dtype=np.uint8, count=len(sums) * self.wire.item_bytes)
        rows = rows.reshape(-1, self.wire.item_bytes)
        scales = read_scales(rows, factor)
        scratch = np.empty((_ROWS, self.wire.elements), dtype=np.float32)
        for row in range(0, len(rows), _ROWS):
            inside = slice(row, row + _ROWS)
            codes = rows[inside, SCALE_BYTES:]
            values = sums[inside] if first else scratch[: len(codes)]
            self.decode(codes, values)
            np.multiply(values, scales[inside, np.newaxis], out=values)
            if not first:
                np.add(sums[inside], values, out=sums[inside])


def exact_limit(largest: int) -> np.float32:
    """The largest scale: the largest finite number divided by the largest code, with 8 significant bits.

    Cutting makes it less than 0.4 % smaller, so no element becomes a code that is larger by one half.
    """
    scale = np.array([np.finfo(np.float32).max / largest], dtype=np.float32)
    return (scale.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)[0]


def write_scales(rows: Array, scales: Array, limit: np.float32) -> Array:
    """Write [R] scales, rounded up to 8 significant bits, to [R, item_bytes]; returns them as they were written."""
    scale = np.clip(scales, np.float32(MIN_SCALE), limit)
    bits = (scale.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    rows.view("<u2")[:, 0] = bits >> 16
    return bits.view(np.float32)


def read_scales(rows: Array, factor: float | None) -> Array:
    """[R] scales of [R, item_bytes]; with a factor their product, cut to 16 significant bits."""
    scales = np.left_shift(rows.view("<u2")[:, 0], 16, dtype=np.uint32).view(np.float32)
    if factor is None:
        return scales
    return np.bitwise_and((scales * np.float32(factor)).view(np.uint32), 0xFFFFFF00).view(np.float32)


def magnitude(values: Array) -> Array:
    """[R, E] float32 to [R]: the largest magnitude of each row. The bits of a float without its sign sort like it."""
    return np.maximum.reduce(np.bitwise_and(values.view(np.uint32), np.uint32(0x7FFFFFFF)), axis=1).view(np.float32)


def device_magnitude(values: torch.Tensor) -> torch.Tensor:
    """`magnitude` for torch."""
    return (values.view(torch.int32) & 0x7FFFFFFF).amax(1).view(torch.float32)


def linear_device_scale(largest: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """`linear_scale` for torch."""

    def scale(values: torch.Tensor) -> torch.Tensor:
        magnitudes = device_magnitude(values)
        # By a tensor: CUDA multiplies by the inverse of a number, which rounds twice.
        return magnitudes / torch.full_like(magnitudes, largest)

    return scale


def linear_scale(largest: int) -> Callable[[Array], Array]:
    """The scale with which the element of largest magnitude in a row has the largest code."""
    return lambda values: magnitude(values) / np.float32(largest)
