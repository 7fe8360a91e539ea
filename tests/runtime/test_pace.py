"""A slow replica ends its round early when it would miss the grace window, and only then."""

from __future__ import annotations

import pytest
from tests.support.clocks import FakeClock
from tests.support.logs import Replica, policy, start

from skerry.runtime.pace import Pace
from skerry.runtime.store.memory import MemoryStore


def seats(*, minimum: int = 2) -> tuple[FakeClock, list[Replica], Pace]:
    clock, store = FakeClock(), MemoryStore()
    replicas = [start(store, clock, f"r-{i}") for i in range(3)]
    # A grace window of 5 s: half of a round of 10 s.
    terms = policy(min_replicas=minimum)
    return clock, replicas, Pace(journal=replicas[2].journal, clock=clock, policy=terms, slot="r-2")


@pytest.mark.parametrize(("steps", "share"), [(1, 1.0), (0, None)])
def test_who_would_miss_the_window_stops_with_what_it_has(steps: int, share: float | None) -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    clock.advance(10.0)
    first.offer(b"a")
    second.offer(b"b")
    # The others took one inner step each (tests.support.logs): with one of my own I am done.
    assert pace.share(0, steps, since, 10.0) == (None if share == 1.0 else share)


@pytest.mark.parametrize(("taken_s", "share"), [(2.4, None), (2.6, 0.5)])
def test_the_time_that_is_left_is_told_from_the_time_that_was_taken(taken_s: float, share: float | None) -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    for replica in (first, second):
        replica.offer(b"x" + replica.presence.slot.encode(), inner_steps=10)
    clock.advance(taken_s)
    assert pace.share(0, 5, since, 10.0) == share, "five more steps take as long; half of the window is 2.5 s"


def test_below_the_quorum_everybody_waits_for_it_anyway() -> None:
    clock, (first, _, _), pace = seats()
    since = clock.now()
    first.offer(b"a", inner_steps=10)
    clock.advance(100.0)
    assert pace.share(0, 1, since, 10.0) is None


def test_what_it_has_brought_already_covers_it() -> None:
    clock, replicas, pace = seats()
    since = clock.now()
    for replica in replicas:
        replica.offer(replica.presence.slot.encode(), inner_steps=10)
    clock.advance(100.0)
    assert pace.share(0, 1, since, 10.0) is None
