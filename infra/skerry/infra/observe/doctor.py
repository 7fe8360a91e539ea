"""`skerry doctor`: is this run's log whole, and do its replicas agree? `examine` judges, purely; `visit` reads.

Looks at records, listings and lengths; the bytes of payloads are verified by whoever uses them. Never writes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, Literal

from skerry.infra.observe import case as cases
from skerry.infra.observe import chain, holdings
from skerry.infra.observe.evidence import gather
from skerry.infra.observe.findings import Examination, finding
from skerry.runtime import keys
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from skerry.infra.observe.case import Case
    from skerry.infra.observe.evidence import Evidence
    from skerry.infra.observe.findings import Finding, Severity
    from skerry.runtime.records import Receipt
    from skerry.runtime.store import Store

Held = Literal["averages", "state"]

_CHECKS: Final = (
    cases.identity,
    cases.incarnations,
    chain.gaps,
    chain.links,
    chain.commits,
    chain.contributions,
    holdings.payloads,
    holdings.orphans,
    holdings.checkpoints,
)
_RANK: Final[Mapping[Severity, int]] = {"error": 0, "warning": 1, "info": 2}


def visit(store: Store) -> Examination:
    """Examine the run under this prefix; what looks broken is looked at twice, because a run may go on meanwhile.

    Raises SkerryError if there is no run, and what the store raises.
    """
    first = examine(gather(store))
    if not first.records and not first.findings:
        raise SkerryError(f"no run at {store.uri}; name a spec, or the URI of a run's own prefix")
    if first.ok:
        return first
    second = examine(gather(store))
    known = {one.place for one in first.findings}
    lasting = tuple(one for one in second.findings if one.place in known)
    return _examination(second, lasting)


def examine(evidence: Evidence) -> Examination:
    """Everything that is wrong with a run, or worth knowing."""
    records = sum(1 for _ in cases.log_records(evidence)) + (evidence.run is not None)
    case = cases.open_case(evidence)
    found = [] if not records else [one for check in _CHECKS for one in check(case)]
    if records:
        found += _disagreements(case)
    run = None if evidence.run is None or evidence.run.record is None else evidence.run.record.name
    blank = Examination(ok=True, uri=evidence.uri, run=run, closed=case.closed, records=records)
    return _examination(blank, found)


def _examination(of: Examination, findings: Sequence[Finding]) -> Examination:
    ordered = sorted(
        findings, key=lambda one: (_RANK[one.severity], -1 if one.round is None else one.round, one.kind, one.key)
    )
    ok = all(one.severity != "error" for one in ordered)
    return Examination(ok=ok, uri=of.uri, run=of.run, closed=of.closed, records=of.records, findings=tuple(ordered))


def _disagreements(case: Case) -> Iterator[Finding]:
    """For each slot whose receipts differ from most others': the first such round, and whether it agrees again."""
    for held in ("averages", "state"):
        differ: defaultdict[str, dict[int, str]] = defaultdict(dict)
        latest: dict[str, int] = {}
        for number, receipts in sorted(_by_round(case).items()):
            for group in _comparable(receipts):
                if len(group) > 1:
                    latest |= dict.fromkeys(group, number)
                for slot, why in _outvoted(case, number, group, held).items():
                    differ[slot][number] = why
        for slot in sorted(differ, key=keys.slot_order):
            yield _disagreement(slot, held, differ[slot], latest[slot])


def _disagreement(slot: str, held: Held, rounds: Mapping[int, str], latest: int) -> Finding:
    first = min(rounds)
    again = max(rounds) < latest
    text = rounds[first]
    if len(rounds) > 1:
        text += f"; so in {len(rounds) - 1} later rounds, last in {max(rounds)}"
    if again:
        text += f"; it agrees in round {latest}"
    # The average is the same bits by construction; a state may drift, and heals.
    severity: Severity = "warning" if again and held == "state" else "error"
    kind = "averages-differ" if held == "averages" else "states-differ"
    return finding(kind, keys.receipt(first, slot), text, round_number=first, slot=slot, severity=severity)


def _outvoted(case: Case, number: int, group: Mapping[str, Receipt], held: Held) -> dict[str, str]:
    """Who holds something else than who counts as right, and why. States are compared where averages are equal."""
    if held == "state":
        right = _right({slot: one.averages for slot, one in group.items()}, None)[0]
        group = {slot: one for slot, one in group.items() if one.averages == group[right].averages}
    values = {slot: one.averages if held == "averages" else one.state for slot, one in group.items()}
    if len(set(values.values())) < 2:
        return {}
    manifest = case.manifests.get(keys.checkpoint_manifest(number + 1))
    author = None if manifest is None else manifest.record.writer
    right, why = _right(values, author)
    agree = sum(value == values[right] for value in values.values())
    what = "average" if held == "averages" else "state"
    text = f"its {what} differs from that of {agree} of {len(values)} replicas, which count as right: {why}"
    return {slot: text for slot, value in values.items() if value != values[right]}


def _right(values: Mapping[str, Hashable], author: str | None) -> tuple[str, str]:
    """A slot that counts as right, and why. values: in slot order. The rule of the runtime's own alarm."""
    ((most, count),) = Counter(values.values()).most_common(1)
    if 2 * count > len(values):
        return next(slot for slot, value in values.items() if value == most), "they are the majority"
    if author is not None and author in values:
        return author, f"no majority, {author} wrote the checkpoint"
    first = next(iter(values))
    return first, f"no majority, {first} is the first"


def _by_round(case: Case) -> dict[int, list[Receipt]]:
    found: defaultdict[int, list[Receipt]] = defaultdict(list)
    for one in case.receipts.values():
        found[one.record.round].append(one.record)
    return found


def _comparable(receipts: Sequence[Receipt]) -> list[dict[str, Receipt]]:
    """Receipts of one round that speak of the same thing, each group in slot order."""
    groups: defaultdict[tuple[str, str], dict[str, Receipt]] = defaultdict(dict)
    for one in sorted(receipts, key=lambda one: keys.slot_order(one.slot)):
        groups[one.commit, one.scope][one.slot] = one
    return list(groups.values())
