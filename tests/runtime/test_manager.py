"""ObjectStoreManager: the torchft surface over the log, with real torchft wrappers in threads over a memory store."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from tests.kit.managers import Island, commits, contributions, decisions, manager_of, receipts, together
from tests.kit.protocol import run_record
from torch import nn
from torch.distributed.distributed_c10d import ReduceOp
from torchft.local_sgd import DiLoCo
from torchft.manager import WorldSizeMode

import skerry.runtime.manager
from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Diverged, Fenced, Invalid, Retryable, RunFinished, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.store import buffers_of, open_store
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.store import Data


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def average(store: MemoryStore, slot: str, tensors: list[torch.Tensor], **more: object) -> tuple[bool, int]:
    """One round of plain allreduce calls; closes the manager."""
    manager = manager_of(store, slot, **more)
    manager.start_quorum()
    works = [manager.allreduce(tensor) for tensor in tensors]
    assert all(work.wait() for work in works)
    committed = manager.should_commit()
    manager.shutdown()
    return committed, manager.current_step()


# One round.


def test_the_average_is_exact_and_the_same_on_both(store: MemoryStore) -> None:
    a = [torch.full((3, 2), 1.0), torch.tensor(5.0)]
    b = [torch.full((3, 2), 4.0), torch.tensor(6.0)]
    results = together([lambda: average(store, "a", a), lambda: average(store, "b", b)])
    assert results == [(True, 1), (True, 1)]
    for tensors in (a, b):
        assert torch.equal(tensors[0], torch.full((3, 2), 2.5))
        assert torch.equal(tensors[1], torch.tensor(5.5))


def test_all_tensors_of_a_round_travel_in_one_contribution(store: MemoryStore) -> None:
    def tensors() -> list[torch.Tensor]:
        return [torch.randn(7, 5) for _ in range(100)]

    together([lambda: average(store, "a", tensors()), lambda: average(store, "b", tensors())])
    offered = contributions(store)
    assert [(c.slot, c.exchange, len(c.parts)) for c in offered] == [("a", 0, 1), ("b", 0, 1)]
    assert len(store.list(keys.PAYLOADS)) == 2


def test_non_contiguous_and_bf16_tensors_are_averaged_in_place(store: MemoryStore) -> None:
    def tensors(value: float) -> list[torch.Tensor]:
        return [torch.full((4, 3), value).t(), torch.full((5,), value, dtype=torch.bfloat16)]

    a, b = tensors(1.0), tensors(2.0)
    together([lambda: average(store, "a", a), lambda: average(store, "b", b)])
    assert torch.equal(a[0], torch.full((3, 4), 1.5))
    assert torch.equal(b[1], torch.full((5,), 1.5, dtype=torch.bfloat16))


@pytest.mark.parametrize(("op", "expected"), [(ReduceOp.SUM, 7), (ReduceOp.MAX, 4), (ReduceOp.MIN, 3)])
def test_integers_are_reduced_in_their_own_type(store: MemoryStore, op: object, expected: int) -> None:
    def work(slot: str, value: int) -> torch.Tensor:
        manager = manager_of(store, slot)
        manager.start_quorum()
        tensor = torch.tensor([value])
        manager.allreduce(tensor, reduce_op=op).wait()
        manager.should_commit()
        manager.shutdown()
        return tensor

    assert [t.item() for t in together([lambda: work("a", 3), lambda: work("b", 4)])] == [expected] * 2


def test_what_cannot_be_averaged_is_refused_by_name(store: MemoryStore) -> None:
    manager = manager_of(store, "a", minimum=1)
    with pytest.raises(RuntimeError, match="start_quorum"):
        manager.allreduce(torch.ones(1))
    manager.start_quorum()
    with pytest.raises(Invalid, match="only floating point"):
        manager.allreduce(torch.ones(1, dtype=torch.int64))
    with pytest.raises(Invalid, match="codec"):
        manager.allreduce(torch.ones(1), should_quantize=True)
    with pytest.raises(Invalid, match="PRODUCT"):
        manager.allreduce(torch.ones(1), reduce_op=ReduceOp.PRODUCT)
    with pytest.raises(Invalid, match="divides by size"):
        _ = manager._pg
    manager.shutdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replica_id": None}, "replica_id"),
        ({"replica_id": "a b"}, "not a slot name"),
        ({"min_replica_size": 0}, "min_replica_size=0"),
        ({"world_size": 2}, "store_addr"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    store: MemoryStore, arguments: dict[str, object], message: str
) -> None:
    settings: dict[str, object] = {"replica_id": "a", "min_replica_size": 1} | arguments
    with pytest.raises(Invalid, match=message):
        ObjectStoreManager(store, **settings)  # type: ignore[arg-type]
    assert store.list(keys.MEMBERS) == []


# Rounds.


def test_replicas_end_every_round_with_the_same_bits(store: MemoryStore) -> None:
    islands = together([lambda i=i: Island(store, f"r-{i}", seed=i, minimum=3).train(6) for i in range(3)])
    assert all(torch.equal(i.originals["weight"], islands[0].originals["weight"]) for i in islands)
    assert [c.participants for c in commits(store)] == [3] * 6
    assert {i.manager.batches_committed() for i in islands} == {18}
    for r in range(6):
        by_slot = receipts(store, r)
        assert sorted(by_slot) == ["r-0", "r-1", "r-2"]
        assert len({(x.averages, x.state) for x in by_slot.values()}) == 1
        assert all(x.scope == "fragments" and x.state for x in by_slot.values())


def test_participants_describe_the_last_commit(store: MemoryStore) -> None:
    a, b = manager_of(store, "r-2"), manager_of(store, "r-10")
    assert (a.num_participants(), a.participating_rank()) == (0, None)
    for manager in (a, b):
        manager.start_quorum()
    assert a.num_participants() == 2  # by the heartbeats: a guess, never 0
    together([a.should_commit, b.should_commit])
    assert (a.num_participants(), b.num_participants()) == (2, 2)
    assert (a.participating_rank(), b.participating_rank()) == (0, 1)
    assert a.is_participating()
    for manager in (a, b):
        manager.shutdown()


def test_a_round_of_nothing_is_still_a_round(store: MemoryStore) -> None:
    managers = [manager_of(store, slot) for slot in "ab"]
    for manager in managers:
        manager.start_quorum()
    assert together([manager.should_commit for manager in managers]) == [True, True]
    assert [manager.current_step() for manager in managers] == [1, 1]
    for manager in managers:
        manager.shutdown()


def test_two_bursts_in_a_round_are_two_exchanges_closed_by_one_commit(store: MemoryStore) -> None:
    def work(slot: str, value: float) -> list[float]:
        manager = manager_of(store, slot)
        manager.start_quorum()
        first, second = torch.tensor([value]), torch.tensor([10 * value])
        manager.allreduce(first).wait()
        manager.allreduce(second).wait()
        assert manager.should_commit()
        manager.shutdown()
        return [first.item(), second.item()]

    assert together([lambda: work("a", 1.0), lambda: work("b", 2.0)]) == [[1.5, 15.0]] * 2
    assert [(d.round, d.exchange) for d in decisions(store)] == [(0, 0), (0, 1)]
    assert len(commits(store)[0].exchanges) == 2


def test_with_a_delay_the_exchange_runs_while_inner_steps_go_on(store: MemoryStore) -> None:
    """Prepared after step 2, due after step 4: by step 3 it is uploaded, decided and averaged in the background."""
    island = Island(store, "a", minimum=1, sync_every=4, delay=2)
    with island.diloco:
        island.manager.catch_up(island.inner)
        for _ in range(3):
            island.step()
        clock = SystemClock()
        wait_until(clock, lambda: decisions(store) or None, clock.now() + 10, Backoff(first=0.001, cap=0.01))
        assert island.manager.current_step() == 0
        assert commits(store) == []
        island.step()
    assert island.manager.current_step() == 1
    assert len(commits(store)) == 1
    island.manager.shutdown()


def test_spares_are_not_listed(store: MemoryStore) -> None:
    def work(slot: str) -> int | None:
        manager = manager_of(store, slot, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
        manager.start_quorum()
        tensor = torch.tensor([1.0 if slot != "c" else 100.0])
        manager.allreduce(tensor).wait()
        assert manager.should_commit()
        manager.shutdown()
        assert tensor.item() == 1.0
        return manager.participating_rank()

    run = run_record(SystemClock(), slots=("a", "b", "c"), min_replicas=2)
    store.create(keys.RUN, run.to_bytes())
    assert together([lambda s=s: work(s) for s in "abc"]) == [0, 1, None]


# Faults inside a round.


def test_a_replica_with_nan_abstains_and_still_receives_the_average(store: MemoryStore) -> None:
    good, bad = torch.tensor([2.0]), torch.tensor([float("nan")])
    run = run_record(SystemClock(), slots=("a", "b"))
    store.create(keys.RUN, run.to_bytes())
    results = together(
        [
            lambda: average(store, "a", [good], minimum=1),
            lambda: average(store, "b", [bad], minimum=1),
        ]
    )
    assert results == [(True, 1), (True, 1)]
    assert good.item() == bad.item() == 2.0
    assert [share.slot for share in decisions(store)[0].members] == ["a"]


def test_an_error_before_the_upload_abstains_and_the_average_is_received(store: MemoryStore) -> None:
    run = run_record(SystemClock(), slots=("a", "b"))
    store.create(keys.RUN, run.to_bytes())
    a, b = manager_of(store, "a", minimum=1), manager_of(store, "b", minimum=1)
    tensor = torch.tensor([7.0])
    for manager in (a, b):
        manager.start_quorum()
    b.report_error(RuntimeError("a bad batch"))
    mine = torch.tensor([1.0])
    works = [a.allreduce(mine), b.allreduce(tensor)]
    assert together([works[0].wait, works[1].wait]) == [True, True]
    assert tensor.item() == 1.0
    assert a.should_commit()
    assert b.should_commit()  # the round is closed, and with what b holds
    for manager in (a, b):
        manager.shutdown()


def test_error_between_two_bursts_leaves_the_round_whole_and_others_alive(store: MemoryStore) -> None:
    """b fails in backward after its first bucket: a and c close the round with both, and b follows."""
    store.create(keys.RUN, run_record(SystemClock(), slots=("a", "b", "c"), min_replicas=2).to_bytes())
    managers = {slot: manager_of(store, slot, grace_s=0.5) for slot in "abc"}

    def whole(slot: str) -> bool:
        manager = managers[slot]
        manager.start_quorum()
        assert manager.allreduce(torch.ones(2)).wait()
        assert manager.allreduce(torch.ones(3)).wait()
        return manager.should_commit()

    def broken() -> bool:
        manager = managers["b"]
        manager.start_quorum()
        assert manager.allreduce(torch.ones(2)).wait()
        manager.report_error(RuntimeError("out of memory in backward"))
        return manager.should_commit()

    assert together([lambda: whole("a"), broken, lambda: whole("c")]) == [True, False, True]
    assert [len(commit.exchanges) for commit in commits(store)] == [2]
    assert whole("b")
    assert managers["b"].current_step() == 1
    for manager in managers.values():
        manager.shutdown()


def test_a_round_of_two_bursts_recovers_from_an_error_between_them(store: MemoryStore) -> None:
    """Both are needed: the one that failed must withdraw its abstention when it tries again."""
    store.create(keys.RUN, run_record(SystemClock(), slots=("a", "b"), min_replicas=2).to_bytes())

    def work(slot: str) -> list[float]:
        manager = manager_of(store, slot)
        failed = slot == "a"
        while manager.current_step() == 0:
            manager.start_quorum()
            first, second = torch.tensor([1.0]), torch.tensor([3.0])
            manager.allreduce(first).wait()
            if failed:
                manager.report_error(RuntimeError("out of memory in backward"))
            else:
                manager.allreduce(second).wait()
            failed = False
            manager.should_commit()
        manager.shutdown()
        return [first.item(), second.item()]

    assert together([lambda: work("a"), lambda: work("b")]) == [[1.0, 3.0]] * 2


def _raise_lookup_error(_: object) -> None:
    raise LookupError("a user's callback")


def test_a_callback_that_fails_leaves_the_round_open_for_another_attempt(store: MemoryStore) -> None:
    manager = manager_of(store, "a", minimum=1)
    for attempt in range(2):
        manager.start_quorum()
        work = manager.allreduce(torch.ones(1))
        if attempt == 0:
            work.get_future().then(_raise_lookup_error)
        assert work.wait() is (attempt == 1)
        assert manager.should_commit() is (attempt == 1)
    manager.shutdown()


def test_empty_step_waits_for_replicas_with_tensors_and_keeps_its_place(store: MemoryStore) -> None:
    store.create(keys.RUN, run_record(SystemClock(), slots=("a", "b"), min_replicas=2).to_bytes())
    a, b = manager_of(store, "a"), manager_of(store, "b")
    outcomes: list[bool] = []

    def empty_first() -> float:
        a.start_quorum()
        outcomes.append(a.should_commit())  # nothing to average: b brings something
        return again(a)

    def again(manager: ObjectStoreManager) -> float:
        manager.start_quorum()
        tensor = torch.tensor([2.0 if manager is a else 4.0])
        manager.allreduce(tensor).wait()
        assert manager.should_commit()
        return tensor.item()

    assert together([empty_first, lambda: again(b)]) == [3.0, 3.0]
    assert outcomes == [False]
    for manager in (a, b):
        manager.shutdown()


def test_a_second_should_commit_is_a_round_of_nothing(store: MemoryStore) -> None:
    """torchft's own tests count rounds up that way."""
    managers = [manager_of(store, slot) for slot in "ab"]
    for manager in managers:
        manager.start_quorum()
    for _ in range(2):
        assert together([manager.should_commit for manager in managers]) == [True, True]
    assert [manager.current_step() for manager in managers] == [2, 2]
    for manager in managers:
        manager.shutdown()


