"""Checkpoints that contradict the receipts of their round are never loaded, even under the name of another writer."""

from __future__ import annotations

import pytest
import torch
from tests.kit.divergence import (
    COMMIT,
    receipt,
    receipts,
    train_averaging_gradients,
)
from tests.kit.events import logged_events
from tests.kit.managers import (
    Island,
    assert_same_parameters,
    join_at_head,
    together,
    wait_until_saved,
)
from tests.kit.stores import HookedStore

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.garbage_collector import Retention
from skerry.runtime.checkpointing.receipt_comparison import ReceiptEvidence, evidence_of
from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore

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


def replace_checkpoint(store: MemoryStore, round_number: int, writer: str = "a") -> None:
    """Replace a checkpoint by another state, under any name. Its own digests and its commit are right."""
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
        writer=writer,
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


@pytest.mark.parametrize(("replaced", "writer"), [(1, "a"), (4, "a"), (2, "stranger")])
def test_replaced_checkpoint_is_skipped_and_the_log_followed(
    events: pytest.LogCaptureFixture, replaced: int, writer: str
) -> None:
    store = MemoryStore()
    survivor = train_alone(store, 4)
    rounds = list(range(4, 4 - replaced, -1))
    for number in rounds:
        replace_checkpoint(store, number, writer)
    assert_joins_with_the_state_of(survivor, store, followed=replaced)
    failures = logged_events(events, "checkpoint_failed")
    assert [failure["round"] for failure in failures] == rounds
    assert "contradicts the receipts of its round" in failures[0]["error"]


def test_confirmed_checkpoint_is_downloaded_once() -> None:
    reads: list[str] = []
    store = HookedStore(lambda verb, key: reads.append(key) if verb == "read" else None)
    survivor = train_alone(store, 4)

    def reads_of_parts() -> list[str]:
        return [key for key in reads if key.startswith(keys.CHECKPOINTS) and not key.endswith(keys.MANIFEST)]

    manifest = checkpoint.manifest(store, 4)
    assert manifest is not None
    reads.clear()
    checkpoint.load(store, manifest)
    once = reads_of_parts()
    reads.clear()
    assert_joins_with_the_state_of(survivor, store, followed=0)
    assert reads_of_parts() == once


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


def test_ddp_replica_skips_a_replaced_checkpoint(events: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    together([lambda slot=slot: train_averaging_gradients(store, slot, rounds=6) for slot in "abc"])
    store.delete(keys.checkpoint_manifest(6))
    replace_checkpoint(store, 5)
    events.clear()
    train_averaging_gradients(store, "b", rounds=4)
    assert [event["round"] for event in logged_events(events, "checkpoint_loaded")] == [4]
    assert {event["round"] for event in logged_events(events, "checkpoint_failed")} == {5}
