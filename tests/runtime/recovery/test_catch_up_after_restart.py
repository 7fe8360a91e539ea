"""Who comes back within a round that the others have ended looks first, and trains no step that they would wait for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.runtime.test_ranks import Ranked, nothing_goes_on
from tests.runtime.test_unfinished import AT_ONCE, H, Halves, Lone, inner_steps, settle
from tests.support.managers import Island, contributions, decisions, together

from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["nothing_goes_on"]  # a fixture

WAITED_FOR = {"minimum": 2, "grace_s": 60.0, "heartbeat_interval": timedelta(seconds=5)}
"""Nobody is taken for dead, or given up, within the test, however busy the machine is."""
HURRIED = WAITED_FOR | {"grace_s": 0.0}
"""Who comes back: by its own settings nobody would wait for it."""


@pytest.fixture(autouse=True)
def joining_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who look just then do not wait for who joins. On a busy machine that takes long, and they would look."""
    monkeypatch.setattr("skerry.runtime.rounds._AT_WORK", frozenset({"joining", "train", "sync"}))


@contextmanager
def waiting(store: MemoryStore, works: Sequence[Callable[[], object]], contributed: int) -> Iterator[None]:
    """Others that have contributed, and wait in the exchange; at the end they have closed the round."""
    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(work) for work in works]
        deadline = time.monotonic() + 20
        while len(contributions(store)) < contributed:
            assert time.monotonic() < deadline, "the others have not contributed"
        yield
        for one in running:
            one.result(timeout=20)


def weights(store: MemoryStore, number: int) -> dict[str, float]:
    return {one.slot: one.weight for one in decisions(store)[number].members}


def end(*islands: Island) -> None:
    for one in islands:
        one.manager.request_stop()
        one.manager.shutdown()


def test_what_there_is_of_the_round_is_contributed_at_once() -> None:
    """The others would wait for as long as another inner step takes, which need not begin; it trains on in the next."""
    store = MemoryStore()
    died = Lone(store, "a", **WAITED_FOR).take(4)
    others = [Lone(store, slot, **WAITED_FOR) for slot in ("b", "c")]
    with waiting(store, [lambda one=one: one.come_back(H) for one in others], 2):
        back = Lone(store, "a", seed=5, **HURRIED).come_back()
    assert (back.steps, back.manager.current_step(), back.manager.inner_steps) == (0, 1, 0)
    assert back.manager._conduct.round_seconds is None, "nobody knows when the round began"
    assert [one.manager.current_step() for one in others] == [1, 1]
    assert inner_steps(store) == {(0, "a"): 4, (0, "b"): H, (0, "c"): H}
    assert weights(store, 0) == {"a": 4 / H, "b": 1.0, "c": 1.0}
    end(died, back, *others)


def test_of_two_fragments_the_rounds_own_is_contributed_and_the_other_trained_on() -> None:
    store = MemoryStore()
    died = Halves(store, "a", seed=1, **WAITED_FOR)
    others = [Halves(store, slot, **WAITED_FOR) for slot in ("b", "c")]
    together([lambda: died.take(H + 3), *(lambda one=one: one.take(H) for one in others)])
    with waiting(store, [lambda one=one: one.come_back(H) for one in others], 5):
        back = Halves(store, "a", seed=5, **HURRIED).come_back()
    assert (back.steps, back.manager.current_step(), back.manager.inner_steps) == (0, 2, 0)
    steps = inner_steps(store)
    assert {slot: (steps[0, slot], steps[1, slot]) for slot in "abc"} == {
        "a": (H, H + 3),
        "b": (H, 2 * H),
        "c": (H, 2 * H),
    }
    assert weights(store, 1)["a"] == (H + 3) / (2 * H)
    assert back.manager._course.unfinished.tally.since(0).steps == 3, "the other fragment's are not exchanged"
    end(died, back, *others)


def test_a_round_that_is_closed_between_two_looks_keeps_what_there_is_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the head it was still open."""
    store = MemoryStore()
    died = Lone(store, "a", grace_s=0.0).take(4)
    other = Lone(store, "b", grace_s=0.0)
    back = Lone(store, "a", grace_s=0.0, seed=5)
    take_up = back.manager._course.take_up

    def and_then_it_is_closed(*arguments: object) -> object:
        taken = take_up(*arguments)  # type: ignore[arg-type]
        if other.steps == 0:
            other.come_back(H)
        return taken

    monkeypatch.setattr(back.manager._course, "take_up", and_then_it_is_closed)
    back.come_back()
    assert (back.steps, back.manager.current_step(), back.manager.inner_steps) == (0, 1, 0)
    assert inner_steps(store) == {(0, "b"): H}
    back.come_back(H)
    assert inner_steps(store) == {(0, "b"): H, (1, "a"): H + 4}
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

    died = Ranked(store, "a", **settings, **WAITED_FOR)
    together([lambda i=island: take(i, 4) for island in died.islands])
    others = [Ranked(store, slot, **settings, **WAITED_FOR) for slot in ("b", "c")]
    with waiting(store, [lambda i=island: take(i, H) for one in others for island in one.islands], 2):
        back = Ranked(store, "a", **settings, **HURRIED)
        together([lambda i=island: take(i, 0) for island in back.islands])
    for island in back.islands:
        assert (island.steps, island.manager.current_step(), island.manager.inner_steps) == (0, 1, 0)
    assert inner_steps(store) == {(0, "a"): 4, (0, "b"): H, (0, "c"): H}
    assert weights(store, 0) == {"a": 4 / H, "b": 1.0, "c": 1.0}
    assert [len(one.ranks) for one in contributions(store)] == [2, 2, 2]
