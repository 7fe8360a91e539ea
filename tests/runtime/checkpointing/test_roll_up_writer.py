"""The member in rotation writes a roll-up of closed rounds: when, from what, and what its failures cost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tests.kit.events import logged_events
from tests.kit.protocol import run_record
from tests.kit.records import member, outcome
from tests.kit.rounds import NONCE, InlineExecutor, WrittenRun
from tests.kit.stores import CountingStore, HookedStore, damage
from tests.support.clocks import FakeClock

from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
from skerry.runtime.checkpointing.roll_up_writer import Look, RollUpSettings, RollUpWriter, due_look
from skerry.runtime.daemon_executors import BackgroundThreads
from skerry.runtime.errors import Retryable, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog
from skerry.runtime.log.read_rounds import RoundListing, list_roll_ups, read_closed_rounds, read_roll_up
from skerry.runtime.log.recorded_starts import key_of_start
from skerry.runtime.log.roll_up import RollUp
from skerry.runtime.log.summarize_round import RecordedRound
from skerry.runtime.store import open_store
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from skerry.runtime.log.recorded_starts import StartRecord
    from skerry.runtime.store import Store

SLOTS: Final = ("a", "b", "c")
# Ten rounds, and looks two, four and eight rounds after the last one.
SHORT: Final = RollUpSettings(rounds=10, looks=(2, 4, 8))


class Members(WrittenRun):
    """Replicas at the head of one log. Each has a writer, which runs its jobs at once."""

    def __init__(self, store: Store | None = None, *, rounds: int | None = None) -> None:
        memory = MemoryStore() if store is None else store
        super().__init__(memory, *SLOTS)
        self.clock = FakeClock()
        self.run = run_record(self.clock, nonce=NONCE, slots=SLOTS, rounds=rounds)
        self.logs: dict[str, RunLog] = {}
        self.writers = {slot: self.writer(slot, memory) for slot in SLOTS}

    def writer(self, slot: str, store: Store) -> RollUpWriter:
        self.logs[slot] = RunLog(store if isinstance(store, Retrying) else Retrying(store, self.clock), self.run)
        return RollUpWriter(self.logs[slot], slot, self.clock, InlineExecutor(), SHORT)

    def train(self, rounds: int, *, dead: tuple[str, ...] = (), **changes: tuple[str, ...]) -> None:
        """Close so many rounds. dead: replicas whose writers do not run."""
        for _ in range(rounds):
            self.close(**changes)  # type: ignore[arg-type]
            for slot, writer in self.writers.items():
                if slot not in dead:
                    writer.note_closed(self.position)

    @property
    def position(self) -> LogPosition:
        return LogPosition(round=self.closed, previous=self.commit, members=self.slots, batches=0, work=0.0)

    @property
    def written(self) -> list[tuple[int, int, str]]:
        """First and last round of each roll-up, and its writer."""
        read = [read_roll_up(self.store, rounds) for rounds in list_roll_ups(self.store)]
        return [(item.first, item.last, item.writer) for item in read if item is not None]


@pytest.mark.parametrize(
    ("closed", "expected"),
    [
        (0, None),
        (11, None),
        (12, (range(10), 1)),
        (13, (range(10), 1)),
        (14, (range(10), 2)),
        (21, (range(10), 3)),
        (22, (range(10, 20), 1)),
        (1234, (range(1220, 1230), 2)),
    ],
)
def test_looks_are_due_some_rounds_after_the_last_one(closed: int, expected: tuple[range, int] | None) -> None:
    look = due_look(closed, SHORT, is_over=False)
    assert (None if look is None else (look.rounds, look.stage)) == expected


@pytest.mark.parametrize(("closed", "expected"), [(9, None), (10, range(10)), (11, range(10, 11)), (40, range(30, 40))])
def test_last_rounds_of_a_run_are_due_at_its_end(closed: int, expected: range | None) -> None:
    look = due_look(closed, SHORT, is_over=True)
    assert look == (None if expected is None else Look(rounds=expected, stage=0, closed=closed, at_end=True))


def test_members_take_turns_and_store_what_the_records_give() -> None:
    members = Members()
    members.train(13, late=("b",))
    members.train(30)
    assert members.written == [(0, 9, "a"), (10, 19, "b"), (20, 29, "c"), (30, 39, "a")]
    for first, last, writer in members.written:
        singles = list(RoundListing(members.store, NONCE, range(first, last + 1)).read())
        rounds = [RecordedRound.of(single.number, single.closed_at, single.records) for single in singles]
        starts = None if first else ()  # a store without times cannot tell which are new
        expected = RollUp.of(NONCE, writer, singles[-1].commit or "", rounds, starts)
        assert read_roll_up(members.store, range(first, last + 1)) == expected


def test_starts_and_ends_are_in_the_roll_up_of_their_rounds() -> None:
    clock = FakeClock()
    members = Members(MemoryStore(clock=clock))

    def at(number: int, record: StartRecord) -> None:
        while members.closed < number:
            clock.advance(1.0)
            members.train(1)
        members.put(key_of_start(record), record)

    at(0, first := member("a", run=NONCE))
    at(8, end := outcome("a", run=NONCE, status="retry"))
    at(9, foreign := member("b", run="f" * 32))
    at(11, again := member("a", 1, run=NONCE))
    at(13, later := member("b", 1, run=NONCE))
    at(24, newest := member("c", run=NONCE))
    stored = [read_roll_up(members.store, rounds) for rounds in list_roll_ups(members.store)]
    assert [None if item is None else item.starts for item in stored] == [(first, again, end), (again, later)]
    read: dict[str, StartRecord] = {}
    assert len(list(read_closed_rounds(members.store, NONCE, read))) == 24
    assert read == {key_of_start(record): record for record in (first, again, later, end)}
    assert not {key_of_start(foreign), key_of_start(newest)} & read.keys()


def test_writer_waits_for_receipts_and_at_last_writes_without_them() -> None:
    members = Members()
    members.train(10, without_receipt=("c",))
    members.train(7)
    assert members.written == [], "7 rounds later a receipt may still come"
    members.train(1)
    assert members.written == [(0, 9, "a")]
    roll_up = read_roll_up(members.store, range(10))
    assert roll_up is not None
    assert [item.receipts for item in roll_up.recorded()] == [frozenset("ab")] * 10


def test_receipts_that_come_late_are_in_it() -> None:
    members = Members()
    members.train(12, without_receipt=("c",))
    for number in range(12):
        members.receipt("c", number)
    members.train(2)
    assert members.written == [(0, 9, "a")]
    roll_up = read_roll_up(members.store, range(10))
    assert roll_up is not None
    assert {item.receipts for item in roll_up.recorded()} == {frozenset("abc")}


def test_roll_up_of_a_missing_writer_is_written_with_the_next_one() -> None:
    members = Members()
    members.train(21, dead=("a",))
    assert members.written == []
    members.train(1, dead=("a",))
    assert members.written == [(0, 9, "b"), (10, 19, "b")]
    members.train(50)
    assert [first for first, _, _ in members.written] == [0, 10, 20, 30, 40, 50, 60]


def test_existing_roll_up_is_not_written_again() -> None:
    members = Members(CountingStore())
    members.train(12)
    again = members.writer("a", members.store)
    assert isinstance(members.store, CountingStore)
    members.store.forget()
    again.note_closed(members.position)
    assert (members.store.read_keys, members.store.created_keys, members.store.listings) == ([], [], 1)


def test_end_of_a_run_is_rolled_up_when_the_last_receipts_exist() -> None:
    members = Members(rounds=23)
    members.train(22)
    assert [first for first, _, _ in members.written] == [0, 10]
    members.clock.on_pause = lambda: members.receipt("b", 22) if len(members.clock.pauses) == 3 else None
    members.train(1, without_receipt=("b",))
    assert members.written[-1] == (20, 22, "c")
    roll_up = read_roll_up(members.store, range(20, 23))
    assert roll_up is not None
    assert {item.receipts for item in roll_up.recorded()} == {frozenset("abc")}


def test_end_of_a_run_is_waited_for_a_few_seconds() -> None:
    members = Members(rounds=20)
    members.train(19)
    before = members.clock.now()
    members.train(1, without_receipt=("b",))
    assert 5.0 <= members.clock.now() - before <= 5.5
    assert members.written == [(0, 9, "a")]


def test_end_of_a_run_with_an_old_missing_receipt_is_rolled_up() -> None:
    members = Members(rounds=20)
    members.train(13, without_receipt=("c",))
    members.train(7)
    assert members.written == [(0, 9, "a"), (10, 19, "b")]


def test_short_run_has_no_roll_up() -> None:
    members = Members(rounds=9)
    members.train(9)
    assert members.written == []


def test_rounds_with_a_damaged_record_are_not_rolled_up(caplog: pytest.LogCaptureFixture) -> None:
    members = Members()
    members.close(5)
    damage(members.store, keys.contribution(4, 0, "b"), 0)
    members.train(10)
    assert members.written == []
    failed = logged_events(caplog, "roll_up_failed")[0]
    assert (failed["first"], failed["last"]) == (0, 9)
    assert "unusable=[4]" in failed["error"]
    members.train(10)
    assert members.written == [(10, 19, "b")], "the next rounds are not concerned"


@pytest.mark.parametrize("error", [Unauthorized("no right to create rollups/"), Retryable("503")])
def test_store_that_refuses_is_no_outage_of_the_replica(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(verb: str, key: str) -> None:
        if verb == "create" and key.startswith(keys.ROLL_UPS):
            raise error

    hooked = HookedStore(refuse)
    members = Members(hooked)
    store = Retrying(hooked, members.clock)
    members.writers = {"a": members.writer("a", store)}
    members.train(12)
    assert members.written == []
    assert len(logged_events(caplog, "roll_up_failed")) == 1
    assert store.reachable_since(0.0) == 0.0
    assert members.clock.now() <= 1011.0, "retried for 10 s at most"


def test_records_that_a_replica_has_met_are_not_read_again() -> None:
    """A hundred rounds of three replicas cost the writer one write, seven listings and no read."""
    store = CountingStore()
    run = run_record(FakeClock(), nonce=NONCE, slots=SLOTS)
    written = WrittenRun(store, *SLOTS)
    log = RunLog(Retrying(store, FakeClock()), run)
    writer = RollUpWriter(log, "a", FakeClock(), InlineExecutor(), RollUpSettings())
    for number in range(102):
        written.close()
        log.read_commit(number)
        log.read_decision(number, 0)
        for slot in SLOTS:
            log.read_contribution(number, 0, slot)
            log.recent.keep(keys.receipt(number, slot), store.read(keys.receipt(number, slot)) or b"")
        store.forget()
        position = LogPosition(round=number + 1, previous="", members=SLOTS, batches=0, work=0.0)
        writer.note_closed(position)
        assert number == 101 or store.requests == 0
    assert (store.read_keys, store.created_keys, store.listings) == ([], [keys.roll_up(0, 99)], 7)


def test_replica_that_was_restarted_reads_what_it_has_not_met() -> None:
    members = Members(CountingStore())
    members.close(11)
    assert isinstance(members.store, CountingStore)
    members.store.forget()
    members.train(1)
    assert len(members.store.read_keys) == 10 * (1 + 1 + 3 + 3)
    assert members.written == [(0, 9, "a")]


def test_records_of_rolled_up_rounds_are_forgotten() -> None:
    members = Members()
    log = members.logs["b"]
    members.close(30)
    for number in range(30):
        log.read_commit(number)
    members.writers["b"].note_closed(members.position)
    kept = [number for number in range(30) if log.recent.get(keys.commit(number)) is not None]
    assert kept == list(range(10, 30))


def test_stop_does_not_wait_for_records_that_are_still_to_be_read() -> None:
    reading, resume = threading.Event(), threading.Event()

    def hang(verb: str, key: str) -> None:
        if verb == "read" and key.startswith(keys.RECEIPTS):
            reading.set()
            assert resume.wait(300)

    members = Members()
    members.close(12)
    store = HookedStore(hang)
    for entry in members.store.list(""):
        store.create(entry.key, members.store.read(entry.key) or b"")
    log = RunLog(Retrying(store, members.clock), members.run)
    pool = BackgroundThreads(1, "roll-up")
    writer = RollUpWriter(log, "a", members.clock, pool, SHORT)
    writer.note_closed(members.position)
    assert reading.wait(300)
    writer.close(wait=True)
    assert not resume.is_set()
    resume.set()
    pool.shutdown(wait=True)


def test_end_of_the_run_is_written_before_a_replica_leaves() -> None:
    members = Members(rounds=12)
    members.close(12)
    writer = RollUpWriter(
        RunLog(Retrying(members.store, members.clock), members.run),
        "b",
        members.clock,
        BackgroundThreads(1, "roll-up"),
        SHORT,
    )
    writer.note_closed(members.position)
    writer.close(wait=True)
    assert members.written == [(0, 9, "b"), (10, 11, "b")]


# A process of its own: it is killed when the temporary file is complete, before the object gets its name.
KILLED: Final = """
import os, signal, sys
from tests.runtime.checkpointing.test_roll_up_writer import Members
from skerry.runtime.store import open_store
from skerry.runtime.log import keys
members = Members.__new__(Members)
Members.__init__(members, open_store(sys.argv[1]))
members.close(11)
link = os.link
def kill(source, target, *args, **named):
    if keys.ROLL_UPS in str(target):
        os.kill(os.getpid(), signal.SIGKILL)
    link(source, target, *args, **named)
os.link = kill
members.train(1)
"""


@pytest.mark.slow
def test_writer_killed_in_the_middle_leaves_nothing_half_made(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path.as_uri()],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    store = DirectoryStore(tmp_path)
    assert len(store.list(keys.COMMITS)) == 12
    assert store.list(keys.ROLL_UPS) == []
    members = Members(MemoryStore())
    members.store, members.closed = open_store(tmp_path.as_uri()), 12
    members.writer("a", members.store).note_closed(members.position)
    assert members.written == [(0, 9, "a")]
