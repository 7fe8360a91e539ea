"""Pins checkpoints so that garbage collection keeps them: writes and deletes pins only.

A pin names a round; garbage collection keeps that round's checkpoint because of the pin's key. The payloads after it
are still deleted, so a run cannot continue from a pinned checkpoint for ever (decision 0003 of the runtime).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.runtime.errors import Conflict, Corrupt, Invalid, SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.records import CheckpointManifest, Pin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store


@dataclass(frozen=True, kw_only=True)
class PinnedCheckpoint:
    """One pin. by, reason, created: None if it is unreadable. complete: its checkpoint can be loaded."""

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


def pin(store: Store, run: Run, round_number: int, *, by: str, reason: str, now: str) -> PinnedCheckpoint:
    """Keep the checkpoint of this round until `unpin`. by, reason, now: stored in the pin, for people.

    Raises SkerryError, with the rounds that have one, if it has no complete checkpoint, Conflict if it is pinned.
    """
    if not _is_complete(store, run, round_number):
        raise _no_checkpoint(store, run, round_number)
    record = Pin(run=run.nonce, round=round_number, by=by, reason=reason, created=now)
    if not store.create(keys.pin(round_number), record.to_bytes()):
        existing = _read(store, round_number)
        by_text = (
            ""
            if existing is None
            else f" by {existing.by} at {existing.created}: {existing.reason or 'no reason given'}"
        )
        raise Conflict(f"round {round_number} is pinned already{by_text}; run `skerry unpin` to release it")
    # A running garbage collection may have listed pins before this one.
    if not _is_complete(store, run, round_number):
        store.delete(keys.pin(round_number))
        raise _no_checkpoint(store, run, round_number)
    return _pinned(record, round_number, complete=True)


def unpin(store: Store, run: Run, round_number: int) -> PinnedCheckpoint:
    """Delete a round's pin and return it. Raises SkerryError if it does not exist."""
    pinned = {pin.round: pin for pin in pins(store, run)}
    if round_number not in pinned:
        others = f"pinned rounds: {_listed(pinned)}" if pinned else "no round is pinned"
        raise SkerryError(f"round {round_number} is not pinned at {store.uri}; {others}")
    store.delete(keys.pin(round_number))
    return pinned[round_number]


def pins(store: Store, run: Run) -> tuple[PinnedCheckpoint, ...]:
    """All pins, in round order."""
    return tuple(
        _pinned(_read(store, number), number, complete=_is_complete(store, run, number))
        for number in _rounds(store, keys.PINS)
    )


def _pinned(record: Pin | None, round_number: int, *, complete: bool) -> PinnedCheckpoint:
    return PinnedCheckpoint(
        round=round_number,
        complete=complete,
        by=None if record is None else record.by,
        reason=None if record is None else record.reason,
        created=None if record is None else record.created,
    )


def _read(store: Store, round_number: int) -> Pin | None:
    """The pin's record; None if it is missing or damaged. Garbage collection uses the key alone."""
    key = keys.pin(round_number)
    data = store.read(key)
    try:
        return None if data is None else Pin.parse(data, key)
    except Corrupt:
        return None


def _is_complete(store: Store, run: Run, round_number: int) -> bool:
    """True if this round has a checkpoint of this run with all parts in full length."""
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
    """The rounds that a folder has objects of, in order; foreign objects are skipped."""
    rounds: set[int] = set()
    for entry in store.list(folder):
        with contextlib.suppress(Invalid):
            rounds.add(keys.round_of(entry.key))
    return sorted(rounds)


def _no_checkpoint(store: Store, run: Run, round_number: int) -> SkerryError:
    rounds = [number for number in _rounds(store, keys.CHECKPOINTS) if _is_complete(store, run, number)]
    others = f"complete checkpoints: rounds {_listed(rounds)}" if rounds else "no checkpoint is complete yet"
    return SkerryError(f"round {round_number} has no complete checkpoint at {store.uri}; {others}")


def _listed(rounds: Iterable[int]) -> str:
    return ", ".join(map(str, rounds))
