"""Reads the starts of a run's replicas and their ends repeatedly, each record once. Never writes."""

from __future__ import annotations

import datetime as dt
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from skerry.infra.observe.history import Start
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import Member, Outcome
from skerry.runtime.store.parallel import run_parallel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from skerry.runtime.store import Store

R = TypeVar("R", Member, Outcome)


class StartReader:
    """The starts of one run. Not thread-safe."""

    def __init__(self, store: Store, run_nonce: str, starts: Iterable[Start] = ()) -> None:
        """starts: known before. Of a slot that is not among them, the first look reads the last start only."""
        self._store = store
        self._nonce = run_nonce
        self._starts = {(start.slot, start.incarnation): start for start in starts}
        self._outcomes = {key: start.outcome for key, start in self._starts.items() if start.outcome is not None}
        self._seen = {keys.outcome(*end) for end in self._outcomes}

    @property
    def starts(self) -> tuple[Start, ...]:
        """The known starts in slot order."""
        ordered = sorted(self._starts, key=lambda start: (keys.slot_order(start[0]), start[1]))
        return tuple(self._starts[start] for start in ordered)

    @property
    def outcomes(self) -> Mapping[str, Outcome]:
        """The last known outcome of each slot."""
        return {slot: self._outcomes[slot, number] for slot, number in sorted(self._outcomes)}

    def look(self) -> int:
        """Two listings, and a read for each new record. Records that do not parse are skipped. Returns the reads."""
        before = len(self._seen)
        known = dict(sorted(self._starts))
        members = self._listed(keys.MEMBERS)
        newest = dict(sorted(members))
        wanted = {start: at for start, at in members.items() if start[1] > known.get(start[0], newest[start[0]] - 1)}
        for (slot, number), (member, at) in self._read(Member, wanted).items():
            self._starts[slot, number] = Start(
                slot=slot,
                incarnation=number,
                began_at=at or seconds_since_epoch(member.created) or 0.0,
                ended_at=None,
                place=member.place,
                host=member.host,
                outcome=None,
                software=member.software,
            )
        outcomes = self._listed(keys.OUTCOMES)
        newest = dict(sorted(outcomes))
        wanted = {end: at for end, at in outcomes.items() if end in self._starts or end[1] == newest[end[0]]}
        self._outcomes |= {end: outcome for end, (outcome, _) in self._read(Outcome, wanted).items()}
        for end in self._outcomes.keys() & self._starts.keys():
            if self._starts[end].outcome is None:
                outcome = self._outcomes[end]
                ended_at = outcomes.get(end) or seconds_since_epoch(outcome.ended)
                self._starts[end] = replace(self._starts[end], outcome=outcome, ended_at=ended_at)
        return len(self._seen) - before

    def _listed(self, prefix: str) -> dict[tuple[str, int], float]:
        """The slots and incarnations below a prefix, with the times of their records."""
        listed: dict[tuple[str, int], float] = {}
        for entry in self._store.list(prefix):
            with suppress(Invalid):  # a foreign object
                listed[keys.slot_of(entry.key), keys.incarnation_of(entry.key)] = entry.modified
        return listed

    def _read(self, kind: type[R], wanted: Mapping[tuple[str, int], float]) -> dict[tuple[str, int], tuple[R, float]]:
        key_of = keys.member if kind is Member else keys.outcome
        due = [(start, key) for start in wanted if (key := key_of(*start)) not in self._seen]
        bodies = run_parallel(self._store, len(due), lambda index: self._store.read(due[index][1]))
        records: dict[tuple[str, int], tuple[R, float]] = {}
        for (start, key), data in zip(due, bodies, strict=True):
            if data is None:
                continue
            self._seen.add(key)
            with suppress(Corrupt):
                record = kind.parse(data, key)
                if record.run == self._nonce:
                    records[start] = record, wanted[start]
        return records


def seconds_since_epoch(text: str) -> float | None:
    """The time in a record that a clock's `utc_text` wrote; None if it is none."""
    with suppress(ValueError):
        return dt.datetime.fromisoformat(text).timestamp()
    return None
