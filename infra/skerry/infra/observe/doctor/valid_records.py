"""Separates the valid records of a run from the others, which it reports as findings. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from skerry.infra.observe.doctor.findings import finding
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys, records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.observe.doctor.findings import Finding
    from skerry.infra.observe.doctor.read_log import LogRecord, RunRecords


def valid_records(log: RunRecords) -> RunRecords:
    """The records of the run that owns this prefix, without those whose content does not match their key."""
    return log.only(lambda item: item.record.run == log.nonce and key_of(item.record) == item.key)


def check_identity(log: RunRecords) -> Iterator[Finding]:
    """Finds records that do not parse, are stored under another record's key, or belong to another run.

    log: as read, with invalid records.
    """
    if keys.RUN not in log.listed:
        yield finding("missing-record", keys.RUN, "run.json is missing, which defines the run")
    for key, damage in log.unreadable.items():
        # A heartbeat is only a hint, and its replica overwrites it.
        severity = "warning" if key.startswith(keys.HEARTBEATS) else "error"
        round_number, slot = _place(key)
        yield finding("unreadable", key, damage, round_number=round_number, slot=slot, severity=severity)
    foreign: defaultdict[str, list[str]] = defaultdict(list)
    for stored in log.log_records():
        if stored.record.run != log.nonce:
            foreign[stored.record.run].append(stored.key)
        elif (expected := key_of(stored.record)) != stored.key:
            round_number, slot = _place(stored.key)
            text = f"its content belongs at {expected or 'no valid key'}"
            yield finding("misplaced", stored.key, text, round_number=round_number, slot=slot)
    for nonce, stored_keys in foreign.items():
        round_number, slot = _place(stored_keys[0])
        text = f"{len(stored_keys)} records belong to run {nonce}, this prefix to run {log.nonce}"
        yield finding("two-runs", stored_keys[0], text, round_number=round_number, slot=slot)


def check_incarnations(log: RunRecords) -> Iterator[Finding]:
    """Finds incarnations that wrote records but have no membership record; these are numbered without gaps."""
    claimed: defaultdict[str, set[int]] = defaultdict(set)
    for key in log.listed:
        if key.startswith(keys.MEMBERS):
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
