"""A finished run whose rounds are all in roll-ups, with as many restarts as a test asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tests.kit.protocol import heartbeat, run_record
from tests.kit.records import commit, member, outcome
from tests.kit.rounds import NONCE, WrittenRun
from tests.kit.stores import CountingStore
from tests.support.clocks import FakeClock

from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import RoundListing
from skerry.runtime.log.roll_up import ROUNDS, RollUp
from skerry.runtime.log.summarize_round import RecordedRound

if TYPE_CHECKING:
    from skerry.runtime.log.record_parsing import Record
    from skerry.runtime.log.recorded_starts import StartRecord

SLOTS: Final = tuple(f"a-{number}" for number in range(64))


class RolledUpRun:
    """Of its rounds only the last three have more than a commit, and their records would be those of rounds 0 to 2.

    restarts: of each replica, one after the other; each ended start is in a roll-up with its end, and so are all other
    starts. The first replica is away in round 96 of each hundred.
    """

    def __init__(self, rounds: int, replicas: int, restarts: int = 0) -> None:
        self.clock, slots = FakeClock(), SLOTS[:replicas]
        self.clock.advance(0.5)  # whole seconds may be those of a listing
        self.store = CountingStore(self.clock)
        self.run = run_record(self.clock, nonce=NONCE, slots=slots, rounds=rounds, sync_every=20)
        self.put(keys.RUN, self.run)
        source = WrittenRun(self.store, *slots)
        source.close(2)
        source.close(away=slots[:1])
        singles = list(RoundListing(source.store, NONCE, range(3)).read())
        recorded = [RecordedRound.of(single.number, 1000.0, single.records) for single in singles]
        starts = [record for slot in slots for record in self._starts(slot, restarts)]
        for first in range(0, rounds, ROUNDS):
            shown = [_numbered(recorded[2 if number == 96 else number % 2], first + number) for number in range(ROUNDS)]
            roll_up = RollUp.of(NONCE, "a-0", "c" * 64, shown, starts[first // ROUNDS :: rounds // ROUNDS])
            self.store.create(keys.roll_up(first, first + ROUNDS - 1), roll_up.to_stored())
        self._move_singles(rounds - 3)
        for number in range(rounds - 3):
            self.put(keys.commit(number), commit(number, run=NONCE))
        for slot in slots:
            self.put(keys.outcome(slot, restarts), outcome(slot, restarts, run=NONCE, round=rounds))
            beat = heartbeat(slot, run=NONCE, incarnation=restarts, round=rounds, phase="finished")
            self.put(keys.heartbeat(slot), beat)
        self.store.forget()

    def put(self, key: str, record: Record) -> None:
        self.store.create(key, record.to_bytes())

    def _starts(self, slot: str, restarts: int) -> list[StartRecord]:
        records: list[StartRecord] = []
        for number in range(restarts + 1):
            if number:
                end = outcome(slot, number - 1, run=NONCE, status="retry", exit_code=10, reason="spot")
                self.put(keys.outcome(slot, number - 1), end)
                records.append(end)
            start = member(slot, number, run=NONCE)
            self.put(keys.member(slot, number), start)
            records.append(start)
        return records

    def _move_singles(self, first: int) -> None:
        """Give the single records of rounds 0 to 2 to the last ones, as any reader of single records would find."""
        for folder in (keys.COMMITS, keys.EXCHANGES, keys.CONTRIBUTIONS, keys.RECEIPTS):
            for entry in self.store.list(folder):
                data = bytes(self.store.read(entry.key) or b"")
                self.store.delete(entry.key)
                number = keys.round_of(entry.key)
                moved = data.replace(b'"round":%d,' % number, b'"round":%d,' % (first + number))
                self.store.create(entry.key.replace(f"{number:08d}", f"{first + number:08d}"), moved)


def _numbered(item: RecordedRound, number: int) -> RecordedRound:
    return replace(item, history=replace(item.history, round=number, closed_at=1000.0 + 20 * number))
