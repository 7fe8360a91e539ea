"""Claims of slots, heartbeats, and what the monitor reads of the other slots."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.kit.events import logged_events
from tests.kit.protocol import policy, run_record, start_replica
from tests.support.clocks import FakeClock

from skerry.runtime.checkpointing.garbage_collector import live_rounds
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Diverged, Fenced, Retryable
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog
from skerry.runtime.log.records import MAX_RECORD_BYTES, Heartbeat
from skerry.runtime.protocol.membership import HeartbeatMonitor, Presence
from skerry.runtime.protocol.quorum import Observation, is_live
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store import Data, Entry, Span
    from skerry.runtime.store.interface import Profile


class SlowStore(MemoryStore):
    """Every overwrite takes `write_s` of the clock, every listing `list_s`; `error` is raised by overwrites."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock
        self.write_s = self.list_s = 0.0
        self.error: Exception | None = None

    def replace(self, key: str, data: Data) -> None:
        self.clock.advance(self.write_s)
        if self.error is not None:
            raise self.error
        super().replace(key, data)

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        self.clock.advance(self.list_s)
        return list(super().list(prefix, after))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def log(clock: FakeClock) -> RunLog:
    return RunLog(MemoryStore(), run_record(clock))


@pytest.fixture
def monitor(log: RunLog, clock: FakeClock) -> HeartbeatMonitor:
    return HeartbeatMonitor(log, clock, "a")


def read(log: RunLog, slot: str) -> Heartbeat:
    return Heartbeat.parse(log.store.read(keys.heartbeat(slot)) or b"", slot)


def test_incarnations_are_numbered_without_gaps(log: RunLog, clock: FakeClock) -> None:
    assert [Presence(log, clock, "a", 1.0).incarnation for _ in range(3)] == [0, 1, 2]


def test_racing_starts_of_a_slot_get_different_incarnations(log: RunLog) -> None:
    incarnations: list[int] = []
    barrier = threading.Barrier(8)

    def claim() -> None:
        barrier.wait()
        incarnations.append(Presence(log, SystemClock(), "a", 1.0).incarnation)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(incarnations) == list(range(8))


def test_claim_ignores_foreign_objects(log: RunLog, clock: FakeClock) -> None:
    assert Presence(log, clock, "a", 1.0).incarnation == 0
    for name in ("000000.json.bak", "000007.json.old", "zz", ".hidden", "sub/000009.json"):
        log.store.create(f"members/a/{name}", b"left here")
    assert Presence(log, clock, "a", 1.0).incarnation == 1


def test_only_the_highest_incarnation_is_not_fenced(log: RunLog, clock: FakeClock) -> None:
    old, new = Presence(log, clock, "a", 1.0), Presence(log, clock, "a", 1.0)
    with pytest.raises(Fenced):
        old.raise_if_fenced()
    new.raise_if_fenced()


def test_phase_is_published_at_once_and_numbers_with_the_next_beat(log: RunLog, clock: FakeClock) -> None:
    presence = Presence(log, clock, "a", 1.0)
    presence.enter("train", round_number=4)
    assert (read(log, "a").phase, read(log, "a").round) == ("train", 4)
    presence.report(inner_step=7, loss=float("nan"), tokens=5, tokens_per_s=2.0)
    assert read(log, "a").inner_step == 0
    presence.beat()
    assert (read(log, "a").inner_step, read(log, "a").loss) == (7, None)


def test_unchanged_phase_costs_no_request(log: RunLog, clock: FakeClock) -> None:
    presence = Presence(log, clock, "a", 1.0)
    presence.enter("train", round_number=4)
    before = read(log, "a").sequence
    presence.enter("train", round_number=4)
    assert read(log, "a").sequence == before


def test_change_is_timed_on_the_readers_clock(log: RunLog, clock: FakeClock, monitor: HeartbeatMonitor) -> None:
    other = Presence(log, clock, "b", 1.0)
    other.beat()
    first = monitor.refresh()["b"].changed_at
    clock.advance(50)
    assert monitor.refresh()["b"].changed_at == first
    other.beat()
    assert monitor.refresh()["b"].changed_at == first + 50


def test_change_is_timed_when_it_was_read(clock: FakeClock) -> None:
    store = SlowStore(clock)
    log = RunLog(store, run_record(clock))
    Presence(log, clock, "b", 1.0).beat()
    store.list_s = 60.0
    assert HeartbeatMonitor(log, clock, "a").refresh()["b"].changed_at == clock.now()


