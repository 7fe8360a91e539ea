"""Claims of slots, heartbeats, and what the monitor reads of the other slots."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import pytest
from tests.kit.events import logged_events
from tests.kit.protocol import policy, run_record, start_replica
from tests.kit.stores import HookedStore
from tests.support.clocks import FakeClock

from skerry.runtime.checkpointing.garbage_collector import live_rounds
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Diverged, Fenced, Retryable
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog
from skerry.runtime.log.records import Heartbeat, Memory
from skerry.runtime.protocol.quorum import is_live
from skerry.runtime.protocol.slot_claim_and_heartbeats import HeartbeatMonitor, Presence, peak_memory
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.runtime.store import Data
    from skerry.runtime.store.interface import Profile

Claim: TypeAlias = Callable[[str], Presence]
"""Claims a slot of the run."""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def log(clock: FakeClock) -> RunLog:
    return RunLog(MemoryStore(), run_record(clock))


@pytest.fixture
def claim(log: RunLog, clock: FakeClock) -> Claim:
    return lambda slot: Presence(log, clock, slot, 1.0)


@pytest.fixture
def monitor(log: RunLog, clock: FakeClock) -> HeartbeatMonitor:
    """The view of slot a."""
    return HeartbeatMonitor(log, clock, "a")


def read(log: RunLog, slot: str) -> Heartbeat:
    return Heartbeat.parse(log.store.read(keys.heartbeat(slot)) or b"", slot)


def test_incarnations_are_numbered_without_gaps(claim: Claim) -> None:
    old, *_, new = presences = [claim("a") for _ in range(3)]
    assert [presence.incarnation for presence in presences] == [0, 1, 2]
    with pytest.raises(Fenced):
        old.raise_if_fenced()
    new.raise_if_fenced()


def test_recent_look_for_a_newer_incarnation_is_enough_if_asked_for(claim: Claim, clock: FakeClock) -> None:
    old = claim("a")
    old.raise_if_fenced()
    claim("a")
    clock.advance(2.0)
    old.raise_if_fenced(known_s=3.0)
    with pytest.raises(Fenced):
        old.raise_if_fenced(known_s=2.0)
    with pytest.raises(Fenced):  # once it is known, it stays so
        old.raise_if_fenced(known_s=3.0)


def test_heartbeat_right_after_a_look_needs_no_other_look() -> None:
    looks: list[str] = []
    published = threading.Event()

    def hook(verb: str, key: str) -> None:
        if key.startswith(keys.members_prefix("a")) and verb == "read":
            looks.append(key)
        if verb == "replace" and looks:
            published.set()

    clock = SystemClock()
    presence = Presence(RunLog(HookedStore(hook), run_record(clock)), clock, "a", interval_s=3600.0)
    presence.start()
    presence.raise_if_fenced()
    presence.enter("sync", round_number=0)
    assert published.wait(300)
    assert len(looks) == 1
    presence.stop("left")


def test_racing_starts_of_a_slot_get_different_incarnations(log: RunLog) -> None:
    barrier = threading.Barrier(8)

    def claim(_: int) -> int:
        barrier.wait()
        return Presence(log, SystemClock(), "a", 1.0).incarnation

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(claim, range(8))) == list(range(8))


def test_claim_ignores_foreign_objects(log: RunLog, claim: Claim) -> None:
    assert claim("a").incarnation == 0
    for name in ("000000.json.bak", "000007.json.old", "zz", ".hidden", "sub/000009.json"):
        log.store.create(f"members/a/{name}", b"left here")
    assert claim("a").incarnation == 1


def test_phase_is_published_at_once_and_numbers_with_the_next_beat(log: RunLog, claim: Claim) -> None:
    presence = claim("a")
    presence.enter("train", round_number=4)
    published = read(log, "a")
    assert (published.phase, published.round) == ("train", 4)
    presence.enter("train", round_number=4)  # no change, no request
    presence.report(inner_step=7, loss=float("nan"), tokens=5, tokens_per_s=2.0)
    assert read(log, "a") == published
    presence.beat()
    assert (read(log, "a").inner_step, read(log, "a").loss) == (7, None)


def test_heartbeat_has_the_memory_only_in_runs_of_this_version(clock: FakeClock) -> None:
    for links, expected in ((True, Memory(peak_bytes=3, limit_bytes=4)), (None, None)):
        log = RunLog(MemoryStore(), run_record(clock).model_copy(update={"links": links}))
        presence = Presence(log, clock, "a", 1.0)
        presence.memory = lambda: Memory(peak_bytes=3, limit_bytes=4)
        presence.beat()
        assert read(log, "a").memory == expected
        assert (b"memory" in bytes(log.store.read(keys.heartbeat("a")) or b"")) == bool(links)


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/jobs/one\n", {}, 8000 << 10),
        ("0::/jobs/one\n", {"jobs/memory.max": "6000", "jobs/one/memory.max": "max"}, 6000),
        ("0::/jobs/one\n", {"memory.max": "5000"}, 5000),
        ("7:cpu:/x\n4:memory:/jobs/one\n", {"memory/jobs/one/memory.limit_in_bytes": "4000"}, 4000),
        ("4:memory:/not/mounted/here\n", {"memory/memory.limit_in_bytes": "3000"}, 3000),
    ],
)
def test_limit_of_memory_is_that_of_the_machine_or_a_group_above(
    groups: str, limits: dict[str, str], expected: int, tmp_path: Path
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/status").write_text("Name:\tpython\nVmHWM:\t    2000 kB\nRssFile:\t    500 kB\n")
    (proc / "self/cgroup").write_text(groups)
    (proc / "meminfo").write_text("MemTotal:        8000 kB\nMemFree:   10 kB\n")
    for name, limit in limits.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(f"{limit}\n")
    assert peak_memory(proc, cgroups) == Memory(peak_bytes=1500 << 10, limit_bytes=expected)
    (proc / "self/status").write_text("Name:\tpython\n")
    assert peak_memory(proc, cgroups) is None


def test_peak_memory_of_this_process_is_known() -> None:
    memory = peak_memory()
    assert memory is not None
    assert 1 << 20 < memory.peak_bytes < 1 << 40
    assert memory.limit_bytes < 1 << 50


def test_files_in_memory_maps_are_no_used_memory(tmp_path: Path) -> None:
    size = 64 << 20
    (tmp_path / "tokens.bin").write_bytes(bytes(size))
    before = peak_memory()
    with (tmp_path / "tokens.bin").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as tokens:
        assert sum(tokens[:: mmap.PAGESIZE]) == 0
        after = peak_memory()
    assert before is not None
    assert after is not None
    assert after.peak_bytes < before.peak_bytes + size // 2


def test_slow_write_does_not_overwrite_a_newer_heartbeat(clock: FakeClock) -> None:
    newer: list[threading.Thread] = []

    def begin_a_newer_write(verb: str, _: str) -> None:
        if verb == "replace" and not newer:
            newer.append(threading.Thread(target=lambda: presence.enter("train", round_number=2)))
            newer[0].start()
            newer[0].join(0.2)  # it waits for this write

    log = RunLog(HookedStore(begin_a_newer_write), run_record(clock))
    presence = Presence(log, clock, "a", 1.0)
    presence.enter("train", round_number=1)
    newer[0].join()
    assert read(log, "a").round == 2


def test_change_is_timed_on_the_readers_clock(claim: Claim, clock: FakeClock, monitor: HeartbeatMonitor) -> None:
    other = claim("b")
    other.beat()
    first = monitor.refresh()["b"]
    clock.advance(50)
    assert monitor.refresh()["b"] == first
    other.beat()
    second = monitor.refresh()["b"]
    assert second.changed_at == first.changed_at + 50
    assert (first.fresh, second.fresh) == (False, True)


def test_change_is_timed_when_it_was_read(clock: FakeClock) -> None:
    log = RunLog(HookedStore(lambda verb, _: clock.advance(60.0 if verb == "list" else 0.0)), run_record(clock))
    Presence(log, clock, "b", 1.0).beat()
    assert HeartbeatMonitor(log, clock, "a").refresh()["b"].changed_at == clock.now()


def test_refreshes_of_two_threads_keep_the_newest_heartbeat(clock: FakeClock) -> None:
    """The one that ends last may have begun first: of a slot that it does not read, it knows an older one."""

    def refresh_meanwhile(verb: str, key: str) -> None:
        if (verb, key) == ("read", keys.heartbeat("c")) and others:
            others.pop()()

    log = RunLog(HookedStore(refresh_meanwhile), run_record(clock))
    others: list[Callable[[], object]] = []
    monitor, b, c, d = HeartbeatMonitor(log, clock, "a"), *(Presence(log, clock, slot, 1.0) for slot in "bcd")
    b.beat()
    c.beat()
    monitor.refresh()
    clock.advance(60.0)
    b.beat()
    d.beat()
    others.append(monitor.refresh)
    monitor.refresh(unless={"b", "d"})
    assert (monitor.heartbeats["b"].heartbeat.sequence, monitor.heartbeats["b"].changed_at) == (2, clock.now())
    assert monitor.heartbeats.keys() == {"b", "c", "d"}


def test_replaced_incarnation_writes_no_last_heartbeat(log: RunLog, claim: Claim, monitor: HeartbeatMonitor) -> None:
    old, new = claim("b"), claim("b")
    new.enter("train", round_number=5)
    assert monitor.refresh()["b"].heartbeat.round == 5
    old.stop("finished")
    assert read(log, "b").phase == "train"
    old.beat()  # a write that was already under way
    assert monitor.refresh()["b"].heartbeat.incarnation == new.incarnation


def test_heartbeat_of_another_run_is_divergence(log: RunLog, clock: FakeClock, monitor: HeartbeatMonitor) -> None:
    Presence(RunLog(log.store, run_record(clock)), clock, "b", 1.0).beat()
    with pytest.raises(Diverged, match="two runs"):
        monitor.refresh()


def test_failing_heartbeats_do_not_end_the_thread() -> None:
    writes: list[str] = []

    def fail_for_a_while(verb: str, key: str) -> None:
        if verb == "replace":
            writes.append(key)
            if 2 <= len(writes) <= 4:
                raise Retryable("503")

    system = SystemClock()
    presence = Presence(RunLog(HookedStore(fail_for_a_while), run_record(system)), system, "a", 0.005)
    presence.start()
    wait_until(system, lambda: len(writes) > 4 or None, system.now() + 10, Backoff(first=0.001, cap=0.01))
    presence.stop("left")
    assert len(writes) > 4


@pytest.mark.parametrize("started", [True, False])
def test_no_change_follows_the_last_heartbeat(log: RunLog, *, started: bool) -> None:
    """An exchange that ends after its replica must not report that the replica waits."""
    presence = Presence(log, SystemClock(), "a", 0.001)
    if started:
        presence.start()
    presence.stop("failed", "RuntimeError: out of memory")
    last = read(log, "a")
    presence.enter("sync", round_number=3)
    presence.abstain(3, "an error")
    assert read(log, "a") == last
    assert (last.phase, last.notice) == ("failed", "RuntimeError: out of memory")


def test_store_that_hangs_does_not_keep_a_replica_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.runtime.protocol.slot_claim_and_heartbeats._LAST_S", 0.05)
    writing, released = threading.Event(), threading.Event()

    def hang(verb: str, _: str) -> None:
        if verb == "replace" and threading.current_thread().name == "heartbeat-a":
            writing.set()
            released.wait()

    presence = Presence(RunLog(HookedStore(hang), run_record(SystemClock())), SystemClock(), "a", 0.001)
    presence.start()
    assert writing.wait(300)
    presence.stop("left")
    released.set()


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
    assert done.wait(300)
    presence.stop("finished")
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(written))


@pytest.mark.parametrize(("write_s", "counts"), [(0.1, False), (6.0, False), (15.9, False), (16.1, True)])
def test_write_slower_than_half_the_stale_time_counts_as_outage(
    clock: FakeClock, write_s: float, *, counts: bool
) -> None:
    store = HookedStore(lambda verb, _: clock.advance(write_s if verb == "replace" else 0.0))
    presence = Presence(RunLog(store, run_record(clock)), clock, "a", 5.0)
    presence.beat()
    assert presence.steady_since == (clock.now() if counts else 0.0)


@pytest.mark.parametrize(("refused", "counts"), [(1, False), (3, False), (5, True)])
def test_refused_heartbeats_count_as_outage_by_their_duration(clock: FakeClock, refused: int, *, counts: bool) -> None:
    errors: list[Exception] = []

    def fail(verb: str, _: str) -> None:
        if verb == "replace" and errors:
            raise errors.pop()

    presence = Presence(RunLog(HookedStore(fail), run_record(clock)), clock, "a", 1.0)
    presence.beat()
    for _ in range(refused):
        clock.advance(1.0)
        errors.append(Retryable("503"))
        with pytest.raises(Retryable):
            presence.beat()
    clock.advance(1.0)
    presence.beat()
    assert presence.steady_since == (clock.now() if counts else 0.0)


# Damaged and foreign heartbeats.


def test_own_foreign_and_copied_heartbeats_are_ignored(
    log: RunLog, claim: Claim, monitor: HeartbeatMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    for slot in "ab":
        claim(slot).beat()
    copy = bytes(log.store.read(keys.heartbeat("b")) or b"")
    for name in ("_old.json", "b.json.bak", ".b.json", "old/b.json", "notes.txt", "b-copy.json"):
        log.store.create(f"{keys.HEARTBEATS}{name}", copy)
    for _ in range(3):
        assert list(monitor.refresh()) == ["b"]
    (event,) = logged_events(caplog, "heartbeat_failed")
    assert event["key"] == "heartbeats/b-copy.json"
    assert "slot=b" in str(event["error"])


def test_damaged_heartbeat_is_unchanged_and_logged_once_per_change(
    log: RunLog, claim: Claim, clock: FakeClock, monitor: HeartbeatMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    """If it did not count, a live replica that is behind would lose the payloads that it needs."""
    key, other = keys.heartbeat("b"), claim("b")
    log.store.replace(key, b"{half")
    assert monitor.refresh() == {}
    other.beat()
    before = monitor.refresh()["b"]
    for damage, logged in ((b"{half", 2), (b"{half", 2), (b"{more", 3)):
        log.store.replace(key, damage)
        for _ in range(4):
            clock.advance(3.0)
            assert monitor.refresh()["b"] == before
        assert len(logged_events(caplog, "heartbeat_failed")) == logged


@pytest.mark.parametrize("failure_every_s", [None, 3.0, 10.0])
def test_dead_replica_is_noticed_in_time_despite_store_failures(
    clock: FakeClock, failure_every_s: float | None
) -> None:
    failures: list[Exception] = []

    def fail_once(verb: str, _: str) -> None:
        if verb == "list" and failures:
            raise failures.pop()

    store, terms = Retrying(HookedStore(fail_once), clock), policy(stale_s=32.0)
    a = start_replica(store, clock, "a", terms)
    b = start_replica(store, clock, "b")
    b.presence.enter("train", round_number=3)
    a.watch.refresh()
    died = last_failure = clock.now()
    while clock.now() - died < 31.0:
        clock.advance(1.0)
        if failure_every_s is not None and clock.now() - last_failure >= failure_every_s:
            failures.append(Retryable("503 SlowDown"))
            last_failure = clock.now()
        a.presence.beat()
        a.watch.refresh()
        assert "b" in live_rounds(a.watch.heartbeats, a.presence.steady_since, clock.now(), terms.stale_s)
    clock.advance(2.0)
    heartbeats, steady_since = a.watch.refresh(), a.presence.steady_since
    assert live_rounds(heartbeats, steady_since, clock.now(), terms.stale_s) == {}
    assert not is_live(terms, heartbeats["b"], steady_since, clock.now())
