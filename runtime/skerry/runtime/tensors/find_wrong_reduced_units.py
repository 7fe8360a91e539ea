"""Computes averages again from the contributions, to find reduced units that are sound and yet wrong.

With reduce-scatter a member whose processor is faulty gives its error to all. A spot check is one block of the digests
of one unit, or a quantized unit; `wrong_units` checks a whole average. Only reads.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from skerry.runtime.errors import Corrupt, SkerryError
from skerry.runtime.store.retrying import apart
from skerry.runtime.structured_logging import emit
from skerry.runtime.tensors.byte_layout import BLOCK_BYTES
from skerry.runtime.tensors.codecs import BLOCK_FORMATS
from skerry.runtime.tensors.codecs.elements import TORCH_DTYPES
from skerry.runtime.tensors.reduce import Reducer, Sample, average
from skerry.runtime.tensors.reduced_unit import UnitName, unseal
from skerry.runtime.tensors.sum_by_pieces import Workspace, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.store.interface import Store
    from skerry.runtime.tensors.byte_layout import Index
    from skerry.runtime.tensors.reduce import Source
    from skerry.runtime.tensors.sum_by_pieces import Piece, Reduction

_CALL_S: Final = 10.0
"""A spot check waits no longer for one request: the receipt is written after it."""


class WrongUnit(NamedTuple):
    """A published unit that is not what the contributions give."""

    key: str
    slot: str
    why: str


def sample_of(index: Index, reduction: Reduction, unit: int, piece: Piece, slot: str, seed: int) -> Sample:
    """One block of a unit whose result is in the outputs, or all of a quantized unit. seed: selects the block."""
    # The blocks with a scale are counted from the unit's start: a part of the unit would get other scales.
    if not BLOCK_FORMATS.keys().isdisjoint(run.wire for run in piece.runs):
        return Sample(unit=unit, slot=slot, piece=piece, result=reduction.results(piece))
    blocks = [
        block
        for block in plan_of(index, BLOCK_BYTES)
        if block.part == piece.part and piece.start <= block.start < max(piece.stop, piece.start + 1)
    ]
    block = blocks[seed % len(blocks)]
    return Sample(unit=unit, slot=slot, piece=block, result=reduction.results(block))


def spot_check(
    store: Store, sources: Sequence[Source], index: Index, sample: Sample, *, rank: int, by: str
) -> str | None:
    """The fault of a unit that another member made. None if it has none, or if that cannot be known now.

    rank, by: of this replica, for the event.
    """
    try:
        if is_confirmed(apart(store, _CALL_S), sources, index, sample):
            return None
    except SkerryError:  # the contributions are damaged or gone, or the store is: others report that
        return None
    where = {"round": sources[0].round, "slot": sample.slot, "rank": rank, "unit": sample.unit}
    emit("unit_disputed", {**where, "by": by}, level=logging.ERROR)
    return f"the contributions do not give unit {sample.unit} of rank {rank}, which {sample.slot} made"


def is_confirmed(store: Store, sources: Sequence[Source], index: Index, sample: Sample) -> bool:
    """True if the contributions give this piece of the average. Reads it of each; raises what `average` raises."""
    with closing(Workspace()) as workspace:
        reducer = _reducer(store, sources, index, index.unit_bytes, workspace)
        for piece in reducer.run([sample.piece]):
            reducer.reduction.unit(piece)
        return reducer.reduction.results(sample.piece) == sample.result


def wrong_units(
    store: Store,
    sources: Sequence[Source],
    index: Index,
    name: Callable[[int, int], UnitName] | None,
    is_stored: Callable[[str], bool],
) -> tuple[str, list[WrongUnit]]:
    """The digest of an average, and the published units of it that are wrong or damaged.

    name: of unit i of n, None for an all-gather. is_stored: an object of this key exists. Needs memory for the average.
    Raises what `average` raises.
    """
    with closing(Workspace()) as workspace:
        if name is None:
            return average(store, sources, index, _empty(index), workspace=workspace).digest, []
        reducer, wrong = _reducer(store, sources, index, index.unit_bytes, workspace), list[WrongUnit]()
        for unit, piece in enumerate(reducer.run(reducer.plan)):
            body = b"".join(bytes(memoryview(data).cast("B")) for data in reducer.reduction.unit(piece))
            unit_name = name(unit, len(reducer.plan))
            for source in sources:
                key = unit_name.key(source.slot)
                if is_stored(key) and (data := store.read(key)) is not None:
                    why = _fault(unit_name, data, key, body)
                    wrong += [] if why is None else [WrongUnit(key, source.slot, why)]
        return reducer.result().digest, wrong


def _fault(name: UnitName, data: memoryview, key: str, body: bytes) -> str | None:
    try:
        published = bytes(unseal(name, data, key))
    except Corrupt as error:
        return str(error)
    if published == body:
        return None
    at = next((at for at, pair in enumerate(zip(published, body, strict=False)) if pair[0] != pair[1]), len(body))
    return f"its digest is right, but the contributions give other bytes: unit={name.unit} first_byte={at}"


def _reducer(store: Store, sources: Sequence[Source], index: Index, chunk: int, workspace: Workspace) -> Reducer:
    stored = [replace(source, local=None) for source in sources]
    # Of outputs that are not written, no memory is used.
    return Reducer(
        store, stored, index, _empty(index), chunk=chunk, workspace=workspace, now=time.monotonic, in_order=False
    )


def _empty(index: Index) -> list[torch.Tensor]:
    return [torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for spec in index.tensors]
