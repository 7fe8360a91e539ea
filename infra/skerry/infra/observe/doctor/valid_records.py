"""Sorts the stored records of a run into valid ones, by kind, and findings for the others. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from skerry.infra.observe.doctor.findings import finding
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys, records

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.observe.doctor.findings import Finding
    from skerry.infra.observe.doctor.read_log import ListedObject, RunRecords

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


class StoredRecord(NamedTuple, Generic[L]):
    """A valid record, and the key and digest by which other records reference it."""

    key: str
    digest: str
    record: L


@dataclass(frozen=True, kw_only=True)
class SortedRecords:
    """The records of one run whose content matches their key, by key. stored: all objects, invalid ones included."""

    stored: RunRecords
    nonce: str
    members: Mapping[str, StoredRecord[records.Member]]
    heartbeats: Mapping[str, StoredRecord[records.Heartbeat]]
    contributions: Mapping[str, StoredRecord[records.Contribution]]
    decisions: Mapping[str, StoredRecord[records.Decision]]
    commits: Mapping[str, StoredRecord[records.Commit]]
    receipts: Mapping[str, StoredRecord[records.Receipt]]
    manifests: Mapping[str, StoredRecord[records.CheckpointManifest]]
    outcomes: Mapping[str, StoredRecord[records.Outcome]]

    @property
    def closed(self) -> int:
        """The first round after the last stored commit."""
        return max((keys.round_of(key) + 1 for key in self.stored.commits), default=0)


def sort_records(stored: RunRecords) -> SortedRecords:
    """The valid records of the run that owns this prefix: the run of run.json, or else of most records."""
    nonce = _nonce(stored)

    def valid(listed: Mapping[str, ListedObject[L]]) -> dict[str, StoredRecord[L]]:
        return {
            key: StoredRecord(key, item.digest, item.record)
            for key, item in listed.items()
            if item.record is not None and item.record.run == nonce and key_of(item.record) == key
        }

    return SortedRecords(
        stored=stored,
        nonce=nonce,
        members=valid(stored.members),
        heartbeats=valid(stored.heartbeats),
        contributions=valid(stored.contributions),
        decisions=valid(stored.decisions),
        commits=valid(stored.commits),
        receipts=valid(stored.receipts),
        manifests=valid(stored.manifests),
        outcomes=valid(stored.outcomes),
    )


def check_identity(log: SortedRecords) -> Iterator[Finding]:
    """Finds records that do not parse, are stored under another record's key, or belong to another run."""
    stored = log.stored
    if stored.run is None:
        yield finding("missing-record", keys.RUN, "run.json is missing, which defines the run")
    elif stored.run.damage is not None:
        yield finding("unreadable", keys.RUN, stored.run.damage)
    foreign: defaultdict[str, list[ListedObject[LogRecord]]] = defaultdict(list)
    for log_record in log_records(stored):
        if log_record.record is None:
            # A heartbeat is only a hint, and its replica overwrites it.
            severity = "warning" if log_record.key.startswith(keys.HEARTBEATS) else "error"
            round_number, slot = _place(log_record.key)
            text = log_record.damage or "it does not parse"
            yield finding("unreadable", log_record.key, text, round_number=round_number, slot=slot, severity=severity)
        elif log_record.record.run != log.nonce:
            foreign[log_record.record.run].append(log_record)
        elif (expected := key_of(log_record.record)) != log_record.key:
            round_number, slot = _place(log_record.key)
            text = f"its content belongs at {expected or 'no valid key'}"
            yield finding("misplaced", log_record.key, text, round_number=round_number, slot=slot)
    for nonce, items in foreign.items():
        round_number, slot = _place(items[0].key)
        text = f"{len(items)} records belong to run {nonce}, this prefix to run {log.nonce}"
        yield finding("two-runs", items[0].key, text, round_number=round_number, slot=slot)


def check_incarnations(log: SortedRecords) -> Iterator[Finding]:
    """Finds incarnations that wrote records but have no membership record; these are numbered without gaps."""
    claimed: defaultdict[str, set[int]] = defaultdict(set)
    for key in log.stored.members:
        claimed[keys.slot_of(key)].add(keys.incarnation_of(key))
    named: dict[tuple[str, int], str] = {}
    for kinds in (log.heartbeats, log.contributions, log.receipts, log.outcomes):
        for stored in kinds.values():
            named.setdefault((stored.record.slot, stored.record.incarnation), stored.key)
    for slot, numbers in claimed.items():
        for number in range(max(numbers)):
            named.setdefault((slot, number), f"{keys.members_prefix(slot)}{max(numbers):06d}.json")
    for (slot, number), key in sorted(named.items(), key=lambda item: (keys.slot_order(item[0][0]), item[0][1])):
        if number not in claimed[slot]:
            text = f"incarnation {number} of {slot} has no membership record, but {key} requires it"
            yield finding("incarnation-gap", keys.member(slot, number), text, slot=slot)


def log_records(stored: RunRecords) -> Iterator[ListedObject[LogRecord]]:
    """Every record but run.json."""
    yield from stored.commits.values()
    yield from stored.decisions.values()
    yield from stored.contributions.values()
    yield from stored.members.values()
    yield from stored.receipts.values()
    yield from stored.manifests.values()
    yield from stored.outcomes.values()
    yield from stored.pins.values()
    yield from stored.heartbeats.values()


def key_of(record: LogRecord) -> str | None:
    """The key for a record's content; None if no valid key exists."""
    key: str | None
    try:
        match record:
            case records.Member() | records.Outcome():
                named = keys.member if isinstance(record, records.Member) else keys.outcome
                key = named(record.slot, record.incarnation)
            case records.Heartbeat():
                key = keys.heartbeat(record.slot)
            case records.Contribution():
                key = keys.contribution(record.round, record.exchange, record.slot)
            case records.Decision():
                key = keys.decision(record.round, record.exchange)
            case records.Commit():
                key = keys.commit(record.round)
            case records.Receipt():
                key = keys.receipt(record.round, record.slot)
            case records.CheckpointManifest():
                key = keys.checkpoint_manifest(record.round)
            case records.Pin():
                key = keys.pin(record.round)
    except Invalid:
        key = None
    return key


def _nonce(stored: RunRecords) -> str:
    if stored.run is not None and isinstance(stored.run.record, records.Run):
        return stored.run.record.nonce
    counted = Counter(log_record.record.run for log_record in log_records(stored) if log_record.record is not None)
    return max(counted, key=lambda nonce: counted[nonce], default="")


def _place(key: str) -> tuple[int | None, str | None]:
    """The round and slot in a key."""
    try:
        round_number = keys.round_of(key)
    except Invalid:
        round_number = None
    try:
        return round_number, keys.slot_of(key)
    except Invalid:
        return round_number, None
