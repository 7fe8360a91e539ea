"""Checkpoints that contradict the receipts of their round are never loaded, even under the name of another writer."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.divergence import (
    COMMIT,
    harmed_islands,
    receipt,
    receipts,
    scaled,
    train_averaging_gradients,
    write_receipt,
)
from tests.kit.events import logged_events
from tests.kit.managers import (
    Island,
    assert_same_parameters,
    join_at_head,
    states,
    together,
    train_all,
    wait_until_saved,
)
from tests.kit.managers import receipts as receipts_by_slot

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.garbage_collector import Retention
from skerry.runtime.checkpointing.receipt_comparison import ReceiptEvidence, evidence_of
from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.store import Span

# The evidence of one round.


@pytest.mark.parametrize(
    ("reported", "allowed"),
    [("b", "b"), ("bbd", "b"), ("bd", "bd"), ("bbdd", "bd"), ("bde", "bde"), ("bbde", "bde"), ("bbbde", "b"), ("", "")],
)
def test_majority_selects_the_state_without_majority_any_is_allowed(reported: str, allowed: str) -> None:
    evidence = evidence_of(receipts(reported), [f"r-{i}" for i in range(9)], COMMIT)
    assert evidence.states == tuple(letter * 32 for letter in allowed)
    assert evidence.scope == ("fragments" if allowed else "average")


def test_only_members_of_the_round_vote_on_its_checkpoint() -> None:
    strangers = [receipt(f"s-{i}", state="f") for i in range(9)]
    evidence = evidence_of([*receipts("bbd"), *strangers], ["r-0", "r-1", "r-2"], COMMIT)
    assert evidence.states == ("b" * 32,)


def test_receipts_of_other_commits_or_without_state_are_no_evidence() -> None:
    members = ["r-0", "r-1"]
    assert evidence_of([receipt("r-0", commit="d" * 64)], members, COMMIT) == ReceiptEvidence()
    assert evidence_of([receipt("r-0", state=None, scope="average")], members, COMMIT) == ReceiptEvidence()


def test_unreported_state_is_allowed_only_without_receipts() -> None:
    ReceiptEvidence().check(3, "b" * 32)
    ReceiptEvidence(scope="fragments", states=("b" * 32, "d" * 32)).check(3, "d" * 32)
    with pytest.raises(
        Corrupt, match=r"checkpoints/00000003/manifest.json contradicts the receipts .* delete receipts/00000002/"
    ):
        ReceiptEvidence(scope="fragments", states=("b" * 32,)).check(3, "d" * 32)


# Real managers.


class CountingStore(MemoryStore):
    """Counts the bytes that are read of each checkpoint, by its round."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_read: Counter[int] = Counter()

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        body = super().read(key, span, into)
        if key.startswith(keys.CHECKPOINTS) and not key.endswith(keys.MANIFEST) and body is not None:
            self.bytes_read[keys.round_of(key)] += len(body)
        return body


def replace_checkpoint(store: MemoryStore, round_number: int) -> None:
    """Replace a checkpoint by another state. Its own digests and its commit are right."""
    manifest = checkpoint.manifest(store, round_number)
    assert manifest is not None
    tree, tensors = checkpoint.flatten(checkpoint.load(store, manifest))
    changed = checkpoint.restore(tree, [1.5 * tensor if tensor.is_floating_point() else tensor for tensor in tensors])
    for entry in store.list(keys.start_after(keys.CHECKPOINTS, round_number)):
        store.delete(entry.key)
    assert checkpoint.save(
        store,
        run=manifest.run,
        round_number=round_number,
        commit=manifest.commit,
        members=manifest.members,
        batches=manifest.batches,
        writer=manifest.writer,
        nonce="f" * 32,
        state=changed,
    )


def train_alone(store: MemoryStore, rounds: int) -> Island:
    """A replica that has closed so many rounds alone, with a checkpoint of each."""
    island = Island(store, "a", minimum=1, retention=Retention(last=rounds + 1))
    for number in range(1, rounds + 1):
        island.train(number, close=False).join()
        wait_until_saved(island)
    island.manager.shutdown()
    assert checkpoint.complete(store) == list(range(rounds, -1, -1))
    return island


