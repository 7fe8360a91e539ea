"""Bytes that rot after the decision: a replica that holds the state leads the others past them."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import Island, receipts, together
from tests.kit.protocol import run_record
from tests.support.clocks import FakeClock

from skerry.runtime.checkpointing.recorder import FRAGMENT, LogPosition, Recorder, RoundFacts, SharedState
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys
from skerry.runtime.log.log import open_run
from skerry.runtime.log.records import GENESIS, Heartbeat
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.training.join_run import SessionOptions, join_run
from skerry.runtime.training.torchft_trainer import TorchTrainer
from skerry.runtime.training.unreadable_rounds import RescueCheckpoints

if TYPE_CHECKING:
    from skerry.runtime.store import Data, Span


class Rotting(MemoryStore):
    """One slot's payload of a round is damaged as soon as the round is decided, before any replica can read it."""

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


class RottingOnceClosed(Rotting):
    """The damage is read only after its author has closed the round: all others have to follow it."""

    def __init__(self, round_number: int, slot: str) -> None:
        super().__init__(round_number, slot)
        self._created: set[str] = set()
        self._creates = threading.Condition()

    def create(self, key: str, data: Data) -> bool:
        created = super().create(key, data)
        with self._creates:
            self._created.add(key)
            self._creates.notify_all()
        return created

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        damaged = key.startswith(f"{keys.PAYLOADS}{self._round:08d}/{self._slot}/")
        with self._creates:
            if damaged and keys.decision(self._round, 0) in self._created:
                assert self._creates.wait_for(lambda: keys.commit(self._round) in self._created, timeout=20)
        return super().read(key, span, into)


class Overheard(Rotting):
    """Notes the replicas whose heartbeat shows that they cannot follow the round and wait for a checkpoint."""

    def __init__(self, round_number: int, slot: str) -> None:
        super().__init__(round_number, slot)
        self.asked: set[str] = set()

    def replace(self, key: str, data: Data) -> None:
        super().replace(key, data)
        if key.startswith(keys.HEARTBEATS):
            beat = Heartbeat.parse(self.read(key) or b"", key)
            if beat.phase == "joining" and beat.abstains is not None and beat.abstains.round == self._round:
                self.asked.add(beat.slot)


