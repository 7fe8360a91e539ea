"""The clique strategy between gloo ranks: each defect of the resiliency extension 0.4.1 as a test."""

from __future__ import annotations

import io
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.ranks import RankError, on_ranks, outcomes_of

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.ranks.interface import RankLost
from skerry.runtime.replication import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    GroupWrapper,
    LazyCliqueReplicationStrategy,
    NoReplicasAvailableError,
    transport,
)

pytestmark = pytest.mark.slow


def state_of(rank: int, tensors: int = 3) -> BasicTensorAwareStateDict:
    base = torch.arange(12.0).view(3, 4) + 100 * rank
    named: dict[str, Any] = {str(number): torch.full((rank + 2,), number) for number in range(tensors)}
    return BasicTensorAwareStateDict(
        {"step": rank, "tied": (base, base.t()), **named, "fp8": base.to(torch.float8_e4m3fn)}
    )


def values(state: Any) -> list[Any]:
    return [state.state_dict["step"], *(tensor.contiguous().view(torch.uint8).tolist() for tensor in state.tensors)]


def clique(jump: int | None = 1, factor: int = 2, **options: Any) -> CliqueReplicationStrategy:
    built = CliqueReplicationStrategy.from_replication_params(jump, factor)
    return CliqueReplicationStrategy(built.local_group, **options) if options else built


