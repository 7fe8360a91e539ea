"""Examines a run's store for `skerry doctor`: a complete, consistent log, and replicas that agree. Never writes.

`examine_store` reads, `examine` is pure. Checks records, listings and lengths, and on request every byte of payloads
and checkpoints, which are otherwise verified by the replicas that read them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from skerry.infra.observe.doctor import check_chain, check_stored_objects
from skerry.infra.observe.doctor.check_averages import check_averages
from skerry.infra.observe.doctor.check_payloads import check_payloads
from skerry.infra.observe.doctor.check_roll_ups import check_roll_ups, read_roll_ups
from skerry.infra.observe.doctor.check_versions import check_versions
from skerry.infra.observe.doctor.find_undertrained_replicas import find_undertrained_replicas
from skerry.infra.observe.doctor.findings import Examination, finding
from skerry.infra.observe.doctor.read_log import read_log
from skerry.infra.observe.doctor.stray_records import check_stray, find_stray, without_stray
from skerry.infra.observe.doctor.valid_records import check_identity, check_incarnations, valid_records
from skerry.infra.observe.history import build_starts
from skerry.infra.observe.participation import count_parts, participation, ranges
from skerry.runtime.errors import SkerryError
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.observe.doctor.findings import Finding, Kind, PayloadAmount, Severity
    from skerry.infra.observe.doctor.read_log import RunRecords
    from skerry.infra.observe.history import RunHistory
    from skerry.runtime.log.records import Receipt
    from skerry.runtime.log.roll_up import RollUp
    from skerry.runtime.store import Store

Digest = Literal["averages", "state"]

_CHECKS: Final = (
    check_incarnations,
    check_chain.check_gaps,
    check_chain.check_links,
    check_chain.check_commits,
    check_chain.check_contributions,
    check_stored_objects.check_contribution_payloads,
    check_stored_objects.check_orphans,
    check_stored_objects.check_checkpoints,
)
_RANK: Final[Mapping[Severity, int]] = {"error": 0, "warning": 1, "info": 2}


def examine_store(
    store: Store,
    on_progress: Callable[[PayloadAmount, PayloadAmount], None] | None = None,
    log: RunRecords | None = None,
) -> Examination:
    """Examine the run under this prefix. After errors it reads again and keeps repeated findings, because runs go on.

    on_progress: also read all payloads and checkpoints, and call it with the amount read and the whole amount. log: the
    records, if they are read already. Raises SkerryError if there is no run, and what the store raises.
    """
    bodies: PayloadAmount | None = None
    damages: Sequence[Finding] = ()
    if on_progress is not None:
        whole = valid_records(read_log(store))
        bodies, damages = check_payloads(store, whole, on_progress)
        damages = [*damages, *check_averages(store, whole)]
    roll_ups = read_roll_ups(store)
    log = log or read_log(store)
    first = examine(log, damages, roll_ups)
    if not first.records and not first.findings:
        raise SkerryError(f"no run at {store.uri}; name a spec, or the URI of a run's own prefix")
    if not first.ok:
        known = {item.place for item in first.findings}
        roll_ups = read_roll_ups(store)
        second = examine(read_log(store), damages, roll_ups, find_stray(valid_records(log)))
        # A finding of stray records names one of them, which may be another one now.
        again = [item for item in second.findings if item.kind == "stray-record" or item.place in known]
        first = _examination(second, again)
    return replace(first, bodies=bodies)


def examine(
    stored: RunRecords,
    damages: Sequence[Finding] = (),
    roll_ups: Mapping[str, RollUp | str] | None = None,
    stray_before: Container[str] | None = None,
) -> Examination:
    """All findings of a run. damages: of payloads and checkpoint parts; a damaged checkpoint covers no round.

    roll_ups: of `read_roll_ups`. stray_before: the keys of stray records in an earlier reading; no others are reported.
    """
    bad = {damage.key for damage in damages if damage.kind.startswith("damaged")}
    valid = valid_records(stored)
    stray = find_stray(valid)
    stored = without_stray(stored, stray)
    log = valid_records(replace(stored, parts={key: size for key, size in stored.parts.items() if key not in bad}))
    reported = {key: why for key, why in stray.items() if stray_before is None or key in stray_before}
    findings: list[Finding] = list(check_stray(valid, reported))
    taken = participation(log) if stored.listed else None
    if taken is not None:
        findings += [*check_identity(stored), *(item for check in _CHECKS for item in check(log)), *_disagreements(log)]
        findings += [*_disputes(log), *find_undertrained_replicas(taken), *check_versions(build_starts(log))]
        findings += check_roll_ups(log, roll_ups or {})
    deleted = bad - stored.payloads.keys() - stored.parts.keys()
    findings = [item for item in findings if item.key not in bad]
    findings += [damage for damage in damages if damage.key not in deleted or damage.kind == "damaged-private"]
    run = None if log.run is None else log.run.name
    blank = Examination(
        ok=True,
        uri=log.uri,
        run=run,
        closed=log.closed,
        records=len(log.listed),
        participation=taken,
    )
    return _examination(blank, findings)


def examine_history(history: RunHistory) -> tuple[Finding, ...]:
    """The findings that need no single record: those of the replicas' participation, programs and receipts."""
    taken = count_parts(history.run.slots, history.rounds, history.starts, history.heartbeats)
    findings = [*find_undertrained_replicas(taken), *check_versions(history.starts)]
    differing: Mapping[Kind, list[int]] = {
        "averages-differ": [item.round for item in history.rounds if item.averages_equal is False],
        "states-differ": [item.round for item in history.rounds if item.state_equal is False],
    }
    for kind, rounds in differing.items():
        if rounds:
            text = f"receipts differ in rounds {ranges(rounds)}; `skerry doctor` names the replica"
            findings.append(finding(kind, keys.receipts_prefix(rounds[0]), text, round_number=rounds[0]))
    return _in_order(findings)


