"""Apply converges after faults and changes outside: no resource exists twice, and destroy leaves none."""

from __future__ import annotations

import random

import pytest
from tests.infra.provision.account import EMPTY, Account
from tests.infra.provision.memory_cloud import (
    FAULTS,
    RUN,
    Chest,
    Common,
    Named,
    ProcessKilled,
    Thing,
    Work,
    changed_graph,
    random_graph,
    random_part,
)

from skerry.infra.provision.graph import Graph
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.planned_changes import Action


def run_with_faults(seed: int, at_once: int) -> None:
    rng = random.Random(seed)
    first = random_graph(rng, rng.randrange(1, 8))
    second = changed_graph(rng, first)
    account = Account(seed=seed, at_once=at_once)
    for graph in (first, second, EMPTY):
        # Some more calls than needed: then no fault happens.
        account.apply_with_fault(graph, rng, 2 * len(first) + 4)
        account.converge(graph)
        account.check_cloud(graph)
        if rng.random() < 0.3:
            account.lose_state()
    assert {item.owner for item in account.cloud.items.values()} <= {None}


@pytest.mark.parametrize("seed", range(400))
def test_apply_converges_after_one_fault(seed: int) -> None:
    run_with_faults(seed, at_once=1)


@pytest.mark.parametrize("seed", range(400, 460))
def test_parallel_apply_converges_after_one_fault(seed: int) -> None:
    run_with_faults(seed, at_once=4)


@pytest.mark.parametrize("seed", range(150))
def test_one_apply_converges_after_changes_outside(seed: int) -> None:
    rng = random.Random(seed)
    first = random_graph(rng, rng.randrange(1, 8))
    second = changed_graph(rng, first)
    account = Account(seed=seed, at_once=rng.choice((1, 4)))
    for graph in (first, second, second, EMPTY):
        account.converge(graph)
        account.check_cloud(graph)
        account.cloud.drift(rng)


@pytest.mark.parametrize("seed", range(200))
def test_partial_apply_keeps_the_other_resources(seed: int) -> None:
    rng = random.Random(seed)
    first = random_graph(rng, rng.randrange(2, 9))
    second = changed_graph(rng, first)
    account = Account(seed=seed, at_once=rng.choice((1, 4)))
    account.converge(first)
    if rng.random() < 0.2:
        account.lose_state()
    for _ in range(rng.randrange(1, 4)):
        if not len(second):
            break
        part = random_part(rng, second)
        aside = {
            key: dict(item.settings)
            for key, item in account.cloud.items.items()
            if item.owner == RUN and part.get(item.address) is None
        }
        if rng.random() < 0.5:
            account.apply_with_fault(part, rng, 2 * len(part) + 2, second)
            assert not account.cloud.dangling()
        account.converge(part, second)
        assert not account.cloud.dangling()
        assert {key: account.cloud.items[key].settings for key in aside} == aside
    account.converge(second)
    account.check_cloud(second)
    account.converge(EMPTY)
    account.check_cloud(EMPTY)


@pytest.mark.parametrize("fault", FAULTS)
def test_apply_converges_after_a_fault_at_each_call(fault: str) -> None:
    base = Common(key="base", name="base", region="")
    chest = Chest(key="chest", name="chest", region="")
    role = Named(key="role", name="role", region="", uses=(base.ref("id"),))
    queue = Thing(key="queue", name="queue", region="", uses=(role.ref("id"),))
    jobs = [Work(key=f"j{i}", name=f"j{i}", region="", uses=(queue.ref("id"), chest.ref("id"))) for i in range(2)]
    graph = Graph([base, chest, role, queue, *jobs])
    clean = Account()
    clean.apply(graph)
    clean_calls = clean.cloud.writes
    assert clean_calls == 7
    for number in range(clean_calls):
        account = Account()
        account.cloud.fault = (number, fault)
        try:
            outcome = account.apply(graph)
        except ProcessKilled:
            assert fault.startswith("kill")
        else:
            assert not outcome.ok
        account.cloud.revive()
        account.converge(graph)
        account.check_cloud(graph)
        account.converge(EMPTY)
        account.check_cloud(EMPTY)


def test_lost_job_is_replaced_and_finished_job_is_kept() -> None:
    graph = Graph([Work(key=f"j{i}", name=f"j{i}", region="") for i in range(3)])
    account = Account(graph)
    account.cloud.items["work", "j0"].condition = Condition.DONE
    account.cloud.items["work", "j1"].condition = Condition.LOST
    actions = {
        change.address: change.action for change in account.plan(graph).changes if change.action is not Action.DELETE
    }
    assert actions == {"work.j0": Action.KEEP, "work.j1": Action.REPLACE, "work.j2": Action.KEEP}
    account.converge(graph)
    assert account.names == {"j0", "j1-g1", "j2"}
    # The cloud forgets a finished job, but the state does not.
    del account.cloud.items["work", "j0"]
    assert account.plan(graph).empty
