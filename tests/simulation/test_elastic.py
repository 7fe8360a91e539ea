"""Runs to which slots are added, and from which they are removed, in mid-run: only the numbers change."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.operator import Change
from tests.simulation.run import Simulation, run_seed
from tests.simulation.scenario import calm
from tests.simulation.search import quiet, search

from skerry.runtime.log.setting_changes import RunSettings
from skerry.runtime.training.round_runner import RoundSettings

if TYPE_CHECKING:
    import pytest
    from tests.simulation.scenario import Scenario


def test_every_invariant_holds_while_slots_come_and_go() -> None:
    total = search(range(60), elastic=True)
    assert not total.reports, total.reports[0]
    assert total.facts["slots added"] > 30
    assert total.facts["slots removed"] > 15
    assert total.facts["steps by other slots"] > 100
    assert total.facts["processes crashed"] > 30


def test_search_sees_slots_that_are_taken_up_before_their_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunSettings, "slots_of", lambda self, *_: self.slots)
    with quiet():
        assert any("slots" in text for seed in range(60) for text in run_seed(seed, elastic=True).violations)


def test_search_sees_slots_that_are_not_looked_for_after_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundSettings, "look_for_slots", lambda _: None)
    with quiet():
        assert any("slots" in text for seed in range(60) for text in run_seed(seed, elastic=True).violations)


def changed(at_s: float, *, before: int, after: int, **settings: object) -> Scenario:
    """A calm run whose number of replicas changes."""
    scenario = calm(max(before, after), rounds=8, min_replicas=min(before, after), **settings)  # type: ignore[arg-type]
    run = scenario.run.model_copy(update={"slots": scenario.slots[:before], "spec": "0" * 64})
    own = tuple(replace(each, run=run) for each in scenario.settings)
    return replace(scenario, run=run, settings=own, changes=(Change(at_s=at_s, slots=scenario.slots[:after]),))


def test_new_replica_contributes_within_two_rounds_and_no_other_loses_one() -> None:
    simulation = Simulation(changed(13.0, before=4, after=5))
    result = simulation.run()
    assert not result.violations, result.report()
    assert result.facts["rounds failed"] == 0
    assert len(simulation.processes) == 5, "no replica was started again"
    members = simulation.checker.members
    assert all({"r-0", "r-1", "r-2", "r-3"} <= set(slots) for slots in members.values())
    first = min(number for number, slots in members.items() if "r-4" in slots)
    added = next(line for line in result.trace if line.actor == "OPERATOR")
    closed = sum(line.at < added.at and line.key.startswith("commits/") for line in result.trace)
    assert first - closed < 2
