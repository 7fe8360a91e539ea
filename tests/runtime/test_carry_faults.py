"""What was kept survives every way in which an exchange can fail, and never counts twice: one slot, many ways.

What the slot trains for the n-th time is in element n of its tensor and nowhere else, so the log tells how often it
counts. Slot b decides, with the slot's contribution or without; nothing ever counts that no decision lists.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import torch
from tests.support.clocks import FakeClock

from skerry.runtime import keys
from skerry.runtime.bursts import Burst
from skerry.runtime.carry import Carry, Trained
from skerry.runtime.codec.layout import Index, TensorSpec
from skerry.runtime.codec.tensors import encode
from skerry.runtime.errors import Corrupt, Retryable
from skerry.runtime.exchange import Load, Place
from skerry.runtime.records import GENESIS, Decision, Share
from skerry.runtime.rounds import Unreachable
from skerry.runtime.seat import Terms, take_seat
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store import Data, Entry, Span

SIZE, FRAGMENTS = 256, 2
INDEX = Index((TensorSpec("00000", "float32", (SIZE,)),))
LIMIT = 1000.0
HUGE = 10 * LIMIT


class Flaky(MemoryStore):
    """Somebody's way into a store, which goes away with the first object of a kind: before it is written, or after."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._store = store
        self._away = False
        self.goes_with: str | None = None
        self.writes_first = False

    def comes_back(self) -> None:
        self._away, self.goes_with = False, None

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        self._look()
        return self._store.read(key, span, into)

    def create(self, key: str, data: Data) -> bool:
        self._look()
        goes = self.goes_with is not None and key.startswith(self.goes_with)
        if self.writes_first or not goes:
            done = self._store.create(key, data)
        self._away = goes
        self._look()
        return done

    def replace(self, key: str, data: Data) -> None:
        self._look()
        self._store.replace(key, data)

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        self._look()
        return self._store.list(prefix, after)

    def _look(self) -> None:
        if self._away:
            raise Retryable("the store is away")


