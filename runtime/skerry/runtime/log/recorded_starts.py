"""Reads the starts of replicas, and their ends, that were recorded since some time. Never writes.

Roll-ups hold these records, so that a reader of a long run need not read one by one what restarted many times.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import MAX_RECORD_BYTES
from skerry.runtime.log.records import Member, Outcome
from skerry.runtime.store.interface import Span
from skerry.runtime.store.parallel import run_parallel

if TYPE_CHECKING:
    from skerry.runtime.store import Store

StartRecord: TypeAlias = Member | Outcome
"""The record of a start, or of its end."""

_SPAN: Final = Span(0, MAX_RECORD_BYTES + 1)


def key_of_start(record: StartRecord) -> str:
    """The key at which the record belongs. Raises Invalid if it has no valid one."""
    of_kind = keys.member if isinstance(record, Member) else keys.outcome
    return of_kind(record.slot, record.incarnation)


def read_starts_since(store: Store, run: str, since: float) -> list[StartRecord]:
    """The starts and ends that were recorded at `since`, by the store's clock, or later; in the order of their keys.

    run: its nonce. since: 0 for all. Two listings, and a read for each. Records that do not parse, and those of
    another run or at another record's key, are left out.
    """
    listed = [
        entry.key for folder in (keys.MEMBERS, keys.OUTCOMES) for entry in store.list(folder) if entry.modified >= since
    ]
    bodies = run_parallel(store, len(listed), lambda index: store.read(listed[index], _SPAN))
    return [
        record
        for key, data in zip(listed, bodies, strict=True)
        if data is not None and (record := _record(run, key, data)) is not None
    ]


def _record(run: str, key: str, data: bytes | memoryview) -> StartRecord | None:
    with suppress(Corrupt, Invalid):
        record = (Member if key.startswith(keys.MEMBERS) else Outcome).parse(data, key)
        if record.run == run and key_of_start(record) == key:
            return record
    return None
