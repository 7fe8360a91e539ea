"""Every interleaving of small runs. `scripts/bench simulate --explore` goes further and says how many states."""

from __future__ import annotations

import pytest
from tests.simulation.explore import Bounds, explore
from tests.simulation.mutants import named
from tests.simulation.search import quiet


@pytest.mark.parametrize(
    ("bounds", "at_least"),
    [
        (Bounds(rounds=1, preemptions=1), 50),
        pytest.param(Bounds(rounds=2, preemptions=1), 100, marks=pytest.mark.slow),
        pytest.param(Bounds(rounds=1, preemptions=0, crashes=1), 100, marks=pytest.mark.slow),
        pytest.param(Bounds(rounds=1, preemptions=0, replaced=1), 100, marks=pytest.mark.slow),
        (Bounds(replicas=3, rounds=1, preemptions=0), 30),
    ],
    ids=str,
)
def test_no_interleaving_breaks_an_invariant(bounds: Bounds, at_least: int) -> None:
    with quiet():
        seen = explore(bounds)
    assert seen.complete
    assert not seen.violations, "\n".join(seen.violations)
    assert seen.schedules >= at_least


@pytest.mark.parametrize(
    ("bug", "bounds"),
    [
        ("the loser of a proposal uses its own decision", Bounds(preemptions=2)),
        ("a checkpoint is visible before its parts", Bounds(preemptions=0)),
        pytest.param(
            "a replaced incarnation is not fenced",
            Bounds(rounds=2, preemptions=0, replaced=1),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_exploration_finds_a_deliberate_bug(bug: str, bounds: Bounds) -> None:
    with named(bug).alive(), quiet():
        assert explore(bounds).violations
