"""Outages as several threads observe them, on a shared fake clock: what is logged, and since when a store responds."""

from __future__ import annotations

import logging
import threading
from collections import Counter

import pytest
from tests.kit.events import logged_events, logged_levels
from tests.kit.stores import VERBS, HookedStore
from tests.support.clocks import FakeClock

from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Retryable
from skerry.runtime.store.outage_log import REMIND_S
from skerry.runtime.store.retrying import Retrying

SECOND = Backoff(first=1.0, cap=1.0)
WARNED_AND_RECOVERED = [("WARNING", "store_retry"), ("INFO", "store_recovered")]


@pytest.fixture(autouse=True)
def _all_events(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "skerry")


def unreachable(clock: FakeClock, start_s: float, stop_s: float) -> HookedStore:
    """A store that is unreachable for some seconds, counted from now."""
    start, stop = clock.now() + start_s, clock.now() + stop_s

    def hook(verb: str, key: str) -> None:
        if start <= clock.now() < stop:
            raise Retryable(f"connection refused: {verb} {key}")

    return HookedStore(hook)


def test_outage_of_ten_minutes_for_many_calls_is_one_warning_and_one_end(caplog: pytest.LogCaptureFixture) -> None:
    """Patient calls are retried until the end; in each of their pauses, calls of other threads fail for good."""
    clock = FakeClock()
    patient = Retrying(unreachable(clock, 0, 600), clock, deadline_s=3600.0, backoff=SECOND)
    impatient = patient.with_deadline(0.0, threading.Event())
    timed_out: list[str] = []

    def call_from_other_threads() -> None:
        if len(clock.pauses) == 1:
            patient.create("b2", b"")
        for verb, call in VERBS.items():
            try:
                call(impatient)
            except Retryable:
                timed_out.append(verb)

    clock.on_pause = call_from_other_threads
    patient.read("a")
    assert len(timed_out) > 400
    first, *reminders, last = logged_levels(caplog)
    assert [first, last] == WARNED_AND_RECOVERED
    assert set(reminders) == {("INFO", "store_retry")}
    assert len(reminders) <= 600 / REMIND_S
    (end,) = logged_events(caplog, "store_recovered")
    assert 595 < end["waited_s"] < 615
    assert end["retries"] == patient.usage.retries > 400


def test_intermittent_failures_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    began = clock.now()
    calls: Counter[str] = Counter()

    def fail_every_second_time(verb: str, key: str) -> None:
        calls[verb] += 1
        if calls[verb] % 2:
            raise Retryable(f"503: {key}")

    store = Retrying(HookedStore(fail_every_second_time), clock)
    for _ in range(1000):
        store.replace("heartbeats/a.json", b"alive")
    minutes = (clock.now() - began) / REMIND_S
    assert store.usage.retries == 1000
    assert logged_levels(caplog) == WARNED_AND_RECOVERED * (int(minutes) + 1)


def test_end_of_an_outage_is_logged_by_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    """All calls that were retried have timed out before."""
    clock = FakeClock()
    store = Retrying(unreachable(clock, 0, 100), clock, deadline_s=10.0)
    for _ in range(2):
        with pytest.raises(Retryable):
            store.list("")
    assert logged_levels(caplog) == WARNED_AND_RECOVERED[:1]
    assert "verb=list key= error='connection refused: list '" in caplog.text
    clock.advance(100.0)
    store.list("")
    store.list("")
    assert logged_levels(caplog) == WARNED_AND_RECOVERED
    assert "waited_s=120" in caplog.text


def test_store_is_reachable_from_its_first_success() -> None:
    clock = FakeClock()
    store = Retrying(unreachable(clock, 0, 100), clock, backoff=SECOND)
    assert store.reachable_since(0.0) == 0.0
    during: list[bool] = []
    clock.on_pause = lambda: during.append(store.reachable_since(0.0) == clock.now())
    store.replace("heartbeats/a.json", b"alive")
    assert set(during) == {True}
    end = store.reachable_since(0.0)
    assert end == clock.now()
    clock.advance(50.0)
    assert store.reachable_since(0.0) == end


class SlowlyFailingStore:
    """A store whose next read fails after some seconds; its retry succeeds."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._durations: list[float] = []
        self.store = Retrying(HookedStore(self._hook), self.clock, backoff=Backoff(first=0.1, cap=0.1))

    def _hook(self, verb: str, key: str) -> None:
        if verb == "read" and self._durations:
            self.clock.advance(self._durations.pop())
            raise Retryable(f"503: {key}")

    def fail(self, seconds: float) -> float:
        """Returns the time of the success."""
        self._durations.append(seconds)
        self.store.read("a")
        return self.clock.now()


def test_gap_lasts_from_the_sending_of_the_failing_request_to_the_success() -> None:
    slow = SlowlyFailingStore()
    for _ in range(100):
        slow.clock.advance(3.0)
        end = slow.fail(0.0)
        assert slow.store.reachable_since(0.2) == 0.0
        assert slow.store.reachable_since(0.01) == end
    slow.clock.advance(3.0)
    end = slow.fail(15.0)
    assert slow.store.reachable_since(15.0) == end
    assert slow.store.reachable_since(15.2) == 0.0


def test_reachable_since_uses_the_last_gap_that_is_long_enough() -> None:
    slow, ends = SlowlyFailingStore(), list[float]()
    for length in (3.0, 9.0, 6.0, 1.0, 6.0, 2.0):
        slow.clock.advance(20.0)
        ends.append(slow.fail(length))
    expected = {0.5: ends[5], 1.5: ends[5], 2.5: ends[4], 5.0: ends[4], 7.0: ends[1], 10.0: 0.0}
    assert {longer_than_s: slow.store.reachable_since(longer_than_s) for longer_than_s in expected} == expected


@pytest.mark.parametrize("verb", VERBS)
def test_success_of_any_verb_ends_a_gap(verb: str) -> None:
    """One key is throttled for a minute, while other calls succeed now and then."""
    clock = FakeClock()
    end = clock.now() + 60

    def throttle(_: str, key: str) -> None:
        if key == "throttled" and clock.now() < end:
            raise Retryable("503")

    store = Retrying(HookedStore(throttle), clock, backoff=SECOND)
    clock.on_pause = lambda: VERBS[verb](store)
    store.read("throttled")
    assert clock.now() >= end
    assert store.reachable_since(2.0) == 0.0


@pytest.mark.parametrize("verb", VERBS)
def test_hanging_call_is_no_gap_while_another_succeeds(verb: str) -> None:
    clock, hung = FakeClock(), list[str]()

    def hang(_: str, key: str) -> None:
        if key == "upload" and not hung:
            hung.append(key)
            clock.advance(10.0)
            VERBS[verb](store)  # from another thread
            clock.advance(5.0)
            raise Retryable("no byte for 15 s")

    store = Retrying(HookedStore(hang), clock)
    store.read("upload")
    assert store.usage.retries == 1
    assert store.reachable_since(1.0) == 0.0
