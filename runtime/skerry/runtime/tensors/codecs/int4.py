"""int4x252: 252 elements of 4 bits, -7 to 7, linear, two's complement. 4.06 bits an element; relative error 12 %.

Byte j of a block holds element j in its low half and element j + 126 in its high half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from skerry.runtime.tensors.byte_layout import WIRE_TYPES
from skerry.runtime.tensors.codecs.blocks import ROUND, BlockFormat, linear_device_scale, linear_scale

if TYPE_CHECKING:
    from skerry.runtime.tensors.codecs.blocks import Array

_LARGEST: Final = 7
_HALF: Final = WIRE_TYPES["int4x252"].elements // 2


def _encode(scaled: Array, codes: Array) -> None:
    np.add(scaled, ROUND, out=scaled)
    numbers = scaled.view(np.uint32).astype(np.uint8)
    np.left_shift(numbers[:, _HALF:], 4, out=codes)
    np.bitwise_or(codes, numbers[:, :_HALF] & np.uint8(0xF), out=codes)


def _decode(codes: Array, values: Array) -> None:
    # Shifts of signed numbers copy the sign: left and right by 4 extends that of the low half.
    np.copyto(values[:, :_HALF], np.right_shift(np.left_shift(codes, 4).view(np.int8), 4))
    np.copyto(values[:, _HALF:], np.right_shift(codes.view(np.int8), 4))


def _device_encode(scaled: torch.Tensor) -> torch.Tensor:
    numbers = scaled.round().to(torch.int8).view(torch.uint8)
    return (numbers[:, _HALF:] << 4) | (numbers[:, :_HALF] & 0xF)


FORMAT: Final = BlockFormat(
    wire=WIRE_TYPES["int4x252"],
    largest=_LARGEST,
    scale=linear_scale(_LARGEST),
    encode=_encode,
    decode=_decode,
    device_scale=linear_device_scale(_LARGEST),
    device_encode=_device_encode,
)
