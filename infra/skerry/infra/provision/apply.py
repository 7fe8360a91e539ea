"""Applies a plan: runs independent changes in parallel and journals each one before and after the cloud call.

After a crash, a lost reply or a failed change, the journal holds what was done, and the next plan starts from there.
The only decision made here: a change that was planned because a value was unknown is skipped if the value turns out
to be the current one.
"""

from __future__ import annotations

import enum
import graphlib
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from skerry.infra.provision.graph import Life, Ref, as_json, refs
from skerry.infra.provision.handler import Condition, Desired
from skerry.infra.provision.observe_resources import CALLS_AT_ONCE
from skerry.infra.provision.plan import changed_outputs, deletion_needs, settings_of
from skerry.infra.provision.planned_changes import Action, Change
from skerry.infra.provision.state import Entry, Id, StatePhase
from skerry.runtime.errors import Conflict, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from skerry.infra.provision.graph import Graph
    from skerry.infra.provision.handler import Handler
    from skerry.infra.provision.planned_changes import Difference, Plan
    from skerry.infra.provision.state_store import LockedState

Failure: TypeAlias = SkerryError | TimeoutError


class Progress(enum.Enum):
    """The progress of a change."""

    BEGUN = "begun"
    DONE = "done"
    UNNEEDED = "unneeded"
    """Skipped: the resource turned out to be as planned already."""
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line of progress. error: the cause of a failure."""

    change: Change
    progress: Progress
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of an apply. skipped: changes that depend on a failed one, or that the stop prevented."""

    done: tuple[Change, ...]
    failed: Mapping[Id, Failure]
    skipped: tuple[Change, ...]

    @property
    def ok(self) -> bool:
        """True if every change was applied."""
        return not self.failed and not self.skipped

    @staticmethod
    def empty() -> Outcome:
        """The outcome of a plan without changes."""
        return Outcome(done=(), failed={}, skipped=())


