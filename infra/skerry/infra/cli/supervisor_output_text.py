"""Formats what a supervisor of local replicas reports, and the log lines of replicas, as text for the terminal.

Returns Text, never markup: what a replica prints must not be read as formatting.
"""

from __future__ import annotations

import logging
from typing import assert_never

from rich.text import Text

from skerry.infra.local.record_killed_replicas import ending_text
from skerry.infra.local.up_destroy_events import (
    Event,
    KillingReplicas,
    LogLines,
    ReplicaRestarting,
    ReplicaResult,
    ReplicaStarted,
    RoundsMissed,
    StoppingReplicas,
    StoreUnreadable,
    UntrackedProcess,
)
from skerry.infra.run.restart_policy import ReplicaFate
from skerry.runtime.structured_logging import level_of

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def lines_of(report: Event, *, verbose: bool = True) -> list[Text]:
    """A report as lines, maybe none. verbose: with the protocol's events in the lines of replicas."""
    match report:
        case LogLines(slot=slot, lines=lines):
            return [log_line(slot, line) for line in lines if is_shown(line, verbose=verbose)]
        case ReplicaStarted(handle=handle):
            again = f" again (start {handle.attempt + 1})" if handle.attempt else ""
            return [note(f"{handle.slot} started{again}: process {handle.job}")]
        case ReplicaRestarting() | ReplicaResult():
            return [_end_line(report)]
        case RoundsMissed(text=text):
            return [warning(text)]
        case StoppingReplicas() | KillingReplicas() | StoreUnreadable() | UntrackedProcess():
            return [_run_line(report)]
        case _:
            assert_never(report)


def _end_line(report: ReplicaRestarting | ReplicaResult) -> Text:
    if isinstance(report, ReplicaRestarting):
        text = ending_text(report.ending, report.last_line)
        return warning(f"{report.slot}: {text}; restarting it in {report.delay_s:.1f} s")
    if report.fate is not ReplicaFate.FAILED:
        done = report.fate is ReplicaFate.DONE
        return note(f"{report.slot} is done" if done else f"{report.slot}: {report.reason}")
    last = f": {report.last_line}" if report.last_line else ""
    return warning(f"{report.slot} failed and is not restarted: {report.reason}{last}", "red")


def _run_line(report: StoppingReplicas | KillingReplicas | StoreUnreadable | UntrackedProcess) -> Text:
    match report:
        case StoppingReplicas(reason=reason, budget_s=budget_s):
            again = "Ctrl-C again kills them at once"
            return note(f"stopping all replicas {reason}; they have {budget_s:g} s; {again}", "yellow")
        case KillingReplicas(reason=reason, slot=slot):
            return note(f"killing {slot or 'the replicas that are left'}: {reason}", "red")
        case StoreUnreadable(error=error):
            return note(f"cannot read the store, the replicas keep running: {error}", "yellow")
        case UntrackedProcess(error=error):
            return note(f"cannot record which processes run, they keep running: {error}", "yellow")
        case _:
            assert_never(report)


def is_shown(line: str, *, verbose: bool) -> bool:
    """True for a line that the script wrote, and for warnings and errors; for every line if verbose."""
    level = level_of(line)
    return verbose or level is None or level >= logging.WARNING


def log_line(slot: str, line: str) -> Text:
    """A line of a replica's log, prefixed with its slot."""
    return Text.assemble((f"[{slot}] ", _COLOURS[sum(slot.encode()) % len(_COLOURS)]), line)


def warning(text: str, style: str = "yellow") -> Text:
    """A line of skerry itself about a replica that does not take part as it should."""
    return note(f"warning: {text}", style)


def note(text: str, style: str = "") -> Text:
    """A line of skerry itself."""
    return Text(f"skerry: {text}", style=style)
