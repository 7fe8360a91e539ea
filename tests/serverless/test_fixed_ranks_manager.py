"""MockManager: torchft's wrappers over a fixed set of ranks, one thread for each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import contributions, together
from torch.distributed.distributed_c10d import ReduceOp
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.optim import OptimizerWrapper

from skerry.runtime.errors import Invalid
from skerry.runtime.store import open_store
from skerry.serverless import MockManager, ObjectStoreAllReduce
from skerry.serverless.replica_entrypoint import share_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Train = Callable[[MockManager, torch.nn.Sequential, torch.optim.Optimizer], None]

OPTIONS = [{}, {"should_quantize": True}, {"use_bucketization": True}, {"fragment_sync_delay": 1}]
SIZE = 96


def models_after(uri: str, train: Train) -> list[torch.nn.Sequential]:
    """The models of two ranks, which begin as the same model and have samples of their own."""

    def work(rank: int) -> torch.nn.Sequential:
        model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, 1))
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.05, generator=generator)
        inner = torch.optim.SGD(model.parameters(), lr=0.001)
        with ObjectStoreAllReduce(uri, rank, 2, poll_interval_s=0.05, timeout_s=300) as allreduce:
            train(MockManager(allreduce), model, inner)
        return model

    return together([lambda rank=rank: work(rank) for rank in range(2)])


def assert_same_parameters(first: torch.nn.Module, second: torch.nn.Module) -> None:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(parameter, other) for parameter, other in pairs)


def take_steps(manager: MockManager, model: torch.nn.Module, inner: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(manager.rank)
    for _ in range(steps):
        inner.zero_grad()
        model(torch.randn(8, SIZE, generator=generator)).square().mean().backward()
        inner.step()


@pytest.mark.parametrize("options", OPTIONS)
def test_diloco_trains_to_the_same_bits(tmp_path: Path, options: dict[str, object]) -> None:
    def train(manager: MockManager, model: torch.nn.Sequential, inner: torch.optim.Optimizer) -> None:
        outer = torch.optim.SGD(model.parameters(), lr=0.7)
        with DiLoCo(manager, list(model), inner, outer, sync_every=4, **options):  # type: ignore[arg-type, call-overload]
            take_steps(manager, model, inner, 8)
        assert manager.current_step() == 4  # two fragments take turns

    first, second = models_after(tmp_path.as_uri(), train)
    assert_same_parameters(first[1], second[1])  # the fragment of the last round
    records = contributions(open_store(tmp_path.as_uri()))
    assert len(records) == 2 * 4  # all parameters of a fragment travel together
    sizes = [sum(part.total_bytes for part in record.parts) for record in records]
    whole = SIZE * SIZE * 4
    assert (max(sizes) < whole / 3) == ("should_quantize" in options)


def test_average_is_that_of_one_process(tmp_path: Path) -> None:
    def average_parameters(manager: MockManager, model: torch.nn.Module, inner: torch.optim.Optimizer) -> None:
        with LocalSGD(manager, model, inner, sync_every=2):  # type: ignore[arg-type]
            take_steps(manager, model, inner, 2)

    def train_alone(manager: MockManager, model: torch.nn.Module, inner: torch.optim.Optimizer) -> None:
        take_steps(manager, model, inner, 2)

    averaged, _ = models_after(f"{tmp_path.as_uri()}/a", average_parameters)
    alone = models_after(f"{tmp_path.as_uri()}/b", train_alone)
    for parameter, *others in zip(averaged.parameters(), *(model.parameters() for model in alone), strict=True):
        torch.testing.assert_close(parameter, torch.stack([other.detach() for other in others]).mean(dim=0))


def test_optimizer_wrapper_commits_every_step(tmp_path: Path) -> None:
    def train(manager: MockManager, model: torch.nn.Sequential, inner: torch.optim.Optimizer) -> None:
        wrapper = OptimizerWrapper(manager, inner)  # type: ignore[arg-type]
        for _ in range(2):
            wrapper.zero_grad()
            model(torch.full((4, SIZE), 1.0 + manager.rank)).square().mean().backward()
            for parameter in model.parameters():
                assert manager.allreduce(parameter.grad).wait()  # type: ignore[arg-type]
            wrapper.step()
        assert manager.current_step() == 2

    assert_same_parameters(*models_after(tmp_path.as_uri(), train))


def test_tied_weights_begin_as_those_of_rank_0(tmp_path: Path) -> None:
    """They are larger than a unit of the average, so that one of their views is written before the other is read."""

    def train(manager: MockManager, model: torch.nn.Sequential, inner: torch.optim.Optimizer) -> None:
        del inner
        tied = torch.nn.Parameter(torch.full((1 << 20,), 1.0 + manager.rank))
        for number in range(2):
            model[number].register_parameter("tied", tied)
        share_weights(manager, model)
        assert tied.detach().unique().tolist() == [1.0]

    models_after(tmp_path.as_uri(), train)


def test_ranks_are_fixed(tmp_path: Path) -> None:
    manager = MockManager(ObjectStoreAllReduce(tmp_path.as_uri(), 1, 4))
    manager.start_quorum()
    assert (manager.num_participants, manager.num_participants(), manager.wait_quorum()) == (4, 4, 4)
    assert (manager.rank, manager.is_leader(), manager.current_step()) == (1, False, 0)


def test_failed_exchange_is_raised_by_should_commit(tmp_path: Path) -> None:
    with ObjectStoreAllReduce(tmp_path.as_uri(), 0, 2, poll_interval_s=0.05, timeout_s=0.2) as allreduce:
        manager = MockManager(allreduce)
        first = manager.allreduce(torch.ones(2))
        assert not first.wait()
        assert not manager.allreduce(torch.ones(2)).wait()
        for _ in range(2):
            with pytest.raises(TimeoutError, match="contributed=rank-0"):
                manager.should_commit()
        assert (manager.current_step(), allreduce.round_id) == (0, 0)


def test_replica_that_cannot_join_fails_in_should_commit(tmp_path: Path) -> None:
    manager = MockManager(ObjectStoreAllReduce(tmp_path.as_uri(), 0))
    assert not [work for work in [manager.allreduce(torch.ones(2)), manager.allreduce(torch.ones(2))] if work.wait()]
    with pytest.raises(Invalid, match="rank and world_size of"):
        manager.should_commit()


def test_callback_of_a_future_runs_when_it_is_waited_for(tmp_path: Path) -> None:
    with ObjectStoreAllReduce(tmp_path.as_uri(), 0, 1, poll_interval_s=0.05) as allreduce:
        manager = MockManager(allreduce)
        values: list[float] = []
        work = manager.allreduce(torch.tensor([2.0, 4.0]), reduce_op=ReduceOp.SUM)
        work.get_future().then(lambda done: values.extend(done.value().tolist()))
        assert not values
        assert work.wait()
        assert values == [2.0, 4.0]
        first = torch.ones(2)
        manager.allreduce(first)
        with pytest.raises(Invalid, match="share memory: tensor='00001' other='00000'"):
            manager.allreduce(first[1:])
        with pytest.raises(Invalid, match="cannot reduce with"):
            manager.allreduce(torch.ones(2), reduce_op=ReduceOp.PRODUCT)
