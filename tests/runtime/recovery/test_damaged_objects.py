"""Bytes that are damaged after the decision: a replica that has the next state writes an extra checkpoint."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
from tests.kit.events import logged_events
from tests.kit.managers import (
    Island,
    assert_same_parameters,
    begin_run,
    islands_of,
    states,
    together,
    train_all,
    wait_for,
)
from tests.kit.protocol import run_record
from tests.kit.stores import HookedStore, flip
from tests.support.clocks import FakeClock

from skerry.runtime.checkpointing.receipt_and_checkpoint_writer import Recorder
from skerry.runtime.checkpointing.replica_position_in_log import LogPosition, RoundFacts
from skerry.runtime.checkpointing.shared_state import FRAGMENT, SharedState
from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys
from skerry.runtime.log.log import open_run
from skerry.runtime.log.records import GENESIS, Heartbeat, Receipt
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.training.open_session import SessionOptions, join_run
from skerry.runtime.training.torchft_trainer import TorchTrainer
from skerry.runtime.training.unreadable_rounds import RescueCheckpoints

SLOTS = ["r-0", "r-1", "r-2"]


class Rotting(HookedStore):
    """The payload of one slot and round is damaged before it is read after the decision.

    It is read only after its author has closed the round: all others have to follow it, and none retries before. The
    checkpoint that leads them past it is written only when all ask for it: no other has seen it before it asks.
    blocked: the replicas whose heartbeat shows that they cannot follow the round and wait for a checkpoint.
    """

    def __init__(self, round_number: int, slot: str) -> None:
        super().__init__(self._rot)
        self.blocked: set[str] = set()
        self._round = round_number
        self._payload = f"{keys.PAYLOADS}{round_number:08d}/{slot}/"
        self._help = f"{keys.CHECKPOINTS}{round_number + 1:08d}/"
        self._damages = threading.Lock()
        self._is_damaged = False

    def _rot(self, verb: str, key: str) -> None:
        if verb == "read" and key.startswith(self._payload) and MemoryStore.read(self, keys.decision(self._round, 0)):
            wait_for(lambda: MemoryStore.read(self, keys.commit(self._round)))
            with self._damages:
                if not self._is_damaged:
                    self._is_damaged = True
                    MemoryStore.replace(self, key, flip(bytes(MemoryStore.read(self, key) or b"")))
        if verb == "create" and key.startswith(self._help):
            wait_for(lambda: len(self.blocked) == len(SLOTS) - 1)
        if verb == "replace" and key.startswith(keys.HEARTBEATS) and (before := MemoryStore.read(self, key)):
            beat = Heartbeat.parse(before, key)
            if beat.phase == "joining" and beat.abstains is not None and beat.abstains.round == self._round:
                self.blocked.add(beat.slot)


def replicas_on(store: MemoryStore, *, timeout_s: float, max_retries: int | None = 3) -> list[Island]:
    begin_run(store, SLOTS, rounds=4, minimum=2)
    timeout = timedelta(seconds=timeout_s)
    # However busy the machine is, all contribute to each round that they can follow.
    return islands_of(store, SLOTS, grace_s=60.0, timeout=timeout, max_retries=max_retries, checkpoint_every=100)


def test_payload_damaged_before_it_is_read_is_passed_by_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    """It costs neither retries nor the time of an exchange: two cannot follow, and the third helps at once."""
    store = Rotting(1, "r-1")
    islands = replicas_on(store, timeout_s=50.0)
    train_all(islands, 4)
    assert {island.manager.current_step() for island in islands} == {4}
    assert len(states(store, 3)) == 1
    assert store.read(keys.checkpoint_manifest(2)) is not None, "written out of turn, for the blocked replicas"
    assert "TimeoutError" not in caplog.text


def test_damaged_payload_of_the_last_round_is_passed_by_a_checkpoint() -> None:
    """Only its author comes to the end by itself. It stays until the others ask, although it is not its turn."""
    store = Rotting(3, "r-2")
    islands = replicas_on(store, timeout_s=5.0)
    train_all(islands, 4)
    assert {island.manager.current_step() for island in islands} == {4}
    assert_same_parameters(islands)
    assert store.read(keys.checkpoint_manifest(4)) is not None


def test_blocked_replica_without_catch_up_also_asks_for_a_checkpoint() -> None:
    """A script may leave out catch_up: its replica waits in should_commit then, and the others must see it."""
    store = Rotting(3, "r-1")
    islands = replicas_on(store, timeout_s=5.0, max_retries=None)

    def train(island: Island) -> None:
        island.join()
        with island.diloco:
            while island.manager.current_step() < 4:
                island.step()
        island.manager.shutdown()

    together([lambda island=island: train(island) for island in islands])
    assert store.blocked == {"r-0", "r-2"}
    assert_same_parameters(islands)


def test_receipt_is_written_although_a_check_fails(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> str:
        raise ValueError("a fault of the check")

    clock, store = FakeClock(), MemoryStore()
    open_run(store, run_record(clock, slots=("a",)))
    session = join_run(store, "a", SessionOptions(min_replicas=1, deadline_s=100.0, heartbeat_s=1.0), clock)
    recorder = Recorder(session.log, session.presence, SharedState(), clock.nonce, session.collector, session.group)
    facts = RoundFacts(
        averages=(),
        contributed=True,
        uploaded_bytes=0,
        downloaded_bytes=0,
        requests=0,
        seconds={"wait": 1.0},
        checks=(fail, lambda: "unit 3 is wrong"),
    )
    recorder.record(LogPosition(round=1, previous=GENESIS, members=("a",), batches=1, work=1.0), facts, "average", None)
    recorder.close(wait=True)
    receipt = Receipt.parse(store.read(keys.receipt(0, "a")) or b"", "receipt")
    assert receipt.disputed == "unit 3 is wrong"
    (failed,) = logged_events(caplog, "unit_check_failed")
    assert failed == {"round": 0, "error": "a fault of the check"}
    assert not logged_events(caplog, "receipt_failed")


def test_writer_of_the_last_checkpoint_does_not_write_it_twice() -> None:
    """One slot is gone for good, and the upload takes longer than it takes to notice that."""
    continues, uploads = threading.Event(), list[str]()

    def hold_first_upload(verb: str, key: str) -> None:
        if verb == "create" and key.startswith(keys.CHECKPOINTS) and not key.endswith(keys.MANIFEST):
            uploads.append(key)
            if len(uploads) == 1:
                continues.wait(300)

    clock, store = FakeClock(), HookedStore(hold_first_upload)
    open_run(store, run_record(clock, slots=("a", "b"), rounds=2))
    terms = SessionOptions(min_replicas=1, deadline_s=100.0, heartbeat_s=1.0)
    session, gone = (join_run(store, slot, terms, clock) for slot in "ab")
    gone.presence.enter("train", round_number=1)
    state = SharedState()
    state.register(f"{FRAGMENT}0", lambda _: None, lambda: {"weight": torch.ones(3)})
    recorder = Recorder(session.log, session.presence, state, clock.nonce, session.collector, session.group)
    position = LogPosition(round=2, previous=GENESIS, members=("a",), batches=2, work=2.0)
    facts = RoundFacts(
        averages=(), contributed=True, uploaded_bytes=0, downloaded_bytes=0, requests=0, seconds={"wait": 1.0}
    )
    recorder.record(position, facts, "fragments", 1)
    done = clock.now() + 3 * session.policy.stale_s

    def end_upload() -> None:
        if clock.now() >= done:
            continues.set()
            wait_for(lambda: not recorder.is_saving)

    clock.on_pause = end_upload
    RescueCheckpoints(session, recorder, TorchTrainer(state)).wait_for_others(position)
    continues.set()
    recorder.close(wait=True)
    assert len(uploads) == 1
    assert store.read(keys.checkpoint_manifest(2)) is not None
    assert clock.now() >= done, "it stayed until the checkpoint was stored"


@pytest.mark.slow
def test_blocked_replica_without_help_ends_with_the_reason() -> None:
    author, *blocked = replicas_on(Rotting(1, "r-0"), timeout_s=1.5)

    def leave() -> None:
        author.train(2, close=False).stop()

    def end(island: Island) -> None:
        with pytest.raises(RuntimeError, match="round 1 is closed and cannot be followed") as ended:
            island.train(4)
        assert isinstance(ended.value.__cause__, Corrupt)
        assert "no checkpoint beyond it came within 3 s" in str(ended.value)
        assert "payloads/00000001/r-0" in str(ended.value), "it names the damaged object"

    together([leave, *(lambda island=island: end(island) for island in blocked)])
