"""Single cases of plan and apply: renamed, brought, recreated and partly applied resources, locks and stops."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

import pytest
from tests.infra.provision.account import EMPTY, Account, holder
from tests.infra.provision.memory_cloud import RUN, Chest, Item, MemoryHandler, Named, Thing, Work

from skerry.infra.provision.apply import ApplyRun, Progress, Step
from skerry.infra.provision.graph import Graph
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.observe_resources import refresh_and_plan
from skerry.infra.provision.plan import Action, deletion_needs
from skerry.infra.provision.state import Id, StatePhase
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from skerry.infra.provision.handler import Desired
    from skerry.infra.provision.plan import Plan


def thing(key: str, name: str = "", uses: tuple[str, ...] = (), **more: object) -> Thing:
    refs = tuple(Thing(key=use, name=use, region="").ref("id") for use in uses)
    return Thing(key=key, name=name or key, region="", uses=refs, **more)  # type: ignore[arg-type]


def actions(plan: Plan) -> dict[str, Action]:
    return {str(change.id): change.action for change in plan.changes}


def test_renamed_resource_is_replaced() -> None:
    account = Account()
    account.converge(Graph([thing("a"), thing("b", uses=("a",))]))
    moved = Graph([thing("a", name="other"), thing("b", uses=("a",))])
    assert actions(account.plan(moved))["thing.a"] is Action.DELETE
    assert account.apply(moved).ok
    assert {name for _, name in account.cloud.items} == {"other-g1", "b"}
    account.converge(moved)
    account.check_cloud(moved)


def test_resource_replaced_by_the_users_own_is_deleted() -> None:
    account = Account()
    account.converge(Graph([thing("a"), thing("b", uses=("a",))]))
    account.cloud.items["thing", "theirs"] = Item(None, "", 0, {}, {"id": "theirs/9"})
    brought = Graph([thing("a", name="theirs", brought=True), thing("b", uses=("a",))])
    assert account.apply(brought).ok
    assert account.cloud.items["thing", "b"].settings["uses"] == ["theirs/9"]
    assert {name for _, name in account.cloud.items} == {"theirs", "b"}
    assert account.plan(brought).empty
    # The user's own stays when all others are deleted.
    assert account.apply(EMPTY).ok
    assert {name for _, name in account.cloud.items} == {"theirs"}


def test_resource_of_another_run_is_a_problem() -> None:
    account = Account()
    account.cloud.items["thing", "a"] = Item("memory://another/run", "thing.a", 0, {"size": 7}, {"id": "x"})
    plan = account.plan(Graph([thing("a")]))
    assert plan.empty
    assert plan.problems == (
        "thing.a: a exists but belongs to memory://another/run; name it in `byo:` to use it, or choose another name",
    )


def test_brought_resource_must_exist_and_be_usable() -> None:
    account = Account()
    mine = Graph([thing("a", brought=True)])
    assert "does not exist" in account.plan(mine).problems[0]
    account.cloud.items["thing", "a"] = Item(None, "", 0, {}, {"id": "x"}, Condition.BROKEN)
    assert "is unusable" in account.plan(mine).problems[0]


def test_data_is_never_replaced_or_deleted_by_apply() -> None:
    account = Account()
    chest = Chest(key="c", name="c", region="")
    account.converge(Graph([chest]))
    assert "may hold data" in account.plan(Graph([dataclasses.replace(chest, name="other")])).problems[0]
    account.cloud.items["chest", "c"].condition = Condition.BROKEN
    assert "is unusable" in account.plan(Graph([chest])).problems[0]
    account.cloud.items["chest", "c"].condition = Condition.READY
    assert actions(account.plan(Graph([thing("t")])))["chest.c"] is Action.FORGET
    assert actions(account.plan(EMPTY))["chest.c"] is Action.DELETE


def test_interrupted_deletion_is_finished() -> None:
    account = Account()
    graph = Graph([thing("a")])
    account.converge(graph)
    state = account.file.load()
    assert state is not None
    with account.file.hold(holder(), state, RUN) as locked:
        (entry,) = locked.entries
        locked.note(entry.id, dataclasses.replace(entry, phase=StatePhase.DELETING))
    assert actions(account.plan(graph)) == {"thing.a#1": Action.CREATE, "thing.a": Action.DELETE}
    account.converge(graph)
    account.check_cloud(graph)


def hundred() -> Graph:
    return Graph([thing(f"t{number}") for number in range(100)])


def test_unlocked_holder_starts_no_more_changes() -> None:
    account = Account()
    graph = hundred()
    plan = refresh_and_plan(graph, {}, account.cloud.handlers(), RUN)
    locked = account.file.hold(holder(), None, RUN)

    unlocked = threading.Event()

    def unlock(number: int) -> None:
        if number == 5:
            account.file.unlock()
            account.clock.advance(5)
            unlocked.set()
        elif number > 5:
            unlocked.wait(30)

    account.cloud.after_write = unlock
    outcome = ApplyRun(plan, graph, locked, account.cloud.handlers(), lambda _: None, 4).run()
    assert not outcome.ok
    # Calls in flight may end; none is started once the first of them has raised Conflict.
    assert len(account.cloud.items) <= 5 + 4
    assert locked.lost


def test_stop_finishes_calls_in_flight_and_starts_no_others() -> None:
    account = Account()
    graph = hundred()
    plan = refresh_and_plan(graph, {}, account.cloud.handlers(), RUN)
    locked = account.file.hold(holder(), None, RUN)
    work = ApplyRun(plan, graph, locked, account.cloud.handlers(), lambda _: None, 4)
    account.cloud.after_write = lambda number: work.stop() if number == 5 else None
    outcome = work.run()
    locked.release()
    assert 5 <= len(outcome.done) == len(account.cloud.items) <= 5 + 4
    assert len(outcome.done) + len(outcome.skipped) == 100
    assert not outcome.failed
    account.cloud.after_write = lambda _: None
    account.converge(graph)


def test_interrupt_starts_no_more_changes() -> None:
    account = Account()
    graph = hundred()
    plan = refresh_and_plan(graph, {}, account.cloud.handlers(), RUN)

    def interrupt(step: Step) -> None:
        if step.progress is Progress.DONE:
            raise KeyboardInterrupt

    locked = account.file.hold(holder(), None, RUN)
    work = ApplyRun(plan, graph, locked, account.cloud.handlers(), interrupt, 4)
    # The other calls stay in flight until the interrupt.
    account.cloud.after_write = lambda number: work.stopping.wait(30) if number > 1 else None
    with pytest.raises(KeyboardInterrupt):
        work.run()
    locked.release()
    state = account.file.load()
    assert state is not None
    assert state.holder is None
    ready = {entry.record.name for entry in state.entries if entry.phase is StatePhase.READY}
    assert ready == {name for _, name in account.cloud.items}
    assert len(ready) <= 1 + 4


def test_resources_with_swapped_needs_are_deleted() -> None:
    account = Account()
    first = Graph([Named(key="a", name="a", region=""), Named(key="b", name="b", region="", uses=(_id("a"),))])
    account.converge(first)
    second = Graph([Named(key="a", name="a", region="", uses=(_id("b"),)), Named(key="b", name="b", region="")])
    account.cloud.fault = (3, "deny")
    account.cloud.writes = 0
    account.apply(second)
    account.cloud.revive()
    state = account.file.load()
    assert state is not None
    deletion_needs(state.entries)
    for _ in range(3):
        account.apply(EMPTY)
    assert account.cloud.items == {}


def _id(key: str) -> object:
    return Named(key=key, name=key, region="").ref("id")


def test_job_known_only_by_its_tag_is_not_started_twice() -> None:
    account = Account()
    graph = Graph([Work(key="j", name="j", region="")])
    account.converge(graph)
    account.cloud.items["work", "j"].condition = Condition.LOST
    account.converge(graph)
    account.file.remove()
    state = account.file.load()
    assert state is None
    records = [record for handler in account.cloud.handlers().values() for record in handler.list_owned(RUN, ())]
    assert {(record.name, record.generation) for record in records} == {("j-g1", 1)}


def test_partial_apply_keeps_replaced_resources_in_use() -> None:
    account = Account()
    users = [thing(f"b{number}", uses=("a",)) for number in range(5)]
    account.converge(Graph([thing("a"), *users]))
    whole = Graph([thing("a", shape="flat"), *users])
    part = whole.part(["thing.a"])
    text = "a stays because it is used by thing.b0, thing.b1, thing.b2 and 2 more; apply without --target to remove it"
    assert account.plan(part, whole).notes == (f"thing.a: {text}",)
    account.converge(part, whole)
    assert {"a", "a-g1"} <= {name for _, name in account.cloud.items}
    assert account.plan(part, whole).notes == (f"thing.a: {text}",)
    # Applied users reference the new one, the others still the old one.
    account.converge(whole.part(["thing.b0"]), whole)
    used = {name: item.settings["uses"] for (_, name), item in account.cloud.items.items() if name.startswith("b")}
    (new,), (old,) = used["b0"], used["b1"]
    assert (str(new).split("/")[0], str(old).split("/")[0]) == ("a-g1", "a")
    account.converge(whole)
    account.check_cloud(whole)
    assert "a" not in {name for _, name in account.cloud.items}


def test_kept_resource_keeps_its_own_needs() -> None:
    account = Account()
    chain = [thing("a"), Named(key="b", name="b", region="", uses=(thing("a").ref("id"),))]
    user = Thing(key="c", name="c", region="", uses=(_id("b"),))
    account.converge(Graph([*chain, user]))
    whole = Graph([thing("a", shape="flat"), chain[1], user])
    part = whole.part(["named.b"])
    assert [note.partition(":")[0] for note in account.plan(part, whole).notes] == ["named.b", "thing.a"]
    account.converge(part, whole)
    assert not account.cloud.dangling()
    account.converge(whole)
    account.check_cloud(whole)


def test_partial_graph_of_unknown_addresses_is_rejected() -> None:
    with pytest.raises(Invalid, match=r"the spec has no resource thing\.x, thing\.y; run `skerry plan` to list them"):
        Graph([thing("a")]).part(["thing.y", "thing.a", "thing.x"])


def test_reference_to_a_resource_destroyed_first_is_rejected() -> None:
    job = Work(key="j", name="j", region="")
    with pytest.raises(Invalid, match=r"thing\.a references work\.j, which is destroyed before it is replaced"):
        Graph([job, Thing(key="a", name="a", region="", uses=(job.ref("id"),))])


def test_update_that_changes_an_output_is_a_conflict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    account = Account()
    graph = Graph([thing("a"), thing("b", uses=("a",))])
    account.converge(graph)
    kept = MemoryHandler.update

    def renumbering(self: MemoryHandler, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        kept(self, desired, changed)
        item = self.cloud.items[self.kind.KIND, desired.name]
        item.outputs = {"id": "another"}
        return item.outputs

    larger = Graph([thing("a", size=2), thing("b", uses=("a",), size=2)])
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
    account = Account()
    graph = Graph([thing("a"), thing("b", uses=("a",))])
    account.converge(graph)
    account.cloud.items["thing", "a"].outputs = {"id": "another"}
    plan = account.plan(graph)
    assert actions(plan) == {"thing.a": Action.ADOPT, "thing.b": Action.UPDATE}
    assert plan.changes[0].because == "id changed since it was created"
    account.converge(graph)
    assert account.cloud.items["thing", "b"].settings["uses"] == ["another"]


def test_adoption_is_recorded_without_differences() -> None:
    account = Account()
    chain = [Named(key="a", name="a", region=""), Thing(key="b", name="b", region="", uses=(_id("a"),))]
    account.converge(Graph(chain))
    state = account.file.load()
    assert state is not None
    with account.file.hold(holder(), state, RUN) as locked:
        entry = locked.entry(Id("thing.b", 0))
        assert entry is not None
        locked.note(entry.id, dataclasses.replace(entry, phase=StatePhase.UPDATING))
    del account.cloud.items["named", "a"]
    # Created again it has the same id, because the id is its name.
    assert actions(account.plan(Graph(chain))) == {"named.a": Action.CREATE, "thing.b": Action.ADOPT}
    account.cloud.writes = 0
    assert account.apply(Graph(chain)).ok
    assert account.cloud.writes == 2
    assert account.plan(Graph(chain)).empty


def test_tagged_resource_is_deleted_after_its_users_changed() -> None:
    account = Account()
    account.converge(Graph([thing("a"), thing("b", uses=("a",))]))
    # b now also waits for d.
    whole = Graph([thing("a", shape="flat"), thing("c"), thing("d", uses=("c",)), thing("b", uses=("a", "d"))])
    account.converge(whole.part(["thing.a"]), whole)
    account.lose_state()
    assert account.apply(whole).ok
    account.check_cloud(whole)


def test_partial_apply_after_state_loss_deletes_no_resource() -> None:
    account = Account()
    account.converge(Graph([thing("a"), thing("b", uses=("a",))]))
    account.lose_state()
    whole = Graph([thing("a", shape="flat")])
    assert actions(account.plan(whole, whole)) == {"thing.a#1": Action.REPLACE}
    account.apply(whole, whole)
    assert {name for _, name in account.cloud.items} == {"a", "a-g1", "b"}


def test_planning_is_linear_in_the_number_of_resources() -> None:
    account = Account()
    graph = Graph([thing(f"t{number}") for number in range(10_000)])
    plan = refresh_and_plan(graph, {}, account.cloud.handlers(), RUN)
    assert len(plan.changes) == 10_000
    assert account.cloud.reads == 20
    assert Id("thing.t1", 0) in {change.id for change in plan.changes}
