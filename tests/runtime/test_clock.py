"""Waiting: bounded, growing, jittered."""

from __future__ import annotations

import threading

import pytest
from tests.support.clocks import FakeClock

from skerry.runtime.clock import Backoff, SystemClock, wait_until


def test_pauses_grow_to_the_cap_and_are_shortened_by_at_most_half() -> None:
    clock, backoff = FakeClock(), Backoff(first=1.0, cap=8.0)
    full = [1.0, 2.0, 4.0, 8.0, 8.0]
    for attempt, most in enumerate(full):
        assert most / 2 <= backoff.delay(attempt, clock) <= most
    assert backoff.delay(10_000, clock) <= 8.0


def test_waiting_ends_with_the_first_value() -> None:
    clock = FakeClock()
    answers = iter([None, None, "yes"])
    assert wait_until(clock, lambda: next(answers), clock.now() + 60, Backoff(first=1.0)) == "yes"
    assert len(clock.pauses) == 2


def test_waiting_never_passes_its_deadline() -> None:
    clock = FakeClock()
    deadline = clock.now() + 5
    with pytest.raises(TimeoutError):
        wait_until(clock, lambda: None, deadline, Backoff(first=1.0, cap=100.0))
    assert clock.now() == pytest.approx(deadline)


def test_an_event_ends_a_pause_early() -> None:
    clock, event = SystemClock(), threading.Event()
    event.set()
    before = clock.now()
    clock.pause(60.0, event)
    assert clock.now() - before < 30.0


def test_nonces_differ() -> None:
    clock = SystemClock()
    assert len({clock.nonce() for _ in range(100)}) == 100
    assert 0.0 <= clock.fraction() < 1.0
