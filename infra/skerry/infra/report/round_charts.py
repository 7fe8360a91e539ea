"""Draws the part of each replica in the rounds, and where the time goes. Pure."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Final

from skerry.infra.number_text import duration
from skerry.infra.observe.pace_of_recent_rounds import PHASES
from skerry.infra.report.color_grid_png import png_uri
from skerry.infra.report.curves import robust_range
from skerry.infra.report.loss_charts import row_height
from skerry.infra.report.plot import Plot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.observe.doctor.findings import Finding
    from skerry.infra.observe.run_view import Mark
    from skerry.infra.report.facts import ReplicaFacts, ReportFacts, RoundFacts

MARKS: Final[Mapping[Mark, str]] = {
    "trained": "#5b8fc7",
    "cut": "#f0c33c",
    "late": "#f08c2e",
    "abstained": "#a774c4",
    "absent": "#b9bfc9",
    "killed": "#d63b3b",
}
"""The colour of each part of a replica in a round, as in `page.css`; in the order of seriousness."""
PARTS: Final[Mapping[str, str]] = {
    "train": "#5b8fc7",
    "evaluate": "#72b7b2",
    "upload": "#f58518",
    "wait": "#eeca3b",
    "average": "#b279a2",
    "away": "#e08a85",
    "other": "#b9bfc9",
}
_RESTARTS: Final = 400
_CELLS: Final = 4000
_COLUMNS: Final = 500
_BARS: Final = 120
_ROWS: Final = 32
# Bars above the axis that are named: more have no room on a phone.
_NAMED: Final = 3
_NAMES: Final = 104


def participation_grid(facts: ReportFacts) -> str:
    """Rounds x replicas. Equal neighbours are one rectangle; too many of these are a picture."""
    first, last = facts.history[0].view.round, facts.history[-1].view.round
    replicas, height = facts.replicas, row_height(len(facts.replicas))
    plot = Plot((first - 0.5, last + 0.5), (0.0, float(len(replicas))), height * len(replicas), _NAMES)
    plot.axes(lambda value: f"{value:,.0f}", whole=True, y_ticks=False)
    plot.row_labels([replica.slot for replica in replicas], height)
    if sum(len(replica.stretches) for replica in replicas) > _CELLS:
        plot.image(_picture(facts), "the part of each replica in each round")
    else:
        for number, replica in enumerate(replicas):
            _row(plot, replica, len(replicas) - number)
    restarts = [(slot, number) for slot, replica in enumerate(replicas) for number in replica.restarts]
    for row, number in restarts[:_RESTARTS] if height >= 8 else ():
        tip = f"{replicas[row].slot} takes part again from round {number:,} on, after a restart"
        plot.note(float(number), len(replicas) - row - 0.5, "\u25b2", "restart", tip)
    rows = {replica.slot: row for row, replica in enumerate(replicas)}
    for item in differences(facts)[:_RESTARTS] if height >= 8 else ():
        if item.slot in rows and item.round is not None:
            at = (float(item.round), len(replicas) - rows[item.slot] - 0.5)
            plot.note(*at, "\u25c6", "restart", f"{item.slot}, round {item.round:,}: {item.text}")
    return plot.html()


def differences(facts: ReportFacts) -> list[Finding]:
    """The findings about replicas whose average or state was not that of the others; each names its first round."""
    return [item for item in facts.findings if item.kind in {"averages-differ", "states-differ"}]


def _row(plot: Plot, replica: ReplicaFacts, top: int) -> None:
    # Rare parts are drawn last, with a border of their own colour, so that one round of a thousand is visible.
    for stretch in sorted(replica.stretches, key=lambda stretch: stretch.mark != "trained"):
        rounds = (
            f"round {stretch.first:,}"
            if stretch.first == stretch.last
            else f"rounds {stretch.first:,} to {stretch.last:,}"
        )
        why = f": {stretch.why}" if stretch.why else ""
        data = f' data-mark="{stretch.mark}" data-first="{stretch.first}" data-last="{stretch.last}"'
        box = (stretch.first - 0.5, stretch.last + 0.5)
        plot.box(
            box, (top - 0.92, top - 0.08), f"m-{stretch.mark}", f"{replica.slot}, {rounds}: {stretch.mark}{why}", data
        )


def _picture(facts: ReportFacts) -> str:
    """The grid as an image; a pixel of several rounds has the most serious part."""
    first, count = facts.history[0].view.round, facts.history[-1].view.round - facts.history[0].view.round + 1
    columns = min(_COLUMNS, count)
    order = list(MARKS)
    rows: list[bytes] = []
    for replica in facts.replicas:
        row = bytearray(columns)
        for stretch in replica.stretches:
            begin, end = ((number - first) * columns // count for number in (stretch.first, stretch.last))
            value = 1 + order.index(stretch.mark)
            for column in range(begin, end + 1):
                row[column] = max(row[column], value)
        rows.append(bytes(row))
    return png_uri(rows, ["", *MARKS.values()])


def shares_of_replicas(facts: ReportFacts) -> tuple[str, int]:
    """A bar for each replica with the parts of its time; those that train least, and how many are left out."""
    timed = [replica for replica in facts.replicas if replica.seconds]
    least = sorted(timed, key=lambda replica: replica.seconds.get("train", 0.0) / sum(replica.seconds.values()))
    shown = [replica for replica in timed if replica in least[:_ROWS]]
    height = row_height(len(shown))
    plot = Plot((0.0, 100.0), (0.0, float(len(shown))), height * len(shown), _NAMES)
    plot.axes(lambda value: f"{value:g} %", y_ticks=False)
    plot.row_labels([replica.slot for replica in shown], height)
    for number, replica in enumerate(shown):
        at, whole, top = 0.0, sum(replica.seconds.values()), len(shown) - number
        for part, seconds in replica.seconds.items():
            share = 100 * seconds / whole
            tip = f"{replica.slot}: {part} {duration(seconds)}, {share:.1f} %"
            plot.box((at, at + share), (top - 0.88, top - 0.12), f"p-{part}", tip)
            at += share
    return plot.html(), len(timed) - len(shown)


def seconds_of_rounds(facts: ReportFacts, left_out: Sequence[str] = ()) -> str:
    """The mean seconds of a replica in each round, by part, stacked. left_out: parts that would dwarf the others."""
    bins = _bins(facts.history)
    bars = [(first, last, _mean_parts(items, left_out)) for first, last, items in bins]
    heights = [sum(parts.values()) for _, _, parts in bars]
    top = max(robust_range(heights)[1], 1e-3) if heights else 1.0
    begin, end = bins[0][0] - 0.5, bins[-1][1] + 0.5
    plot = Plot((begin, end), (0.0, top), 200)
    plot.axes(lambda value: f"{value:,.0f}", whole=True)
    for first, last, parts in bars:
        at, gap = 0.0, 0.06 * (last + 1 - first)
        for part, seconds in parts.items():
            rounds = f"round {first:,}" if first == last else f"rounds {first:,} to {last:,}"
            box = (min(at, top), min(at + seconds, top))
            plot.box((first - 0.5 + gap, last + 0.5 - gap), box, f"p-{part}", f"{rounds}: {part} {seconds:.2f} s")
            at += seconds
    outside = [(height, first) for (first, _, _), height in zip(bars, heights, strict=True) if height > top]
    if outside:
        highest = sorted(sorted(outside)[-_NAMED:], key=lambda item: item[1])
        named = [f"round {first:,}: {duration(height)}" for height, first in highest]
        more = [f"{len(outside) - _NAMED} more"] if len(outside) > _NAMED else []
        plot.note(begin, top, f"\u2191 {', '.join([*named, *more])}", "outside")
    return plot.html()


def _bins(history: Sequence[RoundFacts]) -> list[tuple[int, int, Sequence[RoundFacts]]]:
    """Neighbouring rounds: first, last, and their facts."""
    size = -(-len(history) // _BARS)
    groups = [history[start : start + size] for start in range(0, len(history), size)]
    return [(group[0].view.round, group[-1].view.round, group) for group in groups]


def _mean_parts(items: Sequence[RoundFacts], left_out: Sequence[str]) -> dict[str, float]:
    timed = [item.view.phases for item in items if item.view.phases]
    parts: dict[str, float] = {}
    for part, phases in PHASES.items():
        values = [sum(of_round.get(phase, 0.0) for phase in phases) for of_round in timed]
        if part not in left_out and values and (mean := fmean(values)) > 0:
            parts[part] = mean
    return parts
