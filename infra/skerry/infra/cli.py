"""The `skerry` command: parses the command line, prints, and turns errors into exit codes. Decides nothing else.

Exit codes: 0 ok, 1 failed, 2 bad usage or spec. With --json the last line on stdout is for programs.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from skerry.infra import destroy as destroying
from skerry.infra import founding, preflight, render, spec, up
from skerry.infra import pins as pinning
from skerry.infra.deploy import commands as deploying
from skerry.infra.image.command import app as image
from skerry.infra.observe import doctor as examining
from skerry.infra.observe import showing
from skerry.infra.observe.look import Observer
from skerry.infra.sample import SAMPLES, SCRIPT
from skerry.infra.tail import Tail
from skerry.infra.terminal import FAILED, AsJson, Overrides, SpecPath, errors_as_exit_codes
from skerry.infra.workspace import Workspace, operator
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid, SkerryError
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.spec import SpecFile
    from skerry.infra.view import RunView
    from skerry.runtime.records import Run
    from skerry.runtime.store import Store

# A heartbeat comes every five seconds at the latest: whoever has not moved when these looks are used up is silent.
_STATUS_LOOK_S = 0.5
_STATUS_LOOKS = 14
_STATUS_PATIENCE_S = 6.0
_STATUS_DEADLINE_S = 20.0
_FOLLOW_S = 0.25

app = typer.Typer(
    name="skerry",
    help="DiLoCo training on ordinary jobs that cannot talk to each other, through nothing but a bucket.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(image)
deploying.register(app)

RunName = Annotated[str, typer.Argument(metavar="RUN", help="The spec, or the URI of the run.")]
_DEFAULT = Path("skerry.yaml")


def main() -> None:
    """Entry point of the `skerry` command."""
    # The runtime's events are for a replica's log; what they tell comes here as a report or an error.
    logging.getLogger("skerry").addHandler(logging.NullHandler())
    app()


@app.command()
def init(
    path: SpecPath = _DEFAULT,
    *,
    target: Annotated[str, typer.Option(metavar="KIND", help=f"Where replicas run: {', '.join(SAMPLES)}.")] = "local",
) -> None:
    """Write a commented sample spec, and a training script beside it; existing files are left alone."""
    script = path.parent / "train" / "train.py"
    with errors_as_exit_codes():
        if target not in SAMPLES:
            raise Invalid(f"no sample for {target!r}; there are {', '.join(SAMPLES)}")
        try:
            with path.open("x") as file:
                file.write(SAMPLES[target])
        except FileExistsError as error:
            raise Invalid(f"{path} exists and was left alone; name another file: skerry init other.yaml") from error
        except FileNotFoundError as error:
            raise Invalid(f"no such folder: {path.parent}") from error
        except OSError as error:
            text = f"cannot write {path}: {error.strerror}; name a file in a folder of yours: skerry init ~/skerry.yaml"
            raise Invalid(text) from error
        what = "written"
        try:
            script.parent.mkdir(exist_ok=True)
            with script.open("x") as file:
                file.write(SCRIPT)
        except FileExistsError:
            what = "left as it was"
        then = f"try it: skerry up {path}" if target == "local" else f"put in your bucket and image: skerry plan {path}"
        typer.echo(f"{path} written, {script} {what}; {then}")


@app.command()
def validate(path: SpecPath = _DEFAULT, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Check a spec, its code and its store; report every problem at once. Creates nothing."""
    with errors_as_exit_codes(as_json=as_json):
        load = preflight.load_deployed if spec.is_deployed(path, overrides or ()) else preflight.load
        found = load(path, overrides or (), SystemClock())
        if as_json:
            typer.echo(render.as_json(_Valid(ok=True, run=found.run_uri, problems=())))
        else:
            typer.echo(f"{path} is valid: {len(found.seats)} replicas, store {found.run_uri}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    typer.echo(spec.schema())


@app.command(name="up")
def up_command(
    path: SpecPath = _DEFAULT,
    overrides: Overrides = None,
    *,
    quiet: Annotated[bool, typer.Option("--quiet", help="Leave out what the replicas write.")] = False,
    approved: Annotated[bool, typer.Option("--auto-approve", help="Do not ask before a cloud is changed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start the run, or continue it, and stay until it is over. Ctrl-C stops it cleanly; a second one kills.

    In a cloud: apply, and watch. Ctrl-C ends the watching only.
    """
    with errors_as_exit_codes(as_json=as_json):
        clock = SystemClock()
        if spec.is_deployed(path, overrides or ()):
            found = preflight.load_deployed(path, overrides or ())
            deploying.up(found, approved=approved, quiet=quiet, as_json=as_json)
            return
        found = preflight.load(path, overrides or (), clock)
        console = Console(stderr=as_json)
        screen = render.EnduringScreen(
            render.screen(console, clock, quiet=quiet),
            console,
            lambda: launch.supervisor.stop("because its output is gone", insist=False),
        )
        tell = up.Callbacks(on_report=screen.report, on_view=screen.view)
        with up.launch(found, os.environ, clock, tell) as launch:
            verb = "continues" if launch.continued else "starts"
            console.print(f"run {launch.run.name} {verb}: {found.run_uri} code={launch.code[:12]}", soft_wrap=True)
            with screen:
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
    with errors_as_exit_codes(as_json=as_json):
        loaded = spec.load(path, overrides or ())
        if loaded.deployed:
            deploying.status(preflight.load_deployed(path, overrides or ()), as_json=as_json)
            return
        view = _watched(loaded)
        if as_json:
            typer.echo(render.as_json(view))
            return
        console = Console()
        if console.is_terminal and not console.is_dumb_terminal:
            console.print(render.status(view, console.width))
        else:
            typer.echo("\n".join(render.plain(view)))
        if not view.finished and Workspace(loaded.work_folder).holder() is None:
            typer.echo("nothing supervises it on this machine; `skerry up` continues it")


@app.command()
def doctor(
    run: RunName = str(_DEFAULT),
    overrides: Overrides = None,
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Read and verify payloads and checkpoints too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Walk the run's log and name what is wrong, where, and what to do. Changes nothing.

    Of a run in a cloud that was not applied yet: rights, quotas, offers and the image, before anything is made.
    """
    with errors_as_exit_codes(as_json=as_json):
        clock = SystemClock()
        if "://" not in run and spec.load(Path(run), overrides or ()).deployed:
            healthy = deploying.doctor(preflight.load_deployed(Path(run), overrides or ()), deep=deep, as_json=as_json)
            raise typer.Exit(0 if healthy else FAILED)
        store = open_store(_run_uri(run, overrides or ()), clock=clock, deadline_s=_STATUS_DEADLINE_S)
        if deep:
            with showing.reading(Console(stderr=True), clock) as on_progress:
                found = examining.visit(store, on_progress)
        else:
            found = examining.visit(store)
        console = Console()
        if as_json:
            typer.echo(render.as_json(found))
        elif console.is_terminal and not console.is_dumb_terminal:
            console.print(showing.table(found, console.width))
        else:
            typer.echo("\n".join(showing.plain(found)))
        if not found.ok:
            raise typer.Exit(FAILED)


@app.command()
def pin(
    run: RunName,
    round_number: Annotated[int | None, typer.Argument(metavar="ROUND", min=0, show_default=False)] = None,
    overrides: Overrides = None,
    *,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for people.")] = "",
    show: Annotated[bool, typer.Option("--list", help="Show what is pinned instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Keep a round's checkpoint until it is unpinned; or list what is pinned."""
    with errors_as_exit_codes(as_json=as_json):
        if show == (round_number is not None) or (show and reason):
            raise Invalid("name the round to pin: skerry pin RUN 120; or see what is pinned: skerry pin RUN --list")
        store, found = _run_at(run, overrides or ())
        if round_number is None:
            pinned = pinning.pins(store, found)
            lines = [str(one) for one in pinned] or ["nothing is pinned"]
            typer.echo(render.as_json(_Pins(pins=pinned)) if as_json else "\n".join(lines))
            return
        now = SystemClock().utc_text()
        made = pinning.pin(store, found, round_number, by=operator(), reason=reason, now=now)
        typer.echo(render.as_json(made) if as_json else f"pinned {made}")


@app.command()
def unpin(
    run: RunName,
    round_number: Annotated[int, typer.Argument(metavar="ROUND", min=0)],
    overrides: Overrides = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Let a pinned checkpoint go: it is deleted with the others of its age."""
    with errors_as_exit_codes(as_json=as_json):
        gone = pinning.unpin(*_run_at(run, overrides or ()), round_number)
        typer.echo(render.as_json(gone) if as_json else f"unpinned {gone}")


@app.command()
def logs(
    path: SpecPath = _DEFAULT,
    overrides: Overrides = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is down.")] = False,
    replica: Annotated[str | None, typer.Option(metavar="SLOT", help="Only this one.")] = None,
) -> None:
    """Print what the replicas on this machine wrote."""
    with errors_as_exit_codes():
        loaded = spec.load(path, overrides or ())
        if loaded.deployed:
            deploying.logs(preflight.load_deployed(path, overrides or ()), follow=follow, replica=replica)
            return
        workspace = Workspace(loaded.work_folder)
        tails: dict[Path, Tail] = {}
        console = Console()
        clock = SystemClock()
        while True:
            # Asked before reading: what is written until the lock is released is read below.
            going = follow and workspace.holder() is not None
            for slot, file in _log_files(workspace, replica):
                if file not in tails:
                    tails[file] = Tail(file)
                    if attempt := workspace.attempt_of(file):
                        console.print(render.log_line(slot, f"--- start {attempt + 1} ---"), soft_wrap=True)
                for line in tails[file].lines() if going else tails[file].close():
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
    data: Annotated[bool, typer.Option("--data", help="In a cloud: what was trained, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the run: leftover processes, its objects in the store, its folder on this machine."""
    with errors_as_exit_codes(as_json=as_json):
        clock = SystemClock()
        found = spec.load(path, overrides or ())
        if found.deployed:
            found = preflight.load_deployed(path, overrides or ())
            deploying.destroy(found, data=data, approved=yes, as_json=as_json)
            return
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
class _Pins:
    pins: tuple[pinning.Pinned, ...]


def _run_uri(run: str, overrides: Sequence[str]) -> str:
    """The run's own prefix, named by its URI or by a spec."""
    if "://" not in run:
        return spec.load(Path(run), overrides).run_uri
    if overrides:
        raise Invalid("--set changes a spec, and this names a run by its URI; leave one of them out")
    return run.rstrip("/")


def _run_at(run: str, overrides: Sequence[str]) -> tuple[Store, Run]:
    """The store and the run.json of a run that was started."""
    store = open_store(_run_uri(run, overrides), deadline_s=_STATUS_DEADLINE_S)
    found = founding.find_run(store)
    if found is None:
        raise SkerryError(f"no run at {store.uri}; name a spec, or the URI of a run's own prefix")
    return store, found


def _watched(found: SpecFile) -> RunView:
    """The run after a few looks: as many as it takes to see every replica that is at work move, or not to."""
    clock = SystemClock()
    store = open_store(found.run_uri, clock=clock, deadline_s=_STATUS_DEADLINE_S)
    run = founding.find_run(store)
    if run is None:
        raise SkerryError(f"no run at {found.run_uri}; start it with `skerry up`")
    observer = Observer(store, run, clock)
    view = observer.look()
    for _ in range(_STATUS_LOOKS):
        if all(not replica.at_work or replica.silent_s == 0 for replica in view.replicas):
            break
        clock.pause(_STATUS_LOOK_S)
        view = observer.look(_STATUS_PATIENCE_S)
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
