"""Waiting: bounded, growing and jittered."""

from __future__ import annotations

import threading

import pytest
from tests.support.clocks import FakeClock

from skerry.runtime.clock import Backoff, SystemClock, wait_until


def test_pauses_grow_to_the_cap_with_a_jitter_of_at_most_half() -> None:
    clock, backoff = FakeClock(), Backoff(first=1.0, cap=8.0)
    for attempt, full in enumerate([1.0, 2.0, 4.0, 8.0, 8.0]):
        assert full / 2 <= backoff.delay(attempt, clock) <= full
    assert backoff.delay(10_000, clock) <= 8.0


def test_wait_until_returns_the_first_value() -> None:
    clock = FakeClock()
    values = iter([None, None, "yes"])
    assert wait_until(clock, lambda: next(values), clock.now() + 60, Backoff(first=1.0)) == "yes"
    assert len(clock.pauses) == 2


def test_wait_until_times_out_at_its_deadline() -> None:
    clock = FakeClock()
    deadline = clock.now() + 5
    with pytest.raises(TimeoutError):
        wait_until(clock, lambda: None, deadline, Backoff(first=1.0, cap=100.0))
    assert clock.now() == pytest.approx(deadline)


def test_event_ends_a_pause_early() -> None:
    clock, event = SystemClock(), threading.Event()
    event.set()
    before = clock.now()
    clock.pause(60.0, event)
    assert clock.now() - before < 30.0


def test_nonces_are_unique() -> None:
    clock = SystemClock()
    assert len({clock.nonce() for _ in range(100)}) == 100
    assert 0.0 <= clock.fraction() < 1.0
