from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock

from skerry.infra.observe.fold import agreement
from skerry.infra.observe.look import Observer
from skerry.infra.view import Agreement
from skerry.runtime import keys
from skerry.runtime.errors import Corrupt
from skerry.runtime.records import GENESIS, Commit, Heartbeat, Outcome, Receipt, Run
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.store import Store

NONCE = "0" * 32
RUN = Run(
    nonce=NONCE,
    name="r",
    spec=None,
    slots=("a-0", "a-1"),
    rounds=3,
    sync_every=1,
    fragments=1,
    outer_lr=0.7,
    outer_momentum=0.9,
    min_replicas=1,
    grace_s=1.0,
    start_window_s=1.0,
    checkpoint_every=1,
    codec="none",
    weighting="uniform",
    created="now",
)


def beat(slot: str, *, incarnation: int = 0, sequence: int = 0, run: str = NONCE) -> Heartbeat:
    return Heartbeat(
        run=run,
        slot=slot,
        incarnation=incarnation,
        sequence=sequence,
        round=1,
        inner_step=7,
        phase="train",
        abstains=None,
        loss=2.5,
        tokens=10,
        tokens_per_s=5.0,
        uploaded_bytes=1,
        downloaded_bytes=2,
        waiting_for=("a-1",),
        notice=None,
    )


def commit(number: int, work: float = 2.0) -> Commit:
    return Commit(
        run=NONCE, round=number, exchanges=("e" * 64,), participants=2 - number % 2, work=work, previous=GENESIS
    )


def receipt(slot: str, number: int, *, average: str = "a", state: str | None = "b") -> Receipt:
    return Receipt(
        run=NONCE,
        round=number,
        slot=slot,
        incarnation=0,
        commit="c" * 64,
        averages=(average * 32,),
        state=None if state is None else state * 32,
        scope="fragments",
        contributed=True,
        uploaded_bytes=0,
        downloaded_bytes=0,
        requests=0,
        seconds={},
    )


def outcome(slot: str, incarnation: int) -> Outcome:
    return Outcome(
        run=NONCE,
        slot=slot,
        incarnation=incarnation,
        status="done",
        exit_code=0,
        reason="all rounds are closed",
        round=3,
        inner_step=30,
        tokens=99,
        loss_first=4.0,
        loss_last=1.0,
        ended="now",
    )


def write(store: Store, record: Heartbeat | Commit | Receipt | Outcome) -> None:
    match record:
        case Heartbeat():
            store.replace(keys.heartbeat(record.slot), record.to_bytes())
        case Commit():
            assert store.create(keys.commit(record.round), record.to_bytes())
        case Receipt():
            assert store.create(keys.receipt(record.round, record.slot), record.to_bytes())
        case Outcome():
            assert store.create(keys.outcome(record.slot, record.incarnation), record.to_bytes())


class Sight:
    def __init__(self, run: Run = RUN) -> None:
        self.store = MemoryStore()
        self.clock = FakeClock()
        self.observer = Observer(self.store, run, self.clock)
        self.look = self.observer.look

    def write(self, *records: Heartbeat | Commit | Receipt | Outcome) -> None:
        for record in records:
            write(self.store, record)


def test_an_empty_run_shows_the_expected_slots_as_not_seen() -> None:
    view = Sight().look()
    assert (view.closed, view.participants, view.agreement, view.finished) == (0, None, None, False)
    assert [(replica.slot, replica.phase) for replica in view.replicas] == [("a-0", None), ("a-1", None)]


def test_the_newest_commit_and_every_heartbeat_are_shown() -> None:
    sight = Sight()
    sight.write(commit(0), commit(1), beat("a-0"), beat("b-3"))
    view = sight.look()
    assert (view.closed, view.participants) == (2, 1)
    assert [replica.slot for replica in view.replicas] == ["a-0", "a-1", "b-3"]
    assert view.replicas[0].waiting_for == ("a-1",)
    assert (view.replicas[0].inner_step, view.replicas[0].loss) == (7, 2.5)
    sight.write(commit(2))
    assert sight.look().finished


