"""What has to change so that a cloud is as a graph says: one pure function, with a reason for every change.

Desired (the graph), remembered (the state) and seen (what handlers read) are compared field by field. Does no I/O.
"""

from __future__ import annotations

import enum
import graphlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from skerry.infra.graph import Grant, Json, Life, Ref, as_json, refs, resolved
from skerry.infra.handler import Condition, Wanted
from skerry.infra.state import Id, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from skerry.infra.graph import Graph, Resource, Value
    from skerry.infra.handler import Seen
    from skerry.infra.state import Entry


# Of what uses something, so many are named.
_NAMED: Final = 3


class Action(enum.Enum):
    """What happens to one generation of a resource."""

    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    """Make the next generation; deleting the one before is a change of its own."""
    DELETE = "delete"
    KEEP = "keep"
    ADOPT = "adopt"
    """It is there and ours, and the state does not know it: take it in, and change what differs."""
    FORGET = "forget"
    """Drop it from the state and leave it where it is: it is shared, or the user's own."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One setting that is not as it shall be. replaces: it cannot be changed in place. drift: changed behind our back.

    after: a reference to what is not made yet is told as ${address.output}. unknown: it holds one, and so may turn out
    to be as it was.
    """

    setting: str
    before: Json
    after: Json
    replaces: bool = False
    drift: bool = False
    unknown: bool = False


@dataclass(frozen=True, kw_only=True)
class Change:
    """What happens to one generation of a resource, and why. because: what no difference of a setting tells."""

    action: Action
    address: str
    generation: int
    kind: str
    name: str
    region: str
    why: str
    because: str = ""
    differences: tuple[Difference, ...] = ()
    grants: tuple[Grant, ...] = ()
    settings: Mapping[str, Json] = field(default_factory=dict[str, Json])

    @property
    def id(self) -> Id:
        """Which generation of which resource."""
        return Id(self.address, self.generation)

    @property
    def acts(self) -> bool:
        """Whether anything is done in a cloud or to the state."""
        return self.action is not Action.KEEP


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that happens, in an order in which it can, and what stands in the way.

    problems: while there is one, nothing may be applied. noted: jobs whose end the state does not know yet. notes: what
    a reader may miss among the changes, and why. outputs: of each address that is there and stays, as others refer to
    it; a change of it in place leaves them so.
    """

    changes: tuple[Change, ...]
    problems: tuple[str, ...]
    noted: Mapping[Id, Condition]
    notes: tuple[str, ...] = ()
    outputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not any(change.acts for change in self.changes)

    def counts(self) -> dict[Action, int]:
        """How many changes of each kind there are."""
        return {action: sum(change.action is action for change in self.changes) for action in Action}


def plan(
    graph: Graph,
    entries: Mapping[Id, Entry],
    seen: Mapping[Id, Seen | None],
    run: str,
    whole: Graph | None = None,
) -> Plan:
    """The changes that make `seen` what `graph` says, for the run with this URI.

    entries: what is remembered. seen: what there is of each `wanted`; a resource that is absent there was not found.
    whole: what the graph is a part of. What is remembered besides stays as it is, and so does what that uses: of what
    is made anew the old one stays beside the new one, until a plan of the whole lets it go.
    """
    mine = {key: entry for key, entry in entries.items() if whole is None or graph.get(key.address) is not None}
    users: dict[str, set[str]] = {}
    for key, entry in entries.items():
        if whole is not None and key not in mine:
            # Of what was found by its tag alone nobody remembers what it uses: it may be anything.
            needs = entry.made.needs if entry.made.settings else [resource.address for resource in graph]
            for address in (*needs, *whole.needs.get(key.address, ())):
                users.setdefault(address, set()).add(key.address)
    return _Planner(graph, mine, seen, run, users).plan()


def wanted(resource: Resource, entries: Mapping[Id, Entry], run: str, tags: Mapping[str, str] | None = None) -> Wanted:
    """The generation of a resource that counts now, with references and outputs as far as they are remembered."""
    return _wanted(resource, _by_address(entries), run, tags)


def all_wanted(
    graph: Graph, entries: Mapping[Id, Entry], run: str, tags: Mapping[str, str] | None = None
) -> dict[str, Wanted]:
    """`wanted` of every resource, by address."""
    known = _by_address(entries)
    return {resource.address: _wanted(resource, known, run, tags) for resource in graph}


def settings_of(resource: Resource, look_up: Callable[[Ref], str | None]) -> dict[str, Value]:
    """A resource's settings with the references that `look_up` knows replaced."""
    return {name: resolved(value, look_up) for name, value in resource.settings().items()}


