"""NVIDIA's own LocalCheckpointManager drives skerry's strategy: saves, losses and loads between gloo ranks.

Needs nvidia-resiliency-ext, which `scripts/test` puts into a folder of its own. The manager waits for a GPU; the tests
take that out.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.ranks import on_ranks

from skerry.runtime.errors import Corrupt
from skerry.runtime.replication import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    GroupWrapper,
    LazyCliqueReplicationStrategy,
)

if TYPE_CHECKING:
    from pathlib import Path

local_manager = pytest.importorskip("nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager")
core = pytest.importorskip("nvidia_resiliency_ext.checkpointing.async_ckpt.core")

pytestmark = pytest.mark.slow
BOTH_WAYS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
WORLDS = pytest.mark.parametrize("world", [2, 4, 8])


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def state_of(rank: int, iteration: int) -> BasicTensorAwareStateDict:
    weights = torch.arange(2000.0).view(40, 50) * (rank + 1) + iteration
    return BasicTensorAwareStateDict(
        {"weights": weights, "tied": [weights.t()], "column": weights[:, 3], "step": iteration}
    )


def manager_of(folder: Path, jump: int) -> Any:
    return local_manager.LocalCheckpointManager(folder, repl_strategy=LazyCliqueReplicationStrategy(jump, 2))


def save(manager: Any, state: Any, iteration: int, *, is_async: bool) -> None:
    request = manager.save(state, iteration, is_async=is_async)
    if is_async:
        queue = core.AsyncCallsQueue(persistent=False)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)


def assert_is(state: Any, rank: int, iteration: int) -> None:
    expected = state_of(rank, iteration)
    assert state.state_dict["step"] == iteration
    for tensor, other in zip(state.tensors, expected.tensors, strict=True):
        assert tensor.equal(other)


@WORLDS
@BOTH_WAYS
def test_manager_loads_what_lost_ranks_had_saved(tmp_path: Path, world: int, *, is_async: bool) -> None:
    jump = world // 2

    def work(rank: int) -> None:
        manager = manager_of(tmp_path, jump)
        for iteration in (3, 7):
            save(manager, state_of(rank, iteration), iteration, is_async=is_async)
        if rank < jump:  # half of the machines
            shutil.rmtree(tmp_path / str(rank), ignore_errors=True)  # the manager may still remove older saves
        dist.barrier()
        restarted = manager_of(tmp_path, jump)
        assert restarted.find_latest() == 7
        state, identity = restarted.load()
        assert identity == (7, rank, "")
        assert_is(state, rank, 7)

    on_ranks(world, work)


@BOTH_WAYS
def test_groups_of_megatrons_tests_load_what_three_ranks_lose(tmp_path: Path, *, is_async: bool) -> None:
    """The logic of Megatron-LM's test_replication.py: groups of unequal sizes, batches of them, broken ranks."""
    groups, broken = [[2, 6, 7], [3, 1], [5], [0, 4]], {6, 3, 4}

    def strategy_of() -> tuple[CliqueReplicationStrategy, GroupWrapper]:
        group = GroupWrapper.from_list_of_groups([dist.new_group(ranks) for ranks in groups])
        return CliqueReplicationStrategy(group, target_device="cpu"), group

    def work(rank: int) -> None:
        strategy, group = strategy_of()
        tensors = [torch.full((n + 1, rank + 1), float(rank)) for n in range(3)]
        for owner, batch in zip(group.ranks, group.all_gather_batch(tensors), strict=True):
            assert [tuple(tensor.shape) for tensor in batch] == [(n + 1, owner + 1) for n in range(3)]
            assert all(tensor.eq(owner).all() for tensor in batch)
        manager = local_manager.LocalCheckpointManager(tmp_path, repl_strategy=strategy)
        save(manager, state_of(rank, 1), 1, is_async=is_async)
        dist.barrier()
        if rank in broken:
            shutil.rmtree(tmp_path / str(rank))
        dist.barrier()
        restarted = local_manager.LocalCheckpointManager(tmp_path, repl_strategy=strategy_of()[0])
        assert restarted.find_latest() == 1
        state, identity = restarted.load()
        assert identity == (1, rank, "")
        assert_is(state, rank, 1)

    on_ranks(8, work, timeout_s=300.0)


def test_bit_that_flips_in_a_file_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        manager = manager_of(tmp_path, 1)
        save(manager, state_of(rank, 1), 1, is_async=False)
        if rank == 1:
            path = tmp_path / "1" / "iter_0000001_1_local.pt"
            state = torch.load(path, weights_only=False)
            state.state_dict["weights"].view(torch.int32)[2, 2] ^= 1
            torch.save(state, path)
        dist.barrier()
        restarted = manager_of(tmp_path, 1)
        restarted.find_latest()
        with pytest.raises(Corrupt, match=r"\(1, 1, ''\): the copy of rank 1 is damaged.*rank 0 was not provided"):
            restarted.load()

    on_ranks(4, work)
