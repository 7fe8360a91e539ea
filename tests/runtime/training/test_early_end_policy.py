"""A slow replica ends its round early when it would miss the grace window, and only then."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock
from tests.support.logs import Replica, load, policy, start
from tests.support.managers import Island, contributions

from skerry.runtime import keys
from skerry.runtime.errors import Retryable
from skerry.runtime.pace import Earlier, Pace
from skerry.runtime.records import GENESIS
from skerry.runtime.rounds import Grace
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store import Entry

# A grace window of 5 s: half of a round of 10 s.
GRACE = Grace(floor_s=1.0, cap_s=10.0, share=0.5)


def seats(*, minimum: int = 2, grace: Grace = GRACE) -> tuple[FakeClock, list[Replica], Pace]:
    clock, store = FakeClock(), MemoryStore()
    replicas = [start(store, clock, f"r-{i}") for i in range(3)]
    terms = policy(min_replicas=minimum, grace=grace)
    return clock, replicas, Pace(journal=replicas[2].journal, clock=clock, policy=terms, slot="r-2")


@pytest.mark.parametrize(("steps", "share"), [(1, 1.0), (0, None)])
def test_who_would_miss_the_window_stops_with_what_it_has(steps: int, share: float | None) -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    clock.advance(10.0)
    first.offer(b"a")
    second.offer(b"b")
    # The others took one inner step each (tests.support.logs): with one of my own I am done.
    assert pace.share(0, GENESIS, steps, since, 10.0) == (None if share == 1.0 else share)


@pytest.mark.parametrize(("taken_s", "share"), [(2.4, None), (2.6, 0.5)])
def test_the_time_that_is_left_is_told_from_the_time_that_was_taken(taken_s: float, share: float | None) -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    for replica in (first, second):
        replica.offer(b"x" + replica.presence.slot.encode(), inner_steps=10)
    clock.advance(taken_s)
    assert pace.share(0, GENESIS, 5, since, 10.0) == share, "five more steps take as long; half of the window is 2.5 s"


def test_below_the_quorum_everybody_waits_for_it_anyway() -> None:
    clock, (first, _, _), pace = seats()
    since = clock.now()
    first.offer(b"a", inner_steps=10)
    clock.advance(100.0)
    assert pace.share(0, GENESIS, 1, since, 10.0) is None


def test_what_it_has_brought_already_covers_it() -> None:
    clock, replicas, pace = seats()
    since = clock.now()
    for replica in replicas:
        replica.offer(replica.presence.slot.encode(), inner_steps=10)
    clock.advance(100.0)
    assert pace.share(0, GENESIS, 1, since, 10.0) is None


def test_what_somebody_adds_of_an_earlier_round_is_not_of_this_one() -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    first.offer(b"a", inner_steps=300)
    second.offer(b"b", inner_steps=100)
    clock.advance(99.0)
    assert pace.share(0, GENESIS, 99, since, 10.0) is None, "one second is left of it"


def test_what_was_brought_before_its_round_was_trained_for_is_nobody_who_waits() -> None:
    clock, (first, *_), pace = seats(minimum=1)
    since = clock.now()
    first.offer(b"a", inner_steps=100, discount=0.5)
    clock.advance(1.0)
    assert pace.share(0, GENESIS, 1, since, 10.0) is None


def test_contributions_that_cannot_be_averaged_together_are_no_quorum() -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    first.offer(b"a", inner_steps=100)
    second.offer(b"b", inner_steps=100, index="2" * 32)
    clock.advance(10.0)
    assert pace.share(0, GENESIS, 1, since, 10.0) is None


def test_a_slow_first_step_is_no_slow_replica() -> None:
    """It may have compiled its model; what counts is how long the last steps took."""
    clock, (first, second, _), pace = seats()
    since = clock.now()
    clock.advance(100.0)
    assert pace.share(0, GENESIS, 1, since, 10.0) is None
    clock.advance(0.9)
    for replica in (first, second):
        replica.offer(replica.presence.slot.encode(), inner_steps=12)
    assert pace.share(0, GENESIS, 10, since, 10.0) is None, "two steps of a tenth of a second are left"


def test_who_hangs_in_a_step_is_slow() -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    clock.advance(1.0)
    assert pace.share(0, GENESIS, 10, since, 10.0) is None
    for replica in (first, second):
        replica.offer(replica.presence.slot.encode(), inner_steps=12)
    clock.advance(5.0)
    assert pace.share(0, GENESIS, 10, since, 10.0) == pytest.approx(10 / 12)


def test_a_failed_attempt_takes_its_time_along() -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    clock.advance(100.0)
    assert pace.share(0, GENESIS, 10, since, 10.0) is None
    assert pace.share(0, GENESIS, 1, since, 10.0) is None, "its steps are thrown away"
    clock.advance(0.9)
    for replica in (first, second):
        replica.offer(replica.presence.slot.encode(), inner_steps=12)
    assert pace.share(0, GENESIS, 10, since, 10.0) is None


@pytest.mark.parametrize(("taken_s", "share"), [(2.4, None), (2.6, 35 / 40)])
@pytest.mark.parametrize("plan", [10, None])
def test_with_fragments_the_time_that_is_left_is_of_this_round_alone(
    taken_s: float, share: float | None, plan: int | None
) -> None:
    """The others have taken ten inner steps in each of four rounds; this replica's last rounds were whole."""
    clock, (first, second, _), pace = seats()
    since = clock.now()
    for replica in (first, second):
        replica.offer(b"x" + replica.presence.slot.encode(), inner_steps=40)
    clock.advance(taken_s)
    assert pace.share(0, GENESIS, 5, since, 10.0, Earlier(rounds=3, steps=30, plan=plan)) == share


