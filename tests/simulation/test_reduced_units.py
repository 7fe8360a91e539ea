"""Reduce-scatter in simulated runs: members that die around their units, and units that are damaged."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.simulation.owners import Owner
from tests.simulation.run import Simulation
from tests.simulation.scenario import calm, chooses, chooses_beside_an_older_one, reduces_in_one_region, scatters
from tests.simulation.search import quiet, search

from skerry.runtime.log import keys

if TYPE_CHECKING:
    from tests.simulation.faults import Call, Script
    from tests.simulation.run import Result
    from tests.simulation.scenario import Scenario

# In this many seconds a member knows that another one's unit is late, makes it, and the others have read it.
TAKEN_S = 15.0


def is_unit(call: Call, slot: str, round_number: int = 1) -> bool:
    """The call creates a unit of this round for this slot."""
    return call.verb == "create" and call.key.startswith(f"{keys.payloads_prefix(round_number)}{slot}/reduced/")


def ended(scenario: Scenario, script: Script | None = None) -> tuple[Simulation, Result]:
    """A run of three members with a unit each. No invariant may break, and all of it must come to its end."""
    with quiet():
        simulation = Simulation(scatters(scenario), script)
        result = simulation.run()
    assert not result.violations, result.report()
    return simulation, result


def closing_time(result: Result, round_number: int) -> float:
    """Seconds from the decision to the commit."""
    at = {event.key: event.at for event in reversed(result.trace) if event.what == "create" and event.outcome == "True"}
    return at[keys.commit(round_number)] - at[keys.decision(round_number, 0)]


def makers(result: Result, round_number: int) -> Counter[str]:
    """The number of units of a round that each slot has created."""
    prefix = keys.payloads_prefix(round_number)
    created = [event.key for event in result.trace if event.what == "create" and "/reduced/" in event.key]
    return Counter(keys.slot_of(key) for key in created if key.startswith(prefix))


def test_each_member_makes_its_unit_once() -> None:
    _, result = ended(calm(parts=3))
    assert all(makers(result, number) == {"r-0": 1, "r-1": 1, "r-2": 1} for number in range(4))


@pytest.mark.parametrize("slot", ["r-0", "r-1"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_kill_around_a_unit_loses_nothing(slot: str, moment: str) -> None:
    killed: list[str] = []

    def script(call: Call) -> str | None:
        if killed or not is_unit(call, slot) or call.moment != moment:
            return None
        killed.append(call.key)
        return "crash"

    simulation, result = ended(calm(parts=3, rounds=6), script)
    assert killed
    assert closing_time(result, 1) <= TAKEN_S
    assert simulation.checker.members[1] == ("r-0", "r-1", "r-2"), "it was decided, whichever replica died then"


def test_unit_of_a_member_that_never_comes_back_is_made_by_the_next() -> None:
    scenario = replace(calm(parts=3), lost=frozenset({"r-1"}))
    _, result = ended(scenario, lambda call: "crash" if is_unit(call, "r-1") and call.moment == "before" else None)
    assert makers(result, 1) == {"r-0": 1, "r-2": 2}
    assert closing_time(result, 1) <= TAKEN_S


def test_damaged_unit_is_made_again_and_never_used() -> None:
    damaged: list[str] = []

    def script(call: Call) -> str | None:
        if not damaged and is_unit(call, "r-0") and call.moment == "after":
            damaged.append(call.key)
            simulation.bucket.rot(call.key, "body at once")
        return None

    with quiet():
        simulation = Simulation(scatters(calm(parts=3)), script)
        result = simulation.run()
    assert damaged
    assert not result.violations, result.report()
    assert result.facts["rounds failed"] == 0
    assert makers(result, 1) == {"r-0": 1, "r-1": 2, "r-2": 1}


def test_replicas_in_one_region_make_the_units_of_all() -> None:
    with quiet():
        result = Simulation(reduces_in_one_region(scatters(calm(4, parts=3)))).run()
    assert not result.violations, result.report()
    assert all(makers(result, number) == {"r-0": 2, "r-1": 1} for number in range(4))


@pytest.mark.parametrize("slot", ["r-0", "r-1"])
def test_kill_of_a_replica_that_makes_units_for_all_loses_nothing(slot: str) -> None:
    scenario = replace(calm(4, parts=3), lost=frozenset({slot}))
    script: Script = lambda call: "crash" if is_unit(call, slot) and call.moment == "before" else None  # noqa: E731
    with quiet():
        result = Simulation(reduces_in_one_region(scatters(scenario)), script).run()
    assert not result.violations, result.report()
    assert slot not in makers(result, 1)
    assert closing_time(result, 1) <= TAKEN_S


@pytest.mark.parametrize(("seconds", "taken"), [(20, {}), (400, {"r-3": 1})])
def test_slow_maker_is_waited_for_and_a_stuck_one_is_not(seconds: int, taken: dict[str, int]) -> None:
    def script(call: Call) -> str | None:
        is_third = call.key.endswith("-00002") and is_unit(call, "r-0") and call.moment == "before"
        return f"delayed:{seconds}" if is_third else None

    with quiet():
        result = Simulation(reduces_in_one_region(scatters(calm(4, parts=3)), nearby=1), script).run()
    assert not result.violations, result.report()
    by_others = makers(result, 1)
    assert by_others.pop("r-0") >= 2
    assert by_others == taken
    assert closing_time(result, 1) <= 60.0


def test_kill_of_the_only_maker_costs_the_time_until_it_counts_as_dead() -> None:
    scenario = replace(calm(4, parts=3), lost=frozenset({"r-0"}))
    script: Script = lambda call: "crash" if is_unit(call, "r-0") and call.moment == "before" else None  # noqa: E731
    with quiet():
        result = Simulation(reduces_in_one_region(scatters(scenario), nearby=1), script).run()
    assert not result.violations, result.report()
    assert makers(result, 1) == {"r-1": 1, "r-2": 1, "r-3": 1}
    assert 5.0 < closing_time(result, 1) <= TAKEN_S


def test_reduction_is_chosen_by_the_links_that_are_recorded() -> None:
    with quiet():
        results = [Simulation(replace(chooses(calm(3, rounds=8)), seed=seed)).run() for seed in range(3)]
    for result in results:
        assert not result.violations, result.report()
    chosen = Counter(fact for result in results for fact in result.facts.elements() if fact.startswith("chosen"))
    assert min(chosen["chosen all_gather"], chosen["chosen reduce_scatter"]) > 3, chosen


def test_replica_of_before_links_shares_a_run_with_newer_ones() -> None:
    with quiet():
        simulation = Simulation(chooses_beside_an_older_one(calm(3, rounds=4)))
        result = simulation.run()
    assert not result.violations, result.report()
    assert result.facts["chosen without links"] == 4
    assert [process.status for process in simulation.processes] == ["done"] * 3
    assert [simulation.checker.members[number] for number in range(4)] == [("r-0", "r-1", "r-2")] * 4


@pytest.mark.parametrize(("seconds", "taken"), [(0.2, 0), (20.0, 1)])
def test_unit_of_a_slow_owner_is_made_by_the_next_if_it_is_late(seconds: float, taken: int) -> None:
    owner = Owner(slot="r-1", kind="slow", seconds=seconds)
    _, result = ended(replace(calm(parts=3, rounds=3), owner=owner))
    by_others = makers(result, 0) - Counter({"r-1": 1})
    assert by_others == {"r-0": 1, "r-2": 1 + taken}
    assert closing_time(result, 0) <= TAKEN_S


def test_units_of_another_version_are_refused_and_made_again() -> None:
    owner = Owner(slot="r-1", kind="version")
    _, result = ended(replace(calm(parts=3, rounds=3), owner=owner))
    assert result.facts["units of another version"] == 3
    assert result.facts["rounds failed"] == 0
    assert all(makers(result, number) == {"r-0": 1, "r-1": 1, "r-2": 2} for number in range(3))


def test_member_of_an_older_version_stops_by_name_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    scenario = replace(calm(rounds=3), owner=Owner(slot="r-2", kind="older"), lost=frozenset({"r-2"}))
    simulation = Simulation(scatters(scenario))
    result = simulation.run()
    assert not result.violations, result.report()
    assert {process.slot: process.status for process in simulation.processes} == {
        "r-0": "done",
        "r-1": "done",
        "r-2": "retry",
    }
    assert result.facts["rounds closed"] == 3
    assert "key=exchanges/00000000-0000.json kind=Decision surprise: Extra inputs" in caplog.text


def test_every_invariant_holds_with_faults() -> None:
    tally = search([*range(2001, 2041, 2), 2057])
    assert not tally.reports, tally.reports[0]
    assert tally.facts["rounds closed"] > 50
    assert tally.facts["units of another version"] > 3
    assert min(tally.facts[f"chosen {how}"] for how in ("all_gather", "reduce_scatter", "without links")) > 0
