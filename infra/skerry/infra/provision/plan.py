"""Computes the changes that bring a cloud to the desired graph, with a reason for each: one pure function.

Compares desired (the graph), remembered (the state) and observed (what handlers read) field by field. Does no I/O.
"""

from __future__ import annotations

import graphlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from skerry.infra.provision.graph import Json, Life, Ref, Resource, as_json, refs, resolved
from skerry.infra.provision.handler import Condition, Desired
from skerry.infra.provision.planned_changes import (
    CANCELLED,
    DELETED_OUTSIDE,
    REQUESTED,
    Action,
    Change,
    Difference,
    Plan,
    RightsChange,
)
from skerry.infra.provision.state import Id, StatePhase
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from skerry.infra.provision.graph import Graph, Value
    from skerry.infra.provision.handler import Observed, StateRecord
    from skerry.infra.provision.state import Entry


# So many users of a resource are named in a note.
_NAMED: Final = 3


def plan(
    graph: Graph,
    entries: Mapping[Id, Entry],
    observed: Mapping[Id, Observed | None],
    run: str,
    whole: Graph | None = None,
    to_replace: Collection[str] = (),
) -> Plan:
    """The changes that bring `observed` to `graph`, for the run with this URI.

    entries: the state. observed: one for each of `all_desired`; None or absent means that it does not exist.
    whole: the graph that `graph` is a part of. Other resources in the state stay, and so do the resources that they
    use: a replaced one stays beside its replacement until a plan of the whole graph deletes it.
    to_replace: addresses of resources that get a new generation although nothing in them differs. Raises Invalid for
    an unknown one, and for one that is never replaced.
    """
    for address in to_replace:
        resource = graph.get(address)
        if resource is None and whole is not None and whole.get(address) is not None:
            raise Invalid(f"--replace {address} is outside of the targets; add --target {address}")
        if resource is None:
            raise Invalid(f"the spec has no resource {address}; run `skerry plan` to list them")
        if resource.brought or resource.SINGLE or resource.LIFE in (Life.DATA, Life.SHARED):
            raise Invalid(f"{address} is never replaced: it holds data, or others use it; leave out --replace")
    mine = {key: entry for key, entry in entries.items() if whole is None or graph.get(key.address) is not None}
    users: dict[str, set[str]] = {}
    for key, entry in entries.items():
        if whole is not None and key not in mine:
            # A resource that was found by its tag alone has no recorded needs: it may use anything.
            needs = entry.record.needs if entry.record.settings else [resource.address for resource in graph]
            for address in (*needs, *whole.needs.get(key.address, ())):
                users.setdefault(address, set()).add(key.address)
    return _Planner(graph, mine, observed, run, users, to_replace).plan()


def desired_of(
    resource: Resource, entries: Mapping[Id, Entry], run: str, tags: Mapping[str, str] | None = None
) -> Desired:
    """The current generation of a resource, with references and outputs as far as the state has them."""
    return all_desired([resource], entries, run, tags)[resource.address]


def all_desired(
    resources: Iterable[Resource], entries: Mapping[Id, Entry], run: str, tags: Mapping[str, str] | None = None
) -> dict[str, Desired]:
    """`desired_of` every resource, by address."""
    known = _by_address(entries)

    def look_up(ref: Ref) -> str | None:
        others = known.get(ref.address)
        return others[-1].record.outputs.get(ref.output) if others else None

    def desired(resource: Resource) -> Desired:
        generation, entry = _current(resource, known)
        return Desired(
            resource=resource,
            generation=generation,
            run=run,
            settings=settings_of(resource, look_up),
            outputs={} if entry is None else entry.record.outputs,
            extra=tags or {},
        )

    return {resource.address: desired(resource) for resource in resources}


def settings_of(resource: Resource, look_up: Callable[[Ref], str | None]) -> dict[str, Value]:
    """A resource's settings with the references that `look_up` knows replaced."""
    return {name: resolved(value, look_up) for name, value in resource.settings().items()}


