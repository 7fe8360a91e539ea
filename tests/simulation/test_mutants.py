"""The proof of the simulation: deliberate bugs, each found. `scripts/bench simulate --mutants` prints the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.simulation import run
from tests.simulation.mutants import MUTANTS, SHOWN_BY, named
from tests.simulation.mutants_of_work import SEVERAL_FRAGMENTS
from tests.simulation.run import run_seed
from tests.simulation.scenario import draw
from tests.simulation.search import hunt, quiet

if TYPE_CHECKING:
    from tests.simulation.kit import Mutant

# Found within so many seeds, or the simulation has become weaker.
LIMIT = 3000
# More than a seed of SHOWN_BY takes without the bug. With some bugs replicas poll for ever.
MAX_EVENTS = 20_000


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name.replace(" ", "-") for mutant in MUTANTS])
def test_a_deliberate_bug_breaks_an_invariant(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_EVENTS", MAX_EVENTS)
    caught = hunt(mutant, LIMIT, SHOWN_BY[mutant.name])
    assert caught is not None
    assert caught.seeds == 1, f"SHOWN_BY is out of date: seed {caught.seeds - 2} shows it"


def test_a_mutant_leaves_nothing_behind() -> None:
    before = run_seed(0)
    hunt(MUTANTS[0], 1)
    assert not before.violations
    assert run_seed(0).digest == before.digest


def test_mutants_of_fragments_change_nothing_with_one_fragment() -> None:
    seeds = [seed for seed in range(10) if draw(seed).settings[0].fragments == 1][:3]
    with quiet():
        sound = [run_seed(seed).digest for seed in seeds]
        for name in SEVERAL_FRAGMENTS:
            with named(name).alive():
                assert [run_seed(seed).digest for seed in seeds] == sound, name


def test_every_part_of_the_protocol_has_mutants() -> None:
    names = {mutant.name for mutant in MUTANTS}
    assert names == set(SHOWN_BY)
    broken = {mutant.where for mutant in MUTANTS}
    assert broken == {
        "retrying",
        "log",
        "membership",
        "quorum",
        "exchange",
        "garbage_collector",
        "averager",
        "reduce_scatter",
        "early_end",
        "lifecycle",
        "recorder",
        "rescue",
        "receipts",
        "resumable_round",
        "round_runner",
        "settings",
        "divergence",
        "roll_up_writer",
        "roll_up",
    }