def assert_joins_with_the_state_of(island: Island, store: MemoryStore, *, followed: int) -> None:
    """A new replica follows so many rounds and has the state of `island`."""
    late, rounds = join_at_head(store)
    assert late.manager.current_step() == island.manager.current_step()
    assert_same_parameters([late, island])
    assert rounds == followed


def test_receipts_of_non_members_do_not_outvote_a_writer() -> None:
    """Rights to write receipts for many slots are worth nothing after the round."""
    store = MemoryStore()
    survivor = train_alone(store, 2)
    mine = receipts_by_slot(store, 1)["a"]
    for number in range(5):
        write_receipt(store, mine.model_copy(update={"slot": f"s-{number}", "state": "f" * 32}))
    assert_joins_with_the_state_of(survivor, store, followed=0)


@pytest.mark.parametrize("replaced", [1, 4])
def test_replaced_checkpoint_is_skipped_and_the_log_followed(events: pytest.LogCaptureFixture, replaced: int) -> None:
    store = MemoryStore()
    survivor = train_alone(store, 4)
    rounds = list(range(4, 4 - replaced, -1))
    for number in rounds:
        replace_checkpoint(store, number)
    assert_joins_with_the_state_of(survivor, store, followed=replaced)
    failures = logged_events(events, "checkpoint_failed")
    assert [failure["round"] for failure in failures] == rounds
    assert "contradicts the receipts of its round" in failures[0]["error"]


def test_confirmed_checkpoint_is_downloaded_once() -> None:
    store = CountingStore()
    survivor = train_alone(store, 4)
    manifest = checkpoint.manifest(store, 4)
    assert manifest is not None
    store.bytes_read.clear()
    assert_joins_with_the_state_of(survivor, store, followed=0)
    assert store.bytes_read == {4: sum(part.total_bytes for part in manifest.parts)}


def test_forged_writer_name_does_not_make_a_checkpoint_trusted(events: pytest.LogCaptureFixture) -> None:
    """The forged writer's own receipt reports another state."""
    store = MemoryStore()
    islands = harmed_islands(store, [None, None, scaled(1.5)])
    islands[2].harm_at = 4
    train_all(islands, rounds=5)
    assert len(states(store, 4)) == 2
    manifest = checkpoint.manifest(store, 5)
    assert manifest is not None
    assert manifest.writer == "r-2"
    store.replace(keys.checkpoint_manifest(5), manifest.model_copy(update={"writer": "r-0"}).to_bytes())
    assert_joins_with_the_state_of(islands[0], store, followed=1)
    assert any(failure["round"] == 5 for failure in logged_events(events, "checkpoint_failed"))


def test_no_confirmed_checkpoint_raises_with_the_next_step() -> None:
    store = MemoryStore()
    train_alone(store, 2)
    for number in (1, 2):
        replace_checkpoint(store, number)
    store.delete(keys.checkpoint_manifest(0))
    late = Island(store, "late", minimum=1)
    before = {name: tensor.clone() for name, tensor in late.originals.items()}
    message = r"no checkpoint of memory.* can be loaded: .*checkpoints/00000002/"
    with pytest.raises(Corrupt, match=message) as raised:
        late.join()
    assert "restore an older version of its objects, or delete receipts/00000001/" in str(raised.value)
    assert all(torch.equal(late.originals[name], tensor) for name, tensor in before.items())
    for entry in store.list(keys.receipts_prefix(1)):  # the next step that the error names
        store.delete(entry.key)
    retried, followed = join_at_head(store)
    assert (followed, retried.manager.current_step()) == (0, 2)


def test_checkpoints_without_receipts_are_loaded_unconfirmed() -> None:
    store = MemoryStore()
    survivor = train_alone(store, 3)
    for entry in store.list(keys.RECEIPTS):
        store.delete(entry.key)
    assert_joins_with_the_state_of(survivor, store, followed=0)


def test_ddp_replica_skips_a_replaced_checkpoint(events: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    together([lambda slot=slot: train_averaging_gradients(store, slot, rounds=6) for slot in "abc"])
    store.delete(keys.checkpoint_manifest(6))
    replace_checkpoint(store, 5)
    events.clear()
    train_averaging_gradients(store, "b", rounds=4)
    assert [event["round"] for event in logged_events(events, "checkpoint_loaded")] == [4]
    assert {event["round"] for event in logged_events(events, "checkpoint_failed")} == {5}
