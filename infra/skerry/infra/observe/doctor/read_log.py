"""Reads all that a run has in its store, records whole and payloads by their listing. Never writes, judges nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from skerry.runtime import keys, records
from skerry.runtime.errors import Corrupt, Invalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from skerry.runtime.store import Entry, Store

R_co = TypeVar("R_co", bound=records.Record, covariant=True)
R = TypeVar("R", bound=records.Record)


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
    run: Found[records.Run] | None
    members: Mapping[str, Found[records.Member]]
    heartbeats: Mapping[str, Found[records.Heartbeat]]
    contributions: Mapping[str, Found[records.Contribution]]
    decisions: Mapping[str, Found[records.Decision]]
    commits: Mapping[str, Found[records.Commit]]
    receipts: Mapping[str, Found[records.Receipt]]
    manifests: Mapping[str, Found[records.CheckpointManifest]]
    outcomes: Mapping[str, Found[records.Outcome]]
    pins: Mapping[str, Found[records.Pin]]
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
        manifests = reader.records(
            records.CheckpointManifest, [one for one in checkpoints if one.key.endswith(keys.MANIFEST)]
        )
        receipts = reader.folder(records.Receipt, keys.RECEIPTS)
        commits = reader.folder(records.Commit, keys.COMMITS)
        decisions = reader.folder(records.Decision, keys.EXCHANGES)
        contributions = reader.folder(records.Contribution, keys.CONTRIBUTIONS)
        payloads = store.list(keys.PAYLOADS)
        heartbeats = reader.folder(records.Heartbeat, keys.HEARTBEATS)
        outcomes = reader.folder(records.Outcome, keys.OUTCOMES)
        return Evidence(
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
            parts=_sizes(one for one in checkpoints if not one.key.endswith(keys.MANIFEST)),
        )


class _Reader:
    def __init__(self, store: Store, pool: ThreadPoolExecutor) -> None:
        self._store = store
        self._pool = pool

    def folder(self, kind: type[R], prefix: str) -> dict[str, Found[R]]:
        """Every record under a prefix."""
        return self.records(kind, self._store.list(prefix))

    def records(self, kind: type[R], entries: Sequence[Entry]) -> dict[str, Found[R]]:
        """The records of these entries; one that was deleted since the listing, or is somebody else's, is left out."""

        def read(entry: Entry) -> Found[R] | None:
            return self.record(kind, entry.key)

        ours = [entry for entry in entries if _is_ours(entry.key)]
        return {one.key: one for one in self._pool.map(read, ours) if one is not None}

    def record(self, kind: type[R], key: str) -> Found[R] | None:
        """One record; None if it is absent."""
        data = self._store.read(key)
        if data is None:
            return None
        try:
            record, damage = kind.parse(data, key), None
        except Corrupt as error:
            record, damage = None, str(error)
        return Found(key=key, digest=records.digest_of(data), record=record, damage=damage)


def _sizes(entries: Iterable[Entry]) -> dict[str, int]:
    return {entry.key: entry.size for entry in entries}


def _is_ours(key: str) -> bool:
    """Whether a key of a record names a slot or a round: what replicas pass over is no evidence."""
    of_a_slot = key.startswith((keys.MEMBERS, keys.HEARTBEATS, keys.OUTCOMES))
    try:
        _ = keys.slot_of(key) if of_a_slot else keys.round_of(key)
    except Invalid:
        return False
    return True
