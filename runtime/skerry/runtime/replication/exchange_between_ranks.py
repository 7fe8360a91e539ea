"""Exchanges states between the ranks of a process group, with a seal on every copy.

A call gathers headers, then every rank sends its buffers to all receivers at once, then the ranks of the job agree that
all was right. A rank that fails takes part with its error in the place of its header, so no other rank waits for it.

Headers are pickled, as in the object collectives of torch.distributed: they carry a class of the caller. The ranks of a
job run the same code with the same rights. No file is read this way.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import torch.distributed as dist

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.replication.copy_placement import NoReplicasAvailableError
from skerry.runtime.replication.flat_buffers import Table, flatten, seal_of, unflatten
from skerry.runtime.replication.transport import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import torch

    from skerry.runtime.replication.copy_placement import ExchangePlan
    from skerry.runtime.replication.flat_buffers import Parts
    from skerry.runtime.replication.tensors_of_state_dict import TensorAwareStateDict

T = TypeVar("T")

DEADLINE: Final = timedelta(minutes=5)
"""A hundred gigabytes at 400 MB/s. A rank that takes longer does not come."""
_SEAL: Final = "_skerry_seal"
"""The attribute with the seal of a copy. It survives pickling, and so the extension's files."""


class Header(NamedTuple):
    """Describes a state to a receiver: the state without tensors (pickled), their layout and their seal."""

    hollow: bytes
    table: Table
    seal: str | None

    def state(self, buffers: Sequence[torch.Tensor], device: str, owner: str) -> TensorAwareStateDict:
        """The state, with tensors that are views of the buffers. Raises Corrupt if they do not fit the seal."""
        tensors = unflatten(self.table, buffers)
        if self.seal is not None and seal_of(tensors) != self.seal:
            raise Corrupt(f"a copy was damaged while it was sent: {owner}")
        return self.filled(tensors if device == "cpu" else unflatten(self.table, [part.to(device) for part in buffers]))

    def filled(self, tensors: Sequence[torch.Tensor]) -> TensorAwareStateDict:
        """The state with these tensors."""
        state: TensorAwareStateDict = pickle.loads(self.hollow)  # noqa: S301  of this job, see the module's docstring
        state.insert_tensors(tensors)
        if self.seal is not None:
            setattr(state, _SEAL, self.seal)
        return state


def pack(state: TensorAwareStateDict, *, verify: bool) -> tuple[Header, list[Parts]]:
    """The header and the buffers of a state, which stays whole. verify: seal it."""
    tensors = list(state.pop_tensors())
    try:
        hollow = pickle.dumps(state)
        table, buffers = flatten(tensors)
    finally:
        state.insert_tensors(tensors)
    return Header(hollow, table, seal_of(tensors) if verify else None), buffers


class GroupWrapper:
    """A process group, by the name and the meaning of the resiliency extension. None: all ranks of the job."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, deadline: timedelta = DEADLINE) -> None:
        """deadline: of every call. A rank that waits longer raises RankLost."""
        self._group = group
        self.deadline = deadline
        self.job: dist.ProcessGroup | None = None
        """All ranks of the job, which agree on errors; None for torch's default group."""
        self.memory: list[torch.Tensor] = []
        """To pack tensors into, for all calls."""

    @staticmethod
    def wrap(group: object) -> GroupWrapper:
        """The group itself, or a wrapper of a process group. Raises Invalid for anything else."""
        if isinstance(group, GroupWrapper):
            return group
        if isinstance(group, dist.ProcessGroup):
            return GroupWrapper(group)
        raise Invalid(f"neither a process group nor a GroupWrapper: type={type(group).__name__}")

    @staticmethod
    def from_list_of_groups(list_of_groups: Sequence[object]) -> GroupWrapper:
        """The group that has this rank. Raises Invalid unless it is in exactly one of them."""
        # On other ranks `new_group` returns a number.
        groups = [group for group in list_of_groups if isinstance(group, dist.ProcessGroup)]
        mine = [group for group in groups if dist.get_rank() in dist.get_process_group_ranks(group)]
        if len(mine) != 1:
            raise Invalid(f"rank {dist.get_rank()} is in {len(mine)} of the groups; each rank belongs to one")
        return GroupWrapper(mine[0])

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The wrapped group; None for all ranks."""
        return self._group

    @property
    def ranks(self) -> list[int]:
        """The global ranks, in the order of the group."""
        return list(range(dist.get_world_size())) if self._group is None else dist.get_process_group_ranks(self._group)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self._group)

    @property
    def my_group_rank(self) -> int:
        """This process's rank in the group."""
        return self.get_group_rank()

    @property
    def my_global_rank(self) -> int:
        """This process's rank in the job."""
        return self.get_global_rank()

    def get_group_rank(self, global_rank: int | None = None) -> int:
        """The rank in the group of a rank of the job; None: of this process."""
        return dist.get_rank(self._group) if global_rank is None else self.ranks.index(global_rank)

    def get_global_rank(self, group_rank: int | None = None) -> int:
        """The rank in the job of a rank of the group; None: of this process."""
        return dist.get_rank() if group_rank is None else self.ranks[group_rank]

    def all_gather_object(self, my_obj: T) -> list[T]:
        """An object of every rank, in the order of the group."""
        return gather(phase_of(self), my_obj)

    def all_gather_batch(
        self, my_tensors: Sequence[torch.Tensor], target_device: str | None = None
    ) -> list[list[torch.Tensor]]:
        """The tensors of every rank, in the order of the group. target_device: None leaves received ones on the CPU.

        All ranks of the group raise Invalid for tensors of one that cannot be sent.
        """
        phase = phase_of(self)
        flat, error = attempt(lambda: flatten(my_tensors))
        table, buffers = flat or (None, [])
        answers = dict(zip(self.ranks, gather(phase, table or str(error)), strict=True))
        tables = {rank: answer for rank, answer in answers.items() if isinstance(answer, Table)}
        if len(tables) < len(answers):
            text = "; ".join(f"rank {rank}: {answer}" for rank, answer in answers.items() if rank not in tables)
            raise Invalid(text) from error
        peers = {rank: table.sizes for rank, table in tables.items() if rank != self.my_global_rank}
        received = phase.exchange(buffers, peers)
        rows = [unflatten(tables[rank], received[rank]) if rank in received else [*my_tensors] for rank in self.ranks]
        return rows if target_device is None else [[tensor.to(target_device) for tensor in row] for row in rows]

    def execute_plan(
        self,
        exchange_plan: ExchangePlan,
        my_data: Mapping[Any, TensorAwareStateDict],
        *,
        target_device: str = "cpu",
        verify: bool = True,
    ) -> dict[Any, TensorAwareStateDict]:
        """The states that this rank receives, by id; its own copies as they are.

        my_data: the states that this rank provides. A sender without a good copy is replaced by the first alternate
        that has provided one. All ranks of the job raise the same: NoReplicasAvailableError with every copy that was
        tried, Corrupt, RankLost.
        """
        phase, me = phase_of(self), self.my_global_rank
        offers, buffers = _offers(exchange_plan, my_data, me, verify=verify)
        all_offers = dict(zip(self.ranks, gather(phase, offers), strict=True))
        senders, lost = _senders(exchange_plan, all_offers)
        received: dict[Any, TensorAwareStateDict] = {}

        def run() -> None:
            if lost:
                raise NoReplicasAvailableError(lost)
            incoming: list[tuple[int, Hashable, Header, list[torch.Tensor]]] = []
            out: list[tuple[int, Parts]] = []
            for sender, receiver, id_ in senders:
                if sender == receiver == me:
                    received[id_] = my_data[id_]
                elif sender == me:
                    out += [(receiver, parts) for parts in buffers[id_]]
                elif receiver == me:
                    header = cast("Header", all_offers[sender][id_])  # of a good copy, so it is a sender
                    incoming.append((sender, id_, header, header.table.empty_buffers()))
            phase.move(out, [(sender, [buffer]) for sender, _, _, whole in incoming for buffer in whole])
            for sender, id_, header, whole in incoming:
                received[id_] = header.state(whole, target_device, f"{id_!r} from rank {sender} to rank {me}")

        phase.agree(attempt(run)[1])
        return received


