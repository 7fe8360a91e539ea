"""Bytes that rot after the decision: whoever holds the state leads the others past them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.support.logs import run_record
from tests.support.managers import Island, receipts, together

from skerry.runtime import keys
from skerry.runtime.clock import SystemClock
from skerry.runtime.journal import open_run
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.store import Data


class Rotting(MemoryStore):
    """One slot's payload of a round is damaged as soon as the round is decided, before anybody can read it."""

    def __init__(self, round_number: int, slot: str) -> None:
        super().__init__()
        self._round = round_number
        self._slot = slot

    def create(self, key: str, data: Data) -> bool:
        created = super().create(key, data)
        if created and key == keys.decision(self._round, 0):
            for entry in self.list(f"{keys.PAYLOADS}{self._round:08d}/{self._slot}/"):
                body = bytearray(self.read(entry.key) or b"")
                body[-1] ^= 1
                super().replace(entry.key, bytes(body))
        return created


@pytest.mark.parametrize("slot", ["r-0", "r-1", "r-2"])
def test_a_payload_that_rots_before_it_is_read_stops_nobody_for_good(slot: str) -> None:
    store, names = Rotting(1, slot), ("r-0", "r-1", "r-2")
    open_run(store, run_record(SystemClock(), slots=names, rounds=4, min_replicas=2))
    islands = [
        Island(store, name, seed=i, grace_s=1.0, timeout=timedelta(seconds=2), max_retries=None)
        for i, name in enumerate(names)
    ]
    together([lambda one=one: one.train(4) for one in islands])
    assert {island.manager.current_step() for island in islands} == {4}
    assert len({receipt.state for receipt in receipts(store, 3).values()}) == 1