def test_who_ended_earlier_rounds_early_has_no_more_left_of_this_one() -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    for replica in (first, second):
        replica.offer(b"x" + replica.presence.slot.encode(), inner_steps=40)
    clock.advance(2.4)
    assert pace.share(0, GENESIS, 5, since, 10.0, Earlier(rounds=3, steps=3, plan=10)) is None
    clock.advance(2.0)
    assert pace.share(0, GENESIS, 5, since, 10.0, Earlier(rounds=3, steps=3, plan=10)) == 8 / 40


def test_others_that_ended_early_tell_how_long_a_round_is_too() -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    for replica in (first, second):
        short = replace(load(replica.presence.slot.encode()), inner_steps=10, share=0.25)
        replica.exchange.contribute(replica.place, short)
    clock.advance(20.0)
    assert pace.share(0, GENESIS, 5, since, 10.0) == 5 / 40


def test_an_exchange_that_begins_before_its_round_ends_leaves_less_to_take() -> None:
    """Of ten inner steps three come after it, and the record counts none of those."""
    clock, (first, second, _), pace = seats()
    since = clock.now()
    for replica in (first, second):
        replica.offer(b"x" + replica.presence.slot.encode(), inner_steps=37)
    clock.advance(5.0)
    assert pace.share(0, GENESIS, 5, since, 10.0, Earlier(rounds=3, steps=30, plan=7)) is None, "two seconds are left"


def test_a_contribution_is_read_once() -> None:
    clock, (first, second, third), pace = seats()
    since = clock.now()
    for replica in (first, second):
        replica.offer(replica.presence.slot.encode(), inner_steps=2)
    clock.advance(1.0)
    reads: list[str] = []
    store = third.journal.store
    read = store.read
    store.read = lambda key, *more: (reads.append(key), read(key, *more))[1]  # type: ignore[method-assign]
    for _ in range(3):
        pace.share(0, GENESIS, 1, since, 10.0)
    assert len(reads) == 2


class Away(MemoryStore):
    """Answers nothing while `away`, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.asked = 0

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        if self.away:
            self.asked += prefix in {keys.COMMITS, keys.contributions_of(0, 0)}
            raise Retryable("connection refused")
        return super().list(prefix, after)


def test_an_outage_between_inner_steps_holds_nobody_up() -> None:
    store = Away()
    island = Island(store, "a", sync_every=200, minimum=1, heartbeat_interval=timedelta(milliseconds=1))
    with island.diloco:
        island.manager.catch_up(island.inner)
        store.away = True
        while store.asked < 3:
            island.manager.catch_up(island.inner)
            island.step()
        assert island.steps < 200
        store.away = False
        while island.manager.current_step() == 0:
            island.manager.catch_up(island.inner)
            island.step()
    island.manager.shutdown()


def test_a_damaged_record_in_mid_round_is_met_where_it_is_needed() -> None:
    """A commit nobody can read: told by who follows it, in the round's own way, not raised between two steps."""
    store = MemoryStore()
    island = Island(store, "a", sync_every=200, minimum=1, heartbeat_interval=timedelta(milliseconds=1))
    with island.diloco:
        island.manager.catch_up(island.inner)
        store.create(keys.contribution(0, 0, "b"), b"{")
        for _ in range(50):
            island.manager.catch_up(island.inner)
            island.step()
    assert (island.manager.current_step(), island.manager.inner_steps) == (0, 50)
    island.manager.shutdown()


@pytest.mark.parametrize(
    ("cap_s", "taken_s", "round_number", "share"),
    [(10.0, 4.0, 0, None), (10.0, 4.0, 1, 0.5), (10.0, 0.4, 1, None), (0.4, 0.4, 1, 0.5), (0.4, 0.1, 1, None)],
)
def test_who_has_just_come_counts_on_the_shortest_window(
    cap_s: float, taken_s: float, round_number: int, share: float | None
) -> None:
    """The others have timed rounds, and wait so long at least; in the first round everybody waits for the longest.

    The shortest is the floor of 1 s, or the cap where that is below it.
    """
    clock, replicas, pace = seats(grace=replace(GRACE, cap_s=cap_s))
    for number in range(round_number):
        for replica in replicas:
            replica.offer(f"{number} {replica.presence.slot}".encode())
        for replica in replicas:
            replica.close(replica.decide())
    since = clock.now()
    for replica in replicas[:2]:
        replica.offer(replica.presence.slot.encode(), inner_steps=10)
    clock.advance(taken_s)
    assert pace.share(round_number, replicas[2].base, 5, since, None) == share, "as long again is left"


def test_a_round_that_failed_after_it_was_ended_early_has_its_full_length_again() -> None:
    store = MemoryStore()
    island = Island(store, "a", minimum=1, sync_every=4)
    manager, failed = island.manager, []
    run = manager._seat.averager.run

    def fail_once(*args: object, **more: object) -> object:
        if not failed:
            failed.append(manager._conduct.round.share)
            raise TimeoutError("the store was away")
        return run(*args, **more)  # type: ignore[arg-type]

    manager._seat.averager.run = fail_once  # type: ignore[method-assign,assignment]
    with island.diloco:
        manager.catch_up(island.inner)
        island.step()
        manager._conduct.round.share = 0.25
        manager._course.end_round(island.inner, lambda: manager._conduct.failed)
        assert (failed, manager.current_step()) == ([0.25], 0)
        while manager.current_step() == 0:
            manager.catch_up(island.inner)
            island.step()
    manager.shutdown()
    assert [(one.inner_steps, one.share) for one in contributions(store)] == [(4, 1.0)]
