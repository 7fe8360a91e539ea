"""Replicas of several ranks in threads: they train a small model and exchange over a memory store."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, ClassVar, TypeVar

import pytest
import torch
from tests.kit.managers import Island, together
from torch.distributed import TCPStore

from skerry.runtime.clock import SystemClock
from skerry.runtime.ranks.interface import RankLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from skerry.runtime.store import Store

T = TypeVar("T")


class FastClock(SystemClock):
    """The system clock, with a second made of so many seconds: deadlines pass at once."""

    def __init__(self, speed: float = 1000.0) -> None:
        super().__init__()
        self.speed = speed

    def now(self) -> float:
        return super().now() * self.speed


class RankedReplica:
    """A replica that trains a linear model with DiLoCo; each rank has a model from its own seed."""

    started: ClassVar[list[RankedReplica]] = []

    def __init__(
        self, store: Store, slot: str, size: int = 2, *, views: Sequence[Store] | None = None, **more: object
    ) -> None:
        """views: the store as each rank sees it."""
        self.server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        address = {"world_size": size, "store_addr": "localhost", "store_port": self.server.port}
        self.started.append(self)
        self.islands = [
            Island(view, slot, seed=rank, rank=rank, **(address | more))  # type: ignore[arg-type]
            for rank, view in enumerate(views or [store] * size)
        ]

    def run(self, work: Callable[[Island], T]) -> list[T]:
        """Run the work on all ranks at the same time. Returns their results."""
        return on_all_ranks([self], work)

    def train(self, rounds: int, *, close: bool = True) -> None:
        self.run(lambda island: island.train(rounds, close=close))

    @property
    def weights(self) -> list[dict[str, torch.Tensor]]:
        """The shared parameters of each rank."""
        return [island.originals for island in self.islands]


def replicas_of(store: Store, slots: Iterable[str] = "ab", **more: object) -> list[RankedReplica]:
    """Replicas that wait long enough for each other."""
    return [RankedReplica(store, slot, **({"grace_s": 20.0} | more)) for slot in slots]  # type: ignore[arg-type]


def on_all_ranks(replicas: Sequence[RankedReplica], work: Callable[[Island], T]) -> list[T]:
    """Run the work on all ranks of all replicas at the same time."""
    return together([lambda i=island: work(i) for replica in replicas for island in replica.islands])


@contextmanager
def closing_replicas() -> Iterator[None]:
    """End the threads of the replicas that a test has started, before their TCPStores end."""
    yield
    for replica in RankedReplica.started:
        for island in replica.islands:
            island.manager.session.group.close()
        for island in replica.islands:
            with suppress(RankLost):
                island.manager.shutdown(wait=False)
    RankedReplica.started.clear()


def assert_same_weights(first: RankedReplica, *others: RankedReplica) -> None:
    """Rank k has the same shared parameters in all."""
    for other in others:
        for own, same in zip(first.weights, other.weights, strict=True):
            torch.testing.assert_close(own, same, rtol=0, atol=0)


def failures(works: Sequence[Callable[[], object]]) -> list[Exception]:
    def failure(work: Callable[[], object]) -> Exception:
        with pytest.raises(Exception, match=r".") as caught:
            work()
        return caught.value

    return together([lambda work=work: failure(work) for work in works])
