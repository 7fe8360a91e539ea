"""The picture of a chaos run: what every replica did under one kill schedule, and the goodput of all cases."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves types open.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from chaos.figures import Contribution, Diaries, Story, commit_times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

ALIVE, USEFUL, KILL, COMMIT = "#d5d8dc", "#3b7dd8", "#c0392b", "#7f8c8d"
BARS = {"ours": USEFUL, "torchft": "#e08e2b"}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The data of one run's timeline."""

    title: str
    step_s: float
    story: Story
    diaries: Diaries
    contributions: Sequence[Contribution]


def draw(path: Path, traces: Sequence[Trace], goodputs: Mapping[str, Mapping[str, float]]) -> None:
    """Write the picture; its suffix names the format. goodputs: per cent by case and contestant."""
    figure = Figure(figsize=(12, 2.6 * len(traces) + 3.2), layout="constrained")
    axes = figure.subplots(len(traces) + 1, 1, squeeze=False, height_ratios=[*[2.6] * len(traces), 3.0])[:, 0]
    longest = max(trace.story.ended - trace.story.began for trace in traces)
    for ax, trace in zip(axes, traces, strict=False):
        _timeline(ax, trace, longest)
    _bars(axes[-1], goodputs)
    figure.savefig(path)


def _timeline(ax: Axes, trace: Trace, longest: float) -> None:
    zero = trace.story.began
    for life in trace.story.lives:
        ax.barh(life.slot, life.end - life.start, left=life.start - zero, height=0.7, color=ALIVE)
    members = {(c.round, c.slot, c.process): c.steps for c in trace.contributions}
    for index, lines in trace.diaries.items():
        began = 0.0
        for line in lines:
            if line.event == "step" and line.since == 1:
                began = line.t - trace.step_s
            if line.event == "closed" and (line.round, index, line.process) in members:
                ax.barh(index, line.arrived - began, left=began - zero, height=0.7, color=USEFUL)
    for moment in commit_times(trace.diaries).values():
        ax.axvline(moment - zero, color=COMMIT, linewidth=0.5, zorder=0)
    if trace.story.kills:
        moments, slots = zip(*trace.story.kills, strict=True)
        ax.scatter([m - zero for m in moments], slots, marker="x", s=26, color=KILL, zorder=3)
    ax.set(title=trace.title, ylabel="replica", xlim=(0, longest), yticks=sorted(trace.diaries))
    ax.set_xlabel(
        "seconds.  blue: inner steps that entered an average   grey: alive   x: SIGKILL   line: a round closed"
    )


def _bars(ax: Axes, goodputs: Mapping[str, Mapping[str, float]]) -> None:
    for place, contestant in enumerate(BARS):
        result = [(x, by[contestant]) for x, by in enumerate(goodputs.values()) if contestant in by]
        if not result:
            continue
        bars = ax.bar(
            [x + 0.4 * (place - 0.5) for x, _ in result],
            [value for _, value in result],
            width=0.38,
            color=BARS[contestant],
            label=contestant,
        )
        ax.bar_label(bars, fmt="%.0f")
    ax.set_xticks(range(len(goodputs)), list(goodputs))
    ax.set(xlim=(-0.6, max(3, len(goodputs)) - 0.4), ylim=(0, 110), ylabel="goodput, %")
    ax.legend(loc="upper right", ncols=2)