def test_replaced_incarnation_writes_no_last_heartbeat(
    log: RunLog, clock: FakeClock, monitor: HeartbeatMonitor
) -> None:
    old, new = Presence(log, clock, "b", 1.0), Presence(log, clock, "b", 1.0)
    new.enter("train", round_number=5)
    assert monitor.refresh()["b"].heartbeat.round == 5
    old.stop("finished")
    assert read(log, "b").phase == "train"
    old.beat()  # a write that was already under way
    assert monitor.refresh()["b"].heartbeat.incarnation == new.incarnation


def test_heartbeat_is_fresh_once_it_was_seen_to_change(
    log: RunLog, clock: FakeClock, monitor: HeartbeatMonitor
) -> None:
    other = Presence(log, clock, "b", 1.0)
    other.beat()
    assert not monitor.refresh()["b"].fresh
    other.beat()
    assert monitor.refresh()["b"].fresh


def test_own_and_damaged_heartbeats_are_skipped(log: RunLog, clock: FakeClock, monitor: HeartbeatMonitor) -> None:
    for slot in "ab":
        Presence(log, clock, slot, 1.0).beat()
    log.store.replace(keys.heartbeat("c"), b"{half")
    assert list(monitor.refresh()) == ["b"]


def test_heartbeat_of_another_run_is_divergence(log: RunLog, clock: FakeClock, monitor: HeartbeatMonitor) -> None:
    Presence(RunLog(log.store, run_record(clock)), clock, "b", 1.0).beat()
    with pytest.raises(Diverged, match="two runs"):
        monitor.refresh()


def test_failing_heartbeats_do_not_end_the_thread() -> None:
    class FailingStore(MemoryStore):
        writes = 0

        def replace(self, key: str, data: Data) -> None:
            self.writes += 1
            if 2 <= self.writes <= 4:
                raise Retryable("503")
            super().replace(key, data)

    store, system = FailingStore(), SystemClock()
    presence = Presence(RunLog(store, run_record(system)), system, "a", 0.005)
    presence.start()
    wait_until(system, lambda: store.writes > 4 or None, system.now() + 10, Backoff(first=0.001, cap=0.01))
    presence.stop("left")
    assert store.writes > 4


def test_last_heartbeat_is_written_after_the_thread_ended(log: RunLog) -> None:
    presence = Presence(log, SystemClock(), "a", 0.001)
    presence.start()
    presence.stop("finished")
    last = read(log, "a")
    assert last.phase == "finished"
    presence.stop("failed")
    assert read(log, "a") == last


def test_heartbeats_respect_the_stores_rewrite_interval(clock: FakeClock) -> None:
    written: list[float] = []
    done = threading.Event()

    class OneWriteASecond(MemoryStore):
        @property
        def profile(self) -> Profile:
            return replace(super().profile, rewrite=1.0)

        def replace(self, key: str, data: Data) -> None:
            written.append(clock.now())
            super().replace(key, data)
            # A change right after a heartbeat requests another at once.
            if 1 < len(written) < 10:
                presence.enter("train", round_number=len(written))
            elif len(written) == 10:
                done.set()

    presence = Presence(RunLog(OneWriteASecond(), run_record(clock)), clock, "a", 5.0)
    presence.start()
    assert done.wait(30)
    presence.stop("finished")
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(written))


@pytest.mark.parametrize(("write_s", "counts"), [(0.1, False), (6.0, False), (15.9, False), (16.1, True)])
def test_write_slower_than_half_the_stale_time_counts_as_outage(
    clock: FakeClock, write_s: float, *, counts: bool
) -> None:
    store = SlowStore(clock)
    presence = Presence(RunLog(store, run_record(clock)), clock, "a", 5.0)
    store.write_s = write_s
    presence.beat()
    assert presence.steady_since == (clock.now() if counts else 0.0)


@pytest.mark.parametrize(("refused", "counts"), [(1, False), (3, False), (5, True)])
def test_refused_heartbeats_count_as_outage_by_their_duration(clock: FakeClock, refused: int, *, counts: bool) -> None:
    store = SlowStore(clock)
    presence = Presence(RunLog(store, run_record(clock)), clock, "a", 1.0)
    presence.beat()
    store.error = Retryable("503")
    for _ in range(refused):
        clock.advance(1.0)
        with pytest.raises(Retryable):
            presence.beat()
    store.error = None
    clock.advance(1.0)
    presence.beat()
    assert presence.steady_since == (clock.now() if counts else 0.0)


