"""A slow replica ends its round early when it would miss the grace window, and only then."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.kit.managers import Island, Pace, contributions, decisions, receipts, together
from tests.kit.protocol import Replica, draft, policy, start_replica
from tests.support.clocks import FakeClock

from skerry.runtime.errors import Retryable
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.training.early_end_policy import EarlierSteps, EarlyEndPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.store import Entry

# A grace window of 5 s: half of a round of 10 s.
GRACE = Grace(floor_s=1.0, cap_s=10.0, share=0.5)


def seats(*, minimum: int = 2, grace: Grace = GRACE) -> tuple[FakeClock, list[Replica], EarlyEndPolicy]:
    clock, store = FakeClock(), MemoryStore()
    replicas = [start_replica(store, clock, f"r-{i}") for i in range(3)]
    terms = policy(min_replicas=minimum, grace=grace)
    return clock, replicas, EarlyEndPolicy(log=replicas[2].log, clock=clock, policy=terms, slot="r-2")


@pytest.mark.parametrize(("steps", "share"), [(1, 1.0), (0, None)])
def test_replica_that_would_miss_the_window_stops_with_its_steps(steps: int, share: float | None) -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    clock.advance(10.0)
    first.contribute(b"a")
    second.contribute(b"b")
    # The others took one inner step each (tests.kit.protocol): with one of my own I am done.
    assert pace.share(0, GENESIS, steps, since, 10.0) == (None if share == 1.0 else share)


@pytest.mark.parametrize(("taken_s", "share"), [(2.4, None), (2.6, 0.5)])
def test_time_left_is_estimated_from_the_time_taken(taken_s: float, share: float | None) -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    for replica in (first, second):
        replica.contribute(b"x" + replica.presence.slot.encode(), inner_steps=10)
    clock.advance(taken_s)
    assert pace.share(0, GENESIS, 5, since, 10.0) == share, "five more steps take as long; half of the window is 2.5 s"


def test_below_the_quorum_everybody_waits_for_it_anyway() -> None:
    clock, (first, _, _), pace = seats()
    since = clock.now()
    first.contribute(b"a", inner_steps=10)
    clock.advance(100.0)
    assert pace.share(0, GENESIS, 1, since, 10.0) is None


def test_what_it_has_brought_already_covers_it() -> None:
    clock, replicas, pace = seats()
    since = clock.now()
    for replica in replicas:
        replica.contribute(replica.presence.slot.encode(), inner_steps=10)
    clock.advance(100.0)
    assert pace.share(0, GENESIS, 1, since, 10.0) is None


def test_steps_added_from_an_earlier_round_do_not_lengthen_this_one() -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    first.contribute(b"a", inner_steps=300)
    second.contribute(b"b", inner_steps=100)
    clock.advance(99.0)
    assert pace.share(0, GENESIS, 99, since, 10.0) is None, "one second is left of it"


def test_contributions_that_cannot_be_averaged_together_are_no_quorum() -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    first.contribute(b"a", inner_steps=100)
    second.contribute(b"b", inner_steps=100, index="2" * 32)
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
        replica.contribute(replica.presence.slot.encode(), inner_steps=12)
    assert pace.share(0, GENESIS, 10, since, 10.0) is None, "two steps of a tenth of a second are left"


def test_replica_that_hangs_in_a_step_is_slow() -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    clock.advance(1.0)
    assert pace.share(0, GENESIS, 10, since, 10.0) is None
    for replica in (first, second):
        replica.contribute(replica.presence.slot.encode(), inner_steps=12)
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
        replica.contribute(replica.presence.slot.encode(), inner_steps=12)
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
        replica.contribute(b"x" + replica.presence.slot.encode(), inner_steps=40)
    clock.advance(taken_s)
    assert pace.share(0, GENESIS, 5, since, 10.0, EarlierSteps(rounds=3, steps=30, plan=plan)) == share


def test_ending_earlier_rounds_early_leaves_this_rounds_length_unchanged() -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    for replica in (first, second):
        replica.contribute(b"x" + replica.presence.slot.encode(), inner_steps=40)
    clock.advance(2.4)
    assert pace.share(0, GENESIS, 5, since, 10.0, EarlierSteps(rounds=3, steps=3, plan=10)) is None
    clock.advance(2.0)
    assert pace.share(0, GENESIS, 5, since, 10.0, EarlierSteps(rounds=3, steps=3, plan=10)) == 8 / 40


def test_others_that_ended_early_tell_how_long_a_round_is_too() -> None:
    clock, (first, second, _), pace = seats()
    since = clock.now()
    for replica in (first, second):
        short = replace(draft(replica.presence.slot.encode()), inner_steps=10, share=0.25)
        replica.exchange.contribute(replica.exchange_id, short)
    clock.advance(20.0)
    assert pace.share(0, GENESIS, 5, since, 10.0) == 5 / 40


def test_an_exchange_that_begins_before_its_round_ends_leaves_less_to_take() -> None:
    """Of ten inner steps three come after it, and the record counts none of those."""
    clock, (first, second, _), pace = seats()
    since = clock.now()
    for replica in (first, second):
        replica.contribute(b"x" + replica.presence.slot.encode(), inner_steps=37)
    clock.advance(5.0)
    assert pace.share(0, GENESIS, 5, since, 10.0, EarlierSteps(rounds=3, steps=30, plan=7)) is None, (
        "two seconds are left"
    )


def test_a_contribution_is_read_once() -> None:
    clock, (first, second, third), pace = seats()
    since = clock.now()
    for replica in (first, second):
        replica.contribute(replica.presence.slot.encode(), inner_steps=2)
    clock.advance(1.0)
    reads: list[str] = []
    store = third.log.store
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
            self.asked += prefix in {keys.COMMITS, keys.contributions_prefix(0, 0)}
            raise Retryable("connection refused")
        return super().list(prefix, after)


def test_outage_between_inner_steps_does_not_stop_training() -> None:
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
    """An unreadable record is reported by the exchange that needs it, not raised between two steps."""
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
def test_new_replica_assumes_the_shortest_window(
    cap_s: float, taken_s: float, round_number: int, share: float | None
) -> None:
    """The others have timed rounds, and wait so long at least; in the first round all wait for the longest.

    The shortest is the floor of 1 s, or the cap where that is below it.
    """
    clock, replicas, pace = seats(grace=replace(GRACE, cap_s=cap_s))
    for number in range(round_number):
        for replica in replicas:
            replica.contribute(f"{number} {replica.presence.slot}".encode())
        for replica in replicas:
            replica.close(replica.decide())
    since = clock.now()
    for replica in replicas[:2]:
        replica.contribute(replica.presence.slot.encode(), inner_steps=10)
    clock.advance(taken_s)
    assert pace.share(round_number, replicas[2].base, 5, since, None) == share, "as long again is left"


def test_failed_round_that_ended_early_has_its_full_length_again() -> None:
    store = MemoryStore()
    island = Island(store, "a", minimum=1, sync_every=4)
    manager, failed = island.manager, []
    run = manager.session.averager.run

    def fail_once(*args: object, **more: object) -> object:
        if not failed:
            failed.append(manager.lifecycle.rounds.round.share)
            raise TimeoutError("the store was away")
        return run(*args, **more)  # type: ignore[arg-type]

    manager.session.averager.run = fail_once  # type: ignore[method-assign,assignment]
    with island.diloco:
        manager.catch_up(island.inner)
        island.step()
        manager.lifecycle.rounds.round.share = 0.25
        manager.lifecycle.course.end_round(lambda: manager.lifecycle.rounds.failed)
        assert (failed, manager.current_step()) == ([0.25], 0)
        while manager.current_step() == 0:
            manager.catch_up(island.inner)
            island.step()
    manager.shutdown()
    assert [(contribution.inner_steps, contribution.share) for contribution in contributions(store)] == [(4, 1.0)]


H = 6


def fast(store: MemoryStore, slot: str, seed: int, pace: Pace, rounds: int, grace_s: float) -> Island:
    island = Island(store, slot, sync_every=H, seed=seed, minimum=2, grace_s=grace_s)
    with island.diloco:
        while island.manager.current_step() < rounds:
            island.manager.catch_up(island.inner)
            pace.until(island.manager.current_step())
            island.step()
    island.manager.shutdown()
    return island


def slow(store: MemoryStore, pace: Pace, rounds: int) -> Island:
    """Takes a third of the others' inner steps in each round, and lets the others finish it before it takes more."""
    island = Island(store, "r-9", sync_every=H, seed=9, minimum=2)
    with island.diloco:
        island.manager.catch_up(island.inner)
        while (round_number := island.manager.current_step()) < rounds:
            for _ in range(H // 3):
                island.step()
            pace.allow(round_number + 1)
            while island.manager.current_step() == round_number:
                pace.wait_for_look()
                island.manager.catch_up(island.inner)  # until it sees that the others are done
    island.manager.shutdown()
    return island


def trained_together(rounds: int, grace_s: float) -> tuple[MemoryStore, list[Island]]:
    store, pace = MemoryStore(), Pace()
    islands = together(
        [
            lambda: fast(store, "r-0", 0, pace, rounds, grace_s),
            lambda: fast(store, "r-1", 1, pace, rounds, grace_s),
            lambda: slow(store, pace, rounds),
        ]
    )
    for number in range(rounds - 1):
        assert len({receipt.state for receipt in receipts(store, number).values()}) == 1
    assert len({island.originals["weight"].sum().item() for island in islands}) == 1
    return store, islands


def members(store: MemoryStore) -> Counter[str]:
    return Counter(share.slot for decision in decisions(store) for share in decision.members)


def test_a_replica_three_times_slower_is_in_nearly_every_record(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps take no time here, so the replica would seem to be nearly done.
    monkeypatch.setattr("skerry.runtime.training.early_end_policy._MARGIN", 0.0)
    store, _ = trained_together(10, grace_s=10.0)
    counted = members(store)
    assert counted["r-0"] == counted["r-1"] == 10
    assert counted["r-9"] >= 8
    shares = [share for decision in decisions(store) for share in decision.members if share.slot == "r-9"]
    assert [share.weight for share in shares] == pytest.approx([1 / 3] * len(shares))
    assert all(
        contribution.inner_steps == H // 3 for contribution in contributions(store) if contribution.slot == "r-9"
    )


def test_third_late_round_in_a_row_warns_and_late_work_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    store, go, closed = MemoryStore(), Pace(), Pace()

    def train(slot: str, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        island = Island(store, slot, sync_every=1, minimum=2, grace_s=0.0)
        with island.diloco:
            for number in range(4):
                island.manager.catch_up(island.inner)
                before(number)
                island.step()
                after(number + 1)
        island.manager.shutdown()

    def be_late(number: int) -> None:
        go.allow(number + 1)
        closed.until(number)

    together(
        [
            lambda: train("r-0", go.until, closed.allow),
            lambda: train("r-1", go.until, closed.allow),
            lambda: train("r-9", be_late, go.allow),
        ]
    )
    warnings = [record for record in caplog.records if getattr(record, "event", "") == "always_late"]
    assert members(store)["r-9"] == 0
    assert [record.fields["round"] for record in warnings] == [2]  # type: ignore[attr-defined]
    assert "sync_every" in warnings[0].fields["why"]  # type: ignore[attr-defined]
