"""Reads all objects of a run from its store: records in full, payloads and parts by listing. Never writes or judges."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys, records

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from skerry.runtime.store import Entry, Store

R_co = TypeVar("R_co", bound=records.Record, covariant=True)
R = TypeVar("R", bound=records.Record)


@dataclass(frozen=True, kw_only=True)
class ListedObject(Generic[R_co]):
    """One stored record. digest: sha256 of its bytes. record: None if it does not parse; `damage` is the reason."""

    key: str
    digest: str
    record: R_co | None
    damage: str | None


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """All stored objects of a run, by key and in key order. payloads, parts (of checkpoints): their sizes."""

    uri: str
    run: ListedObject[records.Run] | None
    members: Mapping[str, ListedObject[records.Member]]
    heartbeats: Mapping[str, ListedObject[records.Heartbeat]]
    contributions: Mapping[str, ListedObject[records.Contribution]]
    decisions: Mapping[str, ListedObject[records.Decision]]
    commits: Mapping[str, ListedObject[records.Commit]]
    receipts: Mapping[str, ListedObject[records.Receipt]]
    manifests: Mapping[str, ListedObject[records.CheckpointManifest]]
    outcomes: Mapping[str, ListedObject[records.Outcome]]
    pins: Mapping[str, ListedObject[records.Pin]]
    payloads: Mapping[str, int]
    parts: Mapping[str, int]


def read_log(store: Store) -> RunRecords:
    """Make one listing per folder and one read per record, in as many streams as the store prefers.

    Records are listed before the ones that they reference, so that in a live run every referenced record is found.
    Raises what the store raises.
    """
    with ThreadPoolExecutor(max(1, store.profile.streams), thread_name_prefix="doctor") as pool:
        reader = _Reader(store, pool)
        checkpoints = store.list(keys.CHECKPOINTS)
        manifests = reader.records(
            records.CheckpointManifest,
            [checkpoint for checkpoint in checkpoints if checkpoint.key.endswith(keys.MANIFEST)],
        )
        receipts = reader.folder(records.Receipt, keys.RECEIPTS)
        commits = reader.folder(records.Commit, keys.COMMITS)
        decisions = reader.folder(records.Decision, keys.EXCHANGES)
        contributions = reader.folder(records.Contribution, keys.CONTRIBUTIONS)
        payloads = store.list(keys.PAYLOADS)
        heartbeats = reader.folder(records.Heartbeat, keys.HEARTBEATS)
        outcomes = reader.folder(records.Outcome, keys.OUTCOMES)
        return RunRecords(
            uri=store.uri,
            run=reader.record(records.Run, keys.RUN),
            members=reader.folder(records.Member, keys.MEMBERS),
            heartbeats=heartbeats,
            contributions=contributions,
            decisions=decisions,
            commits=commits,
            receipts=receipts,
            manifests=manifests,
            outcomes=outcomes,
            pins=reader.folder(records.Pin, keys.PINS),
            payloads=_sizes(payloads),
            parts=_sizes(checkpoint for checkpoint in checkpoints if not checkpoint.key.endswith(keys.MANIFEST)),
        )


class _Reader:
    def __init__(self, store: Store, pool: ThreadPoolExecutor) -> None:
        self._store = store
        self._pool = pool

    def folder(self, kind: type[R], prefix: str) -> dict[str, ListedObject[R]]:
        """Every record under a prefix."""
        return self.records(kind, self._store.list(prefix))

    def records(self, kind: type[R], entries: Sequence[Entry]) -> dict[str, ListedObject[R]]:
        """The records of these entries, without foreign objects and those deleted since the listing."""

        def read(entry: Entry) -> ListedObject[R] | None:
            return self.record(kind, entry.key)

        ours = [entry for entry in entries if _is_record(entry.key)]
        return {item.key: item for item in self._pool.map(read, ours) if item is not None}

    def record(self, kind: type[R], key: str) -> ListedObject[R] | None:
        """One record; None if it is absent."""
        data = self._store.read(key)
        if data is None:
            return None
        try:
            record, damage = kind.parse(data, key), None
        except Corrupt as error:
            record, damage = None, str(error)
        return ListedObject(key=key, digest=records.digest_of(data), record=record, damage=damage)


def _sizes(entries: Iterable[Entry]) -> dict[str, int]:
    return {entry.key: entry.size for entry in entries}


def _is_record(key: str) -> bool:
    """True if a key names a slot or a round; replicas ignore other objects."""
    of_a_slot = key.startswith((keys.MEMBERS, keys.HEARTBEATS, keys.OUTCOMES))
    try:
        _ = keys.slot_of(key) if of_a_slot else keys.round_of(key)
    except Invalid:
        return False
    return True
