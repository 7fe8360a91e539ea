"""Checkpoints that are not what the receipts of their round say: never loaded, whoever wrote them."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch
from tests.runtime.test_alarm import COMMIT, receipt, receipts
from tests.runtime.test_divergence import Harmed, synchronous, told
from tests.support.managers import Island, together
from tests.support.managers import receipts as receipts_by_slot

from skerry.runtime import checkpoint, keys
from skerry.runtime.alarm import Evidence, evidence_of
from skerry.runtime.errors import Corrupt
from skerry.runtime.garbage import Retention
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.store import Span


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="skerry")
    return caplog


# The judgement.


@pytest.mark.parametrize(
    ("told_by_members", "allowed"),
    [("b", "b"), ("bbd", "b"), ("bd", "bd"), ("bbdd", "bd"), ("bde", "bde"), ("bbde", "bde"), ("bbbde", "b"), ("", "")],
)
def test_most_of_those_who_tell_say_what_may_be_loaded_and_where_nobody_has_most_all_may(
    told_by_members: str, allowed: str
) -> None:
    found = evidence_of(receipts(told_by_members), [f"r-{i}" for i in range(9)], COMMIT)
    assert found.states == tuple(one * 32 for one in allowed)
    assert found.scope == ("fragments" if allowed else "average")


def test_who_was_no_member_of_the_round_does_not_vote() -> None:
    strangers = [receipt(f"s-{i}", state="f") for i in range(9)]
    found = evidence_of([*receipts("bbd"), *strangers], ["r-0", "r-1", "r-2"], COMMIT)
    assert found.states == ("b" * 32,)


def test_receipts_of_another_commit_and_those_of_the_average_alone_tell_nothing() -> None:
    members = ["r-0", "r-1"]
    assert evidence_of([receipt("r-0", commit="d" * 64)], members, COMMIT) == Evidence()
    assert evidence_of([receipt("r-0", state=None, scope="average")], members, COMMIT) == Evidence()


def test_what_nobody_tells_of_is_allowed_and_else_only_what_is_told() -> None:
    Evidence().check(3, "b" * 32)
    Evidence(scope="fragments", states=("b" * 32, "d" * 32)).check(3, "d" * 32)
    with pytest.raises(
        Corrupt, match=r"checkpoints/00000003/manifest.json is not the state .* delete receipts/00000002/"
    ):
        Evidence(scope="fragments", states=("b" * 32,)).check(3, "d" * 32)


# Among real managers.


class Counting(MemoryStore):
    """Counts the bytes that are read of each checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.read_of: Counter[int] = Counter()

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        found = super().read(key, span, into)
        if key.startswith(keys.CHECKPOINTS) and not key.endswith(keys.MANIFEST) and found is not None:
            self.read_of[keys.round_of(key)] += len(found)
        return found


def replace(store: MemoryStore, round_number: int, writer: str | None = None) -> None:
    """Another state in the place of a checkpoint's: every digest of its own is right, and it stands on this log."""
    manifest = checkpoint.manifest(store, round_number)
    assert manifest is not None
    tree, tensors = checkpoint.flatten(checkpoint.load(store, manifest))
    other = checkpoint.restore(tree, [1.5 * one if one.is_floating_point() else one for one in tensors])
    for entry in store.list(keys.since(keys.CHECKPOINTS, round_number)):
        store.delete(entry.key)
    assert checkpoint.save(
        store,
        run=manifest.run,
        round_number=round_number,
        commit=manifest.commit,
        members=manifest.members,
        batches=manifest.batches,
        writer=writer or manifest.writer,
        nonce="f" * 32,
        state=other,
    )


def trained(store: MemoryStore, rounds: int) -> Island:
    """A replica that has closed so many rounds alone, with a checkpoint of each."""
    island = Island(store, "a", minimum=1, retention=Retention(last=rounds + 1))
    for number in range(1, rounds + 1):
        island.train(number, close=False)
        island.manager._boundary("fragments")
        written = island.manager._course._recorder._checkpoint
        assert written is not None
        written.result(timeout=10)
    island.manager.shutdown()
    assert checkpoint.complete(store) == list(range(rounds, -1, -1))
    return island


def newcomer_to(store: MemoryStore) -> tuple[Island, int]:
    """A replica that has just joined, and how many rounds it had to follow."""
    late = Island(store, "late", seed=9, minimum=1)
    with late.diloco:
        followed = late.manager.catch_up(late.inner)
    late.manager.shutdown()
    return late, followed


def assert_holds(island: Island, other: Island) -> None:
    assert island.manager.current_step() == other.manager.current_step()
    assert all(torch.equal(island.originals[name], one) for name, one in other.originals.items())


