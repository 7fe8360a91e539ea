"""Lists the objects of a run whose bytes another record names by a digest, and those of them that are bad. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.observe.doctor.check_chain import references
from skerry.infra.observe.doctor.check_stored_objects import contributions_by_severity
from skerry.runtime.log import keys
from skerry.runtime.mirrors.repair_from_copies import NamedObject

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.observe.doctor.read_log import RunRecords
    from skerry.runtime.log.records import CheckpointManifest


def bad_objects(stored: RunRecords, valid: RunRecords) -> Iterator[NamedObject]:
    """Records that are missing or have another digest, and payloads and parts that are missing or of another length.

    Without payloads that no replica needs. A damaged record hides what it names, so look again when it is mended.
    stored: the records as read. valid: those of them that are of the run.
    """
    digests = _digests(stored)
    for wanted in (*_commits(valid), *_decisions(valid), *_contributions(valid)):
        if digests.get(wanted.key) != wanted.digest:
            yield wanted
    for _, contribution, severity in contributions_by_severity(valid):
        for part in contribution.parts if severity is not None else ():
            key = keys.payload(contribution.round, contribution.slot, part.digest)
            if valid.payloads.get(key) != part.total_bytes:
                yield NamedObject(key=key, part=part)
    for wanted in _parts_of_checkpoints(valid):
        if wanted.part is not None and valid.parts.get(wanted.key) != wanted.part.total_bytes:
            yield wanted


def tensor_objects(valid: RunRecords) -> dict[str, NamedObject]:
    """All payloads and parts of checkpoints that are stored or needed, by key."""
    payloads = [
        NamedObject(key=keys.payload(stored.record.round, stored.record.slot, part.digest), part=part)
        for stored in valid.contributions.values()
        for part in stored.record.parts
    ]
    return {wanted.key: wanted for wanted in (*payloads, *_parts_of_checkpoints(valid))}


def parts_of(manifest: CheckpointManifest, folder: str) -> Iterator[NamedObject]:
    """The parts of a checkpoint in `folder`. They are not needed once its manifest is deleted."""
    owner = keys.checkpoint_manifest(manifest.round, folder)
    for part in manifest.parts:
        yield NamedObject(key=keys.checkpoint_part(manifest.round, part.digest, folder), part=part, owner=owner)


def _parts_of_checkpoints(valid: RunRecords) -> Iterator[NamedObject]:
    for stored in valid.manifests.values():
        yield from parts_of(stored.record, keys.CHECKPOINTS)


def _digests(stored: RunRecords) -> Mapping[str, str]:
    kinds = (stored.commits, stored.decisions, stored.contributions)
    return {key: item.digest for kind in kinds for key, item in kind.items()}


def _commits(valid: RunRecords) -> Iterator[NamedObject]:
    """The commits on whose digest all records agree that name it. One that parses needs two of them."""
    for number, naming in references(valid).items():
        named = {reference.digest for reference in naming}
        if 0 <= number < valid.closed and len(named) == 1:
            key = keys.commit(number)
            if len(naming) > 1 or key not in valid.commits:
                yield NamedObject(key=key, digest=named.pop())


def _decisions(valid: RunRecords) -> Iterator[NamedObject]:
    for stored in valid.commits.values():
        for exchange, digest in enumerate(stored.record.exchanges):
            yield NamedObject(key=keys.decision(stored.record.round, exchange), digest=digest)


def _contributions(valid: RunRecords) -> Iterator[NamedObject]:
    for stored in valid.decisions.values():
        decision = stored.record
        for share in decision.members:
            key = keys.contribution(decision.round, decision.exchange, share.slot)
            yield NamedObject(key=key, digest=share.contribution)
