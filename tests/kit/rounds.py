"""Writes the records of closed rounds into a store, without replicas that exchange anything."""

from __future__ import annotations

import random
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import GENESIS, Decision, Share, Telemetry
from tests.kit.protocol import contribution
from tests.kit.records import commit, receipt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from skerry.runtime.log.record_parsing import Record
    from skerry.runtime.store import Store

NONCE = "a" * 32
PHASES = ("encode", "upload", "wait", "download", "reduce")


class WrittenRun:
    """A run of these slots whose rounds are closed one by one. Numbers of telemetry are random, with many digits."""

    def __init__(self, store: Store, *slots: str) -> None:
        self.store = store
        self.slots = slots
        self.closed = 0
        self.commit = GENESIS
        self._random = random.Random(0)

    def put(self, key: str, record: Record) -> None:
        assert self.store.create(key, record.to_bytes())

    def close(
        self,
        rounds: int = 1,
        *,
        away: Iterable[str] = (),
        late: Iterable[str] = (),
        shares: Mapping[str, float] | None = None,
        without_receipt: Iterable[str] = (),
    ) -> None:
        """Close so many rounds. away: slots without any record. late: with a receipt only."""
        for _ in range(rounds):
            number, members = self.closed, [slot for slot in self.slots if slot not in {*away, *late}]
            for slot in members:
                self.contribute(slot, number, share=(shares or {}).get(slot, 1.0))
            self._decide(number, members)
            for slot in {*self.slots} - {*away, *without_receipt}:
                self.receipt(slot, number, contributed=slot in members)
            self.closed += 1

    def contribute(self, slot: str, number: int, *, share: float = 1.0) -> None:
        record = contribution(slot, run=NONCE, round=number, share=share, telemetry=self._telemetry())
        self.put(keys.contribution(number, 0, slot), record)

    def receipt(self, slot: str, number: int, *, contributed: bool = True) -> None:
        draw = self._random
        record = receipt(
            slot,
            number,
            run=NONCE,
            contributed=contributed,
            seconds={phase: draw.random() for phase in PHASES},
            uploaded_bytes=draw.randrange(10**9),
            telemetry=None if contributed else self._telemetry(),
        )
        self.put(keys.receipt(number, slot), record)

    def _decide(self, number: int, members: Iterable[str]) -> None:
        decision = Decision(
            run=NONCE,
            round=number,
            exchange=0,
            base=self.commit,
            index="1" * 32,
            reduction="all_gather",
            members=tuple(Share(slot=slot, contribution="d" * 64, weight=1.0) for slot in members),
            proposer=self.slots[0],
            nonce="e" * 32,
        )
        self.put(keys.decision(number, 0), decision)
        closing = commit(
            number, run=NONCE, exchanges=(digest_of(decision.to_bytes()),), participants=1, previous=self.commit
        )
        self.put(keys.commit(number), closing)
        self.commit = digest_of(closing.to_bytes())

    def _telemetry(self) -> Telemetry:
        draw = self._random
        return Telemetry(
            loss=2 + draw.random(),
            steps=20,
            possible=20,
            tokens=200_000,
            train_s=17 + draw.random(),
            learning_rate=3e-4,
            gradient_norm=draw.random(),
            metrics={"accuracy": draw.random()},
        )


class InlineExecutor(Executor):
    """Runs every job at once, in the caller's thread."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        job: Future[Any] = Future()
        job.set_result(function(*args, **named))
        return job
