"""Replicas come and go while a run is under way."""

from __future__ import annotations

import threading

import torch
from tests.kit.managers import (
    Island,
    begin_run,
    exchange,
    islands_of,
    manager_of,
    members,
    states,
    together,
    train_all,
)
from torchft.manager import WorldSizeMode

from skerry.runtime.store.memory import MemoryStore

SLOTS = ["r-0", "r-1", "r-2"]


def test_unexpected_slot_joins_at_the_head_and_counts() -> None:
    store = MemoryStore()
    first = islands_of(store, SLOTS[:2])
    train_all(first, 3, close=False)
    late = Island(store, "r-7", seed=7)
    late.join()
    assert (late.manager.current_step(), late.steps) == (3, 0), "it is at the head before its first inner step"
    train_all([*first, late], 6)
    assert members(store)[2] == SLOTS[:2]
    assert members(store)[5] == [*SLOTS[:2], "r-7"]
    assert len(states(store, 5)) == 1


def test_replicas_do_not_wait_for_a_replica_that_left() -> None:
    store = MemoryStore()
    begin_run(store, SLOTS, minimum=2)
    islands = islands_of(store, SLOTS, grace_s=60.0)
    train_all(islands, 2, close=False)
    islands[2].stop()
    train_all(islands[:2], 4)  # times out before the grace window ends
    assert members(store) == [SLOTS, SLOTS, SLOTS[:2], SLOTS[:2]]


def test_fixed_spares_receive_the_average_of_the_first_slots() -> None:
    store = MemoryStore()
    managers = [manager_of(store, slot, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES) for slot in SLOTS]
    all_train = threading.Barrier(3)
    tensors = [torch.full((3,), float(10**i)) for i in range(3)]

    def train(number: int) -> bool:
        managers[number].start_quorum()
        all_train.wait(300)  # a round does not wait for replicas that have not begun it
        return exchange(managers[number], tensors[number])

    # What torchft's manager gives two participants and one spare: the sum of two, divided by two, on all three.
    assert together([lambda i=i: train(i) for i in range(3)]) == [True] * 3
    assert [tensor.tolist() for tensor in tensors] == [[5.5] * 3] * 3
    assert [manager.participating_rank() for manager in managers] == [0, 1, None]
    assert [manager.num_participants() for manager in managers] == [2, 2, 2]
