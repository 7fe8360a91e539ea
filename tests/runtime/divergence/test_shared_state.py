"""The part of registered state that receipts cover, and what a replica keeps when it heals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.shared_state import SharedState, part_at

if TYPE_CHECKING:
    from collections.abc import Callable

PARAMETERS = {"0.weight", "0.bias", "1.weight", "1.bias"}


class Script:
    """A model with buffers, an optimizer that has stepped, and other values that scripts register."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.model(torch.randn(4, 2)).sum().backward()
        self.optimizer.step()
        self.epoch = seed

    def save(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.epoch}

    def load(self, state: object) -> None:
        assert isinstance(state, dict)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]

    def state(self, save: Callable[[], object] | None = None) -> SharedState:
        shared = SharedState()
        shared.register("default", self.load, save or self.save)
        return shared


def names(shared: SharedState) -> set[object]:
    return {path[-1] for path in shared.paths("registered")}


def test_parameters_and_optimizer_states_are_compared() -> None:
    assert Script().state().paths("registered") == {
        ("default", "optimizer"),
        *(("default", "model", name) for name in PARAMETERS),
    }


@pytest.mark.parametrize(
    "save",
    [
        lambda script: {name: value.cpu().clone() for name, value in script.model.state_dict().items()},
        lambda script: {name: parameter.data for name, parameter in script.model.named_parameters()},
        lambda script: dict(script.model.named_parameters()),
        lambda script: script.model.state_dict(keep_vars=True),
    ],
)
def test_parameters_are_found_in_copies_too(save: Callable[[Script], object]) -> None:
    script = Script()
    assert names(script.state(lambda: save(script))) == PARAMETERS


def test_compared_part_is_equal_although_buffers_differ() -> None:
    script = Script()
    shared = script.state()
    before = checkpoint.state_digest(shared.compared("registered"))
    saved = checkpoint.snapshot(shared.capture())
    assert isinstance(saved, dict)
    script.model(torch.randn(4, 2))
    script.epoch = 7
    assert checkpoint.state_digest(shared.compared("registered")) == before
    assert checkpoint.state_digest(part_at(saved, shared.paths("registered"))) == before
    with torch.no_grad():
        script.model[0].weight[0, 0] += 1  # type: ignore[index, operator]
    assert checkpoint.state_digest(shared.compared("registered")) != before


def test_healing_replica_keeps_its_own_buffers() -> None:
    damaged, sound = Script(1), Script(2)
    own = damaged.model[1].running_mean.clone()  # type: ignore[union-attr, operator]
    saved = checkpoint.snapshot(sound.state().capture())
    assert isinstance(saved, dict)
    shared = damaged.state()
    shared.restore(shared.with_own(saved))
    compared = [checkpoint.state_digest(script.state().compared("registered")) for script in (damaged, sound)]
    assert compared[0] == compared[1]
    assert torch.equal(damaged.model[1].running_mean, own)  # type: ignore[arg-type]
    assert damaged.epoch == 1
    shared.restore(saved)  # one that joins takes all
    assert damaged.epoch == 2
    assert torch.equal(damaged.model[1].running_mean, sound.model[1].running_mean)  # type: ignore[arg-type]
