"""Averages by reduce-scatter: each member reduces its share of the units, publishes it, and reads the other shares.

Unit u belongs to maker u mod K, and all members are makers unless the decision names some. A unit is a pure function of
the decision and the contributions, so every replica can make it, and all results are the same bytes. No replica waits
for a particular one: a member that has made its own units and sees no others appear makes its share of those that are
missing, and publishes them, too; later every replica makes for itself what is still missing. If the makers are in
another region, it waits for a sign that they are dead or far behind, because it must then read over the border.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Corrupt
from skerry.runtime.store.interface import Span
from skerry.runtime.store.parallel import BackgroundRequests, RequestWindow
from skerry.runtime.structured_logging import emit
from skerry.runtime.tensors.find_wrong_reduced_units import sample_of
from skerry.runtime.tensors.reduce import AverageResult, Reducer
from skerry.runtime.tensors.reduced_unit import UnitName, seal, unseal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch

    from skerry.runtime.clock import Clock
    from skerry.runtime.store.interface import Store
    from skerry.runtime.tensors.byte_layout import Index
    from skerry.runtime.tensors.reduce import Sample, Source
    from skerry.runtime.tensors.sum_by_pieces import Workspace

POLL_S: Final = 0.05
"""Seconds between two looks for units, at most: they follow one another, and a look is one request for each maker."""
PATIENCE: Final = 0.5
"""A member without a new unit for this long, in the time that it took for its own, takes over others'."""
LONG_PATIENCE: Final = 3.0
"""After this long every replica makes for itself what is missing: those that took it over are late, too."""
MAX_PATIENCE_S: Final = 300.0
"""It waits no longer than this: an outage, or a machine that stood still, is no measure for the others."""
FAR_BEHIND: Final = 10.0
"""Makers in another region that are alive are far behind after this many of the longest times between their units."""


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """One average among members. decision: the digest of its record. members: slots in order. mine: this replica's.

    makers: those that make the units. mine: None if this replica is no member. patient: the members are at work now; a
    round of the past is made of what there is. at_work: for a replica in another region than the makers; returns
    whether one of these slots is alive and still in this round. None if all inputs are equally near. limit_s: it waits
    for makers that are at work no longer than this.
    """

    round: int
    exchange: int
    decision: str
    rank: int
    members: Sequence[str]
    makers: Sequence[str]
    mine: str | None
    patient: bool
    at_work: Callable[[Collection[str]], bool] | None = None
    limit_s: float = MAX_PATIENCE_S

    def owner(self, unit: int) -> str:
        """The member that makes a unit."""
        return self.makers[unit % len(self.makers)]

    def second(self, unit: int) -> str:
        """The member that makes a unit if its owner is late. The units of one owner go to several."""
        group = self.makers if len(self.makers) > 1 else self.members
        place = group.index(self.owner(unit)) + 1 + unit // len(self.makers) % max(1, len(group) - 1)
        return group[place % len(group)]

    @property
    def checks(self) -> bool:
        """It is this member's turn to check a piece of the average: one member does after each exchange."""
        turn = self.members[(self.round + self.exchange) % len(self.members)]
        return self.patient and turn == self.mine


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
        chunk=index.unit_bytes,
        workspace=workspace,
        now=clock.now,
        in_order=False,
    )
    return _Work(store, scatter, reducer, clock).run()


@dataclass(eq=False)
class _Lane:
    """The units that are read from one maker, which publishes them in order. published: the last one that was read."""

    slot: str
    units: deque[int]
    in_flight: int = 0
    published: bool = False

    def is_ready(self) -> bool:
        """The next unit may be there: if one is not, those after it are not either."""
        return bool(self.units) and (self.published or not self.in_flight)


_Reads = RequestWindow[tuple[_Lane, int], "memoryview | None"]


