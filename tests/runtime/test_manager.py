"""ObjectStoreManager: rounds over the log, and faults inside a round, with managers in threads over a memory store."""

from __future__ import annotations

import threading
from datetime import timedelta
from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.kit.managers import (
    Island,
    assert_same_parameters,
    begin_run,
    commits,
    contributions,
    decisions,
    exchange,
    islands_of,
    manager_of,
    members,
    receipts,
    together,
    train_all,
    train_and_save_each,
    wait_for,
)
from tests.kit.stores import HookedStore
from tests.support.clocks import StandingClock
from torch.distributed.distributed_c10d import ReduceOp
from torchft.manager import Manager
from torchft.process_group import ManagedProcessGroup, ProcessGroupGloo

from skerry.runtime import contract
from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Fenced, Invalid, Retryable, RunFinished, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.records import Heartbeat
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.store import buffers_of, open_store, retrying
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store import Data, Store


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def phase_of(store: Store, slot: str) -> str:
    key = keys.heartbeat(slot)
    return Heartbeat.parse(store.read(key) or b"", key).phase


def exchange_together(managers: Sequence[ObjectStoreManager], *tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Each manager runs one round with its own tensors, all at the same time."""
    pairs = zip(managers, tensors, strict=True)
    return together([lambda m=manager, t=own: exchange(m, *t) for manager, own in pairs])


def two(store: Store, *, minimum: int = 2, **settings: object) -> list[ObjectStoreManager]:
    """The managers of a and b, for which round 0 waits."""
    begin_run(store, "ab", minimum=minimum)
    return [manager_of(store, slot, minimum=minimum, **settings) for slot in "ab"]


# One round.


def test_tensors_of_a_round_are_averaged_in_one_contribution(store: MemoryStore) -> None:
    def tensors(value: float) -> list[torch.Tensor]:
        several = [torch.full((7, 5), value) for _ in range(20)]
        return [torch.full((4, 3), value).t(), torch.full((5,), value).bfloat16(), torch.tensor(2 * value), *several]

    rows = tensors(1.0), tensors(4.0)
    assert exchange_together(two(store), *rows) == [True, True]
    assert [[tensor.unique().tolist() for tensor in row] for row in rows] == [[[2.5], [2.5], [5.0], *[[2.5]] * 20]] * 2
    assert [(c.slot, c.exchange, len(c.parts)) for c in contributions(store)] == [("a", 0, 1), ("b", 0, 1)]
    assert len(store.list(keys.PAYLOADS)) == 2


def test_integers_are_reduced_in_their_own_type(store: MemoryStore) -> None:
    def reduce(manager: ObjectStoreManager, value: int) -> list[int]:
        manager.start_quorum()
        tensors = [torch.tensor([value]) for _ in range(3)]
        for tensor, op in zip(tensors, (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN), strict=True):
            manager.allreduce(tensor, reduce_op=op)
        assert manager.should_commit()
        return [int(tensor.item()) for tensor in tensors]

    a, b = two(store)
    assert together([lambda: reduce(a, 3), lambda: reduce(b, 4)]) == [[7, 4, 3]] * 2


def test_unsupported_allreduce_is_refused(store: MemoryStore) -> None:
    manager = manager_of(store, "a", minimum=1)
    with pytest.raises(RuntimeError, match="start_quorum"):
        manager.allreduce(torch.ones(1))
    with pytest.raises(Invalid, match="divides by size"):
        ManagedProcessGroup(manager)  # type: ignore[arg-type]
    manager.start_quorum()
    with pytest.raises(Invalid, match="only floating point"):
        manager.allreduce(torch.ones(1, dtype=torch.int64))
    with pytest.raises(Invalid, match="elements share memory"):
        manager.allreduce(torch.ones(1).expand(4))
    with pytest.raises(Invalid, match="PRODUCT"):
        manager.allreduce(torch.ones(1), reduce_op=ReduceOp.PRODUCT)
    assert manager.should_commit()
    with pytest.raises(Invalid, match="ObjectStoreAllReduce"):
        manager.allreduce(torch.ones(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_replica_size": None}, "min_replica_size is needed"),
        (
            {"replica_id": None, "rank": 0, "world_size": 2, "store_addr": "h", "store_port": 1},
            "needed for several ranks",
        ),
        ({"replica_id": "a b"}, "not a slot name"),
        ({"min_replica_size": 0}, "min_replica_size=0"),
        ({"world_size": 2}, "store_addr"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
    ],
)
def test_bad_arguments_are_refused_before_any_write(
    store: MemoryStore, arguments: dict[str, object], message: str
) -> None:
    settings: dict[str, object] = {"replica_id": "a", "min_replica_size": 1} | arguments
    with pytest.raises(Invalid, match=message):
        ObjectStoreManager(store, **settings)  # type: ignore[arg-type]
    assert store.list(keys.MEMBERS) == []


# Rounds.


def test_manager_without_a_replica_id_has_a_slot_of_its_own(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKERRY_SLOT", raising=False)
    slots = {manager_of(store, None).session.presence.slot for _ in range(2)}
    assert len(slots) == 2
    monkeypatch.setenv("SKERRY_SLOT", "local-3")
    assert manager_of(store, None).session.presence.slot == "local-3"


def test_manager_accepts_the_positional_call_of_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    uri = "memory://positional/call"
    begin_run(open_store(uri), ["local-0"])
    replica = contract.Contract(run_uri=uri, slot="local-0", index=0, replicas=1)
    for name, text in replica.environment().items():
        monkeypatch.setenv(name, text)
    arguments: list[Any] = [ProcessGroupGloo(), lambda _: None, lambda: {"weight": 3}, 2, False]
    manager = ObjectStoreManager(*arguments)
    assert manager.session.presence.slot == "local-0"
    assert manager._manager_state_dict()["user"] == {"default": {"weight": 3}}  # noqa: SLF001  torchft's name
    manager.shutdown()
    _, *names = signature(Manager).parameters
    assert list(signature(ObjectStoreManager).parameters)[1 : len(names) + 1] == names


@pytest.mark.parametrize(("uri", "name"), [("memory://runs/tiny-gpt", "tiny-gpt"), ("memory://", "unnamed")])
def test_run_that_a_script_starts_is_named_as_its_prefix(uri: str, name: str) -> None:
    assert manager_of(MemoryStore(uri), "a").run.name == name


def test_view_that_helpers_of_torchft_read_holds_state_and_position(store: MemoryStore) -> None:
    manager = manager_of(store, "a", minimum=1, state_dict=lambda: {"weight": 3}, load_state_dict=lambda _: None)
    assert manager._manager_state_dict() == {  # noqa: SLF001  torchft's name
        "user": {"default": {"weight": 3}},
        "torchft": {"step": 0, "batches_committed": 0},
    }


def test_trap_7_each_replica_contributes_its_own_gradient_to_equal_bits(store: MemoryStore) -> None:
    islands = islands_of(store, ["r-0", "r-1", "r-2"], minimum=3)
    train_all(islands, 6)
    assert_same_parameters(islands)
    assert [commit.participants for commit in commits(store)] == [3] * 6
    assert {island.manager.batches_committed() for island in islands} == {18}
    for number in range(6):
        written = receipts(store, number)
        assert sorted(written) == ["r-0", "r-1", "r-2"]
        assert len({(receipt.averages, receipt.state) for receipt in written.values()}) == 1
        assert all(receipt.scope == "fragments" and receipt.state for receipt in written.values())
        assert len({c.parts[0].digest for c in contributions(store) if c.round == number}) == 3


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


def test_rounds_without_tensors_are_committed(store: MemoryStore) -> None:
    """torchft's own tests count rounds up that way, without another start_quorum."""
    managers = two(store)
    for manager in managers:
        manager.start_quorum()
    for _ in range(2):
        assert together([manager.should_commit for manager in managers]) == [True, True]
    assert [manager.current_step() for manager in managers] == [2, 2]


def test_exchange_with_a_delay_runs_during_inner_steps_once_a_round(store: MemoryStore) -> None:
    """Prepared after step 2, due after step 4: after step 3 it is uploaded, decided and averaged in the background."""
    island = Island(store, "a", minimum=1, sync_every=4, wrapper={"fragment_sync_delay": 2}).take(3)
    wait_for(lambda: decisions(store))
    assert island.manager.current_step() == 0
    assert commits(store) == []
    with pytest.raises(Invalid, match="one exchange in a round"):
        island.manager.allreduce(torch.ones(1))
    island.take(1)
    assert island.manager.current_step() == len(commits(store)) == 1


# Faults inside a round.


@pytest.mark.parametrize("fault", ["not finite", "error"])
def test_replica_that_abstains_receives_every_average(store: MemoryStore, fault: str) -> None:
    closed = threading.Event()

    def work(manager: ObjectStoreManager, value: float) -> list[float]:
        manager.start_quorum()
        if value > 1 and fault == "error":
            manager.report_error(RuntimeError("bad batch"))
        tensors = [torch.tensor([value]), torch.tensor([value])]
        for tensor in tensors:
            assert manager.allreduce(tensor).wait()
        if value > 1:  # after its error only the other replica can know that the round is complete
            assert closed.wait(300)
        assert manager.should_commit()
        closed.set()
        return [tensor.item() for tensor in tensors]

    a, b = two(store, minimum=1)
    value = 1000.0 if fault == "error" else float("inf")
    assert together([lambda: work(a, 1.0), lambda: work(b, value)]) == [[1.0, 1.0]] * 2
    assert members(store) == [["a"], ["a"]]


def test_error_between_two_bursts_leaves_the_round_whole_and_others_alive(store: MemoryStore) -> None:
    """b fails in backward after its first bucket: a and c close the round with both, and b follows."""
    begin_run(store, "abc", minimum=2)
    managers = {slot: manager_of(store, slot) for slot in "abc"}

    def round_of(slot: str, *, fails: bool = False) -> tuple[bool, list[float]]:
        manager = managers[slot]
        manager.start_quorum()
        tensors = [torch.tensor([float(ord(slot))]), torch.tensor([2.0 * ord(slot)])]
        for tensor in tensors[: 1 if fails else 2]:
            assert manager.allreduce(tensor).wait()
        if fails:
            manager.report_error(RuntimeError("out of memory in backward"))
        return manager.should_commit(), [tensor.item() for tensor in tensors]

    a, b, c = together([lambda s=slot: round_of(s, fails=s == "b") for slot in "abc"])
    assert (a[0], b[0], c[0]) == (True, False, True)
    assert a[1] == c[1] == [ord("b"), 2 * ord("b")]
    assert [(decision.round, decision.exchange) for decision in decisions(store)] == [(0, 0), (0, 1)]
    assert [len(commit.exchanges) for commit in commits(store)] == [2]
    assert round_of("b") == a
    assert managers["b"].current_step() == 1


def test_round_of_two_bursts_recovers_from_an_error_between_them(store: MemoryStore) -> None:
    """Both are needed: the one that failed must withdraw its abstention when it tries again."""

    def work(manager: ObjectStoreManager, *, fails: bool) -> list[float]:
        while manager.current_step() == 0:
            manager.start_quorum()
            first, second = torch.tensor([1.0]), torch.tensor([3.0])
            manager.allreduce(first).wait()
            if fails:
                manager.report_error(RuntimeError("out of memory in backward"))
            else:
                manager.allreduce(second).wait()
            fails = False
            manager.should_commit()
        return [first.item(), second.item()]

    a, b = two(store)
    assert together([lambda: work(a, fails=True), lambda: work(b, fails=False)]) == [[1.0, 3.0]] * 2


def test_failing_callback_leaves_the_round_open_for_another_attempt(store: MemoryStore) -> None:
    def fail(_: object) -> None:
        raise LookupError("a user's callback")

    manager = manager_of(store, "a", minimum=1)
    manager.start_quorum()
    work = manager.allreduce(torch.ones(1))
    work.get_future().then(fail)
    assert not work.wait()
    assert not manager.should_commit()
    assert exchange(manager, torch.ones(1))


def test_empty_step_waits_for_a_replica_with_tensors(store: MemoryStore) -> None:
    a, b = two(store)
    mine, other = torch.tensor([2.0]), torch.tensor([4.0])

    def empty_first() -> bool:
        a.start_quorum()
        assert not a.should_commit()  # nothing to average, but b has a tensor
        return exchange(a, mine)

    assert together([empty_first, lambda: exchange(b, other)]) == [True, True]
    assert mine.item() == other.item() == 3.0


def test_error_before_any_allreduce_fails_the_round_only_here(store: MemoryStore) -> None:
    a, b = two(store, minimum=1, grace_s=0.2)
    b.start_quorum()
    try:
        raise RuntimeError("the batch could not be read")  # noqa: TRY301  with a traceback, as in a script
    except RuntimeError as error:
        b.report_error(error)
    errored = b.errored()
    assert errored is not None
    assert errored is b.errored()
    assert "test_manager.py" in errored.stack_trace
    assert not b.should_commit()
    assert exchange(a, torch.ones(1))


def test_too_few_replicas_fail_the_round_then_the_job_with_the_cause(store: MemoryStore) -> None:
    manager = manager_of(store, "a", timeout=timedelta(milliseconds=100), max_retries=1)
    manager.start_quorum()
    assert not manager.should_commit()
    assert manager.current_step() == 0
    manager.start_quorum()
    with pytest.raises(RuntimeError, match="exceeding max_retries=1") as caught:
        manager.should_commit()
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert "min_replica_size=2" in str(caught.value.__cause__)


def test_contribution_of_a_failed_round_counts_in_the_retry(store: MemoryStore) -> None:
    clock = StandingClock()
    a = manager_of(store, "a", timeout=timedelta(seconds=1), clock=clock)

    def time_out() -> None:
        wait_for(lambda: contributions(store))
        clock.advance(1.0)

    a.start_quorum()
    first = a.allreduce(torch.tensor([1.0]))
    assert together([first.wait, lambda: time_out() or False]) == [False, False]
    assert not a.should_commit()
    retried, other = torch.tensor([50.0]), torch.tensor([3.0])
    exchange_together([a, manager_of(store, "b")], [retried], [other])
    assert retried.item() == other.item() == 2.0  # of 1 and 3: what was contributed first


def test_replaced_incarnation_is_fenced(store: MemoryStore) -> None:
    old, _ = manager_of(store, "a", minimum=1), manager_of(store, "a", minimum=1)
    old.start_quorum()
    with pytest.raises(Fenced, match="incarnation 1"):
        old.should_commit()
    assert contributions(store) == []


# Checkpoints, and the end.


def test_checkpoints_rotate_over_the_members() -> None:
    store = MemoryStore(clock=SystemClock())
    train_and_save_each(islands_of(store, ["r-0", "r-1"]), 6)
    manifests = [checkpoint.manifest(store, number) for number in checkpoint.complete(store)]
    writers = {manifest.round: manifest.writer for manifest in manifests if manifest is not None and manifest.round}
    assert writers == {number: f"r-{number % 2}" for number in range(1, 7)}


def test_training_continues_after_state_can_no_longer_be_stored(store: MemoryStore) -> None:
    island = Island(store, "a", minimum=1)
    state: dict[str, object] = {}
    island.manager.register_state_dict_fn("more", lambda _: None, lambda: state)
    island.train(1, close=False)
    state["open file"] = object()
    assert island.train(3).manager.current_step() == 3


def test_trap_14_unwritable_checkpoint_does_not_stop_the_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "REFUSAL_PATIENCE_S", 0.0)
    refused: list[str] = []

    def refuse(verb: str, key: str) -> None:
        if verb == "create" and key.startswith(keys.CHECKPOINTS) and MemoryStore.read(store, keys.commit(0)):
            refused.append(key)
            raise Unauthorized(f"no right to write {key}")

    store = HookedStore(refuse)
    assert Island(store, "a", minimum=1).train(4).manager.current_step() == 4
    assert refused
    assert checkpoint.complete(store) == [0]


