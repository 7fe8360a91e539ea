"""Formats plans, the steps of an apply, and its outcome; the same lines on a terminal and in a file.

Equal changes of many replicas share a line, so that a plan of a thousand jobs stays readable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from rich import filesize
from rich.text import Text

from skerry.infra.provision.apply import Progress
from skerry.infra.provision.plan import DELETED_OUTSIDE, Action
from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from skerry.infra.cost.estimate import Estimate
    from skerry.infra.deploy.plan_and_apply import Planned
    from skerry.infra.provision.apply import Outcome, Step
    from skerry.infra.provision.graph import Grant, Json
    from skerry.infra.provision.plan import Change, Difference
    from skerry.infra.run.code_archive import Bundle
    from skerry.infra.spec.inputs import Inputs

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
_NUMBERED: Final = re.compile(r"(.*?)(\d+)$")
_DIGITS: Final = re.compile(r"\d+")
_REFERENCE: Final = re.compile(r"\$\{(\w+\.[\w-]+)\.(\w+)\}")


def plan_lines(planned: Planned, estimate: Estimate, *, verbose: bool = False) -> Iterator[Text]:
    """The changes, the account, the code, the rights that are granted, and the cost."""
    accounts = ", ".join(f"{cloud} account {account}" for cloud, account in sorted(planned.binding.accounts.items()))
    yield Text(f"run {planned.binding.run}, in {accounts}", style="bold")
    acting = [change for change in planned.plan.changes if change.acts]
    yield from change_lines(acting, verbose=verbose)
    for note in (*planned.plan.notes, *planned.plan.kept):
        yield Text(f"note: {note}", style="yellow")
    for problem in planned.plan.problems:
        yield Text(f"problem: {problem}", style="red")
    yield from _check_lines(planned)
    yield Text(f"plan: {summary(planned.plan.changes)}; nothing has been changed", style="bold")
    yield from _code_lines(planned.code, verbose=verbose)
    if planned.source is not None:
        size = filesize.decimal(planned.source.size_bytes)
        yield Text(f"init_from: the checkpoint of {planned.source}, {size}: apply copies it into the run")
        yield Text("  replicas read the copy; they get no right to that run")
    for group, inputs in planned.resolved.inputs.items():
        yield from (Text(line) for line in _input_lines(group, inputs))
    granted = [grant for change in acting for grant in change.grants]
    if granted:
        yield Text("it grants these rights:")
        yield from (Text(f"  {line}") for line in _grant_lines(granted))
    yield from (Text(line) for line in estimate.lines())


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


def change_lines(changes: Iterable[Change], *, verbose: bool = False) -> Iterator[Text]:
    """The changes; those that differ only in a number share a line."""
    for group in _alike(changes):
        yield from _group_lines(group, verbose=verbose)


def _group_lines(group: Sequence[Change], *, verbose: bool) -> Iterator[Text]:
    first = group[0]
    sign, style = _SIGNS[first.action]
    addresses = first.address if len(group) == 1 else _span([change.address for change in group])
    name = first.name if len(group) == 1 else f"{len(group)} of them, e.g. {first.name}"
    where = f" ({first.region})" if first.region else ""
    why = f": {first.why}" if first.why else ""
    yield Text(f"  {sign:<3} {addresses}  {name}{where}{why}", style=style)
    if first.because:
        yield Text(f"        because: {first.because}")
    for difference in first.differences:
        yield from (Text(f"        {line}") for line in _difference(difference))
    if verbose and first.action in (Action.CREATE, Action.REPLACE):
        for setting, value in first.settings.items():
            yield Text(f"        {setting}: {_value(value)}", style="dim")


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
    """The whole value: a reviewer must see all of a policy. A value that is not known yet: (arn of aws_role.b-0)."""
    return _REFERENCE.sub(r"(\2 of \1)", value if isinstance(value, str) else json.dumps(value))


def _alike(changes: Iterable[Change]) -> list[list[Change]]:
    """Groups of changes that look the same except for the number at the end of their addresses."""
    groups: dict[object, list[Change]] = {}
    for change in changes:
        match = _NUMBERED.fullmatch(change.address)
        stem = change.address if match is None else match[1]
        why = change.why if match is None else _DIGITS.sub("#", change.why)
        settings = tuple(difference.setting for difference in change.differences)
        key = (change.action, stem, change.region, why, change.because, settings)
        groups.setdefault(key, []).append(change)
    return list(groups.values())


def _span(addresses: Sequence[str]) -> str:
    """One text for addresses that differ in their last number: aws_role.batch-{0..3}."""
    numbers = sorted(int(_NUMBERED.sub(r"\2", address)) for address in addresses)
    stem = _NUMBERED.sub(r"\1", addresses[0])
    is_range = numbers == list(range(numbers[0], numbers[-1] + 1))
    text = f"{numbers[0]}..{numbers[-1]}" if is_range else ",".join(map(str, numbers))
    return f"{stem}{{{text}}}"


def _grant_lines(grants: Sequence[Grant]) -> Iterator[str]:
    """The rights of each principal; replicas whose rights differ only in a number are shown by the first of them."""
    rights: dict[str, dict[str, list[str]]] = {}
    for grant in grants:
        rights.setdefault(grant.principal, {}).setdefault(grant.may, []).append(grant.on)
    alike: dict[str, list[str]] = {}
    for who, may in rights.items():
        alike.setdefault(_DIGITS.sub("#", f"{who} {may}"), []).append(who)
    for names in alike.values():
        more = f", and {len(names) - 1} more like it" if len(names) > 1 else ""
        yield f"{names[0]}{more}"
        for may, things in rights[names[0]].items():
            yield f"  may {may} {', '.join(_from_common(things))}"


def _from_common(things: Sequence[str]) -> list[str]:
    """Paths, with their common folder written once: a/b/{c, d}."""
    folder = things[0].rpartition("/")[0] if len(things) > 1 else ""
    while folder and not all(thing.startswith(f"{folder}/") for thing in things):
        folder = folder.rpartition("/")[0]
    if not folder:
        return list(things)
    return [f"{folder}/{{{', '.join(thing.removeprefix(f'{folder}/') for thing in things)}}}"]