class Slot:
    """Slot a and what it keeps. sizes: of what it has trained. kept: what it has kept at any time."""

    def __init__(self, max_norm: float | None = LIMIT) -> None:
        self.clock, self.store, self.carry = FakeClock(), MemoryStore(), Carry()
        self.mine = Flaky(self.store)
        self.terms = Terms(min_replicas=2, deadline_s=10.0, heartbeat_s=1.0, max_norm=max_norm)
        self.seat = take_seat(self.mine, "a", self.terms, self.clock)
        self.other, self.third = (take_seat(self.store, slot, self.terms, self.clock) for slot in "bc")
        self.place = Place(0, 0, GENESIS)
        self.sizes: list[float] = []
        self.ever_kept: set[int] = set()
        self._counted: list[Counter[int]] = []

    def restart(self) -> None:
        """Its next incarnation, with nothing of what the last one held."""
        self.seat, self.carry = take_seat(self.mine, "a", self.terms, self.clock), Carry()

    def bring(self) -> None:
        with suppress(Retryable, Corrupt):  # what happens to it in the exchange thread
            self.seat.averager.bring(self.place, self.carry, self.place.round % FRAGMENTS)
        self.check()

    def run(self, size: float = 1.0, veto: str | None = None) -> bool:
        """Train, and take part in the exchange. True if the average is held."""
        vector = torch.zeros(SIZE)
        vector[len(self.sizes)] = size
        self.sizes.append(size)
        for one in (self.other, self.third):
            one.presence.enter("train", round_number=self.place.round)
        burst, trained = Burst(), Trained(tokens=8, inner_steps=4, fragment=self.place.round % FRAGMENTS)
        burst.add(vector, "avg")
        try:
            self.seat.averager.run(self.place, burst, trained=trained, veto=veto, carry=self.carry)
        except (Retryable, TimeoutError, Corrupt, Unreachable):
            return False
        finally:
            self.mine.comes_back()
            self.clock.on_pause = lambda: None
            self.check()
        return True

    def decide(self, *, with_mine: bool) -> None:
        """Slot b decides with what stands in the log."""
        journal, encoded = self.other.journal, encode([torch.zeros(SIZE)], INDEX)
        load = Load(index=INDEX.digest, parts=encoded.parts, data=encoded.data, tokens=8, inner_steps=4)
        self.other.exchange.contribute(self.place, load)
        found = [(slot, journal.contribution(self.place.round, 0, slot)) for slot in "ab"[not with_mine :]]
        decision = Decision(
            run=journal.run.nonce,
            round=self.place.round,
            exchange=0,
            base=self.place.base,
            index=INDEX.digest,
            reduction="all_gather",
            members=tuple(Share(slot=slot, contribution=one.digest, weight=1.0) for slot, one in found if one),
            proposer="b",
            nonce=self.clock.nonce(),
        )
        self.store.create(keys.decision(self.place.round, 0), decision.to_bytes())

    def decide_while_it_waits(self, *, with_mine: bool) -> None:
        self.clock.on_pause = lambda: self.decide(with_mine=with_mine)

    def close(self) -> None:
        decided = self.other.journal.decision(self.place.round, 0)
        assert decided is not None
        self.place = Place(self.place.round + 1, 0, self.other.exchange.close(self.place, [decided], work=0.0).digest)

    def counted(self) -> Counter[int]:
        """How often what was trained counts."""
        for number in range(len(self._counted), self.place.round + 1):
            decided = self.other.journal.decision(number, 0)
            if decided is not None:
                self._counted.append(self._counted_in(decided.record))
        return sum(self._counted, Counter())

    def _counted_in(self, decision: Decision) -> Counter[int]:
        if "a" not in [share.slot for share in decision.members]:
            return Counter()
        sealed = self.other.journal.contribution(decision.round, 0, "a")
        assert sealed is not None
        (part,) = sealed.record.parts
        data = self.store.read(keys.payload(decision.round, "a", part.digest))
        assert data is not None
        return Counter(self._content(torch.frombuffer(bytearray(data[part.header_bytes :]), dtype=torch.float32)))

    def kept(self) -> Counter[int]:
        """What is kept, at stake or not."""
        counts: Counter[int] = Counter()
        for fragment in range(FRAGMENTS):
            stake = self.carry.at_stake(fragment)
            for one in (self.carry.to_add(fragment, INDEX), None if stake is None else stake.kept):
                counts.update({} if one is None else self._content(one.tensors[0]))
        return counts

    def _content(self, vector: torch.Tensor) -> dict[int, int]:
        return {n: round(vector[n].item() / self.sizes[n]) for n in vector.nonzero().flatten().tolist()}

    def check(self) -> None:
        counted, kept = self.counted(), self.kept()
        self.ever_kept |= kept.keys()
        assert set(counted.values()) | set(kept.values()) <= {1}, f"twice: counted={counted} kept={kept}"
        lost = {n for n in self.ever_kept - counted.keys() - kept.keys() if self.sizes[n] == 1.0}
        assert not lost, f"lost: {lost} counted={counted} kept={kept}"


def late(slot: Slot, size: float = 1.0) -> None:
    """A round is over before the slot comes to it: what it trained is kept."""
    slot.bring()
    slot.decide(with_mine=False)
    assert slot.run(size)
    slot.close()


def in_time(slot: Slot, size: float = 1.0) -> None:
    slot.bring()
    slot.decide_while_it_waits(with_mine=True)
    assert slot.run(size)
    slot.close()


