"""Replicas that differ without a majority: each recomputes its state from checkpoint and log. With real managers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.kit.divergence import ROUNDS, HarmedIsland, flipped, harmed_islands, scaled
from tests.kit.events import logged_events
from tests.kit.fragments import outer_optimizers_in
from tests.kit.managers import assert_same_parameters, decisions, states, train_all, wait_for
from tests.kit.stores import HookedStore

from skerry.runtime.checkpointing.receipt_comparison import WINDOW
from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from skerry.runtime.store import Store


def train_scaled(
    store: Store, factors: Sequence[float], *, uploads_wait: Collection[object] = (), **settings: object
) -> None:
    """One replica for each factor that its shared parameters are multiplied with, after two rounds."""
    islands = harmed_islands(store, [None if factor == 1 else scaled(factor) for factor in factors], **settings)
    for island in islands:
        island.harm_at, island.uploads_wait = 2, uploads_wait
        island.inner.param_groups[0]["lr"] = 0.001
    train_all(islands, ROUNDS)
    assert_same_parameters(islands)


def assert_healed(events: pytest.LogCaptureFixture, store: MemoryStore, *slots: str) -> None:
    """These slots and no others are named and heal. From then on all have the same state; all always contribute."""
    for name in ("diverged", "healed"):
        assert sorted(str(event["slot"]) for event in logged_events(events, name)) == sorted(slots)
    last_healed = max(event["round"] for event in logged_events(events, "healed"))
    exchanges = decisions(store)
    assert all(len(states(store, number)) == 1 for number in range(last_healed, len(exchanges)))
    assert {len(decision.members) for decision in exchanges} == {len(exchanges[0].members)}
    assert not logged_events(events, "abstained")


@pytest.mark.parametrize(
    ("factors", "settings"),
    [
        ((1, 1.5), {}),
        ((1.5, 1), {}),
        ((1.5, 1), {"fragments": 2, "wrapper": {"fragment_sync_delay": 1}}),
        ((1, 1.5), {"checkpoint_every": 4}),
        ((1.25, 1, 1.5), {}),
        pytest.param((1.5, 1, 1, 1.5), {}, marks=pytest.mark.slow),
    ],
)
def test_without_a_majority_the_harmed_replicas_are_named_and_heal(
    events: pytest.LogCaptureFixture, factors: tuple[float, ...], settings: dict[str, object]
) -> None:
    store = MemoryStore()
    train_scaled(store, factors, **settings)
    assert_healed(events, store, *(f"r-{i}" for i, factor in enumerate(factors) if factor != 1))
    reports = logged_events(events, "receipts_differ")
    everyone = ",".join(f"r-{i}" for i in range(len(factors)))
    assert {(event["slots"], event["right"]) for event in reports} == {(everyone, "")}


@pytest.mark.parametrize("later", [WINDOW, pytest.param(2 * WINDOW, marks=pytest.mark.slow)])
def test_replica_heals_however_slow_the_checkpoint_is(events: pytest.LogCaptureFixture, later: int) -> None:
    """The uploads of two checkpoints end when a later round is closed."""

    waiting = set[int]()

    def delay_upload(verb: str, key: str) -> None:
        for number in (3, 4):
            if (verb, key) == ("create", keys.checkpoint_manifest(number)):
                waiting.add(number)
                wait_for(lambda n=number: MemoryStore.read(store, keys.commit(n - 1 + later)))
                waiting.remove(number)

    store = HookedStore(delay_upload)
    train_scaled(store, (1.5, 1), uploads_wait=waiting)
    assert_healed(events, store, "r-0")


def rounds_up(island: HarmedIsland) -> None:
    """The outer step of this replica's hardware rounds otherwise, in every round."""

    def round_up(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.copy_(flipped(parameter.data))

    for outer in outer_optimizers_in(island.diloco):
        outer.register_step_post_hook(round_up)


@pytest.mark.parametrize("unlike", [0, 1])
def test_two_unlike_machines_only_drift_and_always_contribute(events: pytest.LogCaptureFixture, unlike: int) -> None:
    """Each finds its state right when it recomputes it, so the first member counts as right."""
    store = MemoryStore()
    islands = harmed_islands(store, [None, None], lr=1e-5)
    rounds_up(islands[unlike])
    train_all(islands, ROUNDS)
    assert [event["slot"] for event in logged_events(events, "rounding_drift")] == ["r-1"]
    assert not any(logged_events(events, name) for name in ("diverged", "abstained", "round_failed"))
    assert {len(decision.members) for decision in decisions(store)} == {2}
