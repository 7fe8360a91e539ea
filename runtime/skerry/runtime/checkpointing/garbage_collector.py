"""Deletes what a run no longer needs: payloads of closed rounds and old checkpoints.

`removable` is the pure decision; `GarbageCollector` lists objects, calls it, and deletes. Records (commits, decisions,
contributions, members, receipts, outcomes) are never deleted: a deleted id could be decided twice. Payloads stay while
a kept checkpoint or a live member still needs them. An object's age is how long ago this replica saw its round close,
by its own monotonic clock: a file server's clock may jump. Several collectors at once are harmless: they delete the
same objects, and an absent object is success. Every replica deletes its own payloads, because its role may allow no
others; those of a slot that is gone are deleted by the writer of a checkpoint, if the store allows it. Decisions 0003
and 0053.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from skerry.runtime.daemon_executors import BackgroundThreads
from skerry.runtime.errors import Corrupt, Invalid, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.records import CheckpointManifest
from skerry.runtime.store.retrying import apart
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
    from skerry.runtime.clock import Clock
    from skerry.runtime.log.log import RunLog
    from skerry.runtime.protocol.quorum import ObservedHeartbeat
    from skerry.runtime.protocol.slot_claim_and_heartbeats import HeartbeatMonitor, Presence
    from skerry.runtime.store import Entry, Store

HELD_ROUNDS: Final = 16
"""How many rounds before the newest checkpoint may stay because their receipts are not compared yet."""

# Payloads are read for an average, and never again when a checkpoint covers the round.
_PAYLOADS: Final = (keys.PAYLOADS,)
_GONE: Final = frozenset({"finished", "left", "failed"})
# Every so many listings begin at round 0 again, because an upload may finish after its round was swept.
_FROM_THE_START: Final = 16
# For one request about the objects of a slot that is gone, on which no round waits.
_CALL_S: Final = 10.0
# Replicas that collect their own payloads at the same checkpoint, on average.
_COLLECTORS: Final = 8


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The checkpoints to keep, apart from pinned ones, and the age at which others may be deleted.

    last: number of newest complete checkpoints to keep, with all payloads since the oldest of them; any `last - 1` of
    them may be damaged. every: also keep the checkpoints of rounds divisible by it; their payloads are not kept. age_s:
    since the round was seen to close; protects readers without a heartbeat. Raises Invalid for impossible values.
    """

    last: int = 3
    every: int | None = None
    age_s: float = 60.0

    def __post_init__(self) -> None:
        if self.last < 1 or (self.every is not None and self.every < 1) or self.age_s < 0:
            raise Invalid(f"bad retention: last={self.last} every={self.every} age_s={self.age_s:g}")


@dataclass(frozen=True, kw_only=True)
class ObservedRounds:
    """The objects of a run, as listed once.

    complete: rounds with a complete checkpoint, newest first, at least as many as are kept. checkpoints, payloads: the
    entries under these prefixes. live: the round of each live member. old_before: earlier rounds closed at least
    `age_s` ago. initial: the parts of checkpoint 0.
    """

    complete: Sequence[int]
    checkpoints: Sequence[Entry]
    payloads: Sequence[Entry]
    pins: frozenset[int]
    live: Mapping[str, int]
    old_before: int
    initial: frozenset[str] = frozenset()


class Removable(NamedTuple):
    """Entries to delete: all of `first`, which makes checkpoints invisible, before any of `then`."""

    first: Sequence[Entry]
    then: Sequence[Entry]


class SweepResult(NamedTuple):
    """Number and size of the objects that one collection deleted."""

    objects: int
    bytes: int


def first_needed(complete: Sequence[int], live: Mapping[str, int], retention: Retention) -> int:
    """Returns the first round whose payloads must stay; 0 while no checkpoint is complete.

    A joining replica follows the log from one of the newest checkpoints; a live member from the round it is in.
    """
    return min([_oldest_kept(complete, retention), *live.values()])


