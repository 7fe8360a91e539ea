"""A replica that restarts within a round looks first, and trains no step that the others would have to wait for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.kit.managers import Island, contributions, decisions, together
from tests.runtime.ranks.replicas import RankedReplica, closing_replicas
from tests.runtime.training.test_resumable_round_store import AT_ONCE, H, Halves, Lone, inner_steps, settle

from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
    monkeypatch.setattr("skerry.runtime.protocol.quorum._WORKING", frozenset({"joining", "train", "sync"}))


@contextmanager
def waiting(store: MemoryStore, works: Sequence[Callable[[], object]], contributed: int) -> Iterator[None]:
    """Others that have contributed, and wait in the exchange; at the end they have closed the round."""
    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(work) for work in works]
        deadline = time.monotonic() + 20
        while len(contributions(store)) < contributed:
            assert time.monotonic() < deadline, "the others have not contributed"
        yield
        for job in running:
            job.result(timeout=20)


def weights(store: MemoryStore, number: int) -> dict[str, float]:
    return {member.slot: member.weight for member in decisions(store)[number].members}


def end(*islands: Island) -> None:
    for island in islands:
        island.manager.request_stop()
        island.manager.shutdown()


def test_what_there_is_of_the_round_is_contributed_at_once() -> None:
    """The others would wait for as long as another inner step takes, which need not begin; it trains on in the next."""
    store = MemoryStore()
    died = Lone(store, "a", **WAITED_FOR).take(4)
    others = [Lone(store, slot, **WAITED_FOR) for slot in ("b", "c")]
    with waiting(store, [lambda other=other: other.come_back(H) for other in others], 2):
        back = Lone(store, "a", seed=5, **HURRIED).come_back()
    assert (back.steps, back.manager.current_step(), back.manager.inner_steps) == (0, 1, 0)
    assert back.manager.lifecycle.rounds.round_seconds is None, "it is not known when the round began"
    assert [other.manager.current_step() for other in others] == [1, 1]
    assert inner_steps(store) == {(0, "a"): 4, (0, "b"): H, (0, "c"): H}
    assert weights(store, 0) == {"a": 4 / H, "b": 1.0, "c": 1.0}
    end(died, back, *others)


def test_restart_contributes_the_rounds_fragment_and_trains_the_other_on() -> None:
    store = MemoryStore()
    died = Halves(store, "a", seed=1, **WAITED_FOR)
    others = [Halves(store, slot, **WAITED_FOR) for slot in ("b", "c")]
    together([lambda: died.take(H + 3), *(lambda other=other: other.take(H) for other in others)])
    with waiting(store, [lambda other=other: other.come_back(H) for other in others], 5):
        back = Halves(store, "a", seed=5, **HURRIED).come_back()
    assert (back.steps, back.manager.current_step(), back.manager.inner_steps) == (0, 2, 0)
    steps = inner_steps(store)
    assert {slot: (steps[0, slot], steps[1, slot]) for slot in "abc"} == {
        "a": (H, H + 3),
        "b": (H, 2 * H),
        "c": (H, 2 * H),
    }
    assert weights(store, 1)["a"] == (H + 3) / (2 * H)
    assert back.manager.lifecycle.course.unfinished.counter.since(0).steps == 3, (
        "the other fragment's are not exchanged"
    )
    end(died, back, *others)


def test_progress_is_dropped_when_the_round_closes_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the head it was still open."""
    store = MemoryStore()
    died = Lone(store, "a", grace_s=0.0).take(4)
    other = Lone(store, "b", grace_s=0.0)
    back = Lone(store, "a", grace_s=0.0, seed=5)
    take_up = back.manager.lifecycle.course.resume

    def and_then_it_is_closed(*arguments: object) -> object:
        taken = take_up(*arguments)  # type: ignore[arg-type]
        if other.steps == 0:
            other.come_back(H)
        return taken

    monkeypatch.setattr(back.manager.lifecycle.course, "resume", and_then_it_is_closed)
    back.come_back()
    assert (back.steps, back.manager.current_step(), back.manager.inner_steps) == (0, 1, 0)
    assert inner_steps(store) == {(0, "b"): H}
    back.come_back(H)
    assert inner_steps(store) == {(0, "b"): H, (1, "a"): H}
    end(died, back, other)


def test_two_ranks_come_back_together() -> None:
    store = MemoryStore()
    settings = {"sync_every": H, "keep_unfinished": AT_ONCE}

    def take(island: Island, steps: int) -> None:
        with island.diloco:
            for _ in range(steps):
                island.manager.catch_up(island.inner)
                island.step()
                settle(island)
            island.manager.catch_up(island.inner)
        settle(island)

    died = RankedReplica(store, "a", **settings, **WAITED_FOR)
    together([lambda i=island: take(i, 4) for island in died.islands])
    others = [RankedReplica(store, slot, **settings, **WAITED_FOR) for slot in ("b", "c")]
    with waiting(store, [lambda i=island: take(i, H) for other in others for island in other.islands], 2):
        back = RankedReplica(store, "a", **settings, **HURRIED)
        together([lambda i=island: take(i, 0) for island in back.islands])
    for island in back.islands:
        assert (island.steps, island.manager.current_step(), island.manager.inner_steps) == (0, 1, 0)
    assert inner_steps(store) == {(0, "a"): 4, (0, "b"): H, (0, "c"): H}
    assert weights(store, 0) == {"a": 4 / H, "b": 1.0, "c": 1.0}
    assert [len(contribution.ranks) for contribution in contributions(store)] == [2, 2, 2]
