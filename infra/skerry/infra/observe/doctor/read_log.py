"""Reads all objects of a run from its store: records in full, payloads and parts by listing. Never writes or judges."""

from __future__ import annotations

import functools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys, records
from skerry.runtime.log.record_parsing import Record, digest_of
from skerry.runtime.log.run_record import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from skerry.runtime.log.recorded_starts import StartRecord
    from skerry.runtime.store import Entry, Store

R = TypeVar("R", bound=Record)
LogRecord: TypeAlias = (
    records.Member
    | records.Heartbeat
    | records.Contribution
    | records.Decision
    | records.Commit
    | records.Receipt
    | records.CheckpointManifest
    | records.Outcome
    | records.Pin
)
L = TypeVar("L", bound=LogRecord)
L_co = TypeVar("L_co", bound=Record, covariant=True)


class StoredRecord(NamedTuple, Generic[L_co]):
    """A record, and the key and digest by which other records reference it.

    modified: when it was written, in seconds since the epoch by the store's clock; 0 if the store has none.
    """

    key: str
    digest: str
    record: L_co
    modified: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """The records of a run by kind, each by key and in key order.

    nonce: of the run that owns this prefix: the run of run.json, or else of most records. settings: None without a
    run.json. listed: the keys of all records but settings, invalid ones included. unreadable: why a record does not
    parse, by key. payloads, parts (of checkpoints): the sizes of the stored objects.
    """

    uri: str
    nonce: str = ""
    run: Run | None
    settings: RunSettings | None
    members: Mapping[str, StoredRecord[records.Member]]
    heartbeats: Mapping[str, StoredRecord[records.Heartbeat]]
    contributions: Mapping[str, StoredRecord[records.Contribution]]
    decisions: Mapping[str, StoredRecord[records.Decision]]
    commits: Mapping[str, StoredRecord[records.Commit]]
    receipts: Mapping[str, StoredRecord[records.Receipt]]
    manifests: Mapping[str, StoredRecord[records.CheckpointManifest]]
    outcomes: Mapping[str, StoredRecord[records.Outcome]]
    pins: Mapping[str, StoredRecord[records.Pin]]
    listed: frozenset[str]
    unreadable: Mapping[str, str]
    payloads: Mapping[str, int]
    parts: Mapping[str, int]

    @functools.cached_property
    def closed(self) -> int:
        """The first round after the last stored commit."""
        return max((keys.round_of(key) + 1 for key in self.listed if key.startswith(keys.COMMITS)), default=0)

    def only(self, keep: Callable[[StoredRecord[LogRecord]], bool]) -> RunRecords:
        """Without those records of the log that are not to be kept."""

        def kept(stored: Mapping[str, StoredRecord[L]]) -> dict[str, StoredRecord[L]]:
            return {key: item for key, item in stored.items() if keep(item)}

        return replace(
            self,
            members=kept(self.members),
            heartbeats=kept(self.heartbeats),
            contributions=kept(self.contributions),
            decisions=kept(self.decisions),
            commits=kept(self.commits),
            receipts=kept(self.receipts),
            manifests=kept(self.manifests),
            outcomes=kept(self.outcomes),
            pins=kept(self.pins),
        )

    def log_records(self) -> Iterator[StoredRecord[LogRecord]]:
        """Every record but run.json."""
        yield from self.commits.values()
        yield from self.decisions.values()
        yield from self.contributions.values()
        yield from self.members.values()
        yield from self.receipts.values()
        yield from self.manifests.values()
        yield from self.outcomes.values()
        yield from self.pins.values()
        yield from self.heartbeats.values()


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
        run = reader.record(Run, keys.RUN)
        log = RunRecords(
            uri=store.uri,
            run=None if run is None else run.record,
            settings=None if run is None else _newest(store, RunSettings(first=run.record)),
            members=reader.folder(records.Member, keys.MEMBERS),
            heartbeats=heartbeats,
            contributions=contributions,
            decisions=decisions,
            commits=commits,
            receipts=receipts,
            manifests=manifests,
            outcomes=outcomes,
            pins=reader.folder(records.Pin, keys.PINS),
            listed=frozenset(reader.listed),
            unreadable=reader.unreadable,
            payloads=_sizes(payloads),
            parts=_sizes(checkpoint for checkpoint in checkpoints if not checkpoint.key.endswith(keys.MANIFEST)),
        )
    counted = Counter(stored.record.run for stored in log.log_records())
    return replace(log, nonce=max(counted, key=counted.__getitem__, default="") if log.run is None else log.run.nonce)


