"""Replicates a state between the ranks of a clique, and retrieves copies: NVIDIA's strategies by name and meaning.

The extension's `LocalCheckpointManager` and Megatron's logic can use these classes in the place of its own. Differences
are improvements: CPU and GPU, every dtype, no call for each small tensor, sealed copies, errors that all ranks raise.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch.distributed as dist

from skerry.runtime.errors import Invalid
from skerry.runtime.replication.copy_placement import (
    ExchangePlan,
    NoReplicasAvailableError,
    parse_group_sequence,
    plan_exchange,
)
from skerry.runtime.replication.exchange_between_ranks import DEADLINE, GroupWrapper, attempt, gather, pack, phase_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    import torch

    from skerry.runtime.replication.copy_placement import Available
    from skerry.runtime.replication.tensors_of_state_dict import TensorAwareStateDict

E = TypeVar("E", bound="ReplicationStrategy")


class ReplicationStrategy(ABC):
    """Copies states to other ranks, and gets copies back. Every rank of the job makes the same calls in order."""

    @abstractmethod
    def replicate(self, local_ckpt: TensorAwareStateDict, id_: Any) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """The states that this rank holds from now on, its own among them, and their ids. `local_ckpt` stays whole."""

    @abstractmethod
    def retrieve_plan(self, globally_available_ids: Available, wanted: Sequence[Any]) -> ExchangePlan:
        """The transfers that give every rank what it wants. Raises NoReplicasAvailableError on all ranks."""

    @abstractmethod
    def retrieve_execute(self, plan: ExchangePlan, my_data: Mapping[Any, TensorAwareStateDict]) -> dict[Any, Any]:
        """The states that this rank wanted, by id. my_data: what it provides, `plan.required_ids()`."""


class CliqueReplicationStrategy(ReplicationStrategy):
    """Every rank of a group holds a copy of the state of each."""

    def __init__(
        self,
        local_group: GroupWrapper | dist.ProcessGroup,
        target_device: str | torch.device = "cpu",
        *,
        deadline: timedelta = DEADLINE,
        verify: bool = True,
    ) -> None:
        """target_device: of received tensors. deadline: of each call. verify: seal copies, and check before use."""
        self.local_group = GroupWrapper.wrap(local_group)
        self.local_group.deadline = deadline
        self.target_device = str(target_device)
        self._verify = verify

    def replicate(self, local_ckpt: TensorAwareStateDict, id_: Any) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """See ReplicationStrategy. In the order of the group; the own copy has the tensors of `local_ckpt` itself.

        All ranks of the job raise the error of one: Invalid for a tensor that cannot be sent, Corrupt, RankLost.
        """
        group = self.local_group
        phase, me = phase_of(group), group.my_global_rank
        packed, error = attempt(lambda: pack(local_ckpt, verify=self._verify))
        header, buffers = packed or (None, [])
        headers = dict(zip(group.ranks, gather(phase, (header, id_)), strict=True))
        copies: list[TensorAwareStateDict] = []

        def exchange() -> None:
            whole = {rank: header for rank, (header, _) in headers.items() if header is not None}
            if len(whole) < len(headers):
                return  # the rank without a header reports its error
            received = phase.exchange(buffers, {rank: whole[rank].table.sizes for rank in whole if rank != me})
            for rank, header in whole.items():
                if rank == me:
                    copies.append(header.filled([tensor.to(self.target_device) for tensor in local_ckpt.tensors]))
                else:
                    owner = f"{headers[rank][1]!r} from rank {rank} to rank {me}"
                    copies.append(header.state(received[rank], self.target_device, owner))

        phase.agree(error or attempt(exchange)[1])
        return copies, [owner_id for _, owner_id in headers.values()]

    def retrieve_plan(self, globally_available_ids: Available, wanted: Sequence[Any]) -> ExchangePlan:
        """See ReplicationStrategy. Copies are looked for within the group."""
        group = self.local_group
        phase = phase_of(group)
        all_wanted = dict(zip(group.ranks, gather(phase, list(wanted)), strict=True))
        plan, lost = plan_exchange(group, all_wanted, globally_available_ids)
        phase.agree(NoReplicasAvailableError(lost) if lost else None)
        return plan

    def retrieve_execute(self, plan: ExchangePlan, my_data: Mapping[Any, TensorAwareStateDict]) -> dict[Any, Any]:
        """See ReplicationStrategy and `GroupWrapper.execute_plan`."""
        return self.local_group.execute_plan(plan, my_data, target_device=self.target_device, verify=self._verify)

    @classmethod
    def from_replication_params(
        cls, replication_jump: int | None = None, replication_factor: int = 2, *, backend: str | None = None
    ) -> CliqueReplicationStrategy:
        """Divides all ranks of the job into cliques (see `copy_placement`), each with a process group. Collective.

        replication_jump: ranks that fail together, and so must not hold each other's copies; None: LOCAL_WORLD_SIZE, or
        less on a single machine. backend: None takes the job's. Because no group of the job is used, calls may run
        beside those of training. Raises Invalid for a factor below 2, which would make no copy.
        """
        world = dist.get_world_size()
        if not 2 <= replication_factor <= world:
            raise Invalid(
                f"a copy needs another rank: replication_factor={replication_factor} world_size={world}; "
                "use a factor from 2 to the number of ranks"
            )
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        jump = min(local, world // replication_factor) if replication_jump is None else replication_jump
        cliques = parse_group_sequence(jump, replication_factor, world)
        groups = [dist.new_group(list(ranks), backend=backend) for ranks in cliques]
        wrapper = GroupWrapper.from_list_of_groups(groups)
        wrapper.job = cast("dist.ProcessGroup", dist.new_group(backend=backend))
        return cls(wrapper)


class LazyReplicationStrategyBuilder(ReplicationStrategy, ABC, Generic[E]):
    """Builds a strategy at its first call, which is collective: process groups may not exist before."""

    def __init__(self) -> None:
        self._replication_strategy: E | None = None

    @property
    def replication_strategy(self) -> E:
        """The strategy, built when it is first needed."""
        if self._replication_strategy is None:
            self._replication_strategy = self._eager_build()
        return self._replication_strategy

    def replicate(self, local_ckpt: TensorAwareStateDict, id_: Any) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """See ReplicationStrategy."""
        return self.replication_strategy.replicate(local_ckpt, id_)

    def retrieve_plan(self, globally_available_ids: Available, wanted: Sequence[Any]) -> ExchangePlan:
        """See ReplicationStrategy."""
        return self.replication_strategy.retrieve_plan(globally_available_ids, wanted)

    def retrieve_execute(self, plan: ExchangePlan, my_data: Mapping[Any, TensorAwareStateDict]) -> dict[Any, Any]:
        """See ReplicationStrategy."""
        return self.replication_strategy.retrieve_execute(plan, my_data)

    @abstractmethod
    def _eager_build(self) -> E:
        """Build the strategy."""


class LazyCliqueReplicationStrategy(LazyReplicationStrategyBuilder[CliqueReplicationStrategy]):
    """`CliqueReplicationStrategy.from_replication_params` at the first call."""

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2) -> None:
        super().__init__()
        self.replication_jump = replication_jump
        self.replication_factor = replication_factor

    def _eager_build(self) -> CliqueReplicationStrategy:
        return CliqueReplicationStrategy.from_replication_params(self.replication_jump, self.replication_factor)
