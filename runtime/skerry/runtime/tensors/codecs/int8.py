"""int8x254: 254 elements of 8 bits, -127 to 127, linear. 8.06 bits an element; relative error 0.7 %."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from skerry.runtime.tensors.byte_layout import WIRE_TYPES
from skerry.runtime.tensors.codecs.blocks import ROUND, BlockFormat, linear_device_scale, linear_scale

if TYPE_CHECKING:
    from skerry.runtime.tensors.codecs.blocks import Array

_LARGEST: Final = 127


def _encode(scaled: Array, codes: Array) -> None:
    np.add(scaled, ROUND, out=scaled)
    np.copyto(codes, scaled.view(np.uint32), casting="unsafe")


def _decode(codes: Array, values: Array) -> None:
    np.copyto(values, codes.view(np.int8))


def _device_encode(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.round().to(torch.int8).view(torch.uint8)


FORMAT: Final = BlockFormat(
    wire=WIRE_TYPES["int8x254"],
    largest=_LARGEST,
    scale=linear_scale(_LARGEST),
    encode=_encode,
    decode=_decode,
    device_scale=linear_device_scale(_LARGEST),
    device_encode=_device_encode,
)