def removable(observed_rounds: ObservedRounds, retention: Retention) -> Removable:
    """Returns the entries that no replica needs any more."""
    if not observed_rounds.complete:
        return Removable((), ())
    needed = first_needed(observed_rounds.complete, observed_rounds.live, retention)
    before = min(needed, observed_rounds.old_before)
    payloads = [entry for round_number, entry in _by_round(observed_rounds.payloads) if round_number < before]
    folders: dict[int, list[Entry]] = {}
    for round_number, entry in _by_round(observed_rounds.checkpoints):
        if round_number < before:
            folders.setdefault(round_number, []).append(entry)
    manifests: list[Entry] = []
    parts: list[Entry] = []
    for round_number, listed in folders.items():
        manifest = keys.checkpoint_manifest(round_number)
        # Checkpoint 0 holds the initial weights: written again by a late replica, they would differ.
        initial: set[str] = set() if round_number > 0 else {manifest, *observed_rounds.initial}
        entries = [entry for entry in listed if entry.key not in initial]
        visible = any(entry.key == manifest for entry in entries)
        if visible and _is_kept(round_number, observed_rounds.pins, retention):
            continue
        manifests += [entry for entry in entries if entry.key == manifest]
        parts += [entry for entry in entries if entry.key != manifest]
    return Removable(manifests, [*parts, *payloads])


def live_rounds(
    peers: Mapping[str, ObservedHeartbeat], heard_since: float, now: float, stale_s: float
) -> dict[str, int]:
    """Returns the round of each slot that is alive, or not silent for long enough to count as dead.

    heard_since: end of this replica's own last outage; silence before it proves nothing.
    """
    return {
        slot: peer.heartbeat.round
        for slot, peer in peers.items()
        if peer.heartbeat.phase not in _GONE and now - max(peer.changed_at, heard_since) <= stale_s
    }


