"""Reads the heartbeats of a run repeatedly: those that changed, by the times of a listing. Never writes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import Heartbeat
from skerry.runtime.store.parallel import run_parallel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.observe.history import RunHistory
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Entry, Store

# Times of a listing may be whole seconds: a second write in the same second changes neither time nor size.
_LISTING_S: Final = 1.0
# The current rate is that of the last half minute, several heartbeats on any store.
_RATE_S: Final = 30.0


@dataclass
class _Slot:
    """The last reading of one slot. stamp: time and size in the listing. read: the current content was read.

    seen_at: on this process's clock, when this stamp was first listed. changed_at: when a change was last seen.
    first: only one look has seen it. notice_at: when its notice was first seen. counts: (time, tokens) of the current
    incarnation.
    """

    stamp: tuple[float, int]
    seen_at: float
    changed_at: float
    first: bool = True
    read: bool = False
    settled: bool = False
    heartbeat: Heartbeat | None = None
    notice_at: float = 0.0
    counts: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])


class HeartbeatReader:
    """The heartbeats of one run. Not thread-safe."""

    def __init__(self, store: Store, run_nonce: str, clock: Clock, history: RunHistory | None = None) -> None:
        """history: with the heartbeats that need not be read, unless they have changed."""
        self._history = history
        self._store = store
        self._nonce = run_nonce
        self._clock = clock
        self._slots: dict[str, _Slot] = {}

    def look(self) -> int:
        """List the heartbeats. Returns how many there are."""
        now = self._clock.now()
        listed: dict[str, _Slot] = {}
        for entry in self._store.list(keys.HEARTBEATS):
            try:
                slot = keys.slot_of(entry.key)
            except Invalid:  # a foreign object
                continue
            listed[slot] = self._listed(self._slots.get(slot), entry, now)
            if self._history is not None and self._history.heard_at.get(slot) == entry.modified:
                self._accept(listed[slot], self._history.heartbeats[slot], now)
        self._slots, self._history = listed, None
        return len(listed)

    def read(self, limit: int | None) -> int:
        """Read those that changed, at most `limit`, the longest unread first. Returns how many were read.

        A heartbeat that does not parse, or is of another run, counts as none.
        """
        due = self._due()[:limit]
        bodies = run_parallel(self._store, len(due), lambda index: self._store.read(keys.heartbeat(due[index])))
        now = self._clock.now()
        for slot, data in zip(due, bodies, strict=True):
            self._take(self._slots[slot], keys.heartbeat(slot), data, now)
        return len(due)

    @property
    def heartbeats(self) -> Mapping[str, Heartbeat]:
        """The last heartbeat of each slot."""
        return {slot: known.heartbeat for slot, known in self._slots.items() if known.heartbeat is not None}

    @property
    def silence(self) -> Mapping[str, float]:
        """Seconds since each slot's heartbeat changed, on this process's clock; of the slots that were listed twice."""
        now = self._clock.now()
        return {slot: now - known.changed_at for slot, known in self._slots.items() if not known.first}

    def notices(self, wall_s: float) -> Mapping[str, tuple[str, float]]:
        """The notice of each slot, and when it was first seen. wall_s: seconds since the epoch when the clock was 0."""
        return {
            slot: (known.heartbeat.notice, wall_s + known.notice_at)
            for slot, known in self._slots.items()
            if known.heartbeat is not None and known.heartbeat.notice
        }

    @property
    def rates(self) -> Mapping[str, float]:
        """Tokens a second of each slot in the last half minute, where two heartbeats show it."""
        return {
            slot: max(0.0, (known.counts[-1][1] - known.counts[0][1]) / span)
            for slot, known in self._slots.items()
            if len(known.counts) > 1 and (span := known.counts[-1][0] - known.counts[0][0]) > 0
        }

    def _due(self) -> Sequence[str]:
        listed_by = self._clock.now() - _LISTING_S
        due = [
            slot
            for slot, known in self._slots.items()
            if not known.read or (not known.settled and known.seen_at <= listed_by)
        ]
        return sorted(due, key=lambda slot: (self._slots[slot].read, self._slots[slot].seen_at))

    def _listed(self, known: _Slot | None, entry: Entry, now: float) -> _Slot:
        stamp = entry.modified, entry.size
        if known is None:
            return _Slot(stamp=stamp, seen_at=now, changed_at=now)
        known.first = False
        if stamp != known.stamp:
            known.stamp, known.seen_at, known.changed_at = stamp, now, now
            known.read = known.settled = False
        elif not entry.modified:  # a store without times: the content decides
            known.read = False
        return known

    def _take(self, known: _Slot, key: str, data: memoryview | None, now: float) -> None:
        try:
            heartbeat = None if data is None else Heartbeat.parse(data, key)
        except Corrupt:
            heartbeat = None
        self._accept(known, None if heartbeat is None or heartbeat.run != self._nonce else heartbeat, now)

    @staticmethod
    def _accept(known: _Slot, heartbeat: Heartbeat | None, now: float) -> None:
        """The content of a slot is this heartbeat, as of its stamp. A store without times has none to settle."""
        fine = known.stamp[0] != int(known.stamp[0])
        known.read = True
        known.settled = fine or not known.stamp[0] or now - known.seen_at >= _LISTING_S
        if heartbeat != known.heartbeat:
            known.changed_at = now
        if heartbeat is not None and (known.heartbeat is None or known.heartbeat.incarnation != heartbeat.incarnation):
            known.counts.clear()
        if heartbeat is not None and (known.heartbeat is None or known.heartbeat.notice != heartbeat.notice):
            known.notice_at = now
        known.heartbeat = heartbeat
        if heartbeat is not None:
            at = known.stamp[0] or now
            if not known.counts or known.counts[-1][0] != at:
                known.counts.append((at, heartbeat.tokens))
            while known.counts[-1][0] - known.counts[0][0] > _RATE_S:
                known.counts.popleft()
