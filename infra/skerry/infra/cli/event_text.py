"""Formats a supervisor's reports and the log lines of replicas.

Returns Text, never markup: what a replica prints must not be read as formatting.
"""

from __future__ import annotations

from typing import assert_never

from rich.text import Text

from skerry.infra.local.up_destroy_events import (
    Event,
    KillingReplicas,
    LogLines,
    ReplicaRestarting,
    ReplicaResult,
    ReplicaStarted,
    StoppingReplicas,
    StoreUnreadable,
    UntrackedProcess,
)
from skerry.infra.run.restart_policy import ReplicaFate

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def lines_of(report: Event) -> list[Text]:
    """A report as lines."""
    match report:
        case LogLines(slot=slot, lines=lines):
            return [log_line(slot, line) for line in lines]
        case ReplicaStarted(handle=handle):
            again = f" again (start {handle.attempt + 1})" if handle.attempt else ""
            return [note(f"{handle.slot} started{again}: process {handle.job}")]
        case ReplicaRestarting(slot=slot, ending=ending, delay_s=delay_s):
            return [note(f"{slot} ended with {ending}; restarting it in {delay_s:.1f} s", "yellow")]
        case ReplicaResult(slot=slot, fate=fate, reason=reason):
            return [note(f"{slot} {fate.value}: {reason}", "red" if fate is ReplicaFate.FAILED else "")]
        case StoppingReplicas() | KillingReplicas() | StoreUnreadable() | UntrackedProcess():
            return [_run_line(report)]
        case _:
            assert_never(report)


def _run_line(report: StoppingReplicas | KillingReplicas | StoreUnreadable | UntrackedProcess) -> Text:
    match report:
        case StoppingReplicas(reason=reason, budget_s=budget_s):
            again = "Ctrl-C again kills them at once"
            return note(f"stopping all replicas {reason}; they have {budget_s:g} s; {again}", "yellow")
        case KillingReplicas(reason=reason):
            return note(f"killing the replicas that are left: {reason}", "red")
        case StoreUnreadable(error=error):
            return note(f"cannot read the store, the replicas keep running: {error}", "yellow")
        case UntrackedProcess(error=error):
            return note(f"cannot record which processes run, they keep running: {error}", "yellow")
        case _:
            assert_never(report)


def log_line(slot: str, line: str) -> Text:
    """A line of a replica's log, prefixed with its slot."""
    return Text.assemble((f"[{slot}] ", _COLOURS[sum(slot.encode()) % len(_COLOURS)]), line)


def note(text: str, style: str = "") -> Text:
    """A line of skerry itself."""
    return Text(f"skerry: {text}", style=style)
