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
    random_part,
)
from tests.support.clocks import FakeClock

from skerry.infra.apply import Applying, look
from skerry.infra.graph import Graph, Life, as_json
from skerry.infra.handler import Condition
from skerry.infra.plan import Action
from skerry.infra.state import Entry, Holder, Id, Phase
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
        self.lost = False

    def lose_state(self) -> None:
        """Of what is there, only its tags tell whose it is."""
        self.file.remove()
        self.lost = True

    def known(self) -> dict[Id, Entry]:
        """What the state remembers; what has the run's tag, if there is none."""
        state = self.file.load()
        if state is not None:
            return state.by_id()
        made = [one for handler in self.cloud.handlers().values() for one in handler.owned(RUN, ())]
        entries = [Entry(made=one, phase=Phase.CREATING) for one in made]
        return {entry.id: entry for entry in entries}

    def plan(self, graph: Graph, whole: Graph | None = None) -> Plan:
        return look(graph, self.known(), self.cloud.handlers(), RUN, whole=whole)

    def apply(self, graph: Graph, whole: Graph | None = None) -> Outcome:
        state, known = self.file.load(), self.known()
        plan = look(graph, known, self.cloud.handlers(), RUN, whole=whole)
        assert not plan.problems, plan.problems
        hold = self.file.hold(holder(), state, RUN)
        for entry in known.values() if state is None else ():
            hold.note(entry.id, entry)
        outcome = Applying(plan, graph, hold, self.cloud.handlers(), lambda _: None, self.at_once).run()
        hold.release()
        return outcome

    def converge(self, graph: Graph, whole: Graph | None = None) -> None:
        """One apply suffices, whatever was before: the next one has nothing to do, and does nothing.

        Only without a state nobody knows in which order to delete: then each apply takes away what it can.
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

    def dies(self, graph: Graph, dice: random.Random, calls: int, whole: Graph | None = None) -> None:
        """Apply, and at one of so many calls something goes wrong; or at none."""
        self.cloud.fault = (dice.randrange(calls), dice.choice(FAULTS))
        self.cloud.writes = 0
        with contextlib.suppress(Killed):
            self.apply(graph, whole)
        self.cloud.revive()

    def holds(self, graph: Graph) -> None:
        """The cloud has what the graph says, each once, and nothing else of ours."""
        state = self.file.load()
        known = {} if state is None else {entry.made.address: entry.made for entry in state.entries}
        assert set(known) == {resource.address for resource in graph}
        ended = {entry.made.address for entry in state.entries if entry.condition is Condition.DONE} if state else set()
        ours = {(key[0], key[1]) for key, item in self.cloud.items.items() if item.owner == RUN}
        # What has come to its end stays as it was, or is forgotten.
        gone = {(known[address].kind, known[address].name) for address in ended} - ours
        assert ours | gone == {(made.kind, made.name) for made in known.values() if made.life is not Life.SHARED}
        for resource in graph:
            if resource.LIFE is Life.SHARED or resource.address in ended:
                continue
            item = self.cloud.items[resource.KIND, known[resource.address].name]
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
        account.dies(graph, dice, 2 * len(first) + 4)
        account.converge(graph)
        account.holds(graph)
        if dice.random() < 0.3:
            account.lose_state()
    assert {item.owner for item in account.cloud.items.values()} <= {None}


@pytest.mark.parametrize("seed", range(400))
def test_one_fault_anywhere_and_apply_again_converges(seed: int) -> None:
    run_with_faults(seed, at_once=1)


@pytest.mark.parametrize("seed", range(400, 460))
def test_the_same_with_calls_side_by_side(seed: int) -> None:
    run_with_faults(seed, at_once=4)


@pytest.mark.parametrize("seed", range(150))
def test_whatever_somebody_did_in_between_one_apply_suffices(seed: int) -> None:
    dice = random.Random(seed)
    first = random_graph(dice, dice.randrange(1, 8))
    second = mutated(dice, first)
    account = Account(seed, at_once=dice.choice((1, 4)))
    for graph in (first, second, second, NOBODY):
        account.converge(graph)
        account.holds(graph)
        account.cloud.drift(dice)


@pytest.mark.parametrize("seed", range(200))
def test_an_apply_of_a_part_takes_nothing_from_the_rest(seed: int) -> None:
    dice = random.Random(seed)
    first = random_graph(dice, dice.randrange(2, 9))
    second = mutated(dice, first)
    account = Account(seed, at_once=dice.choice((1, 4)))
    account.converge(first)
    if dice.random() < 0.2:
        account.lose_state()
    for _ in range(dice.randrange(1, 4)):
        if not len(second):
            break
        part = random_part(dice, second)
        aside = {
            key: dict(item.settings)
            for key, item in account.cloud.items.items()
            if item.owner == RUN and part.get(item.address) is None
        }
        if dice.random() < 0.5:
            account.dies(part, dice, 2 * len(part) + 2, second)
            assert not account.cloud.dangling()
        account.converge(part, second)
        assert not account.cloud.dangling()
        assert {key: account.cloud.items[key].settings for key in aside} == aside
    account.converge(second)
    account.holds(second)
    account.converge(NOBODY)
    account.holds(NOBODY)


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