def test_diloco_has_one_exchange_in_a_round(store: MemoryStore) -> None:
    island = Island(store, "a", minimum=1, sync_every=4, delay=2)
    with island.diloco:
        island.manager.catch_up(island.inner)
        for _ in range(3):
            island.step()
        with pytest.raises(Invalid, match="one exchange in a round"):
            island.manager.allreduce(torch.ones(1))
        island.step()
    assert island.manager.current_step() == 1
    island.manager.shutdown()


def test_one_sick_reply_at_the_end_loses_neither_receipt_nor_goodbye() -> None:
    class Sick(MemoryStore):
        sick: ClassVar[set[str]] = set()

        def create(self, key: str, data: Data) -> bool:
            self._once(key, keys.RECEIPTS + "00000001")
            return super().create(key, data)

        def replace(self, key: str, data: Data) -> None:
            if any(b"finished" in bytes(buffer) for buffer in buffers_of(data)):
                self._once(key, keys.HEARTBEATS)
            super().replace(key, data)

        def _once(self, key: str, prefix: str) -> None:
            if key.startswith(prefix) and prefix not in self.sick:
                self.sick.add(prefix)
                raise Retryable("503")

    store = Sick()
    Island(store, "a", minimum=1).train(2)
    assert len(store.sick) == 2
    assert list(receipts(store, 1)) == ["a"]
    assert b'"phase":"finished"' in bytes(store.read(keys.heartbeat("a")) or b"")


