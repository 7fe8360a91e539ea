"""The cases of `scripts/bench chaos --mirror`, and the cost of a mirror in its figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "scripts/benchmarks/chaos.py"


@pytest.fixture(scope="module")
def program() -> Any:
    """The program, whose name is also that of its package."""
    spec = importlib.util.spec_from_file_location("chaos_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_case_of_ours_is_run_without_and_with_a_mirror(program: Any) -> None:
    options = SimpleNamespace(
        seed=0, seeds=1, replicas=[2], means=[6.0], only=["ours", "torchft"], rounds=9, sync_every=20, step=0.2
    )
    options.down, options.codec, options.reduction, options.mirror = 0.0, "none", "auto", True
    cases = [(case.contestant, case.mean_rounds, case.has_mirror) for case in program.cases(options)]
    assert cases == [
        *(("ours", None, False), ("ours", None, True), ("torchft", None, False)),
        *(("ours", 6.0, False), ("ours", 6.0, True), ("torchft", 6.0, False)),
    ]


@pytest.mark.parametrize(("goodput", "cost", "is_met"), [(88.2, 2.0, True), (87.0, 3.33, False), (91.0, -1.11, True)])
def test_cost_is_the_share_of_goodput_that_the_mirror_takes(
    program: Any, goodput: float, cost: float, *, is_met: bool
) -> None:
    def result(mean: float | None, *, has_mirror: bool, of: float) -> dict[str, object]:
        names = "participation committed_rounds_lost survivors_discarded_steps replicas_finished rounds_bit_identical"
        figures: dict[str, object] = {**dict.fromkeys(names.split(), 0), "rounds": 0, "kill_to_next_commit_s": None}
        case = {"contestant": "ours", "replicas": 2, "mean_rounds": mean, "seed": 0, "has_mirror": has_mirror}
        return {**figures, **case, "goodput": of, "held_out_loss": 2.0}

    calm, bare = result(None, has_mirror=False, of=99.0), result(6.0, has_mirror=False, of=90.0)
    mirrored = result(6.0, has_mirror=True, of=goodput)
    program.compare([calm, bare, mirrored])
    assert mirrored["goodput_cost_of_mirror_percent"] == cost
    assert mirrored["marks"]["a mirror costs less than 3 % of goodput"] is is_met
    assert "goodput_cost_of_mirror_percent" not in bare
