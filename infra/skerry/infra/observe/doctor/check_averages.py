"""Recomputes the averages whose contributions are still stored, and compares them with commits and published units.

Needs torch, which is imported only here; without it a finding says what was left out. Never writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.observe.doctor.findings import finding
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.observe.doctor.findings import Finding
    from skerry.infra.observe.doctor.read_log import RunRecords, StoredRecord
    from skerry.runtime.log.records import Commit, Contribution, Decision
    from skerry.runtime.store import Store


def check_averages(store: Store, log: RunRecords) -> Iterator[Finding]:
    """Finds commits that name a wrong average, and units that their owner has computed wrongly.

    Rounds whose payloads are collected or damaged are left out. Raises what the store raises.
    """
    exchanges = [(commit, number) for commit in log.commits.values() for number in range(len(commit.record.exchanges))]
    exchanges = [(commit, number) for commit, number in exchanges if _members(log, commit, number)]
    if not exchanges:
        return
    try:
        from skerry.runtime.recompute_round_average import recompute  # noqa: PLC0415  the operator's machine has no torch
    except ImportError as error:
        text = f"the averages of {len(exchanges)} exchanges were not recomputed: it needs torch ({error})"
        yield finding("not-recomputed", exchanges[0][0].key, text, severity="info")
        return
    for commit, number in exchanges:
        decision = log.decisions[keys.decision(commit.record.round, number)]
        contributions = _members(log, commit, number)
        try:
            average, wrong = recompute(
                store, decision.record, decision.digest, contributions, log.payloads.__contains__
            )
        except (Corrupt, Invalid):  # reported with the object that is damaged
            continue
        for unit in wrong:
            yield finding("wrong-unit", unit.key, unit.why, round_number=commit.record.round, slot=unit.slot)
        yield from _compare(commit, number, average)


def _compare(commit: StoredRecord[Commit], number: int, average: str) -> Iterator[Finding]:
    named = commit.record.averages
    if named is not None and named[number : number + 1] != (average,):
        text = f"it names another average of exchange {number} than the contributions give: {average}"
        yield finding("wrong-average", commit.key, text, round_number=commit.record.round)


def _members(log: RunRecords, commit: StoredRecord[Commit], number: int) -> Mapping[str, Contribution]:
    """The contributions to an exchange by slot; none if the decision, a record or a payload is gone."""
    decision: StoredRecord[Decision] | None = log.decisions.get(keys.decision(commit.record.round, number))
    if decision is None or decision.digest != commit.record.exchanges[number]:
        return {}
    members: dict[str, Contribution] = {}
    for share in decision.record.members:
        stored = log.contributions.get(keys.contribution(commit.record.round, number, share.slot))
        if stored is None or stored.digest != share.contribution:
            return {}
        contribution = stored.record
        names = [keys.payload(contribution.round, contribution.slot, part.digest) for part in contribution.parts]
        if any(name not in log.payloads for name in names):
            return {}
        members[share.slot] = contribution
    return members
