"""Replicas of several ranks: averages, checkpoints, errors and divergence. Every rank is a thread."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.kit import protocol
from tests.kit.events import logged_events
from tests.kit.managers import Island, commits, contributions, decisions, manager_of, receipts, together
from tests.runtime.ranks.replicas import RankedReplica, assert_same_weights, closing_replicas, failures

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.protocol.exchange import Exchange, ExchangeId
from skerry.runtime.ranks.interface import SingleRank, combine_digests
from skerry.runtime.store.interface import buffers_of
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.tensors.layout import Index, TensorSpec
from skerry.runtime.training.work_counter import Trained

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.runtime.protocol.exchange import ContributionDraft
    from skerry.runtime.store import Data


@pytest.fixture(autouse=True)
def closed_replicas() -> Iterator[None]:
    with closing_replicas():
        yield


def test_same_rank_of_every_replica_has_the_same_weights() -> None:
    store = MemoryStore()
    replicas = [RankedReplica(store, slot, grace_s=20.0) for slot in ("a", "b")]
    together([lambda r=replica: r.train(3) for replica in replicas])
    first, second = (replica.weights for replica in replicas)
    for rank in range(2):
        torch.testing.assert_close(first[rank], second[rank], rtol=0, atol=0)
    assert not torch.equal(first[0]["weight"], first[1]["weight"])
    for contribution in contributions(store):
        assert contribution.ranks == (1, 1)
        assert len(contribution.parts) == 2
    for number in range(3):
        first, second = (receipts(store, number)[slot] for slot in ("a", "b"))
        assert (first.averages, first.state, first.scope) == (second.averages, second.state, "fragments")
    assert [entry.key for entry in store.list(keys.MEMBERS)] == [keys.member(slot, 0) for slot in ("a", "b")]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)], ids=["even", "uneven"])
def test_average_is_per_rank(sizes: tuple[int, int]) -> None:
    """Of the sharded sizes, too: a rank may have more parts, or less, than another."""
    store = MemoryStore()
    replicas = [RankedReplica(store, slot, grace_s=20.0) for slot in ("a", "b")]

    def average(number: int, island: Island) -> torch.Tensor:
        rank = island.manager.rank
        tensor = torch.full((sizes[rank],), 10.0 * rank + 2 * number)
        island.manager.start_quorum()
        island.manager.allreduce(tensor).wait()
        assert island.manager.should_commit()
        return tensor

    works = [lambda n=n, i=island: average(n, i) for n, replica in enumerate(replicas) for island in replica.islands]
    for rank, tensor in enumerate(together(works)):
        assert tensor.tolist() == [10.0 * (rank % 2) + 1] * sizes[rank % 2]


def test_checkpoint_restores_every_ranks_shard() -> None:
    store = MemoryStore()
    first = RankedReplica(store, "a", minimum=1)
    first.train(2)
    manifest = checkpoint.manifest(store, 2)
    assert manifest is not None
    assert len(manifest.shards) == 2
    assert manifest.tree == ""
    again = RankedReplica(store, "a", minimum=1)
    again.train(2)
    assert_same_weights(first, again)
    assert again.islands[0].manager.presence.incarnation == 1


def test_missing_shard_makes_all_ranks_load_an_older_checkpoint() -> None:
    store = MemoryStore()
    first = RankedReplica(store, "a", minimum=1)
    first.train(3)
    manifest = checkpoint.manifest(store, 3)
    assert manifest is not None
    store.delete(keys.checkpoint_part(3, manifest.shards[1].parts[0].digest))
    again = RankedReplica(store, "a", minimum=1)
    again.train(3)  # from checkpoint 2, and the log
    assert_same_weights(first, again)


@pytest.mark.parametrize("replaced", [False, True])
def test_replaced_shard_makes_all_ranks_load_an_older_checkpoint(
    caplog: pytest.LogCaptureFixture, *, replaced: bool
) -> None:
    """The receipt folds the shards of all ranks: that of one is enough to tell."""
    store = MemoryStore()
    first = RankedReplica(store, "a", minimum=1)
    first.train(3)
    manifest, initial = checkpoint.manifest(store, 3), checkpoint.manifest(store, 0)
    assert manifest is not None
    assert initial is not None
    if replaced:
        shards = (manifest.shards[0], initial.shards[1])
        for part in shards[1].parts:
            store.create(keys.checkpoint_part(3, part.digest), store.read(keys.checkpoint_part(0, part.digest)) or b"")
        other = manifest.model_copy(
            update={
                "shards": shards,
                "parts": tuple(part for shard in shards for part in shard.parts),
                "index": combine_digests([shard.index for shard in shards]),
            }
        )
        store.replace(keys.checkpoint_manifest(3), other.to_bytes())
    again = RankedReplica(store, "a", minimum=1)
    with caplog.at_level(logging.INFO, logger="skerry"):
        again.train(3)
    (event,) = logged_events(caplog, "checkpoint_loaded")
    assert (event["round"] == 3) is not replaced
    assert_same_weights(first, again)


def test_other_number_of_ranks_is_refused_by_every_rank() -> None:
    store = MemoryStore()
    RankedReplica(store, "a", minimum=1).train(1)
    other = RankedReplica(store, "b", size=3, minimum=1)
    errors = failures([lambda i=island: i.train(2) for island in other.islands])
    assert [type(error) for error in errors] == [Invalid] * 3
    assert all("was saved by 2 ranks, this replica has world_size=3" in str(error) for error in errors)
    with pytest.raises(Invalid, match="was saved by 2 ranks, this replica has world_size=1"):
        Island(store, "c", minimum=1).train(2)


def test_non_finite_rank_makes_the_replica_abstain() -> None:
    store = MemoryStore()
    good, bad = (RankedReplica(store, slot, minimum=1, grace_s=20.0) for slot in ("a", "b"))
    together([lambda r=replica: r.train(1, close=False) for replica in (good, bad)])

    def spoil(island: Island) -> None:
        if island.manager.rank == 1:
            with torch.no_grad():
                island.model.weight.fill_(float("inf"))
        island.train(2)

    together([lambda: good.train(2), lambda: together([lambda i=island: spoil(i) for island in bad.islands])])
    assert [share.slot for share in decisions(store)[-1].members] == ["a"]
    assert_same_weights(good, bad)


def test_failed_upload_of_a_rank_fails_the_round_on_all() -> None:
    store = MemoryStore()
    replica = RankedReplica(store, "a", minimum=1)
    replica.train(1, close=False)
    upload = Exchange.upload
    failed: list[int] = []

    def fail_once(self: Exchange, round_number: int, load: ContributionDraft) -> None:
        if self is replica.islands[1].manager.session.exchange and not failed:
            failed.append(round_number)
            raise Corrupt("disk full")
        upload(self, round_number, load)

    commits: dict[int, list[bool]] = {0: [], 1: []}

    def round_of(island: Island) -> None:
        manager = island.manager
        tensor = torch.ones(2)
        for _ in range(2):
            manager.start_quorum()
            assert manager.allreduce(tensor).wait() is not bool(failed and not commits[manager.rank])
            commits[manager.rank].append(manager.should_commit())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "upload", fail_once)
        together([lambda i=island: round_of(i) for island in replica.islands])
    assert commits == {0: [False, True], 1: [False, True]}


def test_reported_error_of_a_rank_fails_the_round_on_all() -> None:
    store = MemoryStore()
    replica = RankedReplica(store, "a", minimum=1)

    def attempt(island: Island) -> list[bool]:
        manager, held = island.manager, []
        for number in range(2):
            manager.start_quorum()
            if number == 0 and manager.rank == 1:
                manager.report_error(RuntimeError("out of memory"))
            manager.allreduce(torch.ones(2)).wait()
            held.append(manager.should_commit())
        return held

    assert together([lambda i=island: attempt(i) for island in replica.islands]) == [[False, True]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize(("units", "name"), [(1, "rounding_drift"), (1 << 20, "diverged")])
def test_replica_heals_when_a_rank_has_another_shard(
    guilty: int, units: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="skerry")
    store, rounds = MemoryStore(), 20
    replicas = [RankedReplica(store, slot, minimum=3, grace_s=20.0) for slot in ("a", "b", "c")]

    def train(island: Island, *, harm: bool) -> None:
        island.train(3, close=False)
        if harm:
            weight = island.originals["weight"]
            weight.copy_((weight.view(torch.int32) + units).view(torch.float32))
        island.train(rounds)

    together(
        [
            lambda i=island, harm=harm: train(i, harm=harm)
            for number, replica in enumerate(replicas)
            for rank, island in enumerate(replica.islands)
            for harm in [number == 2 and rank == guilty]
        ]
    )
    (event,) = logged_events(caplog, "rounding_drift") + logged_events(caplog, "diverged")
    assert logged_events(caplog, name) == [event]
    assert event["slot"] == "c"
    assert f"rank {guilty}: " in event["what"]
    assert f"rank {1 - guilty}: " not in event["what"]
    states = [{receipt.state for receipt in receipts(store, number).values()} for number in range(rounds)]
    assert len(states[3]) == 2
    assert len(states[-1]) == 1
    for other in replicas[1:]:
        assert_same_weights(replicas[0], other)


def test_norm_limit_applies_over_all_ranks() -> None:
    replica = RankedReplica(MemoryStore(), "a", minimum=1, max_norm=4.5)
    index = Index((TensorSpec("0", "float32", (2,)),))

    def reason(rank: int) -> str | None:
        writer = replica.islands[rank].manager.session.averager._writer
        tensors = [torch.tensor([3.0 + rank, 0.0])]
        trained = Trained(tokens=1, inner_steps=1)
        return writer.offer(ExchangeId(0, 0, ""), index, lambda: writer.encode(tensors, index), trained)[1].reason

    assert together([lambda: reason(0), lambda: reason(1)]) == ["norm above the limit: norm=5 max_norm=4.5"] * 2


class DamagingStore(MemoryStore):
    """Damages the first bytes of a slot's uploads in a round, those of the thread `guilty`."""

    def __init__(self, slot: str, round_number: int) -> None:
        super().__init__()
        self._folder = f"{keys.PAYLOADS}{round_number:08d}/{slot}/"
        self.guilty: object = None

    def create(self, key: str, data: Data) -> bool:
        if key.startswith(self._folder) and threading.current_thread() is self.guilty:
            body = bytearray(b"".join(buffers_of(data)))
            body[0] ^= 1
            return super().create(key, bytes(body))
        return super().create(key, data)