def read_starts(store: Store, run: Run, known: Mapping[str, StartRecord]) -> RunRecords:
    """Read the starts of a run's replicas, their ends, the heartbeats, and the changes of settings.

    known: starts and ends that are read already, by key. Three listings, and a read for each other record.

    The result has no other records. Raises what the store raises.
    """
    with ThreadPoolExecutor(max(1, store.profile.streams), thread_name_prefix="starts") as pool:
        reader = _Reader(store, pool, known)
        heartbeats = reader.folder(records.Heartbeat, keys.HEARTBEATS)
        outcomes = reader.folder(records.Outcome, keys.OUTCOMES)
        members = reader.folder(records.Member, keys.MEMBERS)
        return replace(
            no_records(store.uri, run),
            settings=_newest(store, RunSettings(first=run)),
            members=members,
            heartbeats=heartbeats,
            outcomes=outcomes,
        )


def no_records(uri: str, run: Run) -> RunRecords:
    """The records of a run before anything of it was read."""
    return RunRecords(
        uri=uri,
        nonce=run.nonce,
        run=run,
        settings=RunSettings(first=run),
        members={},
        heartbeats={},
        contributions={},
        decisions={},
        commits={},
        receipts={},
        manifests={},
        outcomes={},
        pins={},
        listed=frozenset(),
        unreadable={},
        payloads={},
        parts={},
    )


class _Reader:
    """Reads records and collects the keys of all of them, and the damage of those that do not parse."""

    def __init__(self, store: Store, pool: ThreadPoolExecutor, known: Mapping[str, Record] | None = None) -> None:
        """known: records that need not be read, by key."""
        self._store = store
        self._pool = pool
        self._known = known or {}
        self.listed: set[str] = set()
        self.unreadable: dict[str, str] = {}

    def folder(self, kind: type[R], prefix: str) -> dict[str, StoredRecord[R]]:
        """Every record under a prefix."""
        return self.records(kind, self._store.list(prefix))

    def records(self, kind: type[R], entries: Sequence[Entry]) -> dict[str, StoredRecord[R]]:
        """The records of these entries, without foreign objects and those deleted since the listing."""
        ours = [entry for entry in entries if _is_record(entry.key)]
        stored = self._pool.map(partial(self._listed, kind), ours)
        return {item.key: item for item in stored if item is not None}

    def record(self, kind: type[R], key: str, modified: float = 0.0) -> StoredRecord[R] | None:
        """One record; None if it is absent or does not parse."""
        data = self._store.read(key)
        if data is None:
            return None
        self.listed.add(key)
        try:
            return StoredRecord(key, digest_of(data), kind.parse(data, key), modified)
        except Corrupt as error:
            self.unreadable[key] = str(error)
            return None

    def _listed(self, kind: type[R], entry: Entry) -> StoredRecord[R] | None:
        known = self._known.get(entry.key)
        if isinstance(known, kind):
            return StoredRecord(entry.key, digest_of(known.to_bytes()), known, entry.modified)
        return self.record(kind, entry.key, entry.modified)


def _newest(store: Store, settings: RunSettings) -> RunSettings:
    """With the changes stored since, and the rounds of their slots. Those after a damaged change are left out."""
    with suppress(Corrupt):
        settings = settings.read_newer(store)
    return settings.read_begins(store)


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
