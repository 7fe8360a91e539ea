"""The requests of a look at a run of 64 replicas, and what later looks read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.observe.fleet import SLOTS, Fleet
from tests.kit.protocol import contribution, heartbeat, run_record
from tests.kit.records import commit, decision, member, outcome, receipt
from tests.kit.stores import CountingStore
from tests.support.clocks import FakeClock

from skerry.infra.observe.history import read_history
from skerry.infra.observe.observer import Observer
from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import GENESIS, Telemetry
from skerry.runtime.log.run_record import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from skerry.runtime.clock import Clock
    from skerry.runtime.log.record_parsing import Record
    from skerry.runtime.store import Entry

RUN = "a" * 32

# Every look asks once for a change of the run's settings.
NEXT_SETTINGS = keys.settings(1)


class WholeSeconds(CountingStore):
    """A store that lists times in whole seconds, as S3: each change of a heartbeat is read twice."""

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        return [entry._replace(modified=float(int(entry.modified))) for entry in super().list(prefix, after)]


class Large:
    """A run of `replicas` replicas and its observer."""

    def __init__(
        self, replicas: int = 64, *, sparing: bool = False, store: Callable[[Clock], CountingStore] = CountingStore
    ) -> None:
        self.clock = FakeClock()
        self.clock.advance(0.5)  # whole seconds may be those of a listing
        self.store = store(self.clock)
        self.slots = tuple(f"a-{index}" for index in range(replicas))
        run = run_record(self.clock, nonce=RUN, slots=self.slots, rounds=100, sync_every=10)
        self.observer = Observer(self.store, RunSettings(first=run), self.clock, sparing=sparing)
        self.sequence = 0

    def put(self, key: str, record: Record) -> None:
        self.store.replace(key, record.to_bytes())

    def join(self, slot: str, number: int) -> None:
        self.put(keys.member(slot, number), member(slot, number))

    def beat(self, *slots: str, **changes: object) -> None:
        self.sequence += 1
        for slot in slots or self.slots:
            self.put(keys.heartbeat(slot), heartbeat(slot, sequence=self.sequence, **changes))

    def close(self, number: int, settings: str | None = None) -> None:
        telemetry = Telemetry(loss=5.0 - number)
        for slot in self.slots:
            self.put(keys.contribution(number, 0, slot), contribution(slot, round=number, telemetry=telemetry))
            self.put(keys.receipt(number, slot), receipt(slot, number))
        self.put(keys.decision(number, 0), decision(number, self.slots, run=RUN, settings=settings))
        self.put(keys.commit(number), commit(number, participants=len(self.slots)))

    def look(self) -> int:
        """One look after two seconds. Returns its requests."""
        self.clock.advance(2.25)
        self.store.read_keys.clear()
        self.store.listings = 0
        self.view = self.observer.view()
        return len(self.store.read_keys) + self.store.listings


def watched(replicas: int, store: Callable[[Clock], CountingStore] = CountingStore) -> Large:
    """A watched run that has closed its first round."""
    large = Large(replicas, sparing=True, store=store)
    for slot in large.slots:
        large.join(slot, 0)
    large.close(0)
    large.beat(round=1)
    large.look()
    return large


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize(
    ("beats_each_look", "store"), [(False, CountingStore), (False, WholeSeconds), (True, CountingStore)]
)
def test_watched_look_makes_at_most_two_requests_a_replica(
    replicas: int, store: Callable[[Clock], CountingStore], *, beats_each_look: bool
) -> None:
    large, requests, rounds = watched(replicas, store), 0, range(1, 7)
    for number in rounds:
        for look in range(10):  # 22.5 s: a heartbeat comes at least every 5 s, and when a round begins
            if look == 0:
                large.close(number)
            if look % 2 == 0 or beats_each_look:
                large.beat(round=number + 1, tokens=large.sequence * 100)
            requests += large.look()
            assert large.view.closed == number + 1
    assert requests <= 2 * replicas * 10 * len(rounds)
    assert [loss for _, loss in large.view.losses] == [5.0 - number for number in range(7)]
    assert large.view.agreement is not None
    assert (large.view.agreement.round, len(large.view.agreement.slots)) == (6, replicas)


def test_watched_look_lists_the_heartbeats_only_until_something_is_due() -> None:
    large = watched(2)
    large.look()  # for receipts that were late
    assert (large.look(), large.store.read_keys) == (1, [])
    large.beat("a-1", round=1, inner_step=3)
    assert (large.look(), large.store.read_keys) == (2, [keys.heartbeat("a-1")])
    large.clock.advance(60)
    large.beat(round=1)  # else they would be silent
    assert large.look() == 6 + 2
    assert large.store.read_keys == [NEXT_SETTINGS, *map(keys.heartbeat, large.slots)]


def test_watched_look_finds_unannounced_records_within_a_minute() -> None:
    large = watched(2)
    large.close(1)
    closed: list[int] = []
    while not closed or closed[-1] == 1:
        large.look()
        closed.append(large.view.closed)
    assert 2.25 * len(closed) <= 60 + 2.25


def test_watched_look_finds_a_restart_and_both_kinds_of_end_at_once() -> None:
    large = watched(2)
    large.put(keys.outcome("a-1", 0), outcome("a-1", 0, status="retry", reason="OSError: disk full"))
    large.clock.advance(1)
    large.join("a-1", 1)
    large.beat("a-1", incarnation=1, phase="joining")
    large.look()
    assert [event.text for event in large.view.events if event.about == "a-1"] == [
        "start 2",
        "ended and may be started again: OSError: disk full",
        "started",
    ]
    # The process ends some seconds after its last heartbeat, and then its end is recorded.
    large.beat("a-1", incarnation=1, phase="finished")
    large.look()
    large.put(keys.outcome("a-1", 1), outcome("a-1", 1))
    large.look()
    assert large.view.replicas[1].outcome == "done"
    # A killed one sends no last heartbeat.
    large.put(keys.outcome("a-0", 0), outcome("a-0", 0, status="failed", reason="killed"))
    for _ in range(5):
        large.look()
    assert large.view.replicas[0].outcome == "failed"


def test_watched_look_reads_settings_that_a_decision_names() -> None:
    large = watched(2)
    change = Settings(
        run=RUN, number=1, previous=GENESIS, from_round=1, rounds=200, work=None, outer_lr=0.5, outer_momentum=0.9,
        by="ada", created="",
    )  # fmt: skip
    large.put(NEXT_SETTINGS, change)
    large.look()
    assert large.view.rounds == 100
    large.close(1, digest_of(change.to_bytes()))
    large.beat(round=2)
    large.look()
    large.look()
    assert large.view.rounds == 200
    assert large.store.read_keys[0] == NEXT_SETTINGS


def test_look_at_64_replicas_makes_at_most_75_requests() -> None:
    large = Large(sparing=True)
    large.beat()
    large.close(0)
    assert large.look() > 3 * 64, "the first look reads everything"
    requests: list[int] = []
    for number in range(1, 5):
        large.close(number)
        for _ in range(10):
            large.beat(round=number + 1, tokens=large.sequence * 100)
            requests.append(large.look())
    assert max(requests) <= 75
    assert min(requests) > 64, "each heartbeat has changed"
    assert [loss for _, loss in large.view.losses] == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert large.view.agreement is not None
    assert (large.view.agreement.round, len(large.view.agreement.slots)) == (4, 64)
    assert large.view.replicas[63].tokens_per_s == pytest.approx(100 / 2.25)


def test_unchanged_heartbeats_are_not_read_again() -> None:
    large = Large(8)
    large.beat()
    large.look()
    large.beat("a-3", inner_step=4)
    assert large.look() <= 6
    assert large.store.read_keys == [NEXT_SETTINGS, keys.heartbeat("a-3")]
    assert large.view.replicas[3].inner_step == 4
    assert [replica.silent_s for replica in large.view.replicas] == [2.25] * 3 + [0.0] + [2.25] * 4


def test_heartbeats_with_whole_seconds_are_read_twice() -> None:
    large = Large(1)
    large.clock.time = 998.75  # the look is at 1001.0, and so are both heartbeats
    large.clock.advance(2.25)
    large.beat(inner_step=1)
    large.clock.advance(-2.25)
    large.look()
    large.beat(inner_step=2)  # the same time and size in the listing
    assert large.view.replicas[0].inner_step == 1
    large.look()
    assert large.store.read_keys == [NEXT_SETTINGS, keys.heartbeat("a-0")]
    assert large.view.replicas[0].inner_step == 2
    large.look()
    assert large.store.read_keys == [NEXT_SETTINGS]


def test_records_of_a_round_are_read_once_and_late_ones_later() -> None:
    large = Large(4)
    large.close(0)
    late = keys.receipt(0, "a-2")
    record = large.store.read(late)
    assert record is not None
    large.store.delete(late)
    large.look()
    assert large.view.agreement is not None
    assert len(large.view.agreement.slots) == 3
    large.store.replace(late, record)
    large.look()
    assert large.store.read_keys == [NEXT_SETTINGS, late]
    assert len(large.view.agreement.slots) == 4
    large.look()
    assert large.store.read_keys == [NEXT_SETTINGS]


def test_starts_and_ends_are_read_once() -> None:
    large = Large(1)
    for number in range(3):
        large.join("a-0", number)
    large.look()
    assert keys.member("a-0", 0) not in large.store.read_keys, "the first look reads the last start only"
    assert large.view.replicas[0].starts == 3
    large.put(keys.outcome("a-0", 2), outcome("a-0", 2, status="failed", reason="OSError: disk full"))
    large.look()
    assert large.store.read_keys == [NEXT_SETTINGS, keys.outcome("a-0", 2)]
    assert [event.text for event in large.view.events] == ["failed: OSError: disk full", "started"]
    large.look()
    assert large.store.read_keys == [NEXT_SETTINGS]


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_heartbeats_of_a_known_history_are_read_only_if_they_changed(fraction: float) -> None:
    """Times in whole seconds cannot show a second change, so these are read once more, a second later."""
    large = Large(3)
    large.clock.time = 1000.0 + fraction
    run = run_record(large.clock, nonce=RUN, slots=large.slots, rounds=100, sync_every=10)
    large.put(keys.RUN, run)
    large.beat()
    history = read_history(large.store)
    large.clock.advance(fraction / 2)
    large.beat("a-1", inner_step=4)
    changed = [keys.heartbeat("a-1")] if fraction else []
    large.observer = Observer(large.store, RunSettings(first=run), large.clock, history)
    large.store.forget()
    views = [large.observer.view()]
    assert large.store.read_keys == [NEXT_SETTINGS, *changed]
    large.look()
    assert large.store.read_keys == [NEXT_SETTINGS, *([] if fraction else map(keys.heartbeat, large.slots))]
    views.append(large.view)
    steps = [[replica.inner_step for replica in view.replicas] for view in views]
    assert steps == [[0, 4 if fraction else 0, 0], [0, 4, 0]]


def test_looks_after_a_known_history_read_the_new_rounds_only(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "run")
    for number in range(5):
        fleet.train(number, *SLOTS)
    observer = Observer(fleet.store, RunSettings(first=fleet.run), fleet.clock, read_history(fleet.store))
    fleet.store.delete(keys.contribution(0, 0, "a-0"))
    fleet.train(5, "a-0")
    fleet.train(6, "a-0")
    view = observer.view()
    assert [item.round for item in view.recent] == list(range(7))
    assert view.replicas[0].marks == ("trained",) * 7
    assert view.replicas[1].marks == ("trained",) * 5 + ("absent",) * 2
    assert (view.replicas[1].in_rounds, view.replicas[1].of_rounds) == (5, 7)
    assert observer.view().recent == view.recent
