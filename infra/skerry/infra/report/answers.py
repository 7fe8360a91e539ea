"""Writes the answers to a reader's four questions from the facts of a report. Pure."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

from skerry.infra.cost.prices import rounded
from skerry.infra.number_text import count_text, duration, short_number, size_text
from skerry.infra.observe.participation import ranges
from skerry.infra.report.facts import Answer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.report.facts import Convergence, Costs, Curve, Estimate, Level, ReplicaFacts, ReportFacts, Trend

CONVERGED: Final = "Did it converge?"
MISSING: Final = "Which replicas were missing, when and why?"
COST: Final = "What did it cost?"
TIME: Final = "Where did the time go?"
# Replicas that an answer names; the table of replicas has all of them.
_NAMED: Final = 4
# In a shorter window the noise between rounds hides most changes, so a flat loss shows nothing.
_FEW: Final = 5
# By the trend of the loss: the answer, with the number of rounds that were compared, and its level.
_VERDICTS: Final[Mapping[Trend, tuple[str, Level]]] = {
    "falling": ("not yet: the loss is still falling", "warning"),
    "level": ("yes: the loss is flat over the last {} rounds", "good"),
    "rising": ("no: the loss is RISING over the last {} rounds", "bad"),
    "unknown": ("unknown: too few rounds", "unknown"),
}
# The parts of a replica's time, as the page explains them.
PART_TEXTS: Final[Mapping[str, str]] = {
    "upload": "encode and send its own work",
    "wait": "for the work of others",
    "average": "read and add the work of all",
    "away": "no record of the replica in the round",
    "other": "starts, checkpoints, not measured",
}
# A replica that trains longer than the mean by this share makes the others wait.
_SLOWER: Final = 1.1
_WAIT_S: Final = 0.1
# A script that has logged one loss only may log the next one so many rounds later.
_SELDOM: Final = 10


def answers(facts: ReportFacts) -> ReportFacts:
    """The facts with their answers."""
    return replace(facts, answers=(_converged(facts), _missing(facts), _cost(facts), _time(facts)))


def _converged(facts: ReportFacts) -> Answer:
    sentences = [*_held_out(facts), *_bits(facts)]
    end = facts.convergence
    if end is None:
        return Answer(
            question=CONVERGED,
            short="unknown: no losses" if facts.closed else "no round yet",
            sentences=("The log has no losses: the script did not call replica.log(loss=...).", *sentences)
            if facts.closed
            else (),
            level="unknown",
        )
    lost_since = _lost_since(facts)
    if lost_since is not None:
        text = f"No round from {lost_since:,} on has a loss: it was NaN or infinite, or was not logged any more."
        return Answer(
            question=CONVERGED,
            short=f"no finite loss since round {lost_since:,}",
            sentences=(text, *_trend(facts, end), *sentences),
            level="bad",
        )
    few = end.trend == "level" and end.window < _FEW
    short, level = _VERDICTS["unknown" if few else end.trend]
    return Answer(
        question=CONVERGED,
        short=f"{short.format(2 * end.window)}{', and the models of the replicas differ' if facts.differing else ''}",
        sentences=(*_trend(facts, end), *sentences),
        level="bad" if facts.differing else level,
    )


def _lost_since(facts: ReportFacts) -> int | None:
    """The first of the last rounds without any loss; None if there are not more of these than between other losses."""
    known = [point.round for point in facts.loss.points]
    usual = max((later - earlier for earlier, later in pairwise(known)), default=_SELDOM)
    return known[-1] + 1 if facts.history[-1].view.round - known[-1] >= usual else None


def _trend(facts: ReportFacts, end: Convergence) -> Iterator[str]:
    yield f"Training loss, mean of the replicas: {_course(facts.loss)}."
    if end.change is None:
        yield "Fewer than four rounds show no trend."
        return
    last, before = (
        (f"The mean of the last {end.window} rounds, {short_number(end.last)},", f"that of the {end.window} rounds")
        if end.window > 1
        else ("The last round", "the round")
    )
    noise = ", which is within the noise between rounds" if end.trend == "level" else ""
    side = "above" if end.change > 0 else "below"
    yield f"{last} is {100 * abs(end.change):.2f} % {side} {before} before{noise}."


def _course(curve: Curve) -> str:
    """The first, the last and the lowest value of a curve, with their rounds."""
    first, last, lowest = curve.points[0], curve.points[-1], min(curve.points, key=lambda point: point.mean)
    text = f"{short_number(first.mean)} in round {first.round:,}, {short_number(last.mean)} in round {last.round:,}"
    low = "the lowest" if lowest is last else f"lowest {short_number(lowest.mean)} in round {lowest.round:,}"
    return f"{text}, {low}"


def _held_out(facts: ReportFacts) -> Iterator[str]:
    held_out = [curve for curve in facts.metrics if curve.held_out]
    curves = sorted(held_out, key=lambda curve: "loss" not in curve.name.lower())
    if facts.closed and not curves:
        yield "No held-out loss was logged: `replica.log(val_loss=...)` or `replica.evaluate` in the script adds one."
    for curve in curves[:2]:
        yield (
            f"Held-out {curve.name}: {_course(curve)}; logged in {len(curve.points):,} rounds by up to "
            f"{max(point.replicas for point in curve.points)} replicas."
        )


def _bits(facts: ReportFacts) -> Iterator[str]:
    if facts.differing:
        yield f"The models of the replicas DIFFERED after rounds {ranges(facts.differing)}: see the findings."
    elif facts.closed and len(facts.replicas) > 1:
        yield "After every round all replicas held the same model, bit for bit: no two receipts differ."


def _missing(facts: ReportFacts) -> Answer:
    missing = [replica for replica in facts.replicas if replica.in_average < replica.of]
    missing.sort(key=lambda replica: replica.in_average - replica.of)
    noted = [replica for replica in facts.replicas if replica.text and replica not in missing]
    of = f"{facts.possible:,} contributions"
    sentences = [f"{replica.slot}: {_absences(facts, replica)}." for replica in (*missing, *noted)[:_NAMED]]
    if (more := len(missing) + len(noted) - _NAMED) > 0:
        sentences.append(f"{more} more replicas are in the table of replicas.")
    if not missing and facts.closed:
        sentences.insert(0, f"Every round has the work of all {len(facts.replicas)} replicas.")
    elif facts.closed:
        share = facts.contributions / max(1, facts.possible)
        same = all(replica.of == facts.closed for replica in facts.replicas)
        every = f"all {len(facts.replicas)} replicas" if same else "all replicas that the run had then"
        sentences.insert(
            0,
            f"Participation {100 * share:.1f} %: {facts.complete:,} of {facts.closed:,} rounds have the work of "
            f"{every}.",
        )
    if cut := [replica for replica in facts.replicas if replica.cut]:
        named = [f"{replica.slot} in {shorter_rounds(replica)}" for replica in cut[:_NAMED]]
        more = f", and of {len(cut) - _NAMED} more replicas" if len(cut) > _NAMED else ""
        sentences.append(
            f"{sum(replica.cut for replica in cut):,} contributions are of a shorter round: {'; '.join(named)}{more}. "
            "A replica that is behind ends its round early, so that the others do not wait."
        )
    half = any(2 * replica.in_average <= replica.of for replica in missing)
    level: Level = "unknown" if not facts.closed else "bad" if half else "warning" if missing else "good"
    short = f"{facts.missing:,} of {of} missing" if missing else f"none: all {of}"
    return Answer(
        question=MISSING, short=short if facts.closed else "no round yet", sentences=tuple(sentences), level=level
    )


def shorter_rounds(replica: ReplicaFacts) -> str:
    """The rounds in which a replica contributed less than a whole round; empty without any."""
    return ranges(
        number
        for stretch in replica.stretches
        if stretch.mark == "cut"
        for number in range(stretch.first, stretch.last + 1)
    )


def _absences(facts: ReportFacts, replica: ReplicaFacts) -> str:
    """The absences of a replica, with the time of the first one."""
    first = next((stretch.first for stretch in replica.stretches if stretch.mark not in {"trained", "cut"}), None)
    hours = next((item.hours for item in facts.history if item.view.round == first), None)
    when = "" if hours is None else f"; round {first:,} closed {duration(3600 * hours)} after the start of the run"
    return f"{replica.text}{when}"


def _cost(facts: ReportFacts) -> Answer:
    costs, traffic = facts.costs, facts.traffic
    hours = sum(machine.hours for machine in costs.machines)
    sentences: list[str] = []
    if costs.own:
        short, level = ("no cloud bill", "good") if facts.in_folder else ("no machines of a cloud", "good")
        sentences.append(
            f"Your own machines ran for {_hours(hours, '')} together, starts and ends of "
            "processes included. Their hardware and power have no price here."
        )
    elif costs.usd is None:
        short, level = "unknown: no prices", "unknown"
        sentences.append(f"{_hours(hours)}. The log names no machine with a known price, so no dollars are counted.")
    else:
        short, level = rounded(costs.usd), "good"
        if not costs.complete:
            short, level = f"{short} + unpriced machines", "warning"
        sentences.append(
            f"{rounded(costs.usd)} for {_hours(hours)}{_and_traffic(costs)}, at the prices of today's tables."
        )
        if not costs.complete:
            sentences.append("Machines without a known price are not in it.")
    if costs.to_come:
        sentences.append(f"About {rounded(costs.to_come)} more until the end, at the pace of the last rounds.")
    if costs.estimate is not None:
        sentences += _against_estimate(facts, costs.estimate)
    sentences.append(
        f"Traffic: {size_text(traffic.uploaded_bytes)} up, {size_text(traffic.downloaded_bytes)} down, "
        f"{traffic.requests:,} requests; {_traffic_dollars(facts)}."
    )
    return Answer(question=COST, short=short, sentences=tuple(sentences), level=level)


def _and_traffic(costs: Costs) -> str:
    return f", {rounded(costs.traffic_usd)} of it for traffic" if costs.traffic_usd else ""


def _traffic_dollars(facts: ReportFacts) -> str:
    costs = facts.costs
    if facts.in_folder:
        return "the store is a folder, so no cloud bills them"
    if costs.traffic_usd is None:
        return "no dollars are counted for them: a spec names the region of the bucket, so use `skerry report SPEC`"
    unpriced = f" (the price of {' and '.join(costs.unpriced)} is unknown)" if costs.unpriced else ""
    requests = "" if costs.requests_usd is None else f"; requests are not: at most {rounded(costs.requests_usd)}"
    return f"{rounded(costs.traffic_usd)} for the bytes{unpriced} is counted{requests}"


def _hours(hours: float, of: str = " of machines") -> str:
    """A number of hours over all machines; less than an hour with its own unit."""
    return f"{hours:,.1f} hours{of}" if hours >= 1 else f"{duration(3600 * hours)}{of}"


def _against_estimate(facts: ReportFacts, estimate: Estimate) -> Iterator[str]:
    if estimate.note:
        yield estimate.note
    if estimate.usd_an_hour is not None:
        text = f"Estimate: {rounded(estimate.usd_an_hour)} an hour for all replicas"
        planned = estimate.usd_an_hour * (facts.running_s or 0.0) / 3600
        if planned:
            text += f", {rounded(planned)} for {duration(facts.running_s or 0.0)}"
            spent = None if facts.costs.usd is None else facts.costs.usd - (facts.costs.traffic_usd or 0.0)
            text += "" if spent is None else f"; spent on machines is {100 * spent / planned:.0f} % of it"
        yield f"{text}."
    if estimate.usd_limit is not None:
        yield f"The limit is {rounded(estimate.usd_limit)}."
    if estimate.bytes_a_round is not None and facts.closed:
        actual = (facts.traffic.uploaded_bytes + facts.traffic.downloaded_bytes) / facts.closed
        usd = estimate.usd_traffic_a_round
        dollars = "" if usd is None else f", {rounded(usd * facts.closed)} for traffic and requests of all rounds"
        yield f"Estimated traffic of a round: {size_text(estimate.bytes_a_round)}{dollars}; it was {size_text(actual)}."


def _time(facts: ReportFacts) -> Answer:
    whole = sum(facts.seconds.values())
    if not whole:
        text = "The log has no times of phases." if facts.closed else ""
        return Answer(question=TIME, short="unknown", sentences=(text,) if text else (), level="unknown")
    shares = {part: seconds / whole for part, seconds in facts.seconds.items()}
    train = shares.get("train", 0.0)
    largest = sorted(shares.items(), key=lambda item: -item[1])
    words = ", ".join(
        f"{part}{f' ({PART_TEXTS[part]})' if part in PART_TEXTS else ''} "
        f"{f'{100 * share:.1f}' if share >= 0.001 else 'under 0.1'} %"
        for part, share in largest
    )
    sentences = [f"Within the rounds the replicas had {_hours(whole / 3600, '')} together: {words}."]
    if facts.goodput is not None:
        vain = train - facts.goodput
        rest = f"another {100 * vain:.1f} % was late or abstained" if vain >= 0.001 else "all training on record is"
        sentences.append(f"Goodput {100 * facts.goodput:.1f} %: training whose result is in an average; {rest}.")
    if facts.hidden is not None:
        sentences.append(
            f"{100 * facts.hidden:.1f} % of the time of the exchanges ran beside training (more is better); for the "
            "rest training waited."
        )
    lengths = [(item.view.seconds, item.view.round) for item in facts.history if item.view.seconds is not None]
    if lengths:
        longest, number = max(lengths)
        middle = median(seconds for seconds, _ in lengths)
        sentences.append(
            f"A round took {duration(middle)} (median); the longest was round {number:,}: {duration(longest)}."
        )
    sentences += _slowest(facts)
    if facts.history and facts.history[-1].tokens and facts.age_s:
        tokens = facts.history[-1].tokens
        sentences.append(f"{count_text(tokens)} tokens, {count_text(tokens / facts.age_s)} a second.")
    level: Level = "good" if train >= 0.8 else "warning" if train >= 0.5 else "bad"
    return Answer(question=TIME, short=f"{100 * train:.0f} % training", sentences=tuple(sentences), level=level)


def _slowest(facts: ReportFacts) -> Iterator[str]:
    """A sentence about the replica that trains longest, if it makes the others wait."""

    def trained(replica: ReplicaFacts) -> float:
        return replica.seconds.get("train", 0.0) / max(1, replica.in_average)

    working = [replica for replica in facts.replicas if trained(replica) and replica.in_average]
    if len(working) < 2:
        return
    slowest = max(working, key=trained)
    mean = fmean(trained(replica) for replica in working if replica is not slowest)
    if trained(slowest) > max(_SLOWER * mean, mean + _WAIT_S):
        yield (
            f"{slowest.slot} is the slowest: it trains {trained(slowest):.1f} s in a round, the others {mean:.1f} s, "
            "and they wait for it."
        )
