"""Walks the chain of a run's records: every link must hold, nothing may be missing, nothing may have changed. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.infra.observe.findings import finding
from skerry.runtime import keys
from skerry.runtime.records import GENESIS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.observe.case import Case
    from skerry.infra.observe.findings import Finding, Kind
    from skerry.runtime.records import Commit, Decision


@dataclass(frozen=True, kw_only=True)
class _Reference:
    """A record (`key`, of `round` and `slot`) that names a commit by its digest."""

    key: str
    round: int
    slot: str | None
    digest: str
    kind: Kind = "broken-link"


def gaps(case: Case) -> Iterator[Finding]:
    """Rounds without a commit below rounds that have one."""
    decided = {keys.round_of(key) for key in case.evidence.decisions}
    for number in range(case.closed):
        key = keys.commit(number)
        if key not in case.evidence.commits:
            before = "is decided and" if number in decided else "is"
            text = f"round {number} {before} not closed, and round {case.closed - 1} is"
            yield finding("gap", key, text, round_number=number)


def links(case: Case) -> Iterator[Finding]:
    """Records that name another commit than the log has. Where all agree on another one, the commit has changed."""
    references = _references(case)
    changed: set[str] = set()
    for number, naming in references.items():
        key = keys.commit(number) if number >= 0 else ""
        named = {one.digest for one in naming}
        if key in case.commits and len(naming) > 1 and len(named) == 1 and case.commits[key].digest not in named:
            changed.add(key)
            names = f"{len(naming)} records ({naming[0].key} and others)"
            text = f"it has changed: {names} name it {named.pop()}, it is {case.commits[key].digest}"
            yield finding("broken-link", key, text, round_number=number)
    for number, naming in references.items():
        # What a changed commit says itself needs no finding of its own.
        believed = [one for one in naming if one.key not in changed]
        key = keys.commit(number) if number >= 0 else "the beginning"
        if number >= case.closed and believed:
            text = f"{believed[0].key} builds on the commit of round {number}, which is not closed"
            yield finding("gap", key, text, round_number=number)
        elif key not in changed and (number < 0 or key in case.commits):
            found = case.commits[key].digest if number >= 0 else GENESIS
            for one in believed:
                if one.digest != found:
                    text = f"it builds on commit {one.digest}, {key} is {found}"
                    yield finding(one.kind, one.key, text, round_number=one.round, slot=one.slot)


def commits(case: Case) -> Iterator[Finding]:
    """Commits whose decisions are missing, have changed, or lead to another commit; decisions that none names."""
    for one in case.commits.values():
        commit = one.record
        decisions: list[Decision] = []
        for exchange, digest in enumerate(commit.exchanges):
            key = keys.decision(commit.round, exchange)
            found = case.evidence.decisions.get(key)
            if found is None:
                text = f"{one.key} closes the round with this decision, and it is gone"
                yield finding("missing-record", key, text, round_number=commit.round)
            elif key not in case.decisions:
                continue  # told already: damaged, misplaced or of another run
            elif found.digest != digest:
                text = f"it has changed: {one.key} names it {digest}, it is {found.digest}"
                yield finding("broken-link", key, text, round_number=commit.round)
            else:
                decisions.append(case.decisions[key].record)
        yield from _function_of(one.key, commit, decisions)
        yield from _sum_of(case, one.key, commit, decisions)
    for key, one in case.decisions.items():
        commit = case.commits.get(keys.commit(one.record.round))
        if commit is not None and one.record.exchange >= len(commit.record.exchanges):
            text = f"{commit.key} closes the round with {len(commit.record.exchanges)} exchanges, without this one"
            yield finding("stray-decision", key, text, round_number=one.record.round)


def contributions(case: Case) -> Iterator[Finding]:
    """Contributions that a decision lists and that are gone, or are not the ones that were decided."""
    for one in case.decisions.values():
        decision = one.record
        for share in decision.members:
            key = keys.contribution(decision.round, decision.exchange, share.slot)
            found = case.evidence.contributions.get(key)
            if found is None:
                text = f"{one.key} lists this contribution, and it is gone"
                yield finding("missing-record", key, text, round_number=decision.round, slot=share.slot)
            elif key in case.contributions and found.digest != share.contribution:
                text = f"it is not what was decided: {one.key} lists {share.contribution}, it is {found.digest}"
                yield finding("replaced-record", key, text, round_number=decision.round, slot=share.slot)


def _function_of(key: str, commit: Commit, decisions: Sequence[Decision]) -> Iterator[Finding]:
    if not decisions or len(decisions) != len(commit.exchanges):
        return
    participants = min(len(decision.members) for decision in decisions)
    if participants != commit.participants:
        text = f"it says {commit.participants} participants, its decisions have {participants}"
        yield finding("wrong-commit", key, text, round_number=commit.round)


def _sum_of(case: Case, key: str, commit: Commit, decisions: Sequence[Decision]) -> Iterator[Finding]:
    """The work that a commit tells of is that of the commit before and of this round's contributions."""
    before = case.commits.get(keys.commit(commit.round - 1)) if commit.round else None
    if not decisions or len(decisions) != len(commit.exchanges) or (commit.round and before is None):
        return
    if not commit.work:
        return  # of a run that was begun before it was counted
    trained: list[float] = []
    for decision in decisions:
        listed = [keys.contribution(decision.round, decision.exchange, share.slot) for share in decision.members]
        if any(one not in case.contributions for one in listed):
            return  # told already
        trained.append(math.fsum(case.contributions[one].record.work for one in listed))
    work = (0.0 if before is None else before.record.work) + min(trained)
    if work != commit.work:
        text = f"it says that {commit.work:g} rounds of one replica were trained so far, its contributions say {work:g}"
        yield finding("wrong-commit", key, text, round_number=commit.round)


def _references(case: Case) -> dict[int, list[_Reference]]:
    """Every record that names a commit, by the round that this commit closes; -1 is the beginning."""
    chained = [
        *((one.key, one.record.round, None, one.record.previous) for one in case.commits.values()),
        *((one.key, one.record.round, None, one.record.base) for one in case.decisions.values()),
        *((one.key, one.record.round, one.record.slot, one.record.base) for one in case.contributions.values()),
        *((one.key, one.record.round, one.record.writer, one.record.commit) for one in case.manifests.values()),
    ]
    found: defaultdict[int, list[_Reference]] = defaultdict(list)
    for key, number, slot, digest in chained:
        found[number - 1].append(_Reference(key=key, round=number, slot=slot, digest=digest))
    for key, one in case.receipts.items():
        number, slot, digest = one.record.round, one.record.slot, one.record.commit
        found[number].append(_Reference(key=key, round=number, slot=slot, digest=digest, kind="foreign-receipt"))
    return found