def test_what_was_added_and_left_out_again_is_brought_at_once() -> None:
    """It was held back once. The record that brings it counts, and what was trained meanwhile is kept in its place."""
    slot = Slot()
    late(slot)
    in_time(slot)
    slot.bring()
    slot.decide_while_it_waits(with_mine=False)
    assert slot.run()
    slot.close()
    in_time(slot)
    slot.bring()
    brought = slot.seat.journal.contribution(4, 0, "a")
    assert brought is not None
    assert (brought.record.discount, brought.record.inner_steps) == (0.5, 8)
    slot.decide_while_it_waits(with_mine=True)
    assert slot.run()
    assert slot.counted() == Counter({0: 1, 1: 1, 2: 1, 3: 1})
    assert slot.kept() == Counter({4: 1})


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("goes_with", [keys.PAYLOADS, keys.CONTRIBUTIONS, None])
@pytest.mark.parametrize("writes_first", [True, False])
def test_a_failed_exchange_loses_nothing_that_was_kept(
    goes_with: str | None,
    writes_first: bool,  # noqa: FBT001
    counts: bool,  # noqa: FBT001
) -> None:
    """It was added to what goes with the round: the record stands in the log, or does not, or nobody knows."""
    slot = Slot()
    late(slot)
    in_time(slot)
    slot.bring()
    slot.mine.goes_with, slot.mine.writes_first = goes_with, writes_first
    assert not slot.run()
    slot.bring()
    slot.decide_while_it_waits(with_mine=counts)
    assert slot.run()
    stands = goes_with is None or (goes_with == keys.CONTRIBUTIONS and writes_first)
    assert slot.counted()[0] == (stands and counts)
    assert slot.counted()[2] == (stands and counts), "what was trained for it stands with it"
    assert slot.counted()[3] == (not stands and counts), "the retry was trained anew"


@pytest.mark.parametrize("counts", [True, False])
def test_what_was_at_stake_in_a_round_that_was_jumped_over_is_settled_by_the_log(counts: bool) -> None:  # noqa: FBT001
    slot = Slot()
    late(slot)
    in_time(slot)
    slot.bring()
    assert not slot.run(), "nobody came in time"
    slot.decide(with_mine=counts)
    slot.close()
    in_time(slot)
    slot.bring()
    assert slot.counted()[0] == counts
    assert (slot.seat.journal.contribution(4, 0, "a") is None) == counts, "what did not count is brought at once"


def test_what_an_earlier_incarnation_brought_does_not_cost_the_next_one_its_round() -> None:
    """It was brought before its round was trained for: what is trained for it now is other data, and is late."""
    slot = Slot()
    for step in (late, in_time, late, in_time):
        step(slot)
    slot.bring()
    slot.restart()
    slot.decide_while_it_waits(with_mine=True)
    assert slot.run()
    slot.close()
    assert slot.counted() == Counter([0, 1, 2, 3])
    assert slot.kept() == Counter([4])
    in_time(slot)
    in_time(slot)
    assert slot.counted() == Counter(range(7))


