"""Sums one piece of all contributions at a time, and writes its result to the outputs.

A piece is a stretch of the body of one part. Its slices that are next to each other and alike are summed as one vector.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
import xxhash

from skerry.runtime.errors import Invalid
from skerry.runtime.tensors.byte_layout import ALIGNMENT, ITEM_BYTES, WIRE_TYPES, Index, Op, Slice
from skerry.runtime.tensors.codecs import BLOCK_FORMATS
from skerry.runtime.tensors.codecs.elements import TORCH_DTYPES, cast, widen
from skerry.runtime.tensors.payload_encoder import byte_view, flat_view, is_plain
from skerry.runtime.tensors.payload_reader import Reader
from skerry.runtime.tensors.reduced_unit import HEAD_BYTES as UNIT_HEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from typing_extensions import Buffer

    from skerry.runtime.store.interface import Store
    from skerry.runtime.tensors.payload_encoder import Encoded

# Up to this many tensors in a piece, a call for each is cheaper than another copy of the piece.
FEW_TENSORS: Final = 8

REDUCED: Final = BLOCK_FORMATS["int8x254"]
"""How the average of blocks is published. The error of a narrower type would be added to that of the contributions."""

Array: TypeAlias = "npt.NDArray[Any]"
_ADD: Final[Mapping[Op, np.ufunc]] = {"avg": np.add, "sum": np.add, "max": np.maximum, "min": np.minimum}


class Workspace:
    """Buffers and threads that are reused between rounds; their size is a few pieces. For one thread at a time.

    ahead: payload objects that were read before the decision, by key. copies: stores to read a payload from, by its
    key, instead of the run's store.
    """

    def __init__(self) -> None:
        self.reader = Reader()
        self.ahead: Mapping[str, memoryview] = {}
        self.copies: Mapping[str, Store] = {}
        self._buffers: dict[str, memoryview] = {}

    def buffer(self, name: str, size: int) -> memoryview:
        """The buffer of this name, of at least `size` bytes, aligned to a page."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = memoryview(mmap.mmap(-1, size))
        return buffer

    @property
    def allocated_bytes(self) -> int:
        """The size of all buffers."""
        return self.reader.allocated_bytes + sum(map(len, self._buffers.values()))

    def close(self) -> None:
        """End the threads and drop the buffers."""
        self.reader.close()
        self._buffers.clear()


@dataclass(frozen=True)
class _Run:
    """Neighbouring slices of a piece with the same operations, reduced as a vector of `count` items.

    wire: as transmitted. total, result: dtypes of the sum and of the outputs. begin: first byte in the piece. at: the
    offset of its total in the buffer. pieces: begin and end in items of the run; results: the same in elements. The
    padding between tensors is added, too, and never read.
    """

    wire: str
    total: str
    result: str
    op: Op
    begin: int
    at: int
    count: int
    pieces: tuple[Slice, ...]
    results: tuple[Slice, ...]

    @property
    def elements(self) -> int:
        """Elements of the vector."""
        return self.count * WIRE_TYPES[self.wire].elements


@dataclass(frozen=True)
class Piece:
    """Body bytes [start, stop) of one part, reduced together."""

    part: int
    start: int
    stop: int
    runs: tuple[_Run, ...]


class _Sum:
    """The sum of one run while its piece is open."""

    def __init__(self, run: _Run, total: Array, scratch: Array) -> None:
        self.run = run
        self.total = total
        self.empty = True
        self._scratch = scratch
        self._blocks = BLOCK_FORMATS.get(run.wire)

    def add(self, weight: float, data: memoryview) -> None:
        """Add a source's vector from the start of `data`. The first one becomes the total in place, if possible."""
        if self.empty and self.run.wire == self.run.total and self._factor(weight) is None:
            self.total = _array(data, self.run.wire, self.run.count)
        else:
            self.add_inside(weight, data, 0, self.run.count)
        self.empty = False

    def add_inside(self, weight: float, data: memoryview, begin: int, end: int) -> None:
        """Add to items [begin, end). The caller clears `empty` after the first source."""
        if self._blocks is not None:
            each = self._blocks.wire.elements
            self._blocks.add(data, self.total[begin * each : end * each], self._factor(weight), first=self.empty)
            return
        total, factor = self.total[begin:end], self._factor(weight)
        values = total if self.empty else self._scratch[: end - begin]
        if self.run.wire == self.run.total:
            addend = _array(data, self.run.wire, end - begin)
        else:
            widen(data, self.run.wire, values)
            addend = values
        if factor is not None:
            # A separate product: one fused into the sum rounds only once, and only on some hardware.
            addend = np.multiply(addend, total.dtype.type(factor), out=values)
        if not self.empty:
            _ADD[self.run.op](total, addend, out=total)
        elif addend is not total:
            np.copyto(total, addend)

    def _factor(self, weight: float) -> float | None:
        return weight if self.run.op == "avg" and weight != 1.0 else None


