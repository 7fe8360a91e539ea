"""Builders for replicas that differ: receipts written as letters, and tiny models whose parameters are changed once."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from skerry.runtime.checkpointing.shared_state import SharedState
from skerry.runtime.errors import Invalid, RunFinished
from skerry.runtime.log import keys
from skerry.runtime.training.torchft_fragments import parameters_behind
from tests.kit import records
from tests.kit.managers import Island, manager_of, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import pytest

    from skerry.runtime.checkpointing.shared_state import State
    from skerry.runtime.log.records import Receipt
    from skerry.runtime.manager import ObjectStoreManager
    from skerry.runtime.store import Store

    Harm: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

COMMIT = "c" * 64
ROUNDS = 24
"""Enough rounds to notice a difference, measure it, heal and agree again."""


def receipt(
    slot: str, round_number: int = 0, *, state: str | None = "b", average: str = "a", **changes: object
) -> Receipt:
    """A receipt whose digests repeat one letter. changes: other values of any fields."""
    digest = None if state is None else state * 32
    return records.receipt(slot, round_number, averages=(average * 32,), state=digest, **changes)


def receipts(states: str, round_number: int = 0) -> list[Receipt]:
    """The receipts of r-0, r-1 and so on: one for each letter."""
    return [receipt(f"r-{i}", round_number, state=letter) for i, letter in enumerate(states)]


def write_receipt(store: Store, written: Receipt) -> None:
    assert store.create(keys.receipt(written.round, written.slot), written.to_bytes())


class HarmedIsland(Island):
    """A replica whose shared parameters are changed once, at the boundary after `harm_at` rounds.

    uploads_wait: the uploads that a test holds up at present.
    """

    harm: Harm | None = None
    harm_at = 3
    uploads_wait: Collection[object] = ()

    def step(self) -> None:
        wait_for_last_receipt(self.manager, self.uploads_wait)
        if self.harm is not None and self.manager.current_step() >= self.harm_at:
            for tensor in self.originals.values():
                tensor.copy_(self.harm(tensor))
            self.harm = None
        super().step()


def wait_for_last_receipt(manager: ObjectStoreManager, uploads_wait: Collection[object] = ()) -> None:
    """Wait until this replica's receipt of the last round exists, so that training does not outrun the background.

    uploads_wait: while there are any, receipts wait behind them, and training goes on.
    """
    closed, slot = manager.current_step(), manager.presence.slot
    if closed and slot in manager.lifecycle.members:
        wait_for(lambda: uploads_wait or manager.session.store.read(keys.receipt(closed - 1, slot)))


def scaled(factor: float) -> Harm:
    """Multiplies a tensor: far more than rounding."""
    return lambda tensor: factor * tensor


def flipped(values: torch.Tensor, units: int = 1) -> torch.Tensor:
    """Every element a few units in the last place further from zero."""
    return (values.view(torch.int32) + units).view(torch.float32)


def refuse_after_load(patch: pytest.MonkeyPatch, island: Island, part: str) -> None:
    """Once a checkpoint is loaded, this rank has what cannot be stored. part: the method of its state that says so."""
    restore = SharedState.restore

    def refuse(*_: object) -> dict[str, object]:
        raise Invalid("state cannot be stored")

    def restored(state: SharedState, loaded: State) -> None:
        restore(state, loaded)
        if parameters_behind(state.fragment_loads[0])[0] is next(island.model.parameters()):
            setattr(state, part, refuse)

    patch.setattr(SharedState, "restore", restored)


def harmed_islands(
    store: Store, harms: Sequence[Harm | None], *, minimum: int | None = None, **settings: object
) -> list[HarmedIsland]:
    """Replicas r-0, r-1 and so on, one for each harm. minimum: all of them unless given."""
    islands: list[HarmedIsland] = []
    for number, harm in enumerate(harms):
        island = HarmedIsland(store, f"r-{number}", seed=number, minimum=minimum or len(harms), **settings)  # type: ignore[arg-type]
        island.harm = harm
        islands.append(island)
    return islands


def train_averaging_gradients(
    store: Store,
    slot: str,
    harm: Harm | None = None,
    rounds: int = ROUNDS,
    before_end: Callable[[], object] | None = None,
) -> nn.Linear:
    """One replica of three that averages its gradients in every step, as DDP does. Returns its model.

    before_end: called after the last round of the run, before the replica comes to its last boundary.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def save() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = manager_of(store, slot, minimum=3, state_dict=save, load_state_dict=load)
    generator = torch.Generator().manual_seed(ord(slot))
    while manager.current_step() < rounds:
        manager.start_quorum()
        wait_for_last_receipt(manager)
        if harm is not None and manager.current_step() == HarmedIsland.harm_at:
            with torch.no_grad():
                model.weight.copy_(harm(model.weight))
            harm = None
        optimizer.zero_grad()
        (model(torch.randn(8, 4, generator=generator)) ** 2).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            manager.allreduce(parameter.grad).wait()
        if manager.should_commit():
            optimizer.step()
    if before_end is not None:
        before_end()
        with suppress(RunFinished):
            manager.start_quorum()
        assert manager.finished
    manager.shutdown()
    return model
