"""Claims, heartbeats and what a replica sees of the others."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock
from tests.support.logs import run_record

from skerry.runtime import keys
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Diverged, Fenced, Retryable
from skerry.runtime.journal import Journal
from skerry.runtime.membership import Presence, Watch
from skerry.runtime.records import Heartbeat
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.store import Data, Entry


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