def test_foreign_objects_among_the_heartbeats_are_ignored(
    log: RunLog, clock: FakeClock, monitor: HeartbeatMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    Presence(log, clock, "b", 1.0).beat()
    copy = bytes(log.store.read(keys.heartbeat("b")) or b"")
    for name in ("_old.json", "b.json.bak", ".b.json", "old/b.json", "notes.txt"):
        log.store.create(f"{keys.HEARTBEATS}{name}", copy)
    assert list(monitor.refresh()) == ["b"]
    assert logged_events(caplog, "heartbeat_failed") == []


def test_copied_heartbeat_is_no_replica_and_logged_once(
    log: RunLog, clock: FakeClock, monitor: HeartbeatMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    Presence(log, clock, "b", 1.0).beat()
    log.store.create(keys.heartbeat("b-copy"), bytes(log.store.read(keys.heartbeat("b")) or b""))
    for _ in range(3):
        assert list(monitor.refresh()) == ["b"]
    (event,) = logged_events(caplog, "heartbeat_failed")
    assert event["key"] == "heartbeats/b-copy.json"
    assert "slot=b" in str(event["error"])


def test_damaged_heartbeat_is_logged_once_per_change(
    log: RunLog, clock: FakeClock, monitor: HeartbeatMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    other = Presence(log, clock, "b", 1.0)
    for damage in (b"{half", b"{half", b"{more"):
        log.store.replace(keys.heartbeat("b"), damage)
        for _ in range(4):
            monitor.refresh()
    assert len(logged_events(caplog, "heartbeat_failed")) == 2
    other.beat()
    monitor.refresh()
    log.store.replace(keys.heartbeat("b"), b"{more")
    monitor.refresh()
    assert len(logged_events(caplog, "heartbeat_failed")) == 3


def test_damaged_heartbeat_counts_as_unchanged(log: RunLog, clock: FakeClock, monitor: HeartbeatMonitor) -> None:
    """Otherwise a live replica that is behind would lose the payloads that it needs."""
    Presence(log, clock, "b", 1.0).beat()
    before = monitor.refresh()["b"]
    clock.advance(3.0)
    log.store.replace(keys.heartbeat("b"), b"{half")
    assert monitor.refresh()["b"] == before


def test_oversized_heartbeat_is_not_read_completely(clock: FakeClock) -> None:
    sizes: list[int] = []

    class SizeRecordingStore(MemoryStore):
        def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
            data = super().read(key, span, into)
            sizes.append(0 if data is None else data.nbytes)
            return data

    log = RunLog(SizeRecordingStore(), run_record(clock))
    log.store.create(keys.heartbeat("b"), b"x" * (MAX_RECORD_BYTES + 1_000_000))
    assert HeartbeatMonitor(log, clock, "a").refresh() == {}
    assert max(sizes) == MAX_RECORD_BYTES + 1


@pytest.mark.parametrize("failure_every_s", [None, 3.0, 10.0])
def test_dead_replica_is_noticed_in_time_despite_store_failures(
    clock: FakeClock, failure_every_s: float | None
) -> None:
    class FlakyStore(MemoryStore):
        fails_once = False

        def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
            if self.fails_once:
                self.fails_once = False
                raise Retryable("503 SlowDown")
            return super().list(prefix, after)

    store, terms = FlakyStore(), policy(stale_s=32.0)
    a = start_replica(Retrying(store, clock), clock, "a", terms)
    b = start_replica(Retrying(store, clock), clock, "b")
    b.presence.enter("train", round_number=3)
    a.watch.refresh()
    died = last_failure = clock.now()
    while clock.now() - died < 31.0:
        clock.advance(1.0)
        if failure_every_s is not None and clock.now() - last_failure >= failure_every_s:
            store.fails_once, last_failure = True, clock.now()
        a.presence.beat()
        a.watch.refresh()
        assert "b" in live_rounds(a.watch.heartbeats, a.presence.steady_since, clock.now(), terms.stale_s)
    clock.advance(2.0)
    heartbeats, steady_since = a.watch.refresh(), a.presence.steady_since
    assert live_rounds(heartbeats, steady_since, clock.now(), terms.stale_s) == {}
    observation = Observation(contributions={}, refused=frozenset(), heartbeats=heartbeats, steady_since=steady_since)
    assert not is_live(terms, heartbeats["b"], observation, clock.now())
