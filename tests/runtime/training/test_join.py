"""Joining a run and reaching its head, with real managers. torchft's traps 6 and 13 are not inherited."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.kit.managers import Island, assert_same_parameters, exchange, manager_of, wait_for, wait_until_saved
from tests.kit.stores import HookedStore
from torch import nn

import skerry.runtime.manager
from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.errors import Diverged, Invalid
from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.mark.parametrize("checkpoint_every", [1, 1000])
def test_trap_6_joining_replica_is_at_the_head_before_its_first_step(store: MemoryStore, checkpoint_every: int) -> None:
    """With 1000, the log alone leads there."""
    survivor = Island(store, "a", minimum=1, checkpoint_every=checkpoint_every).train(5)
    late = Island(store, "b", minimum=1, seed=9)
    assert late.join() == 5 - checkpoint.complete(store)[0]
    assert (late.steps, late.manager.current_step()) == (0, 5)
    assert_same_parameters([survivor, late])
    assert all(torch.equal(tensor, survivor.originals[name]) for name, tensor in late.model.named_parameters())


def test_joining_replica_starts_from_the_shared_not_the_writers_parameters(store: MemoryStore) -> None:
    """Between fragments the writer's model holds its own progress; a copy of that is not ours to contribute."""
    survivor = Island(store, "a", minimum=1).train(2, close=False)
    with torch.no_grad():
        survivor.model.weight.add_(1.0)  # its own progress since the exchange
    survivor.manager.shutdown()
    late = Island(store, "b", minimum=1, seed=3)
    late.join()
    assert torch.equal(late.model.weight, late.originals["weight"])


def test_failed_join_is_tried_again() -> None:
    refused: list[str] = []

    def refuse_once(verb: str, key: str) -> None:
        if (verb, key) == ("list", keys.CHECKPOINTS) and not refused:
            refused.append(key)
            raise Invalid("the bucket was deleted")

    store = HookedStore(lambda *_: None)
    survivor = Island(store, "a", minimum=1).train(2)
    late = Island(store, "b", minimum=1, seed=3)
    store.hook = refuse_once
    with pytest.raises(Invalid, match="deleted"):
        late.join()
    late.join()
    assert_same_parameters([survivor, late])


@pytest.mark.parametrize("calls_catch_up", [True, False])
def test_fragments_are_enough_to_join_and_to_fall_behind(store: MemoryStore, *, calls_catch_up: bool) -> None:
    """No state of the model's own is registered: its parameters are taken from the fragments."""
    survivor = Island(store, "a", minimum=1, grace_s=0.1).train(2, close=False)
    survivor.join()
    wait_until_saved(survivor)  # the one of the next round is skipped while it is being written
    bare = Island(store, "b", minimum=1, state_dict=None, load_state_dict=None)
    with bare.diloco:
        if calls_catch_up:
            bare.manager.catch_up(bare.inner)
        else:
            bare.manager.disallow_state_dict_read()
        assert torch.equal(bare.model.weight, bare.originals["weight"])
        assert bare.manager.current_step() == 2
        survivor.train(4)
        for _ in range(2):
            bare.inner.step()  # a round behind: followed at its sync
        bare.inner.step()  # and at the boundary it continues from a checkpoint
        assert bare.manager.current_step() >= 3


def test_replica_behind_without_an_optimizer_jumps_by_checkpoint(store: MemoryStore) -> None:
    """As with DDP: no empty steps, so a joiner must reach the head by checkpoints to ever contribute."""

    def manager(slot: str, model: nn.Module) -> skerry.runtime.manager.ObjectStoreManager:
        own = {"state_dict": model.state_dict, "load_state_dict": model.load_state_dict}
        return manager_of(store, slot, minimum=1, grace_s=0.1, **own)

    a, b = manager("a", nn.Linear(2, 2)), manager("b", nn.Linear(2, 2))
    b.start_quorum()
    for number in (1, 2, 3):
        assert exchange(a, torch.ones(1))
        a.start_quorum()  # the boundary at which the round's checkpoint is taken; the next one waits for this
        wait_for(lambda n=number: n in checkpoint.complete(store))
    assert b.allreduce(torch.zeros(1)).wait()
    assert b.should_commit()  # it follows one round
    b.start_quorum()
    assert b.current_step() == 3


def test_initial_weights_are_shared_unless_init_sync_is_off(store: MemoryStore) -> None:
    a, b = (Island(store, slot, seed=ord(slot), minimum=1) for slot in "ab")
    c = Island(store, "c", seed=3, minimum=1, init_sync=False)
    for island in (a, b, c):
        island.join()
    assert torch.equal(a.model.weight, b.model.weight)
    assert not torch.equal(a.model.weight, c.model.weight)


def test_checkpoint_of_another_model_is_refused_by_name(store: MemoryStore) -> None:
    Island(store, "a", minimum=1).train(1)
    model = nn.Linear(4, 5)
    before = model.weight.clone()
    other = manager_of(store, "b", minimum=1, state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    with pytest.raises(Diverged, match=r"default\.(weight|bias) is torch.float32 .*, this model has .* \(5,"):
        other.disallow_state_dict_read()
    assert torch.equal(before, model.weight)


def test_catch_up_outside_a_wrapper_raises_invalid(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.runtime.training.catch_up_with_log._EMPTY_STEPS", 10)
    Island(store, "a", minimum=1, checkpoint_every=100).train(2)
    late = Island(store, "b", minimum=1)
    with pytest.raises(Invalid, match="inside `with DiLoCo"):
        late.manager.catch_up(late.inner)


def test_optimizer_that_needs_a_closure_is_refused(store: MemoryStore) -> None:
    island = Island(store, "a", minimum=1)
    with pytest.raises(Invalid, match="closure"):
        island.manager.catch_up(torch.optim.LBFGS(island.model.parameters()))


def test_gradients_survive_catching_up(store: MemoryStore) -> None:
    Island(store, "a", minimum=1, checkpoint_every=100).train(2)
    late = Island(store, "b", minimum=1)
    late.model(torch.ones(1, 4)).sum().backward()
    gradient = late.model.weight.grad
    assert late.join() == 2
    assert late.model.weight.grad is gradient


ALLOWED = {
    # An exported .pt is written for the user's own torch and never read.
    "export.py": {"torch.save"},
    # The ranks of one replica trust each other, as in torch's own all_gather_object (decision 0033).
    "replication/exchange_between_ranks.py": {"import pickle"},
}


def test_trap_13_runtime_cannot_load_a_pickle() -> None:
    root = Path(skerry.runtime.manager.__file__).parent
    for path in root.rglob("*.py"):
        code = path.read_text()
        refused = {"import pickle", "torch.load", "torch.save"} - ALLOWED.get(path.relative_to(root).as_posix(), set())
        assert not [call for call in refused if call in code], path