class _Work:
    """The units of one average, while they are made and read."""

    def __init__(self, store: Store, scatter: Scatter, reducer: Reducer, clock: Clock) -> None:
        self._store = store
        self._scatter = scatter
        self._reducer = reducer
        self._clock = clock
        self._downloaded_bytes = self._requests = 0
        self._counting = threading.Lock()
        self._waited_s = self._longest_s = 0.0
        self._made_at = self._looked_at = clock.now()
        self._missing = list(range(len(reducer.plan)))
        self._read_from: dict[int, str] = {}

    def run(self) -> AverageResult:
        with BackgroundRequests(self._store) as self._creates, _Reads(self._store) as self._reads:
            return self._run()

    def _run(self) -> AverageResult:
        began = self._clock.now()
        mine, scatter, profile = self._scatter.mine, self._scatter, self._store.profile
        self._make(own := [unit for unit in self._missing if scatter.owner(unit) == mine], publish=True)
        own_s = self._clock.now() - began
        # Another member may know of the decision nearly as much later as it pauses between two looks.
        patience = min(MAX_PATIENCE_S, max(PATIENCE * own_s, 0.75 * profile.poll_cap))
        long_patience = min(MAX_PATIENCE_S, max(LONG_PATIENCE * own_s, (3 if own else 15) * profile.poll_cap))
        since, late, count, pause_s = self._clock.now(), False, 1, min(profile.poll_first, POLL_S)
        while self._missing:
            if self._read([scatter.owner, scatter.second] if late or not scatter.patient else [scatter.owner]):
                since = self._clock.now()
                continue
            waited = self._clock.now() - since
            late = late or waited >= patience
            if (late or not scatter.patient) and self._waits_for_makers():
                self._clock.pause(max(pause_s, min(profile.poll_cap, waited / 8)))
                continue
            taken = [unit for unit in self._missing if scatter.second(unit) == mine] if late else []
            if not scatter.patient:
                self._make(list(self._missing), publish=False)
            elif taken or waited >= long_patience:
                # The others are looked for in between; if they are gone, more at once take less time.
                self._make((taken or self._missing)[:count], publish=bool(taken))
                count *= 2
            else:
                self._clock.pause(pause_s)
        sample = self._sample() if scatter.checks else None
        result = self._reducer.result()
        return AverageResult(
            digest=result.digest,
            downloaded_bytes=result.downloaded_bytes + self._downloaded_bytes,
            requests=result.requests + self._requests,
            download_s=result.download_s + self._waited_s,
            sample=sample,
        )

    def _waits_for_makers(self) -> bool:
        """Return whether the missing units would be read over a border, and their makers are at work on them."""
        if self._scatter.at_work is None:
            return False
        longest_s = max(FAR_BEHIND * self._longest_s, 15 * self._store.profile.poll_cap)
        limit_s = min(self._scatter.limit_s, longest_s if self._longest_s else MAX_PATIENCE_S)
        # What a look has not shown was missing when it began: an answer may take as long as the limit itself.
        is_behind = self._looked_at - self._made_at >= limit_s
        return not is_behind and self._scatter.at_work({self._scatter.owner(unit) for unit in self._missing})

    def _sample(self) -> Sample | None:
        """A piece of the average that another member made. None if this replica made all."""
        seed, units = int(self._scatter.decision[:16], 16), sorted(self._read_from)
        if not units:
            return None
        unit = units[seed % len(units)]
        piece, slot = self._reducer.plan[unit], self._read_from[unit]
        return sample_of(self._reducer.index, self._reducer.reduction, unit, piece, slot, seed // len(units))

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
                    self._creates.submit(partial(self._store.create, name.key(slot), seal(name, body)))
                self._missing.remove(unit)

    def _read(self, makers: Sequence[Callable[[int], str]]) -> bool:
        """Take what these makers of each missing unit have published. Returns whether there was anything."""
        before = len(self._missing)
        self._looked_at = began = self._clock.now()
        members = self._scatter.members
        # All begin at another member, so that not all read the same units at once.
        place = 0 if self._scatter.mine is None else members.index(self._scatter.mine) + 1
        lanes = [
            _Lane(slot, deque(unit for unit in self._missing if maker(unit) == slot))
            for maker in makers
            for slot in [*members[place:], *members[:place]]
            if slot != self._scatter.mine
        ]
        while True:
            while self._reads.has_room and (lane := next(filter(_Lane.is_ready, lanes), None)) is not None:
                if (unit := lane.units.popleft()) in self._missing:
                    lane.in_flight += 1
                    self._reads.submit((lane, unit), partial(self._body, unit, lane.slot))
                    lanes.append(lanes.pop(lanes.index(lane)))
            if (answer := self._reads.next()) is None:
                break
            (lane, unit), body = answer
            lane.in_flight -= 1
            lane.published = body is not None
            if body is None:
                lane.units.clear()
            elif unit in self._missing:
                self._reducer.reduction.set_unit(self._reducer.plan[unit], body)
                self._missing.remove(unit)
                self._read_from[unit] = lane.slot
                if lane.slot == self._scatter.owner(unit):
                    now = self._clock.now()
                    self._longest_s, self._made_at = max(self._longest_s, now - self._made_at), now
        self._waited_s += self._clock.now() - began
        return len(self._missing) < before

    def _body(self, unit: int, slot: str) -> memoryview | None:
        """A published unit; None if there is none, or none that is sound."""
        name = self._name(unit)
        key = name.key(slot)
        profile = self._store.profile
        if profile.is_local and profile.streams == 1:
            # It is used before the next one is read. New memory for each would cost a tenth of the exchange.
            spare = self._reducer.reduction.spare
            data = self._store.read(key, Span(0, len(spare)), spare)
        else:
            data = self._store.read(key)
        with self._counting:
            self._requests += 1
            self._downloaded_bytes += 0 if data is None else len(data)
        if data is None:
            return None
        try:
            return unseal(name, data, key)
        except Corrupt as error:
            emit("reduced_unit_refused", {"round": name.round, "slot": slot, "unit": unit, "error": str(error)})
            return None