@pytest.mark.parametrize("guilty", [0, 1])
def test_contribution_with_a_damaged_rank_is_refused(
    guilty: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="skerry")
    store = DamagingStore("c", 1)
    replicas = [RankedReplica(store, slot, minimum=2, grace_s=20.0) for slot in ("a", "b", "c")]
    sick = replicas[2].islands[guilty].manager.session.exchange
    upload = Exchange.upload

    def damage(self: Exchange, round_number: int, load: ContributionDraft) -> None:
        store.guilty = threading.current_thread() if self is sick else None
        upload(self, round_number, load)
        store.guilty = None

    propose = Exchange._propose

    def not_its_own(self: Exchange, *facts: Any) -> None:
        if self is not replicas[2].islands[0].manager.session.exchange:  # it does not read its own contribution back
            propose(self, *facts)

    monkeypatch.setattr(Exchange, "upload", damage)
    monkeypatch.setattr(Exchange, "_propose", not_its_own)
    together([lambda r=replica: r.train(3) for replica in replicas])
    assert [[share.slot for share in decision.members] for decision in decisions(store)] == [
        ["a", "b", "c"],
        ["a", "b"],
        ["a", "b", "c"],
    ]
    assert {event["slot"] for event in logged_events(caplog, "contribution_refused")} == {"c"}
    assert not logged_events(caplog, "round_failed")


