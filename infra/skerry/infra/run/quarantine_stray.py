"""Moves stray records of a run away, so that the rounds at whose keys they are can be closed.

Needs the operator's right to delete records, which no replica has. A record is copied before it is deleted, and its
copy is never overwritten, so every move can be undone by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.infra.observe.doctor.read_log import read_log
from skerry.infra.observe.doctor.stray_records import find_stray
from skerry.infra.observe.doctor.valid_records import valid_records
from skerry.runtime.log import keys
from skerry.runtime.log.records import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.infra.observe.doctor.findings import Examination
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store


@dataclass(frozen=True, kw_only=True)
class MovedRecord:
    """A stray record, the key at which it is now, and why it is stray."""

    key: str
    to: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """The result of a quarantine. log: the findings that are left."""

    ok: bool
    moved: tuple[MovedRecord, ...]
    log: Examination


def quarantine_stray(store: Store, clock: Clock, examine: Callable[[], Examination]) -> Quarantine:
    """Move away the records that are stray in two readings, because in the first a round may be closed meanwhile.

    Between them passes the time for which the store may miss an existing record. Those of later rounds go first: at no
    moment a commit seems to follow that does not. Raises what the store raises.
    """
    stray = {key: store.read(key) for key in _find_stray(store)}
    if stray:
        clock.pause(store.profile.absence_s)
    again = _find_stray(store) if stray else {}
    moved: list[MovedRecord] = []
    for key in sorted(stray.keys() & again.keys(), key=lambda key: (keys.round_of(key), key), reverse=True):
        data = store.read(key)
        if data is None or data != stray[key]:  # another operator has moved it, and a replica may have taken the key
            continue
        to = keys.quarantined(key, digest_of(data))
        store.create(to, data)  # an existing one has the same bytes: its name has their digest
        store.delete(key)
        moved.append(MovedRecord(key=key, to=to, why=again[key]))
    log = examine()
    return Quarantine(ok=log.ok, moved=tuple(moved), log=log)


def _find_stray(store: Store) -> dict[str, str]:
    return find_stray(valid_records(read_log(store)))
