"""Draws a run on a screen of any size from 60 columns on: progress, loss, replicas, recent rounds, events. Pure.

The parts of the page are lists of lines; `RunScreen` divides the height between them.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final

from rich.text import Text

from skerry.infra.cli.block_charts import bar, chart, sparkline
from skerry.infra.cli.replica_table import legend, replica_rows, state_counts
from skerry.infra.cli.run_text import agreement_text, plain
from skerry.infra.number_text import duration, short_number
from skerry.infra.observe.pace_of_recent_rounds import PHASES
from skerry.infra.observe.replica_state_text import place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

    from skerry.infra.cli.compute_cost_so_far import Spending
    from skerry.infra.observe.run_view import RunView

MIN_WIDTH: Final = 60
"""On a narrower terminal a table is unreadable; lines wrap."""

_WIDE: Final = 120
# With so many lines there is room for charts above the replicas.
_TALL: Final = 36
_CHART_HEIGHT: Final = 8
_ROUNDS: Final = 5
_ROUNDS_WIDTH: Final = 98
_EVENTS_MIN: Final = 3
_EVENTS_MAX: Final = 12
# On a narrower screen the dollars are more important than the change of the loss.
_CHANGE_WIDTH: Final = 100
_CHANGE_ROUNDS: Final = 20
_GAP: Final = "   "


@dataclass(frozen=True, kw_only=True)
class RunScreen:
    """A renderable of a view. height: lines at most; None takes as many as there are. footer: the last line."""

    view: RunView
    spending: Spending | None = None
    height: int | None = None
    footer: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the lines for the width of the console."""
        del console
        yield Text("\n").join(self.lines(options.max_width))

    def lines(self, width: int, zone: dt.tzinfo | None = None) -> list[Text]:
        """The lines, each at most `width` cells. zone: of times; None is this machine's.

        On a terminal that is too narrow for a table they are lines of text, which wrap.
        """
        if width < MIN_WIDTH:
            return [Text(line) for line in plain(self.view)]
        lines = _arranged(self, width, zone)
        for line in lines:
            line.truncate(width, overflow="ellipsis")
            line.no_wrap = True
        return lines


def _arranged(screen: RunScreen, width: int, zone: dt.tzinfo | None) -> list[Text]:
    height, view, rule = screen.height, screen.view, Text("─" * width, style="bright_black")
    tall = height is not None and height >= _TALL
    head = _header(view, width, screen.spending, zone)
    graphs = _charts(view, width) if tall else _sparklines(view, width)
    rounds = _rounds(view, width, zone) if tall and width >= _WIDE else []
    facts = _facts(view, width, screen.spending, has_time=not rounds)
    end = [legend(), *([Text(screen.footer, style="dim")] if screen.footer else [])]
    events = _events(view, zone)
    if height is None:
        table = replica_rows(view, width, screen.spending, None)
        return _ruled(rule, [head + graphs, table, facts, events[:_EVENTS_MAX], end])

    def room() -> int:
        rules = sum(map(bool, (rounds, facts, events))) + 1
        return height - sum(map(len, (head, graphs, facts, rounds, end))) - rules

    # On a low screen the least important parts are left out first.
    for part in (rounds, facts, graphs, end):
        if room() < 2 * _EVENTS_MIN:
            part.clear()
    free = max(2, room())
    table = replica_rows(view, width, screen.spending, max(2, free - min(len(events), _EVENTS_MIN)))
    events = events[: max(0, free - len(table))]
    # On a whole screen the last lines are at its bottom.
    blank = [Text()] * max(0, free - len(table) - len(events)) if screen.footer else []
    return _ruled(rule, [head + graphs, table, rounds, facts, events + blank + end])[:height]


def _ruled(rule: Text, parts: Sequence[list[Text]]) -> list[Text]:
    lines: list[Text] = []
    for part in filter(None, parts):
        lines += [rule.copy(), *part] if lines else part
    return lines


def _header(view: RunView, width: int, spending: Spending | None, zone: dt.tzinfo | None) -> list[Text]:
    done = f"round {view.closed:,}" + ("" if view.rounds is None else f" of {view.rounds:,}")
    share = view.done_share
    percent = "" if share is None else f"{int(1000 * share) / 10:.1f} %"
    end = _end_text(view, zone, wide=width >= _WIDE)
    if width >= _WIDE:
        title = Text.assemble((view.run, "bold"), "  ", (view.uri, "dim"))
        right = _GAP.join(filter(None, (done, percent, end)))
        title.append(right.rjust(max(len(right) + 3, width - title.cell_len)))
        lines = [title, Text(bar(share, width), style="green")] if share is not None else [title]
    else:
        left, right = f"  {done}  ", "  ".join(filter(None, (percent, end)))
        room = width - len(view.run) - len(left) - len(right) - 2
        lines = [Text.assemble((view.run, "bold"), left)]
        if share is not None and room > 3:
            lines[0].append(bar(share, room), "green").append("  ")
        lines[0].append(right)
    return [*lines, _numbers(view, width, spending)]


