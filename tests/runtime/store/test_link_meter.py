"""The link to a store, as it is measured from the reads that a replica makes anyway."""

from __future__ import annotations

import threading

import pytest
from tests.kit.stores import HookedStore
from tests.support.clocks import FakeClock

from skerry.runtime.store.link_meter import LEAST_BYTES, LinkMeter, LinkSpeed
from skerry.runtime.store.retrying import Retrying, speed_of


def measured(*reads: tuple[float, float, int]) -> LinkSpeed | None:
    meter = LinkMeter()
    for read in reads:
        meter.record(*read)
    return meter.speed


def test_reads_at_the_same_time_share_the_link() -> None:
    small = (0.0, 0.03, 100)
    assert measured(small, (5, 6, LEAST_BYTES), (4, 8, LEAST_BYTES), (10, 12, LEAST_BYTES)) == LinkSpeed(
        LEAST_BYTES / 2, 0.03
    )


def test_time_of_a_request_is_the_median_of_small_ones() -> None:
    stalled = [(0.0, 0.02, 0), (0.0, 60.0, 900), (1.0, 1.04, 10)]
    speed = measured(*stalled, (2, 3, LEAST_BYTES))
    assert speed is not None
    assert speed.request_s == pytest.approx(0.04)


def test_too_few_reads_are_no_measure() -> None:
    assert measured() is None
    assert measured((0, 1, LEAST_BYTES)) is None
    assert measured((0, 1, 10), (0, 1, LEAST_BYTES - 1)) is None
    assert measured((0, 0, 10), (1, 1, LEAST_BYTES)) is None


def test_store_of_a_replica_measures_what_it_reads() -> None:
    clock = FakeClock()
    store = Retrying(HookedStore(lambda verb, _: clock.advance(2.0) if verb == "read" else None), clock)
    store.create("large", b"x" * LEAST_BYTES)
    assert speed_of(store) is None
    for other in (store.with_deadline(60.0, threading.Event()), store.apart(60.0)):
        other.read("absent")
        other.read("large")
    assert speed_of(store) == LinkSpeed(LEAST_BYTES / 2.0, 2.0)
