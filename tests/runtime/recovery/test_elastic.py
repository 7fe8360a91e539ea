"""Replicas come and go while a run is under way."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from tests.kit.managers import Island, decisions, manager_of, receipts, together
from tests.kit.protocol import run_record
from torchft.manager import WorldSizeMode

from skerry.runtime.clock import SystemClock
from skerry.runtime.log.log import open_run
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.manager import ObjectStoreManager


def members_by_round(store: MemoryStore) -> dict[int, list[str]]:
    slots: dict[int, list[str]] = defaultdict(list)
    for decision in decisions(store):
        slots[decision.round] = [share.slot for share in decision.members]
    return slots


def test_an_unexpected_slot_joins_at_the_head_and_counts() -> None:
    store = MemoryStore()
    first = [Island(store, f"r-{i}", seed=i) for i in range(2)]
    together([lambda i=i: first[i].train(3, close=False) for i in range(2)])
    late = Island(store, "r-7", seed=7)
    with late.diloco:
        late.manager.catch_up(late.inner)
        assert late.manager.current_step() == 3
    assert late.steps == 0, "it was at the head before its first inner step"
    together([lambda island=island: island.train(6) for island in [*first, late]])
    assert members_by_round(store)[2] == ["r-0", "r-1"]
    assert members_by_round(store)[5] == ["r-0", "r-1", "r-7"]
    assert len({receipt.state for receipt in receipts(store, 5).values()}) == 1


def test_replicas_do_not_wait_for_a_replica_that_left() -> None:
    store = MemoryStore()
    clock = SystemClock()
    open_run(store, run_record(clock, slots=("r-0", "r-1", "r-2"), min_replicas=2))  # round 0 waits for all three
    islands = [Island(store, f"r-{i}", seed=i, grace_s=60.0) for i in range(3)]
    together([lambda i=i: islands[i].train(2, close=False) for i in range(3)])
    islands[2].manager.request_stop()
    islands[2].manager.shutdown()
    together([lambda i=i: islands[i].train(4) for i in range(2)])  # `together` times out before the grace window ends
    assert members_by_round(store) == {
        0: ["r-0", "r-1", "r-2"],
        1: ["r-0", "r-1", "r-2"],
        2: ["r-0", "r-1"],
        3: ["r-0", "r-1"],
    }


def test_fixed_spares_receive_the_average_of_the_first_slots() -> None:
    store = MemoryStore()
    managers = [manager_of(store, f"r-{i}", world_size_mode=WorldSizeMode.FIXED_WITH_SPARES) for i in range(3)]
    all_train = threading.Barrier(3)

    def exchange(manager: ObjectStoreManager, value: float) -> torch.Tensor:
        tensor = torch.full((3,), value)
        manager.start_quorum()
        all_train.wait(30.0)  # a round does not wait for replicas that have not begun it
        manager.allreduce(tensor).wait()
        assert manager.should_commit()
        return tensor

    # What torchft's manager gives two participants and one spare: the sum of two, divided by two, on all three.
    averages = together([lambda i=i: exchange(managers[i], float(10**i)) for i in range(3)])
    assert [tensor.tolist() for tensor in averages] == [[5.5] * 3] * 3
    assert [manager.participating_rank() for manager in managers] == [0, 1, None]
    assert [manager.num_participants() for manager in managers] == [2, 2, 2]
    for manager in managers:
        manager.shutdown()
