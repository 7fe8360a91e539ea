"""A difference in the last rounds of a run, which is compared and removed before a replica ends. With real managers."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import pytest
import torch
from tests.kit.divergence import (
    HarmedIsland,
    flipped,
    harmed_islands,
    refuse_after_load,
    scaled,
    train_averaging_gradients,
    wait_for_last_receipt,
)
from tests.kit.events import logged_events, logged_levels
from tests.kit.managers import (
    Island,
    assert_same_parameters,
    begin_run,
    join_at_head,
    manager_of,
    receipts,
    together,
    train_all,
    wait_for,
    wait_for_copies,
)
from tests.kit.stores import HookedStore
from torch import nn
from torchft.local_sgd import LocalSGD

from skerry.runtime import export
from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.model_from_checkpoint import trained_model
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.replication.local_and_peer_checkpoints import LocalCopies
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.kit.divergence import Harm

    from skerry.runtime.log.records import CheckpointManifest
    from skerry.runtime.store import Store


def harmed_run(
    store: Store, count: int, harm: Harm, *, rounds_left: int = 1, harmed: int | None = None, **settings: object
) -> list[HarmedIsland]:
    """A run of six rounds that are all closed. One replica was harmed, and none has come to its last boundary.

    harmed: its number; None is the last. settings: of all replicas.
    """
    harmed = count - 1 if harmed is None else harmed
    begin_run(store, [f"r-{i}" for i in range(count)], minimum=count, rounds=6)
    islands = harmed_islands(store, [harm if number == harmed else None for number in range(count)], **settings)
    islands[harmed].harm_at = 6 - rounds_left
    train_all(islands, 6, close=False)
    return islands


def end(islands: list[HarmedIsland]) -> None:
    """Each replica comes to its last boundary, in order."""
    for island in islands:
        island.join()
        assert island.manager.finished
    assert_same_parameters(islands)


def assert_last_checkpoint(store: Store, writer: str, right: Mapping[str, torch.Tensor]) -> CheckpointManifest:
    manifest = checkpoint.manifest(store, 6)
    assert manifest is not None
    assert manifest.writer == writer
    tensors = trained_model([cast("dict[str, object]", checkpoint.load(store, manifest))]).tensors()
    assert sorted(tensors) == sorted(right)
    assert all(torch.equal(tensors[name], right[name]) for name in right)
    return manifest


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
def test_author_of_the_last_checkpoint_writes_it_again_after_it_healed(
    tmp_path: Path, count: int, rounds_left: int
) -> None:
    """With three rounds left it knows that it differs when its turn comes, and writes no checkpoint then."""
    store = MemoryStore()
    islands = harmed_run(store, count, scaled(1.5), rounds_left=rounds_left, harmed=0)
    end(islands[::-1])
    for island in islands:
        island.manager.shutdown()
    assert_last_checkpoint(store, "r-0", islands[1].originals)
    # Its writer's receipt stays that of the wrong state, and speaks neither for it nor against it.
    assert not export.write(store, tmp_path / "model.safetensors").disputed
    late, followed = join_at_head(store)
    assert followed == 0
    assert_same_parameters([late, islands[1]])


@pytest.mark.parametrize("part", ["compared", "for_checkpoint"])
def test_healed_state_that_cannot_be_stored_is_reported_at_the_end(
    events: pytest.LogCaptureFixture, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    islands = harmed_run(MemoryStore(), 2, scaled(1.5), harmed=0)
    refuse_after_load(monkeypatch, islands[0], part)
    end(islands[::-1])
    (event,) = logged_events(events, "checkpoint_failed")
    assert (event["round"], event["error"]) == (6, "state cannot be stored")


@pytest.mark.parametrize(("verb", "left"), [("delete", [6, 5]), ("create", [5, 4])])
def test_store_that_refuses_the_healed_checkpoint_is_reported(
    events: pytest.LogCaptureFixture, verb: str, left: list[int]
) -> None:
    """A replica that cannot delete the wrong one leaves it."""
    calls: list[str] = []

    def deny(called: str, key: str) -> None:
        if key == keys.checkpoint_manifest(6) and called in {"create", "delete"}:
            calls.append(called)
            if called == verb and len(calls) > 1:
                raise Invalid("denied")

    store = HookedStore(deny)
    islands = harmed_run(store, 2, scaled(1.5), harmed=0)
    end(islands[::-1])
    for island in islands:
        island.manager.shutdown()
    assert calls == ["create", "delete", "create"][: 2 + (verb == "create")]
    (event,) = logged_events(events, "checkpoint_failed")
    assert (event["round"], event["error"]) == (6, "denied")
    assert checkpoint.complete(store)[:2] == left
    join_at_head(store)


@pytest.mark.parametrize("calls", [["create"], ["create", "delete", "create"]], ids=["before-its-upload", "in-between"])
@pytest.mark.parametrize("count", [2, 3])
def test_successor_of_a_killed_author_writes_the_last_checkpoint(count: int, calls: list[str]) -> None:
    """The receipt of its slot is that of the wrong state."""
    met: list[str] = []

    def die(called: str, key: str) -> None:
        if key == keys.checkpoint_manifest(6) and called in {"create", "delete"}:
            met.append(called)
            if met[: len(calls)] == calls and not revived:
                raise Invalid("killed")

    store, revived = HookedStore(die), list[bool]()
    islands = harmed_run(store, count, scaled(1.5), harmed=0)
    end(islands[::-1])
    for island in islands:
        island.manager.shutdown()
    assert checkpoint.complete(store)[0] == 5
    revived.append(True)
    again = Island(store, "r-0", minimum=1, seed=5)
    assert again.join() == 1
    again.manager.shutdown()
    assert_last_checkpoint(store, "r-0", islands[1].originals)
    late, followed = join_at_head(store)
    assert followed == 0
    assert_same_parameters([late, islands[1]])


@pytest.mark.parametrize("rounds_left", [1, 2])
def test_right_replica_that_starts_again_after_the_end_stays_right(rounds_left: int) -> None:
    """It has compared no round itself, so the newest checkpoint before the difference may be of a wrong state, too."""
    store = MemoryStore()
    right, harmed = harmed_run(store, 2, scaled(1.5), rounds_left=rounds_left, harmed=1)
    for island in (harmed, right):
        island.manager.shutdown()
    assert not torch.equal(harmed.originals["weight"], right.originals["weight"])
    again = Island(store, "r-0", minimum=1, seed=5)
    again.join()
    assert again.manager.finished
    assert_same_parameters([again, right])


def without_its_author() -> HookedStore:
    """A store in which the first upload of the last checkpoint fails."""
    denied: list[str] = []

    def deny(verb: str, key: str) -> None:
        if not denied and (verb, key) == ("create", keys.checkpoint_manifest(6)):
            denied.append(key)
            raise Invalid("denied")

    return HookedStore(deny)


def write_for_others(island: HarmedIsland) -> None:
    """After its last round, it writes the checkpoint because another replica cannot follow."""
    follower = island.manager.lifecycle.log_follower
    follower.rescue.wait_for_others = follower.recorder.save_now  # type: ignore[method-assign]


def test_wrong_checkpoint_that_was_written_for_others_is_replaced() -> None:
    store = without_its_author()
    islands = harmed_run(store, 3, scaled(1.5), harmed=1)
    write_for_others(islands[1])
    end([islands[0], islands[2], islands[1]])
    for island in islands:
        island.manager.shutdown()
    assert_last_checkpoint(store, "r-1", islands[0].originals)


def test_right_replica_leaves_what_it_wrote_for_others() -> None:
    """It recomputes its state because of another one's receipt, and finds what it had."""
    store = without_its_author()
    harmed, right = islands = harmed_run(store, 2, scaled(1.5), harmed=0)
    write_for_others(right)
    for island in islands:
        island.join()
        island.manager.shutdown()
    manifest = assert_last_checkpoint(store, "r-1", right.originals)
    assert manifest.healed is None
    late, _ = join_at_head(store)
    assert_same_parameters([late, right])
    assert not torch.equal(harmed.originals["weight"], right.originals["weight"])  # it came before the other's receipt


