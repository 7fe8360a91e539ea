"""Replicas that differ: all reach one verdict, also without a majority, and one state is left. With real managers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from tests.kit.divergence import ROUNDS, harmed_islands, scaled
from tests.kit.events import logged_events
from tests.kit.managers import assert_same_parameters, decisions, states, train_all

from skerry.runtime.checkpointing.receipt_comparison import WINDOW
from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.store import Data, Store


class SlowUploads(MemoryStore):
    """The upload of some checkpoints ends when a later round is closed."""

    def __init__(self, closing_rounds: Mapping[int, int]) -> None:
        """closing_rounds: by the round of a checkpoint, the round that closes before its upload ends."""
        super().__init__()
        self._commits = {
            keys.checkpoint_manifest(number): keys.commit(closing) for number, closing in closing_rounds.items()
        }
        self._changed = threading.Condition()

    def create(self, key: str, data: Data) -> bool:
        if (commit := self._commits.get(key)) is not None:
            with self._changed:
                assert self._changed.wait_for(lambda: self.read(commit) is not None, timeout=30)
        created = super().create(key, data)
        with self._changed:
            self._changed.notify_all()
        return created


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


@pytest.mark.parametrize(("factors", "later"), [((1, 1.5), 0), ((1.5, 1), WINDOW), ((1.5, 1), 2 * WINDOW)])
def test_second_of_two_heals_however_slow_the_checkpoint_is(
    events: pytest.LogCaptureFixture, factors: tuple[float, ...], later: int
) -> None:
    store = SlowUploads({3: 2 + later, 4: 3 + later} if later else {})
    train_scaled(store, factors)
    assert_one_verdict(events, "r-0")
    assert_healed(events, store, "r-1")


@pytest.mark.parametrize(
    ("factors", "right"),
    [
        pytest.param((1, 1, 1.5, 1.5), "r-0,r-1", marks=pytest.mark.slow),
        pytest.param((1.5, 1, 1, 1.5), "r-0,r-3", marks=pytest.mark.slow),
        ((1.25, 1, 1.5), "r-0"),
    ],
)
def test_state_of_the_first_member_is_right_without_a_majority(
    events: pytest.LogCaptureFixture, factors: tuple[float, ...], right: str
) -> None:
    store = MemoryStore()
    train_scaled(store, factors)
    assert_one_verdict(events, right)
    assert_healed(events, store, *{f"r-{i}" for i in range(len(factors))}.difference(right.split(",")))


@pytest.mark.slow
@pytest.mark.parametrize(("factors", "takes"), [((1.5, 1), WINDOW + 1), ((1, 1, 1.5), 2 * WINDOW)])
def test_replica_heals_when_checkpoints_take_longer_than_the_window(
    events: pytest.LogCaptureFixture, factors: tuple[float, ...], takes: int
) -> None:
    rounds = 2 * ROUNDS
    store = SlowUploads({number: min(number - 1 + takes, rounds - 1) for number in range(1, rounds)})
    train_scaled(store, factors, rounds)
    assert_healed(events, store, f"r-{len(factors) - 1}")
