"""The requests for the history of a long run and of one of many replicas, and what a first look then shows.

Together: a run of 10,000 rounds of 64 replicas takes 100 + 3 * 64 + 7 requests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tests.kit.protocol import heartbeat, run_record
from tests.kit.records import commit, outcome
from tests.kit.rounds import NONCE, WrittenRun
from tests.kit.stores import CountingStore
from tests.support.clocks import FakeClock

from skerry.infra.observe.history import read_history
from skerry.infra.observe.observer import Observer
from skerry.infra.observe.read_participation import read_participation
from skerry.infra.observe.run_settings import RunSettings
from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import RoundListing
from skerry.runtime.log.records import Member
from skerry.runtime.log.roll_up import ROUNDS, RollUp
from skerry.runtime.log.summarize_round import RecordedRound
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.log.records import Record

SLOTS: Final = tuple(f"a-{number}" for number in range(64))


class RolledUpRun:
    """A finished run whose rounds are all in roll-ups; no other record of a round exists but the last two commits."""

    def __init__(self, rounds: int, replicas: int) -> None:
        self.clock, slots = FakeClock(), SLOTS[:replicas]
        self.store = CountingStore(self.clock)
        self.run = run_record(self.clock, nonce=NONCE, slots=slots, rounds=rounds, sync_every=20)
        self.put(keys.RUN, self.run)
        source = WrittenRun(MemoryStore(), *slots)
        source.close(2)
        source.close(away=slots[:1])
        singles = list(RoundListing(source.store, NONCE, range(3)).read())
        recorded = [RecordedRound.of(single.number, 1000.0, single.records) for single in singles]
        for first in range(0, rounds, ROUNDS):
            shown = [_numbered(recorded[2 if number == 96 else number % 2], first + number) for number in range(ROUNDS)]
            roll_up = RollUp.of(NONCE, "a-0", "c" * 64, shown)
            self.store.create(keys.roll_up(first, first + ROUNDS - 1), roll_up.to_stored())
        for number in (rounds - 2, rounds - 1):
            self.put(keys.commit(number), commit(number, run=NONCE, participants=replicas))
        for slot in slots:
            member = Member(
                run=NONCE, slot=slot, incarnation=0, nonce="b" * 32, host="h", process=1, created=self.clock.utc_text()
            )
            self.put(keys.member(slot, 0), member)
            self.put(keys.outcome(slot, 0), outcome(slot, run=NONCE, round=rounds))
            self.put(keys.heartbeat(slot), heartbeat(slot, run=NONCE, round=rounds, phase="finished"))
        self.store.forget()

    def put(self, key: str, record: Record) -> None:
        self.store.create(key, record.to_bytes())


def _numbered(item: RecordedRound, number: int) -> RecordedRound:
    return replace(item, history=replace(item.history, round=number, closed_at=1000.0 + 20 * number))


def test_history_costs_a_request_for_a_hundred_rounds() -> None:
    rolled_up = RolledUpRun(10_000, 4)
    history = read_history(rolled_up.store)
    assert rolled_up.store.requests == 100 + 3 * 4 + 7
    assert [item.round for item in history.rounds] == list(range(10_000))
    assert {len(item.replicas) for item in history.rounds} == {4}
    absent = [item.round for item in history.rounds if item.replicas[0].part == "absent"]
    assert absent == [number for number in range(10_000) if number % 100 == 96]
    assert (len(history.starts), len(history.heartbeats)) == (4, 4)


def test_first_look_and_participation_use_roll_ups() -> None:
    rolled_up = RolledUpRun(300, 64)
    history = read_history(rolled_up.store)
    assert rolled_up.store.requests == 3 + 3 * 64 + 7
    rolled_up.store.forget()
    view = Observer(rolled_up.store, RunSettings(first=rolled_up.run), rolled_up.clock, history).view()
    assert rolled_up.store.requests < 100
    # The last two rounds are read again, from single records, and there are none in this store.
    assert (view.closed, len(view.recent), view.losses[-1][0]) == (300, 64, 297)
    assert (view.replicas[0].in_rounds, view.replicas[1].in_rounds) == (295, 298)
    taken = read_participation(rolled_up.store)
    assert (taken.rounds, taken.complete) == (300, 297)
    assert taken.replicas[0].missing == (96, 196, 296)
