"""A late replica of two ranks, as torchrun starts them: what both have trained counts half, and once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.runtime import test_torchrun
from tests.runtime.test_torchrun import Fleet, same_bits
from tests.support.managers import contributions, decisions

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

H = 6
ROUNDS = 7


def test_what_two_ranks_bring_late_counts_once_and_half_though_one_of_them_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late in rounds 0 and 1, it brings both to round 2, and loses a rank. Restarted it goes on alike: 2 and 3 to 4."""
    monkeypatch.setattr(test_torchrun, "SCRIPT", test_torchrun.ROOT / "tests" / "support" / "ranked_late.py")
    with Fleet(tmp_path, slots=("r-0",)) as fleet:
        terms = ["--rounds", str(ROUNDS), "--sync-every", str(H), "--minimum", "1", "--grace", "0"]
        fleet.start(0, *terms)
        fleet.start(1, *terms, "--die-at", "1:5", restarts=1)
        reports = fleet.finish()
    assert [report["restarts"] for report in reports["r-1"]] == [1, 1]
    weights = [{share.slot: share.weight for share in one.members} for one in decisions(fleet.store)]
    late = pytest.approx(0.5 * 4 / H)
    assert weights == [{"r-0": 1.0, **({"r-1": late} if number in {2, 4, 6} else {})} for number in range(ROUNDS)]
    found = [one for one in contributions(fleet.store) if one.slot == "r-1" and one.round < ROUNDS]
    assert [(one.round, one.incarnation, one.inner_steps) for one in found] == [(2, 0, 4), (4, 1, 4), (6, 1, 4)]
    assert all(len(one.ranks) == 2 for one in found)
    same_bits(reports, at_least=1)