class ApplyRun:
    """One plan being applied. `stop` lets the calls in flight end and starts no others.

    stopping: set once no more changes are started. running: whether `run` is in progress.
    """

    def __init__(
        self,
        planned: Plan,
        graph: Graph,
        state: LockedState,
        handlers: Mapping[str, Handler],
        on_step: Callable[[Step], None],
        at_once: int = CALLS_AT_ONCE,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._plan = planned
        self._graph = graph.bringing(planned.shared)
        self._state = state
        self._handlers = handlers
        self._on_step = on_step
        self._at_once = at_once
        self._tags = tags or {}
        self._changes = {change.id: change for change in planned.changes}
        self._guard = threading.Lock()
        self._unneeded: set[str] = set()
        self.stopping = threading.Event()
        self.running = False

    def stop(self) -> None:
        """Start no more changes."""
        self.stopping.set()

    def run(self) -> Outcome:
        """Apply the plan. Raises only errors that belong to no single change (the state cannot be written)."""
        for key, condition in self._plan.new_conditions.items():
            entry = self._state.entry(key)
            if entry is not None:
                self._state.note(key, replace(entry, condition=condition))
        order = graphlib.TopologicalSorter(_dependencies(self._plan, self._graph, self._state))
        order.prepare()
        results: dict[Id, Progress | Failure] = {}
        self.running = True
        try:
            self._work(order, results)
        finally:
            # However this ends, changes that were not started by now are not started any more.
            self.stopping.set()
            self.running = False
        acting = [change for change in self._plan.changes if change.acts]
        return Outcome(
            done=tuple(change for change in acting if results.get(change.id) is Progress.DONE),
            failed={key: error for key, error in results.items() if not isinstance(error, Progress)},
            skipped=tuple(change for change in acting if change.id not in results),
        )

    def _work(self, order: graphlib.TopologicalSorter[Id], results: dict[Id, Progress | Failure]) -> None:
        """Start every change that is ready and collect the results, until none is left or a stop is requested."""
        in_flight: dict[Future[Progress | None], Change] = {}
        pool = ThreadPoolExecutor(self._at_once, thread_name_prefix="apply")
        try:
            while True:
                while not self.stopping.is_set() and (ready := order.get_ready()):
                    for change in map(self._changes.__getitem__, ready):
                        if change.acts:
                            in_flight[pool.submit(self._apply, change)] = change
                        else:
                            order.done(change.id)
                if not in_flight:
                    return
                for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                    change = in_flight.pop(future)
                    if (result := self._result(change, future)) is not None:
                        results[change.id] = result
                    if isinstance(result, Progress):
                        order.done(change.id)
        except BaseException:
            self.stopping.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _result(self, change: Change, future: Future[Progress | None]) -> Progress | Failure | None:
        """Report how a change ended; None if it was not started. Raises errors that belong to no change."""
        try:
            progress = future.result()
        except (SkerryError, TimeoutError) as error:
            self._on_step(Step(change=change, progress=Progress.FAILED, error=str(error)))
            if self._state.lost:
                self.stopping.set()
            return error
        if progress is not None:
            self._on_step(Step(change=change, progress=progress))
        return progress

    def _apply(self, change: Change) -> Progress | None:
        """Apply one change; None if a stop was requested before."""
        if self.stopping.is_set():
            return None
        self._on_step(Step(change=change, progress=Progress.BEGUN))
        removes = change.action in (Action.DELETE, Action.FORGET)
        acted = self._remove(change) if removes else self._create_or_update(change)
        return Progress.DONE if acted else Progress.UNNEEDED

    def _create_or_update(self, change: Change) -> bool:
        """Create, replace, update or adopt; False if it turned out to be unneeded."""
        resource = self._graph.get(change.address)
        if resource is None:
            raise LookupError(change.address)
        entry = self._state.entry(change.id)
        known = self._plan.outputs.get(change.address)
        desired = Desired(
            resource=resource,
            generation=change.generation,
            run=self._state.run,
            settings=settings_of(resource, self._look_up),
            outputs=known or ({} if entry is None else entry.record.outputs),
            extra=self._tags,
        )
        if missing := [str(ref) for ref in refs(desired.settings)]:
            raise Conflict(
                f"{change.address} needs {', '.join(missing)}, which does not exist; run `skerry plan` again"
            )
        # An adoption is always written to the state.
        if change.action is not Action.ADOPT and _is_unneeded(change, desired):
            with self._guard:
                self._unneeded.add(change.address)
            self._record_existing(desired)
            return False
        if change.action in (Action.CREATE, Action.REPLACE):
            if resource.ALONE:
                self._delete_other_generations(change)
            self._state.note(change.id, Entry(record=desired.to_record({}), phase=StatePhase.CREATING))
            outputs = self._handlers[resource.KIND].create(desired)
        else:
            outputs = self._update_or_adopt(change, desired, entry)
        condition = Condition.DONE if change.because == Condition.DONE.value else Condition.READY
        self._state.note(change.id, Entry(record=desired.to_record(outputs), condition=condition))
        if known is not None and (names := changed_outputs(known, outputs)):
            raise Conflict(
                f"{change.address}: the update changed {' and '.join(names)}, and references to it were planned with "
                "the old value; run `skerry plan` again"
            )
        return True

    def _record_existing(self, desired: Desired) -> None:
        """Record a resource that was found by its tag alone and turned out to be as desired."""
        newest = self._state.generations(desired.resource.address)[-1:]
        for entry in newest:
            if entry.phase is StatePhase.CREATING and entry.record.outputs:
                existing = replace(desired, generation=entry.record.generation)
                self._state.note(entry.id, Entry(record=existing.to_record(entry.record.outputs)))

    def _update_or_adopt(self, change: Change, desired: Desired, entry: Entry | None) -> Mapping[str, str]:
        """Set what differs if the resource is the run's own; else only read its outputs."""
        resource = desired.resource
        handler = self._handlers[resource.KIND]
        changed = [difference.setting for difference in change.differences if not _is_equal_now(difference, desired)]
        if changed and not resource.brought and resource.LIFE is not Life.SHARED:
            if entry is not None and entry.phase is StatePhase.READY:
                self._state.note(change.id, replace(entry, phase=StatePhase.UPDATING))
            return handler.update(desired, changed)
        (observed,) = handler.read([desired])
        if observed is None:
            raise Conflict(f"{change.address}: {change.name} was deleted after planning; run `skerry plan` again")
        return observed.outputs

    def _remove(self, change: Change) -> bool:
        """Delete or forget."""
        if change.address in self._unneeded:
            return False
        entry = self._state.entry(change.id)
        if entry is not None and change.action is Action.DELETE:
            self._delete(entry)
        elif entry is not None:
            self._state.note(change.id, None)
        # Without an entry: a resource that is ALONE was deleted before its replacement was created.
        return True

    def _delete(self, entry: Entry) -> None:
        self._state.note(entry.id, replace(entry, phase=StatePhase.DELETING))
        self._handlers[entry.record.kind].delete(entry.record)
        self._state.note(entry.id, None)

    def _delete_other_generations(self, change: Change) -> None:
        for entry in self._state.generations(change.address):
            if entry.record.generation != change.generation:
                self._delete(entry)

    def _look_up(self, ref: Ref) -> str | None:
        """The output of the newest generation that exists."""
        generations = self._state.generations(ref.address)
        return generations[-1].record.outputs.get(ref.output) if generations else None


def _dependencies(planned: Plan, graph: Graph, state: LockedState) -> dict[Id, set[Id]]:
    """For each change, the changes that must be done before it."""
    main = {
        change.address: change.id for change in planned.changes if change.action not in (Action.DELETE, Action.FORGET)
    }
    dependencies: dict[Id, set[Id]] = {
        key: {main[needed] for needed in graph.needs[address]} for address, key in main.items()
    }
    removals = [change for change in planned.changes if change.id not in dependencies]
    users_in_state, users_in_graph = _users(deletion_needs(state.entries)), _users(graph.needs)
    removals_of: dict[str, set[Id]] = {}
    for change in removals:
        removals_of.setdefault(change.address, set()).add(change.id)
    for change in removals:
        before: set[Id] = set()
        if (replacement := main.get(change.address)) is not None:
            before.add(replacement)
        for user in users_in_state.get(change.address, ()):
            # Each user must be deleted, or must use something else, first.
            before |= removals_of.get(user, set())
            before |= {main[user]} if user in main else set()
        # A resource that was found by its tag alone has no recorded needs.
        before |= {main[user] for user in users_in_graph.get(change.address, ())}
        dependencies[change.id] = before - {change.id}
    return dependencies


def _users(needs: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """For each address, the addresses that need it."""
    users: dict[str, list[str]] = {}
    for user, needed in needs.items():
        for address in needed:
            users.setdefault(address, []).append(user)
    return users


def _is_unneeded(change: Change, desired: Desired) -> bool:
    """True if every difference has vanished now that all values are known."""
    differences = change.differences
    return bool(differences) and not change.because and all(_is_equal_now(item, desired) for item in differences)


def _is_equal_now(difference: Difference, desired: Desired) -> bool:
    """True if a setting whose value was unknown turned out to be the current one."""
    return difference.unknown and as_json(desired.settings[difference.setting]) == difference.before
