"""Finds stray records: of rounds that the log has not reached, or of its open round, where replicas refuse them. Pure.

Replicas never write these; a compromised one can, and no replica may overwrite or delete them. A round is reached if
contributions back its commit, as `RunLog.is_backed` says, or if receipts of two slots are there: a record that is only
damaged or lost is not stray (runtime decision 0050).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.doctor.findings import finding
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.observe.doctor.findings import Finding
    from skerry.infra.observe.doctor.read_log import RunRecords

_CLOSING: Final = (keys.COMMITS, keys.RECEIPTS)
"""Written when a round is closed."""
_FOLDERS: Final = (*_CLOSING, keys.EXCHANGES, keys.CONTRIBUTIONS, keys.CHECKPOINTS)
_OWN: Final = (keys.CONTRIBUTIONS, keys.RECEIPTS)
"""A role for each slot may create these for its own slot only."""
# One replica alone can write its own receipts, of any round.
_WITNESSES: Final = 2


def find_stray(log: RunRecords) -> dict[str, str]:
    """The keys of the stray records, in order, and why each is one. log: its valid records, and all listed keys."""
    by_round: defaultdict[int, set[str]] = defaultdict(set)
    for stored in log.receipts.values():
        by_round[stored.record.round].add(stored.record.slot)
    slots = {keys.slot_of(key) for key in log.listed if key.startswith(keys.MEMBERS)}
    witnessed = {number for number, names in by_round.items() if len(names) >= min(_WITNESSES, max(1, len(slots)))}
    # A script may ask for fewer members than run.json. A decision that no commit names proves nothing.
    named = {
        digest for item in log.commits.values() if item.record.round in witnessed for digest in item.record.exchanges
    }
    sizes = [len(item.record.members) for item in log.decisions.values() if item.digest in named]
    least = min([1 if log.run is None else log.run.min_replicas, *sizes])
    closed = {item.record.round for item in log.commits.values()} | witnessed
    head = 1 + next((n for n in sorted(closed, reverse=True) if n in witnessed or _is_backed(log, n, least)), -1)
    return {key: why for key in sorted(log.listed) if (why := _why_stray(log, key, head, least)) is not None}


def without_stray(log: RunRecords, stray: Mapping[str, str]) -> RunRecords:
    """The log as if these records were not there."""
    unreadable = {key: why for key, why in log.unreadable.items() if key not in stray}
    return replace(
        log.only(lambda item: item.key not in stray), unreadable=unreadable, listed=log.listed - stray.keys()
    )


def check_stray(log: RunRecords, stray: Mapping[str, str]) -> Iterator[Finding]:
    """A finding for the stray records of each kind: the first of them, and how many there are."""
    for folder in _FOLDERS:
        first, *others = [key for key in stray if key.startswith(folder)] or [""]
        if first:
            further = f"; so are {len(others)} more in {folder}" if others else ""
            text = f"{stray[first]}{_author(log, first)}{further}"
            slot = keys.slot_of(first) if folder in _OWN else None
            yield finding("stray-record", first, text, round_number=keys.round_of(first), slot=slot)


def _author(log: RunRecords, key: str) -> str:
    """The slot that the record names; any replica can name any, except in its own contributions and receipts."""
    if key in log.decisions:
        return f"; it names {log.decisions[key].record.proposer} as its author"
    if key in log.manifests:
        return f"; it names {log.manifests[key].record.writer} as its author"
    if key.startswith(_OWN):
        return f"; only {keys.slot_of(key)}, or a role of its whole group, may create it"
    return ""


def _why_stray(log: RunRecords, key: str, head: int, least: int) -> str | None:
    if not key.startswith(_FOLDERS) or (number := keys.round_of(key)) < head:
        return None
    if number > head:
        return f"the log has not reached this round: round {head} is open"
    return _why_refused(log, key, head, least)


def _why_refused(log: RunRecords, key: str, head: int, least: int) -> str | None:
    """The reason for which replicas refuse a record of the open round `head`; None if they can use it."""
    if key.startswith(_CLOSING):
        return f"round {head} is open: contributions of {least} replicas do not back it"
    if key.startswith(keys.EXCHANGES):
        why = _refused_decision(log, key, least) or _unusable(log, key)
        return None if why is None else f"replicas refuse this decision: {why}"
    if key == keys.checkpoint_manifest(0) and key not in log.manifests and not _has_contributions(log):
        return "replicas cannot start: it is no checkpoint of this run"
    base = _base(log, head)
    if key not in log.contributions or base in {None, log.contributions[key].record.base}:
        return None
    return f"replicas refuse this contribution: {_other_base(log.contributions[key].record.base, base)}"


def _has_contributions(log: RunRecords) -> bool:
    """True once replicas train from checkpoint 0: another one would be another run."""
    return any(key.startswith(keys.CONTRIBUTIONS) for key in log.listed)


def _refused_decision(log: RunRecords, key: str, least: int) -> str | None:
    """The reason for which replicas refuse a decision of the open round; None if they can use it."""
    if key not in log.decisions:
        return "it does not parse, or does not belong here"
    decision = log.decisions[key].record
    base = _base(log, decision.round)
    if base not in {None, decision.base}:
        return _other_base(decision.base, base)
    if not decision.has_quorum(least):
        members = ",".join(share.slot for share in decision.members)
        return f"it has fewer members than min_replicas={least}, or lists one twice: {members[:500]}"
    for share in decision.members:
        contribution = log.contributions.get(keys.contribution(decision.round, decision.exchange, share.slot))
        if contribution is None or contribution.digest != share.contribution:
            return f"the log does not have the contribution of {share.slot} that it lists"
        if contribution.record.index != decision.index:
            return f"it averages other tensors than {share.slot} has contributed"
    return None


def _unusable(log: RunRecords, key: str) -> str | None:
    """The reason for which no replica can apply a decision that seems right; None if the records show none."""
    decision = log.decisions[key].record
    if decision.settings is not None and log.settings is not None:
        changes = log.settings.changes
        digests = (*(change.previous for change in changes[1:]), log.settings.last_digest)
        begins = {digest: change.from_round for digest, change in zip(digests, changes, strict=False)}
        if begins.get(decision.settings, decision.round + 1) > decision.round:
            return f"it names settings that do not exist, or that are of a later round: {decision.settings[:12]}"
    counts = {
        share.slot: len(
            log.contributions[keys.contribution(decision.round, decision.exchange, share.slot)].record.parts
        )
        for share in decision.members
    }
    if len(set(counts.values())) > 1:  # the tensors, which are the same, determine it
        return f"it lists contributions with different numbers of parts: {counts}"[:500]
    return None


def _other_base(base: str, right: str | None) -> str:
    return f"it builds on commit {base[:12]}, the round on {(right or '')[:12]}"


def _base(log: RunRecords, number: int) -> str | None:
    """The digest that records of a round build on; None if the commit before it is damaged."""
    before = log.commits.get(keys.commit(number - 1)) if number else None
    return GENESIS if number == 0 else None if before is None else before.digest


def _is_backed(log: RunRecords, number: int, least: int) -> bool:
    """True if a commit follows from decisions that replicas can use, and from the commit before it."""
    commit = log.commits[keys.commit(number)].record
    base = _base(log, number)
    if not commit.exchanges or base not in {None, commit.previous}:
        return False
    sizes: list[int] = []
    for exchange, digest in enumerate(commit.exchanges):
        key = keys.decision(number, exchange)
        decision = log.decisions.get(key)
        if decision is None or decision.digest != digest or decision.record.base != commit.previous:
            return False
        if _refused_decision(log, key, least) is not None:
            return False
        sizes.append(len(decision.record.members))
    return commit.participants == min(sizes)
