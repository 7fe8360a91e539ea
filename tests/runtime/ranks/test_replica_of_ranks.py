"""Replicas of several ranks: averages, checkpoints, errors, divergence and early ends. Every rank is a thread."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import pytest
import torch
from tests.kit.divergence import refuse_after_load, wait_for_last_receipt
from tests.kit.events import logged_events
from tests.kit.managers import (
    Island,
    Pace,
    begin_run,
    commits,
    contributions,
    decisions,
    manager_of,
    members,
    receipts,
    wait_for,
    wait_until_saved,
)
from tests.kit.stores import StoreView
from tests.runtime.ranks.replicas import (
    RankedReplica,
    assert_same_weights,
    closing_replicas,
    failures,
    on_all_ranks,
    replicas_of,
)

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.model_from_checkpoint import trained_model
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.ranks.interface import SingleRank, combine_digests
from skerry.runtime.store.interface import buffers_of
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from skerry.runtime.log.records import CheckpointManifest
    from skerry.runtime.store import Data, Store


@pytest.fixture(autouse=True)
def _closed_replicas(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, logger="skerry")
    with closing_replicas():
        yield


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def trained(store: Store, rounds: int) -> RankedReplica:
    """Replica a, after so many rounds of its own."""
    replica = RankedReplica(store, "a", minimum=1)
    for number in range(1, rounds):
        replica.train(number, close=False)
        replica.run(Island.join)
        for island in replica.islands:
            wait_until_saved(island)  # while it is being written, the next one is skipped
    replica.train(rounds)
    return replica


def manifest(store: Store, round_number: int) -> CheckpointManifest:
    written = checkpoint.manifest(store, round_number)
    assert written is not None
    return written


def test_same_rank_of_every_replica_has_the_same_weights(store: MemoryStore) -> None:
    replicas = replicas_of(store)
    on_all_ranks(replicas, lambda island: island.train(3))
    assert_same_weights(*replicas)
    weights = replicas[0].weights
    assert not torch.equal(weights[0]["weight"], weights[1]["weight"])
    for contribution in contributions(store):
        assert contribution.ranks == (1, 1)
        assert len(contribution.parts) == 2
    for number in range(3):
        a, b = (receipts(store, number)[slot] for slot in "ab")
        assert (a.averages, a.state, a.scope) == (b.averages, b.state, "fragments")
    assert [entry.key for entry in store.list(keys.MEMBERS)] == [keys.member(slot, 0) for slot in "ab"]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)], ids=["even", "uneven"])
def test_average_is_per_rank(store: MemoryStore, sizes: tuple[int, int]) -> None:
    """Of the sharded sizes, too: a rank may have more parts, or less, than another."""
    replicas = replicas_of(store)

    def average(island: Island) -> torch.Tensor:
        rank = island.manager.rank
        tensor = torch.full((sizes[rank],), 10.0 * rank + 2 * (island in replicas[1].islands))
        island.manager.start_quorum()
        island.manager.allreduce(tensor).wait()
        assert island.manager.should_commit()
        assert island.manager.num_participants() == island.manager.batches_committed() == 2
        return tensor

    for rank, tensor in enumerate(on_all_ranks(replicas, average)):
        assert tensor.tolist() == [10.0 * (rank % 2) + 1] * sizes[rank % 2]


# Checkpoints.


def test_checkpoint_restores_every_ranks_shard(store: MemoryStore) -> None:
    first = trained(store, 2)
    assert len(manifest(store, 2).shards) == 2
    assert manifest(store, 2).tree == ""
    again = trained(store, 2)
    assert_same_weights(first, again)
    assert again.islands[0].manager.presence.incarnation == 1


def delete_shard(store: Store) -> None:
    store.delete(keys.checkpoint_part(3, manifest(store, 3).shards[1].parts[0].digest))


def replace_shard(store: Store) -> None:
    """The receipt folds the shards of all ranks: that of one is enough to tell."""
    last, initial = manifest(store, 3), manifest(store, 0)
    shards = (last.shards[0], initial.shards[1])
    for part in shards[1].parts:
        store.create(keys.checkpoint_part(3, part.digest), store.read(keys.checkpoint_part(0, part.digest)) or b"")
    parts = tuple(part for shard in shards for part in shard.parts)
    index = combine_digests([shard.index for shard in shards])
    changed = last.model_copy(update={"shards": shards, "parts": parts, "index": index})
    store.replace(keys.checkpoint_manifest(3), changed.sealed().to_bytes())


@pytest.mark.parametrize(("spoil", "is_loaded"), [(None, True), (delete_shard, False), (replace_shard, False)])
def test_bad_shard_makes_all_ranks_load_an_older_checkpoint(
    store: MemoryStore, caplog: pytest.LogCaptureFixture, spoil: object, *, is_loaded: bool
) -> None:
    first = trained(store, 3)
    if callable(spoil):
        spoil(store)
    again = trained(store, 3)
    initial, loaded = (event["round"] for event in logged_events(caplog, "checkpoint_loaded"))
    assert (initial, loaded == 3) == (0, is_loaded)
    assert_same_weights(first, again)


def test_other_number_of_ranks_is_refused_by_every_rank(store: MemoryStore) -> None:
    trained(store, 1)
    other = RankedReplica(store, "b", size=3, minimum=1)
    errors = failures([lambda i=island: i.train(2) for island in other.islands])
    assert [type(error) for error in errors] == [Invalid] * 3
    assert all("was saved by 2 ranks, this replica has world_size=3" in str(error) for error in errors)
    with pytest.raises(Invalid, match="was saved by 2 ranks, this replica has world_size=1"):
        Island(store, "c", minimum=1).train(2)


def test_private_state_is_restored_on_its_rank(store: MemoryStore) -> None:
    restored: dict[int, list[object]] = {0: [], 1: []}
    for rounds in (2, 3):
        assert restored == {0: [], 1: []}
        replica = RankedReplica(store, "a", minimum=1)
        for rank, island in enumerate(replica.islands):
            island.manager.register_private_state("own", restored[rank].append, lambda rank=rank: {"rank": rank})
        replica.train(rounds)
    assert restored == {0: [{"rank": 0}], 1: [{"rank": 1}]}


def test_rank_that_dies_in_a_save_leaves_the_save_before_it(store: MemoryStore) -> None:
    """The other rank has completed its own, which is of no use alone."""

    def die_in_the_last(store: Store, key: str, data: Data) -> bool:
        if key == keys.checkpoint_manifest(4, keys.unfinished_prefix("a", 1)):
            raise Corrupt("killed")
        return store.create(key, data)

    saving: dict[str, object] = {"minimum": 1, "sync_every": 9, "keep_unfinished": timedelta(microseconds=1)}
    RankedReplica(store, "a", views=[store, StoreView(store, die_in_the_last)], **saving).run(lambda i: i.take(4))
    numbers = [checkpoint.complete(store, keys.unfinished_prefix("a", rank)) for rank in range(2)]
    assert numbers == [[4, 3], [3, 2]]
    again = RankedReplica(store, "a", **saving)
    assert again.run(lambda island: island.take(0).manager.inner_steps) == [3, 3]


# Errors and abstentions.


def test_non_finite_rank_makes_the_replica_abstain(store: MemoryStore) -> None:
    good, bad = replicas = replicas_of(store, minimum=1)
    on_all_ranks(replicas, lambda island: island.train(1, close=False))

    def train(island: Island) -> None:
        if island is bad.islands[1]:
            with torch.no_grad():
                island.model.weight.fill_(float("inf"))  # type: ignore[union-attr]
        island.train(2)

    on_all_ranks(replicas, train)
    assert members(store)[-1] == ["a"]
    assert_same_weights(good, bad)


def test_norm_limit_applies_over_all_ranks(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    def attempt(island: Island) -> bool:
        island.manager.start_quorum()
        island.manager.allreduce(torch.tensor([3.0 + island.manager.rank, 0.0])).wait()
        return island.manager.should_commit()

    assert RankedReplica(store, "a", minimum=1, max_norm=4.5).run(attempt) == [False, False]
    reasons = {event["reason"] for event in logged_events(caplog, "abstained")}
    assert reasons == {"norm above the limit: norm=5 max_norm=4.5"}


@pytest.mark.parametrize("cause", ["failed upload", "reported error"])
def test_error_of_a_rank_fails_the_round_on_all(store: MemoryStore, cause: str) -> None:
    failed: list[str] = []

    def fail_once(store: Store, key: str, data: Data) -> bool:
        if cause == "failed upload" and key.startswith(keys.PAYLOADS) and not failed:
            failed.append(key)
            raise Corrupt("disk full")
        return store.create(key, data)

    def attempt(island: Island) -> list[bool]:
        manager, held = island.manager, list[bool]()
        for number in range(2):
            manager.start_quorum()
            if cause == "reported error" and (number, manager.rank) == (0, 1):
                manager.report_error(RuntimeError("out of memory"))
            averaged = manager.allreduce(torch.ones(2)).wait()
            held.append(manager.should_commit())
            assert averaged or not held[-1]
        return held

    replica = RankedReplica(store, "a", minimum=1, views=[store, StoreView(store, fail_once)])
    assert replica.run(attempt) == [[False, True]] * 2


@pytest.mark.parametrize("guilty", [0, 1])
def test_contribution_with_a_damaged_rank_is_refused(
    store: MemoryStore, guilty: int, caplog: pytest.LogCaptureFixture
) -> None:
    def damage(store: Store, key: str, data: Data) -> bool:
        if not key.startswith(f"{keys.PAYLOADS}00000001/c/"):
            return decide_last(store, key, data)
        body = bytearray(b"".join(buffers_of(data)))
        body[0] ^= 1
        return store.create(key, bytes(body))

    def decide_last(store: Store, key: str, data: Data) -> bool:
        if key == keys.decision(1, 0):  # c does not read its own contribution back
            wait_for(lambda: store.read(key))
        return store.create(key, data)

    begin_run(store, "abc", minimum=2)
    views = [StoreView(store, damage if rank == guilty else decide_last) for rank in range(2)]
    sick = RankedReplica(store, "c", minimum=2, grace_s=20.0, views=views)
    on_all_ranks([*replicas_of(store, minimum=2), sick], lambda island: island.train(3))
    assert members(store) == [["a", "b", "c"], ["a", "b"], ["a", "b", "c"]]
    assert {event["slot"] for event in logged_events(caplog, "contribution_refused")} == {"c"}
    assert not logged_events(caplog, "round_failed")


@pytest.mark.slow
@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize(("units", "name"), [(1, "rounding_drift"), (1 << 20, "diverged")])
def test_replica_heals_when_a_rank_has_another_shard(
    store: MemoryStore, guilty: int, units: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = 20
    replicas = replicas_of(store, "abc", minimum=3)

    def train(island: Island) -> None:
        island.train(3, close=False)
        if island is replicas[2].islands[guilty]:
            weight = island.originals["weight"]
            weight.copy_((weight.view(torch.int32) + units).view(torch.float32))
        for number in range(3, rounds):
            island.join()
            wait_for_last_receipt(island.manager)
            island.train(number + 1, close=False)
        island.manager.shutdown()

    on_all_ranks(replicas, train)
    (event,) = logged_events(caplog, "rounding_drift") + logged_events(caplog, "diverged")
    assert logged_events(caplog, name) == [event]
    assert event["slot"] == "c"
    assert f"rank {guilty}: " in event["what"]
    assert f"rank {1 - guilty}: " not in event["what"]
    states = [{receipt.state for receipt in receipts(store, number).values()} for number in range(rounds)]
    assert (len(states[3]), len(states[-1])) == (2, 1)
    assert_same_weights(*replicas)


# Ends.


def train_with_another_shard(
    replicas: Sequence[RankedReplica],
    harmed: RankedReplica,
    harm: Callable[[torch.Tensor], object],
    *,
    close: bool = False,
) -> None:
    """Train four rounds. Before the last one the second rank of a replica has another shard."""

    def train(island: Island) -> None:
        island.train(3, close=False)
        if island is harmed.islands[1]:
            harm(island.originals["weight"])
        island.train(4, close=close)

    on_all_ranks(replicas, train)


@pytest.mark.parametrize(
    ("harmed", "units", "name", "ranks"),
    [(2, 1, "rounding_drift", ["rank 1: "]), (2, 1 << 20, "diverged", ["rank 1: "]), (1, 1 << 20, "diverged", [])],
    ids=["rounding", "more", "author-of-the-last-checkpoint-which-measures-nothing"],
)
def test_other_shard_of_a_rank_in_the_last_round_is_removed_before_the_end(
    store: MemoryStore, harmed: int, units: int, name: str, ranks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    begin_run(store, "abc", minimum=3, rounds=4)
    replicas = replicas_of(store, "abc", minimum=3)

    def harm(weight: torch.Tensor) -> None:
        weight.copy_((weight.view(torch.int32) + units).view(torch.float32))

    train_with_another_shard(replicas, replicas[harmed], harm)
    for replica in sorted(replicas, key=lambda replica: replica is replicas[harmed]):
        replica.run(Island.join)
        assert all(island.manager.finished for island in replica.islands)
    (event,) = logged_events(caplog, "rounding_drift") + logged_events(caplog, "diverged")
    assert logged_events(caplog, name) == [event]
    assert event["slot"] == "abc"[harmed]
    assert [rank for rank in ("rank 0: ", "rank 1: ") if rank in event["what"]] == ranks
    assert_same_weights(*replicas)
    on_all_ranks(replicas, lambda island: island.manager.shutdown())
    manifest = checkpoint.manifest(store, 4)
    assert manifest is not None
    assert manifest.writer == "b"
    for rank, island in enumerate(replicas[0].islands):
        saved = trained_model([cast("dict[str, object]", checkpoint.load(store, manifest, rank=rank))]).tensors()
        assert torch.equal(saved["weight"], island.originals["weight"])


@pytest.mark.parametrize("part", ["compared", "for_checkpoint"])
@pytest.mark.parametrize("guilty", [0, 1])
def test_healed_state_that_one_rank_cannot_store_is_reported_by_all(
    store: MemoryStore, guilty: int, part: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_run(store, "ab", minimum=2, rounds=4)
    author, other = replicas_of(store, "ab", minimum=2)
    train_with_another_shard([author, other], author, lambda weight: weight.mul_(1.5))
    refuse_after_load(monkeypatch, author.islands[guilty], part)
    for replica in (other, author):
        replica.run(Island.join)
        replica.run(lambda island: island.manager.shutdown())
    assert_same_weights(author, other)
    reported = logged_events(caplog, "checkpoint_failed")[-2:]
    failures = [(event["round"], event["error"].removeprefix("rank 1: ")) for event in reported]
    assert failures == [(4, "state cannot be stored")] * 2


def test_all_ranks_of_a_successor_follow_past_a_wrong_last_checkpoint(store: MemoryStore) -> None:
    """Its author ended without a last boundary, where it would have healed."""
    begin_run(store, "ab", minimum=2, rounds=4)
    author, other = replicas_of(store, "ab", minimum=2)
    train_with_another_shard([author, other], author, lambda weight: weight.mul_(1.5), close=True)
    assert (manifest(store, 4).writer, manifest(store, 4).healed) == ("a", None)
    again = RankedReplica(store, "a", minimum=1)
    assert all(again.run(Island.join))
    again.run(lambda island: island.manager.shutdown())
    assert_same_weights(again, other)
    assert (manifest(store, 4).writer, manifest(store, 4).healed) == ("a", True)


def test_all_ranks_end_when_lost_work_is_made_up_for(store: MemoryStore) -> None:
    begin_run(store, "ab", rounds=2, work=4.0, start_window_s=0.0)

    def to_the_end(island: Island) -> int:
        with island.diloco:
            while not island.manager.finished:
                island.manager.catch_up(island.inner)
                island.step()
        return island.manager.current_step()

    assert RankedReplica(store, "a", minimum=1).run(to_the_end) == [4, 4]
    assert [commit.work for commit in commits(store)] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.slow
def test_slow_replica_ends_its_rounds_early_on_all_ranks(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.runtime.training.early_round_end_policy._MARGIN", 0.0)
    pace, rounds, steps = Pace(), 5, 6
    fast = replicas_of(store, ["r-0", "r-1"], minimum=2, grace_s=10.0, sync_every=steps)
    slow = RankedReplica(store, "r-9", minimum=2, grace_s=10.0, sync_every=steps)

    def train_slowly(island: Island) -> None:
        """Take a third of the inner steps, then wait until the others have committed."""
        number = island.manager.current_step()
        for _ in range(steps // 3):
            island.step()
        pace.allow(number + 1)
        while island.manager.current_step() == number:
            # Two ranks that ask without a pause take the processor from the replicas that they wait for.
            pace.wait_for_look()
            island.manager.catch_up(island.inner)

    def train(island: Island) -> None:
        with island.diloco:
            island.manager.catch_up(island.inner)
            while island.manager.current_step() < rounds:
                if island in slow.islands:
                    train_slowly(island)
                else:
                    pace.until(island.manager.current_step())
                    island.step()
                    island.manager.catch_up(island.inner)
        island.manager.shutdown()

    on_all_ranks([*fast, slow], train)
    for number in range(rounds - 1):
        assert len({receipt.state for receipt in receipts(store, number).values()}) == 1
    shares = [share for decision in decisions(store) for share in decision.members if share.slot == "r-9"]
    assert len(shares) >= rounds - 2
    assert [share.weight for share in shares] == pytest.approx([1 / 3] * len(shares))


def test_replica_of_one_rank_needs_no_tcpstore(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    manager = manager_of(store, "a", minimum=1)
    assert (manager.rank, manager.world_size) == (0, 1)
    assert isinstance(manager.session.group, SingleRank)
    manager.shutdown()
