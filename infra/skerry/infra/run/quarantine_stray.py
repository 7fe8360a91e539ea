"""Moves records away that keep the open round from being closed: stray ones, and a decision that cannot be averaged.

Needs the operator's right to delete records, which no replica has. A record is copied before it is deleted, and its
copy is never overwritten, so every move can be undone by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.doctor.read_log import read_log
from skerry.infra.observe.doctor.stray_records import find_stray
from skerry.infra.observe.doctor.valid_records import valid_records
from skerry.infra.observe.live_replicas import live_replicas, shown
from skerry.infra.run.run_record import load_run
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.infra.observe.doctor.findings import Examination, Kind
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

_UNREADABLE: Final[frozenset[Kind]] = frozenset({"missing-payload", "payload-length", "damaged-payload"})


@dataclass(frozen=True, kw_only=True)
class MovedRecord:
    """A record, the key at which it is now, and why it was moved."""

    key: str
    to: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """The result of a quarantine. kept: why a decision that cannot be averaged was not moved; None: there is none.

    log: the findings that are left.
    """

    ok: bool
    moved: tuple[MovedRecord, ...]
    kept: str | None
    log: Examination


def quarantine_stray(store: Store, clock: Clock, examine: Callable[[], Examination]) -> Quarantine:
    """Move away the stray records, then what the open round cannot average. Raises what the store raises.

    examine: `--deep` also finds payloads that are damaged, not only those that are missing or have another length.
    """
    moved = _move_stray(store, clock)
    log = examine()
    unreadable = _find_unreadable(store, log)
    kept = _live(store, clock) if unreadable else None
    if unreadable and kept is None:
        # Contributions first: a replica that starts meanwhile must not decide for one of them again.
        order = sorted(unreadable, key=lambda key: key.startswith(keys.EXCHANGES))
        moved += [_move(store, key, data, unreadable[key]) for key in order if (data := store.read(key)) is not None]
        log = examine()
    return Quarantine(ok=log.ok, moved=tuple(moved), kept=kept, log=log)


def _move_stray(store: Store, clock: Clock) -> list[MovedRecord]:
    """Move away the records that are stray in two readings, because in the first a round may be closed meanwhile.

    Between them passes the time for which the store may miss an existing record. Those of later rounds go first: at no
    moment a commit seems to follow that does not.
    """
    stray = {key: store.read(key) for key in _find_stray(store)}
    if stray:
        clock.pause(store.profile.absence_s)
    again = _find_stray(store) if stray else {}
    moved: list[MovedRecord] = []
    for key in sorted(stray.keys() & again.keys(), key=lambda key: (keys.round_of(key), key), reverse=True):
        data = store.read(key)
        # Otherwise another operator has moved it, and a replica may have taken the key.
        if data is not None and data == stray[key]:
            moved.append(_move(store, key, data, again[key]))
    return moved


def _move(store: Store, key: str, data: memoryview, why: str) -> MovedRecord:
    to = keys.quarantined(key, digest_of(data))
    store.create(to, data)  # an existing one has the same bytes: its name has their digest
    store.delete(key)
    return MovedRecord(key=key, to=to, why=why)


def _find_stray(store: Store) -> dict[str, str]:
    return find_stray(valid_records(read_log(store)))


def _find_unreadable(store: Store, examination: Examination) -> dict[str, str]:
    """The decisions of the open round that list contributions without readable payloads, and these contributions."""
    damage = {
        item.key: item.text
        for item in examination.findings
        if item.kind in _UNREADABLE and item.severity == "error" and item.round == examination.closed
    }
    if not damage:
        return {}
    log = valid_records(read_log(store))
    unreadable: dict[str, str] = {}
    for key, stored in log.decisions.items():
        decision = stored.record
        if decision.round != log.closed or log.closed != examination.closed:
            continue
        for share in decision.members:
            own = keys.contribution(decision.round, decision.exchange, share.slot)
            parts = log.contributions[own].record.parts if own in log.contributions else ()
            payloads = (keys.payload(decision.round, share.slot, part.digest) for part in parts)
            if (payload := next((name for name in payloads if name in damage), None)) is not None:
                unreadable[own] = f"{payload}: {damage[payload]}"
                unreadable[key] = f"it lists {own}, which cannot be averaged"
    return unreadable


def _live(store: Store, clock: Clock) -> str | None:
    """Return why nothing is moved: replicas are at work, and may have read the payload before."""
    if (run := load_run(store)) is None:
        return None
    live = live_replicas(store, run, clock, {keys.slot_of(entry.key) for entry in store.list(keys.MEMBERS)})
    return f"end all replicas first, because one may still close the round: {shown(live)}" if live else None
