"""Computes the average of an exchange in place; every replica computes the same bits from the same decision.

Contributions are read in pieces; a piece is verified, then added in slot order, while it is in the core's cache; the
result is written directly to the outputs. Sums are in float32 (float64 for float64; integers and booleans in their own
type), and products are rounded before they are added. Therefore no bit depends on which contribution is local, on
vector widths or on threads. Arithmetic is numpy's, in the calling thread (see `encode.cast`).
The decision, not this module, selects the contributions.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.tensors.byte_layout import BLOCK_BYTES, Index
from skerry.runtime.tensors.codecs.elements import TORCH_DTYPES
from skerry.runtime.tensors.payload_encoder import Encoded, check_tensors
from skerry.runtime.tensors.payload_format import check_parts
from skerry.runtime.tensors.payload_reader import RemotePayload, Request
from skerry.runtime.tensors.sum_by_pieces import Piece, Reduction, Workspace, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import torch

    from skerry.runtime.log.records import Part
    from skerry.runtime.store.interface import Store


@dataclass(frozen=True, kw_only=True)
class Source:
    """A member's contribution. local: its encoding in this process's memory; None to read it from the store.

    weight: positive; used for "avg" only.
    """

    slot: str
    weight: float
    round: int
    parts: Sequence[Part]
    local: Encoded | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A piece of an average as another slot has published it, to be checked. result: the bytes of its elements."""

    unit: int
    slot: str
    piece: Piece
    result: bytes


@dataclass(frozen=True, kw_only=True)
class AverageResult:
    """The digest and cost of an average. digest: xxh3-128 of the outputs' bytes in index order.

    download_s: seconds in which the reduction waited for bytes. sample: what this replica is to check.
    """

    digest: str
    downloaded_bytes: int
    requests: int
    download_s: float
    sample: Sample | None = None


def average(
    store: Store,
    sources: Sequence[Source],
    index: Index,
    outputs: Sequence[torch.Tensor],
    *,
    workspace: Workspace,
    now: Callable[[], float] = time.monotonic,
) -> AverageResult:
    """Reduce the contributions, given in slot order, into `outputs`, each tensor by its op in the index.

    "avg" is sum(weight * x) / sum(weight). The outputs may be the same tensors that the local source encodes.
    Raises Corrupt (naming key, slot and block), Invalid (naming slot, field or tensor) or what the store raises.
    After an error the outputs are partly overwritten, and so may the local source be: a retry must read that
    contribution from the store, too (local=None).
    """
    # Of each wire type, the sums of a piece are at most as large as those of a piece of sixteen-bit floats.
    chunk = max(1, 2 * store.profile.piece_bytes // index.expansion // BLOCK_BYTES) * BLOCK_BYTES
    reducer = Reducer(store, sources, index, outputs, chunk=chunk, workspace=workspace, now=now)
    for _ in reducer.run(reducer.plan):
        pass
    return reducer.result()


class Reducer:
    """Reduces pieces of contributions into the outputs, in any order; arguments and errors as those of `average`.

    chunk: bytes of a piece, a multiple of BLOCK_BYTES. in_order: every piece is reduced once, in the order of the plan.
    """

    def __init__(
        self,
        store: Store,
        sources: Sequence[Source],
        index: Index,
        outputs: Sequence[torch.Tensor],
        *,
        chunk: int,
        workspace: Workspace,
        now: Callable[[], float],
        in_order: bool = True,
    ) -> None:
        _check(sources, index, outputs)
        self.index = index
        self.plan = plan_of(index, chunk)
        self._store = store
        self._reader = workspace.reader
        self._now = now
        self._remotes = {
            source.slot: [
                RemotePayload(
                    key,
                    part,
                    index,
                    number,
                    f"slot={source.slot}",
                    ahead=workspace.ahead.get(key),
                    copy=workspace.copies.get(key),
                )
                for number, part in enumerate(source.parts)
                for key in [keys.payload(source.round, source.slot, part.digest)]
            ]
            for source in sources
            if source.local is None
        }
        self._order = list(sources)
        if self._order[0].local is not None:
            # The sum of two does not depend on their order, and one that was read can become the sum in place.
            self._order[:2] = reversed(self._order[:2])
        self._before = self._reader.traffic
        self._download_s = 0.0
        weights = [source.weight for source in sources]
        self.reduction = Reduction(weights, outputs, workspace, chunk * index.expansion, in_order=in_order)

    def run(self, pieces: Sequence[Piece]) -> Generator[Piece]:
        """Yield each piece when its result is in the outputs. A caller that stops early must close the generator."""
        requests = [
            Request(self._remotes[source.slot][piece.part], piece.start, piece.stop, retained=source is self._order[0])
            for piece in pieces
            for source in self._order
            if source.local is None
        ]
        # The reader fetches a header with the first bytes of its body; otherwise it must be known.
        for request in {id(request.remote): request for request in reversed(requests)}.values():
            if request.start > 0 and request.remote.header is None:
                self._reader.header(self._store, request.remote)
        # A value that is not finite in the average was not finite in a contribution; numpy need not warn.
        with np.errstate(all="ignore"), closing(self._reader.read(self._store, requests)) as bodies:
            for piece in pieces:
                self.reduction.open(piece)
                for source in self._order:
                    if source.local is None:
                        began = self._now()
                        body = next(bodies)
                        self._download_s += self._now() - began
                        self.reduction.add_remote(source.weight, body)
                    else:
                        self.reduction.add_local(source.weight, source.local)
                self.reduction.close()
                yield piece

    def result(self) -> AverageResult:
        """The digest and cost, once all of the outputs are written."""
        traffic = self._reader.traffic
        return AverageResult(
            digest=self.reduction.finish(),
            downloaded_bytes=traffic.downloaded_bytes - self._before.downloaded_bytes,
            requests=traffic.requests - self._before.requests,
            download_s=self._download_s,
        )


def _check(sources: Sequence[Source], index: Index, outputs: Sequence[torch.Tensor]) -> None:
    if not sources:
        raise Invalid("no contributions to average")
    for spec in index.tensors:
        if spec.op == "keep" or (spec.op == "avg" and not TORCH_DTYPES[spec.dtype].is_floating_point):
            raise Invalid(
                f"cannot reduce: tensor={spec.name!r} dtype={spec.dtype} op={spec.op}; use sum, max or min for integers"
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
        raise Invalid(f"a slot is listed twice: slots={', '.join(slots)}")