class Misread:
    """One reader's way to a store, on which the objects under a prefix arrive damaged."""

    def __init__(self, store: MemoryStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        data = self._store.read(key, span, into)
        if data is None or not key.startswith(self._prefix):
            return data
        body = bytearray(data)
        body[-1] ^= 1
        if into is not None:
            into[: len(body)] = body
            return into[: len(body)]
        return memoryview(body)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


class OneSlowUpload(MemoryStore):
    """The first part of a checkpoint is being uploaded until `goes_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.uploads: list[str] = []

    def create(self, key: str, data: Data) -> bool:
        if key.startswith(keys.CHECKPOINTS) and not key.endswith(keys.MANIFEST):
            self.uploads.append(key)
            if len(self.uploads) == 1:
                self.goes_on.wait(timeout=10)
        return super().create(key, data)


def islands_on(store: MemoryStore, *, timeout_s: float, max_retries: int | None = 3) -> list[Island]:
    names = ("r-0", "r-1", "r-2")
    open_run(store, run_record(SystemClock(), slots=names, rounds=4, min_replicas=2))
    timeout = timedelta(seconds=timeout_s)
    return [
        Island(store, name, seed=i, grace_s=1.0, timeout=timeout, max_retries=max_retries, checkpoint_every=100)
        for i, name in enumerate(names)
    ]


@pytest.mark.parametrize("slot", ["r-0", "r-1", "r-2"])
def test_payload_that_rots_before_it_is_read_is_passed_by_a_checkpoint(slot: str) -> None:
    """Nor does it cost retries or the time of an exchange: two cannot follow, and the third leads them past at once."""
    store = Rotting(1, slot)
    islands = islands_on(store, timeout_s=50.0)
    together([lambda island=island: island.train(4) for island in islands])
    assert {island.manager.current_step() for island in islands} == {4}
    assert len({receipt.state for receipt in receipts(store, 3).values()}) == 1
    assert store.read(keys.checkpoint_manifest(2)) is not None, "written out of turn, for the blocked replicas"


@pytest.mark.parametrize("slot", ["r-0", "r-1", "r-2"])
def test_rotten_payload_of_the_last_round_is_passed_by_a_checkpoint(slot: str) -> None:
    """Only its author comes to the end by itself. It stays until the others ask, also when it is not its turn."""
    store = Rotting(3, slot)
    islands = islands_on(store, timeout_s=5.0)
    together([lambda island=island: island.train(4) for island in islands])
    assert {island.manager.current_step() for island in islands} == {4}
    assert all(torch.equal(island.originals["weight"], islands[0].originals["weight"]) for island in islands)
    assert store.read(keys.checkpoint_manifest(4)) is not None


def test_blocked_replica_without_catch_up_also_asks_for_a_checkpoint() -> None:
    """A script may leave out catch_up: its replica waits in should_commit then, and the others must see it."""
    store = Overheard(3, "r-1")
    islands = islands_on(store, timeout_s=5.0, max_retries=None)

    def train(island: Island) -> None:
        with island.diloco:
            island.manager.catch_up(island.inner)
            while island.manager.current_step() < 4:
                island.step()
        island.manager.shutdown()

    together([lambda island=island: train(island) for island in islands])
    assert store.asked == {"r-0", "r-2"}
    assert all(torch.equal(island.originals["weight"], islands[0].originals["weight"]) for island in islands)


def test_writer_of_the_last_checkpoint_does_not_write_it_twice() -> None:
    """One slot is gone for good, and the upload takes longer than it takes to find that out."""
    clock, store = FakeClock(), OneSlowUpload()
    open_run(store, run_record(clock, slots=("a", "b"), rounds=2))
    terms = SessionOptions(min_replicas=1, deadline_s=100.0, heartbeat_s=1.0)
    seat, gone = (join_run(store, slot, terms, clock) for slot in "ab")
    gone.presence.enter("train", round_number=1)
    state = SharedState()
    state.register(f"{FRAGMENT}0", lambda _: None, lambda: {"weight": torch.ones(3)})
    recorder = Recorder(seat.log, seat.presence, state, clock.nonce, seat.collector, seat.group)
    standing = LogPosition(round=2, previous=GENESIS, members=("a",), batches=2, work=2.0)
    facts = RoundFacts(
        averages=(), contributed=True, uploaded_bytes=0, downloaded_bytes=0, requests=0, seconds={"wait": 1.0}
    )
    recorder.record(standing, facts, "fragments", 1)
    done = clock.now() + 3 * seat.policy.stale_s

    def end_upload() -> None:
        if clock.now() >= done:
            store.goes_on.set()
            assert recorder._checkpoint is not None
            recorder._checkpoint.result(timeout=10)

    clock.on_pause = end_upload
    RescueCheckpoints(seat, recorder, TorchTrainer(state)).wait_for_others(standing)
    store.goes_on.set()
    recorder.close(wait=True)
    assert len(store.uploads) == 1
    assert store.read(keys.checkpoint_manifest(2)) is not None
    assert clock.now() >= done, "it stayed until it was there"


def test_two_that_go_on_lead_the_third_past_what_only_it_cannot_read() -> None:
    store = MemoryStore()
    whole = islands_on(store, timeout_s=50.0)[:2]
    third = Island(Misread(store, f"{keys.PAYLOADS}{1:08d}/r-0/"), "r-2", seed=2, minimum=2, max_retries=3)  # type: ignore[arg-type]
    together([lambda island=island: island.train(4) for island in [*whole, third]])
    for island in whole:
        assert torch.equal(third.originals["weight"], island.originals["weight"])


@pytest.mark.slow
def test_blocked_replica_without_a_rescuer_ends_with_the_reason() -> None:
    store = RottingOnceClosed(1, "r-0")
    islands = islands_on(store, timeout_s=1.5)

    def leave_beyond(island: Island) -> None:
        island.train(2, close=False)
        island.manager.request_stop()
        island.manager.shutdown()

    def end(island: Island) -> str:
        with pytest.raises(RuntimeError, match="round 1 is closed and cannot be followed") as ended:
            island.train(4)
        assert isinstance(ended.value.__cause__, Corrupt)
        island.manager.shutdown()
        return str(ended.value)

    _, *messages = together(
        [lambda: leave_beyond(islands[0]), *(lambda island=island: end(island) for island in islands[1:])]  # type: ignore[list-item]
    )
    assert all("no checkpoint beyond it came within 3 s" in text for text in messages)
    assert all("payloads/00000001/r-0" in text for text in messages), "it says what is damaged"
