"""Formats plans, the steps of an apply, and its outcome; the same lines on a terminal and in a file.

Equal changes of many replicas share a line, so that a plan of a thousand jobs stays readable.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from rich import filesize
from rich.text import Text

from skerry.infra.cost.prices import rounded
from skerry.infra.deploy.plan_file import Review
from skerry.infra.provision.apply import Progress
from skerry.infra.provision.graph import in_words
from skerry.infra.provision.planned_changes import DELETED_OUTSIDE, Action
from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from skerry.infra.cost.estimate import Estimate
    from skerry.infra.deploy.plan_and_apply import Binding, Planned
    from skerry.infra.provision.apply import Outcome, Step
    from skerry.infra.provision.graph import Json
    from skerry.infra.provision.planned_changes import Change, Difference, RightsChange
    from skerry.infra.provision.target_and_store_interfaces import Rate
    from skerry.infra.run.code_archive import Bundle
    from skerry.infra.spec.env_secrets_and_data import Inputs
    from skerry.infra.spec.model import SpecFile

_SIGNS: Final = {
    Action.CREATE: ("+", "green"),
    Action.UPDATE: ("~", "yellow"),
    Action.REPLACE: ("+/-", "magenta"),
    Action.DELETE: ("-", "red"),
    Action.ADOPT: ("<", "cyan"),
    Action.FORGET: (".", "dim"),
    Action.KEEP: ("=", "dim"),
}
_VERBS: Final = {
    Action.CREATE: "to create",
    Action.UPDATE: "to change",
    Action.REPLACE: "to replace",
    Action.DELETE: "to delete",
    Action.ADOPT: "to adopt",
    Action.FORGET: "to forget",
    Action.KEEP: "unchanged",
}
_DONE: Final = {
    Action.CREATE: "created",
    Action.UPDATE: "changed",
    Action.REPLACE: "replaced",
    Action.DELETE: "deleted",
    Action.ADOPT: "adopted",
    Action.FORGET: "forgotten",
    Action.KEEP: "kept",
}
_SINGLE: Final = re.compile(r'\[\s+("(?:[^"\\]|\\.)*")\s+\]')
_NUMBERED: Final = re.compile(r"(.*?)(\d+)$")
_DIGITS: Final = re.compile(r"\d+")


def review_of(planned: Planned, estimate: Estimate, spec: SpecFile, *, verbose: bool = False) -> Review:
    """The parts of a plan that its changes do not show."""
    remarks = [
        *_warnings(spec),
        *_remarks(planned, verbose=verbose),
        *(Text(line) for line in estimate.lines(with_total=False)),
    ]
    return Review(
        principals=planned.resolved.principals,
        table=_table(planned.resolved.rates, spec),
        checks=tuple((str(line.style), line.plain) for line in _check_lines(planned)),
        remarks=tuple((str(line.style), line.plain) for line in remarks),
        total=estimate.total or "",
        verbose=verbose,
    )


def plan_lines(
    binding: Binding, changes: Sequence[Change], review: Review, *, verbose: bool = False, width: int | None = None
) -> Iterator[Text]:
    """A plan for a reviewer: the groups, the changes, the rights that change, remarks; the summary and the cap last.

    width: of the terminal, in which reasons are wrapped; None wraps nothing.
    """
    accounts = [
        f"{cloud} account {account}" + (f" as {name}" if (name := review.principals.get(cloud)) else "")
        for cloud, account in sorted(binding.accounts.items())
    ]
    yield Text(f"run {binding.run}, in {', '.join(accounts)}", style="bold")
    yield from (Text(f"  {line}") for line in _columns(review.table))
    acting = [change for change in changes if change.acts]
    yield from change_lines(acting, verbose=verbose, width=width)
    yield from rights_lines(acting)
    yield from (Text(text, style=style) for style, text in (*review.checks, *review.remarks))
    yield Text(f"plan: {summary(changes)}; nothing has been changed", style="bold")
    if review.total:
        yield Text(review.total, style="bold")


def _table(rates: Sequence[Rate], spec: SpecFile) -> tuple[tuple[str, ...], ...]:
    by_group = {rate.group: rate for rate in rates}
    rows = [("group", "where", "machines", "purchase", "$/h", "cap", "image")]
    for group in spec.spec.replicas:
        if (rate := by_group.get(group.name)) is None:
            continue
        region = getattr(group.target, "region", "")
        hours = "none" if rate.cap_hours is None else f"{rate.cap_hours:.4g} h"
        usd = None if rate.cap_hours is None or rate.per_hour is None else rate.cap_hours * rate.per_hour
        rows.append(
            (
                name if (name := spec.spec.group_name(group.name)) == group.name else f"{name} ({group.name}-*)",
                f"{group.target.CLOUD} {region}".strip(),
                f"{rate.machine or rate.what} x {rate.count}",
                rate.purchase or "-",
                "unknown" if rate.per_hour is None else rounded(rate.per_hour),
                hours if usd is None else f"{rounded(usd)} in {hours}",
                group.image or spec.spec.image or "-",
            )
        )
    return tuple(rows) if len(rows) > 1 else ()


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The cells of each row, aligned; the last cell is not padded."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _warnings(spec: SpecFile) -> Iterator[Text]:
    for group in spec.spec.replicas:
        if (warning := group.target.warning) is not None:
            yield Text(f"warning: {spec.spec.group_name(group.name)}: {warning}", style="yellow")


def _remarks(planned: Planned, *, verbose: bool) -> Iterator[Text]:
    for note in (*planned.plan.notes, *planned.plan.kept):
        yield Text(f"note: {note}", style="yellow")
    for problem in planned.plan.problems:
        yield Text(f"problem: {problem}", style="red")
    yield from _code_lines(planned.code, verbose=verbose)
    if planned.source is not None:
        size = filesize.decimal(planned.source.size_bytes)
        yield Text(f"init_from: the checkpoint of {planned.source}, {size}: apply copies it into the run")
        yield Text("  replicas read the copy; they get no right to that run")
    for group, inputs in planned.resolved.inputs.items():
        yield from (Text(line) for line in _input_lines(group, inputs))


def _check_lines(planned: Planned) -> Iterator[Text]:
    """The checks that failed, and the names of those that could not be made."""
    for check in planned.resolved.checks:
        if check in planned.stops:
            text = f"no job will be started: {check.name}: {check.text}; {check.advice}, then apply again"
            yield Text(text, style="red")
        elif check.ok is False:
            yield Text(f"warning: {check.name}: {check.text}; {check.advice}".rstrip("; "), style="yellow")
    if unknown := [check.name for check in planned.resolved.checks if check.ok is None]:
        yield Text(f"note: not checked: {', '.join(unknown)}; `skerry doctor` says why", style="dim")


def _code_lines(code: Bundle, *, verbose: bool) -> Iterator[Text]:
    """The size of the code that every replica gets. verbose: also its files."""
    count, size = len(code.files), filesize.decimal(sum(code.files.values()))
    hint = "" if verbose else "; -v lists them"
    yield Text(f"code: {count} files, {size}, sha256 {code.digest[:12]}{hint}")
    if verbose:
        yield from (Text(f"  {name}  {filesize.decimal(size)}", style="dim") for name, size in code.files.items())
    if code.note is not None:
        yield Text(f"note: {code.note}", style="yellow")


def _input_lines(group: str, inputs: Inputs) -> Iterator[str]:
    """The variables of a group's replicas; of a secret its reference, because its value is known only to the job."""
    lines = [
        *(f"{name}={json.dumps(text)}" for name, text in inputs.env.items()),
        *(f"{name}: the secret {secret.reference}" for name, secret in inputs.secrets.items()),
        *(f"{contract.DATA}{name.upper()}={uri}" for name, uri in inputs.data.items()),
    ]
    if lines:
        yield f"replicas of {group} get:"
        yield from (f"  {line}" for line in lines)


