"""How a run looks: a live table on a terminal, plain lines elsewhere, JSON for programs. Decides nothing."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import TYPE_CHECKING, Protocol, Self, assert_never

from rich.live import Live
from rich.table import Table
from rich.text import Text

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
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import Console

    from skerry.infra.view import ReplicaView, RunView

# Replicas beat every five seconds at the latest; a longer silence is a process that hangs, or is gone.
SILENT_S = 15.0
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_COLUMNS = ("replica", "state", "round", "inner step", "loss", "tokens/s", "waiting for", "uploaded", "downloaded")
_NUMBERS = frozenset({"round", "inner step", "loss", "tokens/s", "uploaded", "downloaded"})


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
    """A line for every report, and one whenever a round was closed: for files, pipes and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._closed: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def report(self, report: Report) -> None:
        """Print it."""
        # One print for all lines: on a terminal each print redraws the table.
        self._console.print(Text("\n").join(lines_of(report)), soft_wrap=True)

    def view(self, view: RunView) -> None:
        """Print a line if a round was closed since the last one."""
        if view.closed != self._closed:
            self._closed = view.closed
            self._console.print(Text(progress(view)), soft_wrap=True)


class TableScreen:
    """A table of the replicas that stays below everything that is printed: for terminals."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def report(self, report: Report) -> None:
        """Print it above the table."""
        # One print for all lines: on a terminal each print redraws the table.
        self._console.print(Text("\n").join(lines_of(report)), soft_wrap=True)

    def view(self, view: RunView) -> None:
        """Redraw the table."""
        self._live.update(table(view))


def screen(console: Console) -> Screen:
    """The screen that suits where `console` writes."""
    return TableScreen(console) if console.is_terminal else PlainScreen(console)


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
            return [_note(f"{slot} {fate.value}: {reason}", "red" if fate.value == "failed" else "")]
        case Stopping() | Killing() | LostSight():
            return [_of_the_run(report)]
        case _:
            assert_never(report)


def _of_the_run(report: Stopping | Killing | LostSight) -> Text:
    match report:
        case Stopping(reason=reason, budget_s=budget_s):
            again = "Ctrl-C again kills at once"
            return _note(f"stopping all replicas {reason}; they have {budget_s:g} s; {again}", "yellow")
        case Killing(reason=reason):
            return _note(f"killing what is left: {reason}", "red")
        case LostSight(error=error):
            return _note(f"cannot read the store, the replicas go on: {error}", "yellow")
        case _:
            assert_never(report)


def log_line(slot: str, line: str) -> Text:
    """One line of a replica's log behind its slot."""
    return Text.assemble((f"[{slot}] ", _COLOURS[sum(slot.encode()) % len(_COLOURS)]), line)


def progress(view: RunView) -> str:
    """The run in one line."""
    rates = [replica.tokens_per_s for replica in view.replicas if replica.tokens_per_s is not None and runs(replica)]
    losses = [replica.loss for replica in view.replicas if replica.loss is not None]
    parts = [f"round {_of(view.closed, view.rounds)} closed"]
    if view.participants is not None:
        parts.append(f"{view.participants} of {len(view.replicas)} replicas in the last")
    if losses:
        parts.append(f"mean loss {sum(losses) / len(losses):.4f}")
    if rates:
        parts.append(f"{sum(rates):,.0f} tokens/s")
    return ", ".join(parts)


def table(view: RunView) -> Table:
    """The replicas as rows."""
    grid = Table(title=f"{view.run}: {progress(view)}", title_justify="left", caption=agreement_text(view))
    grid.caption_justify = "left"
    for column in _COLUMNS:
        grid.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    for replica in view.replicas:
        grid.add_row(*map(Text, _cells(replica)))
    return grid


def plain(view: RunView) -> list[str]:
    """The run and its replicas as lines: slot, then name=value."""
    lines = [f"{view.run}: {progress(view)}", f"store: {view.uri}", f"receipts: {agreement_text(view)}"]
    for replica in view.replicas:
        fields = zip(_COLUMNS[1:], _cells(replica)[1:], strict=True)
        words = (f"{name.replace(' ', '_')}={value.replace(' ', '')}" for name, value in fields)
        lines.append(" ".join([replica.slot, *words]))
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
        lines.append(f"  {result.slot}: {result.fate.value}{_traffic(replica)}{again} ({result.reason})")
    if not summary.results:
        lines.append("the run was finished before, nothing was started; `skerry destroy` deletes it")
    elif summary.ok:
        lines.append(f"done in {summary.wall_s:.1f} s")
    else:
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
        megabytes(replica.uploaded_bytes),
        megabytes(replica.downloaded_bytes),
    )


def _state(replica: ReplicaView) -> str:
    if replica.outcome is not None:
        return replica.outcome
    if replica.phase is None:
        return "not seen"
    if replica.silent_s is not None and replica.silent_s >= SILENT_S and runs(replica):
        return f"{replica.phase}, silent {replica.silent_s:.0f} s"
    return replica.phase


def runs(replica: ReplicaView) -> bool:
    """Whether a replica says that it is at work."""
    return replica.outcome is None and replica.phase is not None and replica.phase not in {"finished", "left", "failed"}


def _of(closed: int, rounds: int | None) -> str:
    return str(closed) if rounds is None else f"{closed}/{rounds}"
