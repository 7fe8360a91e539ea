"""Single cases of plan and apply: brought, recreated and partly applied resources, locks and stops."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.infra.provision.account import EMPTY, Account
from tests.infra.provision.memory_cloud import RUN, Chest, Item, Lone, MemoryHandler, Named, ProcessKilled, Thing, Work
from tests.support.slurmsite import until

from skerry.infra.provision.apply import Progress, Step
from skerry.infra.provision.graph import Graph
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.observe_resources import refresh_and_plan
from skerry.infra.provision.plan import deletion_needs
from skerry.infra.provision.planned_changes import Action
from skerry.infra.provision.state import Id, StatePhase
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired
    from skerry.infra.provision.planned_changes import Plan


def new(kind: type[Thing], key: str, *uses: Resource, name: str = "", **settings: object) -> Thing:
    """A resource that references the ids of others."""
    refs = tuple(resource.ref("id") for resource in uses)
    return kind(key=key, name=name or key, region="", uses=refs, **settings)  # type: ignore[arg-type]


A = new(Thing, "a")
FLAT_A = replace(A, shape="flat")
B = new(Thing, "b", A)
MANY = Graph([new(Thing, f"t{number}") for number in range(100)])


def actions(plan: Plan) -> dict[str, Action]:
    return {str(change.id): change.action for change in plan.changes}


def test_resource_replaced_by_the_users_own_is_deleted() -> None:
    account = Account(Graph([A, B]))
    account.cloud.items["thing", "own"] = Item(None, "", 0, {}, {"id": "own/9"})
    brought = Graph([replace(A, name="own", brought=True), B])
    assert account.apply(brought).ok
    assert account.cloud.items["thing", "b"].settings["uses"] == ["own/9"]
    assert account.names == {"own", "b"}
    assert account.plan(brought).empty
    # The user's own stays when all others are deleted.
    assert account.apply(EMPTY).ok
    assert account.names == {"own"}


def test_resource_of_another_run_is_a_problem() -> None:
    account = Account()
    account.cloud.items["thing", "a"] = Item("memory://another/run", "thing.a", 0, {"size": 7}, {"id": "x"})
    plan = account.plan(Graph([A]))
    assert plan.empty
    assert plan.problems == (
        "thing.a: a exists but belongs to memory://another/run; name it in `byo:` to use it, or choose another name",
    )


def test_brought_resource_must_exist_and_be_usable() -> None:
    account = Account()
    brought = Graph([replace(A, brought=True)])
    assert "does not exist" in account.plan(brought).problems[0]
    account.cloud.items["thing", "a"] = Item(None, "", 0, {}, {"id": "x"}, Condition.BROKEN)
    assert "is unusable" in account.plan(brought).problems[0]


def test_data_is_never_replaced_or_deleted_by_apply() -> None:
    chest = new(Chest, "c")
    account = Account(Graph([chest]))
    assert "may hold data" in account.plan(Graph([replace(chest, name="other")])).problems[0]
    account.cloud.items["chest", "c"].condition = Condition.BROKEN
    assert "is unusable" in account.plan(Graph([chest])).problems[0]
    account.cloud.items["chest", "c"].condition = Condition.READY
    assert actions(account.plan(Graph([A])))["chest.c"] is Action.FORGET
    assert actions(account.plan(EMPTY))["chest.c"] is Action.DELETE


def test_interrupted_deletion_is_finished() -> None:
    graph = Graph([A])
    account = Account(graph)
    account.note("thing.a", StatePhase.DELETING)
    assert actions(account.plan(graph)) == {"thing.a#1": Action.CREATE, "thing.a": Action.DELETE}
    account.converge(graph)
    account.check_cloud(graph)

    """The third apply adopts what the first has made: the entry of the first must not delete it."""
    """What the third apply adopts is what the first has made: the entry of the first must not delete it."""
    before, after = Graph([new(Lone, "l", name="x")]), Graph([new(Lone, "l", name="y")])
    account = Account(before)
    created = account.cloud.items["lone", "x"].outputs
    account.cloud.fault = (1, "kill_before")  # "y" is created, "x" is not deleted
    with pytest.raises(ProcessKilled):
        account.apply(after)
    account.cloud.revive()
    assert account.names == {"x", "y"}
    account.converge(before)
    assert account.names == {"x"}
    assert account.cloud.items["lone", "x"].outputs == created


def test_unlocked_holder_starts_no_more_changes() -> None:
    account = Account(at_once=4)
    work, locked = account.start(MANY)

    def unlock(number: int) -> None:
        if number == 5:
            account.file.unlock()
            account.clock.advance(5)
        elif number > 5:
            until(lambda: locked.lost)

    account.cloud.after_write = unlock
    assert not work.run().ok
    # Calls in flight may end; none is started once the first of them has raised Conflict.
    assert len(account.cloud.items) <= 5 + 4
    assert locked.lost


def test_stop_finishes_calls_in_flight_and_starts_no_others() -> None:
    account = Account(at_once=4)
    work, locked = account.start(MANY)
    # Calls after the fifth stay in flight until the stop.
    account.cloud.after_write = lambda number: work.stop() if number == 5 else number > 5 and work.stopping.wait(30)
    outcome = work.run()
    locked.release()
    assert 5 <= len(outcome.done) == len(account.cloud.items) <= 5 + 4
    assert len(outcome.done) + len(outcome.skipped) == 100
    assert not outcome.failed
    account.cloud.after_write = lambda _: None
    account.converge(MANY)


def test_interrupt_starts_no_more_changes() -> None:
    account = Account(at_once=4)

    def interrupt(step: Step) -> None:
        if step.progress is Progress.DONE:
            raise KeyboardInterrupt

    work, locked = account.start(MANY, on_step=interrupt)
    # The other calls stay in flight until the interrupt.
    account.cloud.after_write = lambda number: work.stopping.wait(30) if number > 1 else None
    with pytest.raises(KeyboardInterrupt):
        work.run()
    locked.release()
    assert account.state.holder is None
    ready = {entry.record.name for entry in account.state.entries if entry.phase is StatePhase.READY}
    assert ready == account.names
    assert len(ready) <= 1 + 4


def test_resources_with_swapped_needs_are_deleted() -> None:
    a, b = new(Named, "a"), new(Named, "b")
    account = Account(Graph([a, new(Named, "b", a)]))
    account.cloud.fault = (3, "deny")
    account.cloud.writes = 0
    account.apply(Graph([new(Named, "a", b), b]))
    account.cloud.revive()
    deletion_needs(account.state.entries)
    for _ in range(3):
        account.apply(EMPTY)
    assert account.cloud.items == {}


def test_job_known_only_by_its_tag_is_not_started_twice() -> None:
    graph = Graph([new(Work, "j")])
    account = Account(graph)
    account.cloud.items["work", "j"].condition = Condition.LOST
    account.converge(graph)
    account.lose_state()
    assert set(account.known()) == {Id("work.j", 1)}
    assert account.plan(graph).changes[0].action is Action.ADOPT


def test_partial_apply_keeps_replaced_resources_in_use() -> None:
    users = [new(Thing, f"b{number}", A) for number in range(5)]
    account = Account(Graph([A, *users]))
    whole = Graph([FLAT_A, *users])
    part = whole.part(["thing.a"])
    text = "a stays because it is used by thing.b0, thing.b1, thing.b2 and 2 more; apply without --target to remove it"
    assert account.plan(part, whole).notes == (f"thing.a: {text}",)
    account.converge(part, whole)
    assert {"a", "a-g1"} <= account.names
    assert account.plan(part, whole).notes == (f"thing.a: {text}",)
    # Applied users reference the new one, the others still the old one.
    account.converge(whole.part(["thing.b0"]), whole)
    (new_id,), (old_id,) = (account.cloud.items["thing", name].settings["uses"] for name in ("b0", "b1"))
    assert (str(new_id).split("/")[0], str(old_id).split("/")[0]) == ("a-g1", "a")
    account.converge(whole)
    account.check_cloud(whole)
    assert "a" not in account.names


def test_partial_graph_of_unknown_addresses_is_rejected() -> None:
    with pytest.raises(Invalid, match=r"the spec has no resource thing\.x, thing\.y; run `skerry plan` to list them"):
        Graph([A]).part(["thing.y", "thing.a", "thing.x"])


def test_reference_to_a_resource_destroyed_first_is_rejected() -> None:
    job = new(Work, "j")
    with pytest.raises(Invalid, match=r"thing\.a references work\.j, which is destroyed before it is replaced"):
        Graph([job, new(Thing, "a", job)])


def test_update_that_changes_an_output_is_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account(Graph([A, B]))
    kept = MemoryHandler.update

    def renumbering(self: MemoryHandler, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        kept(self, desired, changed)
        item = self.cloud.items[self.kind.KIND, desired.name]
        item.outputs = {"id": "another"}
        return item.outputs

    larger = Graph([replace(A, size=2), replace(B, size=2)])
    with monkeypatch.context() as patched:
        patched.setattr(MemoryHandler, "update", renumbering)
        outcome = account.apply(larger)
    (error,) = outcome.failed.values()
    assert str(error) == (
        "thing.a: the update changed id, and references to it were planned with the old value; run `skerry plan` again"
    )
    assert [str(change.id) for change in outcome.skipped] == ["thing.b"]
    account.converge(larger)
    account.check_cloud(larger)


def test_resource_recreated_outside_updates_its_users() -> None:
    graph = Graph([A, B])
    account = Account(graph)
    account.cloud.items["thing", "a"].outputs = {"id": "another"}
    plan = account.plan(graph)
    assert actions(plan) == {"thing.a": Action.ADOPT, "thing.b": Action.UPDATE}
    assert plan.changes[0].because == "id changed since it was created"
    account.converge(graph)
    assert account.cloud.items["thing", "b"].settings["uses"] == ["another"]


def test_adoption_is_recorded_without_differences() -> None:
    a = new(Named, "a")
    graph = Graph([a, new(Thing, "b", a)])
    account = Account(graph)
    account.note("thing.b", StatePhase.UPDATING)
    del account.cloud.items["named", "a"]
    # Created again it has the same id, because the id is its name.
    assert actions(account.plan(graph)) == {"named.a": Action.CREATE, "thing.b": Action.ADOPT}
    account.cloud.writes = 0
    assert account.apply(graph).ok
    assert account.cloud.writes == 2
    assert account.plan(graph).empty


def test_tagged_resource_is_deleted_after_its_users_changed() -> None:
    account = Account(Graph([A, B]))
    c = new(Thing, "c")
    d = new(Thing, "d", c)
    # b now also waits for d.
    whole = Graph([FLAT_A, c, d, new(Thing, "b", A, d)])
    account.converge(whole.part(["thing.a"]), whole)
    account.lose_state()
    assert account.apply(whole).ok
    account.check_cloud(whole)


def test_partial_apply_after_state_loss_deletes_no_resource() -> None:
    account = Account(Graph([A, B]))
    account.lose_state()
    whole = Graph([FLAT_A])
    assert actions(account.plan(whole, whole)) == {"thing.a#1": Action.REPLACE}
    account.apply(whole, whole)
    assert account.names == {"a", "a-g1", "b"}


def test_planning_is_linear_in_the_number_of_resources() -> None:
    account = Account()
    graph = Graph([new(Thing, f"t{number}") for number in range(10_000)])
    plan = refresh_and_plan(graph, {}, account.cloud.handlers(), RUN)
    assert len(plan.changes) == 10_000
    assert account.cloud.reads == 20
