"""Encodes tensors of a device there, so that only the bytes that are sent are copied to host memory."""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from skerry.runtime.tensors.codecs import DEVICE_FORMATS
from skerry.runtime.tensors.host_copies import begin_host_copy


@dataclass(frozen=True, kw_only=True)
class EncodedTensor:
    """A tensor as it is sent. wire: its wire type. source: [N] elements on the device.

    data: [N] bytes, squares: [1] float64, the sum of squares of the elements; both in host memory after `wait`.
    """

    wire: str
    source: torch.Tensor
    data: torch.Tensor
    squares: torch.Tensor
    copied: torch.Event | None

    def wait(self) -> None:
        """Until the copies to host memory are complete."""
        if self.copied is not None:
            self.copied.synchronize()

    def first_not_finite(self) -> int | None:
        """The number of the first element that is a NaN or an infinity; None if all are finite."""
        # Squares of float32 cannot overflow float64, so only such an element makes their sum not finite.
        return None if self.squares.isfinite().item() else int(self.source.isfinite().int().argmin())


def encodes_on(device: torch.device) -> bool:
    """Return whether tensors of this device are encoded there. On the CPU, `payload_encoder` encodes them."""
    return device.type != "cpu"


def begin_encoding(tensor: torch.Tensor, wire: str) -> EncodedTensor:
    """Queue the encoding of `tensor`, and the copies of its results, on its device."""
    source = tensor.reshape(-1)
    data, _ = begin_host_copy(DEVICE_FORMATS[wire].write_on_device(source))
    norm = cast("torch.Tensor", torch.linalg.vector_norm(source, dtype=torch.float64))
    squares, copied = begin_host_copy(norm.square().reshape(1))
    return EncodedTensor(wire=wire, source=source, data=data, squares=squares, copied=copied)
