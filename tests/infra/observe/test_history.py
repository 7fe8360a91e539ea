"""The history of a run from a real log in a folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tests.infra.observe.fleet import SLOTS, Fleet
from tests.kit.records import receipt

from skerry.infra.observe.history import read_history
from skerry.runtime.errors import SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.records import Contribution, Telemetry
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.observe.history import ReplicaRound


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path / "run")


def write_receipt(fleet: Fleet, slot: str, number: int, **changes: object) -> None:
    record = receipt(slot, number, run=fleet.nonce, **changes)
    assert fleet.store.create(keys.receipt(number, slot), record.to_bytes())


def parts(fleet: Fleet, slot: str) -> list[str]:
    return [replica.part for replica in replicas(fleet, slot)]


def replicas(fleet: Fleet, slot: str) -> list[ReplicaRound]:
    return [item for history in read_history(fleet.store).rounds for item in history.replicas if item.slot == slot]


def test_each_part_of_a_replica_in_a_round_is_named(fleet: Fleet) -> None:
    fleet.train(0, *SLOTS)
    fleet.train(1, *SLOTS, share=0.5)
    for number in (2, 3, 4):
        fleet.train(number, "a-0")
    write_receipt(fleet, "a-1", 2)
    write_receipt(fleet, "a-1", 3, abstained="NaN in parameter 'w'", telemetry=Telemetry(steps=4))
    assert parts(fleet, "a-0") == ["trained", "cut", "trained", "trained", "trained"]
    assert parts(fleet, "a-1") == ["trained", "cut", "late", "abstained", "absent"]
    abstained, absent = replicas(fleet, "a-1")[3:]
    assert (abstained.reason, abstained.share, abstained.telemetry) == ("NaN in parameter 'w'", 0.0, Telemetry(steps=4))
    assert [replica.share for replica in replicas(fleet, "a-1")] == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert (absent.incarnation, absent.telemetry) == (None, None)


def test_telemetry_is_of_the_contribution_and_times_of_the_receipt(fleet: Fleet) -> None:
    fleet.replicas["a-0"].contribute(b"0")
    key = keys.contribution(0, 0, "a-0")
    data = fleet.store.read(key)
    assert data is not None
    telemetry = Telemetry(loss=2.5, steps=10, tokens=7)
    record = Contribution.parse(data, key).model_copy(update={"telemetry": telemetry})
    fleet.store.replace(key, record.to_bytes())
    fleet.replicas["a-0"].close(fleet.replicas["a-0"].decide())
    write_receipt(fleet, "a-0", 0, seconds={"upload": 1.5}, uploaded_bytes=3, downloaded_bytes=4, requests=5)
    (replica,) = replicas(fleet, "a-0")
    assert (replica.telemetry, replica.seconds, replica.incarnation) == (telemetry, {"upload": 1.5}, 0)
    assert (replica.uploaded_bytes, replica.downloaded_bytes, replica.requests) == (3, 4, 5)


def test_round_is_closed_at_the_listing_time_of_its_commit(fleet: Fleet) -> None:
    fleet.train(0, *SLOTS)
    os.utime(fleet.store.uri.removeprefix("file://") + "/" + keys.commit(0), (100.0, 100.0))
    assert read_history(fleet.store).rounds[0].closed_at == 100.0


def test_open_round_is_left_out(fleet: Fleet) -> None:
    fleet.train(0, *SLOTS)
    fleet.replicas["a-0"].contribute(b"1")
    fleet.replicas["a-0"].decide()
    assert [history.round for history in read_history(fleet.store).rounds] == [0]


def test_replica_that_joins_later_is_in_no_earlier_round(fleet: Fleet) -> None:
    fleet.train(0, *SLOTS)
    fleet.replicas["b-0"] = fleet.start("b-0")
    write_receipt(fleet, "b-0", 0)
    joined, first = fleet.replicas["b-0"], fleet.replicas["a-0"]
    joined.round, joined.base, joined.work = first.round, first.base, first.work
    fleet.train(1, *SLOTS, "b-0")
    fleet.train(2, *SLOTS)
    assert parts(fleet, "b-0") == ["trained", "absent"]
    assert [len(history.replicas) for history in read_history(fleet.store).rounds] == [2, 3, 3]


def test_equal_and_different_digests_of_a_round_are_reported(fleet: Fleet) -> None:
    for number in range(4):
        fleet.train(number, *SLOTS)
        write_receipt(fleet, "a-0", number, state=None if number == 3 else "b" * 32)
    write_receipt(fleet, "a-1", 0)
    write_receipt(fleet, "a-1", 1, averages=("f" * 32,), state="f" * 32)
    write_receipt(fleet, "a-1", 3, state=None)
    equal = [(history.averages_equal, history.state_equal) for history in read_history(fleet.store).rounds]
    assert equal == [(True, True), (False, False), (None, None), (True, None)]


def test_starts_have_their_times_and_outcomes(fleet: Fleet) -> None:
    fleet.train(0, *SLOTS)
    fleet.replicas["a-1"] = fleet.start("a-1")
    fleet.end("a-0")
    history = read_history(fleet.store)
    starts = [(start.slot, start.incarnation, start.outcome is not None) for start in history.starts]
    assert starts == [("a-0", 0, True), ("a-1", 0, False), ("a-1", 1, False)]
    ended, killed, _ = history.starts
    assert ended.ended_at is not None
    assert ended.began_at <= ended.ended_at
    assert (killed.ended_at, killed.place) == (None, None)
    assert set(history.heartbeats) == set(history.heard_at) == set(SLOTS)


def test_prefix_without_a_run_is_refused() -> None:
    with pytest.raises(SkerryError, match="no run at"):
        read_history(MemoryStore())
