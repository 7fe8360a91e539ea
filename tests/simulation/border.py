"""Checks that no replica makes units across a border while a replica that should make them is at work."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from skerry.runtime.log import keys

if TYPE_CHECKING:
    from tests.simulation.invariants import Checker
    from tests.simulation.training import Document
    from tests.simulation.world import Process, World

    from skerry.runtime.store.memory import MemoryStore

STEADY_S: Final = 4.0
"""Heartbeats at most so far apart are those of a live replica for every scenario."""
BEHIND_S: Final = 25.0
"""A live maker without a new unit for this long may be far behind, or for nearly half of an exchange's deadline."""
MAKING_S: Final = 1.0
"""A replica may have begun to make a unit this long before it publishes it."""


class _Beat(NamedTuple):
    at: float
    record: Document


class BorderCheck:
    """Compares the units of a run with its heartbeats and decisions, and reports violations to its checker."""

    def __init__(self, world: World, checker: Checker, store: MemoryStore, deadline_s: float) -> None:
        """deadline_s: of an exchange."""
        self._behind_s = min(BEHIND_S, 0.45 * deadline_s)
        self._world = world
        self._checker = checker
        self._store = store
        self._beats: defaultdict[str, list[_Beat]] = defaultdict(list)
        self._decided: dict[str, float] = {}
        self._made: defaultdict[tuple[int, str], list[float]] = defaultdict(list)

    def replaced(self, key: str) -> None:
        """Remember a heartbeat."""
        if key.startswith(keys.HEARTBEATS):
            self._beats[keys.slot_of(key)].append(_Beat(self._world.now, self._record(key)))

    def created(self, by: Process, key: str) -> None:
        """Remember a decision; check which replica has made a unit."""
        if key.startswith(keys.EXCHANGES):
            self._decided[key] = self._world.now
        if (place := keys.exchange_of_unit(key)) is None:
            return
        slot, decision = keys.slot_of(key), keys.decision(*place)
        self._made[place[0], slot].append(now := self._world.now)
        makers: list[str] = self._record(decision).get("makers") or [slot]
        if slot in makers:
            return
        for maker in makers:
            seen = [at for at in self._made[place[0], maker] if at < now - MAKING_S]
            since = max([self._decided[decision], *seen])
            if now - since < self._behind_s and self._was_at_work(maker, place[0], since):
                self._checker.broken("border", f"{by.name} made {key} for another region, and {maker} is at work")

    def _record(self, key: str) -> Document:
        return cast("Document", json.loads(bytes(self._store.read(key) or b"")))

    def _was_at_work(self, slot: str, round_number: int, since: float) -> bool:
        beats = [beat for beat in self._beats[slot] if beat.at >= since - STEADY_S]
        times = [beat.at for beat in beats]
        return (
            bool(times)
            and times[0] <= since
            and all(after - before <= STEADY_S for before, after in pairwise([*times, self._world.now]))
            and all(beat.record["phase"] in {"train", "sync"} for beat in beats)
            and all(beat.record["round"] <= round_number for beat in beats)
        )
