"""An outage as many threads see it, on a clock that they share: what is told, and since when the store is steady."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock

from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Retryable, Unauthorized
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.outage import REMIND_S
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.store import Data, Entry, Span


class Away(MemoryStore):
    """A memory store that is unreachable between two times of a clock."""

    def __init__(self, clock: FakeClock, start: float, stop: float) -> None:
        super().__init__()
        self._time = clock
        self._span = (start, stop)

    def create(self, key: str, data: Data) -> bool:
        self._answer()
        return super().create(key, data)

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        self._answer()
        return super().read(key, span, into)

    def replace(self, key: str, data: Data) -> None:
        self._answer()
        super().replace(key, data)

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        self._answer()
        return super().list(prefix, after)

    def _answer(self) -> None:
        if self._span[0] <= self._time.now() < self._span[1]:
            raise Retryable("connection refused")


class Shared(FakeClock):
    """Each thread that waits comes to its moment before anybody goes on: virtual time for real threads."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._turn = threading.Condition()
        self._left = threads
        self._waiting: list[float] = []

    def pause(self, seconds: float, wake: threading.Event | None = None) -> None:
        del wake
        with self._turn:
            moment = self.time + seconds
            self._waiting.append(moment)
            self._go_on()
            self._turn.wait_for(lambda: self.time >= moment)
            self._waiting.remove(moment)

    def done(self) -> None:
        """This thread waits no more."""
        with self._turn:
            self._left -= 1
            self._go_on()

    def _go_on(self) -> None:
        if self._left and sum(moment > self.time for moment in self._waiting) == self._left:
            self.time = min(moment for moment in self._waiting if moment > self.time)
            self._turn.notify_all()


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.message.split()[0]) for record in caplog.records]


