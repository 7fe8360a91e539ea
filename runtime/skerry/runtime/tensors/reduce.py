"""The average of an exchange: every replica computes the same bits from the same record, in place.

Contributions are read in pieces; a piece is verified, then added in slot order, while it is in the core's cache;
the result goes straight into the outputs. Sums are in float32 (float64 for float64; integers and booleans in their
own type) and products are rounded before they are added, so no bit depends on which contribution is the local one,
on vector widths or on threads. Arithmetic is numpy's, in the calling thread (see `codec.tensors.cast`).
Never decides whose contribution counts: the exchange's record does.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
import mmap
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
import xxhash

from skerry.runtime import keys
from skerry.runtime.codec.container import check_parts
from skerry.runtime.codec.layout import ALIGNMENT, BLOCK_BYTES, ITEM_BYTES, Index, Op, Slice
from skerry.runtime.codec.reading import Reader, Remote, Request
from skerry.runtime.codec.tensors import (
    TORCH_DTYPES,
    Encoded,
    byte_view,
    cast,
    check_tensors,
    flat_view,
    is_plain,
    widen,
)
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from skerry.runtime.records import Part
    from skerry.runtime.store.interface import Store

# Up to here a torch call for each tensor in a piece is cheaper than one more copy of the piece.
FEW_TENSORS: Final = 8

Array: TypeAlias = "npt.NDArray[Any]"
_ADD: Final[Mapping[Op, np.ufunc]] = {"avg": np.add, "sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One member's contribution. local: its encoding in this process's memory, if it need not be read.

    weight: positive; counts for "avg" only.
    """

    slot: str
    weight: float
    round: int
    parts: Sequence[Part]
    local: Encoded | None = None


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """What an average was and cost. digest: xxh3-128 of the outputs' bytes in index order."""

    digest: str
    downloaded_bytes: int
    requests: int


class Workspace:
    """Buffers and threads kept between rounds: a few pieces, however large the model. For one thread at a time."""

    def __init__(self) -> None:
        self.reader = Reader()
        self._kept: dict[str, memoryview] = {}

    def buffer(self, name: str, size: int) -> memoryview:
        """At least `size` bytes, the same ones every time, beginning at a page."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < size:
            kept = self._kept[name] = memoryview(mmap.mmap(-1, size))
        return kept

    def close(self) -> None:
        """End the threads and forget the buffers."""
        self.reader.close()
        self._kept.clear()


def average(
    store: Store, sources: Sequence[Source], index: Index, outputs: Sequence[torch.Tensor], *, workspace: Workspace
) -> Averaged:
    """Reduce the contributions, given in slot order, into `outputs`; each tensor by the op its index names.

    "avg" is sum(weight * x) / sum(weight). The outputs may be the very tensors that the local source encodes.
    Raises Corrupt (naming key, slot and block), Invalid (naming slot, field or tensor) or what the store raises.
    Outputs are good only after a return: after an error they hold a mixture, and so may the local source; whoever
    tries again reads that contribution from the store, too (local=None).
    """
    _check(sources, index, outputs)
    chunk = max(1, store.profile.piece_bytes // BLOCK_BYTES) * BLOCK_BYTES
    plan = _plan(index, chunk)
    remotes = {
        source.slot: [
            Remote(keys.payload(source.round, source.slot, part.digest), part, index, number, f"slot={source.slot}")
            for number, part in enumerate(source.parts)
        ]
        for source in sources
        if source.local is None
    }
    order = list(sources)
    if order[0].local is not None:
        # Two have the same sum either way round, and one that was read can become the sum where it landed.
        order[:2] = reversed(order[:2])
    requests = [
        Request(remotes[source.slot][piece.part], piece.start, piece.stop, kept=source is order[0])
        for piece in plan
        for source in order
        if source.local is None
    ]
    before = workspace.reader.traffic
    reduction = _Reduction(sources, outputs, workspace, chunk)
    # What is not finite in the average was not finite in a contribution: told by digests, not by warnings.
    with np.errstate(all="ignore"), closing(workspace.reader.read(store, requests)) as bodies:
        for piece in plan:
            reduction.open(piece)
            for source in order:
                if source.local is None:
                    reduction.add_remote(source.weight, next(bodies))
                else:
                    reduction.add_local(source.weight, source.local)
            reduction.close()
    spent = workspace.reader.traffic
    return Averaged(
        digest=reduction.finish(),
        downloaded_bytes=spent.downloaded_bytes - before.downloaded_bytes,
        requests=spent.requests - before.requests,
    )


@dataclass(frozen=True)
class _Run:
    """Neighbours in a piece that are reduced by the same operations, as one vector of `count` elements.

    wire, total, result: the dtypes that travel, in which is summed, and of the outputs.
    begin: its first byte in the piece. at: where its total stands in the kept buffer. pieces: begin and end in
    elements of the run. Between tensors the vector holds padding, which is added and never looked at.
    """

    wire: str
    total: str
    result: str
    op: Op
    begin: int
    at: int
    count: int
    pieces: tuple[Slice, ...]


@dataclass(frozen=True)
class _Piece:
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

    def add(self, weight: float, data: memoryview) -> None:
        """Add a source's vector, which begins `data`. The first becomes the total where it lies, if it can."""
        if self.empty and self.run.wire == self.run.total and self._factor(weight) is None:
            self.total = _array(data, self.run.wire, self.run.count)
        else:
            self.add_inside(weight, data, 0, self.run.count)
        self.empty = False

    def add_inside(self, weight: float, data: memoryview, begin: int, end: int) -> None:
        """Add to elements [begin, end); the caller says when the source is no longer the first."""
        total, factor = self.total[begin:end], self._factor(weight)
        values = total if self.empty else self._scratch[: end - begin]
        if self.run.wire == self.run.total:
            found = _array(data, self.run.wire, end - begin)
        else:
            widen(data, self.run.wire, values)
            found = values
        if factor is not None:
            # A product of its own, not fused into the sum: a fused one rounds once, and not on all hardware.
            found = np.multiply(found, total.dtype.type(factor), out=values)
        if not self.empty:
            _ADD[self.run.op](total, found, out=total)
        elif found is not total:
            np.copyto(total, found)

    def _factor(self, weight: float) -> float | None:
        return weight if self.run.op == "avg" and weight != 1.0 else None


