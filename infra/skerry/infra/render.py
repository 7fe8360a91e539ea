"""How a run looks: a live table on a terminal, plain lines elsewhere, JSON for programs. Decides nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, assert_never

from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

from skerry.infra.policy import Fate
from skerry.infra.reports import (
    Ended,
    Killing,
    Lines,
    LostSight,
    Remains,
    Report,
    Restarting,
    Started,
    Stopping,
    Summary,
    Untracked,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from _typeshed import DataclassInstance
    from rich.console import Console

    from skerry.infra.view import ReplicaView, RunView
    from skerry.runtime.clock import Clock

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_COLUMNS: tuple[str, ...] = ("replica", "state", "round", "step", "loss", "tok/s", "waiting for", "up MB", "down MB")
_NUMBERS = frozenset({"round", "step", "loss", "tok/s", "up MB", "down MB"})
# What a narrow terminal does without, first to last; names and states are never broken or left out.
_DROPPED = ("waiting for", "down MB", "up MB", "step")
# Narrower than this a table is a jumble; the lines of `plain` wrap where the terminal does.
_NARROWEST = 60
# A person looks up this often; in between there are the replicas' own lines.
_PROGRESS_S = 10.0


class Screen(Protocol):
    """Where a supervisor's reports and views are shown, from one thread."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def report(self, report: Report) -> None:
        """Show one report."""
        ...

    def view(self, view: RunView) -> None:
        """Show the run as it is now."""
        ...


class PlainScreen:
    """A line for every report, and now and then one for the run: for files, pipes and logs.

    quiet: what replicas write is left out.
    """

    def __init__(self, console: Console, clock: Clock, *, quiet: bool = False) -> None:
        self._console = console
        self._clock = clock
        self._quiet = quiet
        self._told: tuple[str, float] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def report(self, report: Report) -> None:
        """Print it."""
        _print(self._console, report, quiet=self._quiet)

    def view(self, view: RunView) -> None:
        """Print a line if the last one was a while ago and said something else."""
        text, now = progress(view), self._clock.now()
        if self._told is None or (text != self._told[0] and now - self._told[1] >= _PROGRESS_S):
            self._told = text, now
            self._console.print(_note(text, "bold"), soft_wrap=True)


class TableScreen:
    """A table of the replicas that stays below everything that is printed: for terminals."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._live = Live(console=console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def report(self, report: Report) -> None:
        """Print it above the table."""
        _print(self._console, report, quiet=self._quiet)

    def view(self, view: RunView) -> None:
        """Redraw the table."""
        self._live.update(status(view, self._console.width))


class EnduringScreen:
    """A screen over another that outlives its terminal or pipe: then `on_gone` is called, and nothing is shown."""

    def __init__(self, screen: Screen, console: Console, on_gone: Callable[[], None]) -> None:
        self._screen = screen
        self._console = console
        self._on_gone = on_gone

    def __enter__(self) -> Self:
        with self._enduring():
            self._screen.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        with self._enduring():
            self._screen.__exit__(*error)

    def report(self, report: Report) -> None:
        """Show it, if somebody is there."""
        with self._enduring():
            self._screen.report(report)

    def view(self, view: RunView) -> None:
        """Show it, if somebody is there."""
        with self._enduring():
            self._screen.view(view)

    @contextlib.contextmanager
    def _enduring(self) -> Generator[None]:
        try:
            yield
        except (OSError, SystemExit):  # SystemExit is how rich takes a broken pipe
            self._console.quiet = True
            # What was begun is flushed at exit: it needs a place that takes it.
            with contextlib.suppress(OSError), Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self._console.file.fileno())
            self._on_gone()


def screen(console: Console, clock: Clock, *, quiet: bool = False) -> Screen:
    """The screen that suits where `console` writes."""
    if console.is_terminal and not console.is_dumb_terminal:
        return TableScreen(console, quiet=quiet)
    return PlainScreen(console, clock, quiet=quiet)


def _print(console: Console, report: Report, *, quiet: bool) -> None:
    if not (quiet and isinstance(report, Lines)):
        # One print for all lines: on a terminal each print redraws the table.
        console.print(Text("\n").join(lines_of(report)), soft_wrap=True)


def lines_of(report: Report) -> list[Text]:
    """A report as lines. Text, never markup: what a replica prints must not be read as formatting."""
    match report:
        case Lines(slot=slot, lines=lines):
            return [log_line(slot, line) for line in lines]
        case Started(handle=handle):
            again = f" again (start {handle.attempt + 1})" if handle.attempt else ""
            return [_note(f"{handle.slot} started{again}: process {handle.job}")]
        case Restarting(slot=slot, ending=ending, delay_s=delay_s):
            return [_note(f"{slot} ended with {ending}; starting it again in {delay_s:.1f} s", "yellow")]
        case Ended(slot=slot, fate=fate, reason=reason):
            return [_note(f"{slot} {fate.value}: {reason}", "red" if fate is Fate.FAILED else "")]
        case Stopping() | Killing() | LostSight() | Untracked():
            return [_of_the_run(report)]
        case _:
            assert_never(report)


def _of_the_run(report: Stopping | Killing | LostSight | Untracked) -> Text:
    match report:
        case Stopping(reason=reason, budget_s=budget_s):
            again = "Ctrl-C again kills at once"
            return _note(f"stopping all replicas {reason}; they have {budget_s:g} s; {again}", "yellow")
        case Killing(reason=reason):
            return _note(f"killing what is left: {reason}", "red")
        case LostSight(error=error):
            return _note(f"cannot read the store, the replicas go on: {error}", "yellow")
        case Untracked(error=error):
            return _note(f"cannot note which processes run, they go on: {error}", "yellow")
        case _:
            assert_never(report)


def log_line(slot: str, line: str) -> Text:
    """One line of a replica's log behind its slot."""
    return Text.assemble((f"[{slot}] ", _COLOURS[sum(slot.encode()) % len(_COLOURS)]), line)


