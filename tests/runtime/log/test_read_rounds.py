"""Reading closed rounds from roll-ups and single records: gaps, overlaps, damage, and what a reader may skip."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.kit.rounds import NONCE, WrittenRun
from tests.kit.stores import CountingStore

from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import RoundListing, cover, find_closed, list_roll_ups, read_closed_rounds
from skerry.runtime.log.roll_up import RollUp
from skerry.runtime.log.summarize_round import RecordedRound, RoundHistory


@pytest.fixture
def run() -> WrittenRun:
    """230 rounds of two replicas."""
    run = WrittenRun(CountingStore(), "a", "b")
    run.close(115)
    run.close(away=["b"])
    run.close(114)
    return run


def store_roll_up(run: WrittenRun, first: int, last: int, nonce: str = NONCE) -> None:
    singles = list(RoundListing(run.store, NONCE, range(first, last + 1)).read())
    rounds = [RecordedRound.of(single.number, single.closed_at, single.records) for single in singles]
    run.store.create(keys.roll_up(first, last), RollUp.of(nonce, "a", "c" * 64, rounds).to_stored())


def read(run: WrittenRun) -> list[RoundHistory]:
    counting = run.store
    assert isinstance(counting, CountingStore)
    counting.forget()
    return list(read_closed_rounds(run.store, NONCE))


def single_reads(run: WrittenRun) -> set[int]:
    """The rounds whose single records were read."""
    counting = run.store
    assert isinstance(counting, CountingStore)
    return {keys.round_of(key) for key in counting.read_keys if not key.startswith(keys.ROLL_UPS)}


def in_short(rounds: list[RoundHistory]) -> list[tuple[int, list[tuple[str, str]]]]:
    return [(item.round, [(replica.slot, replica.part) for replica in item.replicas]) for item in rounds]


def test_rounds_without_roll_ups_are_read_from_single_records(run: WrittenRun) -> None:
    rounds = read(run)
    assert [item.round for item in rounds] == list(range(230))
    assert [replica.slot for replica in rounds[115].replicas] == ["a"]
    assert single_reads(run) == set(range(230))


@pytest.mark.parametrize(
    ("stored", "single"),
    [
        ([(0, 99), (100, 199)], range(200, 230)),
        ([(100, 199)], [*range(100), *range(200, 230)]),
        ([(0, 99), (200, 229)], range(100, 200)),
        ([(0, 149), (100, 199)], range(200, 230)),
        ([(0, 49), (0, 99), (50, 120)], range(121, 230)),
        ([(0, 229)], []),
    ],
)
def test_single_records_are_read_of_other_rounds_only(
    run: WrittenRun, stored: list[tuple[int, int]], single: list[int]
) -> None:
    expected = in_short(read(run))
    for first, last in stored:
        store_roll_up(run, first, last)
    assert in_short(read(run)) == expected
    assert single_reads(run) == set(single)


def test_roll_up_that_cannot_be_used_counts_as_missing(run: WrittenRun) -> None:
    expected = in_short(read(run))
    store_roll_up(run, 0, 99, "f" * 32)
    run.store.create(keys.roll_up(100, 199), b"no gzip")
    run.store.create(f"{keys.ROLL_UPS}README", b"a note")
    run.store.create(keys.roll_up(0, keys.MAX_ROUND), b"all")
    assert in_short(read(run)) == expected
    assert single_reads(run) == set(range(230))


def test_smaller_roll_ups_serve_where_a_larger_one_is_damaged(run: WrittenRun) -> None:
    expected = in_short(read(run))
    run.store.create(keys.roll_up(0, 219), b"no gzip")
    store_roll_up(run, 0, 99)
    store_roll_up(run, 100, 199)
    assert in_short(read(run)) == expected
    assert single_reads(run) == set(range(200, 230))


def test_foreign_and_damaged_records_are_left_out(run: WrittenRun) -> None:
    body = run.store.read(keys.receipt(3, "a"))
    assert body is not None
    run.store.create("receipts/00000003/copy.json", body)
    run.store.create("receipts/00000003/README", b"a note")
    run.store.replace(keys.receipt(4, "b"), b"{}")
    rounds = read(run)
    assert [(replica.slot, bool(replica.seconds)) for replica in rounds[3].replicas] == [("a", True), ("b", True)]
    assert [(replica.slot, bool(replica.seconds)) for replica in rounds[4].replicas] == [("a", True), ("b", False)]
    singles = {single.number: single for single in RoundListing(run.store, NONCE, range(6)).read()}
    assert [number for number, single in singles.items() if not single.is_complete] == [3, 4]


def test_round_is_complete_with_all_records_that_others_reference(run: WrittenRun) -> None:
    (single,) = RoundListing(run.store, NONCE, range(1)).read()
    assert single.is_complete
    assert not replace(single, contributions=single.contributions[1:]).is_complete
    assert not replace(single, decisions=[]).is_complete
    assert not replace(single, exchanges=2).is_complete
    assert not replace(single, commit=None).is_complete


def test_open_round_is_left_out(run: WrittenRun) -> None:
    run.contribute("a", 230)
    assert len(read(run)) == 230
    assert find_closed(run.store, 0) == find_closed(run.store, 200) == find_closed(run.store, 230) == 230


def test_cover_takes_the_fewest_that_have_all_rounds() -> None:
    listed = [range(100), range(50), range(100, 130), range(100, 200), range(150, 210), range(300, 400)]
    assert cover(listed) == [range(100), range(100, 200), range(150, 210), range(300, 400)]
    assert cover([]) == []


def test_listing_of_roll_ups_begins_at_a_round(run: WrittenRun) -> None:
    store_roll_up(run, 0, 99)
    store_roll_up(run, 100, 199)
    assert list_roll_ups(run.store) == [range(100), range(100, 200)]
    assert list_roll_ups(run.store, 100) == [range(100, 200)]
