"""Tensors that travel together as one contribution, and their copies in host memory.

CPU tensors are used in place. Tensors of a device, and tensors that are not contiguous, go through a host buffer.
Tensors of a device that the codec quantizes are encoded there, and only the result is copied; those of a sparse
codec are copied whole, because what is left of earlier ones is in host memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from skerry.runtime.errors import Invalid
from skerry.runtime.tensors.byte_layout import BLOCKS, Index, TensorSpec, wire_type
from skerry.runtime.tensors.codecs import DEVICE_FORMATS
from skerry.runtime.tensors.device_encoding import EncodedTensor, begin_encoding, encodes_on
from skerry.runtime.tensors.dtensor import local_shard
from skerry.runtime.tensors.host_copies import begin_host_copy
from skerry.runtime.tensors.payload_encoder import spec_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from skerry.runtime.log.records import Layout
    from skerry.runtime.tensors.byte_layout import Codec, Op


QUANTIZED: Final[Codec] = "int8"
"""The codec for callers that ask for quantization, unless the run has a codec that quantizes."""


_OVERLAP_WORK: Final = 100_000
"""Steps of the exact comparison of two tensors' memory, some milliseconds: views of a few dimensions need less."""


@dataclass(frozen=True, kw_only=True)
class _Item:
    name: str
    tensor: torch.Tensor
    host: torch.Tensor
    copied: torch.Event | None
    encoded: EncodedTensor | None
    op: Op
    quantize: bool


