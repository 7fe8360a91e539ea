"""Several replicas of a tiny model in one process: one thread each, one memory store, torchft's own wrappers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime import keys
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.records import Commit, Contribution, Decision, Receipt
from skerry.runtime.rounds import Grace

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
    """Run at the same time; all results, or the first exception."""
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
        return self.diloco._fragments[0].original_parameters

    def step(self) -> None:
        x = torch.randn(8, 4, generator=self.generator)
        self.inner.zero_grad()
        (self.model(x) ** 2).sum().backward()
        self.inner.step()
        self.steps += 1

    def train(self, rounds: int, *, close: bool = True) -> Island:
        """Until `rounds` rounds are closed."""
        with self.diloco:
            while self.manager.current_step() < rounds:
                self.manager.catch_up(self.inner)
                if self.manager.current_step() < rounds:
                    self.step()
        if close:
            self.manager.shutdown()
        return self


def decisions(store: Store) -> list[Decision]:
    return [Decision.parse(store.read(e.key) or b"", e.key) for e in store.list(keys.EXCHANGES)]


def commits(store: Store) -> list[Commit]:
    return [Commit.parse(store.read(e.key) or b"", e.key) for e in store.list(keys.COMMITS)]


def contributions(store: Store) -> list[Contribution]:
    return [Contribution.parse(store.read(e.key) or b"", e.key) for e in store.list(keys.CONTRIBUTIONS)]


def receipts(store: Store, round_number: int) -> dict[str, Receipt]:
    found = [Receipt.parse(store.read(e.key) or b"", e.key) for e in store.list(keys.receipts_of(round_number))]
    return {receipt.slot: receipt for receipt in found}


def records_of(store: Store, prefix: str) -> list[dict[str, object]]:
    return [json.loads(bytes(store.read(entry.key) or b"{}")) for entry in store.list(prefix)]
