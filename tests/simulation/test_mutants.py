"""The proof of the simulation: deliberate bugs, each found. `scripts/bench simulate --mutants` prints the table."""

from __future__ import annotations

import pytest
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.scenario import run_seed
from tests.simulation.search import hunt

# Found within so many seeds, or the simulation has become weaker.
LIMIT = 1000
# What takes long enough to hide for a while.
SLOW = {
    "an answer that the key exists is trusted, without reading back",
    "a commit that a listing misses is a gap",
    "a create without an answer counts as done",
    "a checkpoint is taken of live state, half a second later",
    "the loser of a claim takes the incarnation too",
    "the loser of a create goes on with its own record",
    "dead replicas are waited for",
}


def named(mutant: Mutant) -> object:
    return pytest.param(
        mutant, id=mutant.name.replace(" ", "-"), marks=[pytest.mark.slow] if mutant.name in SLOW else []
    )


@pytest.mark.parametrize("mutant", [named(mutant) for mutant in MUTANTS])
def test_a_deliberate_bug_breaks_an_invariant(mutant: Mutant) -> None:
    assert hunt(mutant, LIMIT) is not None


def test_a_mutant_leaves_nothing_behind() -> None:
    before = run_seed(0)
    hunt(MUTANTS[0], 1)
    assert not before.violations
    assert run_seed(0).digest == before.digest


def test_every_part_of_the_protocol_has_mutants() -> None:
    assert not SLOW - {mutant.name for mutant in MUTANTS}
    broken = {mutant.where for mutant in MUTANTS}
    assert broken == {
        "retrying",
        "journal",
        "membership",
        "rounds",
        "exchange",
        "garbage",
        "replica",
    }
