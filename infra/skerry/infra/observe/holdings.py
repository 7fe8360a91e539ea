"""What a run keeps: payloads that somebody may still need, complete checkpoints, and bytes that nobody names. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from skerry.infra.observe.findings import finding
from skerry.runtime import keys
from skerry.runtime.errors import Invalid
from skerry.runtime.records import GENESIS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.observe.case import Case
    from skerry.infra.observe.findings import Finding, Severity
    from skerry.runtime.records import CheckpointManifest, Contribution


def payloads(case: Case) -> Iterator[Finding]:
    """Bytes of contributions that are missing or of another length, where somebody may still have to read them.

    Payloads of rounds that a complete checkpoint covers may be deleted at any time.
    """
    for _, offer, severity in offers(case):
        if severity is not None:
            yield from _payload(case, offer, severity)


def offers(case: Case) -> Iterator[tuple[str, Contribution, Severity | None]]:
    """Each contribution with its key, and how bad it is if its bytes cannot be read; None if nobody will read them.

    Nobody does where a complete checkpoint covers the round, or its decision has left them out.
    """
    covered = max((manifest.round for manifest in _complete(case)), default=0)
    decided = {
        keys.contribution(one.record.round, one.record.exchange, share.slot)
        for one in case.decisions.values()
        for share in one.record.members
    }
    for key, one in case.contributions.items():
        offer = one.record
        severity: Severity | None = "error" if key in decided else "warning"
        if offer.round < covered or (offer.round < case.closed and key not in decided):
            severity = None
        yield key, offer, severity


def orphans(case: Case) -> Iterator[Finding]:
    """Payloads of closed rounds that no contribution names. One that cannot be read may name any of its slot."""
    named: set[str] = set()
    unsure: set[tuple[int, str]] = set()
    for key in case.evidence.contributions:
        if key in case.contributions:
            offer = case.contributions[key].record
            named |= {keys.payload(offer.round, offer.slot, part.digest) for part in offer.parts}
        else:
            unsure.add((keys.round_of(key), keys.slot_of(key)))
    lost: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    for key in case.evidence.payloads:
        try:
            place = keys.round_of(key), keys.slot_of(key)
        except Invalid:  # an object that is not ours
            continue
        # In an open round the record comes after the bytes.
        if key not in named and place not in unsure and place[0] < case.closed:
            lost[place].append(key)
    for (number, slot), found in sorted(lost.items()):
        size = sum(case.evidence.payloads[key] for key in found)
        text = f"{len(found)} payloads ({size} bytes) that no contribution names"
        yield finding("orphan", found[0], text, round_number=number, slot=slot, severity="info")


def checkpoints(case: Case) -> Iterator[Finding]:
    """Parts that a manifest names and that are missing or of another length; parts without a manifest."""
    manifests = {keys.round_of(key) for key in case.evidence.manifests}
    for one in case.manifests.values():
        manifest = one.record
        for key, expected, found in _bad_parts(case, manifest):
            text = f"{one.key} names this part with {expected} bytes, {_size(found)}"
            yield finding("checkpoint-part", key, text, round_number=manifest.round, slot=manifest.writer)
    unfinished: defaultdict[int, list[str]] = defaultdict(list)
    for key in case.evidence.parts:
        try:
            number = keys.round_of(key)
        except Invalid:  # an object that is not ours
            continue
        if number not in manifests:
            unfinished[number].append(key)
    for number, found in sorted(unfinished.items()):
        text = f"{len(found)} parts ({sum(case.evidence.parts[key] for key in found)} bytes) and no manifest"
        yield finding("incomplete-checkpoint", found[0], text, round_number=number, severity="info")


def _payload(case: Case, offer: Contribution, severity: Severity) -> Iterator[Finding]:
    missing: list[str] = []
    for part in offer.parts:
        key = keys.payload(offer.round, offer.slot, part.digest)
        size = case.evidence.payloads.get(key)
        if size is None:
            missing.append(key)
        elif size != part.total_bytes:
            text = f"it must have {part.total_bytes} bytes, {_size(size)}"
            yield finding("payload-length", key, text, round_number=offer.round, slot=offer.slot, severity=severity)
    if missing:
        text = f"{len(missing)} of {len(offer.parts)} payloads of this contribution are gone"
        yield finding("missing-payload", missing[0], text, round_number=offer.round, slot=offer.slot, severity=severity)


def _complete(case: Case) -> Iterator[CheckpointManifest]:
    """Checkpoints of this log that can be loaded as far as their listing tells."""
    for one in case.manifests.values():
        manifest = one.record
        closing = case.commits.get(keys.commit(manifest.round - 1)) if manifest.round else None
        previous = GENESIS if manifest.round == 0 else None if closing is None else closing.digest
        if manifest.commit == previous and not list(_bad_parts(case, manifest)):
            yield manifest


def _bad_parts(case: Case, manifest: CheckpointManifest) -> Iterator[tuple[str, int, int | None]]:
    """Key, expected and found size of each part that is not as its manifest says."""
    for part in manifest.parts:
        key = keys.checkpoint_part(manifest.round, part.digest)
        size = case.evidence.parts.get(key)
        if size != part.total_bytes:
            yield key, part.total_bytes, size


def _size(found: int | None) -> str:
    return "and it is gone" if found is None else f"it has {found}"
