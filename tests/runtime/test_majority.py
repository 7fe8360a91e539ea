"""Replicas that differ, and no majority says who is right: all judge alike, one state is left. With real managers."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import pytest
from tests.runtime.test_divergence import ROUNDS, Harmed, assert_one_truth, states, told
from tests.support.managers import decisions, together

from skerry.runtime import keys
from skerry.runtime.alarm import WINDOW
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.store import Data, Store


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="skerry")
    return caplog


class SlowUploads(MemoryStore):
    """The upload of some checkpoints is over when a later round is closed."""

    def __init__(self, over: Mapping[int, int]) -> None:
        """over: of a checkpoint's round, the round that closes first."""
        super().__init__()
        self._over = {keys.checkpoint_manifest(number): keys.commit(later) for number, later in over.items()}
        self._closed = threading.Condition()

    def create(self, key: str, data: Data) -> bool:
        if (commit := self._over.get(key)) is not None:
            with self._closed:
                assert self._closed.wait_for(lambda: self.read(commit) is not None, timeout=30)
        created = super().create(key, data)
        with self._closed:
            self._closed.notify_all()
        return created


def run_with(store: Store, factors: Sequence[float], rounds: int = ROUNDS) -> list[Harmed]:
    """One replica for each factor that its shared parameters are multiplied with, after two rounds."""
    islands = [Harmed(store, f"r-{i}", seed=i, minimum=len(factors)) for i in range(len(factors))]  # type: ignore[arg-type]
    for island, factor in zip(islands, factors, strict=True):
        island.harm_at = 2
        island.inner.param_groups[0]["lr"] = 0.001
        if factor != 1:
            island.harm = lambda tensor, factor=factor: factor * tensor
    return together([lambda island=island: island.train(rounds) for island in islands])


def assert_one_judgement(events: pytest.LogCaptureFixture, right: str) -> None:
    """Whoever has told of a round says the same of it. Right later is who was, and who knows it was not."""
    differ = told(events, "receipts_differ")
    assert differ
    said = {one["round"]: (one["right"], one["slots"]) for one in differ}
    assert all(said[one["round"]] == (one["right"], one["slots"]) for one in differ)
    assert said[min(said)][0] == right  # type: ignore[type-var]
    warned = {str(one["slot"]): int(str(one["round"])) for one in told(events, "diverged")}
    for number, (slots, _) in said.items():
        assert set(right.split(",")) <= set(str(slots).split(","))
        assert all(warned[slot] <= int(str(number)) for slot in set(str(slots).split(",")) - set(right.split(",")))


def assert_healed(events: pytest.LogCaptureFixture, store: MemoryStore, *slots: str) -> None:
    """These and no others have healed; from then on all hold the same, and contribute."""
    assert sorted(str(one["slot"]) for one in told(events, "healed")) == sorted(slots)
    after = max(int(str(one["round"])) for one in told(events, "healed"))
    made = decisions(store)
    assert all(len(states(store, number)) == 1 for number in range(after, len(made)))
    assert len(made[-1].members) == len(made[0].members)


@pytest.mark.parametrize("factors", [(1, 1.5), (1.5, 1)])
@pytest.mark.parametrize("later", [0, WINDOW, 2 * WINDOW])
def test_of_two_that_differ_the_second_heals_however_long_the_checkpoint_takes(
    events: pytest.LogCaptureFixture, factors: tuple[float, ...], later: int
) -> None:
    """Whichever of them was harmed: neither is more right than the other."""
    store = SlowUploads({3: 2 + later, 4: 3 + later} if later else {})
    assert_one_truth(run_with(store, factors))
    assert_one_judgement(events, "r-0")
    assert_healed(events, store, "r-1")


@pytest.mark.slow
@pytest.mark.parametrize("factors", [(1, 1, 1.5, 1.5), (1.5, 1, 1, 1.5)])
def test_of_two_and_two_that_differ_those_without_the_first_heal(
    events: pytest.LogCaptureFixture, factors: tuple[float, ...]
) -> None:
    store = MemoryStore()
    assert_one_truth(run_with(store, factors))
    alike = [f"r-{i}" for i in range(4) if factors[i] == factors[0]]
    assert_one_judgement(events, ",".join(alike))
    assert_healed(events, store, *(f"r-{i}" for i in range(4) if f"r-{i}" not in alike))


def test_of_three_that_all_differ_the_first_is_followed(events: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    assert_one_truth(run_with(store, (1.25, 1, 1.5)))
    assert_one_judgement(events, "r-0")
    assert_healed(events, store, "r-1", "r-2")


def test_strays_among_receipts_hide_nobody_who_differs(events: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    strays = [f"receipts/{number:08d}/r-0.json.bak" for number in range(ROUNDS)]
    for key in strays:
        store.create(key, b"a copy")
    assert_one_truth(run_with(store, (1, 1, 1.5)))
    for key in strays:
        store.delete(key)
    assert_one_judgement(events, "r-0,r-1")
    assert_healed(events, store, "r-2")
    assert not told(events, "receipt_failed")


@pytest.mark.slow
@pytest.mark.parametrize("factors", [(1, 1.5), (1.5, 1), (1, 1, 1.5)])
@pytest.mark.parametrize("takes", [WINDOW + 1, 2 * WINDOW])
def test_a_replica_heals_though_all_checkpoints_take_longer_than_the_window(
    events: pytest.LogCaptureFixture, factors: tuple[float, ...], takes: int
) -> None:
    rounds = 2 * ROUNDS
    store = SlowUploads({number: min(number - 1 + takes, rounds - 1) for number in range(1, rounds)})
    assert_one_truth(run_with(store, factors, rounds))
    assert_healed(events, store, f"r-{len(factors) - 1}")
