"""A run that makes up for lost work goes on after its rounds, and all its replicas end with the same one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import Island, commits, contributions, manager_of, receipts, together
from tests.kit.protocol import policy, run_record, start_replica
from tests.support.clocks import FakeClock
from torchft.manager import WorldSizeMode

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Diverged, Invalid, RunFinished
from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.manager import ObjectStoreManager

SLOTS = ("r-0", "r-1")


def begun(rounds: int | None = 3, work: float | None = 6.0) -> MemoryStore:
    store = MemoryStore()
    record = run_record(SystemClock(), slots=SLOTS, rounds=rounds, min_replicas=1)
    store.create(keys.RUN, record.model_copy(update={"work": work, "start_window_s": 0.0}).to_bytes())
    return store


def to_the_end(island: Island) -> Island:
    with island.diloco:
        while True:
            island.manager.catch_up(island.inner)
            if island.manager.finished:
                break
            island.step()
    island.manager.shutdown()
    return island


@pytest.mark.parametrize(
    ("rounds", "due", "closed", "work", "over"),
    [
        (None, None, 99, 99.0, False),
        (3, None, 2, 9.0, False),
        (3, None, 3, 0.5, True),
        (3, 6.0, 3, 5.75, False),
        (3, 6.0, 4, 5.75, False),
        (3, 6.0, 4, 6.0, True),
        (3, 6.0, 2, 8.0, False),  # more replicas than expected do not end it before its rounds
        (None, 6.0, 9, 9.0, False),
    ],
)
def test_when_a_run_is_over(rounds: int | None, due: float | None, closed: int, work: float, over: bool) -> None:  # noqa: FBT001
    run = run_record(SystemClock(), rounds=rounds).model_copy(update={"work": due})
    assert run.is_over(closed, work) is over


def test_a_run_in_which_nothing_was_lost_ends_with_its_rounds() -> None:
    store = begun()
    islands = together([lambda s=slot: to_the_end(Island(store, s, minimum=2)) for slot in SLOTS])
    assert [commit.work for commit in commits(store)] == [2.0, 4.0, 6.0]
    assert [island.manager.current_step() for island in islands] == [3, 3]


def test_lost_work_is_made_up_and_a_returning_replica_ends_with_the_rest() -> None:
    store = begun()
    Island(store, "r-0", minimum=1, checkpoint_every=100).train(2)
    assert [commit.work for commit in commits(store)] == [1.0, 2.0]
    ended = together([lambda s=slot: to_the_end(Island(store, s, minimum=2, checkpoint_every=100)) for slot in SLOTS])
    # Three rounds of two replicas: two were closed by one, so two more are needed, and the run has four.
    assert [commit.work for commit in commits(store)] == [1.0, 2.0, 4.0, 6.0]
    assert [island.manager.current_step() for island in ended] == [4, 4]
    assert len({receipt.state for receipt in receipts(store, 3).values()}) == 1
    assert checkpoint.complete(store)[0] == 4, "the last round's checkpoint is written, whichever round is the last"
    for island in ended:
        with pytest.raises(RunFinished, match="all 4 rounds"):
            island.manager.start_quorum()


def test_replica_that_comes_after_the_end_trains_nothing() -> None:
    store = begun(rounds=2, work=3.0)
    to_the_end(Island(store, "r-0", minimum=1))
    assert [commit.work for commit in commits(store)] == [1.0, 2.0, 3.0]
    late = to_the_end(Island(store, "r-1", minimum=1))
    assert (late.steps, late.manager.current_step()) == (0, 3)
    assert len(contributions(store)) == 3


def test_the_smallest_exchange_of_a_round_counts() -> None:
    """Bursts of gradients: one of the two is decided by one replica alone."""
    store = begun()
    both = [manager_of(store, slot, minimum=1, grace_s=10.0) for slot in SLOTS]

    def one_round(manager: ObjectStoreManager, bursts: int) -> None:
        manager.start_quorum()
        for _ in range(bursts):
            manager.allreduce(torch.ones(3)).wait()
        if bursts == 1:
            manager.report_error(RuntimeError("the second gradient is not there"))
        manager.should_commit()

    together([lambda m=manager, b=bursts: one_round(m, b) for manager, bursts in zip(both, (2, 1), strict=True)])
    assert [commit.work for commit in commits(store)] == [1.0]
    assert commits(store)[0].participants == 1
    for manager in both:
        manager.shutdown()


def test_replica_that_joins_by_checkpoint_reads_the_work_from_the_log() -> None:
    store = begun(rounds=5, work=5.0)
    Island(store, "r-0", minimum=1).train(3)
    for number in (0, 1):
        store.delete(keys.checkpoint_manifest(number))
    late = Island(store, "r-1", minimum=1)
    with late.diloco:
        late.manager.catch_up(late.inner)
    assert (late.manager.current_step(), late.manager.lifecycle.position.work) == (3, 3.0)
    late.manager.shutdown()


def test_shares_that_are_no_binary_fractions_add_no_round() -> None:
    run = run_record(SystemClock(), rounds=19).model_copy(update={"work": 36.1})
    steps = [1.0, 0.9] * 19
    assert sum(steps) < 36.1, "the sum misses what it comes to by a last place"
    assert run.is_over(19, sum(steps))
    assert not run.is_over(19, 36.1 - 1 / 1_000_000)


def test_work_that_comes_late_is_trained_again() -> None:
    """One replica is late in round 0; the run takes one more round for it."""
    store = begun(rounds=4, work=8.0)
    late = Island(store, "r-0", minimum=2, sync_every=3)
    alone = Island(store, "r-1", minimum=1, sync_every=3, grace_s=0.0)
    with late.diloco:
        late.manager.catch_up(late.inner)
        late.step()
        late.step()
        alone.train(1)
        late.step()
    ended = together([lambda: to_the_end(late), lambda: to_the_end(Island(store, "r-1", minimum=2, sync_every=3))])
    assert [commit.work for commit in commits(store)] == [1.0, 3.0, 5.0, 7.0, 9.0]
    assert [island.manager.current_step() for island in ended] == [5, 5]


def test_round_closed_before_work_was_counted_is_followed() -> None:
    store, clock = MemoryStore(), FakeClock()
    replica = start_replica(store, clock, "r-0", policy(min_replicas=1))
    replica.contribute(b"x")
    decision = replica.decide()
    commit = replica.exchange.close(replica.exchange_id, [decision], work=1.0).record.model_dump(mode="json")
    old = {name: value for name, value in commit.items() if name != "work"}
    for record, fits in ((old, True), (commit | {"work": 2.0}, False), (old | {"participants": 2}, False)):
        store.delete(keys.commit(0))
        store.create(keys.commit(0), json.dumps(record).encode())
        if fits:
            assert replica.exchange.close(replica.exchange_id, [decision], work=1.0).record.work == 0.0
        else:
            with pytest.raises(Diverged, match="round 0 was committed differently"):
                replica.exchange.close(replica.exchange_id, [decision], work=1.0)


def test_spares_are_not_lost_work() -> None:
    with pytest.raises(Invalid, match=r"faults\.make_up.*leave out one of the two"):
        manager_of(begun(), "r-0", world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