@pytest.mark.parametrize("harmed", [0, 1])
def test_copy_on_the_machine_of_a_state_that_healed_is_not_loaded(tmp_path: Path, harmed: int) -> None:
    """Nothing replaces that copy, and of two replicas no majority contradicts it. An older one is loaded."""
    store, copies = MemoryStore(), LocalCopies(folder=tmp_path, every=timedelta(hours=1))
    islands = harmed_run(store, 2, scaled(1.5), harmed=harmed, local_copies=copies)
    for island in islands:
        wait_for_copies(island.manager)  # else the last is skipped
    end(sorted(islands, key=lambda island: island is islands[harmed]))
    for island in islands:
        wait_for_copies(island.manager)
    for island in islands:
        island.manager.shutdown()
    again = Island(store, f"r-{harmed}", minimum=1, seed=5, local_copies=copies)
    assert again.join() == harmed  # the receipts that count report one state if its writer had healed
    assert_same_parameters([again, *islands])


class AveragingIsland:
    """A replica that averages its weights every second step, as LocalSGD does. Its receipts cover averages only."""

    def __init__(self, store: Store, number: int) -> None:
        torch.manual_seed(number)
        self.model = nn.Linear(4, 3)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        save, load = self.model.state_dict, self.model.load_state_dict
        self.manager = manager_of(store, f"r-{number}", state_dict=save, load_state_dict=load)
        self.wrapper = LocalSGD(self.manager, self.model, self.inner, sync_every=2)

    def train(self, rounds: int) -> None:
        with self.wrapper:
            while self.manager.current_step() < rounds:
                self.manager.catch_up(self.inner)
                wait_for_last_receipt(self.manager)
                self.inner.zero_grad()
                (self.model(torch.randn(8, 4)) ** 2).sum().backward()
                self.inner.step()

    def end(self) -> None:
        with self.wrapper:
            self.manager.catch_up(self.inner)
        assert self.manager.finished
        self.manager.shutdown()


@pytest.mark.parametrize("count", [2, 3])
def test_last_checkpoint_of_a_wrong_average_is_replaced(count: int) -> None:
    store = MemoryStore()
    begin_run(store, [f"r-{number}" for number in range(count)], minimum=count, rounds=6)
    author, *others = islands = [AveragingIsland(store, number) for number in range(count)]
    together([lambda island=island: island.train(6) for island in islands])
    rounds = author.manager.lifecycle.rounds
    take, facts = rounds.take_facts, rounds.take_facts()
    assert facts is not None
    wrong = iter([replace(facts, averages=("f" * 32,))])
    rounds.take_facts = lambda: next(wrong, None) or take()  # type: ignore[method-assign]
    with torch.no_grad():
        author.model.weight.mul_(1.5)
    for island in [*others, author]:
        island.end()
    right = others[0].model.state_dict()
    assert torch.equal(author.model.weight, right["weight"])
    assert_last_checkpoint(store, "r-0", right)
