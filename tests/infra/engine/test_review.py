"""What a hostile reading of the engine found, each as a test: moved names, lost locks, stops, circles, strangers."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

import pytest
from tests.infra.engine.memory_cloud import RUN, Chest, Item, Named, Thing, Work
from tests.infra.engine.test_convergence import NOBODY, Account, holder

from skerry.infra.apply import Applying, Progress, Step, look
from skerry.infra.graph import Graph
from skerry.infra.handler import Condition
from skerry.infra.plan import Action, deletion_needs
from skerry.infra.state import Id, Phase

if TYPE_CHECKING:
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


def test_planning_ten_thousand_takes_each_of_them_a_few_times() -> None:
    account = Account()
    graph = Graph([thing(f"t{number}") for number in range(10_000)])
    plan = look(graph, {}, account.cloud.handlers(), RUN)
    assert len(plan.changes) == 10_000
    assert account.cloud.reads == 20
    assert Id("thing.t1", 0) in {change.id for change in plan.changes}
