"""The command `skerry runs`: the runs below a prefix of a store, as lines or JSON."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from skerry.infra.cli.common import (
    DEFAULT_SPEC,
    AsJson,
    absolute,
    errors_as_exit_codes,
    is_uri,
    print_lines,
    run_uri,
    to_json,
)
from skerry.infra.cli.open_run import OPENED_RUN_DEADLINE_S, prepare_if_deployed
from skerry.infra.observe.list_runs import ListedRun, list_runs
from skerry.runtime.clock import SystemClock
from skerry.runtime.store import list_folders, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))

Place = Annotated[
    str, typer.Argument(metavar="STORE", help="A URI such as s3://bucket/runs, a folder, or a spec with a store.")
]


@dataclass(frozen=True, kw_only=True)
class _Runs:
    uri: str
    runs: tuple[ListedRun, ...]


def runs(place: Place = str(DEFAULT_SPEC), *, as_json: AsJson = False) -> None:
    """List the runs under a prefix of a store. The latest activity comes first."""
    with errors_as_exit_codes(as_json=as_json):
        clock = SystemClock()
        now = datetime.fromisoformat(clock.utc_text()).timestamp()
        path = Path(place)
        deployment = None if path.is_dir() else prepare_if_deployed(place, (), clock)
        if deployment is not None:
            uri = deployment.run.rpartition("/")[0]
            listed = list_runs(uri, deployment.open_source, deployment.list_folders, now)
        else:
            uri = path.resolve().as_uri() if path.is_dir() else _uri_of(place)
            open_at = functools.partial(open_store, clock=clock, deadline_s=OPENED_RUN_DEADLINE_S)
            listed = list_runs(uri, open_at, functools.partial(list_folders, clock=clock), now)
        if as_json:
            typer.echo(to_json(_Runs(uri=uri, runs=tuple(listed))))
        elif listed:
            print_lines(run_lines(listed, now))
        else:
            typer.echo(f"no runs at {uri}; `skerry up` starts one")


def _uri_of(place: str) -> str:
    return absolute(place) if is_uri(place) else run_uri(place, ()).rpartition("/")[0]


def run_lines(listed: Sequence[ListedRun], now: float) -> Iterator[str]:
    """A header, and a line for each run."""
    rows = [("run", "rounds", "state", "last activity")]
    for run in listed:
        rounds = str(run.closed) if run.rounds is None else f"{run.closed}/{run.rounds}"
        ago = "-" if run.last_activity is None else _ago(now - run.last_activity)
        rows.append((run.name, rounds, run.state, ago))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for *cells, last in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), last])


def _ago(seconds: float) -> str:
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{int(seconds / length)} {unit} ago"
    return "now"
