"""Reads all that a run has in its store, records whole and payloads by their listing. Never writes, judges nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from skerry.runtime import keys
from skerry.runtime.errors import Corrupt
from skerry.runtime.records import (
    CheckpointManifest,
    Commit,
    Contribution,
    Decision,
    Heartbeat,
    Member,
    Outcome,
    Pin,
    Receipt,
    Record,
    Run,
    digest_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from skerry.runtime.store import Entry, Store

R_co = TypeVar("R_co", bound=Record, covariant=True)
R = TypeVar("R", bound=Record)

MANIFEST = "/manifest.json"


@dataclass(frozen=True, kw_only=True)
class Found(Generic[R_co]):
    """One stored record. digest: sha256 of its bytes. record: None if it does not parse, and then `damage` says why."""

    key: str
    digest: str
    record: R_co | None
    damage: str | None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that was found, by key and in the order of keys. payloads, parts (of checkpoints): their sizes."""

    uri: str
    run: Found[Run] | None
    members: Mapping[str, Found[Member]]
    heartbeats: Mapping[str, Found[Heartbeat]]
    contributions: Mapping[str, Found[Contribution]]
    decisions: Mapping[str, Found[Decision]]
    commits: Mapping[str, Found[Commit]]
    receipts: Mapping[str, Found[Receipt]]
    manifests: Mapping[str, Found[CheckpointManifest]]
    outcomes: Mapping[str, Found[Outcome]]
    pins: Mapping[str, Found[Pin]]
    payloads: Mapping[str, int]
    parts: Mapping[str, int]


def gather(store: Store) -> Evidence:
    """One listing per folder, and one read per record, as many at a time as the store likes.

    Of a run that goes on the records that name others are listed before these: what is named was there by then.
    Raises what the store raises.
    """
    with ThreadPoolExecutor(max(1, store.profile.streams), thread_name_prefix="doctor") as pool:
        reader = _Reader(store, pool)
        checkpoints = store.list(keys.CHECKPOINTS)
        manifests = reader.records(CheckpointManifest, [one for one in checkpoints if one.key.endswith(MANIFEST)])
        receipts = reader.folder(Receipt, keys.RECEIPTS)
        commits = reader.folder(Commit, keys.COMMITS)
        decisions = reader.folder(Decision, keys.EXCHANGES)
        contributions = reader.folder(Contribution, keys.CONTRIBUTIONS)
        payloads = store.list(keys.PAYLOADS)
        heartbeats = reader.folder(Heartbeat, keys.HEARTBEATS)
        outcomes = reader.folder(Outcome, keys.OUTCOMES)
        return Evidence(
            uri=store.uri,
            run=reader.record(Run, keys.RUN),
            members=reader.folder(Member, keys.MEMBERS),
            heartbeats=heartbeats,
            contributions=contributions,
            decisions=decisions,
            commits=commits,
            receipts=receipts,
            manifests=manifests,
            outcomes=outcomes,
            pins=reader.folder(Pin, keys.PINS),
            payloads=_sizes(payloads),
            parts=_sizes(one for one in checkpoints if not one.key.endswith(MANIFEST)),
        )


class _Reader:
    def __init__(self, store: Store, pool: ThreadPoolExecutor) -> None:
        self._store = store
        self._pool = pool

    def folder(self, kind: type[R], prefix: str) -> dict[str, Found[R]]:
        """Every record under a prefix."""
        return self.records(kind, self._store.list(prefix))

    def records(self, kind: type[R], entries: Sequence[Entry]) -> dict[str, Found[R]]:
        """The records of these entries; one that was deleted since the listing is left out."""

        def read(entry: Entry) -> Found[R] | None:
            return self.record(kind, entry.key)

        return {one.key: one for one in self._pool.map(read, entries) if one is not None}

    def record(self, kind: type[R], key: str) -> Found[R] | None:
        """One record; None if it is absent."""
        data = self._store.read(key)
        if data is None:
            return None
        try:
            record, damage = kind.parse(data, key), None
        except Corrupt as error:
            record, damage = None, str(error)
        return Found(key=key, digest=digest_of(data), record=record, damage=damage)


def _sizes(entries: Iterable[Entry]) -> dict[str, int]:
    return {entry.key: entry.size for entry in entries}