def test_a_run_that_makes_up_for_lost_work_is_finished_when_it_has() -> None:
    sight = Sight(RUN.model_copy(update={"work": 6.0}))
    sight.write(commit(0, 2.0), commit(1, 3.0), commit(2, 5.0))
    view = sight.look()
    assert (view.closed, view.work, view.due, view.finished) == (3, 5.0, 6.0, False)
    sight.write(commit(3, 7.0))
    assert sight.look().finished


def test_silence_is_the_time_since_a_heartbeat_was_seen_to_change() -> None:
    sight = Sight()
    sight.write(beat("a-0"), beat("a-1"))
    assert [replica.silent_s for replica in sight.look().replicas] == [None, None]
    sight.clock.advance(5)
    sight.write(beat("a-0", sequence=1))
    assert [replica.silent_s for replica in sight.look().replicas] == [0.0, 5.0]
    sight.clock.advance(2)
    assert [replica.silent_s for replica in sight.look().replicas] == [2.0, 7.0]


def test_whoever_is_at_work_and_has_not_moved_for_long_is_silent() -> None:
    sight = Sight()
    sight.write(beat("a-0"), beat("a-1"), outcome("a-1", 0))
    sight.look()
    sight.clock.advance(6)
    assert [replica.silent for replica in sight.look().replicas] == [False, False]
    assert [replica.silent for replica in sight.observer.look(6.0).replicas] == [True, False]
    sight.clock.advance(9)
    assert [replica.silent for replica in sight.look().replicas] == [True, False]


def test_an_outcome_is_the_last_word_until_a_newer_incarnation_speaks() -> None:
    sight = Sight()
    sight.write(beat("a-0"), outcome("a-0", 0))
    ended = sight.look().replicas[0]
    assert (ended.outcome, ended.loss_first, ended.loss, ended.silent_s) == ("done", 4.0, 1.0, 0.0)
    sight.write(beat("a-0", incarnation=1))
    assert sight.look().replicas[0].outcome is None
    sight.write(outcome("a-0", 1))
    assert (sight.look().replicas[0].outcome, sight.look().replicas[0].incarnation) == ("done", 1)


def test_a_damaged_heartbeat_or_one_of_another_run_is_left_out_and_a_damaged_commit_is_not() -> None:
    sight = Sight()
    sight.store.replace(keys.heartbeat("a-0"), b"{")
    sight.write(beat("a-1", run="1" * 32))
    assert [replica.phase for replica in sight.look().replicas] == [None, None]
    sight.store.replace(keys.commit(0), b"{")
    with pytest.raises(Corrupt, match=r"commits/00000000\.json"):
        sight.look()


def test_receipts_are_found_a_few_rounds_back_and_read_once() -> None:
    sight = Sight()
    sight.write(commit(0), receipt("a-0", 0), receipt("a-1", 0))
    first = sight.look().agreement
    assert first == Agreement(round=0, slots=("a-0", "a-1"), average=True, state=True)
    sight.store.delete(keys.receipt(0, "a-1"))
    assert sight.look().agreement == first


@pytest.mark.parametrize(
    ("receipts", "expected"),
    [
        ([], None),
        ([receipt("a-0", 1)], None),
        ([receipt("a-0", 1), receipt("a-1", 0)], None),
        (
            [receipt("a-0", 1), receipt("a-1", 1, average="f")],
            Agreement(round=1, slots=("a-0", "a-1"), average=False, state=True),
        ),
        (
            [receipt("a-0", 1), receipt("a-1", 1, state="f")],
            Agreement(round=1, slots=("a-0", "a-1"), average=True, state=False),
        ),
        (
            [receipt("a-0", 1, state=None), receipt("a-1", 1, state=None)],
            Agreement(round=1, slots=("a-0", "a-1"), average=True, state=None),
        ),
        (
            [receipt("a-0", 1), receipt("a-1", 1), receipt("a-0", 2)],
            Agreement(round=1, slots=("a-0", "a-1"), average=True, state=True),
        ),
        (  # a slot that is away: the newest round that two others share
            [receipt("a-0", 2), receipt("a-2", 2), receipt("a-0", 1), receipt("a-2", 1)],
            Agreement(round=2, slots=("a-0", "a-2"), average=True, state=True),
        ),
    ],
)
def test_agreement_is_judged_on_the_newest_common_round(receipts: list[Receipt], expected: Agreement | None) -> None:
    assert agreement(("a-0", "a-1"), receipts) == expected
