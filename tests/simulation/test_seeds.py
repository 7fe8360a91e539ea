"""175 seeds: whole runs with faults, every invariant after every event. `scripts/bench simulate` searches further."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from tests.simulation.faults import CALL_FAULTS, MACHINE_FAULTS
from tests.simulation.scenario import draw
from tests.simulation.search import Tally, search

BATCHES = [range(start, start + 25) for start in range(0, 175, 25)]
# What must have happened, or the search proves less than it seems to.
HAPPENED = (
    "rounds trained",
    "rounds followed",
    "rounds failed",
    "contributions adopted",
    "fragments resumed",
    "rounds of local_sgd",
    "rounds of ddp",
    "rounds ended early",
    "rounds closed by others",
    "checkpoints out of turn",
    "replicas healed",
    "abstentions",
    "checkpoints loaded",
    "objects deleted",
    "roll-ups",
    "processes fenced",
    "processes retry",
    "processes stopped",
)


@cache
def searched(number: int) -> Tally:
    return search(BATCHES[number])


@pytest.mark.parametrize("number", range(2))
def test_every_invariant_holds_after_every_event(number: int) -> None:
    assert not searched(number).reports, searched(number).reports[0]


def test_seeds_draw_runs_of_one_to_three_fragments() -> None:
    fragments = Counter(draw(seed).run.fragments for seed in range(300))
    assert min(fragments[1], fragments[2], fragments[3]) > 30, fragments


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2, len(BATCHES)))
def test_every_invariant_holds_after_every_event_of_more_seeds(number: int) -> None:
    assert not searched(number).reports, searched(number).reports[0]


@pytest.mark.slow
def test_every_kind_of_fault_and_of_answer_has_happened() -> None:
    total = Tally()
    for number in range(len(BATCHES)):
        total.add(searched(number))
    assert {kind: total.faults[kind] for kind in (*CALL_FAULTS, *MACHINE_FAULTS) if not total.faults[kind]} == {}
    assert [fact for fact in HAPPENED if not total.facts[fact]] == []