def differences(
    resource: Resource, settings: Mapping[str, Value], before: Mapping[str, Json], observed: Observed | None
) -> tuple[Difference, ...]:
    """The settings that differ. One that cannot be read back is compared with `before`, the last applied ones.

    One that is neither readable nor in `before` counts as different, unless it would force a replacement.
    """
    differing: list[Difference] = []
    for name, value in settings.items():
        replaces = name in type(resource).FIXED
        visible = observed is not None and name in observed.settings
        if replaces and not visible and name not in before:
            continue
        remembered = as_json(before[name]) if name in before else None
        actual = as_json(observed.settings[name]) if observed is not None and visible else remembered
        after = as_json(value)
        if actual != after:
            drift = name in before and actual != remembered
            differing.append(
                Difference(
                    setting=name,
                    before=actual,
                    after=after,
                    replaces=replaces,
                    drift=drift,
                    by=observed.changed_by.get(name, "") if observed is not None and drift else "",
                    unknown=any(True for _ in refs(value)),
                )
            )
    return tuple(differing)


def changed_outputs(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The names of the outputs that differ."""
    return [name for name in sorted({**before, **after}) if before.get(name) != after.get(name)]


def deletion_needs(entries: Collection[Entry]) -> dict[str, frozenset[str]]:
    """For each address in the state, the addresses in the state that it needs. Never a cycle.

    All generations count; if that gives a cycle (two resources changed places), only the newest of each.
    """
    newest_first = sorted(entries, key=lambda entry: entry.record.generation, reverse=True)
    needs = _needs(newest_first)
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError:
        newest = {entry.record.address: entry for entry in reversed(newest_first)}
        return _needs(newest.values())
    return needs


def _needs(entries: Iterable[Entry]) -> dict[str, frozenset[str]]:
    needs: dict[str, frozenset[str]] = {}
    for entry in entries:
        needs[entry.record.address] = needs.get(entry.record.address, frozenset[str]()) | frozenset(entry.record.needs)
    return {address: (needed & needs.keys()) - {address} for address, needed in needs.items()}


def _deletion_order(entries: Collection[Entry]) -> list[Entry]:
    """Entries in an order in which no resource is deleted while another one needs it."""
    needs = {address: sorted(needed) for address, needed in sorted(deletion_needs(entries).items())}
    order = list(graphlib.TopologicalSorter(needs).static_order())
    position = {address: number for number, address in enumerate(order)}
    return sorted(entries, key=lambda entry: (-position[entry.record.address], entry.record.generation))


def _by_address(entries: Mapping[Id, Entry]) -> dict[str, list[Entry]]:
    """The generations of each address, oldest first."""
    known: dict[str, list[Entry]] = {}
    for key in sorted(entries):
        known.setdefault(key.address, []).append(entries[key])
    return known


def _current(resource: Resource, known: Mapping[str, Sequence[Entry]]) -> tuple[int, Entry | None]:
    """The current generation and its entry: the newest one that is not being deleted.

    After an interrupted deletion, and if the newest has another name or region, it is the next one, without an entry.
    Data, shared and single resources have only one generation, which is used again.
    """
    generations = known.get(resource.address)
    if not generations:
        return 0, None
    newest = generations[-1]
    single = resource.LIFE in (Life.DATA, Life.SHARED)
    if resource.brought or not single:
        number = newest.record.generation
        name = Desired(resource=resource, generation=number, run="", settings={}).name
        renamed = (newest.record.name, newest.record.region) != (name, resource.region)
        if renamed or (newest.phase is StatePhase.DELETING and not (resource.brought or resource.SINGLE)):
            return number + 1, None
    return newest.record.generation, newest


class _Planner:
    """One pass over the graph in dependency order: a resource is decided after the ones that it references."""

    def __init__(
        self,
        graph: Graph,
        entries: Mapping[Id, Entry],
        observed: Mapping[Id, Observed | None],
        run: str,
        users: dict[str, set[str]],
        to_replace: Collection[str],
    ) -> None:
        """users: resources outside of the graph that stay, by the address they use; extended while planning."""
        self._to_replace = to_replace
        self._graph = graph
        self._entries = entries
        self._known = _by_address(entries)
        self._observed = observed
        self._run = run
        self._outputs: dict[str, Mapping[str, str]] = {}
        self._problems: list[str] = []
        self._new_conditions: dict[Id, Condition] = {}
        self._notes: list[str] = []
        self._kept: list[str] = []
        self._shared: set[str] = set()
        self._users = users

    def plan(self) -> Plan:
        kept = [self._decide(resource) for resource in self._graph]
        stays = {change.id for change in kept}
        old = _deletion_order([entry for entry in self._entries.values() if entry.id not in stays])
        removals = [change for entry in old if (change := self._remove(entry)) is not None]
        return Plan(
            changes=(*kept, *removals),
            problems=tuple(self._problems),
            new_conditions=self._new_conditions,
            notes=tuple(self._notes),
            outputs=self._outputs,
            kept=tuple(self._kept),
            shared=frozenset(self._shared),
        )

    def _decide(self, resource: Resource) -> Change:
        generation, entry = _current(resource, self._known)
        observed = self._observed.get(Id(resource.address, generation))
        other_run = observed is not None and observed.owner not in (None, self._run)
        if other_run and not resource.brought and resource.LIFE is Life.DATA:
            self._shared.add(resource.address)
        if resource.brought or resource.address in self._shared:
            return self._brought(resource, generation, observed, entry)
        if entry is not None and entry.record.brought:
            entry = None  # it was another's when the state recorded it
        if entry is not None and resource.LIFE is Life.DATA and entry.record.name != resource.name:
            return self._problem(
                resource,
                generation,
                f"would replace {entry.record.name}, which may hold data; change the name back, or create the new one "
                "yourself and name it in `byo:`",
            )
        if observed is None:
            return self._absent(resource, generation, entry)
        if resource.LIFE is Life.SHARED:
            return self._keep(resource, generation, observed, _keep_or_adopt(entry, observed), "shared")
        if observed.owner != self._run:
            return self._problem(resource, generation, _foreign(resource, observed))
        return self._present(resource, generation, observed, entry)

    def _brought(self, resource: Resource, generation: int, observed: Observed | None, entry: Entry | None) -> Change:
        if observed is None:
            return self._problem(resource, generation, "is named in `byo:` but does not exist; create it, or remove it")
        if observed.condition is Condition.BROKEN:
            text = f"is unusable: {observed.detail}; repair it, or remove it from the spec"
            return self._problem(resource, generation, text)
        owner = observed.owner if resource.address in self._shared else None
        differing = differences(resource, settings_of(resource, self._look_up), {}, observed)
        if lacking := [item.setting for item in differing if item.setting in type(resource).PROTECTS]:
            text = f"does not protect the records of this run, because of its {' and '.join(lacking)}"
            if owner is not None:
                remedy = f"run `skerry apply` for {owner}, to which it belongs, or name another at `store`"
                return self._problem(resource, generation, f"{text}; {remedy}")
            self._notes.append(f"{resource.address}: {resource.name} is yours and {text}")
        for item in differing:
            if item.setting in type(resource).DEMANDED:
                text = f"has {item.setting} {item.before or 'none'}, and this spec demands {item.after}"
                if owner is not None:
                    remedy = f"write the same rule into the spec of {owner} and run `skerry apply` for it"
                    return self._problem(resource, generation, f"{text}; {remedy}, or name another bucket")
                self._notes.append(f"{resource.address}: {resource.name} is yours and {text}")
        action = _keep_or_adopt(entry if entry is not None and entry.record.brought else None, observed)
        because = "yours; never changed" if owner is None else f"of the run {owner}; never changed"
        return self._keep(resource, generation, observed, action, because)

    def _absent(self, resource: Resource, generation: int, entry: Entry | None) -> Change:
        if resource.LIFE is Life.JOB and entry is not None and entry.phase is not StatePhase.CREATING:
            if entry.condition is Condition.DONE:
                self._outputs[resource.address] = entry.record.outputs
                return _change(Action.KEEP, resource, generation, because="done")
            because = CANCELLED if entry.stopped else "the cloud has no record of it"
            return self._create(resource, generation + 1, Action.REPLACE, because)
        changing = (StatePhase.CREATING, StatePhase.DELETING)
        existed = entry is not None and entry.phase not in changing and not entry.record.brought
        because = DELETED_OUTSIDE if existed else ""
        return self._create(resource, generation, Action.CREATE, because)

    def _present(self, resource: Resource, generation: int, observed: Observed, entry: Entry | None) -> Change:
        if resource.address in self._to_replace or observed.condition in (Condition.LOST, Condition.BROKEN):
            if resource.LIFE is Life.DATA:
                return self._problem(resource, generation, f"is unusable: {observed.detail}")
            because = f"{observed.condition.value}: {observed.detail}"
            because = REQUESTED if resource.address in self._to_replace else because
            because = CANCELLED if entry is not None and entry.stopped else because
            return self._create(resource, generation + 1, Action.REPLACE, because)
        if observed.condition is Condition.DONE:
            return self._keep(resource, generation, observed, _keep_or_adopt(entry, observed), "done")
        settings = settings_of(resource, self._look_up)
        differing = differences(resource, settings, _remembered(resource, entry), observed)
        replaced = [item.setting for item in differing if item.replaces]
        refused = [text for item in differing if (text := resource.refusal(item.setting, item.before, item.after))]
        if replaced and resource.LIFE is Life.DATA:
            refused = [f"holds data, and {', '.join(replaced)} cannot be changed in place; change it back"]
        if refused:
            return self._problem(resource, generation, refused[0])
        if replaced:
            return self._create(resource, generation + 1, Action.REPLACE, "", differing)
        self._outputs[resource.address] = observed.outputs
        self._kept += [f"{resource.address}: {text}" for text in observed.kept]
        action, because = _keep_or_adopt(entry, observed), ""
        if action is Action.KEEP and differing:
            action = Action.UPDATE
        elif action is Action.ADOPT and entry is not None and entry.phase is StatePhase.READY:
            changed = " and ".join(changed_outputs(entry.record.outputs, observed.outputs))
            because = f"{changed} changed since it was created"
        shown = settings if differing else {}
        return _change(action, resource, generation, because=because, differences=differing, settings=shown)

    def _keep(self, resource: Resource, generation: int, observed: Observed, action: Action, because: str) -> Change:
        self._outputs[resource.address] = observed.outputs
        key = Id(resource.address, generation)
        entry = self._entries.get(key)
        if entry is not None and entry.condition is not observed.condition:
            self._new_conditions[key] = observed.condition
        return _change(action, resource, generation, because=because)

    def _create(
        self,
        resource: Resource,
        generation: int,
        action: Action,
        because: str,
        differing: tuple[Difference, ...] = (),
    ) -> Change:
        settings = settings_of(resource, self._look_up)
        return _change(action, resource, generation, because=because, differences=differing, settings=settings)

    def _remove(self, entry: Entry) -> Change | None:
        """Delete or forget a generation that is not desired any more; None if it must stay for now."""
        record = entry.record
        now = self._graph.get(record.address)
        # Created by skerry and now named in `byo:`: it is the user's from now on.
        handed_over = now is not None and now.brought and now.name == record.name
        # The same resource as the newer generation, which has adopted it.
        adopted = now is not None and now.SINGLE and (now.name, now.region) == (record.name, record.region)
        # Data is deleted only with the run, which finds it by its tag.
        kept = record.life is Life.DATA and len(self._graph) > 0
        stays = record.brought or record.life is Life.SHARED or handed_over or adopted or kept
        because = "replaced by a newer one" if now is not None else "no longer in the spec"
        users = self._users.get(record.address)
        # A deletion that was started continues: its users were removed before.
        if users and not stays and entry.phase is not StatePhase.DELETING:
            for needed in record.needs:
                self._users.setdefault(needed, set()).add(record.address)
            text = f"{record.name} stays because it is used by {_several(users)}; apply without --target to remove it"
            self._notes.append(f"{entry.id}: {text}")
            return None
        if stays:
            return Change.of(record, Action.FORGET, because)
        return replace(Change.of(record, Action.DELETE, because), rights=_compared(record, record.settings, {}))

    def _problem(self, resource: Resource, generation: int, text: str) -> Change:
        self._problems.append(f"{resource.address}: {resource.name} {text}")
        return _change(Action.KEEP, resource, generation, because="see the problem")

    def _look_up(self, ref: Ref) -> str | None:
        return self._outputs.get(ref.address, {}).get(ref.output)


def _keep_or_adopt(entry: Entry | None, observed: Observed) -> Action:
    """KEEP if the state has it with its current outputs; ADOPT if they must be written to the state first."""
    if entry is None or entry.phase is not StatePhase.READY or changed_outputs(entry.record.outputs, observed.outputs):
        return Action.ADOPT
    return Action.KEEP


def _foreign(resource: Resource, observed: Observed) -> str:
    """Describes a resource that has the name of the run's and is not tagged as its own, with what to do."""
    owner = f"belongs to {observed.owner}" if observed.owner else "is not tagged as part of this run"
    if resource.LIFE is Life.JOB:
        return f"exists but {owner}; end it with `skerry cancel`"
    mine = "" if observed.owner else f"if this run created it, run `skerry import {resource.address}`; otherwise "
    return f"exists but {owner}; {mine}name it in `byo:` to use it, or choose another name"


def _several(addresses: Collection[str]) -> str:
    """The first few addresses and the number of the others."""
    more = f" and {len(addresses) - _NAMED} more" if len(addresses) > _NAMED else ""
    return f"{', '.join(sorted(addresses)[:_NAMED])}{more}"


def _remembered(resource: Resource, entry: Entry | None) -> dict[str, Json]:
    """The settings last applied. After a call with an unknown result, only those that no update can have changed."""
    if entry is None:
        return {}
    certain = entry.phase is StatePhase.READY
    return {name: value for name, value in entry.record.settings.items() if certain or name in type(resource).FIXED}


def _change(
    action: Action,
    resource: Resource,
    generation: int,
    *,
    because: str = "",
    differences: tuple[Difference, ...] = (),
    settings: Mapping[str, Value] | None = None,
) -> Change:
    record = Desired(resource=resource, generation=generation, run="", settings=settings or {}).to_record({})
    return replace(
        Change.of(record, action, because),
        why=resource.why,
        differences=differences,
        # A replacement gets all of its rights anew, and the deletion of the former one takes all of its away.
        rights=() if resource.brought else _changed_rights(record, () if action is Action.REPLACE else differences),
        settings=record.settings,
    )


def _changed_rights(record: StateRecord, differences: Sequence[Difference]) -> tuple[RightsChange, ...]:
    """The rights that a resource with these settings gets; without differences it had none before."""
    before = {**record.settings, **{item.setting: item.before for item in differences}} if differences else {}
    return _compared(record, before, record.settings)


def _compared(record: StateRecord, before: Mapping[str, Json], after: Mapping[str, Json]) -> tuple[RightsChange, ...]:
    kind = Resource.OF_KIND.get(record.kind, Resource)
    old, new = (kind.rights(record.name, settings) if settings else dict[str, "Json"]() for settings in (before, after))
    return tuple(
        RightsChange(document=title, before=old.get(title), after=new.get(title))
        for title in {**old, **new}
        if old.get(title) != new.get(title)
    )
