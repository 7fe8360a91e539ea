"""Checks that no replica makes units across a border while a replica that should make them is at work."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.training import Document
    from tests.simulation.world import World

STEADY_S: Final = 4.0
"""Heartbeats at most so far apart are those of a live replica for every scenario."""
BEHIND_S: Final = 25.0
"""A live maker without a new unit for this long may be far behind."""


class _Beat(NamedTuple):
    at: float
    record: Document


class BorderCheck:
    """Sees heartbeats and units. read: the bytes of an object in the bucket, None if it does not exist."""

    def __init__(self, world: World, read: Callable[[str], bytes | None]) -> None:
        self._world = world
        self._read = read
        self._beats: defaultdict[str, list[_Beat]] = defaultdict(list)
        self._decided: dict[str, float] = {}
        self._made: dict[tuple[int, str], float] = {}

    def replaced(self, key: str) -> None:
        """Remember a heartbeat."""
        if key.startswith(keys.HEARTBEATS):
            self._beats[keys.slot_of(key)].append(_Beat(self._world.now, json.loads(self._read(key) or b"")))

    def decided(self, key: str) -> None:
        """Remember when an exchange was decided."""
        self._decided[key] = self._world.now

    def fault(self, key: str) -> str | None:
        """The fault of a unit that has just been created; None if it is no unit, or may be made by its slot."""
        if (place := keys.exchange_of_unit(key)) is None:
            return None
        round_number, slot = place[0], keys.slot_of(key)
        self._made[round_number, slot] = now = self._world.now
        decision = keys.decision(*place)
        makers: list[str] = json.loads(self._read(decision) or b"").get("makers") or [slot]
        if slot in makers:
            return None
        for maker in makers:
            since = max(self._decided[decision], self._made.get((round_number, maker), 0.0))
            if now - since < BEHIND_S and self._was_at_work(maker, round_number, since):
                return f"{maker} is at work on it"
        return None

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
