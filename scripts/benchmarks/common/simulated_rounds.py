"""The rounds of a run, as the shipped protocol makes them: the contributions of each, and when it closed.

The run is simulated (tests/simulation drives the shipped lifecycle on a memory store, in virtual time), so hours of
training at unlike speeds, or with kills, take a second and are the same every time.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the simulation is part of the tests

from tests.simulation.faults import Rates
from tests.simulation.run import Simulation
from tests.simulation.scenario import calm, with_settings
from tests.simulation.search import quiet
from tests.simulation.training import STEPS as INNER_STEPS

from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog, read_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.simulation.scenario import Scenario

    from skerry.runtime.protocol.quorum import Grace

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Round:
    """A closed round. closed_s: since the start. steps: inner steps of each replica that the average has, 0 if none.

    weights: of each replica in the average.
    """

    closed_s: float
    steps: tuple[int, ...]
    weights: tuple[float, ...]


def simulate(
    train_s: Sequence[float],
    *,
    rounds: int,
    sync_every: int,
    min_replicas: int,
    grace: Grace,
    ends_early: bool = True,
    crash: float = 0.0,
) -> list[Round]:
    """Simulate a run of one replica for each of `train_s`, the seconds that it takes for the inner steps of a round.

    crash: chance that a request to the store is its replica's last; it starts again after some seconds.
    A simulated replica takes a limited number of inner steps, so a longer run is put together from several, with their
    first rounds left out: those wait for replicas to start. Raises RuntimeError if a run breaks an invariant.
    """
    # A killed replica takes some of its inner steps twice, and they count towards the limit, too.
    length = (INNER_STEPS - 1) // sync_every // (2 if crash else 1)
    joined: list[Round] = []
    for seed in itertools.count():
        scenario = calm(
            len(train_s),
            rounds=length,
            min_replicas=min_replicas,
            sync_every=sync_every,
            grace=grace,
            deadline_s=3600.0,
            heartbeat_s=5.0,
            jitter=0.2,
            ends_early=ends_early,
            # A restarted replica continues the round that it was killed in.
            unfinished_every_s=max(train_s) / 4 if crash else None,
        )
        for slot, seconds in zip(scenario.slots, train_s, strict=True):
            scenario = with_settings(scenario, slot, train_s=seconds)
        horizon = length * max(train_s) if crash else 0.0
        scenario = replace(scenario, seed=seed, rates=Rates(latency_s=0.02, crash=crash, horizon_s=horizon))
        segment = _segment(scenario)
        shift = joined[-1].closed_s - segment[0].closed_s if joined else 0.0
        joined += [replace(closed, closed_s=closed.closed_s + shift) for closed in segment[1 if joined else 0 :]]
        if len(joined) >= rounds:
            break
    return joined[:rounds]


def existing(record: T | None) -> T:
    """The record that another record, or the end of the run, proves to exist."""
    if record is None:
        raise RuntimeError("a record of a simulated run is missing")
    return record


def _segment(scenario: Scenario) -> list[Round]:
    simulation = Simulation(scenario)
    with quiet():
        result = simulation.run()
    if result.violations:
        raise RuntimeError(result.report())
    run = existing(read_run(simulation.bucket.engine))  # its nonce is its first replica's
    log = RunLog(simulation.bucket.engine, run)
    closed: dict[str, float] = {}
    for line in result.trace:
        if line.what == "create" and line.key.startswith(keys.COMMITS):
            closed.setdefault(line.key, line.at)
    return [
        _round(log, number, closed[keys.commit(number)], scenario.slots) for number in range(scenario.run.rounds or 0)
    ]


def _round(log: RunLog, number: int, closed_s: float, slots: Sequence[str]) -> Round:
    decision = existing(log.read_decision(number, 0))
    weights = {share.slot: share.weight for share in decision.record.members}
    steps: dict[str, int] = {}
    for slot in weights:
        steps[slot] = existing(log.read_contribution(number, 0, slot)).record.inner_steps
    return Round(
        closed_s=closed_s,
        steps=tuple(steps.get(slot, 0) for slot in slots),
        weights=tuple(weights.get(slot, 0.0) for slot in slots),
    )