def test_receipts_of_slots_that_were_no_members_outvote_nobody() -> None:
    """Who may write receipts for many slots writes them when the round is long over."""
    store = MemoryStore()
    survivor = trained(store, 2)
    mine = receipts_by_slot(store, 1)["a"]
    for number in range(5):
        stranger = mine.model_copy(update={"slot": f"s-{number}", "state": "f" * 32})
        store.create(keys.receipt(1, stranger.slot), stranger.to_bytes())
    late, followed = newcomer_to(store)
    assert_holds(late, survivor)
    assert followed == 0


@pytest.mark.parametrize("replaced", [1, 2, 4])
def test_a_checkpoint_that_was_replaced_is_passed_over_and_the_log_leads_on(
    events: pytest.LogCaptureFixture, replaced: int
) -> None:
    store = MemoryStore()
    survivor = trained(store, 4)
    for number in range(4, 4 - replaced, -1):
        replace(store, number)
    late, followed = newcomer_to(store)
    assert_holds(late, survivor)
    assert followed == replaced
    assert [one["round"] for one in told(events, "checkpoint_failed")] == list(range(4, 4 - replaced, -1))
    assert "is not the state that the receipts of its round tell of" in str(
        told(events, "checkpoint_failed")[0]["error"]
    )


def test_what_is_what_receipts_say_costs_one_download() -> None:
    store = Counting()
    survivor = trained(store, 4)
    manifest = checkpoint.manifest(store, 4)
    assert manifest is not None
    store.read_of.clear()
    late, followed = newcomer_to(store)
    assert_holds(late, survivor)
    assert followed == 0
    assert store.read_of == {4: sum(part.total_bytes for part in manifest.parts)}


def test_a_bad_replica_does_not_pass_its_state_off_as_somebody_elses(events: pytest.LogCaptureFixture) -> None:
    """Its own receipt tells of its state; the other two tell of another."""
    store = MemoryStore()
    islands = [Harmed(store, f"r-{i}", seed=i, minimum=3) for i in range(3)]
    islands[2].harm, islands[2].harm_at = lambda tensor: 1.5 * tensor, 4
    together([lambda island=island: island.train(5) for island in islands])
    by_slot = receipts_by_slot(store, 4)
    assert by_slot["r-0"].state == by_slot["r-1"].state != by_slot["r-2"].state
    manifest = checkpoint.manifest(store, 5)
    assert manifest is not None
    assert manifest.writer == "r-2"
    key = keys.checkpoint_manifest(5)
    store.replace(key, manifest.model_copy(update={"writer": "r-0"}).to_bytes())
    late, followed = newcomer_to(store)
    assert_holds(late, islands[0])
    assert followed == 1
    assert any(one["round"] == 5 for one in told(events, "checkpoint_failed"))


def test_where_every_checkpoint_was_replaced_nothing_is_loaded_and_what_to_do_is_told() -> None:
    store = MemoryStore()
    trained(store, 2)
    for number in (1, 2):
        replace(store, number)
    store.delete(keys.checkpoint_manifest(0))
    late = Island(store, "late", minimum=1)
    before = {name: tensor.clone() for name, tensor in late.originals.items()}
    with (
        late.diloco,
        pytest.raises(Corrupt, match=r"no checkpoint of memory.* can be loaded: .*checkpoints/00000002/") as ended,
    ):
        late.manager.catch_up(late.inner)
    assert "restore an older version of its objects, or delete receipts/00000001/" in str(ended.value)
    assert all(torch.equal(late.originals[name], tensor) for name, tensor in before.items())
    late.manager.shutdown()
    # As it was told.
    for entry in store.list(keys.receipts_of(1)):
        store.delete(entry.key)
    again, followed = newcomer_to(store)
    assert (followed, again.manager.current_step()) == (0, 2)


def test_initial_weights_and_a_round_without_receipts_are_taken_at_their_writers_word() -> None:
    store = MemoryStore()
    survivor = trained(store, 3)
    for entry in store.list(keys.RECEIPTS):
        store.delete(entry.key)
    late, followed = newcomer_to(store)
    assert_holds(late, survivor)
    assert followed == 0


def test_who_averages_gradients_does_not_load_what_was_replaced_either(events: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    together([lambda slot=slot: synchronous(store, slot, None, rounds=6) for slot in "abc"])
    store.delete(keys.checkpoint_manifest(6))
    replace(store, 5)
    events.clear()
    synchronous(store, "b", None, rounds=4)
    assert [one["round"] for one in told(events, "checkpoint_loaded")] == [4]
    assert {one["round"] for one in told(events, "checkpoint_failed")} == {5}
