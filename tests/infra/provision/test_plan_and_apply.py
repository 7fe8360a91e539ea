"""What a hostile reading of the engine found, each as a test: moved names, lost locks, stops, circles, strangers."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

import pytest
from tests.infra.engine.memory_cloud import RUN, Chest, Item, MemoryHandler, Named, Thing, Work
from tests.infra.engine.test_convergence import NOBODY, Account, holder

from skerry.infra.apply import Applying, Progress, Step, look
from skerry.infra.graph import Graph
from skerry.infra.handler import Condition
from skerry.infra.plan import Action, deletion_needs
from skerry.infra.state import Id, Phase
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from skerry.infra.handler import Wanted
    from skerry.infra.plan import Plan


def thing(key: str, name: str = "", uses: tuple[str, ...] = (), **more: object) -> Thing:
    refs = tuple(Thing(key=one, name=one, region="").ref("id") for one in uses)
    return Thing(key=key, name=name or key, region="", uses=refs, **more)  # type: ignore[arg-type]


def actions(plan: Plan) -> dict[str, Action]:
    return {str(change.id): change.action for change in plan.changes}


def test_what_changes_its_name_is_made_anew_and_the_old_one_is_deleted() -> None:
    account = Account()
    account.converge(Graph([thing("a"), thing("b", uses=("a",))]))
    moved = Graph([thing("a", name="other"), thing("b", uses=("a",))])
    assert actions(account.plan(moved))["thing.a"] is Action.DELETE
    assert account.apply(moved).ok
    assert {name for _, name in account.cloud.items} == {"other-g1", "b"}
    account.converge(moved)
    account.holds(moved)


def test_what_was_made_and_is_now_the_users_own_of_another_name_is_deleted() -> None:
    account = Account()
    account.converge(Graph([thing("a"), thing("b", uses=("a",))]))
    account.cloud.items["thing", "theirs"] = Item(None, "", 0, {}, {"id": "theirs/9"})
    brought = Graph([thing("a", name="theirs", brought=True), thing("b", uses=("a",))])
    assert account.apply(brought).ok
    assert account.cloud.items["thing", "b"].settings["uses"] == ["theirs/9"]
    assert {name for _, name in account.cloud.items} == {"theirs", "b"}
    assert account.plan(brought).empty
    # And what is theirs stays when everything else goes.
    assert account.apply(NOBODY).ok
    assert {name for _, name in account.cloud.items} == {"theirs"}


def test_what_is_somebody_elses_is_a_problem_and_stays_as_it_is() -> None:
    account = Account()
    account.cloud.items["thing", "a"] = Item("memory://another/run", "thing.a", 0, {"size": 7}, {"id": "x"})
    plan = account.plan(Graph([thing("a")]))
    assert plan.empty
    assert plan.problems == (
        "thing.a: a exists and belongs to memory://another/run; use it as it is with `byo:`, or take another name",
    )


def test_what_the_user_names_must_be_there_and_usable() -> None:
    account = Account()
    mine = Graph([thing("a", brought=True)])
    assert "does not exist" in account.plan(mine).problems[0]
    account.cloud.items["thing", "a"] = Item(None, "", 0, {}, {"id": "x"}, Condition.BROKEN)
    assert "cannot be used" in account.plan(mine).problems[0]


def test_what_holds_data_is_never_replaced_and_an_apply_never_deletes_it() -> None:
    account = Account()
    chest = Chest(key="c", name="c", region="")
    account.converge(Graph([chest]))
    assert "may hold data" in account.plan(Graph([dataclasses.replace(chest, name="other")])).problems[0]
    account.cloud.items["chest", "c"].condition = Condition.BROKEN
    assert "cannot be used" in account.plan(Graph([chest])).problems[0]
    account.cloud.items["chest", "c"].condition = Condition.READY
    assert actions(account.plan(Graph([thing("t")])))["chest.c"] is Action.FORGET
    assert actions(account.plan(NOBODY))["chest.c"] is Action.DELETE


def test_a_deletion_that_was_cut_short_is_finished_and_the_next_generation_made() -> None:
    account = Account()
    graph = Graph([thing("a")])
    account.converge(graph)
    state = account.file.load()
    assert state is not None
    with account.file.hold(holder(), state, RUN) as hold:
        (entry,) = hold.entries
        hold.note(entry.id, dataclasses.replace(entry, phase=Phase.DELETING))
    assert actions(account.plan(graph)) == {"thing.a#1": Action.CREATE, "thing.a": Action.DELETE}
    account.converge(graph)
    account.holds(graph)


def hundred() -> Graph:
    return Graph([thing(f"t{number}") for number in range(100)])


def test_a_holder_that_was_unlocked_makes_nothing_more() -> None:
    account = Account()
    graph = hundred()
    plan = look(graph, {}, account.cloud.handlers(), RUN)
    hold = account.file.hold(holder(), None, RUN)

    unlocked = threading.Event()

    def unlock(number: int) -> None:
        if number == 5:
            account.file.unlock()
            account.clock.advance(5)
            unlocked.set()
        elif number > 5:
            unlocked.wait(30)

    account.cloud.after_write = unlock
    outcome = Applying(plan, graph, hold, account.cloud.handlers(), lambda _: None, 4).run()
    assert not outcome.ok
    # Those that were in flight may end; nothing is begun once the first of them has heard.
    assert len(account.cloud.items) <= 5 + 4
    assert hold.lost


def test_a_stop_lets_what_is_in_flight_end_and_begins_nothing_that_was_queued() -> None:
    account = Account()
    graph = hundred()
    plan = look(graph, {}, account.cloud.handlers(), RUN)
    hold = account.file.hold(holder(), None, RUN)
    work = Applying(plan, graph, hold, account.cloud.handlers(), lambda _: None, 4)
    account.cloud.after_write = lambda number: work.stop() if number == 5 else None
    outcome = work.run()
    hold.release()
    assert 5 <= len(outcome.done) == len(account.cloud.items) <= 5 + 4
    assert len(outcome.done) + len(outcome.skipped) == 100
    assert not outcome.failed
    account.cloud.after_write = lambda _: None
    account.converge(graph)


def test_an_interrupt_begins_nothing_more_either() -> None:
    account = Account()
    graph = hundred()
    plan = look(graph, {}, account.cloud.handlers(), RUN)

    def interrupt(step: Step) -> None:
        if step.progress is Progress.DONE:
            raise KeyboardInterrupt

    hold = account.file.hold(holder(), None, RUN)
    work = Applying(plan, graph, hold, account.cloud.handlers(), interrupt, 4)
    # The others are in flight until the interrupt has come.
    account.cloud.after_write = lambda number: work._stopping.wait(30) if number > 1 else None
    with pytest.raises(KeyboardInterrupt):
        work.run()
    hold.release()
    state = account.file.load()
    assert state is not None
    assert state.holder is None
    made = {entry.made.name for entry in state.entries if entry.phase is Phase.READY}
    assert made == {name for _, name in account.cloud.items}
    assert len(made) <= 1 + 4


def test_two_that_changed_places_are_deleted_all_the_same() -> None:
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
        account.apply(NOBODY)
    assert account.cloud.items == {}


def _id(key: str) -> object:
    return Named(key=key, name=key, region="").ref("id")


def test_a_job_that_was_begun_and_forgotten_by_all_but_its_tag_is_not_begun_twice() -> None:
    account = Account()
    graph = Graph([Work(key="j", name="j", region="")])
    account.converge(graph)
    account.cloud.items["work", "j"].condition = Condition.LOST
    account.converge(graph)
    account.file.remove()
    state = account.file.load()
    assert state is None
    found = [made for handler in account.cloud.handlers().values() for made in handler.owned(RUN, ())]
    assert {(made.name, made.generation) for made in found} == {("j-g1", 1)}


def test_what_others_use_stays_beside_the_new_one_until_they_are_applied_too() -> None:
    account = Account()
    users = [thing(f"b{number}", uses=("a",)) for number in range(5)]
    account.converge(Graph([thing("a"), *users]))
    whole = Graph([thing("a", shape="flat"), *users])
    part = whole.part(["thing.a"])
    text = "a stays, for it is used by thing.b0, thing.b1, thing.b2 and 2 more; an apply without --target ends that"
    assert account.plan(part, whole).notes == (f"thing.a: {text}",)
    account.converge(part, whole)
    assert {"a", "a-g1"} <= {name for _, name in account.cloud.items}
    assert account.plan(part, whole).notes == (f"thing.a: {text}",)
    # Those that are taken along use the new one; the others the old one still.
    account.converge(whole.part(["thing.b0"]), whole)
    used = {name: item.settings["uses"] for (_, name), item in account.cloud.items.items() if name.startswith("b")}
    (new,), (old,) = used["b0"], used["b1"]
    assert (str(new).split("/")[0], str(old).split("/")[0]) == ("a-g1", "a")
    account.converge(whole)
    account.holds(whole)
    assert "a" not in {name for _, name in account.cloud.items}


def test_what_stays_for_others_keeps_what_it_uses_itself() -> None:
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
    account.holds(whole)


def test_a_part_of_what_is_not_there_is_refused() -> None:
    with pytest.raises(Invalid, match=r"the spec has no resource thing\.x, thing\.y; `skerry plan` names them all"):
        Graph([thing("a")]).part(["thing.y", "thing.a", "thing.x"])


def test_nothing_may_refer_to_what_goes_before_another_is_made() -> None:
    job = Work(key="j", name="j", region="")
    with pytest.raises(Invalid, match=r"thing\.a refers to work\.j, which goes before another is made of it"):
        Graph([job, Thing(key="a", name="a", region="", uses=(job.ref("id"),))])


def test_an_update_that_changes_an_output_is_an_error_that_names_it_and_the_next_apply_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    account = Account()
    graph = Graph([thing("a"), thing("b", uses=("a",))])
    account.converge(graph)
    kept = MemoryHandler.update

    def renumbering(self: MemoryHandler, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        kept(self, wanted, changed)
        item = self.cloud.items[self.kind.KIND, wanted.name]
        item.outputs = {"id": "another"}
        return item.outputs

    larger = Graph([thing("a", size=2), thing("b", uses=("a",), size=2)])
    with monkeypatch.context() as patched:
        patched.setattr(MemoryHandler, "update", renumbering)
        outcome = account.apply(larger)
    (error,) = outcome.failed.values()
    assert str(error) == (
        "thing.a: id changed with it, and what refers to it was planned with what was before; run `skerry plan` again"
    )
    assert [str(change.id) for change in outcome.skipped] == ["thing.b"]
    account.converge(larger)
    account.holds(larger)


def test_what_somebody_made_anew_under_the_same_name_reaches_its_users_at_once() -> None:
    account = Account()
    graph = Graph([thing("a"), thing("b", uses=("a",))])
    account.converge(graph)
    account.cloud.items["thing", "a"].outputs = {"id": "another"}
    plan = account.plan(graph)
    assert actions(plan) == {"thing.a": Action.ADOPT, "thing.b": Action.UPDATE}
    assert plan.changes[0].because == "another id than it was made with"
    account.converge(graph)
    assert account.cloud.items["thing", "b"].settings["uses"] == ["another"]


def test_what_is_to_be_taken_in_is_so_even_if_nothing_of_it_turns_out_to_differ() -> None:
    account = Account()
    chain = [Named(key="a", name="a", region=""), Thing(key="b", name="b", region="", uses=(_id("a"),))]
    account.converge(Graph(chain))
    state = account.file.load()
    assert state is not None
    with account.file.hold(holder(), state, RUN) as hold:
        entry = hold.entry(Id("thing.b", 0))
        assert entry is not None
        hold.note(entry.id, dataclasses.replace(entry, phase=Phase.UPDATING))
    del account.cloud.items["named", "a"]
    # Made again it has the id that it had, for that is its name.
    assert actions(account.plan(Graph(chain))) == {"named.a": Action.CREATE, "thing.b": Action.ADOPT}
    account.cloud.writes = 0
    assert account.apply(Graph(chain)).ok
    assert account.cloud.writes == 2
    assert account.plan(Graph(chain)).empty


def test_of_a_lost_state_what_is_used_still_goes_after_its_users_have_changed() -> None:
    account = Account()
    account.converge(Graph([thing("a"), thing("b", uses=("a",))]))
    # b has to wait for something else.
    whole = Graph([thing("a", shape="flat"), thing("c"), thing("d", uses=("c",)), thing("b", uses=("a", "d"))])
    account.converge(whole.part(["thing.a"]), whole)
    account.lose_state()
    assert account.apply(whole).ok
    account.holds(whole)


def test_of_a_lost_state_nothing_is_deleted_by_a_part_as_long_as_its_users_are_not_known() -> None:
    account = Account()
    account.converge(Graph([thing("a"), thing("b", uses=("a",))]))
    account.lose_state()
    whole = Graph([thing("a", shape="flat")])
    assert actions(account.plan(whole, whole)) == {"thing.a#1": Action.REPLACE}
    account.apply(whole, whole)
    assert {name for _, name in account.cloud.items} == {"a", "a-g1", "b"}


def test_planning_ten_thousand_takes_each_of_them_a_few_times() -> None:
    account = Account()
    graph = Graph([thing(f"t{number}") for number in range(10_000)])
    plan = look(graph, {}, account.cloud.handlers(), RUN)
    assert len(plan.changes) == 10_000
    assert account.cloud.reads == 20
    assert Id("thing.t1", 0) in {change.id for change in plan.changes}
