"""A run of two replicas in a folder, of which a test chooses the ones that train each round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kit.protocol import Replica, draft, policy, run_record, start_replica
from tests.kit.records import outcome
from tests.support.clocks import FakeClock

from skerry.runtime.log import keys
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store

SLOTS = ("a-0", "a-1")


class Fleet:
    """Two replicas of a run, by default of eight rounds; each round is closed by those that take part in it."""

    def __init__(self, place: Path | Store, run: Run | None = None) -> None:
        """place: a folder, or the store of the run."""
        self.store: Store = DirectoryStore(place) if isinstance(place, Path) else place
        self.clock = FakeClock()
        self.run = run or run_record(self.clock, slots=SLOTS, rounds=8, min_replicas=1)
        self.replicas = {slot: self.start(slot) for slot in SLOTS}
        self.nonce = self.replicas["a-0"].log.run.nonce

    def start(self, slot: str) -> Replica:
        return start_replica(self.store, self.clock, slot, policy(min_replicas=1), self.run)

    def train(self, number: int, *slots: str, share: float = 1.0) -> None:
        for slot in slots:
            replica = self.replicas[slot]
            replica.exchange.contribute(replica.exchange_id, replace(draft(f"{number} {slot}".encode()), share=share))
        for slot in slots:
            self.replicas[slot].close(self.replicas[slot].decide())

    def end(self, slot: str, incarnation: int = 0, **changes: object) -> None:
        record = outcome(slot, incarnation, run=self.nonce, **changes)
        self.store.create(keys.outcome(slot, incarnation), record.to_bytes())