class TensorBatch:
    """Tensors that travel together, in the order of their allreduce calls.

    codec, layout: the run's (`Session.batch`). parameters: names and sizes in elements of the model's parameters that
    they are made of, in order, if known.
    """

    def __init__(self, codec: Codec, layout: Layout) -> None:
        self.parameters: Sequence[tuple[str, int]] = ()
        self._codec: Codec = codec
        self._layout: Layout = layout
        self._items: list[_Item] = []
        self._memory: defaultdict[torch.device, _Memories] = defaultdict(_Memories)

    def add(self, tensor: torch.Tensor, op: Op, *, name: str | None = None, quantize: bool = False) -> None:
        """Add `tensor`. It must not change until `land` has written the result to it.

        name: of the tensor in the log; None uses its position. Of a sharded tensor, adds this rank's shard. quantize:
        the caller asks for QUANTIZED, which is done if all tensors of the batch ask for it.
        Raises Invalid if it shares memory with an earlier tensor: results of both cannot be written.
        """
        tensor = local_shard(tensor.detach())
        name = name or f"{len(self._items):05d}"
        self._check_memory(name, tensor)
        # Not spec_of: an unsupported dtype is reported by the exchange, on every device.
        spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), op)
        wire = wire_type(spec, self._codec_if(quantizes=quantize))
        encoded, copied = None, None
        if encodes_on(tensor.device) and wire in DEVICE_FORMATS:
            encoded = begin_encoding(tensor, wire)
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
        else:
            host, copied = begin_host_copy(tensor)
        self._items.append(
            _Item(name=name, tensor=tensor, host=host, copied=copied, encoded=encoded, op=op, quantize=quantize)
        )

    def index(self) -> Index:
        """The tensor index: what must be equal for two contributions to be averaged."""
        quantizes = bool(self._items) and all(item.quantize for item in self._items)
        specs = tuple(spec_of(item.name, item.host, item.op) for item in self._items)
        return _index(specs, self._codec_if(quantizes=quantizes), self._layout)

    def hosts(self) -> list[torch.Tensor]:
        """The tensors in host memory, for the average, after all copies from devices have completed.

        Those of `encoded` have no values yet.
        """
        for item in self._items:
            if item.copied is not None:
                item.copied.synchronize()
        for item, encoded in zip(self._items, self.encoded(), strict=True):
            if item.encoded is not None and encoded is None:
                item.host.copy_(item.tensor)
        return [item.host for item in self._items]

    def encoded(self) -> list[EncodedTensor | None]:
        """Those tensors of `hosts` that were encoded on their device, complete; None for the others.

        One that was encoded although another tensor must not be quantized is among the others.
        """
        wires = self.index().wire
        ready = [
            item.encoded if item.encoded is not None and item.encoded.wire == wire else None
            for item, wire in zip(self._items, wires, strict=True)
        ]
        for encoded in ready:
            if encoded is not None:
                encoded.wait()
        return ready

    def _check_memory(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided or not tensor.numel():
            return
        if (other := self._memory[tensor.device].add(_Memory(name, tensor))) is not None:
            raise Invalid(
                f"two tensors of one exchange share memory: tensor={name!r} other={other.name!r}; "
                "pass a copy of one of them, tensor.clone(), or both as one tensor"
            )

    def _codec_if(self, *, quantizes: bool) -> Codec:
        return QUANTIZED if quantizes and self._codec not in BLOCKS else self._codec

    def parameter_of(self, tensor: int, element: int) -> tuple[str, int] | None:
        """The parameter that this element of a tensor belongs to, and its element in there, or None.

        A tensor is one parameter, or a bucket of several in a row.
        """
        sizes = [item.host.numel() for item in self._items]
        if sum(sizes) != sum(size for _, size in self.parameters):
            return None
        ends = accumulate(size for _, size in self.parameters)
        place = sum(sizes[:tensor]) + element
        return next(
            (name, place - (end - size)) for (name, size), end in zip(self.parameters, ends, strict=True) if place < end
        )

    def land(self) -> None:
        """Copy results from host buffers to the caller's tensors; complete when this returns."""
        staged = [item for item in self._items if item.host is not item.tensor]
        for item in staged:
            item.tensor.copy_(item.host)
        for device in {item.tensor.device for item in staged if item.tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)


class _Addresses:
    """The addresses of a tensor's elements; never read. The attribute is numpy's protocol for foreign memory."""

    def __init__(self, tensor: torch.Tensor, strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "typestr": f"|V{tensor.itemsize}",
            "shape": tuple(tensor.shape),
            "strides": strides,
        }


class _Memory:
    """The memory that the elements of a tensor are in."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
        # Of an object of its own: an array refers to what it is made of, and Python never frees a cycle with an array.
        self._elements: npt.NDArray[np.void] = np.asarray(_Addresses(tensor, strides))
        self.begin = tensor.data_ptr()
        reach = (stride * (size - 1) for stride, size in zip(strides, tensor.shape, strict=True))
        self.end = self.begin + sum(reach) + tensor.itemsize

    def overlaps(self, other: _Memory) -> bool:
        """Return whether an element is in both. False for views that are too intricate to compare."""
        try:
            return np.shares_memory(
                self._elements,
                other._elements,
                max_work=_OVERLAP_WORK,  # pyright: ignore[reportArgumentType]  numpy's stubs know 0 and -1 alone
            )
        except np.exceptions.TooHardError:
            return False


class _Memories:
    """The memory of the tensors of one device, in the order of its addresses."""

    def __init__(self) -> None:
        self._known: list[_Memory] = []
        self._longest = 0

    def add(self, mine: _Memory) -> _Memory | None:
        """Add it, unless it overlaps an earlier one, which is returned."""
        place = bisect_left(self._known, mine.end, key=_begin)
        for number in range(place - 1, -1, -1):
            other = self._known[number]
            if other.begin + self._longest <= mine.begin:
                break
            if other.end > mine.begin and mine.overlaps(other):
                return other
        self._known.insert(bisect_left(self._known, mine.begin, key=_begin), mine)
        self._longest = max(self._longest, mine.end - mine.begin)
        return None


def _begin(memory: _Memory) -> int:
    return memory.begin


@lru_cache(maxsize=64)
def _index(specs: tuple[TensorSpec, ...], codec: Codec, layout: Layout) -> Index:
    """One object for equal tensors: its layout and digest are computed once for all rounds."""
    return Index(tensors=specs, codec=codec, layout=layout)