def run(works: Sequence[Callable[[], object]], clock: Shared) -> None:
    def one(work: Callable[[], object]) -> None:
        try:
            work()
        finally:
            clock.done()

    threads = [threading.Thread(target=one, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_ten_minutes_that_six_threads_notice_are_one_warning_and_one_end(caplog: pytest.LogCaptureFixture) -> None:
    """Heartbeats that give up again and again, receipts, an exchange that insists: all wrappers of one engine."""
    clock = Shared(6)
    store = Retrying(Away(clock, clock.time + 60, clock.time + 660), clock, deadline_s=30.0)
    patient = store.insisting(3600.0, threading.Event())
    until = clock.time + 900
    calls: Counter[str] = Counter()

    def again_and_again(name: str, call: Callable[[], object]) -> Callable[[], None]:
        def work() -> None:
            while clock.now() < until:
                calls[name] += 1
                try:
                    call()
                except Retryable:
                    calls["given up"] += 1
                clock.pause(5.0)

        return work

    with caplog.at_level(logging.INFO, "skerry"):
        run(
            [
                again_and_again("heartbeat", lambda: store.replace("heartbeats/a.json", b"alive")),
                again_and_again("look", lambda: store.list("heartbeats/")),
                again_and_again("poll", lambda: store.read("exchanges/0.json")),
                again_and_again("receipt", lambda: store.create(f"receipts/{calls['receipt']}", b"")),
                again_and_again("exchange", lambda: patient.read("commits/0.json")),
                again_and_again("upload", lambda: patient.create(f"payloads/{calls['upload']}", b"")),
            ],
            clock,
        )
    assert calls["given up"] > 40
    assert store.usage.retries > 400
    lines = told(caplog)
    assert lines[0] == ("WARNING", "store_retry")
    assert lines[-1] == ("INFO", "store_recovered")
    assert set(lines[1:-1]) == {("INFO", "store_retry")}
    assert len(lines) - 2 <= 600 / REMIND_S
    (end,) = [record for record in caplog.records if record.message.startswith("store_recovered")]
    assert 595 < end.fields["waited_s"] < 615  # type: ignore[attr-defined]
    assert end.fields["retries"] > 400  # type: ignore[attr-defined]


def test_a_store_that_fails_now_and_then_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    began = clock.now()

    class Limping(MemoryStore):
        limps = False

        def replace(self, key: str, data: Data) -> None:
            self.limps = not self.limps
            if self.limps:
                raise Retryable("503")
            super().replace(key, data)

    store = Retrying(Limping(), clock)
    with caplog.at_level(logging.INFO, "skerry"):
        for _ in range(1000):
            store.replace("heartbeats/a.json", b"alive")
    minutes = (clock.now() - began) / REMIND_S
    assert store.usage.retries == 1000
    assert told(caplog) == [("WARNING", "store_retry"), ("INFO", "store_recovered")] * (int(minutes) + 1)


def test_the_end_of_an_outage_that_everybody_gave_up_is_told_by_the_next_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    store = Retrying(Away(clock, clock.time, clock.time + 100), clock, deadline_s=10.0)
    with caplog.at_level(logging.INFO, "skerry"):
        for _ in range(2):
            with pytest.raises(Retryable):
                store.list("")
        clock.advance(100.0)
        store.list("")
        store.list("")
    assert told(caplog) == [("WARNING", "store_retry"), ("INFO", "store_recovered")]
    assert "waited_s=120" in caplog.text


def test_a_refusal_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    class Closed(MemoryStore):
        def list(self, prefix: str, after: str | None = None) -> list[Entry]:
            raise Unauthorized(f"403 {prefix} {after}")

    with caplog.at_level(logging.INFO, "skerry"), pytest.raises(Unauthorized):
        Retrying(Closed(), FakeClock()).list("")
    assert told(caplog) == []


def test_nothing_is_steady_before_the_first_call_goes_through() -> None:
    clock = FakeClock()
    store = Retrying(Away(clock, clock.time, clock.time + 100), clock, backoff=Backoff(first=1.0, cap=1.0))
    assert store.steady_since(0.0) == 0.0
    seen: list[bool] = []
    clock.on_pause = lambda: seen.append(store.steady_since(0.0) == clock.now())
    store.replace("heartbeats/a.json", b"alive")
    assert set(seen) == {True}
    back = store.steady_since(0.0)
    assert back == clock.now()
    clock.advance(50.0)
    assert store.steady_since(0.0) == back


def test_a_call_that_fails_for_long_leaves_the_rest_steady() -> None:
    """A throttled prefix says nothing about heartbeats: who is silent then is silent."""
    clock = FakeClock()
    steady: list[float] = []

    class Throttled(MemoryStore):
        def create(self, key: str, data: Data) -> bool:
            if not steady or clock.now() < steady[0] + 60:
                raise Retryable("503")
            return super().create(key, data)

    store = Retrying(Throttled(), clock)

    def beat() -> None:
        store.replace("heartbeats/a.json", b"alive")
        steady.append(store.steady_since(0.0))

    clock.on_pause = beat
    assert store.create("checkpoints/0/part", b"")
    assert len(steady) > 5
    assert set(steady) == {steady[0]}


class Sick(MemoryStore):
    """Each of these calls fails, or takes so long; the others go through at once."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._time = clock
        self.fails: list[float] = []

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        if self.fails:
            self._time.advance(self.fails.pop(0))
            raise Retryable("503")
        return super().read(key, span, into)


def test_a_call_that_goes_through_when_it_is_repeated_ends_a_silence_of_its_own_length() -> None:
    clock = FakeClock()
    engine = Sick(clock)
    store = Retrying(engine, clock, backoff=Backoff(first=0.1, cap=0.1))
    for _ in range(100):
        clock.advance(3.0)
        engine.fails = [0.0]
        store.read("a")
        assert store.steady_since(0.2) == 0.0
        assert store.steady_since(0.01) == clock.now()


def test_a_silence_begins_with_the_call_that_failed_not_with_its_failure() -> None:
    """A connection hangs for a quarter of a minute before it is given up."""
    clock = FakeClock()
    engine = Sick(clock)
    store = Retrying(engine, clock, backoff=Backoff(first=0.1, cap=0.1))
    engine.fails = [15.0]
    store.read("a")
    assert store.steady_since(15.0) == clock.now()
    assert store.steady_since(15.2) == 0.0


def test_the_last_silence_that_is_long_enough_counts() -> None:
    clock = FakeClock()
    engine = Sick(clock)
    store = Retrying(engine, clock, backoff=Backoff(first=0.1, cap=0.1))
    ends: list[float] = []
    for length in (3.0, 9.0, 6.0, 1.0, 6.0, 2.0):
        clock.advance(20.0)
        engine.fails = [length]
        store.read("a")
        ends.append(clock.now())
    assert [store.steady_since(s) for s in (0.5, 1.5, 2.5, 5.0, 7.0, 10.0)] == [
        ends[5],
        ends[5],
        ends[4],
        ends[4],
        ends[1],
        0.0,
    ]


def test_whatever_goes_through_meanwhile_ends_a_silence() -> None:
    """One call fails for a minute, while each other verb goes through now and then."""
    for verb in ("read", "list", "create", "replace", "delete"):
        clock = FakeClock()
        began = clock.now()

        class Throttled(MemoryStore):
            def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
                if key == "throttled" and clock.now() < began + 60:  # noqa: B023  called within the loop
                    raise Retryable("503")
                return super().read(key, span, into)

        store = Retrying(Throttled(), clock, backoff=Backoff(first=1.0, cap=1.0))
        calls: dict[str, Callable[[], object]] = {
            "read": lambda: store.read("a"),  # noqa: B023
            "list": lambda: store.list("a"),  # noqa: B023
            "create": lambda: store.create("a", b""),  # noqa: B023
            "replace": lambda: store.replace("a", b""),  # noqa: B023
            "delete": lambda: store.delete("a"),  # noqa: B023
        }
        clock.on_pause = calls[verb]
        store.read("throttled")
        assert clock.now() > began + 60
        assert store.steady_since(2.0) == 0.0, verb


@pytest.mark.parametrize("verb", ["read", "list", "create", "replace", "delete"])
def test_a_call_that_hangs_while_another_goes_through_is_no_silence(verb: str) -> None:
    clock = FakeClock()
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: store.read("a"),
        "list": lambda: store.list("a"),
        "create": lambda: store.create("a", b""),
        "replace": lambda: store.replace("a", b""),
        "delete": lambda: store.delete("a"),
    }

    class Hangs(MemoryStore):
        hung = False

        def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
            if key == "upload" and not self.hung:
                self.hung = True
                clock.advance(10.0)
                calls[verb]()  # from another thread
                clock.advance(5.0)
                raise Retryable("no byte for 15 s")
            return super().read(key, span, into)

    store = Retrying(Hangs(), clock)
    store.read("upload")
    assert store.usage.retries == 1
    assert store.steady_since(1.0) == 0.0