def differences(
    resource: Resource, settings: Mapping[str, Value], before: Mapping[str, Json], seen: Seen | None
) -> tuple[Difference, ...]:
    """What of `settings` is not so. What cannot be seen is compared with `before`, what was last made.

    What is neither seen nor remembered is set again, unless only a new one could have it.
    """
    found: list[Difference] = []
    for name, value in settings.items():
        replaces = name in type(resource).FIXED
        visible = seen is not None and name in seen.settings
        if replaces and not visible and name not in before:
            continue
        remembered = as_json(before[name]) if name in before else None
        actual = as_json(seen.settings[name]) if seen is not None and visible else remembered
        after = as_json(value)
        if actual != after:
            drift = name in before and actual != remembered
            unknown = any(True for _ in refs(value))
            found.append(
                Difference(setting=name, before=actual, after=after, replaces=replaces, drift=drift, unknown=unknown)
            )
    return tuple(found)


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The outputs that differ."""
    return [name for name in sorted({**before, **after}) if before.get(name) != after.get(name)]


def deletion_needs(entries: Collection[Entry]) -> dict[str, frozenset[str]]:
    """For each address that is remembered, the remembered addresses that it needs. Never a circle.

    All generations count; where that is a circle (two resources changed places) the newest of each does.
    """
    newest_first = sorted(entries, key=lambda entry: entry.made.generation, reverse=True)
    needs = _needs(newest_first)
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError:
        newest = {entry.made.address: entry for entry in reversed(newest_first)}
        return _needs(newest.values())
    return needs


def _needs(entries: Iterable[Entry]) -> dict[str, frozenset[str]]:
    needs: dict[str, frozenset[str]] = {}
    for entry in entries:
        needs[entry.made.address] = needs.get(entry.made.address, frozenset[str]()) | frozenset(entry.made.needs)
    return {address: (needed & needs.keys()) - {address} for address, needed in needs.items()}


def _deletion_order(entries: Collection[Entry]) -> list[Entry]:
    """Entries so that nothing is deleted while something that needs it is there."""
    needs = {address: sorted(needed) for address, needed in sorted(deletion_needs(entries).items())}
    order = list(graphlib.TopologicalSorter(needs).static_order())
    place = {address: number for number, address in enumerate(order)}
    return sorted(entries, key=lambda entry: (-place[entry.made.address], entry.made.generation))


def _by_address(entries: Mapping[Id, Entry]) -> dict[str, list[Entry]]:
    """The generations of each address, oldest first."""
    known: dict[str, list[Entry]] = {}
    for key in sorted(entries):
        known.setdefault(key.address, []).append(entries[key])
    return known


def _wanted(
    resource: Resource, known: Mapping[str, Sequence[Entry]], run: str, tags: Mapping[str, str] | None
) -> Wanted:
    generation, entry = _current(resource, known)

    def look_up(ref: Ref) -> str | None:
        others = known.get(ref.address)
        return others[-1].made.outputs.get(ref.output) if others else None

    return Wanted(
        resource=resource,
        generation=generation,
        run=run,
        settings=settings_of(resource, look_up),
        outputs={} if entry is None else entry.made.outputs,
        extra=tags or {},
    )


def _current(resource: Resource, known: Mapping[str, Sequence[Entry]]) -> tuple[int, Entry | None]:
    """The generation that counts, and what is remembered of it: the newest that was not being deleted.

    After a deletion that was cut short, and where the newest is something of another name or region, it is the next
    one, of which nothing is remembered. What holds data or is shared has one generation only, and is taken up again.
    """
    generations = known.get(resource.address)
    if not generations:
        return 0, None
    newest = generations[-1]
    single = resource.LIFE in (Life.DATA, Life.SHARED)
    if resource.brought or not single:
        here = newest.made.generation
        name = Wanted(resource=resource, generation=here, run="", settings={}).name
        moved = (newest.made.name, newest.made.region) != (name, resource.region)
        if moved or (newest.phase is Phase.DELETING and not resource.brought):
            return here + 1, None
    return newest.made.generation, newest


class _Planner:
    """One pass over the graph, in order: what something refers to is decided before it."""

    def __init__(
        self,
        graph: Graph,
        entries: Mapping[Id, Entry],
        seen: Mapping[Id, Seen | None],
        run: str,
        users: dict[str, set[str]],
    ) -> None:
        """users: those of what is not in the graph and stays, by what they use; what stays for them is added."""
        self._graph = graph
        self._entries = entries
        self._known = _by_address(entries)
        self._seen = seen
        self._run = run
        self._outputs: dict[str, Mapping[str, str]] = {}
        self._problems: list[str] = []
        self._noted: dict[Id, Condition] = {}
        self._notes: list[str] = []
        self._users = users

    def plan(self) -> Plan:
        made = [self._decide(resource) for resource in self._graph]
        stays = {change.id for change in made}
        old = [entry for entry in _deletion_order(self._entries.values()) if entry.id not in stays]
        gone = [change for entry in old if (change := self._leave(entry)) is not None]
        return Plan(
            changes=(*made, *gone),
            problems=tuple(self._problems),
            noted=self._noted,
            notes=tuple(self._notes),
            outputs=self._outputs,
        )

    def _decide(self, resource: Resource) -> Change:
        generation, entry = _current(resource, self._known)
        seen = self._seen.get(Id(resource.address, generation))
        if resource.brought:
            return self._brought(resource, generation, seen, entry)
        if entry is not None and resource.LIFE is Life.DATA and entry.made.name != resource.name:
            return self._problem(
                resource,
                generation,
                f"is wanted instead of {entry.made.name}, which may hold data; change it back, or make the new one "
                "yourself and name it in `byo:`",
            )
        if seen is None:
            return self._absent(resource, generation, entry)
        if resource.LIFE is Life.SHARED:
            return self._as_it_is(resource, generation, seen, _taking(entry, seen), "shared")
        if seen.owner != self._run:
            whose = f"to {seen.owner}" if seen.owner else "to this run"
            negated = "belongs" if seen.owner else "does not belong"
            return self._problem(
                resource, generation, f"exists and {negated} {whose}; use it as it is with `byo:`, or take another name"
            )
        return self._present(resource, generation, seen, entry)

    def _brought(self, resource: Resource, generation: int, seen: Seen | None, entry: Entry | None) -> Change:
        if seen is None:
            return self._problem(resource, generation, "does not exist, and `byo:` names it; make it, or take it out")
        if seen.condition is Condition.BROKEN:
            text = f"cannot be used: {seen.detail}; mend it, or take it out of the spec"
            return self._problem(resource, generation, text)
        action = _taking(entry if entry is not None and entry.made.brought else None, seen)
        return self._as_it_is(resource, generation, seen, action, "yours; never changed")

    def _absent(self, resource: Resource, generation: int, entry: Entry | None) -> Change:
        if resource.LIFE is Life.JOB and entry is not None and entry.phase is not Phase.CREATING:
            if entry.condition is Condition.DONE:
                self._outputs[resource.address] = entry.made.outputs
                return _change(Action.KEEP, resource, generation, because="done")
            return self._create(resource, generation + 1, Action.REPLACE, "the cloud does not know it any more")
        was_there = entry is not None and entry.phase is not Phase.CREATING and not entry.made.brought
        because = "it is gone" if was_there else ""
        return self._create(resource, generation, Action.CREATE, because)

    def _present(self, resource: Resource, generation: int, seen: Seen, entry: Entry | None) -> Change:
        if seen.condition in (Condition.LOST, Condition.BROKEN):
            if resource.LIFE is Life.DATA:
                return self._problem(resource, generation, f"cannot be used: {seen.detail}")
            return self._create(resource, generation + 1, Action.REPLACE, f"{seen.condition.value}: {seen.detail}")
        if seen.condition is Condition.DONE:
            return self._as_it_is(resource, generation, seen, _taking(entry, seen), "done")
        settings = settings_of(resource, self._look_up)
        found = differences(resource, settings, _remembered(resource, entry), seen)
        if any(difference.replaces for difference in found):
            if resource.LIFE is Life.DATA:
                names = ", ".join(difference.setting for difference in found if difference.replaces)
                return self._problem(resource, generation, f"holds data, and {names} cannot be changed; change it back")
            return self._create(resource, generation + 1, Action.REPLACE, "", found)
        self._outputs[resource.address] = seen.outputs
        action, because = _taking(entry, seen), ""
        if action is Action.KEEP and found:
            action = Action.UPDATE
        elif action is Action.ADOPT and entry is not None and entry.phase is Phase.READY:
            because = f"another {' and '.join(moved(entry.made.outputs, seen.outputs))} than it was made with"
        shown = settings if found else {}
        return _change(action, resource, generation, because=because, differences=found, settings=shown)

    def _as_it_is(self, resource: Resource, generation: int, seen: Seen, action: Action, because: str) -> Change:
        self._outputs[resource.address] = seen.outputs
        key = Id(resource.address, generation)
        entry = self._entries.get(key)
        if entry is not None and entry.condition is not seen.condition:
            self._noted[key] = seen.condition
        return _change(action, resource, generation, because=because)

    def _create(
        self,
        resource: Resource,
        generation: int,
        action: Action,
        because: str,
        found: tuple[Difference, ...] = (),
    ) -> Change:
        settings = settings_of(resource, self._look_up)
        return _change(action, resource, generation, because=because, differences=found, settings=settings)

    def _leave(self, entry: Entry) -> Change | None:
        """What becomes of what nobody wants any more; None if it has to stay for now."""
        made = entry.made
        now = self._graph.get(made.address)
        # What was made here and is now named in `byo:` has become the user's.
        handed_over = now is not None and now.brought and now.name == made.name
        # What may hold data is deleted with the run only; by its tag it is found even then.
        kept = made.life is Life.DATA and len(self._graph) > 0
        stays = made.brought or made.life is Life.SHARED or handed_over or kept
        because = "replaced by a newer one" if now is not None else "not wanted any more"
        users = self._users.get(made.address)
        # One whose deletion was begun has no users any more, whatever they need by now.
        if users and not stays and entry.phase is not Phase.DELETING:
            for needed in made.needs:
                self._users.setdefault(needed, set()).add(made.address)
            text = f"{made.name} stays, for it is used by {_several(users)}; an apply without --target ends that"
            self._notes.append(f"{entry.id}: {text}")
            return None
        return Change(
            action=Action.FORGET if stays else Action.DELETE,
            address=made.address,
            generation=made.generation,
            kind=made.kind,
            name=made.name,
            region=made.region,
            why="",
            because=because,
        )

    def _problem(self, resource: Resource, generation: int, text: str) -> Change:
        self._problems.append(f"{resource.address}: {resource.name} {text}")
        return _change(Action.KEEP, resource, generation, because="see the problem")

    def _look_up(self, ref: Ref) -> str | None:
        return self._outputs.get(ref.address, {}).get(ref.output)


def _taking(entry: Entry | None, seen: Seen) -> Action:
    """Whether what is to stay as it is has to be taken into the state first, by which others refer to it."""
    known = entry is not None and entry.phase is Phase.READY and not moved(entry.made.outputs, seen.outputs)
    return Action.KEEP if known else Action.ADOPT


def _several(addresses: Collection[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(addresses) - _NAMED} more" if len(addresses) > _NAMED else ""
    return f"{', '.join(sorted(addresses)[:_NAMED])}{more}"


def _remembered(resource: Resource, entry: Entry | None) -> dict[str, Json]:
    """What a resource was last made with. Of a call whose end is not known, only what no update can have changed."""
    if entry is None:
        return {}
    certain = entry.phase is Phase.READY
    return {name: value for name, value in entry.made.settings.items() if certain or name in type(resource).FIXED}


def _change(
    action: Action,
    resource: Resource,
    generation: int,
    *,
    because: str = "",
    differences: tuple[Difference, ...] = (),
    settings: Mapping[str, Value] | None = None,
) -> Change:
    told = resource.grants() if action in (Action.CREATE, Action.REPLACE, Action.UPDATE, Action.ADOPT) else ()
    return Change(
        action=action,
        address=resource.address,
        generation=generation,
        kind=resource.KIND,
        name=Wanted(resource=resource, generation=generation, run="", settings={}).name,
        region=resource.region,
        why=resource.why,
        because=because,
        differences=differences,
        grants=() if resource.brought else told,
        settings={name: as_json(value) for name, value in (settings or {}).items()},
    )
