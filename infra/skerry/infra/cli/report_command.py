"""The command `skerry report`: a run as one page, or its figures as files. Never writes to the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from rich.console import Console

from skerry.infra.cli.common import DEFAULT_SPEC, AsJson, Overrides, RunName, errors_as_exit_codes, to_json
from skerry.infra.cli.estimate_command import Parameters  # noqa: TC001  typer reads it
from skerry.infra.cli.open_run import open_run
from skerry.infra.cli.read_report_data import read_sources
from skerry.infra.cost.estimate import parse_parameters
from skerry.infra.number_text import size_text
from skerry.infra.observe.history import read_history
from skerry.infra.report.build_facts import build_facts
from skerry.infra.report.export_files import write_csv, write_json, write_tensorboard
from skerry.infra.report.page import page
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid, SkerryError
from skerry.runtime.output_file import check_output, replacing

if TYPE_CHECKING:
    from rich.status import Status

    from skerry.infra.cli.open_run import OpenedRun
    from skerry.infra.report.facts import ReportFacts

Form = Literal["csv", "json", "tensorboard"]
_OUTPUTS: Final = {"csv": Path("run.csv"), "json": Path("run.json"), "tensorboard": Path("run-tensorboard")}
_PAGE: Final = Path("run.html")


@dataclass(frozen=True, kw_only=True)
class _Report:
    """The output of --json. facts: None for an export, which has `rows`."""

    output: str
    rows: int | None = None
    facts: ReportFacts | None = None


def report(
    run: RunName = str(DEFAULT_SPEC),
    overrides: Overrides = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE|DIR", help="Where to write it; run.html, run.csv and so on."),
    ] = None,
    export: Annotated[
        Form | None, typer.Option("--export", help="The figures of each replica and round, in place of the page.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Read every record for doctor's findings, also of 100 rounds and more.")
    ] = False,
    parameters: Parameters = None,
    as_json: AsJson = False,
) -> None:
    """Write a run as one page: its loss, absences, cost and times. It needs no network to be read."""
    with errors_as_exit_codes(as_json=as_json):
        path = _checked(output, export)
        if parameters is not None:
            parse_parameters(parameters)  # report a typing error before the run is read
        clock = SystemClock()
        console = Console(stderr=True)
        opened = open_run(run, overrides or (), clock)
        with Console(stderr=True, quiet=not console.is_terminal).status("") as status:
            if export is not None:
                rows = _export(opened, export, path, status)
                typer.echo(to_json(_Report(output=str(path), rows=rows)) if as_json else f"{path}: {rows:,} rows")
                return
            sources = read_sources(opened, clock, parameters, status.update, full=full)
            status.update("drawing the page")
            facts = build_facts(sources)
            text = page(facts)
            with replacing(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
        if as_json:
            typer.echo(to_json(_Report(output=str(path), facts=facts)))
            return
        typer.echo(f"{facts.run}: {facts.headline}")
        for answer in facts.answers:
            typer.echo(f"  {answer.question} {answer.short}")
        typer.echo(f"{path}: {size_text(len(text.encode()))}; open it in a browser")


def _checked(output: Path | None, export: Form | None) -> Path:
    """The path to write to. A page or a file of figures is rebuilt from the bucket, so an existing one is replaced."""
    if export == "tensorboard":
        path = output or _OUTPUTS[export]
        if path.exists() and not path.is_dir():
            raise Invalid(f"{path} is a file; name a folder for TensorBoard")
        return path
    path = output or (_PAGE if export is None else _OUTPUTS[export])
    ending = f".{'html' if export is None else export}"
    if path.suffix.lower() != ending:
        raise Invalid(f"{path} does not end with {ending}; an existing file of another kind is never replaced")
    check_output(path, force=True)
    return path


def _export(opened: OpenedRun, form: Form, path: Path, status: Status) -> int:
    status.update(f"reading the history of {opened.store.uri}")
    history = read_history(opened.store)
    if not history.rounds:
        raise SkerryError(f"no round of {history.run.name} is closed yet: there is nothing to export")
    status.update(f"writing {path}")
    if form == "csv":
        return write_csv(history, path)
    if form == "json":
        return write_json(history, path)
    try:
        return write_tensorboard(history, path)
    except ImportError as error:
        raise Invalid(f"the export needs tensorboardX ({error}): pip install 'skerry[tensorboard]'") from error
