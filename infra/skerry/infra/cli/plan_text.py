"""How plans, their progress, jobs and removals look: the same lines on a terminal and in a file. Decides nothing.

Equal changes of many replicas are one line: a plan of a thousand jobs is to be read, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rich.text import Text

from skerry.infra.apply import Progress
from skerry.infra.handler import Condition, Held
from skerry.infra.plan import Action

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from skerry.infra.apply import Outcome, Step
    from skerry.infra.deploy.planning import Planned
    from skerry.infra.deploy.removal import Removal, Removed
    from skerry.infra.estimate import Estimate
    from skerry.infra.graph import Grant, Json
    from skerry.infra.plan import Change, Difference
    from skerry.infra.target import Check, JobView

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
    Action.ADOPT: "to take in",
    Action.FORGET: "to leave to you",
    Action.KEEP: "as they are",
}
_DONE: Final = {
    Action.CREATE: "created",
    Action.UPDATE: "changed",
    Action.REPLACE: "made anew",
    Action.DELETE: "deleted",
    Action.ADOPT: "taken in",
    Action.FORGET: "left to you",
    Action.KEEP: "kept",
}
_CONDITIONS: Final = {
    Condition.READY: "yellow",
    Condition.DONE: "green",
    Condition.LOST: "red",
    Condition.BROKEN: "red",
}
_NUMBERED: Final = re.compile(r"(.*?)(\d+)$")
_DIGITS: Final = re.compile(r"\d+")
# A policy is a page; its first words say which.
_LONG: Final = 120


def plan_lines(planned: Planned, estimate: Estimate, *, verbose: bool = False) -> Iterator[Text]:
    """What would happen, to whose account, with which rights, and what it costs."""
    accounts = ", ".join(f"{cloud} account {account}" for cloud, account in sorted(planned.binding.accounts.items()))
    yield Text(f"run {planned.binding.run}, in {accounts}", style="bold")
    acting = [change for change in planned.plan.changes if change.acts]
    for group in _alike(acting):
        yield from _group_lines(group, verbose=verbose)
    for note in planned.plan.notes:
        yield Text(f"note: {note}", style="yellow")
    for problem in planned.plan.problems:
        yield Text(f"problem: {problem}", style="red")
    yield Text(f"plan: {summary(planned.plan.changes)}; nothing has been changed", style="bold")
    granted = [grant for change in acting for grant in change.grants]
    if granted:
        yield Text("it grants these rights:")
        yield from (Text(f"  {line}") for line in _grant_lines(granted))
    yield from (Text(line) for line in estimate.lines())


def summary(changes: Iterable[Change]) -> str:
    """How many of what: "3 to create, 2 as they are"."""
    counts: dict[Action, int] = {}
    for change in changes:
        counts[change.action] = counts.get(change.action, 0) + 1
    told = [f"{counts[action]} {_VERBS[action]}" for action in Action if counts.get(action)]
    return ", ".join(told) or "nothing to do"


def drift_lines(planned: Planned) -> Iterator[Text]:
    """What is not as it was left: only what others changed, not what the spec changes."""
    for change in planned.plan.changes:
        drifted = [one for one in change.differences if one.drift]
        if drifted or change.because.startswith(("it is gone", "lost", "broken")):
            yield Text(f"  {change.address}  {change.name}  {change.because}".rstrip(), style="yellow")
            yield from (Text(f"      {line}") for one in drifted for line in _difference(one))


def step_line(step: Step) -> Text | None:
    """One line of progress; none for what only begins, or turned out to be done."""
    change = step.change
    match step.progress:
        case Progress.BEGUN:
            return None
        case Progress.UNNEEDED:
            return Text(f"  = {change.address} is as it was", style="dim")
        case Progress.DONE:
            sign, style = _SIGNS[change.action]
            return Text(f"  {sign} {change.address} {_DONE[change.action]}: {change.name}", style=style)
        case Progress.FAILED:
            return Text(f"  ! {change.address} failed: {step.error}", style="red")


def outcome_line(outcome: Outcome) -> str:
    """How an apply ended."""
    if outcome.ok:
        return f"done: {len(outcome.done)} changes" if outcome.done else "nothing was to do"
    waiting = f", {len(outcome.skipped)} not begun" if outcome.skipped else ""
    return f"{len(outcome.done)} done, {len(outcome.failed)} failed{waiting}; run it again: it goes on from here"


def job_lines(jobs: Sequence[JobView]) -> Iterator[Text]:
    """A line for each job: what it is doing, and why it waits."""
    for job in jobs:
        tries = f" attempt {job.attempt}" if job.attempt > 1 else ""
        code = f" exit code {job.exit_code}" if job.exit_code is not None else ""
        text = f"  {job.slot}: {job.state.lower()}{tries}{code}"
        yield Text(f"{text}: {job.why}" if job.why else text, style=_CONDITIONS[job.condition])


def check_lines(checks: Sequence[Check]) -> Iterator[Text]:
    """What was looked at, and what to do where it is wrong."""
    for check in checks:
        sign, style = {True: ("ok", "green"), False: ("wrong", "red"), None: ("unknown", "yellow")}[check.ok]
        advice = f"; {check.advice}" if check.advice and check.ok is not True else ""
        yield Text(f"  {sign:<8}{check.name}: {check.text}{advice}", style=style)


def removal_lines(removal: Removal, run: str, *, data: bool) -> Iterator[Text]:
    """What destroy would do."""
    yield Text(f"destroy {run}", style="bold")
    doomed = [change for change in removal.plan.changes if change.address not in removal.data]
    for group in _alike([replace(change, because="") for change in doomed]):
        yield from _group_lines(group, verbose=False)
    for made in removal.strays:
        yield Text(f"  - {made.kind} {made.name}: of this run by its tag, though nobody remembers it", style="red")
    for address, held in removal.data.items():
        text = "deleted, with all of it" if data else "stays: `--data` deletes it"
        yield Text(f"  {'-' if data else '='} {address} holds {held}: {text}", style="red" if data else "dim")
    if removal.others:
        yield Text(f"  = the bucket stays: {removal.others} objects in it are not of this run")
    if removal.objects:
        what = "deleted" if data else "stay: `--data` deletes them"
        held = Held(objects=removal.objects, size_bytes=removal.size_bytes)
        yield Text(f"  {held} at {run}: {what}")


def removed_lines(removed: Removed) -> Iterator[Text]:
    """What is left of a run."""
    yield Text(outcome_line(removed.outcome))
    for left in removed.left:
        yield Text(f"left: {left}", style="red")


def _group_lines(group: Sequence[Change], *, verbose: bool) -> Iterator[Text]:
    first = group[0]
    sign, style = _SIGNS[first.action]
    addresses = first.address if len(group) == 1 else _span([change.address for change in group])
    name = first.name if len(group) == 1 else f"{len(group)} of them, such as {first.name}"
    where = f" ({first.region})" if first.region else ""
    why = f": {first.why}" if first.why else ""
    yield Text(f"  {sign:<3} {addresses}  {name}{where}{why}", style=style)
    if first.because:
        yield Text(f"        because: {first.because}")
    for one in first.differences:
        yield from (Text(f"        {line}") for line in _difference(one))
    if verbose and first.action in (Action.CREATE, Action.REPLACE):
        for setting, value in first.settings.items():
            yield Text(f"        {setting}: {_value(value)}", style="dim")


def _difference(one: Difference) -> list[str]:
    """A line for a setting; of one with parts a line for each part that differs."""
    notes = [
        note
        for note, holds in (
            ("changed outside of skerry", one.drift),
            ("only a new one can have it", one.replaces and not one.unknown),
            ("only if it turns out to be another", one.unknown),
        )
        if holds
    ]
    told = f" ({'; '.join(notes)})" if notes else ""
    if not isinstance(one.before, Mapping) or not isinstance(one.after, Mapping):
        return [f"{one.setting}: {_value(one.before)} -> {_value(one.after)}{told}"]
    parts = [name for name in {**one.before, **one.after} if one.before.get(name) != one.after.get(name)]
    return [
        f"{one.setting}.{name}: {_value(one.before.get(name))} -> {_value(one.after.get(name))}{told}" for name in parts
    ]


def _value(value: Json) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def _alike(changes: Sequence[Change]) -> list[list[Change]]:
    """Neighbours in kind whose addresses differ in a number at their end, and nothing else that a reader sees."""
    groups: dict[object, list[Change]] = {}
    for change in changes:
        match = _NUMBERED.fullmatch(change.address)
        stem = change.address if match is None else match[1]
        why = change.why if match is None else _DIGITS.sub("#", change.why)
        settings = tuple(one.setting for one in change.differences)
        key = (change.action, stem, change.region, why, change.because, settings)
        groups.setdefault(key, []).append(change)
    return list(groups.values())


def _span(addresses: Sequence[str]) -> str:
    """aws_role.batch-{0..3}: addresses that differ in their last number."""
    numbers = sorted(int(_NUMBERED.sub(r"\2", address)) for address in addresses)
    stem = _NUMBERED.sub(r"\1", addresses[0])
    gapless = numbers == list(range(numbers[0], numbers[-1] + 1))
    told = f"{numbers[0]}..{numbers[-1]}" if gapless else ",".join(map(str, numbers))
    return f"{stem}{{{told}}}"


def _grant_lines(grants: Sequence[Grant]) -> Iterator[str]:
    """Who may do what on what; of replicas whose rights differ in their number only the first stands for all."""
    rights: dict[str, dict[str, list[str]]] = {}
    for grant in grants:
        rights.setdefault(grant.who, {}).setdefault(grant.may, []).append(grant.on)
    alike: dict[str, list[str]] = {}
    for who, may in rights.items():
        alike.setdefault(_DIGITS.sub("#", f"{who} {may}"), []).append(who)
    for names in alike.values():
        more = f", and {len(names) - 1} more like it" if len(names) > 1 else ""
        yield f"{names[0]}{more}"
        for may, things in rights[names[0]].items():
            yield f"  may {may} {', '.join(_from_common(things))}"


def _from_common(things: Sequence[str]) -> list[str]:
    """Paths, the folder that all are in told once: a/b/{c, d}."""
    folder = things[0].rpartition("/")[0] if len(things) > 1 else ""
    while folder and not all(thing.startswith(f"{folder}/") for thing in things):
        folder = folder.rpartition("/")[0]
    if not folder:
        return list(things)
    return [f"{folder}/{{{', '.join(thing.removeprefix(f'{folder}/') for thing in things)}}}"]
