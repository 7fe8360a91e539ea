"""The part of each replica in the rounds of a run, from a real log in a folder, and the findings that follow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.infra.observe.fleet import SLOTS, Fleet
from tests.kit.records import receipt

from skerry.infra.cli.run_text import participation_lines
from skerry.infra.observe.doctor.examine import examine
from skerry.infra.observe.doctor.read_log import read_log
from skerry.infra.observe.participation import participation
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.observe.participation import ReplicaParticipation


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path / "run")


def part_of(fleet: Fleet, slot: str) -> ReplicaParticipation:
    (replica,) = [item for item in participation(read_log(fleet.store)).replicas if item.slot == slot]
    return replica


def test_replica_that_fails_in_round_three_is_missing_in_the_rest(fleet: Fleet) -> None:
    for number in range(8):
        fleet.train(number, *(SLOTS if number < 3 else SLOTS[:1]))
    fleet.end("a-0")
    fleet.end("a-1", status="failed", reason="ValueError: bad sample in shard 17 (train.py:39)", round=3)
    taken = participation(read_log(fleet.store))
    assert (taken.rounds, taken.complete, taken.by_all) == (8, 3, False)
    reason = "ValueError: bad sample in shard 17 (train.py:39) (start 0, round 3)"
    assert participation_lines(taken) == [
        "8 rounds; all 2 replicas in 3 of them",
        f"warning: a-1: missing in 5 of 8 rounds (3-7), 1 start: {reason}",
    ]
    (finding,) = [item for item in examine(read_log(fleet.store)).findings if item.kind == "missing-in-rounds"]
    assert (finding.severity, finding.slot, finding.round) == ("warning", "a-1", 3)
    assert "missing in 5 of 8 rounds (3-7)" in finding.text


def test_run_with_every_replica_in_every_round_has_no_warning(fleet: Fleet) -> None:
    for number in range(3):
        fleet.train(number, *SLOTS)
    for slot in SLOTS:
        fleet.end(slot)
    taken = participation(read_log(fleet.store))
    assert taken.by_all
    assert participation_lines(taken) == ["3 rounds; all 2 replicas in 3 of them"]


def test_one_missed_round_is_a_warning_and_still_by_all(fleet: Fleet) -> None:
    for number in range(5):
        fleet.train(number, *(SLOTS if number < 4 else SLOTS[:1]))
    for slot in SLOTS:
        fleet.end(slot)
    assert part_of(fleet, "a-1").text == "missing in 1 of 5 rounds (4)"
    assert participation(read_log(fleet.store)).by_all


def test_replica_that_never_started_is_missing_in_all_rounds(fleet: Fleet) -> None:
    for number in range(2):
        fleet.train(number, "a-0")
    log = read_log(fleet.store)
    log = replace(log, members={key: member for key, member in log.members.items() if member.record.slot == "a-0"})
    assert participation(log).replicas[1].text == "missing in 2 of 2 rounds (0-1), 0 starts: it was never started"


def test_start_without_a_record_of_its_end_counts_as_killed(fleet: Fleet) -> None:
    fleet.train(0, *SLOTS)
    fleet.replicas["a-1"] = fleet.start("a-1")
    for slot, incarnation in (("a-0", 0), ("a-1", 1)):
        fleet.end(slot, incarnation)
    assert part_of(fleet, "a-1").starts == 2
    assert part_of(fleet, "a-1").reasons == (
        "start 0 ended without a record: killed, out of memory, or its machine was lost",
    )


def test_replica_that_is_often_cut_short_is_a_finding(fleet: Fleet) -> None:
    for number in range(3):
        fleet.train(number, "a-0", share=0.5)
    assert part_of(fleet, "a-0").often_cut
    kinds = {item.slot: item.kind for item in examine(read_log(fleet.store)).findings if item.severity == "warning"}
    assert kinds["a-0"] == "often-cut-short"


def test_slot_added_to_a_started_run_misses_no_earlier_round(fleet: Fleet) -> None:
    fleet.train(0, *SLOTS)
    fleet.replicas["b-0"] = fleet.start("b-0")
    assert part_of(fleet, "b-0").missing == ()


def test_reason_for_which_a_replica_abstained_is_named_with_its_rounds(fleet: Fleet) -> None:
    for number in range(8):
        fleet.train(number, *(SLOTS if number < 3 else SLOTS[:1]))
    for number in (3, 4, 6, 7):
        record = receipt("a-1", number, run=fleet.nonce, contributed=False, abstained="NaN in parameter 'w'")
        fleet.store.create(keys.receipt(number, "a-1"), record.to_bytes())
    fleet.end("a-1")
    assert part_of(fleet, "a-1").text == "missing in 5 of 8 rounds (3-7): NaN in parameter 'w' (rounds 3-4, 6-7)"