class _Reduction:
    """One average being computed, piece by piece."""

    def __init__(
        self, sources: Sequence[Source], outputs: Sequence[torch.Tensor], workspace: Workspace, chunk: int
    ) -> None:
        self._weight = math.fsum(source.weight for source in sources)
        # Of a power of two the inverse is exact: the product has the quotient's bits, at a third less time.
        self._inverse = 1.0 / self._weight if math.frexp(self._weight)[0] == 0.5 else None
        self._outputs = outputs
        # A tensor whose elements are not in order in memory gets its result in one copy at the end.
        self._flat = [flat_view(one) if is_plain(one) else torch.empty(one.numel(), dtype=one.dtype) for one in outputs]
        self._bytes = [byte_view(one) for one in self._flat]
        # A total is at most twice as wide as what travels; each run starts at a cache line.
        self._totals = workspace.buffer("totals", 2 * chunk + ALIGNMENT)
        self._scratch = workspace.buffer("scratch", 2 * chunk)
        self._gathered = workspace.buffer("gathered", 2 * chunk)
        self._digest = xxhash.xxh3_128()
        self._open: list[_Sum] = []

    def open(self, piece: _Piece) -> None:
        """Begin a piece; every source is then added once, in slot order."""
        self._open = [
            _Sum(run, _array(self._totals[run.at :], run.total, run.count), _array(self._scratch, run.total, run.count))
            for run in piece.runs
        ]

    def add_remote(self, weight: float, body: memoryview) -> None:
        """Add a source's verified bytes of the piece. The first source's stay, and become the sum where they are."""
        for one in self._open:
            one.add(weight, body[one.run.begin :])

    def add_local(self, weight: float, local: Encoded) -> None:
        """Add the piece from the encoded tensors in memory."""
        for one in self._open:
            size = ITEM_BYTES[one.run.wire]
            if len(one.run.pieces) <= FEW_TENSORS:
                for place in one.run.pieces:
                    one.add_inside(weight, _inside(local.wire_bytes, place, size), place.begin, place.end)
            else:
                for place in one.run.pieces:
                    self._gathered[place.begin * size : place.end * size] = _inside(local.wire_bytes, place, size)
                one.add_inside(weight, self._gathered, 0, one.run.count)
            one.empty = False

    def close(self) -> None:
        """Write the piece's result into the outputs and digest it."""
        for one in self._open:
            run, total = one.run, one.total
            if run.op in {"max", "min"} and run.total in {"float32", "float64"}:
                # Which of +0 and -0 is the larger depends on the instruction used: make both +0.
                np.add(total, 0.0, out=total)
            size = ITEM_BYTES[run.result]
            few = len(run.pieces) <= FEW_TENSORS
            if not few:
                self._settle(run, total, self._gathered)
            for place in run.pieces:
                target = _inside(self._bytes, place, size)
                if few:
                    self._settle(run, total[place.begin : place.end], target)
                else:
                    target[:] = self._gathered[place.begin * size : place.end * size]
                self._digest.update(target)

    def finish(self) -> str:
        """The digest of all outputs, once every piece is closed."""
        for output, flat in zip(self._outputs, self._flat, strict=True):
            if not is_plain(output):
                output.detach().copy_(flat.view(output.shape))
        return self._digest.hexdigest()

    def _settle(self, run: _Run, total: Array, target: memoryview) -> None:
        """Bring a total into its output, at the start of `target`."""
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


