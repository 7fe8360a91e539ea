"""int2x248: 248 elements of 2 bits, -10, -3, 3 or 10. 2.06 bits an element; relative error 35 %.

Bit 0 of a code says large, bit 1 negative. Byte j of a block holds elements j, j + 62, j + 124 and j + 186, from the
low bits to the high ones. The two magnitudes are those of least error for a normal distribution, 0.453 and 1.510
standard deviations (Lloyd-Max).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from skerry.runtime.tensors.byte_layout import WIRE_TYPES
from skerry.runtime.tensors.codecs.blocks import MIN_SCALE, BlockFormat, device_magnitude, magnitude

if TYPE_CHECKING:
    from skerry.runtime.tensors.codecs.blocks import Array

_LARGEST: Final = 10
_DEVIATIONS: Final = 0.15094
"""The scale in standard deviations."""
_BETWEEN: Final = 6.5
_QUARTER: Final = WIRE_TYPES["int2x248"].elements // 4
_VALUES: Final = np.array([3, 10, -3, -10], dtype=np.float32)
_TABLES: Final = [_VALUES[(np.arange(256) >> 2 * number) & 3] for number in range(4)]
"""The value of each code of a byte, for all bytes."""


def _scale(values: Array) -> Array:
    # Relative to the largest, so that no square overflows.
    largest = np.maximum(magnitude(values), np.float32(MIN_SCALE))
    relative = values / largest[:, np.newaxis]
    mean = np.einsum("ij,ij->i", relative, relative) / np.float32(values.shape[1])
    return np.sqrt(mean) * largest * np.float32(_DEVIATIONS)


def _encode(scaled: Array, codes: Array) -> None:
    numbers = (np.abs(scaled) > _BETWEEN).view(np.uint8) | np.signbit(scaled).view(np.uint8) << np.uint8(1)
    quarters = numbers.reshape(len(numbers), 4, _QUARTER)
    codes[:] = quarters[:, 0]
    for number in range(1, 4):
        codes |= quarters[:, number] << np.uint8(2 * number)


def _decode(codes: Array, values: Array) -> None:
    for number in range(4):
        # mode: without a check of the range this is twice as fast; a byte is always in it.
        quarter = np.take(_TABLES[number], codes, mode="clip")
        np.copyto(values[:, number * _QUARTER : (number + 1) * _QUARTER], quarter)


def _device_scale(values: torch.Tensor) -> torch.Tensor:
    largest = device_magnitude(values).clamp_min(MIN_SCALE)
    return (values / largest[:, None]).square().mean(1).sqrt() * largest * _DEVIATIONS


def _device_encode(scaled: torch.Tensor) -> torch.Tensor:
    numbers = (scaled.abs() > _BETWEEN).to(torch.uint8) | (scaled.signbit().to(torch.uint8) << 1)
    first, *others = numbers.view(len(numbers), 4, _QUARTER).unbind(1)
    for number, quarter in enumerate(others, 1):
        first = first | quarter << (2 * number)
    return first


FORMAT: Final = BlockFormat(
    wire=WIRE_TYPES["int2x248"],
    largest=_LARGEST,
    scale=_scale,
    encode=_encode,
    decode=_decode,
    device_scale=_device_scale,
    device_encode=_device_encode,
)
