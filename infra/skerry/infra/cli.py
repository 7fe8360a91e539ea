"""The `skerry` command: parses the command line, prints, and turns errors into exit codes. Decides nothing else.

Exit codes: 0 ok, 1 failed, 2 bad usage or spec. With --json the last line on stdout is for programs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from skerry.infra import destroy as destroying
from skerry.infra import preflight, render, spec, up
from skerry.infra.errors import SpecInvalid
from skerry.infra.observe.look import Observer
from skerry.infra.sample import SAMPLE
from skerry.infra.supervise import stopped_by_signals
from skerry.infra.tail import Tail
from skerry.infra.workspace import Workspace
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid, SkerryError
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from skerry.infra.spec import SpecFile
    from skerry.infra.view import RunView

FAILED = 1
BAD_USAGE = 2
# A heartbeat comes every five seconds at the latest; whoever has not moved by then is shown as last heard of.
_STATUS_LOOK_S = 0.5
_STATUS_LOOKS = 12
_FOLLOW_S = 0.25

app = typer.Typer(
    name="skerry",
    help="DiLoCo training on ordinary jobs that cannot talk to each other, through nothing but a bucket.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec.", show_default=True)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field: outer.rounds=40.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout, for programs.")]
_DEFAULT = Path("skerry.yaml")


def main() -> None:
    """Entry point of the `skerry` command."""
    app()


@app.command()
def init(path: SpecPath = _DEFAULT) -> None:
    """Write a commented sample spec; an existing file is left alone."""
    with _errors_as_exit_codes():
        try:
            with path.open("x") as file:
                file.write(SAMPLE)
        except FileExistsError as error:
            raise Invalid(f"{path} exists and was left alone; name another file: skerry init other.yaml") from error
        except FileNotFoundError as error:
            raise Invalid(f"no such folder: {path.parent}") from error
        typer.echo(f"{path} written; put a training script at train/train.py, then: skerry validate {path}")


@app.command()
def validate(path: SpecPath = _DEFAULT, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Check a spec, its code and its store; report every problem at once. Creates nothing."""
    with _errors_as_exit_codes(as_json=as_json):
        found = preflight.load(path, overrides or (), SystemClock())
        if as_json:
            typer.echo(render.as_json(_Valid(ok=True, run=found.run_uri, problems=())))
        else:
            typer.echo(f"{path} is valid: {len(found.seats)} replicas, store {found.run_uri}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    typer.echo(spec.schema())


@app.command(name="up")
def up_command(path: SpecPath = _DEFAULT, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Start the run, or continue it, and stay until it is over. Ctrl-C stops it cleanly; a second one kills."""
    with _errors_as_exit_codes(as_json=as_json):
        clock = SystemClock()
        found = preflight.load(path, overrides or (), clock)
        console = Console(stderr=as_json)
        screen = render.screen(console)
        tell = up.Callbacks(on_report=screen.report, on_view=screen.view)
        with up.launch(found, os.environ, clock, tell) as launch:
            verb = "continues" if launch.continued else "starts"
            console.print(f"run {launch.run.name} {verb}: {found.run_uri} code={launch.code[:12]}", soft_wrap=True)
            with stopped_by_signals(launch.supervisor), screen:
                summary = launch.supervise()
                screen.view(summary.view)
        for line in render.summary_lines(summary):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        if as_json:
            typer.echo(render.as_json(summary))
        if not summary.ok:
            raise typer.Exit(FAILED)


@app.command()
def status(path: SpecPath = _DEFAULT, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Show where the run is, from its store alone."""
    with _errors_as_exit_codes(as_json=as_json):
        view = _watched(spec.load(path, overrides or ()))
        if as_json:
            typer.echo(render.as_json(view))
            return
        console = Console()
        if console.is_terminal:
            console.print(render.table(view))
        else:
            typer.echo("\n".join(render.plain(view)))


@app.command()
def logs(
    path: SpecPath = _DEFAULT,
    overrides: Overrides = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is down.")] = False,
    replica: Annotated[str | None, typer.Option(metavar="SLOT", help="Only this one.")] = None,
) -> None:
    """Print what the replicas on this machine wrote."""
    with _errors_as_exit_codes():
        workspace = Workspace(spec.load(path, overrides or ()).work_folder)
        tails: dict[Path, tuple[str, Tail]] = {}
        console = Console()
        clock = SystemClock()
        while True:
            # Asked before reading: what is written until the lock is released is read below.
            going = follow and workspace.holder() is not None
            for slot, file in _log_files(workspace, replica):
                tails.setdefault(file, (slot, Tail(file)))
            for slot, tail in tails.values():
                for line in tail.lines() if going else tail.close():
                    console.print(render.log_line(slot, line), soft_wrap=True)
            if not going:
                return
            clock.pause(_FOLLOW_S)


@app.command()
def destroy(
    path: SpecPath = _DEFAULT,
    overrides: Overrides = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the run: leftover processes, its objects in the store, its folder on this machine."""
    with _errors_as_exit_codes(as_json=as_json):
        clock = SystemClock()
        found = spec.load(path, overrides or ())
        remains = destroying.survey(found, clock)
        if remains:
            if not yes:
                _confirm(remains)
            remains = destroying.destroy(found, clock)
        if as_json:
            typer.echo(render.as_json(remains))
        else:
            typer.echo(
                f"removed {render.to_remove(remains)}" if remains else f"nothing to destroy: no run at {found.run_uri}"
            )


@dataclass(frozen=True, kw_only=True)
class _Valid:
    ok: bool
    run: str
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Failure:
    ok: bool
    problems: tuple[str, ...]


@contextlib.contextmanager
def _errors_as_exit_codes(*, as_json: bool = False) -> Generator[None]:
    """Expected errors end the process with their message and the documented code, without a traceback."""
    try:
        yield
    except SpecInvalid as error:
        raise _failed([str(problem) for problem in error.problems], BAD_USAGE, as_json=as_json) from error
    except Invalid as error:
        raise _failed([str(error)], BAD_USAGE, as_json=as_json) from error
    except BrokenPipeError:
        raise  # typer ends quietly for `skerry logs | head`
    except (SkerryError, OSError) as error:
        raise _failed([str(error)], FAILED, as_json=as_json) from error
    except KeyboardInterrupt as error:
        raise _failed(["interrupted"], FAILED, as_json=as_json) from error


def _failed(problems: list[str], code: int, *, as_json: bool) -> typer.Exit:
    for problem in problems:
        typer.echo(problem, err=True)
    if as_json:
        typer.echo(render.as_json(_Failure(ok=False, problems=tuple(problems))))
    return typer.Exit(code)


def _watched(found: SpecFile) -> RunView:
    """The run after a few looks: as many as it takes to see every replica that is at work move."""
    clock = SystemClock()
    store = open_store(found.run_uri, clock=clock)
    run = up.find_run(store)
    if run is None:
        raise SkerryError(f"no run at {found.run_uri}; start it with `skerry up`")
    observer = Observer(store, run, clock)
    view = observer.look()
    for _ in range(_STATUS_LOOKS):
        if all(not render.runs(replica) or replica.silent_s == 0 for replica in view.replicas):
            break
        clock.pause(_STATUS_LOOK_S)
        view = observer.look()
    return view


def _log_files(workspace: Workspace, only: str | None) -> Iterator[tuple[str, Path]]:
    found = workspace.logs()
    if only is not None and found and only not in found:
        raise Invalid(f"no replica {only!r} has run here; there are {', '.join(found)}")
    if not found and workspace.holder() is None:
        raise SkerryError("no logs on this machine; `skerry up` writes them")
    for slot, files in found.items():
        if only in (None, slot):
            yield from ((slot, file) for file in files)


def _confirm(remains: destroying.Remains) -> None:
    if not sys.stdin.isatty():
        raise Invalid(f"{render.to_remove(remains)}; nothing was removed: repeat with --yes")
    if not typer.confirm(f"{render.to_remove(remains)}. Destroy it?"):
        raise typer.Exit(FAILED)
