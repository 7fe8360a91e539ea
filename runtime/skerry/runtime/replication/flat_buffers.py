"""Lays tensors out as a few flat byte buffers, and seals what they hold.

Every dtype and stride travels, because only bytes do. Tensors that share memory (tied weights) share it in the copy
too, and travel once. The number of buffers grows with the large tensors only: a span of memory of at least SMALL bytes
is a buffer, and all smaller ones of a dtype are one, whose parts stay where they are until they are sent.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
import xxhash

from skerry.runtime.errors import Invalid
from skerry.runtime.tensors.byte_layout import ALIGNMENT
from skerry.runtime.tensors.host_copies import on_host

if TYPE_CHECKING:
    from collections.abc import Sequence

Parts: TypeAlias = list[torch.Tensor]
"""[N] uint8 tensors in CPU memory that are one buffer, one after the other."""

SMALL: Final = 1 << 20
"""A copy of a smaller span costs less than a message of its own."""
_LARGEST_ITEM: Final = 16
"""complex128. A span starts at a multiple, so that every view of it is aligned."""


class View(NamedTuple):
    """A tensor in the buffers. offset: its first byte."""

    buffer: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Table(NamedTuple):
    """The layout of some tensors. sizes: bytes of each buffer."""

    views: tuple[View, ...]
    sizes: tuple[int, ...]

    def empty_buffers(self) -> list[torch.Tensor]:
        """Buffers of these sizes, to receive into."""
        return [torch.empty(size, dtype=torch.uint8) for size in self.sizes]


@dataclass
class _Span:
    """Bytes [start, stop) of one storage, and the tensors in it, by their positions."""

    storage: torch.UntypedStorage
    start: int
    stop: int
    tensors: list[int]

    def bytes(self) -> torch.Tensor:
        """[N] uint8 view, on the device of the storage."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.start, (self.stop - self.start,), (1,))


def flatten(tensors: Sequence[torch.Tensor]) -> tuple[Table, list[Parts]]:
    """The layout of `tensors`, and the buffers of their bytes: the tensors' own memory where that is the CPU's.

    Raises Invalid for a tensor that is not dense, or of a subclass, whose memory is not its value.
    """
    plain = [_plain(number, tensor) for number, tensor in enumerate(tensors)]
    spans = _spans(plain)
    # A column of a matrix would take the whole matrix along.
    gaps = [
        span.tensors[0]
        for span in spans
        if len(span.tensors) == 1 and span.stop - span.start > plain[span.tensors[0]].nbytes + _LARGEST_ITEM
    ]
    if gaps:
        for position in gaps:
            plain[position] = plain[position].contiguous()
        spans = _spans(plain)
    data = on_host([span.bytes() for span in spans])
    groups: dict[object, list[int]] = {}
    for number, (span, host) in enumerate(zip(spans, data, strict=True)):
        # A pickle of the extension's own manager cannot hold memory that is viewed as several dtypes.
        is_small = host.numel() < SMALL
        groups.setdefault(plain[span.tensors[0]].dtype if is_small else number, []).append(number)
    views, buffers, sizes = dict[int, View](), list[Parts](), list[int]()
    padding = torch.zeros(ALIGNMENT, dtype=torch.uint8)
    for numbers in groups.values():
        begin, parts = 0, Parts()
        for number in numbers:
            for position in spans[number].tensors:
                tensor = plain[position]
                offset = begin + _first_byte(tensor) - spans[number].start
                views[position] = View(len(buffers), offset, tensor.dtype, tuple(tensor.shape), tensor.stride())
            size = data[number].numel()
            pad = -size % ALIGNMENT if len(numbers) > 1 else 0
            parts += [part for part in (data[number], padding[:pad]) if len(part)]
            begin += size + pad
        buffers.append(parts)
        sizes.append(begin)
    return Table(tuple(views[position] for position in range(len(plain))), tuple(sizes)), buffers


def unflatten(table: Table, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a layout as views of the buffers, with their strides and shared memory."""
    tensors: list[torch.Tensor] = []
    for view in table.views:
        buffer = buffers[view.buffer]
        offset = (int(buffer.storage_offset()) + view.offset) // view.dtype.itemsize
        empty = torch.empty(0, dtype=view.dtype, device=buffer.device)
        tensors.append(empty.set_(buffer.untyped_storage(), offset, view.shape, view.stride))
    return tensors


def seal_of(tensors: Sequence[torch.Tensor]) -> str:
    """The xxh3-128 of the dtypes, shapes and elements in order, however they lie in memory."""
    digest = xxhash.xxh3_128()
    for each in tensors:
        # One at a time: the host may have no memory for a second copy of what a device holds.
        (tensor,) = on_host([each.detach().resolve_conj().resolve_neg()])
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _plain(number: int, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor outside autograd, with its values in its memory."""
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter} or tensor.layout != torch.strided:
        raise Invalid(
            f"cannot copy a tensor to a peer: number={number} type={type(tensor).__name__} layout={tensor.layout}; "
            "pop dense tensors, of a DTensor its local one"
        )
    return tensor.detach().resolve_conj().resolve_neg()


def _first_byte(tensor: torch.Tensor) -> int:
    """The position in its storage; an empty tensor is anywhere."""
    return int(tensor.storage_offset()) * tensor.element_size() if tensor.numel() else 0


def _spans(tensors: Sequence[torch.Tensor]) -> list[_Span]:
    """The spans of memory that the tensors cover; those that overlap are one."""
    intervals: list[tuple[Any, int, int, int]] = []
    for position, tensor in enumerate(tensors):
        start = _first_byte(tensor)
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        stop = start + (reach + 1) * tensor.element_size() if tensor.numel() else start
        storage = (str(tensor.device), tensor.untyped_storage().data_ptr() if tensor.numel() else -1)
        intervals.append((storage, start, stop, position))
    spans: list[_Span] = []
    previous = None
    for storage, start, stop, position in sorted(intervals):
        if storage != previous or start >= spans[-1].stop:
            first = start // _LARGEST_ITEM * _LARGEST_ITEM
            spans.append(_Span(tensors[position].untyped_storage(), first, stop, []))
        previous = storage
        spans[-1].stop = max(spans[-1].stop, stop)
        spans[-1].tensors.append(position)
    return spans