def test_trap_16_run_ends_when_the_quorum_has_finished(store: MemoryStore) -> None:
    a, b = two(store)

    def leave() -> None:
        assert exchange(a, torch.ones(1))
        a.shutdown()

    def continue_alone() -> None:
        assert exchange(b, torch.ones(1))
        b.start_quorum()
        b.allreduce(torch.ones(1))
        with pytest.raises(RunFinished, match="finished=a"):
            b.should_commit()

    together([leave, continue_alone])


class FailsOnce(MemoryStore):
    """The first write of the last receipt fails, and the first of the last heartbeat."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = {keys.receipt(1, "a"), keys.heartbeat("a")}

    def create(self, key: str, data: Data) -> bool:
        self._fail(key)
        return super().create(key, data)

    def replace(self, key: str, data: Data) -> None:
        if b"finished" in b"".join(buffers_of(data)):
            self._fail(key)
        super().replace(key, data)

    def _fail(self, key: str) -> None:
        if key in self.pending:
            self.pending.remove(key)
            raise Retryable("503")


def test_failed_requests_at_the_end_lose_neither_receipt_nor_phase() -> None:
    store = FailsOnce()
    Island(store, "a", minimum=1).train(2)
    assert not store.pending
    assert list(receipts(store, 1)) == ["a"]
    assert phase_of(store, "a") == "finished"


def test_second_shutdown_leaves_the_last_heartbeat_unchanged(store: MemoryStore) -> None:
    manager = manager_of(store, "a", minimum=1)
    manager.shutdown()
    before = store.read(keys.heartbeat("a"))
    manager.shutdown()
    assert phase_of(store, "a") == "finished"
    assert store.read(keys.heartbeat("a")) == before
