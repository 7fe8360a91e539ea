"""Claims, heartbeats and what a replica sees of the others."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock
from tests.support.logs import policy, run_record, start

from skerry.runtime import keys
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Diverged, Fenced, Retryable
from skerry.runtime.garbage import live_rounds
from skerry.runtime.journal import Journal
from skerry.runtime.membership import Presence, Watch
from skerry.runtime.records import MAX_RECORD_BYTES, Heartbeat
from skerry.runtime.rounds import Observation, is_live
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store import Data, Entry, Span
    from skerry.runtime.store.interface import Profile


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def journal(clock: FakeClock) -> Journal:
    return Journal(MemoryStore(), run_record(clock))


def read(journal: Journal, slot: str) -> Heartbeat:
    return Heartbeat.parse(journal.store.read(keys.heartbeat(slot)) or b"", slot)


def test_incarnations_count_up_without_gaps(journal: Journal, clock: FakeClock) -> None:
    assert [Presence(journal, clock, "a", 1.0).incarnation for _ in range(3)] == [0, 1, 2]


def test_racing_starts_of_one_slot_get_different_incarnations(journal: Journal) -> None:
    found: list[int] = []
    barrier = threading.Barrier(8)

    def claim() -> None:
        barrier.wait()
        found.append(Presence(journal, SystemClock(), "a", 1.0).incarnation)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))


def test_only_the_highest_incarnation_is_not_fenced(journal: Journal, clock: FakeClock) -> None:
    old, new = Presence(journal, clock, "a", 1.0), Presence(journal, clock, "a", 1.0)
    with pytest.raises(Fenced):
        old.fence()
    new.fence()


def test_a_change_of_phase_is_told_at_once_and_numbers_with_the_next_beat(journal: Journal, clock: FakeClock) -> None:
    presence = Presence(journal, clock, "a", 1.0)
    presence.enter("train", round_number=4)
    assert (read(journal, "a").phase, read(journal, "a").round) == ("train", 4)
    presence.report(inner_step=7, loss=float("nan"), tokens=5, tokens_per_s=2.0)
    assert read(journal, "a").inner_step == 0
    presence.beat()
    assert (read(journal, "a").inner_step, read(journal, "a").loss) == (7, None)


def test_the_same_phase_again_costs_no_request(journal: Journal, clock: FakeClock) -> None:
    presence = Presence(journal, clock, "a", 1.0)
    presence.enter("train", round_number=4)
    before = read(journal, "a").sequence
    presence.enter("train", round_number=4)
    assert read(journal, "a").sequence == before


def test_a_peer_is_as_old_as_its_last_change_on_my_own_clock(journal: Journal, clock: FakeClock) -> None:
    peer, watch = Presence(journal, clock, "b", 1.0), Watch(journal, clock, "a")
    peer.beat()
    first = watch.look()["b"].changed_at
    clock.advance(50)
    assert watch.look()["b"].changed_at == first
    peer.beat()
    assert watch.look()["b"].changed_at == first + 50


def test_a_replaced_incarnation_neither_beats_nor_says_goodbye(journal: Journal, clock: FakeClock) -> None:
    old, new = Presence(journal, clock, "b", 1.0), Presence(journal, clock, "b", 1.0)
    watch = Watch(journal, clock, "a")
    new.enter("train", round_number=5)
    assert watch.look()["b"].heartbeat.round == 5
    old.stop("finished")
    assert read(journal, "b").phase == "train"
    old.beat()  # one that was on its way
    assert watch.look()["b"].heartbeat.incarnation == new.incarnation


def test_only_a_heartbeat_that_was_seen_to_change_is_fresh(journal: Journal, clock: FakeClock) -> None:
    peer, watch = Presence(journal, clock, "b", 1.0), Watch(journal, clock, "a")
    peer.beat()
    assert not watch.look()["b"].fresh
    peer.beat()
    assert watch.look()["b"].fresh


def test_a_beat_that_took_long_means_that_nobody_could_be_heard(clock: FakeClock) -> None:
    class Away(MemoryStore):
        def replace(self, key: str, data: Data) -> None:
            clock.advance(60)
            super().replace(key, data)

    presence = Presence(Journal(Away(), run_record(clock)), clock, "a", 1.0)
    before = clock.now()
    presence.beat()
    assert presence.steady_since == before + 60


def test_a_peer_that_was_heard_late_is_as_fresh_as_when_it_was_heard(clock: FakeClock) -> None:
    class Slow(MemoryStore):
        def list(self, prefix: str, after: str | None = None) -> list[Entry]:
            clock.advance(60)
            return list(super().list(prefix, after))

    journal = Journal(Slow(), run_record(clock))
    Presence(journal, clock, "b", 1.0).beat()
    assert Watch(journal, clock, "a").look()["b"].changed_at == clock.now()


def test_my_own_heartbeat_is_not_a_peer(journal: Journal, clock: FakeClock) -> None:
    Presence(journal, clock, "a", 1.0).beat()
    assert Watch(journal, clock, "a").look() == {}


def test_a_damaged_heartbeat_is_skipped(journal: Journal, clock: FakeClock) -> None:
    Presence(journal, clock, "b", 1.0).beat()
    journal.store.replace(keys.heartbeat("c"), b"{half")
    assert list(Watch(journal, clock, "a").look()) == ["b"]


def test_a_heartbeat_of_another_run_stops_the_replica(journal: Journal, clock: FakeClock) -> None:
    other = Journal(journal.store, run_record(clock))
    Presence(other, clock, "b", 1.0).beat()
    with pytest.raises(Diverged, match="two runs"):
        Watch(journal, clock, "a").look()


def test_a_failing_heartbeat_neither_ends_the_thread_nor_the_process(clock: FakeClock) -> None:
    class Flaky(MemoryStore):
        failures = 0

        def replace(self, key: str, data: Data) -> None:
            if self.failures < 3:
                self.failures += 1
                raise Retryable("503")
            super().replace(key, data)

    store = Flaky()
    presence = Presence(Journal(store, run_record(clock)), SystemClock(), "a", 0.005)
    with pytest.raises(Retryable):
        presence.start()
    store.failures = 1
    presence._stopped.clear()
    presence._thread = threading.Thread(target=presence._run, daemon=True)
    presence._thread.start()
    system = SystemClock()
    wait_until(system, lambda: store.read(keys.heartbeat("a")), system.now() + 10, Backoff(first=0.001, cap=0.01))
    presence.stop("left")
    assert store.failures == 3


def test_the_last_word_is_written_once_the_beats_have_stopped(journal: Journal) -> None:
    presence = Presence(journal, SystemClock(), "a", 0.001)
    presence.start()
    presence.stop("finished")
    last = read(journal, "a")
    assert last.phase == "finished"
    presence.stop("failed")
    assert read(journal, "a") == last


def test_a_store_that_takes_a_write_a_second_of_a_key_is_asked_for_no_more(clock: FakeClock) -> None:
    written: list[float] = []
    done = threading.Event()

    class Slow(MemoryStore):
        @property
        def profile(self) -> Profile:
            return replace(super().profile, rewrite=1.0)

        def replace(self, key: str, data: Data) -> None:
            written.append(clock.now())
            super().replace(key, data)
            # A change right after a beat wants another one at once.
            if 1 < len(written) < 10:
                presence.enter("train", round_number=len(written))
            elif len(written) == 10:
                done.set()

    presence = Presence(Journal(Slow(), run_record(clock)), clock, "a", 5.0)
    presence.start()
    assert done.wait(30)
    presence.stop("finished")
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(written))


def told(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, object]]:
    return [record.fields for record in caplog.records if getattr(record, "event", "") == name]  # type: ignore[attr-defined]


def test_a_beat_that_had_to_be_repeated_hides_nobody(clock: FakeClock) -> None:
    """Of half of the time after which silence is death; a store that is always that slow would keep the dead alive."""

    class Busy(MemoryStore):
        waits_s = 0.0

        def replace(self, key: str, data: Data) -> None:
            clock.advance(self.waits_s)
            super().replace(key, data)

    store = Busy()
    presence = Presence(Journal(store, run_record(clock)), clock, "a", 5.0)
    for store.waits_s in (0.1, 2.5, 6.0, 15.9):
        presence.beat()
        assert presence.steady_since == 0.0
    store.waits_s = 16.1
    presence.beat()
    assert presence.steady_since == clock.now()


@pytest.mark.parametrize(("refused", "counts"), [(1, False), (3, False), (5, True)])
def test_beats_that_are_refused_count_by_how_long_none_went_through(
    clock: FakeClock,
    refused: int,
    counts: bool,  # noqa: FBT001
) -> None:
    class Closed(MemoryStore):
        error: Exception | None = None

        def replace(self, key: str, data: Data) -> None:
            if self.error is not None:
                raise self.error
            super().replace(key, data)

    store = Closed()
    presence = Presence(Journal(store, run_record(clock)), clock, "a", 1.0)
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


def test_a_heartbeat_whose_name_is_nobodys_is_passed_over(
    journal: Journal, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    Presence(journal, clock, "b", 1.0).beat()
    copy = bytes(journal.store.read(keys.heartbeat("b")) or b"")
    for name in ("_old.json", "b.json.bak", ".b.json", "old/b.json", "notes.txt"):
        journal.store.create(f"{keys.HEARTBEATS}{name}", copy)
    watch = Watch(journal, clock, "a")
    for _ in range(3):
        assert list(watch.look()) == ["b"]
    assert told(caplog, "heartbeat_failed") == []


def test_a_copy_of_a_heartbeat_is_no_other_replica_and_told_once(
    journal: Journal, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    b, watch = Presence(journal, clock, "b", 1.0), Watch(journal, clock, "a")
    b.beat()
    journal.store.create(keys.heartbeat("b-copy"), bytes(journal.store.read(keys.heartbeat("b")) or b""))
    for _ in range(3):
        assert list(watch.look()) == ["b"]
    (one,) = told(caplog, "heartbeat_failed")
    assert one["key"] == "heartbeats/b-copy.json"
    assert "slot=b" in str(one["error"])


def test_a_damaged_heartbeat_is_told_once_per_change(
    journal: Journal, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch(journal, clock, "a")
    b = Presence(journal, clock, "b", 1.0)
    for damage in (b"{half", b"{half", b"{more"):
        journal.store.replace(keys.heartbeat("b"), damage)
        for _ in range(4):
            watch.look()
    assert len(told(caplog, "heartbeat_failed")) == 2
    b.beat()
    watch.look()
    journal.store.replace(keys.heartbeat("b"), b"{more")
    watch.look()
    assert len(told(caplog, "heartbeat_failed")) == 3


def test_a_replica_whose_heartbeat_is_damaged_is_as_old_as_its_last_sound_one(
    journal: Journal, clock: FakeClock
) -> None:
    """Without it a live replica that is behind would lose the payloads that it needs."""
    watch = Watch(journal, clock, "a")
    Presence(journal, clock, "b", 1.0).beat()
    before = watch.look()["b"]
    clock.advance(3.0)
    journal.store.replace(keys.heartbeat("b"), b"{half")
    assert watch.look()["b"] == before


def test_a_claim_passes_over_what_is_no_claim(journal: Journal, clock: FakeClock) -> None:
    assert Presence(journal, clock, "a", 1.0).incarnation == 0
    for name in ("000000.json.bak", "000007.json.old", "zz", ".hidden", "sub/000009.json"):
        journal.store.create(f"members/a/{name}", b"left here")
    assert Presence(journal, clock, "a", 1.0).incarnation == 1


def test_a_huge_heartbeat_is_not_read_whole(journal: Journal, clock: FakeClock) -> None:
    sizes: list[int] = []

    class Counts(MemoryStore):
        def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
            found = super().read(key, span, into)
            sizes.append(0 if found is None else found.nbytes)
            return found

    journal.store = Counts()
    journal.store.create(keys.heartbeat("b"), b"x" * (MAX_RECORD_BYTES + 1_000_000))
    assert Watch(journal, clock, "a").look() == {}
    assert max(sizes) == MAX_RECORD_BYTES + 1


@pytest.mark.parametrize("every_s", [None, 3.0, 10.0])
def test_the_dead_are_dead_in_time_in_a_store_that_fails_now_and_then(clock: FakeClock, every_s: float | None) -> None:
    class Sick(MemoryStore):
        sick = False

        def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
            if self.sick:
                self.sick = False
                raise Retryable("503 SlowDown")
            return super().list(prefix, after)

    store, terms = Sick(), policy(stale_s=32.0)
    own = Retrying(store, clock)
    a, b = start(own, clock, "a", terms), start(Retrying(store, clock), clock, "b")
    b.presence.enter("train", round_number=3)
    a.watch.look()
    died = last_sick = clock.now()
    while clock.now() - died < 31.0:
        clock.advance(1.0)
        if every_s is not None and clock.now() - last_sick >= every_s:
            store.sick, last_sick = True, clock.now()
        a.presence.beat()
        a.watch.look()
        assert "b" in live_rounds(a.watch.peers, a.presence.steady_since, clock.now(), terms.stale_s)
    clock.advance(2.0)
    peers = a.watch.look()
    assert live_rounds(peers, a.presence.steady_since, clock.now(), terms.stale_s) == {}
    seen = Observation(offers={}, refused=frozenset(), peers=peers, steady_since=a.presence.steady_since)
    assert not is_live(terms, peers["b"], seen, clock.now())
