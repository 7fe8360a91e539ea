"""A run that makes up for lost work continues after its rounds, and all its replicas end with the same round."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import (
    Island,
    begin_run,
    commits,
    contributions,
    manager_of,
    states,
    together,
)
from tests.kit.protocol import policy, run_record, start_replica
from tests.support.clocks import FakeClock
from torchft.manager import WorldSizeMode

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.errors import Diverged, Invalid, RunFinished
from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.manager import ObjectStoreManager

SLOTS = ("r-0", "r-1")


def begun(rounds: int | None = 3, work: float = 6.0) -> MemoryStore:
    store = MemoryStore()
    begin_run(store, SLOTS, rounds=rounds, work=work, start_window_s=0.0)
    return store


def to_the_end(island: Island) -> Island:
    island.join()
    while not island.manager.finished:
        island.take(1)
    island.manager.shutdown()
    return island


@pytest.mark.parametrize(
    ("rounds", "due", "closed", "work", "over"),
    [
        (None, None, 99, 99.0, False),
        (3, None, 2, 9.0, False),
        (3, None, 3, 0.5, True),
        (3, 6.0, 3, 6.0, True),
        (3, 6.0, 3, 5.75, False),
        (3, 6.0, 4, 5.75, False),
        (3, 6.0, 4, 6.0, True),
        (3, 6.0, 2, 8.0, False),  # more replicas than expected do not end it before its rounds
        (None, 6.0, 9, 9.0, False),
        (19, 36.1, 19, sum([1.0, 0.9] * 19), True),  # the sum is below 36.1 by a last place
        (19, 36.1, 19, 36.1 - 1 / 1_000_000, False),
    ],
)
def test_run_is_over_when_its_rounds_are_closed_and_its_work_is_done(
    rounds: int | None,
    due: float | None,
    closed: int,
    work: float,
    over: bool,  # noqa: FBT001
) -> None:
    assert run_record(FakeClock(), rounds=rounds, work=due).is_over(closed, work) is over


def test_lost_work_is_made_up_and_a_returning_replica_trains_the_rest() -> None:
    store = begun()
    Island(store, "r-0", minimum=1, checkpoint_every=100).train(2)
    ended = together([lambda s=slot: to_the_end(Island(store, s, minimum=2, checkpoint_every=100)) for slot in SLOTS])
    # Three rounds of two replicas: two were closed by one, so two more are needed, and the run has four.
    assert [commit.work for commit in commits(store)] == [1.0, 2.0, 4.0, 6.0]
    assert len(states(store, 3)) == 1
    assert checkpoint.complete(store)[0] == 4, "the last round has a checkpoint, whichever round is the last"
    late = to_the_end(Island(store, "r-1", minimum=1))
    assert (late.steps, len(contributions(store))) == (0, 6), "a replica that comes after the end trains nothing"
    for island in (*ended, late):
        assert island.manager.current_step() == 4
        with pytest.raises(RunFinished, match="all 4 rounds"):
            island.manager.start_quorum()


def test_smallest_exchange_of_a_round_is_its_work() -> None:
    """Bursts of gradients: one of the two is decided by one replica alone."""
    store = begun()

    def one_round(manager: ObjectStoreManager, bursts: int) -> None:
        manager.start_quorum()
        for _ in range(bursts):
            manager.allreduce(torch.ones(3)).wait()
        if bursts == 1:
            manager.report_error(RuntimeError("the second gradient is missing"))
        manager.should_commit()

    both = [manager_of(store, slot, minimum=1) for slot in SLOTS]
    together([lambda m=manager, b=bursts: one_round(m, b) for manager, bursts in zip(both, (2, 1), strict=True)])
    assert [(commit.work, commit.participants) for commit in commits(store)] == [(1.0, 1)]


def test_replica_that_joins_by_checkpoint_reads_the_work_from_the_log() -> None:
    store = begun(rounds=5, work=5.0)
    Island(store, "r-0", minimum=1).train(3)
    for number in (0, 1):
        store.delete(keys.checkpoint_manifest(number))
    late = Island(store, "r-1", minimum=1)
    late.join()
    assert late.manager.current_step() == 3
    late.train(5)
    assert [commit.work for commit in commits(store)] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_round_closed_before_work_was_counted_is_followed() -> None:
    store = MemoryStore()
    replica = start_replica(store, FakeClock(), "r-0", policy(min_replicas=1))
    replica.contribute(b"x")
    decision = replica.decide()
    commit = replica.exchange.close(replica.exchange_id, [decision], work=1.0, averages=[]).record.model_dump(
        mode="json"
    )
    old = {name: value for name, value in commit.items() if name != "work"}
    for record, fits in ((old, True), (commit | {"work": 2.0}, False), (old | {"participants": 2}, False)):
        store.delete(keys.commit(0))
        store.create(keys.commit(0), json.dumps(record).encode())
        if fits:
            assert replica.exchange.close(replica.exchange_id, [decision], work=1.0, averages=[]).record.work == 0.0
        else:
            with pytest.raises(Diverged, match="round 0 was committed differently"):
                replica.exchange.close(replica.exchange_id, [decision], work=1.0, averages=[])


def test_spares_cannot_be_combined_with_make_up() -> None:
    with pytest.raises(Invalid, match=r"faults\.make_up.*leave out one of the two"):
        manager_of(begun(), "r-0", world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
