"""A memory cloud, a state store and the engine between them, as the command line combines them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.infra.provision.memory_cloud import FAULTS, RUN, Cloud, ProcessKilled, process_store
from tests.support.clocks import FakeClock

from skerry.infra.provision.apply import ApplyRun
from skerry.infra.provision.graph import Graph, Life, as_json, resolved
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.observe_resources import refresh_and_plan
from skerry.infra.provision.state import Entry, Holder, Id, StatePhase
from skerry.infra.provision.state_store import StateStore

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from skerry.infra.provision.apply import Outcome, Step
    from skerry.infra.provision.planned_changes import Plan
    from skerry.infra.provision.state import State
    from skerry.infra.provision.state_store import LockedState
    from skerry.runtime.store import Store

EMPTY = Graph(())


class Account:
    """One run: its cloud, its state, and the calls of the engine. graph: applied at the start."""

    def __init__(self, graph: Graph = EMPTY, *, seed: int = 0, at_once: int = 1) -> None:
        self.cloud = Cloud()
        self.clock = FakeClock(seed)
        self.store: Store = process_store(self.cloud, self.clock)
        self.file = StateStore(self.store, self.clock, abandoned=lambda _: True)
        self.at_once = at_once
        self.lost = False
        if len(graph):
            self.converge(graph)

    @property
    def state(self) -> State:
        """The stored state; an apply must have written one."""
        state = self.file.load()
        assert state is not None
        return state

    @property
    def names(self) -> set[str]:
        """The names of all resources in the cloud."""
        return {name for _, name in self.cloud.items}

    def lose_state(self) -> None:
        """Delete the state; resources are then known by their tags only."""
        self.file.remove()
        self.lost = True

    def known(self) -> dict[Id, Entry]:
        """The entries of the state, or, without a state, of the resources with the run's tag."""
        state = self.file.load()
        if state is not None:
            return state.by_id()
        records = [record for handler in self.cloud.handlers().values() for record in handler.list_owned(RUN, ())]
        entries = [Entry(record=record, phase=StatePhase.CREATING) for record in records]
        return {entry.id: entry for entry in entries}

    def plan(self, graph: Graph, whole: Graph | None = None) -> Plan:
        return refresh_and_plan(graph, self.known(), self.cloud.handlers(), RUN, whole=whole)

    def start(
        self, graph: Graph, whole: Graph | None = None, on_step: Callable[[Step], None] = lambda _: None
    ) -> tuple[ApplyRun, LockedState]:
        """An apply that can run, and its locked state."""
        state, known = self.file.load(), self.known()
        plan = refresh_and_plan(graph, known, self.cloud.handlers(), RUN, whole=whole)
        assert not plan.problems, plan.problems
        locked = self.file.hold(holder(), state, RUN)
        for entry in known.values() if state is None else ():
            locked.note(entry.id, entry)
        return ApplyRun(plan, graph, locked, self.cloud.handlers(), on_step, self.at_once), locked

    def apply(self, graph: Graph, whole: Graph | None = None) -> Outcome:
        work, locked = self.start(graph, whole)
        outcome = work.run()
        locked.release()
        return outcome

    def note(self, address: str, phase: StatePhase) -> None:
        """Write another phase into the state, as an apply that was killed leaves it."""
        with self.file.hold(holder(), self.state, RUN) as locked:
            entry = locked.entry(Id(address, 0))
            assert entry is not None
            locked.note(entry.id, replace(entry, phase=phase))

    def converge(self, graph: Graph, whole: Graph | None = None) -> None:
        """Apply once; the next plan is empty and makes no writes.

        Without a state the order of deletions is unknown: several applies then delete what they can.
        """
        outcome = self.apply(graph, whole)
        for _ in range(8 if self.lost else 0):
            outcome = outcome if outcome.ok else self.apply(graph, whole)
        self.lost = self.lost and whole is not None
        assert outcome.ok, outcome
        self.cloud.revive()
        again = self.plan(graph, whole)
        assert again.empty, [change for change in again.changes if change.acts]
        assert self.cloud.writes == 0

    def apply_with_fault(self, graph: Graph, rng: random.Random, calls: int, whole: Graph | None = None) -> None:
        """Apply with a random fault at one of so many calls, or at none."""
        self.cloud.fault = (rng.randrange(calls), rng.choice(FAULTS))
        self.cloud.writes = 0
        with contextlib.suppress(ProcessKilled):
            self.apply(graph, whole)
        self.cloud.revive()

    def check_cloud(self, graph: Graph) -> None:
        """Check that the cloud has the graph's resources, each once, and no others of this run."""
        entries = () if self.file.load() is None else self.state.entries
        known = {entry.record.address: entry.record for entry in entries}
        assert set(known) == {resource.address for resource in graph}
        ended = {entry.record.address for entry in entries if entry.condition is Condition.DONE}
        ours = {(key[0], key[1]) for key, item in self.cloud.items.items() if item.owner == RUN}
        # A finished job stays, or is forgotten by its cloud.
        gone = {(known[address].kind, known[address].name) for address in ended} - ours
        assert ours | gone == {
            (record.kind, record.name) for record in known.values() if record.life is not Life.SHARED
        }
        for resource in graph:
            if resource.LIFE is Life.SHARED or resource.address in ended:
                continue
            item = self.cloud.items[resource.KIND, known[resource.address].name]
            for name, value in resource.settings().items():
                wanted = as_json(resolved(value, lambda ref: known[ref.address].outputs[ref.output]))
                assert item.settings[name] == wanted, (resource.address, name)


def holder(who: str = "me") -> Holder:
    return Holder(token=who, who=who, host="here", doing="apply", since="noon", pid=7, started=1, boot="b")
