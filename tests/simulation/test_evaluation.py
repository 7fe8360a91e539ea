"""Evaluations of one replica in simulated runs of four: what they cost, and that no step before them is lost."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tests.simulation.run import Result, Simulation
from tests.simulation.scenario import calm, with_settings
from tests.simulation.search import quiet

from skerry.runtime.log import keys
from skerry.runtime.log.records import Contribution
from skerry.runtime.protocol.quorum import Grace

STEPS, ROUND_S, ROUNDS, SEEDS = 20, 20.0, 6, 2


def evaluated(
    seed: int, evaluate_s: float, every: int = STEPS, *, measures: bool = True, round_s: float = ROUND_S
) -> tuple[Simulation, Result]:
    """A run whose first replica evaluates for so long before every so many inner steps."""
    scenario = replace(
        calm(4, rounds=ROUNDS, sync_every=STEPS, train_s=round_s, grace=Grace(), heartbeat_s=0.5, deadline_s=300.0),
        seed=seed,
    )
    settings = {"evaluate_s": evaluate_s, "evaluate_every": every, "measures": measures}
    with quiet():
        simulation = Simulation(with_settings(scenario, "r-0", **settings))
        result = simulation.run()
    assert not result.violations, result.report()
    return simulation, result


def counted(simulation: Simulation) -> dict[int, Contribution]:
    """The contributions of the first replica that are in an average, by round."""
    records: dict[int, Contribution] = {}
    for number, slots in simulation.checker.members.items():
        if "r-0" in slots:
            key = keys.contribution(number, 0, "r-0")
            records[number] = Contribution.parse(simulation.bucket.engine.read(key) or b"", key)
    return records


@cache
def counted_steps(evaluate_s: float, every: int = STEPS, *, measures: bool = True) -> int:
    runs = [evaluated(seed, evaluate_s, every, measures=measures)[0] for seed in range(SEEDS)]
    return sum(record.inner_steps for simulation in runs for record in counted(simulation).values())


def lost(evaluate_s: float, every: int, *, measures: bool) -> float:
    """The share of the first replica's inner steps that evaluations cost it, over paired seeds."""
    return 1 - counted_steps(evaluate_s, every, measures=measures) / counted_steps(0.0)


@pytest.mark.parametrize("every", [pytest.param(STEPS, id="each round"), pytest.param(30, id="in mid-round, too")])
def test_evaluation_of_a_fifth_of_a_round_costs_less_than_two_percent(every: int) -> None:
    assert lost(0.2 * ROUND_S, every, measures=True) < 0.02
    # A fifth may or may not fit into the others' window if it counts as training; three tenths never do.
    unmeasured = lost(0.3 * ROUND_S, every, measures=False)
    assert unmeasured > 0.05, "it is slow, and ends its rounds early"
    assert lost(0.3 * ROUND_S, every, measures=True) < unmeasured / 2


def test_evaluation_longer_than_the_round_contributes_earlier_steps() -> None:
    """It begins 50 s after the begin of a round of 60 s, and takes 30 s: the others wait for 15 s only."""
    simulation, result = evaluated(0, 30.0, every=STEPS + 17, round_s=60.0)
    assert result.facts["contributed in an evaluation"] >= 1
    records = counted(simulation)
    assert sorted(records) == list(range(ROUNDS)), "it is in every record"
    assert records[1].share == pytest.approx(17 / STEPS)
    assert (records[1].inner_steps, records[1].telemetry.evaluate_s > 0) == (17, True)  # type: ignore[union-attr]
    assert records[0].share == 1.0
    assert max(waits_s(result)) < 25.0, "the others wait no longer than their window"


def waits_s(result: Result) -> list[float]:
    """For each round, the time from the second contribution, with which there is a quorum, to the decision."""
    waited: list[float] = []
    for number in range(1, ROUNDS):
        lines = [line for line in result.trace if line.what == "create" and line.outcome == "True"]
        arrivals = [line for line in lines if line.key.startswith(keys.contributions_prefix(number, 0))]
        (decision,) = [line for line in lines if line.key == keys.decision(number, 0)]
        waited.append(decision.at - arrivals[1].at)
    return waited
