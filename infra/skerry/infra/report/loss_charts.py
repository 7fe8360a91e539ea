"""Draws the loss of a run and the metrics of its script. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from skerry.infra.number_text import count_text, short_number
from skerry.infra.report.color_grid_png import png_uri
from skerry.infra.report.curves import robust_range, thinned
from skerry.infra.report.plot import Plot, number_label

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.infra.report.facts import Curve, Point, ReplicaFacts, ReportFacts

COLOURS: Final = (
    *("#4c8fd6", "#f58518", "#3aa757", "#b279a2", "#e45756", "#3fb6b2"),
    *("#c9a227", "#9d755d", "#7f7fd5", "#d67195", "#7aa83b", "#8c8c94"),
)
"""Of the lines of replicas. With more replicas there is a band and a heat map."""
_PARTS: Final = 300
_TIPS: Final = 200
_EVENTS: Final = 4
# Of the width of the chart: closer labels overlap.
_EVENT_GAP: Final = 0.14
_HEAT_COLUMNS: Final = 600
# A distance from the mean of the round, in standard errors of the usual one, that has the strongest colour.
_HEAT_STEPS: Final = 12
_LOW: Final = (43, 108, 196)
_MIDDLE: Final = (214, 218, 224)
_HIGH: Final = (214, 59, 59)


def has_lines(facts: ReportFacts) -> bool:
    """True if each replica has a line of its own."""
    return len(facts.loss.by_replica) <= len(COLOURS)


def loss_charts(facts: ReportFacts) -> dict[str, str]:
    """The loss against rounds, tokens and hours, as far as these are known: charts by the name of their x axis."""
    tokens = {item.view.round: float(item.tokens) for item in facts.history}
    hours = {item.view.round: item.hours for item in facts.history if item.hours is not None}
    last = facts.history[-1]
    charts = {"rounds": _loss_chart(facts, {number: float(number) for number in tokens}, _round_label, whole=True)}
    if last.tokens:
        charts["tokens"] = _loss_chart(facts, tokens, count_text)
    if len(hours) == len(tokens) and last.hours:
        short = last.hours < 1
        scaled = {number: value * 60 for number, value in hours.items()} if short else hours
        charts["minutes" if short else "hours"] = _loss_chart(facts, scaled, number_label)
    return charts


def overlaid(facts: ReportFacts) -> Curve | None:
    """The held-out loss, which is drawn beside the loss; None without any."""
    return next((curve for curve in facts.metrics if curve.held_out and "loss" in curve.name.lower()), None)


def _loss_chart(
    facts: ReportFacts, x_of: Mapping[int, float], x_label: Callable[[float], str], *, whole: bool = False
) -> str:
    points, held_out = facts.loss.points, overlaid(facts)
    ended = facts.history[-1].view.round
    if held_out is not None and held_out.points[-1].round > ended:  # evaluated after the last round
        x_of = {**x_of, ended + 1: x_of[ended] + whole}
    shown = [*points, *(held_out.points if held_out is not None else ())]
    low, high = robust_range([point.mean for point in shown])
    low = min(low, *robust_range([point.lowest for point in points]))
    plot = Plot(_span(x_of), (low, high), 300)
    plot.axes(x_label, whole=whole)
    _events(plot, facts, x_of, high)
    if has_lines(facts):
        away = {replica.slot: _away(replica, x_of) for replica in facts.replicas}
        for colour, (slot, values) in zip(COLOURS, losses_in_order(facts), strict=False):
            plot.line(_at(values, x_of), "line thin", colour, away[slot])
    else:
        _band(plot, points, x_of)
    plot.line(_at([(point.round, point.mean) for point in points], x_of), "line mean")
    if held_out is not None:
        values = _at([(point.round, point.mean) for point in held_out.points], x_of)
        plot.line(values, "line held")
        if len(values) <= _TIPS:
            plot.dots(values)
    _outside(plot, points, x_of, high)
    _tips(plot, points, x_of, (low, high))
    return plot.html()


def losses_in_order(facts: ReportFacts) -> list[tuple[str, Sequence[tuple[int, float]]]]:
    """The losses of each replica, in the order of the replicas."""
    by_replica = facts.loss.by_replica
    return [(replica.slot, by_replica[replica.slot]) for replica in facts.replicas if replica.slot in by_replica]


def metric_chart(curve: Curve, last_round: int) -> str:
    """A metric of the script over rounds: mean of the replicas, and the range between them."""
    points = curve.points
    y = robust_range([point.mean for point in points])
    plot = Plot((0.0, float(max(1, last_round, points[-1].round))), y, 120)
    plot.axes(_round_label, whole=True)
    x_of = {point.round: float(point.round) for point in points}
    _band(plot, points, x_of)
    values = _at([(point.round, point.mean) for point in points], x_of)
    plot.line(values, "line mean")
    if len(points) <= _TIPS // 2:
        plot.dots(values)
    _outside(plot, points, x_of, y[1])
    _tips(plot, points, x_of, y)
    return plot.html()


def heat_map(facts: ReportFacts) -> tuple[str, str]:
    """For many replicas: the distance of each replica's loss from the mean of its round, and what full colour is."""
    means = {point.round: point.mean for point in facts.loss.points}
    columns, rounds = _columns(facts), [item.view.round for item in facts.history]
    rows: list[list[float | None]] = []
    for slot in [replica.slot for replica in facts.replicas]:
        cells: list[list[float]] = [[] for _ in range(columns)]
        for number, loss in facts.loss.by_replica.get(slot, ()):
            cells[(number - rounds[0]) * columns // (rounds[-1] - rounds[0] + 1)].append(loss - means[number])
        rows.append([max(cell, key=abs) if cell else None for cell in cells])
    distances = sorted(abs(value) for row in rows for value in row if value is not None)
    # One replica that is far away must not make all others look equal.
    full = (distances[int(0.98 * (len(distances) - 1))] if distances else 0.0) or 1.0
    palette = ["", *(_mixed(step / _HEAT_STEPS) for step in range(-_HEAT_STEPS, _HEAT_STEPS + 1))]
    pixels = [
        bytes(
            0 if value is None else 1 + _HEAT_STEPS + round(_HEAT_STEPS * max(-1.0, min(1.0, value / full)))
            for value in row
        )
        for row in rows
    ]
    height = row_height(len(rows))
    plot = Plot((rounds[0] - 0.5, rounds[-1] + 0.5), (0.0, float(len(rows))), height * len(rows), 104)
    plot.axes(_round_label, whole=True, y_ticks=False)
    plot.image(png_uri(pixels, palette), "loss of each replica against the mean of the round")
    plot.row_labels([replica.slot for replica in facts.replicas], height)
    return plot.html(), short_number(full)


def row_height(rows: int) -> float:
    """Pixels of a row of a grid, so that few rows can be read and many fit on a screen."""
    return 24.0 if rows <= 8 else 17.0 if rows <= 24 else max(1.0, min(10.0, 640 / rows))


def _columns(facts: ReportFacts) -> int:
    return min(_HEAT_COLUMNS, facts.history[-1].view.round - facts.history[0].view.round + 1)


def _mixed(share: float) -> str:
    end = _HIGH if share > 0 else _LOW
    parts = (round(middle + (far - middle) * abs(share)) for middle, far in zip(_MIDDLE, end, strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)


def _span(x_of: Mapping[int, float]) -> tuple[float, float]:
    values = list(x_of.values())
    return (0.0, values[-1]) if values[-1] > 0 else (0.0, 1.0)


def _at(values: Sequence[tuple[int, float]], x_of: Mapping[int, float]) -> list[tuple[float, float]]:
    return thinned([(x_of[number], value) for number, value in values if number in x_of], _PARTS)


def _band(plot: Plot, points: Sequence[Point], x_of: Mapping[int, float]) -> None:
    plot.band(
        _at([(point.round, point.lowest) for point in points], x_of),
        _at([(point.round, point.highest) for point in points], x_of),
    )


def _away(replica: ReplicaFacts, x_of: Mapping[int, float]) -> list[tuple[float, float]]:
    """The stretches without any record of the replica."""
    return [
        (x_of[stretch.first], x_of[stretch.last])
        for stretch in replica.stretches
        if stretch.mark in {"killed", "absent"}
    ]


def _events(plot: Plot, facts: ReportFacts, x_of: Mapping[int, float], top: float) -> None:
    """A line where a replica begins to be missing, and one where it is back; the first few have its name."""
    begins = sorted(
        (stretch.first, stretch.last + 1, replica.slot, stretch.mark)
        for replica in facts.replicas
        for stretch in replica.stretches
        if stretch.mark in {"killed", "absent"} and stretch.first > facts.history[0].view.round
    )
    labelled: list[float] = []
    left, right = _span(x_of)
    for number, back, slot, mark in begins[: 5 * _EVENTS]:
        x, returns = x_of[number], back <= facts.history[-1].view.round
        plot.upright(x, "event")
        if returns:
            plot.upright(x_of[back], "back")
        near = any(abs(x - other) < _EVENT_GAP * (right - left) for other in labelled)
        if len(labelled) < _EVENTS and not near:
            labelled.append(x)
            text = f"{slot} {mark}, {f'back in round {back:,}' if returns else 'not back'}"
            plot.note(x, top, text, "event", f"{text}; missing from round {number:,} on")


def _outside(plot: Plot, points: Sequence[Point], x_of: Mapping[int, float], high: float) -> None:
    """Names the rounds whose mean is above the axis."""
    above = [point for point in points if point.mean > high]
    if above:
        highest = max(above, key=lambda point: point.mean)
        more = f", {len(above)} rounds are above" if len(above) > 1 else ""
        text = f"\u2191 {short_number(highest.mean)} in round {highest.round:,}{more}"
        plot.note(x_of[above[0].round], high, text, "outside")


def _tips(plot: Plot, points: Sequence[Point], x_of: Mapping[int, float], y: tuple[float, float]) -> None:
    """Invisible boxes with the numbers of a round."""
    step = max(1, -(-len(points) // _TIPS))
    kept = points[::step]
    middles = [(x_of[left.round] + x_of[right.round]) / 2 for left, right in pairwise(kept)]
    begin_of_plot, end_of_plot = _span(x_of)
    for point, begin, end in zip(kept, [begin_of_plot, *middles], [*middles, end_of_plot], strict=True):
        tip = f"round {point.round:,}: mean {short_number(point.mean)}"
        if point.replicas > 1:
            tip += f", {short_number(point.lowest)} to {short_number(point.highest)} of {point.replicas} replicas"
        plot.box((begin, end), y, "tip", tip)


def _round_label(value: float) -> str:
    return f"{value:,.0f}"
