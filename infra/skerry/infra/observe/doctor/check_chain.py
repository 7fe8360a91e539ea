"""Checks the chain of a run's records: no missing rounds, no broken references, no changed records. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.infra.observe.doctor.findings import finding
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.observe.doctor.findings import Finding, Kind
    from skerry.infra.observe.doctor.read_log import RunRecords
    from skerry.runtime.log.records import Commit, Decision


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A reference to a commit by its digest, from the record at `key`."""

    key: str
    round: int
    slot: str | None
    digest: str
    kind: Kind = "broken-link"


def check_gaps(log: RunRecords) -> Iterator[Finding]:
    """Finds rounds without a commit before rounds that have one."""
    decided = {keys.round_of(key) for key in log.listed if key.startswith(keys.EXCHANGES)}
    for number in range(log.closed):
        key = keys.commit(number)
        if key not in log.listed:
            state = "decided but not closed" if number in decided else "not closed"
            text = f"round {number} is {state}, but round {log.closed - 1} is closed"
            yield finding("gap", key, text, round_number=number)


def check_links(log: RunRecords) -> Iterator[Finding]:
    """Finds references to a commit that is not in the log. If all of them agree, the commit itself has changed."""
    by_commit = references(log)
    changed: set[str] = set()
    for number, naming in by_commit.items():
        key = keys.commit(number) if number >= 0 else ""
        named = {reference.digest for reference in naming}
        if key in log.commits and len(naming) > 1 and len(named) == 1 and log.commits[key].digest not in named:
            changed.add(key)
            sources = f"{len(naming)} records ({naming[0].key} and others)"
            text = f"it has changed: digest={log.commits[key].digest}, but {sources} reference {named.pop()}"
            yield finding("broken-link", key, text, round_number=number)
    for number, naming in by_commit.items():
        # The references of a changed commit need no finding of their own.
        unexplained = [reference for reference in naming if reference.key not in changed]
        key = keys.commit(number) if number >= 0 else "the start of the log"
        if number >= log.closed and unexplained:
            text = f"{unexplained[0].key} references the commit of round {number}, which is not closed"
            yield finding("gap", key, text, round_number=number)
        elif key not in changed and (number < 0 or key in log.commits):
            digest = log.commits[key].digest if number >= 0 else GENESIS
            for reference in unexplained:
                if reference.digest != digest:
                    text = f"it references commit {reference.digest}, but {key} is {digest}"
                    yield finding(
                        reference.kind, reference.key, text, round_number=reference.round, slot=reference.slot
                    )


def check_commits(log: RunRecords) -> Iterator[Finding]:
    """Finds commits whose decisions are missing, changed or contradict them, and decisions without a commit."""
    for stored in log.commits.values():
        commit = stored.record
        decisions: list[Decision] = []
        for exchange, digest in enumerate(commit.exchanges):
            key = keys.decision(commit.round, exchange)
            decision = log.decisions.get(key)
            if key not in log.listed:
                text = f"it is missing, but {stored.key} references it"
                yield finding("missing-record", key, text, round_number=commit.round)
            elif decision is None:
                continue  # reported already: damaged, misplaced or of another run
            elif decision.digest != digest:
                text = f"it has changed: digest={decision.digest}, but {stored.key} references {digest}"
                yield finding("broken-link", key, text, round_number=commit.round)
            else:
                decisions.append(decision.record)
        yield from _check_participants(stored.key, commit, decisions)
        yield from _check_work(log, stored.key, commit, decisions)
    for key, stored in log.decisions.items():
        commit = log.commits.get(keys.commit(stored.record.round))
        if commit is not None and stored.record.exchange >= len(commit.record.exchanges):
            text = f"{commit.key} lists {len(commit.record.exchanges)} exchanges, without this one"
            yield finding("stray-decision", key, text, round_number=stored.record.round)


def check_contributions(log: RunRecords) -> Iterator[Finding]:
    """Finds contributions in a decision that are missing or were replaced."""
    for stored in log.decisions.values():
        decision = stored.record
        for share in decision.members:
            key = keys.contribution(decision.round, decision.exchange, share.slot)
            contribution = log.contributions.get(key)
            if key not in log.listed:
                text = f"it is missing, but {stored.key} references it"
                yield finding("missing-record", key, text, round_number=decision.round, slot=share.slot)
            elif contribution is not None and contribution.digest != share.contribution:
                text = (
                    f"it was replaced: digest={contribution.digest}, but {stored.key} references {share.contribution}"
                )
                yield finding("replaced-record", key, text, round_number=decision.round, slot=share.slot)


def _check_participants(key: str, commit: Commit, decisions: Sequence[Decision]) -> Iterator[Finding]:
    if not decisions or len(decisions) != len(commit.exchanges):
        return
    participants = min(len(decision.members) for decision in decisions)
    if participants != commit.participants:
        text = f"it records {commit.participants} participants, but its decisions {participants}"
        yield finding("wrong-commit", key, text, round_number=commit.round)


def _check_work(log: RunRecords, key: str, commit: Commit, decisions: Sequence[Decision]) -> Iterator[Finding]:
    """Check that a commit's work is that of the previous commit plus that of this round's contributions."""
    before = log.commits.get(keys.commit(commit.round - 1)) if commit.round else None
    if not decisions or len(decisions) != len(commit.exchanges) or (commit.round and before is None):
        return
    if not commit.work:
        return  # a run that is older than the counting of work
    trained: list[float] = []
    for decision in decisions:
        listed = [keys.contribution(decision.round, decision.exchange, share.slot) for share in decision.members]
        if any(key_ not in log.contributions for key_ in listed):
            return  # reported already
        trained.append(math.fsum(log.contributions[key_].record.work for key_ in listed))
    work = (0.0 if before is None else before.record.work) + min(trained)
    if work != commit.work:
        text = f"it records {commit.work:g} replica rounds of work so far, but its contributions {work:g}"
        yield finding("wrong-commit", key, text, round_number=commit.round)


def references(log: RunRecords) -> dict[int, list[Reference]]:
    """All references to commits, by the round of the commit; -1 is the start of the log."""
    chained = [
        *((commit.key, commit.record.round, None, commit.record.previous) for commit in log.commits.values()),
        *((decision.key, decision.record.round, None, decision.record.base) for decision in log.decisions.values()),
        *(
            (contribution.key, contribution.record.round, contribution.record.slot, contribution.record.base)
            for contribution in log.contributions.values()
        ),
        *(
            (manifest.key, manifest.record.round, manifest.record.writer, manifest.record.commit)
            for manifest in log.manifests.values()
        ),
    ]
    by_commit: defaultdict[int, list[Reference]] = defaultdict(list)
    for key, number, slot, digest in chained:
        by_commit[number - 1].append(Reference(key=key, round=number, slot=slot, digest=digest))
    for key, receipt in log.receipts.items():
        number, slot, digest = receipt.record.round, receipt.record.slot, receipt.record.commit
        by_commit[number].append(Reference(key=key, round=number, slot=slot, digest=digest, kind="foreign-receipt"))
    return by_commit