def _array(data: memoryview, dtype: str, count: int) -> Array:
    return np.frombuffer(data, dtype=dtype, count=count)


def _inside(views: Sequence[memoryview], one: Slice, size: int) -> memoryview:
    return views[one.tensor][one.first * size : (one.first + one.count) * size]


def _check(sources: Sequence[Source], index: Index, outputs: Sequence[torch.Tensor]) -> None:
    if not sources:
        raise Invalid("nothing to average: no sources")
    for spec in index.tensors:
        if spec.op == "keep" or (spec.op == "avg" and not TORCH_DTYPES[spec.dtype].is_floating_point):
            raise Invalid(
                f"cannot reduce: tensor={spec.name!r} dtype={spec.dtype} op={spec.op}; integers go by sum, max or min"
            )
    check_tensors(outputs, index)
    for source in sources:
        if not (math.isfinite(source.weight) and source.weight > 0):
            raise Invalid(f"weight must be positive: slot={source.slot} weight={source.weight}")
        check_parts(source.parts, index, f"slot={source.slot}")
        if source.local is not None and source.local.index != index:
            raise Invalid(f"encoded for another index: slot={source.slot} index={source.local.index.digest}")
    slots = [source.slot for source in sources]
    if len(set(slots)) != len(slots):
        raise Invalid(f"a slot counts twice: slots={', '.join(slots)}")


@lru_cache(maxsize=64)
def _plan(index: Index, chunk: int) -> tuple[_Piece, ...]:
    """What is read and reduced together, in the order of the outputs' digest. Pure, so kept between rounds."""
    return tuple(
        _Piece(layout.number, start, stop, _runs(index, layout.between(start, stop, index.item_bytes)))
        for layout in index.parts
        for start in range(0, max(1, layout.body_bytes), chunk)
        for stop in [min(start + chunk, layout.body_bytes)]
    )


def _runs(index: Index, pieces: Sequence[Slice]) -> tuple[_Run, ...]:
    runs: list[_Run] = []
    at = 0

    def kind(one: Slice) -> tuple[str, str, Op]:
        spec = index.tensors[one.tensor]
        return index.wire[one.tensor], spec.dtype, spec.op

    for (wire, result, op), members in groupby(pieces, kind):
        inside = list(members)
        begin, size = inside[0].begin, ITEM_BYTES[wire]
        total = "float32" if result in {"float16", "bfloat16"} else result
        shifted = tuple(
            Slice(one.tensor, one.first, one.count, (one.begin - begin) // size, (one.end - begin) // size)
            for one in inside
        )
        count = shifted[-1].end
        runs.append(_Run(wire=wire, total=total, result=result, op=op, begin=begin, at=at, count=count, pieces=shifted))
        at += -(-count * ITEM_BYTES[total] // ALIGNMENT) * ALIGNMENT
    return tuple(runs)
