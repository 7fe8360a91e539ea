"""Whatever goes wrong, and wherever: apply again makes it true, nothing is there twice, destroy leaves nothing."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import pytest
from tests.infra.engine.memory_cloud import (
    FAULTS,
    RUN,
    Chest,
    Cloud,
    Common,
    Killed,
    Named,
    Thing,
    Work,
    mortal_store,
    mutated,
    random_graph,
)
from tests.support.clocks import FakeClock

from skerry.infra.apply import Applying, look
from skerry.infra.graph import Graph, Life, as_json
from skerry.infra.handler import Condition
from skerry.infra.plan import Action
from skerry.infra.state import Holder
from skerry.infra.statefile import StateFile

if TYPE_CHECKING:
    from skerry.infra.apply import Outcome
    from skerry.infra.plan import Plan
    from skerry.runtime.store import Store

NOBODY = Graph(())


class Account:
    """A cloud, a store for the state, and the engine between them, as the command line puts them together."""

    def __init__(self, seed: int = 0, at_once: int = 1) -> None:
        self.cloud = Cloud()
        self.clock = FakeClock(seed)
        self.store: Store = mortal_store(self.cloud, self.clock)
        self.file = StateFile(self.store, self.clock, abandoned=lambda _: True)
        self.at_once = at_once

    def plan(self, graph: Graph) -> Plan:
        state = self.file.load()
        return look(graph, {} if state is None else state.by_id(), self.cloud.handlers(), RUN)

    def apply(self, graph: Graph) -> Outcome:
        state = self.file.load()
        plan = look(graph, {} if state is None else state.by_id(), self.cloud.handlers(), RUN)
        assert not plan.problems, plan.problems
        hold = self.file.hold(holder(), state, RUN)
        outcome = Applying(plan, graph, hold, self.cloud.handlers(), lambda _: None, self.at_once).run()
        hold.release()
        return outcome

    def converge(self, graph: Graph) -> None:
        """Apply until it is done: a second time suffices after any one fault."""
        outcome = self.apply(graph)
        if not outcome.ok:
            outcome = self.apply(graph)
        assert outcome.ok, outcome
        self.cloud.revive()
        again = self.plan(graph)
        assert again.empty, [change for change in again.changes if change.acts]
        assert self.cloud.writes == 0

    def holds(self, graph: Graph) -> None:
        """The cloud has what the graph says, each once, and nothing else of ours."""
        state = self.file.load()
        known = {} if state is None else {entry.made.address: entry.made for entry in state.entries}
        assert set(known) == {resource.address for resource in graph}
        ours = {key for key, item in self.cloud.items.items() if item.owner == RUN}
        assert ours == {(made.kind, made.name) for made in known.values() if made.life is not Life.SHARED}
        for resource in graph:
            item = self.cloud.items[resource.KIND, known[resource.address].name]
            if resource.LIFE is Life.SHARED:
                continue
            for name, value in resource.settings().items():
                wanted = as_json(_resolved(value, known))
                assert item.settings[name] == wanted, (resource.address, name)


def _resolved(value: object, known: dict) -> object:
    if isinstance(value, list):
        return [_resolved(one, known) for one in value]
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


def run_with_faults(seed: int, at_once: int) -> None:
    dice = random.Random(seed)
    first = random_graph(dice, dice.randrange(1, 8))
    second = mutated(dice, first)
    account = Account(seed, at_once)
    for graph in (first, second, NOBODY):
        # As many calls as there may be, and some more: then nothing goes wrong at all.
        account.cloud.fault = (dice.randrange(2 * len(first) + 4), dice.choice(FAULTS))
        account.cloud.writes = 0
        with contextlib.suppress(Killed):
            account.apply(graph)
        account.cloud.revive()
        account.converge(graph)
        account.holds(graph)
    assert {item.owner for item in account.cloud.items.values()} <= {None}


@pytest.mark.parametrize("seed", range(400))
def test_one_fault_anywhere_and_apply_again_converges(seed: int) -> None:
    run_with_faults(seed, at_once=1)


@pytest.mark.parametrize("seed", range(400, 460))
def test_the_same_with_calls_side_by_side(seed: int) -> None:
    run_with_faults(seed, at_once=4)


@pytest.mark.parametrize("seed", range(100))
def test_without_a_fault_one_apply_suffices(seed: int) -> None:
    dice = random.Random(seed)
    first = random_graph(dice, dice.randrange(1, 8))
    account = Account(seed, at_once=4)
    for graph in (first, mutated(dice, first), NOBODY):
        assert account.apply(graph).ok
        account.holds(graph)
        assert account.plan(graph).empty


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_every_single_call_of_one_graph(fault: str) -> None:
    base = Common(key="base", name="base", region="")
    chest = Chest(key="chest", name="chest", region="")
    role = Named(key="role", name="role", region="", uses=(base.ref("id"),))
    queue = Thing(key="queue", name="queue", region="", uses=(role.ref("id"),))
    jobs = [Work(key=f"j{i}", name=f"j{i}", region="", uses=(queue.ref("id"), chest.ref("id"))) for i in range(2)]
    graph = Graph([base, chest, role, queue, *jobs])
    clean = Account()
    clean.converge(graph)
    clean_calls = _calls(graph)
    assert clean_calls == 7
    for number in range(clean_calls):
        account = Account()
        account.cloud.fault = (number, fault)
        try:
            outcome = account.apply(graph)
        except Killed:
            assert fault.startswith("kill")
        else:
            assert not outcome.ok
        account.cloud.revive()
        account.converge(graph)
        account.holds(graph)
        account.converge(NOBODY)
        account.holds(NOBODY)


def _calls(graph: Graph) -> int:
    account = Account()
    account.apply(graph)
    return account.cloud.writes


def test_a_lost_job_is_made_again_and_a_finished_one_is_not() -> None:
    graph = Graph([Work(key=f"j{i}", name=f"j{i}", region="") for i in range(3)])
    account = Account()
    account.converge(graph)
    account.cloud.items["work", "j0"].condition = Condition.DONE
    account.cloud.items["work", "j1"].condition = Condition.LOST
    actions = {
        change.address: change.action for change in account.plan(graph).changes if change.action is not Action.DELETE
    }
    assert actions == {"work.j0": Action.KEEP, "work.j1": Action.REPLACE, "work.j2": Action.KEEP}
    account.converge(graph)
    assert sorted(name for _, name in account.cloud.items) == ["j0", "j1-g1", "j2"]
    # The cloud forgets a finished job; the state does not.
    del account.cloud.items["work", "j0"]
    assert account.plan(graph).empty
