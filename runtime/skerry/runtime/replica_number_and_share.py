"""Gives a replica its number among those of its run, and its share of the data, as the log has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime import contract
    from skerry.runtime.manager import ObjectStoreManager

T = TypeVar("T")


class SlotNumbers:
    """A replica's number among those of its run, and its share of the data. Both follow the log (decision 0046).

    They change between two rounds, for all replicas at once, when replicas are added to the run or removed.
    """

    def __init__(self, settings: contract.Contract, rank: int, world_size: int) -> None:
        """settings: the numbers until the log has others."""
        self.slot = settings.slot
        self.rank = rank
        self.world_size = world_size
        self._launched = settings
        self._manager: ObjectStoreManager | None = None

    @property
    def _slots(self) -> tuple[str, ...]:
        """The slots of this round by the log; () while the log does not number this replica."""
        slots = None if self._manager is None else self._manager.session.log.slots
        return slots if slots is not None and self.slot in slots else ()

    @property
    def index(self) -> int:
        """This replica's number, from 0."""
        return self._slots.index(self.slot) if self._slots else self._launched.index

    @property
    def replicas(self) -> int:
        """The number of replicas of the run."""
        return len(self._slots) or self._launched.replicas

    @property
    def shard_index(self) -> int:
        """This rank's number among all ranks of all replicas."""
        return self.index + self.rank * self.replicas

    @property
    def shard_count(self) -> int:
        """The number of ranks of all replicas."""
        return self.replicas * self.world_size

    def shard(self, items: Sequence[T]) -> list[T]:
        """This rank's share of the items: every n-th, for n ranks in all replicas together. Shares are disjoint.

        The share is the same in each round and after a restart, while the run has the same replicas and ranks.
        """
        return list(items[self.shard_index :: self.shard_count])