def test_one_nan_does_not_silence_the_other_fragments_for_good(store: MemoryStore) -> None:
    store.create(keys.RUN, run_record(SystemClock(), slots=("a", "b"), min_replicas=1).to_bytes())

    def work(slot: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        manager = manager_of(store, slot, minimum=1, state_dict=model.state_dict, load_state_dict=model.load_state_dict)
        outer = [torch.optim.SGD(part.parameters(), lr=0.7) for part in model]
        with DiLoCo(manager, list(model), inner, outer, sync_every=4):
            step = 0
            while manager.current_step() < 6:
                manager.catch_up(inner)
                inner.zero_grad()
                loss = model(torch.ones(2, 4)).square().mean()
                (loss * float("nan") if slot == "a" and step == 1 else loss).backward()
                inner.step()
                step += 1
        manager.shutdown()

    together([lambda: work("a"), lambda: work("b")])
    members = [[share.slot for share in decision.members] for decision in decisions(store)]
    assert members[0] == ["b"]
    assert members[-1] == ["a", "b"]


def test_the_last_round_of_a_run_has_a_checkpoint_whatever_the_interval(store: MemoryStore) -> None:
    store.create(keys.RUN, run_record(SystemClock(), slots=("a",), rounds=7).to_bytes())
    Island(store, "a", minimum=1, checkpoint_every=5).train(7)
    assert checkpoint.complete(store) == [7, 5, 0]


def test_an_error_vetoes_all_later_bursts_of_the_round(store: MemoryStore) -> None:
    store.create(keys.RUN, run_record(SystemClock(), slots=("a", "b"), min_replicas=1).to_bytes())

    def work(slot: str, value: float) -> list[float]:
        manager = manager_of(store, slot, minimum=1)
        manager.start_quorum()
        if slot == "b":
            manager.report_error(RuntimeError("bad batch"))
        tensors = [torch.tensor([value]), torch.tensor([value])]
        for tensor in tensors:
            assert manager.allreduce(tensor).wait()
        manager.should_commit()
        manager.shutdown()
        return [tensor.item() for tensor in tensors]

    assert together([lambda: work("a", 1.0), lambda: work("b", 1000.0)]) == [[1.0, 1.0]] * 2


def test_an_error_before_any_allreduce_fails_the_round_here_and_only_here(store: MemoryStore) -> None:
    store.create(keys.RUN, run_record(SystemClock(), slots=("a", "b"), min_replicas=1).to_bytes())
    a, b = manager_of(store, "a", minimum=1, grace_s=0.2), manager_of(store, "b", minimum=1)
    b.start_quorum()
    b.report_error(RuntimeError("the batch could not be read"))
    assert not b.should_commit()
    a.start_quorum()
    a.allreduce(torch.ones(1)).wait()
    assert a.should_commit()
    for manager in (a, b):
        manager.shutdown()


def test_a_metric_between_rounds_is_refused_with_the_alternative(store: MemoryStore) -> None:
    island = Island(store, "a", minimum=1)
    island.train(1, close=False)
    with pytest.raises(Invalid, match="ObjectStoreAllReduce"):
        island.manager.allreduce(torch.ones(1))
    island.train(2)


def test_step_with_error_counts_no_tokens_of_a_discarded_round(store: MemoryStore) -> None:
    island = Island(store, "a", minimum=1, sync_every=2)
    with island.diloco:
        island.manager.catch_up(island.inner)
        for number in range(4):
            if number == 1:
                with torch.no_grad():
                    island.model.weight.fill_(float("nan"))
            island.manager.count_tokens(10)
            island.step()
            if number == 1:
                island.inner.state.clear()
    assert [(c.tokens, c.inner_steps) for c in contributions(store)] == [(20, 2)]
    island.manager.shutdown()


def test_too_few_replicas_fail_the_round_and_then_the_job_with_the_cause(store: MemoryStore) -> None:
    manager = manager_of(store, "a", timeout=timedelta(milliseconds=100), max_retries=1)
    manager.start_quorum()
    assert not manager.should_commit()
    assert manager.current_step() == 0
    manager.start_quorum()
    with pytest.raises(RuntimeError, match="exceeding max_retries=1") as caught:
        manager.should_commit()
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert "min_replica_size=2" in str(caught.value.__cause__)
    manager.shutdown()


def test_a_contribution_of_a_failed_round_counts_when_the_round_is_retried(store: MemoryStore) -> None:
    a = manager_of(store, "a", timeout=timedelta(milliseconds=100))
    a.start_quorum()
    first = torch.tensor([1.0])
    a.allreduce(first).wait()
    assert not a.should_commit()
    b = manager_of(store, "b")
    for manager in (a, b):
        manager.start_quorum()
    retried, other = torch.tensor([50.0]), torch.tensor([3.0])
    together([a.allreduce(retried).wait, b.allreduce(other).wait])
    assert retried.item() == other.item() == 2.0  # of 1 and 3: what was contributed first
    together([a.should_commit, b.should_commit])
    for manager in (a, b):
        manager.shutdown()


def test_a_replaced_incarnation_is_fenced(store: MemoryStore) -> None:
    old = manager_of(store, "a", minimum=1)
    new = manager_of(store, "a", minimum=1)
    old.start_quorum()
    with pytest.raises(Fenced, match="incarnation 1"):
        old.should_commit()
    assert contributions(store) == []
    for manager in (old, new):
        manager.shutdown()


def test_another_model_is_refused_by_name_not_by_a_torch_traceback(store: MemoryStore) -> None:
    Island(store, "a", minimum=1).train(1)
    other = Island(store, "b", minimum=1)
    other.model = nn.Linear(4, 5)
    stranger = manager_of(
        store, "c", minimum=1, state_dict=other.model.state_dict, load_state_dict=other.model.load_state_dict
    )
    before = other.model.weight.clone()
    with pytest.raises(Diverged, match=r"default\.(weight|bias) is torch.float32 .*, this model has .* \(5,"):
        stranger.disallow_state_dict_read()
    assert torch.equal(before, other.model.weight)
    for manager in (stranger, other.manager):
        manager.shutdown()


# Joining and restarting (torchft's traps 6, 7, 13, 14, 16 are not inherited).


def test_checkpoints_rotate_over_the_members_and_every_round_has_one(tmp_path: Path) -> None:
    uri = (tmp_path / "run").as_uri()
    together([lambda i=i: Island(open_store(uri), f"r-{i}", seed=i).train(6) for i in range(2)])
    store = open_store(uri)
    writers = {}
    for number in checkpoint.complete(store):
        manifest = checkpoint.manifest(store, number)
        assert manifest is not None
        writers[number] = manifest.writer
    assert {number: writer for number, writer in writers.items() if number} == {
        number: f"r-{number % 2}" for number in range(1, 7)
    }


def test_damaged_checkpoint_is_skipped_for_the_next_older_one(store: MemoryStore) -> None:
    survivor = Island(store, "a", minimum=1).train(4)
    newest = checkpoint.manifest(store, checkpoint.complete(store)[0])
    assert newest is not None
    key = keys.checkpoint_part(newest.round, newest.parts[0].digest)
    damaged = bytearray(store.read(key) or b"")
    damaged[-1] ^= 1
    store.replace(key, damaged)
    late = Island(store, "b", minimum=1, seed=3)
    with late.diloco:
        late.manager.catch_up(late.inner)
    assert torch.equal(late.originals["weight"], survivor.originals["weight"])
    late.manager.shutdown()


def test_a_payload_that_cannot_be_read_is_passed_by_a_later_checkpoint(store: MemoryStore) -> None:
    survivor = Island(store, "a", minimum=1, grace_s=0.1).train(2, close=False)
    late = Island(store, "b", minimum=1, seed=3, max_retries=None)
    with late.diloco:
        late.manager.catch_up(late.inner)
        survivor.train(5)
        for entry in store.list(keys.PAYLOADS):
            if keys.round_of(entry.key) == 3:
                store.delete(entry.key)
        late.manager.lifecycle.at_boundary = True
        late.manager.catch_up(late.inner)
    assert late.manager.current_step() == 5
    assert torch.equal(late.originals["weight"], survivor.originals["weight"])
    late.manager.shutdown()


def test_a_join_that_failed_is_tried_again_not_taken_for_done(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor = Island(store, "a", minimum=1).train(2)
    late = Island(store, "b", minimum=1, seed=3)

    def away(*_: object) -> list[int]:
        raise Unauthorized("no right to list")

    with late.diloco:
        with monkeypatch.context() as broken:
            broken.setattr(checkpoint, "complete", away)
            with pytest.raises(Unauthorized):
                late.manager.catch_up(late.inner)
        late.manager.catch_up(late.inner)
    assert torch.equal(late.originals["weight"], survivor.originals["weight"])
    late.manager.shutdown()


def test_joining_replica_starts_from_the_shared_not_the_writers_parameters(store: MemoryStore) -> None:
    """Between fragments the writer's model holds its own progress; a copy of that is not ours to contribute."""
    survivor = Island(store, "a", minimum=1, sync_every=2).train(2, close=False)
    with torch.no_grad():
        survivor.model.weight.add_(1.0)  # its own progress since the exchange
    survivor.manager.shutdown()
    late = Island(store, "b", minimum=1, seed=3)
    with late.diloco:
        late.manager.catch_up(late.inner)
    assert torch.equal(late.model.weight, late.originals["weight"])
    late.manager.shutdown()


@pytest.mark.parametrize("by_hand", [True, False])
def test_fragments_alone_are_enough_to_join_and_to_fall_behind(store: MemoryStore, *, by_hand: bool) -> None:
    """No state of the model's own is registered: its parameters are taken from the fragments."""
    survivor = Island(store, "a", minimum=1, grace_s=0.1).train(2, close=False)
    bare = manager_of(store, "b", minimum=1)
    model = nn.Linear(4, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(bare, [model], inner, [torch.optim.SGD(model.parameters(), lr=0.7)], sync_every=2) as diloco:
        if by_hand:
            bare.catch_up(inner)
        else:
            bare.disallow_state_dict_read()
        originals = diloco._fragments[0].original_parameters
        assert torch.equal(model.weight, originals["weight"])
        assert bare.current_step() >= 1
        survivor.train(4)
        for _ in range(2):
            inner.step()  # a round behind: followed at its sync
        inner.step()  # and at the boundary it goes on from a checkpoint
        assert bare.current_step() >= 3
    bare.shutdown()


def test_replica_behind_without_an_optimizer_jumps_by_checkpoint(store: MemoryStore) -> None:
    """DDP's way: no empty steps, so a joiner must reach the head by checkpoints to ever contribute."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    own = {"state_dict": model.state_dict, "load_state_dict": model.load_state_dict}
    a = manager_of(store, "a", minimum=1, grace_s=0.1, **own)
    b = manager_of(store, "b", minimum=1, state_dict=other.state_dict, load_state_dict=other.load_state_dict)
    b.start_quorum()
    clock, often = SystemClock(), Backoff(first=0.001, cap=0.01)
    a.start_quorum()
    for number in (1, 2, 3):
        assert a.allreduce(torch.ones(1)).wait()
        assert a.should_commit()
        a.start_quorum()  # the boundary at which the round's checkpoint is taken; the next one waits for this
        wait_until(clock, lambda n=number: n in checkpoint.complete(store) or None, clock.now() + 10, often)
    assert b.allreduce(torch.zeros(1)).wait()
    assert b.should_commit()  # it follows one round
    b.start_quorum()
    assert b.current_step() == 3
    for manager in (a, b):
        manager.shutdown()


def test_training_continues_after_state_can_no_longer_be_stored(store: MemoryStore) -> None:
    island = Island(store, "a", minimum=1)
    state: dict[str, object] = {}
    island.manager.register_state_dict_fn("more", lambda _: None, lambda: state)
    island.train(1, close=False)
    state["open file"] = object()
    island.train(3)
    assert island.manager.current_step() == 3


def test_trap_6_restarted_replica_is_at_the_head_before_its_first_step(store: MemoryStore) -> None:
    survivor = Island(store, "a", minimum=1).train(5)
    late = Island(store, "b", minimum=1, seed=9)
    with late.diloco:
        followed = late.manager.catch_up(late.inner)
    assert late.steps == 0
    assert late.manager.current_step() == 5
    assert followed == 5 - checkpoint.complete(store)[0]
    for name, original in survivor.originals.items():
        assert torch.equal(late.originals[name], original)
        assert torch.equal(dict(late.model.named_parameters())[name], original)
    late.manager.shutdown()


def test_trap_6_without_any_checkpoint_the_log_alone_leads_to_the_head(store: MemoryStore) -> None:
    survivor = Island(store, "a", minimum=1, checkpoint_every=1000).train(5)
    late = Island(store, "b", minimum=1, seed=9)
    with late.diloco:
        assert late.manager.catch_up(late.inner) == 5
    for name, original in survivor.originals.items():
        assert torch.equal(late.originals[name], original)
    late.manager.shutdown()


def test_trap_7_every_replica_contributes_its_own_gradient_from_round_0(store: MemoryStore) -> None:
    together([lambda i=i: Island(store, f"r-{i}", seed=i, minimum=3).train(2) for i in range(3)])
    for r in range(2):
        digests = {c.parts[0].digest for c in contributions(store) if c.round == r}
        assert len(digests) == 3


def test_trap_13_nothing_in_the_runtime_can_load_a_pickle() -> None:
    root = Path(skerry.runtime.manager.__file__).parent
    for path in root.rglob("*.py"):
        code = path.read_text()
        assert "import pickle" not in code, path
        assert "torch.load" not in code, path
        assert "torch.save" not in code, path


def test_trap_14_unwritable_checkpoint_does_not_stop_the_commits() -> None:
    class NoCheckpoints(MemoryStore):
        broken = False
        refused = 0

        def create(self, key: str, data: object) -> bool:
            if self.broken and key.startswith(keys.CHECKPOINTS):
                self.refused += 1
                raise Unauthorized(f"no right to write {key}")
            return super().create(key, data)  # type: ignore[arg-type]

    store = NoCheckpoints()
    island = Island(store, "a", minimum=1)
    island.train(1, close=False)
    store.broken = True
    island.train(4)
    assert island.manager.current_step() == 4
    assert store.refused > 0
    assert checkpoint.complete(store) == [0]


def test_trap_16_the_run_ends_when_the_quorum_has_finished(store: MemoryStore) -> None:
    def early() -> None:
        Island(store, "a").train(2)

    def patient() -> str:
        island = Island(store, "b", seed=1)
        try:
            island.train(5, close=False)
        except RunFinished as error:
            return str(error)
        finally:
            island.manager.shutdown()
        return "trained on alone"

    run = run_record(SystemClock(), slots=("a", "b"), min_replicas=2, rounds=None)
    store.create(keys.RUN, run.to_bytes())
    _, message = together([early, patient])
    assert "finished=a" in message


def test_start_quorum_after_the_last_round_raises_run_finished(store: MemoryStore) -> None:
    run = run_record(SystemClock(), slots=("a",), rounds=2)
    store.create(keys.RUN, run.to_bytes())
    island = Island(store, "a", minimum=1)
    with pytest.raises(RunFinished, match="all 2 rounds"):
        island.train(3, close=False)
    assert island.manager.finished
    island.manager.shutdown()


def test_initial_weights_are_shared_unless_init_sync_is_off(store: MemoryStore) -> None:
    a = Island(store, "a", seed=1, minimum=1)
    with a.diloco:
        a.manager.catch_up(a.inner)
    b, c = Island(store, "b", seed=2, minimum=1), Island(store, "c", seed=3, minimum=1, init_sync=False)
    for island in (b, c):
        with island.diloco:
            island.manager.catch_up(island.inner)
    assert torch.equal(a.model.weight, b.model.weight)
    assert not torch.equal(a.model.weight, c.model.weight)
    for island in (a, b, c):
        island.manager.shutdown()


def test_catch_up_outside_a_wrapper_raises_invalid(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.runtime.training.catch_up._EMPTY_STEPS", 10)
    Island(store, "a", minimum=1, checkpoint_every=100).train(2)
    late = Island(store, "b", minimum=1)
    with pytest.raises(Invalid, match="inside `with DiLoCo"):
        late.manager.catch_up(late.inner)
    late.manager.shutdown()


def test_an_optimizer_that_needs_a_closure_is_refused(store: MemoryStore) -> None:
    island = Island(store, "a", minimum=1)
    with pytest.raises(Invalid, match="closure"):
        island.manager.catch_up(torch.optim.LBFGS(island.model.parameters()))
    island.manager.shutdown()


def test_gradients_in_hand_survive_catching_up(store: MemoryStore) -> None:
    Island(store, "a", minimum=1, checkpoint_every=100).train(2)
    late = Island(store, "b", minimum=1)
    late.model(torch.ones(1, 4)).sum().backward()
    gradient = late.model.weight.grad
    with late.diloco:
        late.manager.catch_up(late.inner)
    assert late.model.weight.grad is gradient
    late.manager.shutdown()


def test_second_shutdown_leaves_the_last_heartbeat_unchanged(store: MemoryStore) -> None:
    manager = manager_of(store, "a", minimum=1)
    manager.shutdown()
    before = store.read(keys.heartbeat("a"))
    manager.shutdown()
    assert before is not None
    assert b'"phase":"finished"' in bytes(before)
    assert store.read(keys.heartbeat("a")) == before
