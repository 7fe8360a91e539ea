"""Carries a plan out: what does not wait for each other side by side, every intent noted before, every result after.

Whatever happens on the way (a crash, a lost reply, one resource that cannot be made), what was done is in the journal,
and the next plan begins from there. Decides nothing but this: a change whose only reason was a value not yet known,
and which turns out to be as it was, is left out.
"""

from __future__ import annotations

import enum
import graphlib
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from skerry.infra.graph import Life, Ref, Resource, as_json, refs, resolved
from skerry.infra.handler import Condition, Handler, Made, Wanted
from skerry.infra.plan import Action, Change, Difference, Plan, all_wanted, deletion_needs, moved, plan, settings_of
from skerry.infra.state import Entry, Id, Phase
from skerry.runtime.errors import Conflict, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from skerry.infra.graph import Graph
    from skerry.infra.handler import Seen
    from skerry.infra.statefile import Hold

# Calls to a cloud in flight: enough to hide its latency, and few enough that it does not throttle at once.
_AT_ONCE: Final = 16
# Names in one question: all of a kind cost a handler few calls, and several questions go side by side.
_READ_AT_ONCE: Final = 500


class Progress(enum.Enum):
    """How far a change is."""

    BEGUN = "begun"
    DONE = "done"
    UNNEEDED = "unneeded"
    """It turned out to be as it shall be."""
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line of progress. error: why it failed."""

    change: Change
    progress: Progress
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a plan. skipped: what waited for something that failed, or was not begun before the stop."""

    done: tuple[Change, ...]
    failed: Mapping[Id, SkerryError | TimeoutError]
    skipped: tuple[Change, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as planned."""
        return not self.failed and not self.skipped


def refresh(asked: Sequence[Wanted], handlers: Mapping[str, Handler], at_once: int = _AT_ONCE) -> dict[Id, Seen | None]:
    """What there is of each. Changes nothing. Raises what the handlers raise."""
    kinds: dict[str, list[Wanted]] = {}
    for one in asked:
        kinds.setdefault(one.resource.KIND, []).append(one)
    parts = [
        (kind, members[start : start + _READ_AT_ONCE])
        for kind, members in kinds.items()
        for start in range(0, len(members), _READ_AT_ONCE)
    ]

    def read(part: tuple[str, list[Wanted]]) -> Sequence[Seen | None]:
        return handlers[part[0]].read(part[1])

    with ThreadPoolExecutor(at_once, thread_name_prefix="refresh") as pool:
        answers = pool.map(read, parts)
        return {
            Id(one.resource.address, one.generation): seen
            for (_, members), found in zip(parts, answers, strict=True)
            for one, seen in zip(members, found, strict=True)
        }


def look(
    graph: Graph,
    entries: Mapping[Id, Entry],
    handlers: Mapping[str, Handler],
    run: str,
    tags: Mapping[str, str] | None = None,
    whole: Graph | None = None,
) -> Plan:
    """What would have to change now. Reads, changes nothing. whole: see `plan`. Raises what the handlers raise."""
    asked = all_wanted(graph, entries, run, tags)
    seen = refresh(list(asked.values()), handlers)
    # Nobody remembers them, but they are there: what refers to them can be looked for by what it refers to.
    while again := [more for one in asked.values() if (more := _resolved_by(one, seen)) is not None]:
        seen |= refresh(again, handlers)
        asked |= {one.resource.address: one for one in again}
    return plan(graph, entries, seen, run, whole)


def _resolved_by(one: Wanted, seen: Mapping[Id, Seen | None]) -> Wanted | None:
    """The same with references resolved by what was seen; None if that adds nothing, or it was found without."""
    if seen.get(Id(one.resource.address, one.generation)) is not None:
        return None
    outputs = {key.address: found.outputs for key, found in seen.items() if found is not None}

    def look_up(ref: Ref) -> str | None:
        return outputs.get(ref.address, {}).get(ref.output)

    settings = {name: resolved(value, look_up) for name, value in one.settings.items()}
    return None if settings == dict(one.settings) else replace(one, settings=settings)


class Applying:
    """One plan on its way. `stop` lets what is in flight end and begins nothing more."""

    def __init__(
        self,
        planned: Plan,
        graph: Graph,
        hold: Hold,
        handlers: Mapping[str, Handler],
        on_step: Callable[[Step], None],
        at_once: int = _AT_ONCE,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._plan = planned
        self._graph = graph
        self._hold = hold
        self._handlers = handlers
        self._on_step = on_step
        self._at_once = at_once
        self._tags = tags or {}
        self._changes = {change.id: change for change in planned.changes}
        self._guard = threading.Lock()
        self._unneeded: set[str] = set()
        self._stopping = threading.Event()
        self.running = False

    @staticmethod
    def nothing() -> Outcome:
        """What becomes of a plan without changes."""
        return Outcome(done=(), failed={}, skipped=())

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopping.set()

    def run(self) -> Outcome:
        """Carry the plan out. Raises only what no single change can be blamed for (the state cannot be written)."""
        for key, condition in self._plan.noted.items():
            entry = self._hold.entry(key)
            if entry is not None:
                self._hold.note(key, replace(entry, condition=condition))
        order = graphlib.TopologicalSorter(_waits(self._plan, self._graph, self._hold))
        order.prepare()
        ended: dict[Id, Progress | SkerryError | TimeoutError] = {}
        self.running = True
        try:
            self._work(order, ended)
        finally:
            # Whatever ends this: what was not begun by now is not begun any more.
            self._stopping.set()
            self.running = False
        acting = [change for change in self._plan.changes if change.acts]
        return Outcome(
            done=tuple(change for change in acting if ended.get(change.id) is Progress.DONE),
            failed={key: error for key, error in ended.items() if not isinstance(error, Progress)},
            skipped=tuple(change for change in acting if change.id not in ended),
        )

    def _work(
        self, order: graphlib.TopologicalSorter[Id], ended: dict[Id, Progress | SkerryError | TimeoutError]
    ) -> None:
        """Begin what can be begun, and note how it ended, until nothing is left or a stop is asked for."""
        flying: dict[Future[Progress | None], Change] = {}
        pool = ThreadPoolExecutor(self._at_once, thread_name_prefix="apply")
        try:
            while True:
                while not self._stopping.is_set() and (ready := order.get_ready()):
                    for change in map(self._changes.__getitem__, ready):
                        if change.acts:
                            flying[pool.submit(self._carry_out, change)] = change
                        else:
                            order.done(change.id)
                if not flying:
                    return
                for future in wait(flying, return_when=FIRST_COMPLETED).done:
                    change = flying.pop(future)
                    if (over := self._over(change, future)) is not None:
                        ended[change.id] = over
                    if isinstance(over, Progress):
                        order.done(change.id)
        except BaseException:
            self._stopping.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _over(self, change: Change, future: Future[Progress | None]) -> Progress | SkerryError | TimeoutError | None:
        """Tell how a change ended; None if it was not begun. Raises what no change can be blamed for."""
        try:
            progress = future.result()
        except (SkerryError, TimeoutError) as error:
            self._on_step(Step(change=change, progress=Progress.FAILED, error=str(error)))
            if self._hold.lost:
                self._stopping.set()
            return error
        if progress is not None:
            self._on_step(Step(change=change, progress=progress))
        return progress

    def _carry_out(self, change: Change) -> Progress | None:
        """Do it, unless a stop was asked for before it was begun."""
        if self._stopping.is_set():
            return None
        self._on_step(Step(change=change, progress=Progress.BEGUN))
        leaves = change.action in (Action.DELETE, Action.FORGET)
        acted = self._leave(change) if leaves else self._make(change)
        return Progress.DONE if acted else Progress.UNNEEDED

    def _make(self, change: Change) -> bool:
        """Make or change it; False if there was nothing to do after all."""
        resource = self._graph.get(change.address)
        if resource is None:
            raise LookupError(change.address)
        entry = self._hold.entry(change.id)
        known = self._plan.outputs.get(change.address)
        now = Wanted(
            resource=resource,
            generation=change.generation,
            run=self._hold.run,
            settings=settings_of(resource, self._look_up),
            outputs=known or ({} if entry is None else entry.made.outputs),
            extra=self._tags,
        )
        if unknown := [str(ref) for ref in refs(now.settings)]:
            raise Conflict(f"{change.address} needs {', '.join(unknown)}, which is not there; run `skerry plan` again")
        # What is to be taken in is, whatever of it differs.
        if change.action is not Action.ADOPT and _as_it_was(change, now):
            with self._guard:
                self._unneeded.add(change.address)
            return False
        match change.action:
            case Action.CREATE | Action.REPLACE:
                if resource.ALONE:
                    self._end_others(change)
                self._hold.note(change.id, Entry(made=made_of(now, {}), phase=Phase.CREATING))
                outputs = self._handlers[resource.KIND].create(now)
            case _:
                outputs = self._change_in_place(change, now, entry)
        self._hold.note(change.id, Entry(made=made_of(now, outputs), condition=self._condition(change)))
        if known is not None and (names := moved(known, outputs)):
            raise Conflict(
                f"{change.address}: {' and '.join(names)} changed with it, and what refers to it was planned with what "
                "was before; run `skerry plan` again"
            )
        return True

    def _change_in_place(self, change: Change, now: Wanted, entry: Entry | None) -> Mapping[str, str]:
        """Update or adopt: what differs is set, if it is ours."""
        resource = now.resource
        handler = self._handlers[resource.KIND]
        changed = [one.setting for one in change.differences if not _turned_out_so(one, now)]
        if changed and not resource.brought and resource.LIFE is not Life.SHARED:
            if entry is not None and entry.phase is Phase.READY:
                self._hold.note(change.id, replace(entry, phase=Phase.UPDATING))
            return handler.update(now, changed)
        (seen,) = handler.read([now])
        if seen is None:
            raise Conflict(f"{change.address}: {change.name} went away after it was planned; run `skerry plan` again")
        return seen.outputs

    def _leave(self, change: Change) -> bool:
        """Delete or forget."""
        if change.address in self._unneeded:
            return False
        entry = self._hold.entry(change.id)
        if entry is not None and change.action is Action.DELETE:
            self._delete(entry)
        elif entry is not None:
            self._hold.note(change.id, None)
        # One that cannot be there twice went before its successor was made.
        return True

    def _delete(self, entry: Entry) -> None:
        self._hold.note(entry.id, replace(entry, phase=Phase.DELETING))
        self._handlers[entry.made.kind].delete(entry.made)
        self._hold.note(entry.id, None)

    def _end_others(self, change: Change) -> None:
        """Delete every other generation of something that can be there once only."""
        for entry in self._hold.generations(change.address):
            if entry.made.generation != change.generation:
                self._delete(entry)

    def _condition(self, change: Change) -> Condition:
        return Condition.DONE if change.because == Condition.DONE.value else Condition.READY

    def _look_up(self, ref: Ref) -> str | None:
        """What a reference stands for now: of the newest generation that is there."""
        found = self._hold.generations(ref.address)
        return found[-1].made.outputs.get(ref.output) if found else None


def _waits(planned: Plan, graph: Graph, hold: Hold) -> dict[Id, set[Id]]:
    """For each change, those that must be over before it."""
    main = {
        change.address: change.id for change in planned.changes if change.action not in (Action.DELETE, Action.FORGET)
    }
    waits: dict[Id, set[Id]] = {key: {main[needed] for needed in graph.needs[address]} for address, key in main.items()}
    leaving = [change for change in planned.changes if change.id not in waits]
    used, uses = _users(deletion_needs(hold.entries)), _users(graph.needs)
    leaving_of: dict[str, set[Id]] = {}
    for change in leaving:
        leaving_of.setdefault(change.address, set()).add(change.id)
    for change in leaving:
        before: set[Id] = set()
        if (new := main.get(change.address)) is not None:
            before.add(new)
        for address in used.get(change.address, ()):
            # Whoever used it has to be gone, or to use something else.
            before |= leaving_of.get(address, set())
            before |= {main[address]} if address in main else set()
        # Of what was found by its tag alone, nobody remembers what it used.
        before |= {main[address] for address in uses.get(change.address, ())}
        waits[change.id] = before - {change.id}
    return waits


def _users(needs: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """For each address, those that need it."""
    users: dict[str, list[str]] = {}
    for address, needed in needs.items():
        for one in needed:
            users.setdefault(one, []).append(address)
    return users


def _as_it_was(change: Change, now: Wanted) -> bool:
    """Whether all that was to change is, now that its values are known, what it was."""
    found = change.differences
    return bool(found) and not change.because and all(_turned_out_so(one, now) for one in found)


def _turned_out_so(one: Difference, now: Wanted) -> bool:
    """Whether a setting whose value was not known is what it was."""
    return one.unknown and as_json(now.settings[one.setting]) == one.before


def made_of(now: Wanted, outputs: Mapping[str, str]) -> Made:
    """What state remembers of something that was made so."""
    resource: Resource = now.resource
    return Made(
        address=resource.address,
        kind=resource.KIND,
        name=now.name,
        generation=now.generation,
        region=resource.region,
        life=resource.LIFE,
        brought=resource.brought,
        settings={name: as_json(value) for name, value in now.settings.items()},
        outputs=dict(outputs),
        needs=tuple(sorted(resource.needs())),
    )
