"""A seed is a schedule: the same events at the same times, in this process and in any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.simulation.mutants import named
from tests.simulation.run import run_seed

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", [4, 16])
def test_a_seed_replays_event_by_event(seed: int) -> None:
    first, second = run_seed(seed), run_seed(seed)
    assert len(first.trace) > 100
    assert first.trace == second.trace
    assert first.digest == second.digest


def test_another_seed_is_another_schedule() -> None:
    assert run_seed(4).digest != run_seed(5).digest


def test_failing_seed_fails_again_at_the_same_event_and_reports_its_replay() -> None:
    with named("members are in the order in which they came").alive():
        first, second = run_seed(0), run_seed(0)
    assert first.violations
    assert first.violations == second.violations
    assert first.digest == second.digest
    assert "scripts/bench simulate --seed 0" in first.report()
    assert first.violations[0] in first.report()


@pytest.mark.slow
def test_seed_gives_the_same_schedule_in_another_process_with_other_hashes() -> None:
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    script += "from tests.simulation.run import run_seed; print(run_seed(16).digest)"
    other = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": "1"},  # this process has drawn its own
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert other.stdout.strip() == run_seed(16).digest
