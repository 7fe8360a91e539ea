"""Averages by reduce-scatter: each member reduces its share of the units, publishes it, and reads the other shares.

Unit u belongs to member u mod M. A unit is a pure function of the decision and the contributions, so every replica can
make it, and all results are the same bytes. No replica waits for a particular one: if the owner of a unit takes longer
than this replica needed for its own, the next member in slot order makes it and publishes it, too; later every replica
makes for itself what is still missing.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Corrupt
from skerry.runtime.events import emit
from skerry.runtime.store.parallel import run_parallel
from skerry.runtime.tensors.layout import BLOCK_BYTES
from skerry.runtime.tensors.reduce import AverageResult, Reducer, expansion
from skerry.runtime.tensors.reduced_unit import UnitName, seal, unseal

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from skerry.runtime.clock import Clock
    from skerry.runtime.store.interface import Store
    from skerry.runtime.tensors.layout import Index
    from skerry.runtime.tensors.reduce import Source, Workspace

UNITS: Final = 64
"""So many units of an average, if they then have between one block and MAX_UNIT_BYTES."""
MAX_UNIT_BYTES: Final = 8 << 20
PATIENCE: Final = 1.5
"""How long a replica waits for others' units, in the time that it took for its own."""


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """One average among members. decision: the digest of its record. members: slots in order. mine: this replica's.

    mine: None if this replica is no member. patient: the members are at work now; a round of the past is made of what
    there is.
    """

    round: int
    exchange: int
    decision: str
    rank: int
    members: Sequence[str]
    mine: str | None
    patient: bool


def unit_bytes(index: Index) -> int:
    """Bytes of contributions in a unit: the same for every replica."""
    most = MAX_UNIT_BYTES * 2 // expansion(index)
    whole = sum(part.body_bytes for part in index.parts)
    return max(1, min(-(-whole // UNITS // BLOCK_BYTES), most // BLOCK_BYTES)) * BLOCK_BYTES


def reduce_scatter(
    store: Store,
    scatter: Scatter,
    sources: Sequence[Source],
    index: Index,
    outputs: Sequence[torch.Tensor],
    *,
    workspace: Workspace,
    clock: Clock,
) -> AverageResult:
    """Write the average to `outputs`, as `average` does, with the same errors and the same digest everywhere."""
    reducer = Reducer(
        store,
        sources,
        index,
        outputs,
        chunk=unit_bytes(index),
        workspace=workspace,
        now=clock.now,
        in_order=False,
    )
    return _Work(store, scatter, reducer, clock).run()


class _Work:
    """The units of one average, while they are made and read."""

    def __init__(self, store: Store, scatter: Scatter, reducer: Reducer, clock: Clock) -> None:
        self._store = store
        self._scatter = scatter
        self._reducer = reducer
        self._clock = clock
        self._downloaded_bytes = self._requests = 0
        self._waited_s = 0.0
        self._missing = list(range(len(reducer.plan)))

    def run(self) -> AverageResult:
        began = self._clock.now()
        mine, profile = self._scatter.mine, self._store.profile
        self._make([unit for unit in self._missing if self._maker(unit) == mine], publish=True)
        # Others begin with the units after this replica's own, so that not all read the same ones at once.
        place = 0 if mine is None else self._scatter.members.index(mine)
        self._missing.sort(key=lambda unit: (unit - place) % len(self._scatter.members))
        patience = max(PATIENCE * (self._clock.now() - began), 2 * profile.poll_cap) if self._scatter.patient else 0.0
        since = self._clock.now()
        while self._missing:
            late = self._clock.now() - since >= patience
            if self._read(makers=2 if late else 1) or not self._missing:
                continue
            if self._clock.now() - since >= 2 * patience:
                self._make(list(self._missing), publish=False)
            elif late and (taken := [unit for unit in self._missing if self._maker(unit, 1) == mine]):
                self._make(taken, publish=True)
            else:
                self._clock.pause(profile.poll_first)
        result = self._reducer.result()
        return AverageResult(
            digest=result.digest,
            downloaded_bytes=result.downloaded_bytes + self._downloaded_bytes,
            requests=result.requests + self._requests,
            download_s=result.download_s + self._waited_s,
        )

    def _maker(self, unit: int, after: int = 0) -> str:
        """The member that makes a unit if so many before it have not."""
        return self._scatter.members[(unit + after) % len(self._scatter.members)]

    def _name(self, unit: int) -> UnitName:
        scatter = self._scatter
        return UnitName(scatter.round, scatter.exchange, scatter.decision, scatter.rank, unit, len(self._reducer.plan))

    def _make(self, units: Sequence[int], *, publish: bool) -> None:
        """Reduce these units from the contributions."""
        slot = self._scatter.mine if publish else None
        pieces = [self._reducer.plan[unit] for unit in units]
        with closing(self._reducer.run(pieces)) as reduced:
            for unit, piece in zip(units, reduced, strict=True):
                body = self._reducer.reduction.unit(piece)
                name = self._name(unit)
                if slot is not None:
                    # If an earlier attempt has made it: from the same contributions, so its bytes are the same.
                    self._store.create(name.key(slot), seal(name, body))
                self._missing.remove(unit)

    def _read(self, makers: int) -> bool:
        """Take what these many makers of each missing unit have published. Returns whether there was anything."""
        before = len(self._missing)
        began = self._clock.now()
        wanted = [(unit, self._maker(unit, after)) for unit in self._missing for after in range(makers)]
        wanted = [(unit, slot) for unit, slot in wanted if slot != self._scatter.mine]
        step = max(1, self._store.profile.streams)
        for start in range(0, len(wanted), step):
            batch = [(unit, slot) for unit, slot in wanted[start : start + step] if unit in self._missing]
            bodies = run_parallel(self._store, len(batch), lambda number, batch=batch: self._body(*batch[number]))
            for (unit, _), body in zip(batch, bodies, strict=True):
                if body is not None and unit in self._missing:
                    self._reducer.reduction.set_unit(self._reducer.plan[unit], body)
                    self._missing.remove(unit)
        self._waited_s += self._clock.now() - began
        return len(self._missing) < before

    def _body(self, unit: int, slot: str) -> memoryview | None:
        """A published unit; None if there is none, or none that is sound."""
        name = self._name(unit)
        key = name.key(slot)
        data = self._store.read(key)
        self._requests += 1
        if data is None:
            return None
        self._downloaded_bytes += len(data)
        try:
            return unseal(name, data, key)
        except Corrupt as error:
            emit("reduced_unit_refused", {"round": name.round, "slot": slot, "unit": unit, "error": str(error)})
            return None
