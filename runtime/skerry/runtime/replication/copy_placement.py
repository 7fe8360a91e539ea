"""Places copies and plans their exchange: pure functions of the ranks that hold copies and that want them.

A clique is a group of ranks that hold copies of each other's state: n, n + J, ..., n + (F - 1) J, with a jump J and a
factor F. Cliques lose less than rings when several machines are lost at once (GEMINI, SOSP 2023). Needs no torch; does
no I/O.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from skerry.runtime.errors import Corrupt, Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    Available: TypeAlias = Mapping[int, Collection[Hashable]] | Sequence[Collection[Hashable]]
    """The ids that each rank holds, by its global rank."""


class NoReplicasAvailableError(Corrupt):
    """No usable copy of an id is left. copies: a line for each copy that was tried, with the reason."""

    def __init__(self, copies: Sequence[str]) -> None:
        super().__init__("no copy is left: " + "; ".join(copies))
        self.copies = tuple(copies)


class RankGroup(Protocol):
    """The ranks between which a plan is executed."""

    def get_global_rank(self, group_rank: int | None = None) -> int:
        """This process's rank in the job; group_rank: that of another member."""
        ...


@dataclass(frozen=True)
class ExchangePlanEntry:
    """One transfer between two global ranks; of a rank's own copy if they are equal. alternates: further holders."""

    sender: int
    receiver: int
    id_: Any
    alternates: tuple[int, ...] = ()


@dataclass
class ExchangePlan:
    """The transfers between the ranks of a group; the same on all of them."""

    group: RankGroup
    _entries: list[ExchangePlanEntry] = field(default_factory=list["ExchangePlanEntry"])

    def plan(self, sender: int, receiver: int, id_: Any, alternates: tuple[int, ...] = ()) -> None:
        """Add a transfer."""
        self._entries.append(ExchangePlanEntry(sender, receiver, id_, alternates))

    @property
    def entries(self) -> tuple[ExchangePlanEntry, ...]:
        """The transfers, in order."""
        return tuple(self._entries)

    def required_ids(self, rank: int | None = None, *, alternates: bool = False) -> set[Any]:
        """The ids that a rank (None: this one) must provide. alternates: also those it provides if a copy is bad."""
        rank = self.group.get_global_rank() if rank is None else rank
        return {
            entry.id_ for entry in self._entries if rank == entry.sender or (alternates and rank in entry.alternates)
        }


def parse_group_sequence(replication_jump: int, replication_factor: int, world_size: int) -> list[tuple[int, ...]]:
    """All cliques of a job, sorted. Raises Invalid unless the ranks can be divided into cliques."""
    if replication_jump < 1 or replication_factor < 1:
        raise Invalid(
            f"must be at least 1: replication_jump={replication_jump} replication_factor={replication_factor}"
        )
    if world_size % (replication_jump * replication_factor):
        raise Invalid(
            f"cannot divide {world_size} ranks into groups of {replication_factor} that are {replication_jump} ranks "
            f"apart: use a jump and a factor whose product divides {world_size}"
        )
    strides = [range(first, world_size, replication_jump) for first in range(replication_jump)]
    return sorted(
        tuple(ranks[start : start + replication_factor])
        for ranks in strides
        for start in range(0, len(ranks), replication_factor)
    )


def plan_exchange(
    group: RankGroup, wanted: Mapping[int, Sequence[Any]], available: Available
) -> tuple[ExchangePlan, list[str]]:
    """The plan that gives each rank what it wants, and a line for each id without a copy. Deterministic.

    wanted: ids by global rank, of the ranks of the group in order. A rank's own copy comes first, then the holder with
    the least to send; an id that is wanted twice is sent once.
    """
    plan, load, lost = ExchangePlan(group), Counter[int](), list[str]()
    for receiver, ids in wanted.items():
        for id_ in dict.fromkeys(ids):
            holders = [rank for rank in wanted if id_ in available[rank]]
            if not holders:
                lost.append(f"{id_!r}: ranks {', '.join(map(str, wanted))} do not hold it")
                continue
            first, *others = sorted(holders, key=lambda rank: (rank != receiver, load[rank], rank))
            load[first] += first != receiver
            plan.plan(first, receiver, id_, tuple(others))
    return plan, lost
