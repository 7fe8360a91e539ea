"""Several replicas of a tiny model in one process: one thread each, one memory store, torchft's own wrappers."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.log import keys
from skerry.runtime.log.records import Commit, Contribution, Decision, Receipt
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.protocol.quorum import Grace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.store import Store

T = TypeVar("T")


def manager_of(
    store: Store, slot: str, *, minimum: int = 2, grace_s: float = 10.0, **more: object
) -> ObjectStoreManager:
    settings: dict[str, object] = {
        "timeout": timedelta(seconds=20),
        "heartbeat_interval": timedelta(milliseconds=50),
        "grace": Grace(floor_s=grace_s, cap_s=grace_s),
        "max_retries": 2,
    }
    return ObjectStoreManager(store, replica_id=slot, min_replica_size=minimum, **(settings | more))  # type: ignore[arg-type]


def together(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run all at the same time. Returns their results, or raises the first error."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(work) for work in works]]


class Island:
    """One replica that trains a linear model with DiLoCo."""

    def __init__(
        self, store: Store, slot: str, *, sync_every: int = 2, delay: int = 0, seed: int = 0, **more: object
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 3)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.manager = manager_of(
            store, slot, state_dict=self.model.state_dict, load_state_dict=self.model.load_state_dict, **more
        )
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.diloco = DiLoCo(
            self.manager, [self.model], self.inner, [outer], sync_every=sync_every, fragment_sync_delay=delay
        )
        self.generator = torch.Generator().manual_seed(seed + 100)
        self.steps = 0

    @property
    def originals(self) -> dict[str, torch.Tensor]:
        """The shared parameters: the result of the last outer step."""
        return self.diloco._fragments[0].original_parameters

    def step(self) -> None:
        x = torch.randn(8, 4, generator=self.generator)
        self.inner.zero_grad()
        (self.model(x) ** 2).sum().backward()
        self.inner.step()
        self.steps += 1

    def train(self, rounds: int, *, close: bool = True) -> Island:
        """Train until `rounds` rounds are closed. close: then shut the manager down."""
        with self.diloco:
            while self.manager.current_step() < rounds:
                self.manager.catch_up(self.inner)
                if self.manager.current_step() < rounds:
                    self.step()
        if close:
            self.manager.shutdown()
        return self


def wait_until_saved(island: Island) -> None:
    """Wait until the checkpoint that this replica writes in the background is stored."""
    recorder, clock = island.manager.lifecycle.course.recorder, SystemClock()
    wait_until(clock, lambda: None if recorder.is_saving else True, clock.now() + 10, Backoff(first=0.001, cap=0.02))


def join_at_head(store: Store, slot: str = "late") -> tuple[Island, int]:
    """A new replica joins, without an inner step. Returns it, and the number of rounds that it followed."""
    island = Island(store, slot, seed=9, minimum=1)
    with island.diloco:
        followed = island.manager.catch_up(island.inner)
    island.manager.shutdown()
    assert island.steps == 0
    return island, followed


def decisions(store: Store) -> list[Decision]:
    return [Decision.parse(store.read(e.key) or b"", e.key) for e in store.list(keys.EXCHANGES)]


def commits(store: Store) -> list[Commit]:
    return [Commit.parse(store.read(e.key) or b"", e.key) for e in store.list(keys.COMMITS)]


def contributions(store: Store) -> list[Contribution]:
    return [Contribution.parse(store.read(e.key) or b"", e.key) for e in store.list(keys.CONTRIBUTIONS)]


def receipts(store: Store, round_number: int) -> dict[str, Receipt]:
    """The receipts of one round, by slot."""
    entries = store.list(keys.receipts_prefix(round_number))
    written = [Receipt.parse(store.read(entry.key) or b"", entry.key) for entry in entries]
    return {receipt.slot: receipt for receipt in written}


def records_of(store: Store, prefix: str) -> list[dict[str, object]]:
    return [json.loads(bytes(store.read(entry.key) or b"{}")) for entry in store.list(prefix)]


class Pace:
    """Lets the fast replicas close a round only when the slow one has taken its steps for it."""

    def __init__(self) -> None:
        self._allowed = 0
        self._changed = threading.Condition()

    def allow(self, rounds: int) -> None:
        with self._changed:
            self._allowed = max(self._allowed, rounds)
            self._changed.notify_all()

    def wait_for_look(self) -> None:
        """Wait as long as one heartbeat of `manager_of`: a replica looks at the others no more often."""
        with self._changed:
            self._changed.wait(0.05)

    def until(self, round_number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._allowed > round_number, timeout=30)