def test_private_state_is_restored_on_its_rank() -> None:
    store = MemoryStore()
    seen: dict[int, list[object]] = {0: [], 1: []}

    def start() -> RankedReplica:
        replica = RankedReplica(store, "a", minimum=1)
        for rank, island in enumerate(replica.islands):
            island.manager.register_private_state("own", seen[rank].append, lambda rank=rank: {"rank": rank})
        return replica

    start().train(2)
    assert seen == {0: [], 1: []}
    start().train(3)
    assert seen == {0: [{"rank": 0}], 1: [{"rank": 1}]}


def test_all_ranks_know_the_number_of_participants() -> None:
    store = MemoryStore()
    replicas = [RankedReplica(store, slot, grace_s=20.0) for slot in ("a", "b")]
    together([lambda r=replica: r.train(1, close=False) for replica in replicas])
    for replica in replicas:
        assert {island.manager.num_participants() for island in replica.islands} == {2}
        assert {island.manager.batches_committed() for island in replica.islands} == {2}
        together([lambda i=island: i.manager.shutdown() for island in replica.islands])


def test_all_ranks_end_when_lost_work_is_made_up_for() -> None:
    store = MemoryStore()
    run = protocol.run_record(SystemClock(), slots=("a", "b"), rounds=2, min_replicas=1)
    store.create(keys.RUN, run.model_copy(update={"work": 4.0, "start_window_s": 0.0}).to_bytes())
    replica = RankedReplica(store, "a", minimum=1)

    def to_the_end(island: Island) -> int:
        with island.diloco:
            while not island.manager.finished:
                island.manager.catch_up(island.inner)
                island.step()
        return island.manager.current_step()

    assert together([lambda i=island: to_the_end(i) for island in replica.islands]) == [4, 4]
    assert [commit.work for commit in commits(store)] == [1.0, 2.0, 3.0, 4.0]


def test_replica_of_one_rank_needs_no_tcpstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    manager = manager_of(MemoryStore(), "a", minimum=1)
    assert (manager.rank, manager.world_size) == (0, 1)
    assert isinstance(manager.session.group, SingleRank)
    manager.shutdown()
