"""Keeps a run's checkpoint until it is let go: writes and deletes pins, and nothing else.

A pin names a round; whoever collects a run's garbage goes by the pin's key and leaves that round's checkpoint alone.
The log does not lead on from a pinned checkpoint for ever: the payloads after it go (decision 0003 of the runtime).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.runtime import keys
from skerry.runtime.errors import Conflict, Corrupt, Invalid, SkerryError
from skerry.runtime.records import CheckpointManifest, Pin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skerry.runtime.records import Run
    from skerry.runtime.store import Store


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """One pin. by, reason, created: as it says, None if it cannot be read. complete: its checkpoint can be loaded."""

    round: int
    complete: bool
    by: str | None
    reason: str | None
    created: str | None

    def __str__(self) -> str:
        what = f"round {self.round}" if self.complete else f"round {self.round}, which has NO complete checkpoint"
        if self.by is None:
            return f"{what} (the pin cannot be read)"
        return f"{what}: {self.reason or 'no reason given'} ({self.by}, {self.created})"


def pin(store: Store, run: Run, round_number: int, *, by: str, reason: str, now: str) -> Pinned:
    """Keep the checkpoint of this round until `unpin`. by, reason, now: what the pin says, for people.

    Raises SkerryError, naming the rounds that have one, if there is no complete checkpoint, Conflict if it is pinned.
    """
    if not _is_complete(store, run, round_number):
        raise _no_checkpoint(store, run, round_number)
    mine = Pin(run=run.nonce, round=round_number, by=by, reason=reason, created=now)
    if not store.create(keys.pin(round_number), mine.to_bytes()):
        there = _read(store, round_number)
        whose = "" if there is None else f" by {there.by} at {there.created}: {there.reason or 'no reason given'}"
        raise Conflict(f"round {round_number} is pinned already{whose}; `skerry unpin` lets it go")
    # A collection that is under way may not have seen the pin.
    if not _is_complete(store, run, round_number):
        store.delete(keys.pin(round_number))
        raise _no_checkpoint(store, run, round_number)
    return _pinned(mine, round_number, complete=True)


def unpin(store: Store, run: Run, round_number: int) -> Pinned:
    """Let a round's checkpoint go, and return the pin that was. Raises SkerryError if there is none."""
    found = {one.round: one for one in pins(store, run)}
    if round_number not in found:
        there = f"; there are pins of {_listed(found)}" if found else "; there are no pins"
        raise SkerryError(f"round {round_number} is not pinned at {store.uri}{there}")
    store.delete(keys.pin(round_number))
    return found[round_number]


def pins(store: Store, run: Run) -> tuple[Pinned, ...]:
    """All pins, in round order."""
    return tuple(
        _pinned(_read(store, number), number, complete=_is_complete(store, run, number))
        for number in _rounds(store, keys.PINS)
    )


def _pinned(found: Pin | None, round_number: int, *, complete: bool) -> Pinned:
    return Pinned(
        round=round_number,
        complete=complete,
        by=None if found is None else found.by,
        reason=None if found is None else found.reason,
        created=None if found is None else found.created,
    )


def _read(store: Store, round_number: int) -> Pin | None:
    """The pin's record; None if it is gone or damaged: a collector goes by the key alone."""
    key = keys.pin(round_number)
    data = store.read(key)
    try:
        return None if data is None else Pin.parse(data, key)
    except Corrupt:
        return None


def _is_complete(store: Store, run: Run, round_number: int) -> bool:
    """Whether this round has a checkpoint of this run with all its parts in full length."""
    key = keys.checkpoint_manifest(round_number)
    data = store.read(key)
    try:
        manifest = None if data is None else CheckpointManifest.parse(data, key)
    except Corrupt:
        return False
    if manifest is None or manifest.run != run.nonce:
        return False
    sizes = {entry.key: entry.size for entry in store.list(key.removesuffix(keys.MANIFEST))}
    return all(
        sizes.get(keys.checkpoint_part(round_number, part.digest)) == part.total_bytes for part in manifest.parts
    )


def _rounds(store: Store, folder: str) -> list[int]:
    """The rounds that a folder has something of, in order; an object that is not ours is passed over."""
    found: set[int] = set()
    for entry in store.list(folder):
        with contextlib.suppress(Invalid):
            found.add(keys.round_of(entry.key))
    return sorted(found)


def _no_checkpoint(store: Store, run: Run, round_number: int) -> SkerryError:
    rounds = [number for number in _rounds(store, keys.CHECKPOINTS) if _is_complete(store, run, number)]
    there = f"there are those of rounds {_listed(rounds)}" if rounds else "there is none yet"
    return SkerryError(f"round {round_number} has no complete checkpoint at {store.uri}; {there}")


def _listed(rounds: Iterable[int]) -> str:
    return ", ".join(map(str, rounds))
