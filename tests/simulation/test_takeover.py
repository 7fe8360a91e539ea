"""An exchange by reduce-scatter takes at most twice as long if an owner of units dies."""

from __future__ import annotations

import pytest
from tests.simulation.takeover import TakeoverCase, takeover_ratios

from skerry.runtime.tensors import reduce_scatter

CASE = TakeoverCase(members=4, units=32, unit_s=0.05)


def test_death_of_an_owner_costs_at_most_the_exchange_once_more() -> None:
    assert takeover_ratios(CASE, 30)[-1] <= 2.0


def test_patience_of_an_exchange_would_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce_scatter, "PATIENCE", 4.0)
    assert takeover_ratios(CASE, 10)[0] > 2.0


@pytest.mark.parametrize("members", [1, 2, 3])
def test_few_members_outlive_a_death(members: int) -> None:
    ratios = takeover_ratios(TakeoverCase(members=members + 1, units=8, unit_s=0.05), 5)
    assert ratios[0] > 0.0