def progress(view: RunView) -> str:
    """The run in one line."""
    moving = [replica for replica in view.replicas if replica.at_work and not replica.silent]
    rates = [replica.tokens_per_s for replica in moving if replica.tokens_per_s is not None]
    losses = [replica.loss for replica in view.replicas if replica.loss is not None]
    parts = [f"round {_of(view.closed, view.rounds)} closed{_made_up(view)}"]
    if view.participants is not None:
        parts.append(f"{view.participants} of {len(view.replicas)} replicas in the last")
    if losses:
        parts.append(f"mean loss {sum(losses) / len(losses):.4f}")
    if rates:
        parts.append(f"{sum(rates):,.0f} tokens/s")
    return ", ".join(parts)


def status(view: RunView, width: int) -> Table | Text:
    """The replicas as rows of a terminal that is `width` columns wide, or as lines where a row does not fit."""
    rows: list[dict[str, str]] = [dict(zip(_COLUMNS, _cells(replica), strict=True)) for replica in view.replicas]
    columns = list(_COLUMNS)
    for column in _DROPPED:
        if _width(columns, rows) > width:
            columns.remove(column)
    if width < _NARROWEST or _width(columns, rows) > width:
        return Text("\n".join(plain(view)))
    grid = Table(
        title=f"{view.run}: {progress(view)}",
        title_justify="left",
        caption=agreement_text(view),
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        grid.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*(Text(row[column]) for column in columns))
    return grid


