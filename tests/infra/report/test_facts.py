"""The facts of a report, from a small history."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.infra.report.histories import BEGAN, KILLED, SmallRun, eventful
from tests.kit.records import outcome

from skerry.infra.observe.pace_of_recent_rounds import hidden_share, phases_of
from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.infra.report.curves import convergence, robust_range, thinned
from skerry.infra.report.facts import Costs, Estimate, MachineCost, Point
from skerry.infra.report.page import page
from skerry.runtime.log.records import GENESIS, Software, Telemetry
from skerry.runtime.log.run_record import Settings
from skerry.runtime.log.summarize_round import EXPOSED

if TYPE_CHECKING:
    from skerry.runtime.log.records import Outcome
    from skerry.runtime.log.summarize_round import RoundHistory


def points(*values: float) -> list[Point]:
    return [
        Point(round=number, mean=value, lowest=value, highest=value, replicas=1) for number, value in enumerate(values)
    ]


def test_parts_of_each_replica_are_joined_with_their_reasons() -> None:
    east_0, east_1, west_0, west_1 = eventful().facts().replicas
    assert [(part.first, part.last, part.mark) for part in west_1.stretches] == [
        (0, 19, "trained"),
        (20, 22, "killed"),
        (23, 39, "trained"),
    ]
    assert (west_1.stretches[1].why, west_1.restarts, west_1.starts) == (KILLED, (23,), 2)
    assert [(part.first, part.last, part.mark) for part in west_0.stretches[1:2]] == [(5, 6, "cut")]
    assert [(part.mark, part.why) for part in east_0.stretches[1:2]] == [("abstained", "NaN in parameter 'w'")]
    assert [part.mark for part in east_1.stretches] == ["trained", "late", "trained"]


def test_participation_and_traffic_are_sums_over_all_rounds() -> None:
    facts = eventful().facts()
    assert (facts.possible, facts.contributions, facts.missing, facts.complete) == (160, 155, 5, 35)
    assert (facts.traffic.uploaded_bytes, facts.traffic.downloaded_bytes) == (157_000_000, 471_000_000)
    assert facts.history[-1].tokens == 157 * 10_000
    assert facts.history[-1].hours == pytest.approx(800 / 3600)


def test_goodput_counts_only_training_in_an_average() -> None:
    assert SmallRun().facts().goodput == pytest.approx(16 / 20)
    assert eventful().facts().goodput == pytest.approx(155 * 16 / (160 * 20))


def test_times_of_a_replica_add_up_to_the_time_of_the_run() -> None:
    facts = eventful().facts()
    west_1 = facts.replicas[-1].seconds
    assert west_1["away"] == pytest.approx(60)
    assert west_1["upload"] == pytest.approx(37 * 1.0), "to encode is a part of it"
    assert sum(west_1.values()) == pytest.approx(800)
    assert sum(facts.seconds.values()) == pytest.approx(4 * 800)
    spent, goodput = facts.answers[3].sentences[:2]
    assert spent.startswith(
        "Within the rounds the replicas had 53 m 20 s together: train 78.5 %, wait (for the work of"
    )
    assert goodput == "Goodput 77.5 %: training whose result is in an average; another 1.0 % was late or abstained."
    assert "all training on record is" in SmallRun().facts().answers[3].sentences[1]


def test_answers_name_the_end_of_the_loss_and_each_absence() -> None:
    converged, missing, cost, time = eventful().facts().answers
    assert (converged.short, converged.level) == ("not yet: the loss is still falling", "warning")
    assert converged.sentences[:2] == (
        "Training loss, mean of the replicas: 4.009 in round 0, 2.006 in round 39, the lowest.",
        "The mean of the last 10 rounds, 2.028, is 3.45 % below that of the 10 rounds before.",
    )
    assert any(text.startswith("Held-out val_loss: 4.1") for text in converged.sentences), converged.sentences
    assert (missing.short, missing.level) == ("5 of 160 contributions missing", "warning")
    texts = " ".join(missing.sentences)
    assert "west-1: missing in 3 of 40 rounds (20-22): killed (signal SIGKILL)" in texts
    assert "Participation 96.9 %: 35 of 40 rounds have the work of all 4 replicas." in missing.sentences
    assert "2 contributions are of a shorter round: west-0 in 5-6. A replica that is behind" in texts
    assert "round 20 closed 7 m 00 s after the start of the run" in texts
    assert "east-1: missing in 1 of 40 rounds (12): it came too late for round 12" in texts
    assert "NaN in parameter 'w' (round 30)" in texts
    assert (cost.short, cost.level) == ("unknown: no prices", "unknown")
    assert time.short == "78 % training"


def test_reason_of_a_kill_is_named_though_a_restart_made_up_for_it() -> None:
    history = eventful().history()
    starts = [
        replace(start, outcome=replace_status(start.outcome, "stopped")) if start.outcome is not None else start
        for start in history.starts
    ]
    west_1 = eventful().facts(history=replace(history, starts=tuple(starts))).replicas[-1]
    assert west_1.stretches[1].mark == "killed"
    assert west_1.text == f"missing in 3 of 40 rounds (20-22): {KILLED} (round 3); 2 starts in all"


def replace_status(outcome: Outcome, status: str) -> Outcome:
    return outcome.model_copy(update={"status": status})


def test_whole_run_has_nothing_missing() -> None:
    _, missing, _, time = SmallRun().facts().answers
    assert (missing.short, missing.level) == ("none: all 160 contributions", "good")
    assert (time.short, time.level) == ("80 % training", "good")


def test_loss_that_ends_is_not_called_converged() -> None:
    def without_loss(number: int, every: int) -> RoundHistory:
        item = SmallRun().round(number)
        lost = Telemetry(steps=20, possible=20, tokens=10_000, train_s=16.0)
        kept = number < 21 and number % every == 0
        return item if kept else replace(item, replicas=tuple(replace(part, telemetry=lost) for part in item.replicas))

    history = SmallRun().history()
    for every, since in ((1, 21), (5, 21), (20, 21)):
        rounds = tuple(without_loss(number, every) for number in range(40 if every < 20 else 41))
        converged = SmallRun().facts(history=replace(history, rounds=rounds)).answers[0]
        assert (converged.short, converged.level) == (f"no finite loss since round {since}", "bad")
    logged_at_times = tuple(without_loss(number, 5) for number in range(25))
    converged = SmallRun().facts(history=replace(history, rounds=logged_at_times)).answers[0]
    assert converged.short == "unknown: too few rounds"


@pytest.mark.parametrize(
    ("losses", "short", "level"),
    [
        ({}, "not yet: the loss is still falling", "warning"),
        (dict.fromkeys(range(15, 40), 2.0), "yes: the loss is flat over the last 20 rounds", "good"),
        ({number: 2.0 + number / 10 for number in range(40)}, "no: the loss is RISING over the last 20 rounds", "bad"),
    ],
)
def test_trend_decides_if_the_run_converged(losses: dict[int, float], short: str, level: str) -> None:
    converged = SmallRun(losses=losses, metrics=()).facts().answers[0]
    assert (converged.short, converged.level) == (short, level)
    assert "No held-out loss was logged: `replica.log(val_loss=...)`" in " ".join(converged.sentences)
    assert "No held-out" not in " ".join(SmallRun().facts().answers[0].sentences)


def test_clock_that_is_set_back_loses_no_time() -> None:
    history = SmallRun().history()
    rounds = tuple(replace(item, closed_at=(item.closed_at or 0) - 3600 * (item.round > 20)) for item in history.rounds)
    facts = SmallRun().facts(history=replace(history, rounds=rounds))
    assert facts.age_s == pytest.approx(39 * 20), "a round of 40 has no known length"
    hours = [item.hours or 0 for item in facts.history]
    assert hours == sorted(hours)


def test_differing_bits_are_named() -> None:
    facts = SmallRun(differs=frozenset({7, 8})).facts()
    assert facts.differing == (7, 8)
    assert facts.answers[0].level == "bad"
    assert facts.answers[0].short.endswith("and the models of the replicas differ")
    assert "The models of the replicas DIFFERED after rounds 7-8: see the findings." in facts.answers[0].sentences


def test_run_without_a_closed_round_has_clear_words() -> None:
    facts = SmallRun(rounds=0).facts()
    assert (facts.state, facts.headline) == ("empty", "no round is closed yet")
    assert {answer.short for answer in facts.answers} >= {"no round yet", "unknown"}


@pytest.mark.parametrize(
    ("values", "trend"),
    [
        ([4, 3, 2.5, 2.2, 2.0, 1.9, 1.8, 1.75], "falling"),
        ([4, 3, 2.0, 2.01, 2.0, 2.01, 2.0, 2.01], "level"),
        ([4, 3, 2.0, 2.1, 2.3, 2.6, 3.0, 3.5], "rising"),
        ([4, 3, 2], "unknown"),
    ],
)
def test_trend_is_a_change_beyond_the_noise_between_rounds(values: list[float], trend: str) -> None:
    end = convergence(points(*values))
    assert end is not None
    assert end.trend == trend


def test_lowest_loss_and_the_last_window_are_kept() -> None:
    end = convergence(points(*range(20, 4, -1), 6))
    assert end is not None
    assert (end.first, end.last, end.window, end.lowest) == (20, 6.0, 4, (15, 5))


def test_axis_leaves_out_the_first_huge_rounds_and_keeps_an_even_curve() -> None:
    low, high = robust_range([1e6, 500.0, *[3 - number / 20 for number in range(20)]])
    assert 1.5 < low < 2.1
    assert 3 < high < 5
    low, high = robust_range([5.0, 4.0, 3.0, 2.0])
    assert (low < 2, high > 4) == (True, True)
    assert robust_range([2.0, 2.0, 2.0 + 4e-16]) == pytest.approx((1.9, 2.1))


def test_thinned_line_keeps_its_peaks() -> None:
    line = [(float(x), 0.0) for x in range(10_000)]
    line[4321], line[8765] = (4321.0, 9.0), (8765.0, -9.0)
    kept = thinned(line, 100)
    assert len(kept) <= 202
    assert kept == sorted(kept)
    assert {line[4321], line[8765], line[0], line[-1]} <= set(kept)


def test_dollars_are_compared_with_the_estimate_of_the_same_time() -> None:
    costs = Costs(usd=0.15, complete=True, estimate=Estimate(usd_an_hour=0.9, usd_limit=20.0, bytes_a_round=16e6))
    cost = eventful().facts(costs=costs).answers[2]
    assert (cost.short, cost.level) == ("$0.15", "good")
    assert (
        "Estimate: $0.90 an hour for all replicas, $0.20 for 13 m 20 s; spent on machines is 75 % of it."
        in cost.sentences
    )
    assert "Estimated traffic of a round: 16.0 MB; it was 15.7 MB." in cost.sentences
    run = eventful()
    paused = run.facts(costs=costs, view=replace(run.sources().view, running_s=400.0)).answers[2]
    assert any(", $0.10 for 6 m 40 s; spent on machines is 150 %" in text for text in paused.sentences)
    assert cost.sentences[-1].endswith("a spec names the region of the bucket, so use `skerry report SPEC`.")
    priced = replace(costs, traffic_usd=0.05, requests_usd=0.04, unpriced=("a GB to the bucket",))
    dollars = (
        "$0.050 for the bytes (the price of a GB to the bucket is unknown) is counted; requests are not: at most $0.040"
    )
    sentences = eventful().facts(costs=priced).answers[2].sentences
    assert f"; {dollars}." in sentences[-1]
    assert ", $0.050 of it for traffic, at" in sentences[0]
    assert any(text.endswith("spent on machines is 50 % of it.") for text in sentences)


def test_machines_of_your_own_have_no_unknown_price() -> None:
    machines = (MachineCost(machine="local", hours=0.5, running=0, usd_an_hour=None),)
    facts = eventful().facts(costs=Costs(machines=machines))
    cost = facts.answers[2]
    assert (cost.short, cost.level) == ("no machines of a cloud", "good")
    assert cost.sentences[0] == (
        "Your own machines ran for 30 m 00 s together, starts and ends of processes included. Their hardware and power "
        "have no price here."
    )
    assert "unknown" in page(facts), "the bill of the bucket"
    here = replace(eventful().history(), uri="file:///runs/tiny-gpt")
    facts = eventful().facts(costs=Costs(machines=machines), history=here)
    assert (facts.answers[2].short, facts.answers[2].level) == ("no cloud bill", "good")
    assert facts.answers[2].sentences[-1].endswith("the store is a folder, so no cloud bills them.")
    assert "<b>none</b>dollars" in page(facts)
    mixed = (*machines, replace(machines[0], machine="us-east-1 g6e.xlarge"))
    assert eventful().facts(costs=Costs(machines=mixed)).answers[2].short == "unknown: no prices"


def test_codec_that_auto_chose_is_named() -> None:
    history = SmallRun().history()
    settings = RunSettings(first=history.run.model_copy(update={"codec": "auto"}))
    assert ("codec", "auto: int8") in SmallRun().facts(settings=settings).settings
    here = replace(history, uri="file:///runs/tiny-gpt")
    assert ("codec", "auto: none") in SmallRun().facts(settings=settings, history=here).settings


def test_changed_settings_and_code_are_named_by_round() -> None:
    small = SmallRun()
    run = small.history().run
    change = Settings(
        run=run.nonce,
        number=1,
        previous=GENESIS,
        from_round=10,
        rounds=40,
        work=None,
        outer_lr=0.5,
        outer_momentum=0.9,
        by="me",
        created="today",
    )
    codes = [("b" * 64, BEGAN + 205.0), ("a" * 64, BEGAN - 10.0)]
    facts = small.facts(settings=RunSettings(first=run, changes=(change,)), codes=codes)
    assert facts.changes == ("from round 10 on: outer_lr 0.7 to 0.5 (by me, today)",)
    assert [(code.digest[0], code.replicas) for code in facts.codes] == [("a", ((small.slots, "0-39"),)), ("b", ())]


def test_versions_and_code_are_those_that_the_starts_name() -> None:
    small = SmallRun(kill=("west-1", 10, 22))
    history = small.sources().history
    before, after = Software(torch="2.12.1", code="a" * 64), Software(torch="2.13.0", code="b" * 64)
    starts = tuple(replace(start, software=after if start.incarnation else before) for start in history.starts)
    facts = small.facts(history=replace(history, starts=starts), codes=[("a" * 64, BEGAN - 10.0)])
    assert facts.versions == (("torch", f"2.12.1: {', '.join(small.slots)}; 2.13.0: west-1"),)
    code = {code.digest[0]: code for code in facts.codes}
    assert (code["b"].replicas, code["b"].uploaded_at, code["b"].guessed) == (((("west-1",), "23-39"),), None, False)
    assert "does not name the code of a start" not in page(facts)


def test_code_is_that_of_the_starts_after_its_upload() -> None:
    killed = SmallRun(slots=("east-0", "east-1", "west-1"), kill=("west-1", 20, 22), parts={("east-1", 12): "late"})
    codes = [("c" * 64, BEGAN + 9000.0), ("b" * 64, BEGAN + 205.0), ("a" * 64, BEGAN - 10.0)]
    first, second, unused = killed.facts(codes=codes).codes
    assert first.replicas == ((("east-0",), "0-39"), (("east-1",), "0-11, 13-39"), (("west-1",), "0-19"))
    assert second.replicas == ((("west-1",), "23-39"),), "not the rounds of replicas that did not start again"
    assert unused.replicas == ()
    assert "west-1: 23-39" in page(killed.facts(codes=codes))


def test_time_of_an_exchange_behind_training_is_counted_as_training() -> None:
    run = SmallRun()
    assert run.facts().hidden is None, "old receipts do not say it"
    old_rounds = run.history().rounds
    rounds = [
        replace(
            item,
            replicas=tuple(
                replace(replica, seconds=dict(replica.seconds) | {EXPOSED: sum(replica.seconds.values()) / 4})
                for replica in item.replicas
            ),
        )
        for item in old_rounds
    ]
    assert hidden_share(rounds) == pytest.approx(0.75)
    for before, after in zip(old_rounds, rounds, strict=True):
        for old, new in zip(before.replicas, after.replicas, strict=True):
            assert phases_of(new)["upload"] == pytest.approx(phases_of(old)["upload"] / 4)
            assert phases_of(new).get("train") == phases_of(old).get("train")


def test_evaluation_after_the_last_round_ends_the_curve_of_its_metric() -> None:
    run = SmallRun(rounds=11)
    history = run.history()
    ends = [outcome(start.slot, round=11, metrics={"val_loss": 1.5}) for start in history.starts[:2]]
    ends.append(outcome("west-0", round=8, metrics={"val_loss": 9.0}))  # before the run was extended
    starts = [replace(start, outcome=end) for start, end in zip(history.starts, ends, strict=False)]
    again = replace(starts[0], incarnation=starts[0].incarnation + 1)  # started after the end, it evaluates once more
    facts = run.facts(history=replace(history, starts=(starts[0], again, *starts[1:], history.starts[-1])))
    (curve,) = [curve for curve in facts.metrics if curve.name == "val_loss"]
    assert [point.round for point in curve.points] == [0, 5, 10, 11]
    assert (curve.points[-1].mean, curve.points[-1].replicas) == (1.5, 2)
    assert any("1.500 in round 11, the lowest" in text for text in facts.answers[0].sentences)
    assert page(facts).count("1.500") >= 2
