"""The pace, strips, totals and time of recent rounds, and what happened in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tests.kit.protocol import run_record
from tests.kit.records import outcome
from tests.support.clocks import FakeClock

from skerry.infra.observe.history import Start
from skerry.infra.observe.machine_times import machine_times, running_seconds
from skerry.infra.observe.pace_of_recent_rounds import (
    LOSS_POINTS,
    loss_curve,
    marks,
    recent_rounds,
    seconds_left,
    time_shares,
)
from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.infra.observe.run_events import run_events
from skerry.infra.observe.run_totals import RunTotals
from skerry.runtime.log.records import GENESIS, Telemetry
from skerry.runtime.log.run_record import Settings
from skerry.runtime.log.summarize_round import Part, ReplicaRound, RoundHistory


def replica(slot: str, part: Part = "trained", incarnation: int | None = 0, **changes: object) -> ReplicaRound:
    share = {"trained": 1.0, "cut": 0.5}.get(part, 0.0)
    values: dict[str, object] = {"incarnation": None if part == "absent" else incarnation, "share": share}
    return ReplicaRound(slot=slot, part=part, **(values | changes))  # type: ignore[arg-type]


def closed(number: int, *replicas: ReplicaRound, at: float | None = None, state: bool | None = True) -> RoundHistory:
    """A round of ten seconds, if no time is given."""
    at = 1010.0 + 10 * number if at is None else at
    return RoundHistory(round=number, closed_at=at, replicas=replicas, averages_equal=True, state_equal=state)


def start(slot: str, incarnation: int = 0, began_at: float = 1000.0, *, done_at: float | None = None) -> Start:
    end = None if done_at is None else outcome(slot, incarnation)
    return Start(
        slot=slot, incarnation=incarnation, began_at=began_at, ended_at=done_at, place=None, host="h", outcome=end
    )


def test_absence_after_a_start_without_an_outcome_is_killed() -> None:
    rounds = [
        closed(0, replica("a-0")),
        closed(1, replica("a-0", "absent")),
        closed(2, replica("a-0", "absent")),
        closed(3, replica("a-0", "late", incarnation=1)),
        closed(4, replica("a-0", "absent")),
    ]
    assert marks("a-0", rounds, [start("a-0"), start("a-0", 1)]) == ("trained", "killed", "killed", "late", "absent")
    orderly = [start("a-0", done_at=1011.0), start("a-0", 1)]
    assert marks("a-0", rounds, orderly) == ("trained", "absent", "absent", "late", "absent")
    assert marks("a-0", rounds[:3], [start("a-0")])[1:] == ("absent", "absent"), "it may still hang"
    assert marks("b-0", rounds, []) == (None,) * 5


def test_kill_is_shown_if_the_next_start_is_back_before_a_round_closes() -> None:
    rounds = [
        closed(0, replica("a-0")),
        closed(1, replica("a-0", "late", incarnation=1)),
        closed(2, replica("a-0", "late", incarnation=1)),
    ]
    starts = [start("a-0"), start("a-0", 1)]
    assert marks("a-0", rounds, starts) == ("trained", "killed", "late")
    assert marks("a-0", rounds, [start("a-0", done_at=1011.0), starts[1]]) == ("trained", "late", "late")


@pytest.mark.parametrize(
    ("end", "mark"),
    [
        ({"status": "retry", "exit_code": 137}, "killed"),
        ({"status": "failed", "exit_code": 1}, "killed"),
        ({"status": "stopped", "exit_code": 137}, "killed"),
        ({"status": "stopped", "exit_code": 10}, "absent"),
    ],
)
def test_absence_after_a_recorded_end_depends_on_that_end(end: dict[str, object], mark: str) -> None:
    rounds = [closed(0, replica("a-0")), closed(1, replica("a-0", "absent")), closed(2, replica("a-0", incarnation=1))]
    ended = replace(start("a-0", done_at=1011.0), outcome=outcome("a-0", 0, **end))
    assert marks("a-0", rounds, [ended, start("a-0", 1)]) == ("trained", mark, "trained")
    assert marks("a-0", rounds[:2], [ended]) == ("trained", mark), "also without a later start"


def test_first_round_lasts_from_the_first_start_and_a_gap_has_no_length() -> None:
    rounds = [closed(0, replica("a-0")), closed(1, replica("a-0")), closed(3, replica("a-0"))]
    assert [item.seconds for item in recent_rounds(rounds, [start("a-0", began_at=1004.0)])] == [6.0, 10.0, None]


def test_time_in_which_all_replicas_had_ended_belongs_to_no_round() -> None:
    rounds = [closed(0, replica("a-0")), closed(1, replica("a-0"), at=5010.0)]
    first = [start("a-0", done_at=1011.0), start("a-1", done_at=1012.0)]
    again = [start("a-0", 1, began_at=5001.0), start("a-1", 1, began_at=5003.0)]
    assert [item.seconds for item in recent_rounds(rounds, first + again)] == [10.0, 11.0], "2 s before, 9 s after it"
    silent = [start("a-0"), start("a-1", done_at=1012.0)]
    assert [item.seconds for item in recent_rounds(rounds, silent + again)] == [10.0, 4000.0], (
        "it may have been at work"
    )


def test_rounds_are_described_by_loss_phases_and_the_slowest() -> None:
    fast, slow = (Telemetry(loss=loss, train_s=train_s) for loss, train_s in ((2.0, 4.0), (3.0, 8.0)))
    item = closed(0, replica("a-0", telemetry=fast, seconds={"wait": 4.0}), replica("a-1", telemetry=slow))
    [view] = recent_rounds([item], [])
    assert (view.loss, view.phases, view.slowest) == (2.5, {"wait": 2.0, "train": 6.0}, ("a-1", 2.0))


def test_time_left_is_the_median_pace_less_the_current_round() -> None:
    rounds = [closed(0, replica("a-0")), closed(1, replica("a-0")), closed(2, replica("a-0"), at=99030.0)]
    recent = recent_rounds([*rounds, closed(3, replica("a-0"), at=99040.0)], [start("a-0")])
    assert seconds_left(recent, 5.0, 99044.0) == pytest.approx(46.0)
    assert seconds_left(recent, 5.0, 99940.0) == pytest.approx(40.0), "a late round does not shorten the others"
    assert seconds_left(recent, 0.0, 99044.0) is None
    assert seconds_left([], 5.0, 99044.0) is None


def test_parts_of_time_add_up_and_absent_replicas_are_away() -> None:
    trained = replica("a-0", telemetry=Telemetry(train_s=6.0), seconds={"wait": 2.0})
    rounds = [closed(0, trained, replica("a-1", "absent")), closed(1, trained, replica("a-1", "absent"))]
    shares = time_shares(rounds, recent_rounds(rounds, [start("a-0")]))
    assert shares == pytest.approx({"train": 0.3, "wait": 0.1, "away": 0.5, "other": 0.1})
    assert time_shares([closed(0, replica("a-0"))], recent_rounds([closed(0, replica("a-0"))], [])) == {}


def test_loss_curve_is_thinned_and_keeps_the_last_point() -> None:
    points = [(number, float(number)) for number in range(1001)]
    curve = loss_curve(points)
    assert len(curve) <= LOSS_POINTS
    assert curve[-1] == points[-1]
    assert loss_curve(points[:3]) == tuple(points[:3])
    assert loss_curve([]) == ()


def test_totals_with_open_rounds_leave_the_original_unchanged() -> None:
    totals = RunTotals()
    totals.add(closed(0, replica("a-0", telemetry=Telemetry(loss=3.0)), replica("a-1", "absent")))
    more = totals.plus([closed(1, replica("a-0", "cut"), replica("a-1", incarnation=2))])
    assert (more.in_rounds["a-0"], more.of_rounds["a-0"], more.share["a-0"]) == (2, 2, 0.5)
    assert (more.in_rounds["a-1"], more.of_rounds["a-1"], more.seen_at["a-1", 2]) == (1, 2, 1020.0)
    assert (totals.of_rounds["a-0"], totals.share["a-0"], totals.losses) == (1, 1.0, [(0, 3.0)])


def test_hours_of_a_killed_start_end_with_its_last_round() -> None:
    starts = [start("a-0", began_at=0.0), start("a-0", 1, began_at=7200.0), start("a-1", began_at=0.0, done_at=1800.0)]
    totals = RunTotals(seen_at={("a-0", 0): 3600.0}, uploaded=Counter({("a-0", 0): 5, ("a-1", 0): 7}))
    [times] = machine_times(starts, totals, 10800.0, ())
    assert (times.uploaded_bytes, times.downloaded_bytes) == (12, 0)
    assert (times.machine, times.hours, times.running) == (None, pytest.approx(1 + 1 + 0.5), 1)
    [silent] = machine_times(starts, totals, 10800.0, {"a-0"})
    assert (silent.hours, silent.running) == (pytest.approx(1 + 0.5), 0)


def test_pause_between_two_ups_is_no_time_of_the_run() -> None:
    starts = [
        start("a-0", began_at=0.0, done_at=3600.0),
        start("a-1", began_at=100.0),  # killed; its last round was closed after 3700 s
        start("a-0", 1, began_at=90_000.0),
        start("a-1", 1, began_at=90_100.0),
    ]
    totals = RunTotals(seen_at={("a-1", 0): 3700.0})
    assert running_seconds(starts, totals, 90_400.0, ()) == 3700.0 + 400.0
    assert running_seconds([], totals, 90_400.0, ()) is None


def texts(rounds: list[RoundHistory], *starts: Start, notices: dict[str, tuple[str, float]] | None = None) -> list[str]:
    events = run_events(rounds, recent_rounds(rounds, starts), starts, notices or {})
    return [f"{event.about}: {event.text}" for event in events]


@pytest.mark.parametrize(("closed_rounds", "at"), [(2, 1000.0), (3, 1030.0)])
def test_event_of_settings_is_at_the_close_before_their_first_round(closed_rounds: int, at: float) -> None:
    run = run_record(FakeClock(), slots=("a-0",))
    change = Settings(
        run=run.nonce, number=1, previous=GENESIS, from_round=3, rounds=None, work=None, outer_lr=0.5,
        outer_momentum=0.9, by="ada", created="1970-01-01T00:16:40+00:00",
    )  # fmt: skip
    rounds = [closed(number, replica("a-0")) for number in range(closed_rounds)]
    events = run_events(rounds, recent_rounds(rounds, ()), (), {}, RunSettings(first=run, changes=(change,)))
    (event,) = [event for event in events if event.about == "settings"]
    assert (event.at, event.text) == (at, "outer_lr 0.7 to 0.5 from round 3 on (by ada)")


def test_events_name_what_is_new_in_a_round_and_the_last_round() -> None:
    rounds = [
        closed(0, replica("a-0"), replica("a-1")),
        closed(1, replica("a-0"), replica("a-1", "absent")),
        closed(2, replica("a-0"), replica("a-1", "absent")),
        closed(3, replica("a-0", "cut"), replica("a-1", "abstained", reason="NaN in 'w'\nmore")),
        closed(4, replica("a-0"), replica("a-1"), state=False),
        closed(5, replica("a-0"), replica("a-1")),
        closed(6, replica("a-0"), replica("a-1")),
    ]
    assert texts(rounds) == [
        "round 6: closed with 2 of 2 in 10.0 s",
        "round 4: closed with 2 of 2 in 10.0 s; the replicas' bits DIFFER: run `skerry doctor`",
        "round 3: closed with 1 of 2 in 10.0 s; abstained: a-1 (NaN in 'w'); ended early: a-0 with 50 %",
        "round 1: closed with 1 of 2 in 10.0 s; absent: a-1",
    ]


def test_absence_since_before_the_recent_rounds_is_no_event() -> None:
    rounds = [closed(number, replica("a-0"), replica("a-1", "absent")) for number in (70, 71, 72)]
    assert texts(rounds) == ["round 72: closed with 1 of 2 in 10.0 s; absent: a-1"]


def test_events_name_starts_ends_and_notices() -> None:
    stopped, failed = start("a-2", 1, 0.0, done_at=1250.0), start("a-3", 1, 0.0, done_at=1240.0)
    ends = {"stopped": (stopped, "stopped on request"), "failed": (failed, "OSError: disk full")}
    starts = [start("a-0"), start("a-0", 1, 1100.0), start("a-1", done_at=1200.0)]
    for status, (end, reason) in ends.items():
        assert end.outcome is not None
        record = end.outcome.model_copy(update={"status": status, "reason": reason})
        starts.append(replace(end, outcome=record))
    assert texts([], *starts, notices={"a-0": ("spot notice", 1300.0)})[:-2] == [
        "a-0: spot notice",
        "a-2: stopped on request",
        "a-3: failed: OSError: disk full",
        "a-1: done",
        "a-0: start 2; start 1 left no record: killed, out of memory or machine lost",
        "a-0: started",
        "a-1: started",
    ]