def summary(changes: Iterable[Change]) -> str:
    """Counts by action: "3 to create, 2 unchanged"."""
    counts: dict[Action, int] = {}
    for change in changes:
        counts[change.action] = counts.get(change.action, 0) + 1
    parts = [f"{counts[action]} {_VERBS[action]}" for action in Action if counts.get(action)]
    return ", ".join(parts) or "nothing to do"


def drift_lines(planned: Planned) -> Iterator[Text]:
    """The resources that were changed outside of skerry; not what the spec changes."""
    for change in planned.plan.changes:
        drifted = [difference for difference in change.differences if difference.drift]
        if drifted or change.because.startswith((DELETED_OUTSIDE, "lost", "broken")):
            yield Text(f"  {change.address}  {change.name}  {change.because}".rstrip(), style="yellow")
            yield from (Text(f"      {line}") for difference in drifted for line in _difference(difference))
    yield from (Text(f"  {text}", style="yellow") for text in planned.plan.kept)


def step_line(step: Step) -> Text | None:
    """A line for a step that ended; None for one that begins."""
    change = step.change
    match step.progress:
        case Progress.BEGUN:
            return None
        case Progress.UNNEEDED:
            return Text(f"  = {change.address} unchanged", style="dim")
        case Progress.DONE:
            sign, style = _SIGNS[change.action]
            return Text(f"  {sign} {change.address} {_DONE[change.action]}: {change.name}", style=style)
        case Progress.FAILED:
            return Text(f"  ! {change.address} failed: {step.error}", style="red")