class Reduction:
    """An average that is computed piece by piece."""

    def __init__(
        self,
        weights: Sequence[float],
        outputs: Sequence[torch.Tensor],
        workspace: Workspace,
        total_bytes: int,
        *,
        in_order: bool,
    ) -> None:
        """weights: of the sources. total_bytes: of the sums of one piece, at most.

        in_order: pieces are closed in the order of the outputs.
        """
        self._in_order = in_order
        self._weight = math.fsum(weights)
        # The inverse of a power of two is exact: the product equals the quotient and takes a third less time.
        self._inverse = 1.0 / self._weight if math.frexp(self._weight)[0] == 0.5 else None
        self._outputs = outputs
        # The result of a tensor that is not contiguous is copied to it at the end.
        self._flat = [
            flat_view(output) if is_plain(output) else torch.empty(output.numel(), dtype=output.dtype)
            for output in outputs
        ]
        self._bytes = [byte_view(flat) for flat in self._flat]
        # Each run starts at a cache line.
        self._totals = workspace.buffer("totals", total_bytes + ALIGNMENT)
        self._scratch = workspace.buffer("scratch", total_bytes)
        self._gathered = workspace.buffer("gathered", total_bytes + UNIT_HEAD_BYTES + ALIGNMENT)
        self._digest = xxhash.xxh3_128()
        self._sums: list[_Sum] = []

    @property
    def spare(self) -> memoryview:
        """A buffer for one published result, and a few bytes more; used while a piece is open, and free otherwise."""
        return self._gathered

    def open(self, piece: Piece) -> None:
        """Begin a piece. Every source must then be added once, in slot order."""
        self._sums = [
            _Sum(run, *(_array(buffer, run.total, run.elements) for buffer in (self._totals[run.at :], self._scratch)))
            for run in piece.runs
        ]

    def add_remote(self, weight: float, body: memoryview) -> None:
        """Add a source's verified bytes of the piece. Those of the first source become the sum, and must stay valid."""
        for run_sum in self._sums:
            run_sum.add(weight, body[run_sum.run.begin :])

    def add_local(self, weight: float, local: Encoded) -> None:
        """Add the piece of a source in memory."""
        for run_sum in self._sums:
            size = WIRE_TYPES[run_sum.run.wire].item_bytes
            if len(run_sum.run.pieces) <= FEW_TENSORS:
                for piece in run_sum.run.pieces:
                    run_sum.add_inside(weight, _inside(local.wire_bytes, piece, size), piece.begin, piece.end)
            else:
                for piece in run_sum.run.pieces:
                    self._gathered[piece.begin * size : piece.end * size] = _inside(local.wire_bytes, piece, size)
                run_sum.add_inside(weight, self._gathered, 0, run_sum.run.count)
            run_sum.empty = False

    def close(self) -> None:
        """Write the piece's result into the outputs and digest it."""
        for run_sum in self._sums:
            run, total = run_sum.run, run_sum.total
            if run.op in {"max", "min"} and run.total in {"float32", "float64"}:
                # Whether +0 or -0 is larger depends on the instruction: make both +0.
                np.add(total, 0.0, out=total)
            size = ITEM_BYTES[run.result]
            few = len(run.results) <= FEW_TENSORS
            if not few:
                self._write_result(run, total, self._gathered)
            for piece in run.results:
                target = _inside(self._bytes, piece, size)
                if few:
                    self._write_result(run, total[piece.begin : piece.end], target)
                else:
                    target[:] = self._gathered[piece.begin * size : piece.end * size]
                if self._in_order:
                    self._digest.update(target)

    def unit(self, piece: Piece) -> list[Buffer]:
        """The result of a closed piece as it is published. The outputs then hold what was published: blocks, too."""
        return [self._sent(run, result) for run in piece.runs for result in run.results]

    def results(self, piece: Piece) -> bytes:
        """The bytes of a piece's elements in the outputs."""
        return b"".join(
            _inside(self._bytes, result, ITEM_BYTES[run.result]) for run in piece.runs for result in run.results
        )

    def set_unit(self, piece: Piece, data: memoryview) -> None:
        """Write a published result into the outputs. Raises Invalid, and writes nothing, if it has another length."""
        sizes = [(run, result, _sent_bytes(run, result)) for run in piece.runs for result in run.results]
        if sum(size for _, _, size in sizes) != len(data):
            raise Invalid(f"wrong length: bytes={len(data)} expected={sum(size for _, _, size in sizes)}")
        at = 0
        for run, result, size in sizes:
            self._accept(run, result, data[at : at + size])
            at += size

    def _sent(self, run: _Run, result: Slice) -> Buffer:
        if run.wire not in BLOCK_FORMATS:
            return _inside(self._bytes, result, ITEM_BYTES[run.result])
        data = memoryview(bytearray(_sent_bytes(run, result)))
        REDUCED.write(self._flat[result.tensor][result.first : result.first + result.count], data)
        self._accept(run, result, data)
        return data

    def _accept(self, run: _Run, result: Slice, data: memoryview) -> None:
        if run.wire not in BLOCK_FORMATS:
            _inside(self._bytes, result, ITEM_BYTES[run.result])[:] = data
            return
        values = np.empty(len(data) // REDUCED.wire.item_bytes * REDUCED.wire.elements, dtype=np.float32)
        REDUCED.add(data, values, None, first=True)
        elements = self._flat[result.tensor][result.first : result.first + result.count]
        cast(torch.from_numpy(values[: result.count]), elements)

    def finish(self) -> str:
        """The digest of all outputs, once every piece is closed or set."""
        if not self._in_order:
            for data in self._bytes:
                self._digest.update(data)
        for output, flat in zip(self._outputs, self._flat, strict=True):
            if not is_plain(output):
                output.detach().copy_(flat.view(output.shape))
        return self._digest.hexdigest()

    def _write_result(self, run: _Run, total: Array, target: memoryview) -> None:
        """Divide and cast a total, and write it to the start of `target`."""
        if run.total == run.result:
            result = _array(target, run.result, total.size)
            if run.op == "avg" and self._inverse is not None:
                np.multiply(total, total.dtype.type(self._inverse), out=result)
            elif run.op == "avg":
                np.divide(total, total.dtype.type(self._weight), out=result)
            else:
                np.copyto(result, total)
            return
        if run.op == "avg":
            np.divide(total, total.dtype.type(self._weight), out=total)
        cast(torch.from_numpy(total), torch.frombuffer(target, dtype=TORCH_DTYPES[run.result], count=total.size))


def _sent_bytes(run: _Run, result: Slice) -> int:
    """The length of a result as it is published."""
    if run.wire not in BLOCK_FORMATS:
        return result.count * ITEM_BYTES[run.result]
    return -(-result.count // REDUCED.wire.elements) * REDUCED.wire.item_bytes


def _array(data: memoryview, dtype: str, count: int) -> Array:
    return np.frombuffer(data, dtype=dtype, count=count)


def _inside(views: Sequence[memoryview], piece: Slice, size: int) -> memoryview:
    return views[piece.tensor][piece.first * size : (piece.first + piece.count) * size]


@lru_cache(maxsize=64)
def plan_of(index: Index, chunk: int) -> tuple[Piece, ...]:
    """The pieces, which are read and reduced together, in the order of the outputs' digest. Cached between rounds."""
    return tuple(
        Piece(layout.number, start, stop, _runs(index, layout.between(start, stop, index.item_bytes)))
        for layout in index.parts
        for start in range(0, max(1, layout.body_bytes), chunk)
        for stop in [min(start + chunk, layout.body_bytes)]
    )


def _runs(index: Index, pieces: Sequence[Slice]) -> tuple[_Run, ...]:
    runs: list[_Run] = []
    at = 0

    def kind(piece: Slice) -> tuple[str, str, Op]:
        spec = index.tensors[piece.tensor]
        return index.wire[piece.tensor], spec.dtype, spec.op

    for (wire, result, op), members in groupby(pieces, kind):
        inside = list(members)
        begin, size = inside[0].begin, WIRE_TYPES[wire].item_bytes
        total = "float32" if result in {"float16", "bfloat16"} else result
        shifted = tuple(
            Slice(piece.tensor, piece.first, piece.count, (piece.begin - begin) // size, (piece.end - begin) // size)
            for piece in inside
        )
        run = _Run(
            wire=wire,
            total=total,
            result=result,
            op=op,
            begin=begin,
            at=at,
            count=shifted[-1].end,
            pieces=shifted,
            results=tuple(_in_elements(index, piece) for piece in shifted),
        )
        runs.append(run)
        at += -(-run.elements * ITEM_BYTES[total] // ALIGNMENT) * ALIGNMENT
    return tuple(runs)


def _in_elements(index: Index, piece: Slice) -> Slice:
    """A slice of a run, counted in elements instead of items."""
    inside, begin = index.elements(piece), piece.begin * WIRE_TYPES[index.wire[piece.tensor]].elements
    count = inside.stop - inside.start
    return Slice(piece.tensor, inside.start, count, begin, begin + count)
