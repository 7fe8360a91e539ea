"""Sorts evidence: what can be believed, by what it speaks of, and what cannot be believed at all. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from skerry.infra.observe.findings import finding
from skerry.runtime import keys, records
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.observe.evidence import Evidence, Found
    from skerry.infra.observe.findings import Finding

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


class Sealed(NamedTuple, Generic[L]):
    """A record that can be believed, and what other records name it by."""

    key: str
    digest: str
    record: L


@dataclass(frozen=True, kw_only=True)
class Case:
    """The records of one run that say what their keys say, by key. `evidence` knows what else is there."""

    evidence: Evidence
    nonce: str
    members: Mapping[str, Sealed[records.Member]]
    heartbeats: Mapping[str, Sealed[records.Heartbeat]]
    contributions: Mapping[str, Sealed[records.Contribution]]
    decisions: Mapping[str, Sealed[records.Decision]]
    commits: Mapping[str, Sealed[records.Commit]]
    receipts: Mapping[str, Sealed[records.Receipt]]
    manifests: Mapping[str, Sealed[records.CheckpointManifest]]
    outcomes: Mapping[str, Sealed[records.Outcome]]

    @property
    def closed(self) -> int:
        """The first round after the last commit that is there."""
        return max((keys.round_of(key) + 1 for key in self.evidence.commits), default=0)


def open_case(evidence: Evidence) -> Case:
    """The case of the run that this prefix belongs to: the one of run.json, or else of most records."""
    nonce = _nonce(evidence)

    def believed(found: Mapping[str, Found[L]]) -> dict[str, Sealed[L]]:
        return {
            key: Sealed(key, one.digest, one.record)
            for key, one in found.items()
            if one.record is not None and one.record.run == nonce and key_of(one.record) == key
        }

    return Case(
        evidence=evidence,
        nonce=nonce,
        members=believed(evidence.members),
        heartbeats=believed(evidence.heartbeats),
        contributions=believed(evidence.contributions),
        decisions=believed(evidence.decisions),
        commits=believed(evidence.commits),
        receipts=believed(evidence.receipts),
        manifests=believed(evidence.manifests),
        outcomes=believed(evidence.outcomes),
    )


def identity(case: Case) -> Iterator[Finding]:
    """Records that do not parse, that stand under another's key, or that another run wrote."""
    evidence = case.evidence
    if evidence.run is None:
        yield finding("missing-record", keys.RUN, "run.json is gone, which says what the run is")
    elif evidence.run.damage is not None:
        yield finding("unreadable", keys.RUN, evidence.run.damage)
    foreign: defaultdict[str, list[Found[LogRecord]]] = defaultdict(list)
    for one in log_records(evidence):
        if one.record is None:
            # A heartbeat is a hint, and its owner replaces it.
            severity = "warning" if one.key.startswith(keys.HEARTBEATS) else "error"
            round_number, slot = _place(one.key)
            text = one.damage or "it does not parse"
            yield finding("unreadable", one.key, text, round_number=round_number, slot=slot, severity=severity)
        elif one.record.run != case.nonce:
            foreign[one.record.run].append(one)
        elif (said := key_of(one.record)) != one.key:
            round_number, slot = _place(one.key)
            text = f"this record is the one of {said or 'no possible key'}"
            yield finding("misplaced", one.key, text, round_number=round_number, slot=slot)
    for nonce, found in foreign.items():
        round_number, slot = _place(found[0].key)
        text = f"{len(found)} records are of run {nonce}, this prefix is of run {case.nonce}"
        yield finding("two-runs", found[0].key, text, round_number=round_number, slot=slot)


def incarnations(case: Case) -> Iterator[Finding]:
    """Starts of replicas that have written and have no claim; claims are numbered without gaps."""
    claimed: defaultdict[str, set[int]] = defaultdict(set)
    for key in case.evidence.members:
        claimed[keys.slot_of(key)].add(keys.incarnation_of(key))
    named: dict[tuple[str, int], str] = {}
    for found in (case.heartbeats, case.contributions, case.receipts, case.outcomes):
        for one in found.values():
            named.setdefault((one.record.slot, one.record.incarnation), one.key)
    for slot, numbers in claimed.items():
        for number in range(max(numbers)):
            named.setdefault((slot, number), f"{keys.members_of(slot)}{max(numbers):06d}.json")
    for (slot, number), key in sorted(named.items(), key=lambda item: (keys.slot_order(item[0][0]), item[0][1])):
        if number not in claimed[slot]:
            text = f"incarnation {number} of {slot} has no record, and {key} says that there was one"
            yield finding("incarnation-gap", keys.member(slot, number), text, slot=slot)


def log_records(evidence: Evidence) -> Iterator[Found[LogRecord]]:
    """Every record but run.json."""
    yield from evidence.commits.values()
    yield from evidence.decisions.values()
    yield from evidence.contributions.values()
    yield from evidence.members.values()
    yield from evidence.receipts.values()
    yield from evidence.manifests.values()
    yield from evidence.outcomes.values()
    yield from evidence.pins.values()
    yield from evidence.heartbeats.values()


def key_of(record: LogRecord) -> str | None:
    """The key that a record belongs under; None if there can be none."""
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


def _nonce(evidence: Evidence) -> str:
    if evidence.run is not None and isinstance(evidence.run.record, records.Run):
        return evidence.run.record.nonce
    counted = Counter(one.record.run for one in log_records(evidence) if one.record is not None)
    return max(counted, key=lambda nonce: counted[nonce], default="")


def _place(key: str) -> tuple[int | None, str | None]:
    """Round and slot as a key names them."""
    try:
        round_number = keys.round_of(key)
    except Invalid:
        round_number = None
    try:
        return round_number, keys.slot_of(key)
    except Invalid:
        return round_number, None
