"""Checks the stored payloads and checkpoints of a run: needed and missing ones, wrong lengths, orphans. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from skerry.infra.observe.doctor.findings import finding
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.observe.doctor.findings import Finding, Severity
    from skerry.infra.observe.doctor.read_log import RunRecords
    from skerry.runtime.log.records import CheckpointManifest, Contribution


def check_contribution_payloads(log: RunRecords) -> Iterator[Finding]:
    """Finds payloads that are missing or have another length, where a replica may still have to read them.

    Payloads of rounds that a complete checkpoint covers may be deleted at any time.
    """
    for _, contribution, severity in contributions_by_severity(log):
        if severity is not None:
            yield from _payload(log, contribution, severity)


def contributions_by_severity(log: RunRecords) -> Iterator[tuple[str, Contribution, Severity | None]]:
    """Each contribution with its key and the severity of an unreadable payload; None if it will not be read.

    It will not if a complete checkpoint covers the round, or if the round's decision excludes the contribution.
    """
    covered = max((manifest.round for manifest in _complete(log)), default=0)
    decided = {
        keys.contribution(decision.record.round, decision.record.exchange, share.slot)
        for decision in log.decisions.values()
        for share in decision.record.members
    }
    for key, stored in log.contributions.items():
        contribution = stored.record
        severity: Severity | None = "error" if key in decided else "warning"
        if contribution.round < covered or (contribution.round < log.closed and key not in decided):
            severity = None
        yield key, contribution, severity


def check_orphans(log: RunRecords) -> Iterator[Finding]:
    """Finds payloads of closed rounds that no contribution references. A damaged one may reference any of its slot.

    Reduced units belong to their decision.
    """
    named: set[str] = set()
    unsure: set[tuple[int, str]] = set()
    for key in log.listed:
        if key in log.contributions:
            contribution = log.contributions[key].record
            named |= {keys.payload(contribution.round, contribution.slot, part.digest) for part in contribution.parts}
        elif key.startswith(keys.CONTRIBUTIONS):
            unsure.add((keys.round_of(key), keys.slot_of(key)))
    decided = {(decision.record.round, decision.record.exchange) for decision in log.decisions.values()}
    orphans_at: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    for key in log.payloads:
        try:
            place = keys.round_of(key), keys.slot_of(key)
        except Invalid:  # a foreign object
            continue
        if keys.exchange_of_unit(key) in decided:
            continue
        # In an open round the record is written after the payload.
        if key not in named and place not in unsure and place[0] < log.closed:
            orphans_at[place].append(key)
    for (number, slot), orphans in sorted(orphans_at.items()):
        size = sum(log.payloads[key] for key in orphans)
        text = f"{len(orphans)} payloads ({size} bytes) without a contribution"
        yield finding("orphan", orphans[0], text, round_number=number, slot=slot, severity="info")


def check_checkpoints(log: RunRecords) -> Iterator[Finding]:
    """Finds checkpoint parts that are missing or have another length, and parts without a manifest."""
    manifests = {keys.round_of(key) for key in log.listed if key.startswith(keys.CHECKPOINTS)}
    for stored in log.manifests.values():
        manifest = stored.record
        for key, expected, size in _bad_parts(log, manifest):
            text = f"{_size(size)}, but {stored.key} requires {expected} bytes"
            yield finding("checkpoint-part", key, text, round_number=manifest.round, slot=manifest.writer)
    unfinished: defaultdict[int, list[str]] = defaultdict(list)
    for key in log.parts:
        try:
            number = keys.round_of(key)
        except Invalid:  # a foreign object
            continue
        if number not in manifests:
            unfinished[number].append(key)
    for number, parts in sorted(unfinished.items()):
        text = f"{len(parts)} parts ({sum(log.parts[key] for key in parts)} bytes) and no manifest"
        yield finding("incomplete-checkpoint", parts[0], text, round_number=number, severity="info")


def _payload(log: RunRecords, contribution: Contribution, severity: Severity) -> Iterator[Finding]:
    missing: list[str] = []
    for part in contribution.parts:
        key = keys.payload(contribution.round, contribution.slot, part.digest)
        size = log.payloads.get(key)
        if size is None:
            missing.append(key)
        elif size != part.total_bytes:
            text = f"{_size(size)}, but its contribution requires {part.total_bytes} bytes"
            yield finding(
                "payload-length", key, text, round_number=contribution.round, slot=contribution.slot, severity=severity
            )
    if missing:
        text = f"{len(missing)} of {len(contribution.parts)} payloads of this contribution are missing"
        yield finding(
            "missing-payload",
            missing[0],
            text,
            round_number=contribution.round,
            slot=contribution.slot,
            severity=severity,
        )


def _complete(log: RunRecords) -> Iterator[CheckpointManifest]:
    """The checkpoints of this log that are complete according to the listing."""
    for stored in log.manifests.values():
        manifest = stored.record
        closing = log.commits.get(keys.commit(manifest.round - 1)) if manifest.round else None
        previous = GENESIS if manifest.round == 0 else None if closing is None else closing.digest
        if manifest.commit == previous and not list(_bad_parts(log, manifest)):
            yield manifest


def _bad_parts(log: RunRecords, manifest: CheckpointManifest) -> Iterator[tuple[str, int, int | None]]:
    """Key, expected size and listed size of each part whose size differs from its manifest."""
    for part in manifest.parts:
        key = keys.checkpoint_part(manifest.round, part.digest)
        size = log.parts.get(key)
        if size != part.total_bytes:
            yield key, part.total_bytes, size


def _size(size: int | None) -> str:
    return "it is missing" if size is None else f"it has {size} bytes"