def _in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(
        sorted(
            findings,
            key=lambda item: (_RANK[item.severity], -1 if item.round is None else item.round, item.kind, item.key),
        )
    )


def _examination(examination: Examination, findings: Sequence[Finding]) -> Examination:
    ordered = _in_order(findings)
    ok = all(item.severity != "error" for item in ordered)
    return replace(examination, ok=ok, findings=ordered)


def _disagreements(log: RunRecords) -> Iterator[Finding]:
    """A finding for each slot whose receipts differ from the majority: first round, and whether it agrees again."""
    for digest in ("averages", "state"):
        differ: defaultdict[str, dict[int, str]] = defaultdict(dict)
        latest: dict[str, int] = {}
        for number, receipts in sorted(_by_round(log).items()):
            for group in _comparable(receipts):
                if len(group) > 1:
                    latest |= dict.fromkeys(group, number)
                for slot, why in _minority(group, digest).items():
                    differ[slot][number] = why
        for slot in sorted(differ, key=keys.slot_order):
            yield _disagreement(slot, digest, differ[slot], latest[slot])


def _disputes(log: RunRecords) -> Iterator[Finding]:
    """A finding for each receipt in which a replica disputes what another one has computed for it."""
    for receipt in log.receipts.values():
        if (text := receipt.record.disputed) is not None:
            number, slot = receipt.record.round, receipt.record.slot
            yield finding("wrong-unit", receipt.key, f"{slot} reports: {text}", round_number=number)


def _disagreement(slot: str, digest: Digest, rounds: Mapping[int, str], latest: int) -> Finding:
    first = min(rounds)
    again = max(rounds) < latest
    text = rounds[first]
    if len(rounds) > 1:
        text += f"; also in {len(rounds) - 1} later rounds, last in {max(rounds)}"
    if again:
        text += f"; it agrees again in round {latest}"
    # Averages must be equal bit for bit; a state may drift, and heals.
    severity: Severity = "warning" if again and digest == "state" else "error"
    kind = "averages-differ" if digest == "averages" else "states-differ"
    return finding(kind, keys.receipt(first, slot), text, round_number=first, slot=slot, severity=severity)


def _minority(group: Mapping[str, Receipt], digest: Digest) -> dict[str, str]:
    """The slots whose digest differs from the reference, with a text for each."""
    if digest == "state":
        reference = _reference({slot: receipt.averages for slot, receipt in group.items()})[0]
        group = {slot: receipt for slot, receipt in group.items() if receipt.averages == group[reference].averages}
    values = {slot: receipt.averages if digest == "averages" else receipt.state for slot, receipt in group.items()}
    if len(set(values.values())) < 2:
        return {}
    reference, why = _reference(values)
    agree = sum(value == values[reference] for value in values.values())
    what = "average" if digest == "averages" else "state"
    text = f"its {what} differs from that of {agree} of {len(values)} replicas, which count as right: {why}"
    return {slot: text for slot, value in values.items() if value != values[reference]}


def _reference(values: Mapping[str, Hashable]) -> tuple[str, str]:
    """The reference slot, and why. values: in slot order. The same rule as the runtime's."""
    ((most, count),) = Counter(values.values()).most_common(1)
    if 2 * count > len(values):
        return next(slot for slot, value in values.items() if value == most), "they are the majority"
    first = next(iter(values))
    return first, f"no majority, {first} is the first"


def _by_round(log: RunRecords) -> dict[int, list[Receipt]]:
    by_round: defaultdict[int, list[Receipt]] = defaultdict(list)
    for receipt in log.receipts.values():
        by_round[receipt.record.round].append(receipt.record)
    return by_round


def _comparable(receipts: Sequence[Receipt]) -> list[dict[str, Receipt]]:
    """The receipts of one round grouped by commit and scope, each group in slot order."""
    groups: defaultdict[tuple[str, str], dict[str, Receipt]] = defaultdict(dict)
    for receipt in sorted(receipts, key=lambda receipt: keys.slot_order(receipt.slot)):
        groups[receipt.commit, receipt.scope][receipt.slot] = receipt
    return list(groups.values())
