"""Looks for the head of a log of thousands of rounds: few of them list the commits, and none misses one."""

from __future__ import annotations

import pytest
from tests.kit.events import logged_events
from tests.kit.protocol import run_record
from tests.kit.stores import CountingStore
from tests.support.clocks import FakeClock

from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog


def closed_rounds(count: int) -> RunLog:
    store = CountingStore()
    for number in range(count):
        store.create(keys.commit(number), b"a commit")
    log = RunLog(store, run_record(FakeClock()))
    assert log.find_head(0) == count
    store.forget()
    return log


@pytest.mark.parametrize(("rounds", "listings"), [(100, 100), (2560, 9), (10_240, 2)])
def test_names_that_hundred_looks_list_do_not_grow_with_the_log(rounds: int, listings: int) -> None:
    log = closed_rounds(rounds)
    for number in range(rounds, rounds + 100):
        assert log.find_head(number) == number
        log.store.create(keys.commit(number), b"a commit")
    assert isinstance(log.store, CountingStore)
    assert (log.store.listings, len(log.store.read_keys)) == (listings, 100 - listings)


def test_commits_of_others_are_seen_by_the_next_look() -> None:
    log = closed_rounds(2560)
    for number in (2560, 2561, 2562):
        log.store.create(keys.commit(number), b"a commit")
        assert log.find_head(2560) == number + 1


def test_commit_behind_an_open_round_is_found_by_the_next_listing(caplog: pytest.LogCaptureFixture) -> None:
    log = closed_rounds(2560)
    log.store.create(keys.commit(2562), b"a commit")
    assert [log.find_head(2560) for _ in range(11)] == [2560] * 11
    (event,) = logged_events(caplog, "stray_records")
    assert (event["round"], event["first"]) == (2560, keys.commit(2562))
    log.store.create(keys.commit(2560), b"a commit")
    log.store.create(keys.commit(2561), b"a commit")
    assert log.find_head(2560) == log.find_head(2562) == 2562, "it stays stray when the head comes to it"
