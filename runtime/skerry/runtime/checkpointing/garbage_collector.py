"""What a run no longer needs, and its deletion: payloads that nobody will read again, and old checkpoints.

`removable` decides, purely; `Collector` lists, asks it, and deletes. Records (commits, decisions, contributions,
members, receipts, outcomes) are never deleted: a deleted id could be decided twice. Nothing is deleted that the newest
complete checkpoints lead on with, or that a live member has not applied; ages are by the store's own clock. Two
collectors at once are harmless: they delete the same, and an absent object is success. Decision 0003.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from skerry.runtime import keys
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.events import emit
from skerry.runtime.records import CheckpointManifest

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.journal import Journal
    from skerry.runtime.membership import Presence, Watch
    from skerry.runtime.rounds import Peer
    from skerry.runtime.store import Entry, Store

AGE_ROUNDS: Final = 2
"""Where a store has no clock: so many rounds before the newest complete checkpoint is old."""

# What is read once to make an average, and never again once the round is in a checkpoint.
_PAYLOADS: Final = (keys.PAYLOADS,)
_GONE: Final = frozenset({"finished", "left", "failed"})
# Every how many listings to begin at round 0 again: an upload may land after its round was swept.
_FROM_THE_START: Final = 16


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay besides pinned ones, and how old what goes must be.

    last: so many of the newest complete ones, with all payloads since the oldest of them: any `last - 1` of them may
    be damaged. every: also those of rounds divisible by it, for people; the log does not lead on from them. age_s: by
    the store's clock; covers whoever is reading and was not heard of yet. Raises Invalid for what cannot work.
    """

    last: int = 3
    every: int | None = None
    age_s: float = 60.0

    def __post_init__(self) -> None:
        if self.last < 1 or (self.every is not None and self.every < 1) or self.age_s < 0:
            raise Invalid(f"bad retention: last={self.last} every={self.every} age_s={self.age_s:g}")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one look at a run saw.

    complete: rounds with a complete checkpoint, newest first, at least as many as stay. checkpoints, payloads: what
    is listed under them. live: the round that each live member is in. initial: the parts of checkpoint 0.
    """

    complete: Sequence[int]
    checkpoints: Sequence[Entry]
    payloads: Sequence[Entry]
    pins: frozenset[int]
    live: Mapping[str, int]
    initial: frozenset[str] = frozenset()


class Removable(NamedTuple):
    """What may be deleted: all of `first`, which makes checkpoints invisible, before anything of `then`."""

    first: Sequence[Entry]
    then: Sequence[Entry]


class Swept(NamedTuple):
    """What one collection deleted."""

    objects: int
    bytes: int


def first_needed(complete: Sequence[int], live: Mapping[str, int], retention: Retention) -> int:
    """The first round whose payloads must stay; 0 while there is no complete checkpoint.

    A joining replica follows the log from one of the newest checkpoints; a live member from the round it is in.
    """
    return min([_oldest_kept(complete, retention), *live.values()])


def removable(seen: Seen, retention: Retention) -> Removable:
    """What nobody needs any more."""
    if not seen.complete:
        return Removable((), ())
    newest = max(entry.modified for entry in (*seen.checkpoints, *seen.payloads))

    def is_old(entry: Entry, round_number: int) -> bool:
        if entry.modified > 0:
            return newest - entry.modified >= retention.age_s
        return round_number + AGE_ROUNDS <= seen.complete[0]

    needed = first_needed(seen.complete, seen.live, retention)
    payloads = [entry for round_number, entry in _by_round(seen.payloads) if round_number < needed]
    folders: dict[int, list[Entry]] = {}
    for round_number, entry in _by_round(seen.checkpoints):
        if round_number < needed:
            folders.setdefault(round_number, []).append(entry)
    manifests: list[Entry] = []
    parts: list[Entry] = []
    for round_number, listed in folders.items():
        manifest = keys.checkpoint_manifest(round_number)
        # Checkpoint 0 was decided by whoever came first: made again by one who slept, it would be of other weights.
        entries = [one for one in listed if round_number > 0 or one.key not in {manifest, *seen.initial}]
        visible = any(one.key == manifest for one in entries)
        if visible and _is_kept(round_number, seen.pins, retention):
            continue
        if all(is_old(entry, round_number) for entry in entries):
            manifests += [entry for entry in entries if entry.key == manifest]
            parts += [entry for entry in entries if entry.key != manifest]
    old = [entry for entry in payloads if is_old(entry, keys.round_of(entry.key))]
    return Removable(manifests, [*parts, *old])


def live_rounds(peers: Mapping[str, Peer], heard_since: float, now: float, stale_s: float) -> dict[str, int]:
    """The round of each slot that is alive, or that has not been silent for long enough to be dead.

    heard_since: when my own last outage ended; a silence before it proves nothing.
    """
    return {
        slot: peer.heartbeat.round
        for slot, peer in peers.items()
        if peer.heartbeat.phase not in _GONE and now - max(peer.changed_at, heard_since) <= stale_s
    }


class Collector:
    """Deletes what a run no longer needs. One call at a time; any number of collectors at once.

    stale_s: a heartbeat that has not changed for so long belongs to a dead replica. stop: ends a collection early.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        presence: Presence,
        watch: Watch,
        clock: Clock,
        retention: Retention,
        stale_s: float,
        stop: threading.Event,
    ) -> None:
        self._journal = journal
        self._presence = presence
        self._watch = watch
        self._clock = clock
        self._retention = retention
        self._stale_s = stale_s
        self._stop = stop
        self._parts: dict[int, Mapping[str, int] | None] = {}
        self._swept = 0
        self._listings = 0
        self._held_by: str | None = None

    def collect(self) -> Swept:
        """Delete what may go now, and tell it. Call it when a checkpoint has become complete.

        Costs a listing of checkpoints, pins and heartbeats, and one of payloads if a round may have become garbage.
        Raises what the store raises; what was not deleted is found by the next call.
        """
        store = self._journal.store
        checkpoints = store.list(keys.CHECKPOINTS)
        complete = list(islice(self._complete(checkpoints), self._retention.last))
        if not complete:
            return Swept(0, 0)
        self._parts = {number: parts for number, parts in self._parts.items() if number >= complete[-1]}
        # After the checkpoints: whoever joins unseen from here on finds one of those, and they stay.
        live = live_rounds(self._watch.look(), self._presence.steady_since, self._clock.now(), self._stale_s)
        needed = first_needed(complete, live, self._retention)
        seen = Seen(
            complete=complete,
            checkpoints=checkpoints,
            payloads=self._payloads(needed),
            pins=frozenset(round_number for round_number, _ in _by_round(store.list(keys.PINS))),
            live=live,
            initial=self._initial(),
        )
        deleted = self._delete(removable(seen, self._retention))
        left = [n for n, entry in _by_round(seen.payloads) if n < needed and entry.key not in deleted]
        self._swept = min(left, default=max(self._swept, needed))
        swept = Swept(len(deleted), sum(deleted.values()))
        behind = {slot: n for slot, n in live.items() if n < _oldest_kept(complete, self._retention)}
        self._tell(swept, needed, behind)
        return swept

    def _complete(self, checkpoints: Sequence[Entry]) -> Iterator[int]:
        """Rounds whose manifest can be read and whose parts are all there in full length, newest first."""
        sizes = {entry.key: entry.size for entry in checkpoints}
        for number in sorted({number for number, _ in _by_round(checkpoints)}, reverse=True):
            if keys.checkpoint_manifest(number) not in sizes:
                continue
            if number not in self._parts:
                self._parts[number] = _parts(self._journal.store, number)
            parts = self._parts[number]
            if parts is not None and all(sizes.get(key) == size for key, size in parts.items()):
                yield number

    def _initial(self) -> frozenset[str]:
        """The parts of checkpoint 0, whatever the listing shows of it."""
        if self._parts.get(0) is None:
            self._parts[0] = _parts(self._journal.store, 0)
        return frozenset(self._parts[0] or ())

    def _payloads(self, needed: int) -> list[Entry]:
        """Payloads from the first round that is not swept yet; none if no round can have become garbage since."""
        if needed <= self._swept:
            return []
        first = 0 if self._listings % _FROM_THE_START == 0 else self._swept
        self._listings += 1
        return [
            entry for folder in _PAYLOADS for entry in self._journal.store.list(folder, after=keys.since(folder, first))
        ]

    def _delete(self, removal: Removable) -> dict[str, int]:
        """The keys that were deleted, with their sizes."""
        return self._delete_all(removal.first) | self._delete_all(removal.then)

    def _delete_all(self, entries: Sequence[Entry]) -> dict[str, int]:
        store = self._journal.store

        def delete(entry: Entry) -> bool:
            if self._stop.is_set():
                return False
            store.delete(entry.key)
            return True

        streams = min(store.profile.streams, len(entries))
        if streams <= 1:
            done = [delete(entry) for entry in entries]
        else:
            with ThreadPoolExecutor(streams, thread_name_prefix="delete") as pool:
                done = list(pool.map(delete, entries))
        return {entry.key: entry.size for entry, deleted in zip(entries, done, strict=True) if deleted}

    def _tell(self, swept: Swept, needed: int, behind: Mapping[str, int]) -> None:
        """Nothing deleted is worth telling only when it is because of somebody else than last time."""
        held_by = min(behind, key=lambda slot: (behind[slot], slot), default=None)
        is_news = swept.objects > 0 or held_by not in {None, self._held_by}
        self._held_by = held_by
        if is_news:
            emit(
                "garbage_collected",
                {
                    "slot": self._presence.slot,
                    "objects": swept.objects,
                    "bytes": swept.bytes,
                    "before": needed,
                    "held_by": held_by,
                },
            )


def _oldest_kept(complete: Sequence[int], retention: Retention) -> int:
    return min(complete[: retention.last], default=0)


def _is_kept(round_number: int, pins: frozenset[int], retention: Retention) -> bool:
    """Pinned, or of a round that stays for people: not 0, where all who raced to make it left parts."""
    by_number = retention.every is not None and round_number > 0 and round_number % retention.every == 0
    return by_number or round_number in pins


def _by_round(entries: Iterable[Entry]) -> Iterator[tuple[int, Entry]]:
    """Each entry with its round; an object that is not ours is passed over."""
    for entry in entries:
        try:
            round_number = keys.round_of(entry.key)
        except Invalid:
            continue
        yield round_number, entry


def _parts(store: Store, round_number: int) -> Mapping[str, int] | None:
    """Keys and sizes of a checkpoint's parts; None if its manifest is gone or damaged, which is told."""
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