def through_a_file(held: Any) -> Any:
    """As the managers of the extension do."""
    file = io.BytesIO()
    torch.save(held, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def flip(state: Any) -> None:
    next(iter(state.tensors)).view(torch.uint8).view(-1)[3] ^= 16


@pytest.mark.parametrize(("world", "jump", "factor"), [(2, 1, 2), (4, 2, 2), (4, 1, 4)])
def test_every_rank_of_a_clique_holds_every_state(world: int, jump: int, factor: int) -> None:
    def work(rank: int) -> None:
        strategy = clique(jump, factor)
        copies, ids = strategy.replicate(state_of(rank), ("id", rank))
        ranks = strategy.local_group.ranks
        assert ids == [("id", owner) for owner in ranks]
        assert [values(copy) for copy in copies] == [values(state_of(owner)) for owner in ranks]

    on_ranks(world, work)


def test_own_state_stays_whole_and_shares_its_tensors_with_its_copy() -> None:
    def work(rank: int) -> None:
        state = state_of(rank)
        given = state.state_dict
        copies, _ = clique().replicate(state, rank)
        assert not state.is_hollow
        assert state.state_dict["tied"][0] is given["tied"][0]
        assert copies[rank] is not state
        assert next(iter(copies[rank].tensors)).data_ptr() == next(iter(state.tensors)).data_ptr()
        copies[1 - rank].state_dict["tied"][0][0, 1] = -1.0  # type: ignore[attr-defined]
        assert copies[1 - rank].state_dict["tied"][1][1, 0] == -1.0  # type: ignore[attr-defined]

    on_ranks(2, work)


def test_lost_rank_gets_its_state_from_a_peer() -> None:
    def work(rank: int) -> None:
        strategy = clique(2, 2)
        copies, ids = strategy.replicate(state_of(rank), rank)
        held = dict(zip(ids, copies, strict=True)) if rank != 1 else {}
        available = [[0, 2], [], [0, 2], [1, 3]]
        plan = strategy.retrieve_plan(available, [rank])
        received = strategy.retrieve_execute(plan, {id_: held[id_] for id_ in plan.required_ids()})
        assert list(received) == [rank]
        assert values(received[rank]) == values(state_of(rank))
        assert rank == 1 or received[rank] is held[rank]

    on_ranks(4, work)


@pytest.mark.parametrize("tensors", [10, 2000])
def test_number_of_calls_does_not_grow_with_the_tensors(tensors: int) -> None:
    def work(rank: int) -> int:
        strategy, calls = clique(), 0
        for name in ("isend", "irecv", "all_gather", "broadcast", "send", "recv"):
            original = getattr(dist, name)

            def counted(*args: Any, original: Any = original, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                return original(*args, **named)

            setattr(dist, name, counted)
        strategy.replicate(state_of(rank, tensors), rank)
        return calls

    assert on_ranks(2, work) == [4 + 2 * 3] * 2  # headers, agreement; a buffer of each dtype to and from the peer


@pytest.mark.parametrize("travels_in_file", [False, True])
def test_flipped_bit_is_never_handed_out_and_another_copy_is_used(travels_in_file: bool) -> None:  # noqa: FBT001
    def work(rank: int) -> None:
        strategy = clique(1, 3)
        copies, ids = strategy.replicate(state_of(rank), rank)
        held = dict(zip(ids, copies, strict=True))
        if travels_in_file:
            held = through_a_file(held)
        available = [[1, 2], [0, 1, 2], [0, 1, 2]]
        if rank == 1:
            flip(held[0])
        plan = strategy.retrieve_plan(available, [0] if rank == 0 else [])
        assert plan.entries[0].sender == 1
        received = strategy.retrieve_execute(plan, {id_: held[id_] for id_ in plan.required_ids(alternates=True)})
        assert rank or values(received[0]) == values(state_of(0))
        if rank == 2:
            flip(held[0])
        with pytest.raises(NoReplicasAvailableError, match=r"copy of rank 1 is damaged.*copy of rank 2 is damaged"):
            strategy.retrieve_execute(plan, {id_: held[id_] for id_ in plan.required_ids(alternates=True)})

    on_ranks(3, work)


def test_own_damaged_copy_is_replaced_by_a_peers() -> None:
    def work(rank: int) -> None:
        strategy = clique()
        copies, ids = strategy.replicate(state_of(rank), rank)
        held = dict(zip(ids, copies, strict=True))
        plan = strategy.retrieve_plan([[0, 1], [0, 1]], [rank])
        if rank == 0:
            held[0] = through_a_file(held[0])  # the caller's own tensors stay
            flip(held[0])
        received = strategy.retrieve_execute(plan, held)
        assert values(received[rank]) == values(state_of(rank))

    on_ranks(2, work)


def test_bit_that_flips_in_transit_is_an_error_on_all_ranks() -> None:
    def work(rank: int) -> None:
        strategy = clique(1, 2)
        move = transport.Phase.move

        def damaging(self: Any, out: Any, into: Any) -> None:
            move(self, out, into)
            if rank == 3:
                into[0][1][0][1] ^= 1

        transport.Phase.move = damaging  # type: ignore[method-assign]
        with pytest.raises(Corrupt, match="rank 3: a copy was damaged while it was sent: 2 from rank 2 to rank 3"):
            strategy.replicate(state_of(rank), rank)

    on_ranks(4, work)


def test_missing_copy_is_the_same_error_in_all_cliques() -> None:
    def work(rank: int) -> str:
        strategy = clique(1, 2)
        with pytest.raises(NoReplicasAvailableError) as caught:
            strategy.retrieve_plan([[0, 1], [0, 1], [], []], [rank])
        return str(caught.value)

    assert set(on_ranks(4, work)) == {"no copy is left: 2: ranks 2, 3 do not hold it; 3: ranks 2, 3 do not hold it"}


def test_data_that_a_sender_lacks_is_an_error_on_all_ranks() -> None:
    def work(rank: int) -> None:
        strategy = clique(1, 2)
        plan = strategy.retrieve_plan([[], [0], [2], [3]], [rank] if rank == 0 else [])
        with pytest.raises(NoReplicasAvailableError, match="0: the copy of rank 1 was not provided"):
            strategy.retrieve_execute(plan, {})

    on_ranks(4, work)


def test_state_that_cannot_be_sent_is_an_error_on_all_ranks() -> None:
    def work(rank: int) -> None:
        state = state_of(rank)
        if rank == 2:
            state.state_dict["sparse"] = torch.zeros(4, 4).to_sparse()
        strategy = clique()
        with pytest.raises(Invalid, match="rank 2: cannot copy a tensor"):
            strategy.replicate(state, rank)
        assert not state.is_hollow
        copies, _ = strategy.replicate(state_of(rank), rank)  # the group can still be used
        assert len(copies) == 2

    on_ranks(4, work)


def test_rank_that_does_not_come_is_lost_at_the_deadline() -> None:
    def work(rank: int) -> None:
        strategy = clique(deadline=timedelta(seconds=0.3))
        if rank == 0:
            with pytest.raises(RankLost, match="restart the replica"):
                strategy.replicate(state_of(rank), rank)

    on_ranks(2, work)


def test_death_of_a_rank_is_an_error_on_all_others_by_the_deadline() -> None:
    def work(rank: int) -> None:
        strategy = clique(deadline=timedelta(seconds=1))
        dist.barrier()
        if rank == 3:
            os._exit(9)
        with pytest.raises(RankLost):
            strategy.replicate(state_of(rank), rank)

    *survivors, dead = outcomes_of(4, work)
    assert survivors == [None] * 3
    assert isinstance(dead, RankError)


def test_memory_to_pack_small_tensors_into_does_not_grow_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PIECE_BYTES", 1000)
    isend, packed = dist.isend, set[int]()

    def recorded(piece: torch.Tensor, to: int, **more: Any) -> dist.Work | None:
        # The order of the tensors is that of their memory, and a last piece of one tensor is sent from where it is.
        if piece.untyped_storage().nbytes() == transport.PIECE_BYTES:
            packed.add(piece.untyped_storage().data_ptr())
        return isend(piece, to, **more)

    monkeypatch.setattr(dist, "isend", recorded)

    def work(rank: int) -> None:
        state = BasicTensorAwareStateDict([torch.full((n % 90,), rank + n / 7) for n in range(300)])
        copies, _ = clique(1, 3).replicate(state, rank)
        for owner, copy in enumerate(copies):
            assert all(tensor.equal(torch.full((n % 90,), owner + n / 7)) for n, tensor in enumerate(copy.tensors))

        assert 0 < len(packed) <= transport.PACKED

    on_ranks(3, work)


def test_pieces_through_a_device_arrive_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of NCCL, with the CPU as the device."""
    monkeypatch.setattr(transport, "DEVICE_PIECE_BYTES", 1000)
    monkeypatch.setattr(transport.Phase, "move", transport.Phase.move_by_device)

    def work(rank: int) -> None:
        sizes = [700, 5000, 3000]
        state = BasicTensorAwareStateDict([torch.randn(sizes[rank], generator=torch.manual_seed(rank))])
        copies, _ = clique(1, 3).replicate(state, rank)
        for owner, copy in enumerate(copies):
            assert next(iter(copy.tensors)).equal(torch.randn(sizes[owner], generator=torch.manual_seed(owner)))

    on_ranks(3, work)


def test_lazy_strategy_takes_the_ranks_of_a_machine_as_its_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = LazyCliqueReplicationStrategy()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def work(rank: int) -> list[int]:
        copies, _ = strategy.replicate(state_of(rank), rank)
        assert len(copies) == 2
        return strategy.replication_strategy.local_group.ranks

    assert on_ranks(4, work) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # a single machine: copies protect from the loss of a process
    assert on_ranks(4, work)[0] == [0, 2]


def test_factor_and_jump_that_make_no_copy_are_refused() -> None:
    def work(_: int) -> None:
        with pytest.raises(Invalid, match="a copy needs another rank: replication_factor=1"):
            clique(1, 1)
        with pytest.raises(Invalid, match="cannot divide 2 ranks into groups of 2 that are 2 ranks apart"):
            clique(2, 2)

    on_ranks(2, work)


def test_batch_that_one_rank_cannot_send_is_an_error_on_all_ranks() -> None:
    def work(rank: int) -> None:
        tensor = torch.zeros(2, 2).to_sparse() if rank == 1 else torch.zeros(2, 2)
        with pytest.raises(Invalid, match="rank 1: cannot copy a tensor to a peer: number=0"):
            GroupWrapper(deadline=timedelta(seconds=20)).all_gather_batch([tensor])

    on_ranks(3, work)


def test_batch_of_every_rank_is_gathered_in_order() -> None:
    def work(rank: int) -> None:
        group = GroupWrapper()
        rows = group.all_gather_batch([torch.full((rank + 1,), rank)] * rank, target_device="cpu")
        assert [[tensor.tolist() for tensor in row] for row in rows] == [[], [[1, 1]], [[2, 2, 2]] * 2]
        assert group.all_gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert GroupWrapper.wrap(group) is group
        with pytest.raises(Invalid, match="neither"):
            GroupWrapper.wrap("no group")

    on_ranks(3, work)
