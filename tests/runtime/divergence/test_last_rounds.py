"""A difference in the last rounds of a run, which is compared and removed before a replica ends. With real managers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch
from tests.kit.divergence import HarmedIsland, flipped, harmed_islands, scaled, train_averaging_gradients
from tests.kit.events import logged_events, logged_levels
from tests.kit.managers import assert_same_parameters, begin_run, receipts, together, train_all, wait_for
from tests.kit.stores import HookedStore

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.model_from_checkpoint import trained_model
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from tests.kit.divergence import Harm
    from torch import nn

    from skerry.runtime.store import Store


def harmed_run(
    store: Store, count: int, harm: Harm, *, rounds_left: int = 1, harmed: int | None = None
) -> list[HarmedIsland]:
    """A run of six rounds that are all closed. One replica was harmed, and none has come to its last boundary.

    harmed: its number; None is the last.
    """
    harmed = count - 1 if harmed is None else harmed
    begin_run(store, [f"r-{i}" for i in range(count)], minimum=count, rounds=6)
    islands = harmed_islands(store, [harm if number == harmed else None for number in range(count)])
    islands[harmed].harm_at = 6 - rounds_left
    train_all(islands, 6, close=False)
    return islands


def end(islands: list[HarmedIsland]) -> None:
    """Each replica comes to its last boundary, in order."""
    for island in islands:
        island.join()
        assert island.manager.finished
    assert_same_parameters(islands)


@pytest.mark.parametrize(("harm", "name"), [(scaled(1.5), "diverged"), (flipped, "rounding_drift")])
@pytest.mark.parametrize("rounds_left", [1, 2, 3])
def test_difference_in_the_last_rounds_is_removed_before_the_end(
    events: pytest.LogCaptureFixture, rounds_left: int, harm: Harm, name: str
) -> None:
    end(harmed_run(MemoryStore(), 3, harm, rounds_left=rounds_left))
    assert [event["slot"] for event in logged_events(events, name)] == ["r-2"]


@pytest.mark.parametrize(("units", "name"), [(1, "rounding_drift"), (1 << 20, "diverged")])
def test_difference_in_the_last_round_of_ddp_is_measured(
    events: pytest.LogCaptureFixture, units: int, name: str
) -> None:
    store, rounds = MemoryStore(), HarmedIsland.harm_at + 1
    begin_run(store, "abc", minimum=3, rounds=rounds)
    harms = {"a": None, "b": None, "c": lambda tensor: flipped(tensor, units)}

    def wait_for_others() -> None:
        wait_for(lambda: len(receipts(store, rounds - 1)) == 2 and checkpoint.manifest(store, rounds))

    def train(slot: str) -> nn.Linear:
        before_end = wait_for_others if slot == "c" else lambda: None
        return train_averaging_gradients(store, slot, harms[slot], rounds, before_end)

    models = together([lambda slot=slot: train(slot) for slot in harms])
    assert all(torch.equal(model.weight, models[0].weight) for model in models)
    assert [event["slot"] for event in logged_events(events, name)] == ["c"]
    assert not logged_events(events, "diverged" if units == 1 else "rounding_drift")


def test_unmeasured_rounding_in_the_last_round_is_removed_without_an_alarm(events: pytest.LogCaptureFixture) -> None:
    """The upload of the last checkpoint fails, so that there is nothing to measure the difference against."""

    def deny(verb: str, key: str) -> None:
        if (verb, key) == ("create", keys.checkpoint_manifest(6)):
            raise Invalid("denied")

    end(harmed_run(HookedStore(deny), 3, flipped))
    (event,) = logged_events(events, "diverged")
    assert event["what"].endswith("not measured")
    assert "ERROR" not in {level for level, _ in logged_levels(events)}


def test_first_member_is_right_at_the_end_if_nothing_can_be_recomputed(events: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    islands = harmed_run(store, 2, scaled(1.5))
    for entry in list(store.list("payloads/")):
        store.delete(entry.key)
    end(islands)
    assert [event["slot"] for event in logged_events(events, "diverged")] == ["r-1"]


@pytest.mark.parametrize("rounds_left", [1, 3])
@pytest.mark.parametrize("count", [2, 3])
def test_author_of_the_last_checkpoint_writes_it_again_after_it_healed(count: int, rounds_left: int) -> None:
    """With three rounds left it knows that it differs when its turn comes, and writes no checkpoint then."""
    store = MemoryStore()
    islands = harmed_run(store, count, scaled(1.5), rounds_left=rounds_left, harmed=0)
    end(islands[::-1])
    for island in islands:
        island.manager.shutdown()
    manifest = checkpoint.manifest(store, 6)
    assert manifest is not None
    assert manifest.writer == "r-0"
    tensors = trained_model([cast("dict[str, object]", checkpoint.load(store, manifest))]).tensors()
    right = islands[1].originals
    assert sorted(tensors) == sorted(right)
    assert all(torch.equal(tensors[name], right[name]) for name in right)