def _end_text(view: RunView, zone: dt.tzinfo | None, *, wide: bool) -> str:
    if view.finished:
        return "finished"
    if view.left_s is None:
        return ""
    text = f"{duration(view.left_s)} left"
    return f"{text} (ends {_clock(view.now_at + view.left_s, view.now_at, zone)})" if wide else text


def _numbers(view: RunView, width: int, spending: Spending | None) -> Text:
    """The numbers of the whole run, as many as fit."""
    rates = [
        replica.tokens_per_s
        for replica in view.replicas
        if replica.tokens_per_s is not None and replica.at_work and not replica.silent
    ]
    parts = [
        _loss_text(view, change=width >= _CHANGE_WIDTH),
        f"{sum(rates):,.0f} tok/s" if rates else "",
        "" if view.elapsed_s is None else f"{duration(view.elapsed_s)} so far",
        "" if spending is None else spending.text,
        "" if spending is None else spending.estimate_text,
        "" if view.participants is None else f"{view.participants} of {len(view.replicas)} in the last round",
        state_counts(view.replicas) if width >= _WIDE else "",
    ]
    line = ""
    for part in filter(None, parts):
        longer = f"{line}{_GAP}{part}" if line else part
        line = longer if len(longer) <= width else line
    return Text(line)


def _loss_text(view: RunView, *, change: bool) -> str:
    if not view.losses:
        known = [replica.loss for replica in view.replicas if replica.loss is not None]
        return f"loss {short_number(fmean(known))}" if known else ""
    last = [item.loss for item in view.recent if item.loss is not None]
    number, now = view.losses[-1]
    if view.recent and view.recent[-1].loss is None:
        return f"loss {short_number(now)} in round {number:,}, none since"
    if len(last) < 2 or not change:
        return f"loss {short_number(now)}"
    before = last[max(0, len(last) - 1 - _CHANGE_ROUNDS)]
    over = min(_CHANGE_ROUNDS, len(last) - 1)
    return f"loss {short_number(now)} ({now - before:+.3f} in {over} round{'s' if over > 1 else ''})"