def dropped(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is told about what is dropped."""
    told = [record.fields for record in caplog.records if getattr(record, "event", "") == "abstained"]  # type: ignore[attr-defined]
    return [str(fields["reason"]) for fields in told]


@pytest.mark.parametrize("damaged", [keys.contribution(2, 0, "a"), keys.contribution(2, 0, "b"), keys.decision(2, 0)])
@pytest.mark.parametrize("brings", [True, False])
def test_what_nobody_can_tell_of_any_more_is_dropped_and_told_once(
    damaged: str,
    brings: bool,  # noqa: FBT001
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may count, so it is brought no more; and the slot takes part as before, instead of failing for good."""
    slot = Slot()
    late(slot)
    in_time(slot)
    slot.bring()
    assert not slot.run(), "nobody came in time"
    slot.decide(with_mine=True)
    slot.close()
    assert slot.counted() == Counter([0, 1, 2])
    slot.store.replace(damaged, b"{")
    with caplog.at_level("INFO", "skerry"):
        for _ in range(4):
            if brings:
                slot.bring()
            slot.decide_while_it_waits(with_mine=True)
            assert slot.run()
            slot.close()
    (told,) = dropped(caplog)
    assert told.startswith("what came late is dropped: ")
    assert damaged in told
    assert slot.kept() == Counter()
    assert slot.counted() == Counter(range(7))


@pytest.mark.parametrize(
    ("size", "why"), [(HUGE, "norm above the limit: norm=10000 max_norm=1000"), (float("nan"), "not finite")]
)
def test_what_is_late_and_of_no_use_is_dropped_and_told_once(
    size: float, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not added to anything, so it spoils nothing."""
    slot = Slot(max_norm=None if math.isnan(size) else LIMIT)
    late(slot)
    in_time(slot)
    with caplog.at_level("INFO", "skerry"):
        late(slot, size)
        for _ in range(4):
            in_time(slot)
    assert dropped(caplog) == [f"what came late is dropped: {why}"]
    assert slot.counted() == Counter([0, 1, 3, 4, 5, 6])


def test_what_became_too_large_by_what_was_added_is_dropped_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """It would be no smaller the next time, and all that is kept later would be added to it."""
    slot = Slot()
    late(slot, 0.8 * LIMIT)
    in_time(slot)
    late(slot, 0.8 * LIMIT)
    with caplog.at_level("INFO", "skerry"):
        for _ in range(5):
            in_time(slot)
    (told,) = dropped(caplog)
    assert told == "what came late is dropped: norm above the limit: norm=1131.37 max_norm=1000"
    assert slot.kept() == Counter()
    assert slot.counted() == Counter([1, 3, 4, 5, 6, 7]), "nothing else is held up by it"


def test_what_cannot_be_offered_together_is_offered_one_after_the_other() -> None:
    slot = Slot()
    late(slot, 0.8 * LIMIT)
    in_time(slot)
    in_time(slot, 0.8 * LIMIT)
    assert slot.counted() == Counter([1, 2])
    assert slot.kept() == Counter([0])
    for _ in range(2):
        in_time(slot)
    assert slot.counted() == Counter([0, 1, 2, 3]), "it is brought at once"


@pytest.mark.parametrize("size", [HUGE, float("nan")])
def test_what_was_kept_outlives_a_round_that_is_abstained_from(size: float) -> None:
    slot = Slot()
    late(slot)
    in_time(slot)
    slot.bring()
    slot.decide_while_it_waits(with_mine=True)
    assert slot.run(size)
    slot.close()
    assert slot.kept() == Counter({0: 1})
    in_time(slot)
    in_time(slot)
    assert slot.counted()[0] == 1


def test_what_fails_after_the_decision_is_not_kept_either() -> None:
    """A wrapper that retries a round has thrown away what was trained for it; what was kept before is still there."""
    slot = Slot()
    late(slot)
    in_time(slot)
    slot.bring()
    slot.decide(with_mine=False)
    (entry,) = slot.store.list(f"{keys.PAYLOADS}00000002/b/")
    sound = bytes(slot.store.read(entry.key) or b"")
    slot.store.replace(entry.key, bytes(len(sound)))
    assert not slot.run()
    assert slot.kept() == Counter({0: 1})
    slot.store.replace(entry.key, sound)
    assert slot.run()
    assert slot.kept() == Counter({0: 1, 3: 1})


@pytest.mark.parametrize("seed", range(12))
def test_nothing_counts_twice_and_nothing_kept_is_lost_whatever_fails(seed: int) -> None:
    chance, slot = random.Random(seed), Slot()
    while len(slot.sizes) < 40:
        if chance.random() < 0.3:
            slot.decide(with_mine=chance.random() < 0.5)
        if chance.random() < 0.3:
            slot.mine.goes_with = chance.choice([keys.PAYLOADS, keys.CONTRIBUTIONS])
            slot.mine.writes_first = chance.random() < 0.5
        slot.bring()
        if chance.random() < 0.7:
            slot.mine.comes_back()
        if chance.random() < 0.6 and slot.other.journal.decision(slot.place.round, 0) is None:
            slot.decide_while_it_waits(with_mine=chance.random() < 0.5)
        held = slot.run(chance.choice([1.0, 1.0, 1.0, HUGE, float("nan")]), chance.choice([None, None, None, "sick"]))
        if not held and chance.random() < 0.3 and slot.other.journal.decision(slot.place.round, 0) is None:
            slot.decide(with_mine=chance.random() < 0.5)
        if slot.other.journal.decision(slot.place.round, 0) is not None and (held or chance.random() < 0.5):
            slot.close()
    for _ in range(4 * FRAGMENTS):
        if slot.other.journal.decision(slot.place.round, 0) is None:
            slot.decide_while_it_waits(with_mine=True)
        slot.bring()
        slot.run()
        slot.close()
    assert slot.ever_kept - slot.kept().keys() <= slot.counted().keys()
