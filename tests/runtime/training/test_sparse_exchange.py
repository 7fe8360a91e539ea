"""Sparse exchanges of real managers: the same bits, feedback over a restart, and what the codec is not for."""

from __future__ import annotations

import pytest
import torch
from tests.kit.managers import (
    Island,
    assert_same_parameters,
    begin_run,
    islands_of,
    manager_of,
    train_all,
    wait_for,
)

from skerry.runtime.errors import Invalid
from skerry.runtime.store.memory import MemoryStore


def left_of(island: Island) -> list[torch.Tensor]:
    """The rests of this replica's contributions, of all fragments."""
    return [
        tensor for _, _, tensors in island.manager.session.averager.feedback.state_dict()["left"] for tensor in tensors
    ]


def wait_until_left_is_saved(island: Island) -> None:
    wait_for(lambda: not island.manager.lifecycle.log_follower.private.is_saving)


def sparse_islands(store: MemoryStore, *slots: str) -> list[Island]:
    return islands_of(store, slots, fragments=2, features=80, lr=1e-3, codec="sparse", minimum=len(slots))


def test_stopped_replica_resumes_with_what_it_had_left() -> None:
    store = MemoryStore()
    begin_run(store, ["a", "b"], minimum=2)
    islands = sparse_islands(store, "a", "b")
    train_all(islands, rounds=3, close=False)
    for island in islands:
        island.join()
        wait_until_left_is_saved(island)  # while it is being written, the next one is skipped
    train_all(islands, rounds=4)
    before = [left_of(island) for island in islands]
    assert all(len(tensors) == 2 and all(tensor.any() for tensor in tensors) for tensors in before)
    restarted = sparse_islands(store, "a", "b")
    for island in restarted:
        island.join()
    assert all(
        torch.equal(mine, saved)
        for island, tensors in zip(restarted, before, strict=True)
        for mine, saved in zip(left_of(island), tensors, strict=True)
    )
    train_all(restarted, rounds=6)
    assert_same_parameters(restarted)


def test_replica_without_its_saved_state_begins_without_feedback() -> None:
    store = MemoryStore()
    begin_run(store, ["a"], minimum=1)
    [island] = sparse_islands(store, "a")
    island.train(4)
    wait_until_left_is_saved(island)
    for entry in list(store.list("private/")):
        store.delete(entry.key)
    [restarted] = sparse_islands(store, "a")
    restarted.join()
    assert not left_of(restarted)
    restarted.train(6)
    assert left_of(restarted)


def test_wrappers_without_pseudo_gradients_are_refused() -> None:
    manager = manager_of(MemoryStore(), "a", minimum=1, codec="sparse")
    manager.start_quorum()
    with pytest.raises(Invalid, match="pseudo-gradients of DiLoCo"):
        manager.allreduce(torch.ones(5000))


def test_reduce_scatter_of_sparse_contributions_is_refused() -> None:
    with pytest.raises(Invalid, match="set reduction to auto"):
        manager_of(MemoryStore(), "a", codec="sparse", reduction="reduce_scatter")