class GarbageCollector:
    """Deletes what a run no longer needs. One call at a time; any number of collectors at once.

    stale_s: a replica is dead if its heartbeat has not changed for so long. stop: ends a collection early.
    """

    def __init__(
        self,
        *,
        log: RunLog,
        presence: Presence,
        watch: HeartbeatMonitor,
        clock: Clock,
        retention: Retention,
        stale_s: float,
        stop: threading.Event,
    ) -> None:
        self._log = log
        self._presence = presence
        self._watch = watch
        self._clock = clock
        self._retention = retention
        self._stale_s = stale_s
        self._stop = stop
        self._parts: dict[int, Mapping[str, int] | None] = {}
        self._closed: deque[tuple[float, int]] = deque()
        self._old_before = 0
        self._newest_closed = 0
        self._swept = 0
        self._listings = 0
        self._has_collected = False
        self._overdue = 0  # what was swept at the last listing from the start
        self._blocked_by: str | None = None
        self._refused: set[str] = set()  # slots whose payloads this replica may not delete
        self._live_before: frozenset[str] = frozenset()  # at the last listing in turn

    def note_closed(self, rounds: int) -> None:
        """Takes note that so many rounds are closed now. Until a round is noted, its objects stay."""
        now = self._clock.now()
        self._newest_closed = max(self._newest_closed, rounds)
        self._closed.append((now, rounds))
        while self._closed and self._closed[0][0] <= now - self._retention.age_s:
            self._old_before = max(self._old_before, self._closed.popleft()[1])

    def collect(self, settled: int | None = None) -> SweepResult:
        """Deletes old checkpoints and payloads, its own and those of slots that are gone, and reports it.

        Call it after this replica has written a checkpoint. settled: the state after so many rounds is known to be
        equal. The newest checkpoint of at most so many rounds stays with all payloads since, because replicas whose
        states differ recompute them from there.

        Costs a listing of checkpoints, pins and heartbeats, and one of payloads if a round may have become garbage.
        Raises the store's errors; the next call deletes the rest. A refusal to delete payloads of another slot is no
        error: they stay, and are not tried again.
        """
        return self._collect(settled, self._newest_closed)

    def collect_own(self, position: LogPosition, turn: int | None, settled: int | None = None) -> SweepResult:
        """Deletes its own payloads as `collect` does. Call it after each round if it does not write a checkpoint.

        turn: the number of the checkpoint that another member writes now. It counts once it is complete, because then
        its writer may have deleted older ones. Of many members only some collect at the same one; all do in rotation.
        None: no checkpoint is due. The first time that rounds are old enough it collects all the same: an earlier
        incarnation may have left payloads, and a slot that never lives until a checkpoint is due would never collect.

        The heartbeats of the members of the last round are not read: each had the state before that round, and one that
        has started again since has loaded a checkpoint that is kept, unless only that new one is.
        """
        # Not its place among the members: that changes with each slot that misses a round.
        number, members = zlib.crc32(self._presence.slot.encode()), position.members
        is_turn = turn is not None and (turn + number) % math.ceil(len(members) / _COLLECTORS) == 0
        is_first = self._old_before > 0 and not self._has_collected
        if not is_turn and not is_first:
            return SweepResult(0, 0)
        return self._collect(settled, position.round, members)

    def _collect(self, settled: int | None, newest: int, members: Sequence[str] | None = None) -> SweepResult:
        """newest: the newest checkpoint that may count. members: of the round before; only own payloads are deleted."""
        in_turn = members is None
        self._has_collected = True
        store = self._log.store
        checkpoints = store.list(keys.CHECKPOINTS)
        complete = self._needed_checkpoints(checkpoints, settled, newest)
        if not complete:
            return SweepResult(0, 0)
        self._parts = {number: parts for number, parts in self._parts.items() if number >= complete[-1]}
        # Read after the checkpoints: a replica that joins later loads one of those, and they stay.
        unread = () if members is None or complete == [newest] else members
        peers = self._watch.refresh(unless=unread)
        live = live_rounds(peers, self._presence.steady_since, self._clock.now(), self._stale_s)
        live |= dict.fromkeys(unread, newest - 1)
        live[self._presence.slot] = min(live.get(self._presence.slot, complete[-1]), complete[-1])
        needed = first_needed(complete, live, self._retention)
        observed_rounds = ObservedRounds(
            complete=complete,
            checkpoints=checkpoints if in_turn else (),
            payloads=self._payloads(needed, frozenset(live) if in_turn else None),
            pins=frozenset(round_number for round_number, _ in _by_round(store.list(keys.PINS) if in_turn else ())),
            live=live,
            old_before=self._old_before,
            initial=self._initial() if in_turn else frozenset(),
        )
        deleted = self._delete(removable(observed_rounds, self._retention))
        remaining = [
            number
            for number, entry in _by_round(observed_rounds.payloads)
            if number < needed and entry.key not in deleted and _slot_of(entry) not in self._refused
        ]
        self._swept = min(remaining, default=max(self._swept, needed))
        swept = SweepResult(len(deleted), sum(deleted.values()))
        behind = {slot: n for slot, n in live.items() if n < complete[-1]}
        self._report(swept, needed, behind)
        return swept

    def _needed_checkpoints(self, checkpoints: Sequence[Entry], settled: int | None, newest: int) -> list[int]:
        """Returns the newest complete checkpoints to keep, newest first; the last one is that of a settled round."""
        needed: list[int] = []
        for number in self._complete(checkpoints, newest):
            is_useful = settled is not None and settled >= (needed or [number])[0] - HELD_ROUNDS
            if len(needed) >= self._retention.last and (settled is None or not is_useful or needed[-1] <= settled):
                break
            needed.append(number)
        return needed

    def _complete(self, checkpoints: Sequence[Entry], newest: int) -> Iterator[int]:
        """Yields rounds with a readable manifest and all parts in full length, newest first.

        newest: only of so many rounds, and of noted ones: a checkpoint of a round to come may be stray, and makes up
        for no other.
        """
        sizes = {entry.key: entry.size for entry in checkpoints}
        for number in sorted({number for number, _ in _by_round(checkpoints)}, reverse=True):
            if number > min(newest, self._newest_closed) or keys.checkpoint_manifest(number) not in sizes:
                continue
            if number not in self._parts:
                self._parts[number] = _parts(self._log.store, number)
            parts = self._parts[number]
            if parts is not None and all(sizes.get(key) == size for key, size in parts.items()):
                yield number

    def _initial(self) -> frozenset[str]:
        """Returns the parts of checkpoint 0, listed or not."""
        if self._parts.get(0) is None:
            self._parts[0] = _parts(self._log.store, 0)
        return frozenset(self._parts[0] or ())

    def _payloads(self, needed: int, live: frozenset[str] | None) -> list[Entry]:
        """Lists payloads from the first round that is not swept; empty if no round can have become garbage since.

        live: the slots that are alive: only of the others, and of this one. None: only of this one. A listing from the
        start also returns those of a live slot that were garbage at the one before, because it collects nothing.
        """
        if needed <= self._swept:
            return []
        first, overdue = self._swept, 0
        if live is not None:
            if self._listings % _FROM_THE_START == 0 or self._live_before - live:
                first, overdue, self._overdue = 0, self._overdue, self._swept
            self._listings += 1
            self._live_before = live
        store, own = self._log.store, self._presence.slot
        listed = (store.list(folder, after=keys.start_after(folder, first)) for folder in _PAYLOADS)
        return [
            entry
            for number, entry in _by_round(chain.from_iterable(listed))
            if (slot := _slot_of(entry)) == own
            or (live is not None and slot not in self._refused and (slot not in live or number < overdue))
        ]

    def _delete(self, removal: Removable) -> dict[str, int]:
        """Deletes, and returns the deleted keys with their sizes."""
        return self._delete_all(removal.first) | self._delete_all(removal.then)

    def _delete_all(self, entries: Sequence[Entry]) -> dict[str, int]:
        streams = min(self._log.store.profile.streams, len(entries))
        if streams <= 1:
            done = [self._delete_one(entry) for entry in entries]
        else:
            with BackgroundThreads(streams, "delete") as pool:
                done = list(pool.map(self._delete_one, entries))
        return {entry.key: entry.size for entry, deleted in zip(entries, done, strict=True) if deleted}

    def _delete_one(self, entry: Entry) -> bool:
        """Returns True if the object is deleted; False after a stop, and if it is another slot's and refused."""
        if self._stop.is_set():
            return False
        slot = _slot_of(entry)
        if slot in {None, self._presence.slot}:
            self._log.store.delete(entry.key)
            return True
        if slot in self._refused:
            return False
        try:
            # A role for each slot allows no deletion of others' payloads: that is no outage.
            apart(self._log.store, _CALL_S).delete(entry.key)
        except Unauthorized:
            self._refused.add(str(slot))
            return False
        return True

    def _report(self, swept: SweepResult, needed: int, behind: Mapping[str, int]) -> None:
        """Emits an event if objects were deleted, or if another replica than last time blocks deletion."""
        blocked_by = min(behind, key=lambda slot: (behind[slot], slot), default=None)
        is_reported = swept.objects > 0 or blocked_by not in {None, self._blocked_by}
        self._blocked_by = blocked_by
        if is_reported:
            emit(
                "garbage_collected",
                {
                    "slot": self._presence.slot,
                    "objects": swept.objects,
                    "bytes": swept.bytes,
                    "before": needed,
                    "held_by": blocked_by,
                },
            )


