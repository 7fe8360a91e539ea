"""A replica that restarts within a round looks first, and trains no step that the others would have to wait for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.kit.managers import contributions, together, wait_for, weights
from tests.runtime.ranks.replicas import RankedReplica, closing_replicas
from tests.runtime.training.test_resumable_round_store import AT_ONCE, H, Saved, inner_steps

from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.kit.managers import Island

WAITED_FOR = {"minimum": 2, "grace_s": 60.0, "heartbeat_interval": timedelta(seconds=5)}
"""No replica is taken for dead, or excluded, within the test, however busy the machine is."""
HURRIED = WAITED_FOR | {"grace_s": 0.0}
"""The settings of the replica that restarts: by these no replica would wait for another."""


@pytest.fixture(autouse=True)
def closed_replicas() -> Iterator[None]:
    with closing_replicas():
        yield


@pytest.fixture(autouse=True)
def joining_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count joining replicas as working: on a busy machine a join takes long, and the others would not wait for it."""
    monkeypatch.setattr("skerry.runtime.protocol.quorum.WORKING", frozenset({"joining", "train", "sync"}))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@contextmanager
def waiting(store: MemoryStore, islands: Sequence[Island], contributed: int) -> Iterator[None]:
    """Others that have trained the round, and wait in the exchange; at the end they have closed it."""
    with ThreadPoolExecutor(len(islands)) as pool:
        running = [pool.submit(island.take, H) for island in islands]
        wait_for(lambda: len(contributions(store)) >= contributed)
        yield
        for job in running:
            job.result(300)


def test_steps_of_the_round_are_contributed_at_once(store: MemoryStore) -> None:
    """The others would wait for as long as another inner step takes, which need not begin; it trains on in the next."""
    Saved(store, "a", **WAITED_FOR).take(4)
    others = [Saved(store, slot, **WAITED_FOR) for slot in ("b", "c")]
    with waiting(store, others, 2):
        back = Saved(store, "a", seed=5, **HURRIED).take(0)
    assert (back.steps, back.progress) == (0, (1, 0))
    assert back.manager.lifecycle.rounds.round_seconds is None, "it is not known when the round began"
    assert [other.manager.current_step() for other in others] == [1, 1]
    assert inner_steps(store) == {(0, "a"): 4, (0, "b"): H, (0, "c"): H}
    assert weights(store) == [{"a": 4 / H, "b": 1.0, "c": 1.0}]


def test_restart_contributes_the_rounds_fragment_and_trains_the_other_on(store: MemoryStore) -> None:
    two = {"fragments": 2, "lr": 0.01}
    died, *others = [Saved(store, slot, **two, **WAITED_FOR) for slot in "abc"]
    together([lambda: died.take(H + 3), *(lambda other=other: other.take(H) for other in others)])
    with waiting(store, others, 5):
        back = Saved(store, "a", seed=5, **two, **HURRIED).take(0)
    assert (back.steps, back.progress) == (0, (2, 0))
    steps = inner_steps(store)
    assert [(steps[0, slot], steps[1, slot]) for slot in "abc"] == [(H, H + 3), (H, 2 * H), (H, 2 * H)]
    assert weights(store)[1]["a"] == (H + 3) / (2 * H)
    counter = back.manager.lifecycle.log_follower.unfinished.counter
    assert counter.since(0).steps == 3, "the other fragment's are not exchanged"


def test_progress_is_dropped_when_the_round_closes_between_two_looks(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the head it was still open."""
    Saved(store, "a", grace_s=0.0).take(4)
    other = Saved(store, "b", grace_s=0.0)
    back = Saved(store, "a", grace_s=0.0, seed=5)
    resume = back.manager.lifecycle.log_follower.resume

    def resume_and_close_the_round() -> object:
        resumed = resume()
        if other.steps == 0:
            other.take(H)
        return resumed

    monkeypatch.setattr(back.manager.lifecycle.log_follower, "resume", resume_and_close_the_round)
    assert (back.take(0).steps, back.progress) == (0, (1, 0))
    assert inner_steps(store) == {(0, "b"): H}
    back.take(H)
    assert inner_steps(store) == {(0, "b"): H, (1, "a"): H}


def test_two_ranks_come_back_together(store: MemoryStore) -> None:
    settings = {"sync_every": H, "keep_unfinished": AT_ONCE}
    died = RankedReplica(store, "a", **settings, **WAITED_FOR)
    together([lambda i=island: i.take(4) for island in died.islands])
    others = [RankedReplica(store, slot, **settings, **WAITED_FOR) for slot in ("b", "c")]
    with waiting(store, [island for other in others for island in other.islands], 2):
        back = RankedReplica(store, "a", **settings, **HURRIED)
        together([lambda i=island: i.take(0) for island in back.islands])
    for island in back.islands:
        assert (island.steps, island.manager.current_step(), island.manager.inner_steps) == (0, 1, 0)
    assert inner_steps(store) == {(0, "a"): 4, (0, "b"): H, (0, "c"): H}
    assert weights(store) == [{"a": 4 / H, "b": 1.0, "c": 1.0}]
    assert [len(contribution.ranks) for contribution in contributions(store)] == [2, 2, 2]
