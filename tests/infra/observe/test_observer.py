from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.kit.protocol import heartbeat, run_record
from tests.kit.records import commit, outcome, receipt
from tests.support.clocks import FakeClock

from skerry.infra.observe.build_view import compare_receipts
from skerry.infra.observe.doctor.valid_records import key_of
from skerry.infra.observe.observer import Observer
from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.infra.observe.run_view import Agreement
from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys
from skerry.runtime.log.run_record import Settings
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.infra.observe.doctor.read_log import LogRecord
    from skerry.infra.observe.run_view import RunView
    from skerry.runtime.log.records import Receipt

RUN = "a" * 32
SLOTS = ("a-0", "a-1")


class Observed:
    """A run of three rounds in a memory store, and its observer."""

    def __init__(self, **changes: object) -> None:
        self.store = MemoryStore()
        self.clock = FakeClock()
        self.first = run_record(self.clock, nonce=RUN, slots=SLOTS, rounds=3, **changes)
        self.observer = Observer(self.store, RunSettings(first=self.first), self.clock)

    def write(self, *records: LogRecord) -> None:
        for record in records:
            self.store.replace(key_of(record) or "", record.to_bytes())

    def view(self, patience_s: float = 15.0) -> RunView:
        return self.observer.view(patience_s)


@pytest.fixture
def run() -> Observed:
    return Observed()


def test_empty_run_shows_the_planned_slots_without_values(run: Observed) -> None:
    view = run.view()
    assert (view.closed, view.participants, view.agreement, view.finished) == (0, None, None, False)
    assert [(replica.slot, replica.phase) for replica in view.replicas] == [("a-0", None), ("a-1", None)]


def test_view_shows_the_newest_commit_and_all_heartbeats(run: Observed) -> None:
    run.write(
        commit(0),
        commit(1, participants=1),
        heartbeat("a-0", inner_step=7, loss=2.5, waiting_for=("a-1",)),
        heartbeat("b-3"),
    )
    view = run.view()
    assert (view.closed, view.participants) == (2, 1)
    assert [replica.slot for replica in view.replicas] == ["a-0", "a-1", "b-3"]
    first = view.replicas[0]
    assert (first.waiting_for, first.inner_step, first.loss) == (("a-1",), 7, 2.5)
    run.write(commit(2))
    assert run.view().finished


def test_run_that_makes_up_lost_work_ends_when_the_work_is_done() -> None:
    run = Observed(work=6.0)
    run.write(commit(0, work=2.0), commit(1, work=3.0), commit(2, work=5.0))
    view = run.view()
    assert (view.closed, view.work, view.due, view.finished) == (3, 5.0, 6.0, False)
    run.write(commit(3, work=7.0))
    assert run.view().finished


def test_silence_is_the_time_since_a_heartbeat_changed(run: Observed) -> None:
    run.write(heartbeat("a-0"), heartbeat("a-1"))
    assert [replica.silent_s for replica in run.view().replicas] == [None, None]
    run.clock.advance(5)
    run.write(heartbeat("a-0", sequence=2))
    assert [replica.silent_s for replica in run.view().replicas] == [0.0, 5.0]
    run.clock.advance(2)
    assert [replica.silent_s for replica in run.view().replicas] == [2.0, 7.0]


def test_working_replica_is_silent_after_the_patience(run: Observed) -> None:
    run.write(heartbeat("a-0"), heartbeat("a-1"), outcome("a-1"))
    run.view()
    run.clock.advance(6)
    assert [replica.silent for replica in run.view().replicas] == [False, False]
    assert [replica.silent for replica in run.view(6.0).replicas] == [True, False]
    run.clock.advance(9)
    assert [replica.silent for replica in run.view().replicas] == [True, False]


