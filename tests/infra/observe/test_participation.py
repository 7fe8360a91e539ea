"""The part of each replica in the rounds of a run, from a real log in a folder, and the findings that follow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.infra.observe.fleet import SLOTS, Fleet
from tests.kit.protocol import heartbeat
from tests.kit.records import receipt

from skerry.infra.cli.run_text import participation_lines
from skerry.infra.observe.doctor.examine import examine
from skerry.infra.observe.doctor.findings import SLOW
from skerry.infra.observe.doctor.read_log import read_log
from skerry.infra.observe.observer import Observer
from skerry.infra.observe.participation import Figures, participation
from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.infra.observe.read_participation import ParticipationFollower, read_participation
from skerry.infra.run.change_run_settings import expect_slots
from skerry.runtime.failure_text import OUT_OF_MEMORY
from skerry.runtime.log import keys
from skerry.runtime.log.records import Contribution, Memory, Telemetry

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.observe.participation import ReplicaParticipation
    from skerry.infra.observe.run_view import RunView


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path / "run")


class Followed:
    """An observer of a fleet, and the lines of its follower."""

    def __init__(self, fleet: Fleet, *, is_new: bool = True) -> None:
        self.observer = Observer(fleet.store, RunSettings(first=fleet.replicas["a-0"].log.run), fleet.clock)
        self.follower = ParticipationFollower(self.observer, is_new=is_new)
        self.lines: list[str] = []

    def look(self) -> RunView:
        view = self.observer.view()
        self.lines += self.follower.look()
        return view

    def finish(self) -> list[str]:
        """All lines, after two looks that find no further round."""
        self.look()
        self.look()
        return self.lines


def part_of(fleet: Fleet, slot: str) -> ReplicaParticipation:
    (replica,) = [item for item in participation(read_log(fleet.store)).replicas if item.slot == slot]
    return replica


def test_replica_that_fails_in_round_three_is_missing_in_the_rest(fleet: Fleet) -> None:
    for number in range(8):
        fleet.train(number, *(SLOTS if number < 3 else SLOTS[:1]))
    fleet.end("a-0")
    fleet.end("a-1", status="failed", reason="ValueError: bad sample in shard 17 (train.py:39, round 3)", round=3)
    taken = participation(read_log(fleet.store))
    assert (taken.rounds, taken.complete, taken.by_all) == (8, 3, False)
    assert participation_lines(taken, 8) == [
        "8 of 8 rounds; all 2 replicas in 3 of them",
        "warning: a-1: missing in 5 of 8 rounds (3-7): ValueError: bad sample in shard 17 (train.py:39, round 3)",
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
    assert participation_lines(taken, None) == ["3 rounds; all 2 replicas in 3 of them"]


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
    assert participation(log).replicas[1].text == "missing in 2 of 2 rounds (0-1): it never joined the run"


def test_start_without_a_record_of_its_end_counts_as_killed(fleet: Fleet) -> None:
    fleet.train(0, *SLOTS)
    fleet.replicas["a-1"] = fleet.start("a-1")
    for slot, incarnation in (("a-0", 0), ("a-1", 1)):
        fleet.end(slot, incarnation)
    assert part_of(fleet, "a-1").starts == 2
    assert part_of(fleet, "a-1").reasons == (
        "start 1 ended without a record: killed, out of memory, or its machine was lost",
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


def change_slots(fleet: Fleet, *slots: str) -> None:
    settings = RunSettings(first=fleet.replicas["a-0"].log.run).read_newer(fleet.store)
    expect_slots(fleet.store, settings, slots, removes=True, by="ada", now="")


def test_replica_is_expected_in_the_rounds_for_which_the_log_names_it(fleet: Fleet) -> None:
    followed = Followed(fleet)
    for number in range(8):
        if number == 1:
            change_slots(fleet, "a-0", "b-0")
            fleet.replicas["b-0"] = fleet.start("b-0")
        if number == 5:
            change_slots(fleet, "a-0")
        fleet.train(number, "a-0", *(["a-1"] if number == 0 else ["b-0"] if number in {4, 5} else []))
        for slot in fleet.replicas.keys() - {"a-0"}:
            ahead, behind = fleet.replicas["a-0"], fleet.replicas[slot]
            behind.round, behind.base, behind.work = ahead.round, ahead.base, ahead.work
        view = followed.look()
    lines = followed.finish()
    # Round 1 is the first whose decision names the first change, and round 5 that of the second.
    of_slots = {"a-0": (8, ()), "a-1": (2, (1,)), "b-0": (4, (2, 3))}
    for taken in (participation(read_log(fleet.store)), read_participation(fleet.store)):
        assert {item.slot: (item.of, item.missing) for item in taken.replicas} == of_slots
        assert (taken.rounds, taken.complete) == (8, 5)
    assert {item.slot: (item.in_rounds, item.of_rounds) for item in view.replicas} == {
        slot: (of - len(missing), of) for slot, (of, missing) in of_slots.items()
    }
    assert [line.split(":")[0] for line in lines] == [
        "a-1 is missing since round 1",
        "b-0 is missing since round 2",
        "b-0 takes part again in round 4, after 2 missed rounds",
    ]


def test_reason_for_which_a_replica_abstained_is_named_with_its_rounds(fleet: Fleet) -> None:
    for number in range(8):
        fleet.train(number, *(SLOTS if number < 3 else SLOTS[:1]))
    for number in (3, 4, 6, 7):
        record = receipt("a-1", number, run=fleet.nonce, contributed=False, abstained="NaN in parameter 'w'")
        fleet.store.create(keys.receipt(number, "a-1"), record.to_bytes())
    fleet.end("a-1")
    assert part_of(fleet, "a-1").text == "missing in 5 of 8 rounds (3-7): NaN in parameter 'w' (rounds 3-4, 6-7)"


def test_figures_are_sums_over_all_starts(fleet: Fleet) -> None:
    for number, loss in enumerate((4.0, 3.0, 2.0)):
        fleet.train(number, *SLOTS)
        key = keys.contribution(number, 0, "a-1")
        record = Contribution.parse(fleet.store.read(key) or b"", key)
        telemetry = Telemetry(loss=loss, tokens=100)
        fleet.store.replace(key, record.model_copy(update={"telemetry": telemetry}).to_bytes())
        ended = receipt("a-1", number, run=fleet.nonce, uploaded_bytes=10, downloaded_bytes=20)
        fleet.store.create(keys.receipt(number, "a-1"), ended.to_bytes())
    fleet.start("a-1")
    fleet.end("a-1", 0, status="retry", tokens=7, loss_first=9.0)
    fleet.end("a-1", 1, tokens=7, loss_last=8.0)
    expected = Figures(loss_first=4.0, loss_last=2.0, tokens=300, uploaded_bytes=30, downloaded_bytes=60)
    assert part_of(fleet, "a-1").figures == expected


def test_figures_of_a_log_without_telemetry_are_those_of_the_outcomes(fleet: Fleet) -> None:
    fleet.train(0, *SLOTS)
    fleet.start("a-1")
    fleet.end("a-1", 0, status="retry", tokens=7, loss_first=9.0, loss_last=8.5)
    fleet.end("a-1", 1, tokens=5, loss_first=8.4, loss_last=8.0)
    assert part_of(fleet, "a-1").figures == Figures(loss_first=9.0, loss_last=8.0, tokens=12)


@pytest.mark.parametrize(
    ("statuses", "failed"), [(("failed",), True), (("retry", "done"), False), (("done", "retry"), True)]
)
def test_run_is_not_by_all_if_the_last_start_of_a_replica_failed(
    fleet: Fleet, statuses: tuple[str, ...], *, failed: bool
) -> None:
    fleet.train(0, *SLOTS)
    for incarnation, status in enumerate(statuses):
        if incarnation:
            fleet.start("a-1")
        fleet.end("a-1", incarnation, status=status)
    fleet.end("a-0")
    assert part_of(fleet, "a-1").failed is failed
    assert participation(read_log(fleet.store)).by_all is not failed


def test_replica_that_ran_without_an_end_is_missing_with_a_reason(fleet: Fleet) -> None:
    for number in range(3):
        fleet.train(number, *SLOTS[: 1 if number else 2])
    text = "it has no record of its end: late, hanging, killed, or its machine was lost"
    assert part_of(fleet, "a-1").reasons == (text,)
    assert part_of(fleet, "a-0").reasons == (), "it takes part, so it is at work"


def test_start_without_an_end_and_with_full_memory_is_out_of_memory(fleet: Fleet) -> None:
    for number in range(3):
        fleet.train(number, *SLOTS[: 1 if number else 2])
    memory = Memory(peak_bytes=15_200_000_000, limit_bytes=16_000_000_000)
    fleet.store.replace(keys.heartbeat("a-1"), heartbeat("a-1", run=fleet.nonce, memory=memory).to_bytes())
    # A replica whose machine is nearly full by design may only be late: it has no receipt of the round yet.
    guess = f"if not late or hanging, then probably {OUT_OF_MEMORY}"
    text = f"it has no record of its end, and had used 15.2 of 16.0 GB: {guess}"
    assert part_of(fleet, "a-1").reasons == (text,)
    fleet.start("a-1")
    assert "late, hanging, killed" in part_of(fleet, "a-1").reasons[-1], "the heartbeat is of another start"


def test_run_that_was_stopped_and_continued_has_no_warning(fleet: Fleet) -> None:
    fleet.train(0, *SLOTS)
    fleet.end("a-1", 0, status="stopped", reason="stopped on request")
    fleet.start("a-1")
    fleet.end("a-1", 1)
    assert part_of(fleet, "a-1").text == ""
    fleet.end("a-0", 0, status="stopped", reason="stopped on request")
    assert part_of(fleet, "a-0").text == ""


def test_stop_that_cost_rounds_is_their_reason_with_its_signal(fleet: Fleet) -> None:
    for number in range(4):
        fleet.train(number, *(SLOTS[:1] if number == 2 else SLOTS))
        ahead, behind = (fleet.replicas[slot] for slot in SLOTS)
        behind.round, behind.base, behind.work = ahead.round, ahead.base, ahead.work
    fleet.start("a-1")
    fleet.end("a-1", 0, status="stopped", reason="killed (signal SIGKILL): by a test", round=2)
    fleet.end("a-1", 1)
    killed = "killed (signal SIGKILL): by a test (round 2)"
    assert part_of(fleet, "a-1").text == f"missing in 1 of 4 rounds (2): {killed}; 2 starts in all"


def test_crashed_start_is_an_info_of_the_doctor(fleet: Fleet) -> None:
    fleet.train(0, *SLOTS)
    fleet.start("a-1")
    fleet.end("a-1", 0, status="retry", reason="killed (signal SIGKILL)")
    fleet.end("a-1", 1)
    (finding,) = [item for item in examine(read_log(fleet.store)).findings if item.kind == "crashed"]
    assert (finding.severity, finding.text) == ("info", "killed (signal SIGKILL) (round 3); 2 starts in all")


def test_follower_warns_when_a_replica_is_missing_and_when_it_returns(fleet: Fleet) -> None:
    followed = Followed(fleet, is_new=False)
    followed.look()
    for number in range(8):
        fleet.train(number, *(SLOTS[:1] if number in {2, 3, 6} else SLOTS))
        if number == 2:
            record = receipt("a-1", 2, run=fleet.nonce, contributed=False, abstained="NaN in parameter 'w'")
            fleet.store.create(keys.receipt(2, "a-1"), record.to_bytes())
        ahead, behind = (fleet.replicas[slot] for slot in SLOTS)
        behind.round, behind.base, behind.work = ahead.round, ahead.base, ahead.work
        # Rounds 6 and 7 close between two looks.
        if number != 6:
            followed.look()
    assert followed.finish() == [
        "a-1 is missing since round 2: NaN in parameter 'w' (round 2)",
        "a-1 takes part again in round 4, after 2 missed rounds",
        "a-1 missed round 6",
    ]
    assert len(followed.finish()) == 3


def follow(fleet: Fleet, late: frozenset[int], rounds: int) -> list[str]:
    """The lines about a-1, which comes too late for some rounds."""
    followed = Followed(fleet)
    for number in range(rounds):
        fleet.train(number, *(SLOTS[:1] if number in late else SLOTS))
        if number in late:
            record = receipt("a-1", number, run=fleet.nonce, contributed=False)
            fleet.store.create(keys.receipt(number, "a-1"), record.to_bytes())
        ahead, behind = (fleet.replicas[slot] for slot in SLOTS)
        behind.round, behind.base, behind.work = ahead.round, ahead.base, ahead.work
        followed.look()
    return [line for line in followed.finish() if line.startswith("a-1")]


def test_replica_that_is_often_late_is_warned_of_once_with_the_remedy(fleet: Fleet) -> None:
    assert follow(fleet, frozenset(range(1, 12, 2)), 20) == [
        "a-1 is missing since round 1: it came too late for round 1",
        "a-1 takes part again in round 2, after 1 missed round",
        "a-1 is missing since round 3: it came too late for rounds 1, 3",
        "a-1 takes part again in round 4, after 1 missed round",
        f"a-1 is missing again and again, in 3 of the last 10 rounds: it came too late for rounds 1, 3, 5; {SLOW}",
        "a-1 takes part again in round 12, after 1 missed round",
    ]
    late = "1, 3, 5, 7, and 2 more"
    text = f"missing in 6 of 20 rounds ({late}): it came too late for rounds {late}; {SLOW}"
    assert part_of(fleet, "a-1").text == text
    (finding,) = [item for item in examine(read_log(fleet.store)).findings if item.kind == "missing-in-rounds"]
    assert (finding.severity, finding.text) == ("warning", text)


def test_replica_that_is_missing_for_good_after_absences_is_warned_of(fleet: Fleet) -> None:
    lines = follow(fleet, frozenset({1, 3, 5, *range(7, 20)}), 20)
    assert lines[-1].startswith("a-1 is missing since round 7: it came too late for rounds 1, 3, 5, 7-13; ")
    assert sum("missing since round 7" in line for line in lines) == 1


def test_follower_warns_at_the_end_of_rounds_that_no_look_has_read(fleet: Fleet) -> None:
    followed = Followed(fleet)
    fleet.train(0, *SLOTS)
    fleet.train(1, "a-0")

    (line,) = followed.finish()
    assert line.startswith("a-1 is missing since round 1: it has no record of its end")
    assert followed.finish() == [line]


def test_follower_warns_once_of_a_replica_that_is_often_cut_short(fleet: Fleet) -> None:
    followed = Followed(fleet, is_new=False)
    followed.look()
    for number in range(6):
        fleet.train(number, "a-0", share=0.5)
        fleet.replicas["a-1"].round = number
        followed.look()
    assert [line for line in followed.finish() if line.startswith("a-0")] == [
        (
            "a-0: 3 of its contributions are of less than a whole round; it is slower than the others, or evaluates in "
            "its loop: put that within `with replica.evaluating():`, or raise `faults.grace`"
        )
    ]
