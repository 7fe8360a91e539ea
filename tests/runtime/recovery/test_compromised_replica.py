"""A compromised replica creates records of rounds to come: no replica believes or loads what they say."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.events import logged_events
from tests.kit.forger import CLOSED, UNKNOWN, Forger, take_over, train_pair
from tests.kit.managers import Island, assert_same_parameters, together

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.errors import Corrupt, Diverged
from skerry.runtime.export import load
from skerry.runtime.log import keys
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROUNDS = 5


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Log records of skerry, from level INFO up."""
    caplog.set_level(logging.INFO, logger="skerry")
    return caplog


@pytest.mark.parametrize("distance", [1, 2, 1000, keys.MAX_ROUND - CLOSED])
def test_commit_of_a_round_to_come_is_ignored_and_reported_once(
    events: pytest.LogCaptureFixture, distance: int
) -> None:
    store = MemoryStore()
    islands = train_pair(store)
    Forger(store).commit(CLOSED + distance)
    reached = min(ROUNDS, CLOSED + distance)
    together([lambda island=island: island.train(reached, close=False) for island in islands])
    assert {island.manager.current_step() for island in islands} == {reached}
    assert_same_parameters(islands)
    reports = [event for event in logged_events(events, "stray_records") if event["round"] == CLOSED]
    assert len(reports) <= 2 * len(islands), "each look of a replica has its own log"
    assert reports[0]["first"] == keys.commit(CLOSED + distance)
    assert "--quarantine" in reports[0]["next"]


def test_commit_to_come_with_names_of_no_slot_is_ignored() -> None:
    store = MemoryStore()
    islands = train_pair(store)
    Forger(store).close(CLOSED + 2, UNKNOWN, "a/b", "..")
    together([lambda island=island: island.train(CLOSED + 2, close=False) for island in islands])
    assert {island.manager.current_step() for island in islands} == {CLOSED + 2}
    assert_same_parameters(islands)


@pytest.mark.parametrize(
    "attack",
    [
        lambda forger: forger.save(ROUNDS, UNKNOWN),
        lambda forger: take_over(forger, ROUNDS),
        lambda forger: take_over(forger, ROUNDS, "m", "m"),
    ],
)
def test_replica_joins_without_a_checkpoint_that_no_contributions_back(
    events: pytest.LogCaptureFixture, attack: Callable[[Forger], object]
) -> None:
    store = MemoryStore()
    [a, _] = train_pair(store)
    sound = checkpoint.complete(store)[0]
    attack(Forger(store))
    newcomer = Island(store, "c", seed=9)
    with suppress(Diverged):  # by the forged decision of the open round
        newcomer.join()
    assert [event["round"] for event in logged_events(events, "checkpoint_loaded")][-1] == sound
    [failure] = logged_events(events, "checkpoint_failed")
    assert (failure["round"], "is stray" in failure["error"]) == (ROUNDS, True)
    assert newcomer.manager.current_step() == CLOSED
    assert_same_parameters([newcomer, a])


def test_replica_joins_past_a_checkpoint_of_another_log(events: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    [a, _] = train_pair(store)
    newest = checkpoint.complete(store)[0]
    for entry in store.list(keys.start_after(keys.CHECKPOINTS, newest)):
        store.delete(entry.key)
    Forger(store).save(newest, UNKNOWN)
    newcomer = Island(store, "c", seed=9)
    newcomer.join()
    assert "belongs to another log" in logged_events(events, "checkpoint_failed")[0]["error"]
    assert newcomer.manager.current_step() == CLOSED
    assert_same_parameters([newcomer, a])


def test_exported_model_is_of_a_round_that_replicas_have_closed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for island in train_pair(store):
        island.stop()
    newest = checkpoint.complete(store)[0]
    sound = load(store.uri)
    take_over(Forger(store), ROUNDS)
    with pytest.raises(Corrupt, match=rf"is stray: no contributions .* other checkpoints: {newest}"):
        load(store.uri)
    named = load(store.uri, round=newest)
    assert all(torch.equal(named[name], tensor) for name, tensor in sound.items())


def test_members_that_a_checkpoint_names_do_not_vote(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for island in train_pair(store):
        island.stop()
    newest = checkpoint.complete(store)[0]
    for entry in store.list(keys.start_after(keys.CHECKPOINTS, newest)):
        store.delete(entry.key)
    forger = Forger(store)
    forger.save(newest, forger.base(newest))
    for round_number in (None, newest):
        with pytest.raises(Corrupt, match="contradicts the receipts of its round"):
            load(store.uri, round_number)


def test_lost_commit_is_no_stray_record() -> None:
    store = MemoryStore()
    [a, _] = train_pair(store)
    store.delete(keys.commit(0))
    with pytest.raises(Diverged, match=r"the log has a gap: round 0 is not closed, .*--repair"):
        a.manager.session.log.find_head(0)
