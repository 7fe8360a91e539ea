"""Replicas that average gradients with torchft's own DDP: buffers may differ, a flipped bit in a parameter heals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.divergence import wait_for_last_receipt
from tests.kit.events import logged_events
from tests.kit.managers import manager_of, members, states, together
from torch import nn
from torchft.ddp import DistributedDataParallel
from torchft.optim import OptimizerWrapper

from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.store import Store

ROUNDS = 20
FLIPPED_AFTER = 4


class NormalizedReplica:
    """A model with BatchNorm under torchft's DDP; registers all of its state with plain functions, as scripts do."""

    def __init__(self, store: Store, number: int, replicas: int) -> None:
        torch.manual_seed(0)
        self.slot = f"r-{number}"
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        inner = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.manager = manager_of(
            store,
            self.slot,
            minimum=replicas,
            state_dict=lambda: {"model": self.model.state_dict(), "optimizer": inner.state_dict()},
            load_state_dict=lambda state: (
                self.model.load_state_dict(state["model"]),
                inner.load_state_dict(state["optimizer"]),
            ),
        )
        self.module = DistributedDataParallel(self.manager, self.model)
        self.optimizer = OptimizerWrapper(self.manager, inner)
        self.generator = torch.Generator().manual_seed(number)
        self.shift = float(number)
        self.batches = 0

    @property
    def norm(self) -> nn.BatchNorm1d:
        norm = self.model[1]
        assert isinstance(norm, nn.BatchNorm1d)
        return norm

    def train(self, flip: Callable[[], None] | None = None) -> None:
        while self.manager.current_step() < ROUNDS:
            if flip is not None and self.manager.current_step() == FLIPPED_AFTER:
                flip()
                flip = None
            self.optimizer.zero_grad()
            wait_for_last_receipt(self.manager)
            batch = torch.randn(16, 4, generator=self.generator) + self.shift
            (self.module(batch) ** 2).mean().backward()
            self.batches += 1
            self.optimizer.step()
        self.manager.shutdown()

    def flip_bit(self) -> None:
        """The highest bit of the exponent's lower half, in one element of one parameter."""
        with torch.no_grad():
            bits = self.model[0].weight.view(torch.int32)  # type: ignore[union-attr, operator]
            bits[0, 0] ^= 1 << 25


def replicas_of(store: Store, count: int) -> list[NormalizedReplica]:
    return [NormalizedReplica(store, number, count) for number in range(count)]


def train(replicas: Sequence[NormalizedReplica], flipped: int | None = None) -> None:
    together(
        [
            lambda replica=replica, number=number: replica.train(replica.flip_bit if number == flipped else None)
            for number, replica in enumerate(replicas)
        ]
    )


def assert_equal_parameters(replicas: Sequence[NormalizedReplica]) -> None:
    first, *others = [list(replica.model.parameters()) for replica in replicas]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("count", [2, 3])
def test_running_statistics_of_batchnorm_are_each_replicas_own(events: pytest.LogCaptureFixture, count: int) -> None:
    store = MemoryStore()
    replicas = replicas_of(store, count)
    train(replicas)
    assert_equal_parameters(replicas)
    names = ("receipts_differ", "rounding_drift", "diverged", "healed", "receipt_failed", "abstained")
    assert not any(logged_events(events, name) for name in names)
    assert all(len(states(store, number)) == 1 for number in range(ROUNDS - 1))
    assert states(store, 0) != {None}
    for replica in replicas:
        assert replica.norm.num_batches_tracked == replica.batches
    means = [replica.norm.running_mean for replica in replicas]
    assert all(not torch.equal(means[0], mean) for mean in means[1:])  # type: ignore[arg-type]


@pytest.mark.parametrize("flipped", [0, 1])
def test_one_of_two_replicas_with_a_flipped_bit_is_named_and_heals(
    events: pytest.LogCaptureFixture, flipped: int
) -> None:
    store = MemoryStore()
    replicas = replicas_of(store, 2)
    train(replicas, flipped)
    assert_equal_parameters(replicas)
    assert [event["slot"] for event in logged_events(events, "diverged")] == [f"r-{flipped}"]
    (healed,) = logged_events(events, "healed")
    assert healed["slot"] == f"r-{flipped}"
    assert all(len(states(store, number)) == 1 for number in range(healed["round"], ROUNDS - 1))
    assert len(members(store)[-1]) == 2
    assert not logged_events(events, "abstained")
    for replica in replicas:  # running statistics are not healed from another replica
        assert replica.norm.num_batches_tracked == replica.batches