def outcome_line(outcome: Outcome) -> str:
    """Describes in one line the result of an apply."""
    if outcome.ok:
        return f"done: {len(outcome.done)} changes" if outcome.done else "there was nothing to do"
    waiting = f", {len(outcome.skipped)} not begun" if outcome.skipped else ""
    return f"{len(outcome.done)} done, {len(outcome.failed)} failed{waiting}; run it again to continue"


def change_lines(changes: Iterable[Change], *, verbose: bool = False, width: int | None = None) -> Iterator[Text]:
    """The changes in columns; those that differ only in their own names share a line. width: see `plan_lines`."""
    groups = _alike(changes, verbose=verbose)
    rows = [_cells(group) for group in groups]
    address, name = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    for group, (addresses, names, why) in zip(groups, rows, strict=True):
        sign, style = _SIGNS[group[0].action]
        line = f"  {sign:<3} {addresses:<{address}}  {names:<{name}}  {why}".rstrip()
        yield from (Text(part, style=style) for part in _wrapped(line, width, indent=8 + address))
        for detail in _details(group[0], verbose=verbose):
            yield from (Text(part, style=detail.style) for part in _wrapped(detail.plain, width, indent=10))


def _cells(group: Sequence[Change]) -> tuple[str, str, str]:
    first = group[0]
    addresses = first.address if len(group) == 1 else _span([change.address for change in group])
    name = first.name if len(group) == 1 else f"{len(group)} of them, e.g. {first.name}"
    where = f" ({first.region})" if first.region else ""
    return addresses, f"{name}{where}", in_words(first.why)


