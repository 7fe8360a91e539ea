"""A slow replica ends its round early when it would miss the grace window, and only then."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.kit.events import logged_events
from tests.kit.managers import (
    Island,
    Pace,
    assert_same_parameters,
    contributions,
    islands_of,
    members,
    states,
    together,
    train_all,
    weights,
)
from tests.kit.protocol import contribution, draft, policy, start_replica
from tests.kit.stores import HookedStore
from tests.support.clocks import FakeClock, StandingClock
from torchft.manager import WorldSizeMode

from skerry.runtime.errors import Retryable
from skerry.runtime.log import keys
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.training.early_round_end_policy import EarlierSteps, EarlyEndPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A grace window of 5 s: half of a round of 10 s.
GRACE = Grace(floor_s=1.0, cap_s=10.0, share=0.5)


class Straggler:
    """r-2 of three replicas looks at its round, with a quorum of two."""

    def __init__(self, grace: Grace = GRACE) -> None:
        self.clock, self.reads = FakeClock(), list[str]()
        store = HookedStore(lambda verb, key: self.reads.append(key) if verb == "read" else None)
        self.replicas = [start_replica(store, self.clock, f"r-{i}") for i in range(3)]
        self.policy = EarlyEndPolicy(
            log=self.replicas[2].log, clock=self.clock, policy=policy(min_replicas=2, grace=grace), slot="r-2"
        )
        self.since = self.clock.now()

    def contribute(self, *inner_steps: int, share: float = 1.0, indexes: str = "111") -> None:
        """r-0, r-1 and r-2 contribute so many inner steps. indexes: the tensors of each."""
        for replica, steps, index in zip(self.replicas, inner_steps, indexes, strict=False):
            content = draft(replica.presence.slot.encode(), index=index * 32)
            replica.exchange.contribute(replica.exchange_id, replace(content, inner_steps=steps, share=share))

    def close_round(self) -> None:
        self.contribute(1, 1, 1)
        for replica in self.replicas:
            replica.close(replica.decide())
        self.since = self.clock.now()

    def share(
        self, steps: int, round_seconds: float | None = 10.0, earlier: EarlierSteps | None = None
    ) -> float | None:
        me = self.replicas[2]
        return self.policy.share(me.round, me.base, steps, self.since, round_seconds, earlier or EarlierSteps())


@pytest.mark.parametrize(
    ("others", "taken_s", "steps", "share"),
    [
        pytest.param((1, 1), 10.0, 1, None, id="all steps taken"),
        pytest.param((1, 1), 10.0, 0, None, id="no step taken"),
        pytest.param((10, 10), 2.4, 5, None, id="five more steps take less than half of the window"),
        pytest.param((10, 10), 2.6, 5, 0.5, id="five more steps take more than half of the window"),
        pytest.param((10,), 100.0, 1, None, id="no quorum waits"),
        pytest.param((10, 10, 10), 100.0, 1, None, id="it has contributed"),
        pytest.param((300, 100), 99.0, 99, None, id="the fewest steps are a round"),
    ],
)
def test_replica_that_would_miss_the_window_stops_with_its_steps(
    others: Sequence[int], taken_s: float, steps: int, share: float | None
) -> None:
    straggler = Straggler()
    straggler.contribute(*others)
    straggler.clock.advance(taken_s)
    assert straggler.share(steps) == share


@pytest.mark.parametrize(
    ("others", "earlier", "taken_s", "share"),
    [
        pytest.param(40, EarlierSteps(rounds=3, steps=30, plan=10), 2.4, None, id="in time"),
        pytest.param(40, EarlierSteps(rounds=3, steps=30, plan=10), 2.6, 35 / 40, id="late"),
        pytest.param(40, EarlierSteps(rounds=3, steps=30), 2.4, None, id="in time, before a plan is known"),
        pytest.param(40, EarlierSteps(rounds=3, steps=30), 2.6, 35 / 40, id="late, before a plan is known"),
        pytest.param(40, EarlierSteps(rounds=3, steps=3, plan=10), 2.4, None, id="in time after rounds ended early"),
        pytest.param(40, EarlierSteps(rounds=3, steps=3, plan=10), 4.4, 8 / 40, id="late after rounds ended early"),
        pytest.param(37, EarlierSteps(rounds=3, steps=30, plan=7), 5.0, None, id="three steps come after the exchange"),
    ],
)
def test_with_fragments_the_time_left_is_of_this_round_alone(
    others: int, earlier: EarlierSteps, taken_s: float, share: float | None
) -> None:
    """The others have taken ten inner steps in each of four rounds; this replica has taken five in this one."""
    straggler = Straggler()
    straggler.contribute(others, others)
    straggler.clock.advance(taken_s)
    assert straggler.share(5, earlier=earlier) == share


def test_contributions_of_different_tensors_are_no_quorum() -> None:
    straggler = Straggler()
    straggler.contribute(100, 100, indexes="12")
    straggler.clock.advance(10.0)
    assert straggler.share(1) is None


def test_rounds_ended_early_by_others_tell_the_length_of_a_round() -> None:
    straggler = Straggler()
    straggler.contribute(10, 10, share=0.25)
    straggler.clock.advance(20.0)
    assert straggler.share(5) == 5 / 40


@pytest.mark.parametrize(
    ("first_look_s", "steps", "then_s", "share"),
    [
        pytest.param(100.0, 1, 0.9, None, id="slow first step: it may have compiled its model"),
        pytest.param(1.0, 10, 5.0, 10 / 12, id="hangs in a step"),
    ],
)
def test_time_of_a_step_is_that_of_the_last_ones(
    first_look_s: float, steps: int, then_s: float, share: float | None
) -> None:
    straggler = Straggler()
    straggler.clock.advance(first_look_s)
    assert straggler.share(steps) is None
    straggler.clock.advance(then_s)
    straggler.contribute(12, 12)
    assert straggler.share(10) == share


def test_time_of_a_failed_attempt_is_not_counted() -> None:
    straggler = Straggler()
    straggler.clock.advance(100.0)
    assert straggler.share(10) is None
    assert straggler.share(1) is None, "its steps are thrown away"
    straggler.clock.advance(0.9)
    straggler.contribute(12, 12)
    assert straggler.share(10) is None


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
    straggler = Straggler(replace(GRACE, cap_s=cap_s))
    for _ in range(round_number):
        straggler.close_round()
    straggler.contribute(10, 10)
    straggler.clock.advance(taken_s)
    assert straggler.share(5, round_seconds=None) == share, "as long again is left"


def test_contribution_is_read_once() -> None:
    straggler = Straggler()
    straggler.contribute(2, 2)
    straggler.clock.advance(1.0)
    straggler.reads.clear()
    for _ in range(3):
        straggler.share(1)
    assert len(straggler.reads) == 2


# Real managers.


def test_outage_between_inner_steps_does_not_stop_training() -> None:
    refused: list[str] = []
    is_away = False

    def answer(verb: str, key: str) -> None:
        if is_away and verb == "list":
            refused.extend([key] if key in {keys.COMMITS, keys.contributions_prefix(0, 0)} else [])
            raise Retryable("connection refused")

    store = HookedStore(answer)
    clock = StandingClock()
    island = Island(store, "a", sync_every=200, minimum=1, clock=clock)
    island.join()
    is_away = True
    while len(refused) < 3:
        clock.advance(10.0)  # until the next look is due
        island.take(1)
    assert island.steps < 200
    is_away = False
    assert island.train(1).steps == 200


def test_damaged_record_between_steps_is_not_raised() -> None:
    """It is reported by the exchange that needs it."""
    store = MemoryStore()
    island = Island(store, "a", sync_every=200, minimum=1, heartbeat_interval=timedelta(milliseconds=1))
    island.join()
    store.create(keys.contribution(0, 0, "b"), b"{")
    island.take(50)
    assert (island.manager.current_step(), island.manager.inner_steps) == (0, 50)


@pytest.mark.parametrize("fragments", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_replica_three_times_slower_is_in_nearly_every_record(
    fragments: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A third of the others' inner steps in every round, so a third of their weight in every record."""
    # Steps take no time here, so the replica would seem to be nearly done.
    monkeypatch.setattr("skerry.runtime.training.early_round_end_policy._MARGIN", 0.0)
    store, pace, rounds, sync_every = MemoryStore(), Pace(), 6, 6
    settings = {"fragments": fragments, "sync_every": sync_every, "lr": 0.01}
    first, second, straggler = islands = [
        Island(store, slot, seed=ord(slot), **settings)  # type: ignore[arg-type]
        for slot in "abz"
    ]

    def train(island: Island) -> None:
        for number in range(rounds):
            island.join()
            pace.until(number)
            island.train(number + 1, close=False)

    def train_slowly() -> None:
        straggler.join()
        while (number := straggler.manager.current_step()) < rounds:
            with straggler.diloco:
                for _ in range(sync_every // 3):
                    straggler.step()
            pace.allow(number + 1)
            while straggler.manager.current_step() == number:
                pace.wait_for_look()
                straggler.join()  # until it sees that the others have contributed

    together([lambda: train(first), lambda: train(second), train_slowly])
    for island in islands:
        island.manager.shutdown()
    slow_weights = [weight["z"] for weight in weights(store) if "z" in weight]
    assert len(slow_weights) >= rounds - 2
    assert slow_weights == pytest.approx([1 / 3] * len(slow_weights))
    slow_contributions = [contribution for contribution in contributions(store) if contribution.slot == "z"]
    assert [contribution.inner_steps for contribution in slow_contributions] == [
        min(contribution.round + 1, fragments) * sync_every // 3 for contribution in slow_contributions
    ]
    assert all({"a", "b"} <= weight.keys() for weight in weights(store))
    assert all(len(states(store, number)) == 1 for number in range(rounds))
    assert_same_parameters(islands)
    (warning,) = logged_events(caplog, "round_ended_early")  # caplog has warnings only
    assert warning["round"] >= 1, "in its first round it may have begun later than the others"
    assert "put evaluation, saving, sampling and profiling within replica.evaluating()" in warning["why"]


def test_third_late_round_in_a_row_warns_and_late_work_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    store, go, closed = MemoryStore(), Pace(), Pace()

    def train(slot: str, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        island = Island(store, slot, sync_every=1, minimum=2, grace_s=0.0)
        for number in range(4):
            island.join()
            before(number)
            with island.diloco:
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
    assert Counter(slot for slots in members(store) for slot in slots)["r-9"] == 0
    (warning,) = logged_events(caplog, "always_late")
    assert warning["round"] == 2
    assert "raise faults.grace" in warning["why"]
    assert "sync_every" not in warning["why"], "a round of fewer steps is as late, in proportion"


def test_late_upload_lengthens_the_time_that_the_next_one_is_given() -> None:
    uploading, closed = threading.Event(), threading.Event()

    def upload_until_the_round_is_closed(verb: str, key: str) -> None:
        if verb == "create" and key.startswith(keys.PAYLOADS) and "/r-9/" in key:
            uploading.set()
            assert closed.wait(300)

    store = HookedStore(upload_until_the_round_is_closed)
    early, late = (Island(store, slot, sync_every=1, minimum=1, grace_s=0.0) for slot in ("r-0", "r-9"))

    def close_first() -> None:
        assert uploading.wait(300)
        early.train(1)
        closed.set()

    together([close_first, lambda: late.train(1)])
    assert members(store) == [["r-0"]]
    assert late.manager.lifecycle.rounds.upload_s > 0.0


def test_spare_replica_is_not_reported_as_late(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    spares = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "sync_every": 1, "minimum": 2, "grace_s": 0.1}
    train_all(islands_of(store, ("r-0", "r-1", "r-2"), **spares), rounds=5)
    assert all(len(slots) == 2 for slots in members(store))
    assert not logged_events(caplog, "always_late")


def test_discounted_contribution_of_an_earlier_version_does_not_wait() -> None:
    straggler = Straggler()
    me = straggler.replicas[2]
    for slot in ("r-0", "r-1"):
        late = contribution(slot, run=me.log.run.nonce, base=me.base, inner_steps=10, discount=0.5)
        me.log.create(keys.contribution(0, 0, slot), late)
    straggler.clock.advance(10.0)
    assert straggler.share(1) is None
