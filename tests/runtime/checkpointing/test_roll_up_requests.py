"""Real replicas close more than a hundred rounds: the requests for their roll-up, and its content."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.kit.managers import Island, begin_run, train_all, wait_for
from tests.kit.stores import HookedStore

from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import RoundListing, list_roll_ups, read_closed_rounds, read_roll_up
from skerry.runtime.log.roll_up import RollUp
from skerry.runtime.log.summarize_round import RecordedRound
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.log.recorded_starts import StartRecord

SLOTS = ("r-0", "r-1", "r-2")
# Two roll-ups: of the first hundred rounds, and of the last ones of the run.
ROUNDS = 106


@pytest.mark.slow
def test_roll_up_adds_few_requests_in_a_hundred_rounds() -> None:
    """Counts the requests of the threads that write roll-ups, and of all others."""
    requests: Counter[tuple[str, str]] = Counter()
    counting = threading.Lock()

    def count(verb: str, key: str) -> None:
        del key
        kind = "roll-up" if threading.current_thread().name.startswith("roll-up") else "round"
        with counting:
            requests[kind, verb] += 1

    store = HookedStore(count)
    run = begin_run(store, SLOTS, minimum=3, rounds=ROUNDS)

    class Recorded(Island):
        """A replica whose receipt of each round exists before its next inner step. To look for it is not counted."""

        def step(self) -> None:
            if closed := self.manager.current_step():
                wait_for(lambda: MemoryStore.read(store, keys.receipt(closed - 1, self.manager.presence.slot)))
            super().step()

    train_all([Recorded(store, slot, seed=seed, minimum=3, sync_every=1) for seed, slot in enumerate(SLOTS)], ROUNDS)
    assert list_roll_ups(store) == [range(100), range(100, ROUNDS)]
    per_round = sum(number for (kind, _), number in requests.items() if kind == "round") / ROUNDS
    assert (requests["roll-up", "create"], requests["roll-up", "list"] <= 24) == (2, True)
    added = sum(number for (kind, _), number in requests.items() if kind == "roll-up")
    assert added <= 40, requests
    assert per_round > 60
    for rounds in (range(100), range(100, ROUNDS)):
        stored = read_roll_up(store, rounds)
        assert stored is not None
        singles = list(RoundListing(store, run.nonce, rounds).read())
        recorded = [RecordedRound.of(single.number, single.closed_at, single.records) for single in singles]
        assert stored == RollUp.of(run.nonce, stored.writer, singles[-1].commit or "", recorded, stored.starts)
        assert all(item.receipts == frozenset(SLOTS) for item in stored.recorded())
    starts: dict[str, StartRecord] = {}
    history = list(read_closed_rounds(store, run.nonce, starts))
    assert set(starts) == {keys.member(slot, 0) for slot in SLOTS}
    assert [item.round for item in history] == list(range(ROUNDS))