def _width(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> int:
    """How wide a table of these columns is: each its widest cell and a space on either side of the separators."""
    return sum(max(map(len, (column, *(row[column] for row in rows)))) + 2 for column in columns) + 1


def plain(view: RunView) -> list[str]:
    """The run and its replicas as lines: slot, then name=value, without spaces in either but for a quoted state."""
    lines = [f"{view.run}: {progress(view)}", f"store: {view.uri}", f"receipts: {agreement_text(view)}"]
    for replica in view.replicas:
        _, state, *rest = _cells(replica)
        words = (
            f"{name.replace(' ', '_')}={value.replace(' ', '')}" for name, value in zip(_COLUMNS[2:], rest, strict=True)
        )
        lines.append(" ".join([replica.slot, f'state="{state}"' if " " in state else f"state={state}", *words]))
    return lines


def agreement_text(view: RunView) -> str:
    """Whether the replicas hold the same bits, in words."""
    found = view.agreement
    if found is None:
        return "no round yet that two replicas have receipts of"
    average = "equal" if found.average else "DIFFERENT"
    state = "" if found.state is None else f", state {'equal' if found.state else 'DIFFERENT'}"
    return f"round {found.round}, {len(found.slots)} replicas: average {average}{state}"


def as_json(value: DataclassInstance) -> str:
    """A frozen value of ours as one line of JSON."""
    return json.dumps(dataclasses.asdict(value), default=_json)


def summary_lines(summary: Summary) -> list[str]:
    """How an `up` ended, for people."""
    view = summary.view
    lines = [f"{view.run}: {progress(view)}; receipts: {agreement_text(view)}"]
    views = {replica.slot: replica for replica in view.replicas}
    for result in summary.results:
        replica = views.get(result.slot)
        again = f", restarted {result.restarts} times" if result.restarts else ""
        last = f": {result.last_line}" if result.fate is Fate.FAILED and result.last_line else ""
        lines.append(f"  {result.slot}: {result.fate.value}{last}{_traffic(replica)}{again} ({result.reason})")
    if summary.unseen is not None:
        lines.append(f"the store could not be read at the end, this is how it was before: {summary.unseen}")
    if not summary.results:
        lines.append("the run was finished before, nothing was started; `skerry destroy` deletes it")
    elif summary.ok:
        lines.append(f"done in {summary.wall_s:.1f} s")
    else:
        if all(result.fate is Fate.DONE for result in summary.results) and summary.unseen is None:
            closed = f"{view.closed} of {view.rounds} rounds are closed{_made_up(view)}"
            lines.append(f"replicas ended with 0 but {closed}; does the script call connect()?")
        lines.append(f"not done after {summary.wall_s:.1f} s; `skerry up` continues it, `skerry logs` tells why")
    return lines


def to_remove(remains: Remains) -> str:
    """What there is to destroy, for people."""
    parts = [f"{remains.objects} objects ({megabytes(remains.size_bytes)}) at {remains.uri}"]
    if remains.processes:
        parts.append(f"{remains.processes} processes")
    if remains.folder is not None:
        parts.append(f"the folder {remains.folder}")
    return ", ".join(parts)


def megabytes(size_bytes: int) -> str:
    """Bytes for people."""
    return f"{size_bytes / 1e6:.1f} MB"


def _json(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)


def _note(text: str, style: str = "") -> Text:
    return Text(f"skerry: {text}", style=style)


def _traffic(replica: ReplicaView | None) -> str:
    if replica is None or replica.loss is None:
        return ""
    first = "" if replica.loss_first is None else f"{replica.loss_first:.4f} to "
    sent, received = megabytes(replica.uploaded_bytes), megabytes(replica.downloaded_bytes)
    return f", loss {first}{replica.loss:.4f}, {sent} up, {received} down"


def _cells(replica: ReplicaView) -> tuple[str, ...]:
    return (
        replica.slot,
        _state(replica),
        "-" if replica.round is None else str(replica.round),
        "-" if replica.inner_step is None else str(replica.inner_step),
        "-" if replica.loss is None else f"{replica.loss:.4f}",
        "-" if replica.tokens_per_s is None else f"{replica.tokens_per_s:,.0f}",
        ", ".join(replica.waiting_for) or "-",
        f"{replica.uploaded_bytes / 1e6:.1f}",
        f"{replica.downloaded_bytes / 1e6:.1f}",
    )


def _state(replica: ReplicaView) -> str:
    if replica.outcome is not None:
        return replica.outcome
    if replica.phase is None:
        return "not seen"
    return f"{replica.phase}, silent {replica.silent_s:.0f} s" if replica.silent else replica.phase


def _made_up(view: RunView) -> str:
    """What is trained of what the run must come to, where its rounds alone do not end it."""
    if view.due is None:
        return ""
    # Rounded down: what is left of the last round is a round all the same.
    share = 1.0 if view.finished else min(0.999, view.work / view.due)
    return f", {math.floor(1000 * share) / 10:.1f} % trained"


def _of(closed: int, rounds: int | None) -> str:
    return str(closed) if rounds is None else f"{closed}/{rounds}"
