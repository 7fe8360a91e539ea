"""Replicas that differ: all reach one verdict, also without a majority, and one state is left. With real managers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.kit.divergence import ROUNDS, harmed_islands, scaled
from tests.kit.events import logged_events
from tests.kit.managers import assert_same_parameters, decisions, states, train_all, wait_for
from tests.kit.stores import HookedStore

from skerry.runtime.checkpointing.receipt_comparison import WINDOW
from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store import Store


def train_scaled(store: Store, factors: Sequence[float], rounds: int = ROUNDS) -> None:
    """One replica for each factor that its shared parameters are multiplied with, after two rounds."""
    islands = harmed_islands(store, [None if factor == 1 else scaled(factor) for factor in factors])
    for island in islands:
        island.harm_at = 2
        island.inner.param_groups[0]["lr"] = 0.001
    train_all(islands, rounds)
    assert_same_parameters(islands)


def assert_one_verdict(events: pytest.LogCaptureFixture, right: str) -> None:
    """All reports of a round are equal, and the first names `right`. Other slots count as right once they diverged."""
    verdicts: dict[int, tuple[str, str]] = {}
    for event in logged_events(events, "receipts_differ"):
        verdict = (event["right"], event["slots"])
        assert verdicts.setdefault(event["round"], verdict) == verdict
    assert verdicts[min(verdicts)][0] == right
    diverged_since = {event["slot"]: event["round"] for event in logged_events(events, "diverged")}
    for number, (right_now, _) in verdicts.items():
        assert set(right.split(",")) <= set(right_now.split(","))
        assert all(diverged_since[slot] <= number for slot in set(right_now.split(",")) - set(right.split(",")))


def assert_healed(events: pytest.LogCaptureFixture, store: MemoryStore, *slots: str) -> None:
    """These slots and no others have healed. From then on all replicas have the same state and contribute."""
    healed = logged_events(events, "healed")
    assert sorted(event["slot"] for event in healed) == sorted(slots)
    exchanges = decisions(store)
    last_healed = max(event["round"] for event in healed)
    assert all(len(states(store, number)) == 1 for number in range(last_healed, len(exchanges)))
    assert len(exchanges[-1].members) == len(exchanges[0].members)


@pytest.mark.parametrize(
    ("factors", "right"),
    [
        ((1, 1.5), "r-0"),
        ((1.5, 1), "r-0"),
        ((1.25, 1, 1.5), "r-0"),
        pytest.param((1.5, 1, 1, 1.5), "r-0,r-3", marks=pytest.mark.slow),
    ],
)
def test_state_of_the_first_member_is_right_without_a_majority(
    events: pytest.LogCaptureFixture, factors: tuple[float, ...], right: str
) -> None:
    store = MemoryStore()
    train_scaled(store, factors)
    assert_one_verdict(events, right)
    assert_healed(events, store, *{f"r-{i}" for i in range(len(factors))}.difference(right.split(",")))


@pytest.mark.parametrize("later", [WINDOW, pytest.param(2 * WINDOW, marks=pytest.mark.slow)])
def test_replica_heals_however_slow_the_checkpoint_is(events: pytest.LogCaptureFixture, later: int) -> None:
    """The uploads of two checkpoints end when a later round is closed."""

    def delay_upload(verb: str, key: str) -> None:
        for number in (3, 4):
            if (verb, key) == ("create", keys.checkpoint_manifest(number)):
                wait_for(lambda n=number: MemoryStore.read(store, keys.commit(n - 1 + later)), timeout_s=30)

    store = HookedStore(delay_upload)
    train_scaled(store, (1.5, 1))
    assert_one_verdict(events, "r-0")
    assert_healed(events, store, "r-1")