def _wrapped(line: str, width: int | None, *, indent: int) -> list[str]:
    """The line in parts that fit the terminal, words whole where possible; nothing is cut."""
    if width is None or len(line) <= width:
        return [line]
    indent = min(indent, width // 2)
    # Columns are separated by several spaces, which stay.
    return textwrap.wrap(line, width, subsequent_indent=" " * indent, break_on_hyphens=False, drop_whitespace=True)


def _details(change: Change, *, verbose: bool) -> Iterator[Text]:
    if change.because:
        yield Text(f"        because: {in_words(change.because)}")
    for difference in change.differences:
        yield from (Text(f"        {line}") for line in _difference(difference))
    if verbose and change.action in (Action.CREATE, Action.REPLACE):
        for setting, value in change.settings.items():
            yield Text(f"        {setting}: {_value(value)}", style="dim")


def rights_lines(changes: Sequence[Change]) -> Iterator[Text]:
    """The documents that grant permissions, as a unified diff of their JSON.

    Replicas of a group share a diff if theirs differ in their own names alone. Nothing else that differs is left
    out: a reviewer approves what is shown.
    """
    alike: dict[object, list[tuple[Change, RightsChange]]] = {}
    for change in changes:
        for rights in change.rights:
            key = (
                _stem(change),
                change.region,
                _without_own_name(change, [rights.document, rights.before, rights.after]),
            )
            alike.setdefault(key, []).append((change, rights))
    if alike:
        yield Text("rights that change:", style="bold")
    for group in alike.values():
        (_, rights), addresses = group[0], [change.address for change, _ in group]
        more = f" ({_span(addresses)}, each with its own name)" if len(group) > 1 else ""
        old, new = (_pretty(document) for document in _changed_parts(rights.before, rights.after))
        title = in_words(rights.document) + more
        whole = len(old) + len(new)  # a changed statement with its name and resources, not some lines around the change
        for line in difflib.unified_diff(
            old, new, title if old else "nothing", title if new else "nothing", lineterm="", n=whole
        ):
            yield Text(f"  {line}", style={"+": "green", "-": "red"}.get(line[:1], ""))


def _changed_parts(old: Json, new: Json) -> tuple[Json, Json]:
    """Both documents without the statements that are in both; whole, if nothing else differs than their order."""
    if isinstance(old, Mapping) and isinstance(new, Mapping) and "Statement" in old and "Statement" in new:
        before, after = _changed_parts(old["Statement"], new["Statement"])
        return {**old, "Statement": before}, {**new, "Statement": after}
    if isinstance(old, list) and isinstance(new, list):
        before, after = [part for part in old if part not in new], [part for part in new if part not in old]
        return (before, after) if before or after else (old, new)
    return old, new


def _pretty(document: Json) -> list[str]:
    """The lines of a document; a list of one text stays in its line."""
    text = "" if document is None else json.dumps(document, indent=2)
    return in_words(_SINGLE.sub(r"[\1]", text)).splitlines()


def _difference(difference: Difference) -> list[str]:
    """A line for a setting; for a mapping, a line for each key that differs."""
    notes = [
        note
        for note, holds in (
            (f"changed outside of skerry{f' by {difference.by}' if difference.by else ''}", difference.drift),
            ("forces replacement", difference.replaces and not difference.unknown),
            ("known after apply", difference.unknown),
        )
        if holds
    ]
    suffix = f" ({'; '.join(notes)})" if notes else ""
    if not isinstance(difference.before, Mapping) or not isinstance(difference.after, Mapping):
        return [f"{difference.setting}: {_value(difference.before)} -> {_value(difference.after)}{suffix}"]
    parts = [
        name
        for name in {**difference.before, **difference.after}
        if difference.before.get(name) != difference.after.get(name)
    ]
    return [
        f"{difference.setting}.{name}: {_value(difference.before.get(name))} -> "
        f"{_value(difference.after.get(name))}{suffix}"
        for name in parts
    ]


def _value(value: Json) -> str:
    """The whole value: a reviewer must see all of a policy."""
    return in_words(value if isinstance(value, str) else json.dumps(value))


def _alike(changes: Iterable[Change], *, verbose: bool) -> list[list[Change]]:
    """Groups of changes whose lines are the same except for their own names and numbers."""
    groups: dict[object, list[Change]] = {}
    for change in changes:
        why = change.why if change.address == _stem(change) else _DIGITS.sub("#", change.why)
        shown: list[Json] = [change.because, [dataclasses.asdict(difference) for difference in change.differences]]
        if verbose:
            shown.append(change.settings)
        key = (change.action, _stem(change), change.region, why, _without_own_name(change, shown))
        groups.setdefault(key, []).append(change)
    return list(groups.values())


def _stem(change: Change) -> str:
    """The address without the number at its end."""
    return _NUMBERED.sub(r"\1", change.address)


def _without_own_name(change: Change, value: Json) -> str:
    """The value as text, in which the change's own name and slot are the same for all replicas.

    Only whole names, and no bare number: every other text that differs between two replicas stays different.
    """
    parts = change.address.partition(".")[2].split("-")
    slots = ["-".join(parts[start:]) for start in range(len(parts) - 1)] if change.address != _stem(change) else []
    own = "|".join(map(re.escape, [change.name, *slots]))
    return re.sub(rf"(?<![A-Za-z0-9])(?:{own})(?![A-Za-z0-9])", "\0", json.dumps(value))


def _span(addresses: Sequence[str]) -> str:
    """One text for addresses that differ in their last number: aws_role.batch-{0..3}."""
    numbers = sorted(int(_NUMBERED.sub(r"\2", address)) for address in addresses)
    stem = _NUMBERED.sub(r"\1", addresses[0])
    is_range = numbers == list(range(numbers[0], numbers[-1] + 1))
    text = f"{numbers[0]}..{numbers[-1]}" if is_range else ",".join(map(str, numbers))
    return f"{stem}{{{text}}}"
