"""A memory cloud, a state store and the engine between them, as the command line combines them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.infra.provision.memory_cloud import FAULTS, RUN, Cloud, ProcessKilled, process_store
from tests.support.clocks import FakeClock

from skerry.infra.provision.apply import ApplyRun
from skerry.infra.provision.graph import Graph, Life, as_json
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.observe_resources import refresh_and_plan
from skerry.infra.provision.state import Entry, Holder, Id, StatePhase
from skerry.infra.provision.state_store import StateStore

if TYPE_CHECKING:
    import random

    from skerry.infra.provision.apply import Outcome
    from skerry.infra.provision.plan import Plan
    from skerry.runtime.store import Store

EMPTY = Graph(())


class Account:
    """One run: its cloud, its state, and the calls of the engine."""

    def __init__(self, seed: int = 0, at_once: int = 1) -> None:
        self.cloud = Cloud()
        self.clock = FakeClock(seed)
        self.store: Store = process_store(self.cloud, self.clock)
        self.file = StateStore(self.store, self.clock, abandoned=lambda _: True)
        self.at_once = at_once
        self.lost = False

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

    def apply(self, graph: Graph, whole: Graph | None = None) -> Outcome:
        state, known = self.file.load(), self.known()
        plan = refresh_and_plan(graph, known, self.cloud.handlers(), RUN, whole=whole)
        assert not plan.problems, plan.problems
        locked = self.file.hold(holder(), state, RUN)
        for entry in known.values() if state is None else ():
            locked.note(entry.id, entry)
        outcome = ApplyRun(plan, graph, locked, self.cloud.handlers(), lambda _: None, self.at_once).run()
        locked.release()
        return outcome

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
        state = self.file.load()
        known = {} if state is None else {entry.record.address: entry.record for entry in state.entries}
        assert set(known) == {resource.address for resource in graph}
        ended = (
            {entry.record.address for entry in state.entries if entry.condition is Condition.DONE} if state else set()
        )
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
                wanted = as_json(_resolved(value, known))
                assert item.settings[name] == wanted, (resource.address, name)


def _resolved(value: object, known: dict) -> object:
    if isinstance(value, list):
        return [_resolved(item, known) for item in value]
    return known[value.address].outputs[value.output] if hasattr(value, "address") else value


def holder() -> Holder:
    return Holder(
        token="1",  # noqa: S106  no secret
        who="me",
        host="here",
        doing="apply",
        since="now",
        pid=1,
        started=1,
        boot="b",
    )
