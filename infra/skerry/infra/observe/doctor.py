"""`skerry doctor`: is this run's log whole, and do its replicas agree? `examine` judges, purely; `visit` reads.

Looks at records, listings and lengths, and if asked to at every byte of payloads and checkpoints (`bodies`), which are
else verified by whoever uses them. Never writes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from skerry.infra.observe import case as cases
from skerry.infra.observe import chain, holdings
from skerry.infra.observe.bodies import read_all
from skerry.infra.observe.evidence import gather
from skerry.infra.observe.findings import Examination, finding
from skerry.runtime import keys
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from skerry.infra.observe.case import Case
    from skerry.infra.observe.evidence import Evidence
    from skerry.infra.observe.findings import Bodies, Finding, Severity
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


def visit(store: Store, on_progress: Callable[[Bodies, Bodies], None] | None = None) -> Examination:
    """Examine the run under this prefix; what looks broken is looked at twice, because a run may go on meanwhile.

    on_progress: read all bodies too, and tell how much was read of how much. Raises SkerryError if there is no run,
    and what the store raises.
    """
    bodies: Bodies | None = None
    damages: Sequence[Finding] = ()
    if on_progress is not None:
        bodies, damages = read_all(store, cases.open_case(gather(store)), on_progress)
    first = examine(gather(store), damages)
    if not first.records and not first.findings:
        raise SkerryError(f"no run at {store.uri}; name a spec, or the URI of a run's own prefix")
    if not first.ok:
        known = {one.place for one in first.findings}
        second = examine(gather(store), damages)
        first = _examination(second, [one for one in second.findings if one.place in known])
    return replace(first, bodies=bodies)


def examine(evidence: Evidence, damages: Sequence[Finding] = ()) -> Examination:
    """Everything that is wrong with a run, or worth knowing. damages: of bodies; what is damaged covers nothing."""
    count = sum(1 for _ in cases.log_records(evidence)) + (evidence.run is not None)
    bad = {one.key for one in damages}
    sound = {key: size for key, size in evidence.parts.items() if key not in bad}
    case = cases.open_case(replace(evidence, parts=sound))
    found = [one for check in _CHECKS for one in check(case)] if count else []
    if count:
        found += _disagreements(case)
    deleted = bad - evidence.payloads.keys() - evidence.parts.keys()
    found = [one for one in found if one.key not in bad]
    found += [one for one in damages if one.key not in deleted or one.kind == "damaged-private"]
    run = None if evidence.run is None or evidence.run.record is None else evidence.run.record.name
    blank = Examination(ok=True, uri=evidence.uri, run=run, closed=case.closed, records=count)
    return _examination(blank, found)


def _examination(of: Examination, findings: Sequence[Finding]) -> Examination:
    ordered = sorted(
        findings, key=lambda one: (_RANK[one.severity], -1 if one.round is None else one.round, one.kind, one.key)
    )
    ok = all(one.severity != "error" for one in ordered)
    return replace(of, ok=ok, findings=tuple(ordered))


def _disagreements(case: Case) -> Iterator[Finding]:
    """For each slot whose receipts differ from most others': the first such round, and whether it agrees again."""
    for held in ("averages", "state"):
        differ: defaultdict[str, dict[int, str]] = defaultdict(dict)
        latest: dict[str, int] = {}
        for number, receipts in sorted(_by_round(case).items()):
            for group in _comparable(receipts):
                if len(group) > 1:
                    latest |= dict.fromkeys(group, number)
                for slot, why in _outvoted(group, held).items():
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


def _outvoted(group: Mapping[str, Receipt], held: Held) -> dict[str, str]:
    """Who holds something else than who counts as right, and why. States are compared where averages are equal."""
    if held == "state":
        right = _right({slot: one.averages for slot, one in group.items()})[0]
        group = {slot: one for slot, one in group.items() if one.averages == group[right].averages}
    values = {slot: one.averages if held == "averages" else one.state for slot, one in group.items()}
    if len(set(values.values())) < 2:
        return {}
    right, why = _right(values)
    agree = sum(value == values[right] for value in values.values())
    what = "average" if held == "averages" else "state"
    text = f"its {what} differs from that of {agree} of {len(values)} replicas, which count as right: {why}"
    return {slot: text for slot, value in values.items() if value != values[right]}


def _right(values: Mapping[str, Hashable]) -> tuple[str, str]:
    """A slot that counts as right, and why. values: in slot order. The rule of the runtime's own alarm."""
    ((most, count),) = Counter(values.values()).most_common(1)
    if 2 * count > len(values):
        return next(slot for slot, value in values.items() if value == most), "they are the majority"
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