def _sparklines(view: RunView, width: int) -> list[Text]:
    """The loss of the whole run and the lengths of the recent rounds, a line each."""
    lines: list[Text] = []
    for name, values, form in (
        ("loss", [loss for _, loss in view.losses], short_number),
        ("round", [item.seconds for item in view.recent if item.seconds is not None], duration),
    ):
        if len(values) > 1:
            first, last = form(values[0]), form(values[-1])
            graph = sparkline(values, width - 8 - len(first) - len(last) - 2)
            lines.append(Text.assemble((f"{name:<7}", "bold"), f"{first} ", (graph, "cyan"), f" {last}"))
    work = [replica for replica in view.replicas if replica.step is not None and replica.at_work]
    now = Text.assemble(("now    ", "bold"), state_counts(view.replicas))
    if work and view.steps_per_round:
        step = sorted(replica.step or 0 for replica in work)[len(work) // 2]
        text, drawn = f"   step {step} of {view.steps_per_round} ", bar(step / view.steps_per_round, 10)
        if now.cell_len + len(text) + len(drawn) <= width:
            now.append(text).append(drawn, "green")
    return [*lines, now]


def _charts(view: RunView, width: int) -> list[Text]:
    """The loss of the whole run and the lengths of the recent rounds, side by side on a wide screen."""
    losses, seconds = (
        [loss for _, loss in view.losses],
        [item.seconds for item in view.recent if item.seconds is not None],
    )
    if len(losses) < _CHART_HEIGHT:
        return _sparklines(view, width)
    two = width >= _WIDE and len(seconds) > 1
    room = (width - 4) // 2 if two else width
    last = view.losses[-1][0]
    left = _chart(f"loss, mean of all replicas, rounds {view.losses[0][0]:,} to {last:,}", losses, room, zero=False)
    right = _chart(f"seconds of a round, the last {len(seconds)}", seconds, room, zero=True) if two else []
    rule = Text("─" * width, style="bright_black")
    if not two:
        return [rule, *left]
    joined: list[Text] = []
    for drawn, other in zip(left, right, strict=True):
        drawn.pad_right(max(0, room + 4 - drawn.cell_len))
        joined.append(drawn.append_text(other))
    return [rule, *joined]


def _chart(title: str, values: Sequence[float], width: int, *, zero: bool) -> list[Text]:
    scale = 1 + max(len(short_number(value)) for value in (min(values), max(values)))
    rows = chart(values, width - scale - 1, _CHART_HEIGHT, zero=zero)
    labels = [f"{short_number(value):>{scale}}"[:scale] for value, _ in rows]
    lines = [Text.assemble((label, "dim"), " ", (row, "cyan")) for label, (_, row) in zip(labels, rows, strict=True)]
    return [Text(title, style="bold"), *lines]


def _facts(view: RunView, width: int, spending: Spending | None, *, has_time: bool) -> list[Text]:
    """The agreement of bits, the parts of time, and where the machines are if no column shows it."""
    differs = view.agreement is not None and (not view.agreement.average or view.agreement.state is False)
    bits = Text.assemble(("bits   ", "bold"), (agreement_text(view), "bold red" if differs else ""))
    shares = {
        name: sum(view.time_shares.get(phase, 0.0) for phase in phases)
        for name, phases in PHASES.items()
        if any(phase in view.time_shares for phase in phases)
    }
    words = [f"{name} {100 * share:.0f} %" for name, share in shares.items() if share >= 0.005]
    time = Text.assemble(("time   ", "bold"), "  ".join(words)) if words and has_time else None
    machines = [
        f"{item.running} x {place(item.machine)}"
        + ("" if spending is None or spending.an_hour(item.machine) == "-" else f" ${spending.an_hour(item.machine)}/h")
        for item in view.machine_times
        if item.machine is not None and item.running
    ]
    where = Text.assemble(("where  ", "bold"), ", ".join(machines)) if machines and width < _WIDE else None
    if time is not None and bits.cell_len + time.cell_len + 8 <= width:
        bits.pad_right(max(4, (width + 4) // 2 - bits.cell_len))
        return [bits.append_text(time), *([] if where is None else [where])]
    return [line for line in (bits, time, where) if line is not None]


def _rounds(view: RunView, width: int, zone: dt.tzinfo | None) -> list[Text]:
    """The last rounds as a table, and the parts of a replica's time as bars beside it."""
    header = (
        f"{'round':>8}  {'closed':<8}  {'took':>8}  {'in':>5}  {'loss':>7}  {'train':>6} {'wait':>6} {'average':>7}"
    )
    lines = [Text("the last rounds", style="bold"), Text(f"{header}  slowest", style="dim")]
    for item in reversed(view.recent[-_ROUNDS:]):
        seconds = {
            name: sum(item.phases.get(phase, 0.0) for phase in PHASES[name]) for name in ("train", "wait", "average")
        }
        cells = [
            f"{item.round:>8,}",
            "-".ljust(8) if item.closed_at is None else _clock(item.closed_at, item.closed_at, zone),
            ("-" if item.seconds is None else duration(item.seconds)).rjust(8),
            f"{item.members}/{item.replicas}".rjust(5),
            ("-" if item.loss is None else short_number(item.loss)).rjust(7),
        ]
        spans = " ".join(
            (f"{value:.1f}" if item.phases else "-").rjust(size)
            for value, size in zip(seconds.values(), (6, 6, 7), strict=True)
        )
        slowest = "" if item.slowest is None else f"  {item.slowest[0]} (+{item.slowest[1]:.1f} s)"
        lines.append(
            Text("  ".join(cells) + f"  {spans}{slowest}", style="" if item.members == item.replicas else "yellow")
        )
    room = min(width // 2 - 4, width - _ROUNDS_WIDTH)
    bars = [Text("where the time of a replica goes", style="bold")]
    for name, phases in PHASES.items():
        share = sum(view.time_shares.get(phase, 0.0) for phase in phases)
        if share >= 0.005:
            bars.append(Text.assemble(f"{name:<9}", (bar(share, room - 20), "cyan"), f" {100 * share:3.0f} %"))
    for line, drawn in zip(lines, bars, strict=False):
        line.truncate(width - room - 2)
        line.pad_right(width - room - line.cell_len)
        line.append_text(drawn)
    return lines


def _events(view: RunView, zone: dt.tzinfo | None) -> list[Text]:
    about = max((len(event.about) for event in view.events), default=0)
    return [
        Text.assemble(
            (f"{_clock(event.at, view.now_at, zone)} ", "dim"),
            f"{event.about:<{about}}  ",
            (event.text, "yellow" if event.bad else ""),
        )
        for event in view.events
    ]


def _clock(at: float, now: float, zone: dt.tzinfo | None) -> str:
    """The time of day, with the date if it is another day."""
    moment = dt.datetime.fromtimestamp(at, dt.UTC).astimezone(zone)
    today = dt.datetime.fromtimestamp(now, dt.UTC).astimezone(zone).date()
    return f"{moment:%H:%M:%S}" if moment.date() == today else f"{moment:%d %b %H:%M}"
