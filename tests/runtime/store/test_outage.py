"""Outages as several threads observe them, on a shared fake clock: what is logged, and since when a store responds."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.kit.stores import VERBS, HookedStore
from tests.runtime.store.test_retrying import events_of
from tests.support.clocks import FakeClock

from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Retryable, Unauthorized
from skerry.runtime.store.outage_log import REMIND_S
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SECOND = Backoff(first=1.0, cap=1.0)
TENTH = Backoff(first=0.1, cap=0.1)


def unreachable(clock: FakeClock, start: float, stop: float) -> HookedStore:
    """A store that is unreachable between two times of a clock."""

    def hook(verb: str, key: str) -> None:
        if start <= clock.now() < stop:
            raise Retryable(f"connection refused: {verb} {key}")

    return HookedStore(hook)


class SharedClock(FakeClock):
    """Virtual time for real threads: it advances when all of them wait."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._turn = threading.Condition()
        self._running = threads
        self._waiting: list[float] = []

    def pause(self, seconds: float, wake: threading.Event | None = None) -> None:
        del wake
        with self._turn:
            moment = self.time + seconds
            self._waiting.append(moment)
            self._advance()
            self._turn.wait_for(lambda: self.time >= moment)
            self._waiting.remove(moment)

    def end_thread(self) -> None:
        with self._turn:
            self._running -= 1
            self._advance()

    def _advance(self) -> None:
        if self._running and sum(moment > self.time for moment in self._waiting) == self._running:
            self.time = min(moment for moment in self._waiting if moment > self.time)
            self._turn.notify_all()

    def run(self, works: Sequence[Callable[[], object]]) -> None:
        """Runs each work in a thread of its own, to the end."""

        def entry(work: Callable[[], object]) -> None:
            try:
                work()
            finally:
                self.end_thread()

        threads = [threading.Thread(target=entry, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def test_outage_of_ten_minutes_in_six_threads_is_one_warning_and_one_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = SharedClock(6)
    store = Retrying(unreachable(clock, clock.time + 60, clock.time + 660), clock, deadline_s=30.0)
    patient = store.with_deadline(3600.0, threading.Event())
    until = clock.time + 900
    calls: Counter[str] = Counter()

    def repeat(name: str, call: Callable[[], object]) -> Callable[[], None]:
        def work() -> None:
            while clock.now() < until:
                calls[name] += 1
                try:
                    call()
                except Retryable:
                    calls["timed out"] += 1
                clock.pause(5.0)

        return work

    with caplog.at_level(logging.INFO, "skerry"):
        clock.run(
            [
                repeat("heartbeat", lambda: store.replace("heartbeats/a.json", b"alive")),
                repeat("look", lambda: store.list("heartbeats/")),
                repeat("poll", lambda: store.read("exchanges/0.json")),
                repeat("receipt", lambda: store.create(f"receipts/{calls['receipt']}", b"")),
                repeat("exchange", lambda: patient.read("commits/0.json")),
                repeat("upload", lambda: patient.create(f"payloads/{calls['upload']}", b"")),
            ]
        )
    assert calls["timed out"] > 40
    assert store.usage.retries > 400
    lines = events_of(caplog)
    assert lines[0] == ("WARNING", "store_retry")
    assert lines[-1] == ("INFO", "store_recovered")
    assert set(lines[1:-1]) == {("INFO", "store_retry")}
    assert len(lines) - 2 <= 600 / REMIND_S
    (end,) = [record for record in caplog.records if record.message.startswith("store_recovered")]
    assert 595 < end.fields["waited_s"] < 615  # type: ignore[attr-defined]
    assert end.fields["retries"] > 400  # type: ignore[attr-defined]


def test_intermittent_failures_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    began = clock.now()
    calls: Counter[str] = Counter()

    def fail_every_second_time(verb: str, key: str) -> None:
        calls[verb] += 1
        if calls[verb] % 2:
            raise Retryable(f"503: {key}")

    store = Retrying(HookedStore(fail_every_second_time), clock)
    with caplog.at_level(logging.INFO, "skerry"):
        for _ in range(1000):
            store.replace("heartbeats/a.json", b"alive")
    minutes = (clock.now() - began) / REMIND_S
    assert store.usage.retries == 1000
    assert events_of(caplog) == [("WARNING", "store_retry"), ("INFO", "store_recovered")] * (int(minutes) + 1)


def test_end_of_an_outage_is_logged_by_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    """All calls that were retried have timed out before."""
    clock = FakeClock()
    store = Retrying(unreachable(clock, clock.time, clock.time + 100), clock, deadline_s=10.0)
    with caplog.at_level(logging.INFO, "skerry"):
        for _ in range(2):
            with pytest.raises(Retryable):
                store.list("")
        clock.advance(100.0)
        store.list("")
        store.list("")
    assert events_of(caplog) == [("WARNING", "store_retry"), ("INFO", "store_recovered")]
    assert "waited_s=120" in caplog.text


def test_refused_call_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(verb: str, key: str) -> None:
        raise Unauthorized(f"403 {verb} {key}")

    with caplog.at_level(logging.INFO, "skerry"), pytest.raises(Unauthorized):
        Retrying(HookedStore(refuse), FakeClock()).list("")
    assert events_of(caplog) == []


def test_store_is_reachable_from_its_first_success() -> None:
    clock = FakeClock()
    store = Retrying(unreachable(clock, clock.time, clock.time + 100), clock, backoff=SECOND)
    assert store.reachable_since(0.0) == 0.0
    during: list[bool] = []
    clock.on_pause = lambda: during.append(store.reachable_since(0.0) == clock.now())
    store.replace("heartbeats/a.json", b"alive")
    assert set(during) == {True}
    end = store.reachable_since(0.0)
    assert end == clock.now()
    clock.advance(50.0)
    assert store.reachable_since(0.0) == end


def slow_failures(clock: FakeClock, durations: list[float]) -> Retrying:
    """A store with failing reads, each after the next duration of the list."""

    def hook(verb: str, key: str) -> None:
        if verb == "read" and durations:
            clock.advance(durations.pop(0))
            raise Retryable(f"503: {key}")

    return Retrying(HookedStore(hook), clock, backoff=TENTH)


def test_gap_of_a_retried_call_lasts_until_its_success() -> None:
    clock, durations = FakeClock(), list[float]()
    store = slow_failures(clock, durations)
    for _ in range(100):
        clock.advance(3.0)
        durations.append(0.0)
        store.read("a")
        assert store.reachable_since(0.2) == 0.0
        assert store.reachable_since(0.01) == clock.now()


def test_gap_begins_when_the_failing_request_was_sent() -> None:
    clock = FakeClock()
    store = slow_failures(clock, [15.0])
    store.read("a")
    assert store.reachable_since(15.0) == clock.now()
    assert store.reachable_since(15.2) == 0.0


def test_reachable_since_uses_the_last_gap_that_is_long_enough() -> None:
    clock, durations, ends = FakeClock(), list[float](), list[float]()
    store = slow_failures(clock, durations)
    for length in (3.0, 9.0, 6.0, 1.0, 6.0, 2.0):
        clock.advance(20.0)
        durations.append(length)
        store.read("a")
        ends.append(clock.now())
    expected = {0.5: ends[5], 1.5: ends[5], 2.5: ends[4], 5.0: ends[4], 7.0: ends[1], 10.0: 0.0}
    assert {longer_than_s: store.reachable_since(longer_than_s) for longer_than_s in expected} == expected


@pytest.mark.parametrize("verb", VERBS)
def test_success_of_any_verb_ends_a_gap(verb: str) -> None:
    """One key is throttled for a minute, while other calls succeed now and then."""
    clock = FakeClock()
    began = clock.now()

    def throttle(_: str, key: str) -> None:
        if key == "throttled" and clock.now() < began + 60:
            raise Retryable("503")

    store = Retrying(HookedStore(throttle), clock, backoff=SECOND)
    clock.on_pause = lambda: VERBS[verb](store)
    store.read("throttled")
    assert clock.now() > began + 60
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