def _oldest_kept(complete: Sequence[int], retention: Retention) -> int:
    return min(complete[: retention.last], default=0)


def _is_kept(round_number: int, pins: frozenset[int], retention: Retention) -> bool:
    """Returns True if the round is pinned or divisible by `every`; not round 0, where racing writers left parts."""
    by_number = retention.every is not None and round_number > 0 and round_number % retention.every == 0
    return by_number or round_number in pins


def _by_round(entries: Iterable[Entry]) -> Iterator[tuple[int, Entry]]:
    """Yields each entry with its round, and skips foreign objects."""
    for entry in entries:
        try:
            round_number = keys.round_of(entry.key)
        except Invalid:
            continue
        yield round_number, entry


def _slot_of(entry: Entry) -> str | None:
    """Returns the slot in the key of a payload; None for an object that all slots share."""
    try:
        return keys.slot_of(entry.key)
    except Invalid:
        return None


def _parts(store: Store, round_number: int) -> Mapping[str, int] | None:
    """Returns keys and sizes of a checkpoint's parts; None if its manifest is missing or (reported) damaged."""
    key = keys.checkpoint_manifest(round_number)
    data = store.read(key)
    if data is None:
        return None
    try:
        manifest = CheckpointManifest.parse(data, key)
    except Corrupt as error:
        emit("checkpoint_failed", {"round": round_number, "error": str(error)}, level=logging.WARNING, error=error)
        return None
    return {keys.checkpoint_part(round_number, part.digest): part.total_bytes for part in manifest.parts}