def phase_of(group: GroupWrapper) -> Phase:
    """A new operation of all ranks of a group."""
    return Phase(group.group, group.deadline, group.job, group.memory)


def gather(phase: Phase, mine: T) -> list[T]:
    """An object of every rank of the phase's group."""
    return [pickle.loads(data) for data in phase.gather(pickle.dumps(mine))]  # noqa: S301  see the module's docstring


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result of `work`, or its error, which all ranks raise later. Raises what leaves no way to tell them."""
    try:
        return work(), None
    except TimeoutError:  # RankLost: the others wait, too, until their deadline
        raise
    except Exception as error:  # noqa: BLE001  it is raised on all ranks, when they agree
        return None, error


def _offers(
    plan: ExchangePlan, my_data: Mapping[Any, TensorAwareStateDict], me: int, *, verify: bool
) -> tuple[dict[Any, Header | str | None], dict[Any, list[Parts]]]:
    """For each id that this rank may have to send: the header of a good copy, else the reason. And the buffers.

    None: a good copy that no other rank needs, which is not packed.
    """
    sent = {entry.id_ for entry in plan.entries if entry.receiver != me}
    offers: dict[Any, Header | str | None] = {}
    buffers: dict[Any, list[Parts]] = {}
    for id_ in plan.required_ids(me, alternates=True) & my_data.keys():
        state, offers[id_] = my_data[id_], None
        expected: str | None = getattr(state, _SEAL, None) if verify else None
        try:
            if id_ in sent:
                header, buffers[id_] = pack(state, verify=verify)
                offers[id_] = header
                seal = header.seal
            else:
                seal = seal_of(list(state.tensors)) if expected is not None else None
        except Exception as error:  # noqa: BLE001  a state of the caller; another rank may have a better copy
            offers[id_] = f"cannot be read: {error}"
            continue
        if expected not in {None, seal}:
            offers[id_] = f"is damaged: seal={seal} expected={expected}"
    return offers, buffers


def _senders(
    plan: ExchangePlan, offers: Mapping[int, Mapping[Any, Header | str | None]]
) -> tuple[list[tuple[int, int, Any]], list[str]]:
    """Sender, receiver and id of each transfer, and a line for each id without a good copy. The same on all ranks."""
    senders: list[tuple[int, int, Any]] = []
    lost: list[str] = []
    for entry in plan.entries:
        reasons: list[str] = []
        for rank in (entry.sender, *entry.alternates):
            offer = offers[rank].get(entry.id_, "was not provided")
            if not isinstance(offer, str):
                senders.append((rank, entry.receiver, entry.id_))
                break
            reasons.append(f"the copy of rank {rank} {offer}")
        else:
            lost.append(f"{entry.id_!r}: {', '.join(reasons)}")
    return senders, lost