def test_outcome_is_shown_until_a_newer_incarnation_sends_a_heartbeat(run: Observed) -> None:
    run.write(heartbeat("a-0"), outcome("a-0"))
    ended = run.view().replicas[0]
    assert (ended.outcome, ended.loss_first, ended.loss, ended.silent_s) == ("done", 4.0, 1.0, 0.0)
    run.write(heartbeat("a-0", incarnation=1))
    assert run.view().replicas[0].outcome is None
    run.write(outcome("a-0", 1))
    assert (run.view().replicas[0].outcome, run.view().replicas[0].incarnation) == ("done", 1)


def test_damaged_heartbeats_are_skipped_and_damaged_commits_raise(run: Observed) -> None:
    run.store.replace(keys.heartbeat("a-0"), b"{")
    run.write(heartbeat("a-1", run="1" * 32))
    assert [replica.phase for replica in run.view().replicas] == [None, None]
    run.store.replace(keys.commit(0), b"{")
    with pytest.raises(Corrupt, match=r"commits/00000000\.json"):
        run.view()


def test_receipts_are_read_once(run: Observed) -> None:
    run.write(commit(0), receipt("a-0", 0), receipt("a-1", 0))
    assert run.view().agreement == agreement(0)
    run.store.delete(keys.receipt(0, "a-1"))
    assert run.view().agreement == agreement(0)


def agreement(round_number: int, *, average: bool = True, state: bool | None = True) -> Agreement:
    return Agreement(round=round_number, slots=SLOTS, average=average, state=state)


@pytest.mark.parametrize(
    ("receipts", "expected"),
    [
        ([], None),
        ([receipt("a-0", 1)], None),
        ([receipt("a-0", 1), receipt("a-1", 0)], None),
        ([receipt("a-0", 1), receipt("a-1", 1, averages=("f" * 32,))], agreement(1, average=False)),
        ([receipt("a-0", 1), receipt("a-1", 1, state="f" * 32)], agreement(1, state=False)),
        ([receipt("a-0", 1, state=None), receipt("a-1", 1, state=None)], agreement(1, state=None)),
        ([receipt("a-0", 1), receipt("a-1", 1), receipt("a-0", 2)], agreement(1)),
        (  # a planned slot is away: the newest round that two others share
            [receipt("a-0", 2), receipt("a-2", 2), receipt("a-0", 1), receipt("a-2", 1)],
            Agreement(round=2, slots=("a-0", "a-2"), average=True, state=True),
        ),
    ],
)
def test_receipts_of_the_newest_common_round_are_compared(receipts: list[Receipt], expected: Agreement | None) -> None:
    assert compare_receipts(SLOTS, receipts) == expected


def change(run: Observed, **fields: object) -> None:
    """Store settings that change these fields of the newest ones, a second later."""
    run.clock.advance(0.25)
    settings = RunSettings(first=run.first).read_newer(run.store)
    values = {name: getattr(settings.now, name) for name in ("rounds", "work", "outer_lr", "outer_momentum", "slots")}
    record = Settings(
        run=RUN, number=len(settings.changes) + 1, previous=settings.last_digest, by="ada",
        created=run.clock.utc_text(), **{"from_round": 2, **values, **fields},
    )  # fmt: skip
    run.store.create(keys.settings(record.number), record.to_bytes())


def test_changed_settings_are_an_event_from_their_round_on(run: Observed) -> None:
    run.write(commit(0))
    change(run, rounds=9, from_round=1)
    change(run, outer_lr=0.5, outer_momentum=0.8, rounds=9)
    change(run, rounds=9, outer_lr=0.5, outer_momentum=0.8, slots=("a-0", "b-0", "b-1"))
    assert [(event.about, event.text) for event in run.view().events if event.about == "settings"] == [
        ("settings", "adds b-0, b-1, removes a-1 from round 2 on (by ada)"),
        ("settings", "outer_lr 0.7 to 0.5, outer_momentum 0.9 to 0.8 from round 2 on (by ada)"),
        ("settings", "rounds 3 to 9 (by ada)"),
    ]
