"""The command line application: registers every command, and has those for runs on this machine.

A spec of a cloud goes to `up_status_destroy_in_clouds`. Exit codes: see `common`. `fast_help_entry_point` has the table
of `skerry --help`: a new command needs a line there. With --json the last line on stdout is for programs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from skerry.infra import targets
from skerry.infra.cli import plan_apply_import_commands, recipes_for_init, run_text, up_status_destroy_in_clouds
from skerry.infra.cli.artifacts_command import artifacts
from skerry.infra.cli.common import (
    CLOUD,
    DEFAULT_SPEC,
    FAILED,
    NOT_BY_ALL,
    AsJson,
    Overrides,
    RunName,
    SpecPath,
    TakeOver,
    Verbose,
    as_typed,
    ask_take_over,
    confirm,
    errors_as_exit_codes,
    is_uri,
    load_spec,
    open_access,
    print_lines,
    run_uri,
    to_json,
)
from skerry.infra.cli.compute_cost_so_far import read_spending
from skerry.infra.cli.doctor_command import doctor
from skerry.infra.cli.export_model_command import export
from skerry.infra.cli.extend_command import extend
from skerry.infra.cli.live_run_table import EnduringScreen, open_screen
from skerry.infra.cli.open_run import open_run
from skerry.infra.cli.push_image_commands import app as image_app
from skerry.infra.cli.replicate_restore_commands import replicate, restore_run
from skerry.infra.cli.report_command import report
from skerry.infra.cli.run_screen import RunScreen
from skerry.infra.cli.runs_command import runs
from skerry.infra.cli.sandbox_command import sandbox
from skerry.infra.cli.status_participation import mirrors_so_far, participation_so_far
from skerry.infra.cli.supervisor_output_text import is_shown, log_line
from skerry.infra.cli.watch_command import as_json_line, settled_view, watch
from skerry.infra.local import destroy as local_destroy
from skerry.infra.local import up as local_up
from skerry.infra.local.follow_log_file import LogTail
from skerry.infra.local.workspace import Workspace, operator_name
from skerry.infra.observe.doctor.read_log import read_starts
from skerry.infra.observe.history import read_history
from skerry.infra.observe.observer import Observer
from skerry.infra.run import check_machine_and_store, checkpoint_pins, code_archive, run_record
from skerry.infra.spec import model
from skerry.infra.spec.store_uri import FILE
from skerry.infra.spec_and_store_errors import SpecInvalid
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid, SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.find_moved_run import read_elsewhere
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.observe.read_changed_settings import RunSettings
    from skerry.infra.observe.run_view import RunView
    from skerry.runtime.store import Store

STATUS_DEADLINE_S = 20.0
_FOLLOW_S = 0.25
# Folders above a run in a folder of this machine, one of which may have its spec: .skerry/store/my-run is usual.
_NEAR = 3

app = typer.Typer(
    name="skerry",
    help="DiLoCo training on ordinary jobs that cannot reach each other, only a bucket.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(image_app)
app.command()(export)
app.command()(artifacts)
app.command()(runs)
app.command()(watch)
app.command()(report)
app.command()(extend)
app.command()(doctor)
app.command()(sandbox)
app.command()(replicate)
app.command("restore")(restore_run)
plan_apply_import_commands.register(app)


@dataclass(frozen=True, kw_only=True)
class _Valid:
    ok: bool
    run: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Pins:
    pins: tuple[checkpoint_pins.PinnedCheckpoint, ...]


def main() -> None:
    """Entry point of the `skerry` command."""
    # The runtime's events are for a replica's log; here they are reported as text or raised as errors.
    logging.getLogger("skerry").addHandler(logging.NullHandler())
    app()


@app.command()
def init(
    path: SpecPath = DEFAULT_SPEC,
    *,
    target: Annotated[
        str, typer.Option(metavar="KIND", help=f"Where replicas run: {', '.join(targets.samples())}.")
    ] = "local",
    recipe: Annotated[
        str,
        typer.Option("--from", metavar="RECIPE", help=f"What the script is like: {', '.join(recipes_for_init.FILES)}."),
    ] = recipes_for_init.PLAIN,
) -> None:
    """Write a commented sample spec, and a training script next to it. Existing files are not changed."""
    script = path.parent / "train" / "train.py"
    with errors_as_exit_codes():
        text_of_script = recipes_for_init.script_of(recipe)
        if target not in targets.samples():
            raise Invalid(f"no sample for {target!r}; choose one of {', '.join(targets.samples())}")
        try:
            with path.open("x") as file:
                file.write(targets.samples()[target])
        except FileExistsError as error:
            raise Invalid(f"{path} exists and was not changed; name another file: skerry init other.yaml") from error
        except FileNotFoundError as error:
            raise Invalid(f"no such folder: {path.parent}") from error
        except OSError as error:
            text = f"cannot write {path}: {error.strerror}; name a file in a folder of yours: skerry init ~/skerry.yaml"
            raise Invalid(text) from error
        result = "written"
        try:
            script.parent.mkdir(exist_ok=True)
            with script.open("x") as file:
                file.write(text_of_script)
        except FileExistsError:
            result = "not changed"
        hint = f"try it: skerry up {path}" if target == "local" else f"put in your bucket and image: skerry plan {path}"
        typer.echo(f"{path} written, {script} {result}; {hint}")


@app.command()
def validate(path: SpecPath = DEFAULT_SPEC, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Check a spec and its code, and report every problem at once. Asks no store and no cloud, and creates nothing."""
    with errors_as_exit_codes(as_json=as_json):
        load = (
            check_machine_and_store.load_deployed
            if model.is_deployed(path, targets.kinds(), overrides or ())
            else check_machine_and_store.load_offline
        )
        spec = load(path, targets.kinds(), overrides or ())
        note = code_archive.select(spec.code_path).note
        notes = () if note is None else (note,)
        if as_json:
            typer.echo(to_json(_Valid(ok=True, run=spec.run_uri, problems=(), notes=notes)))
            return
        count = len(spec.replica_slots)
        typer.echo(f"{path} is valid: {count} replica{'' if count == 1 else 's'}, store {spec.run_uri}")
        print_lines(f"note: {line}" for line in notes)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    typer.echo(model.schema(targets.kinds()))


@app.command()
def up(
    path: SpecPath = DEFAULT_SPEC,
    overrides: Overrides = None,
    *,
    quiet: Annotated[bool, typer.Option("--quiet", help="Leave out the lines of the replicas.")] = False,
    verbose: Verbose = False,
    approved: Annotated[bool, typer.Option("--auto-approve", help="Do not ask before a cloud is changed.")] = False,
    take_over: TakeOver = False,
    as_json: AsJson = False,
) -> None:
    """Start or continue the run and wait until it is over. Ctrl-C stops it cleanly; a second one kills it.

    In a cloud: apply, then watch. Ctrl-C ends the watch only.
    """
    with errors_as_exit_codes(as_json=as_json):
        typed = as_typed("export", path, overrides or ())
        if model.is_deployed(path, targets.kinds(), overrides or ()):
            spec = check_machine_and_store.load_deployed(path, targets.kinds(), overrides or ())
            with errors_as_exit_codes(as_json=as_json, service=CLOUD):
                answers = up_status_destroy_in_clouds.Answers(approved=approved, take_over=take_over)
                up_status_destroy_in_clouds.up(spec, typed, answers, quiet=quiet, as_json=as_json)
            return
        clock = SystemClock()
        with contextlib.suppress(SpecInvalid):  # the next line reports all problems at once
            open_access(load_spec(str(path), overrides or ()))
        spec = check_machine_and_store.load(path, targets.kinds(), overrides or (), clock)
        console = Console(stderr=as_json)
        screen = EnduringScreen(
            open_screen(console, clock, quiet=quiet, verbose=verbose),
            console,
            lambda: launch.supervisor.stop("because its output was closed", insist=False),
        )
        if (changed := local_up.change_running(spec, clock)) is not None:
            line = f"run {spec.spec.run} is up, and expects {', '.join(changed.slots)} now; see its `skerry up`"
            typer.echo(to_json(changed) if as_json else line)
            return
        callbacks = local_up.Callbacks(on_event=screen.report, on_view=screen.view)
        ask = functools.partial(ask_take_over, approved=take_over)
        with local_up.launch(spec, os.environ, clock, callbacks, ask_take_over=ask) as launch:
            verb = "continues" if launch.continued else "starts"
            if not launch.continued and (initial := launch.run.init_from) is not None:
                verb = f"starts from {initial.uri}@{initial.round}"
            notes = [] if launch.note is None else [Text(f"note: {launch.note}", style="yellow")]
            line = f"run {launch.run.name} {verb}: {spec.run_uri} code={launch.code[:12]}"
            print_lines([line, *notes], console)
            with screen:
                summary = launch.supervise()
                screen.view(summary.view)
        print_lines([*run_text.summary_lines(summary), *run_text.model_lines(summary.view, typed)], console)
        if as_json:
            typer.echo(to_json(summary, by_all=summary.by_all))
        if not summary.ok:
            raise typer.Exit(FAILED)
        if not summary.by_all:
            raise typer.Exit(NOT_BY_ALL)


@app.command()
def status(run: RunName = str(DEFAULT_SPEC), overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Show the progress of the run, read from its store alone."""
    with errors_as_exit_codes(as_json=as_json):
        spec = None if is_uri(run) else load_spec(run, overrides or ())
        if spec is not None and spec.deployed:
            spec = check_machine_and_store.load_deployed(Path(run), targets.kinds(), overrides or ())
            with errors_as_exit_codes(as_json=as_json, service=CLOUD):
                up_status_destroy_in_clouds.status(spec, as_json=as_json)
            return
        store, settings = _open_run(run, overrides or ())
        clock = SystemClock()
        view = settled_view(Observer(store, settings, clock, read_history(store)), clock)
        money = read_spending()(view)
        if as_json:
            typer.echo(as_json_line(view, money))
            return
        console = Console()
        if console.is_terminal and not console.is_dumb_terminal:
            console.print(RunScreen(view=view, spending=money))
        else:
            print_lines([*run_text.plain(view), *money.lines], console)
        print_lines(participation_so_far(store, view))
        if spec is not None:
            print_lines(
                mirrors_so_far(spec, store, view.closed, {}, lambda uri: open_store(uri, deadline_s=STATUS_DEADLINE_S))
            )
        if spec is not None and not view.finished and Workspace(spec.work_folder).lock_holder() is None:
            typer.echo("no process on this machine supervises it; `skerry up` continues it")


@app.command()
def pin(
    run: RunName = str(DEFAULT_SPEC),
    round_number: Annotated[int | None, typer.Argument(metavar="ROUND", min=0, show_default=False)] = None,
    overrides: Overrides = None,
    *,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for people.")] = "",
    show: Annotated[bool, typer.Option("--list", help="Show the pins instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Keep a round's checkpoint until it is unpinned; or list the pins."""
    with errors_as_exit_codes(as_json=as_json):
        run, round_number = _run_and_round(run, round_number)
        if show == (round_number is not None) or (show and reason):
            raise Invalid("name the round to pin: skerry pin 120; or list the pins: skerry pin --list")
        store, settings = _open_run(run, overrides or ())
        if round_number is None:
            pinned = checkpoint_pins.pins(store, settings.now)
            lines = [str(checkpoint) for checkpoint in pinned] or ["nothing is pinned"]
            typer.echo(to_json(_Pins(pins=pinned)) if as_json else "\n".join(lines))
            return
        now = SystemClock().utc_text()
        checkpoint = checkpoint_pins.pin(store, settings.now, round_number, by=operator_name(), reason=reason, now=now)
        typer.echo(to_json(checkpoint) if as_json else f"pinned {checkpoint}")


@app.command()
def unpin(
    run: RunName = str(DEFAULT_SPEC),
    round_number: Annotated[int | None, typer.Argument(metavar="ROUND", min=0, show_default=False)] = None,
    overrides: Overrides = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Unpin a checkpoint: it is deleted with the others of its age."""
    with errors_as_exit_codes(as_json=as_json):
        run, round_number = _run_and_round(run, round_number)
        if round_number is None:
            raise Invalid("name the round to unpin: skerry unpin 120; `skerry pin --list` shows the pinned ones")
        store, settings = _open_run(run, overrides or ())
        checkpoint = checkpoint_pins.unpin(store, settings.now, round_number)
        typer.echo(to_json(checkpoint) if as_json else f"unpinned {checkpoint}")


@app.command()
def logs(
    run: RunName = str(DEFAULT_SPEC),
    overrides: Overrides = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run is down.")] = False,
    replica: Annotated[str | None, typer.Option(metavar="SLOT", help="Only this one.")] = None,
    verbose: Verbose = False,
) -> None:
    """Print the lines that the replicas wrote."""
    with errors_as_exit_codes():
        spec = None if is_uri(run) else load_spec(run, overrides or ())
        if spec is not None and spec.deployed:
            spec = check_machine_and_store.load_deployed(Path(run), targets.kinds(), overrides or ())
            with errors_as_exit_codes(service=CLOUD):
                up_status_destroy_in_clouds.logs(spec, follow=follow, replica=replica, verbose=verbose)
            return
        only = replica if replica is None or spec is None else spec.spec.slot(replica)
        workspace = _workspace_near(run_uri(run, overrides or ())) if spec is None else Workspace(spec.work_folder)
        if workspace is None:
            with errors_as_exit_codes(service=CLOUD):
                store = _open_run(run, ())[0]
                up_status_destroy_in_clouds.logs_of_uri(store, follow=follow, replica=replica, verbose=verbose)
            return
        tails: dict[Path, LogTail] = {}
        clock = SystemClock()
        while True:
            # Determined before reading: lines written until the lock is released are read below.
            running = follow and workspace.lock_holder() is not None
            for slot, file in _log_files(workspace, only):
                if file not in tails:
                    tails[file] = LogTail(file)
                    if attempt := workspace.attempt_of(file):
                        print_lines([log_line(slot, f"--- start {attempt + 1} ---")])
                lines = tails[file].lines() if running else tails[file].close()
                print_lines(log_line(slot, line) for line in lines if is_shown(line, verbose=verbose))
            if not running:
                return
            clock.pause(_FOLLOW_S)


@app.command()
def destroy(
    run: RunName = str(DEFAULT_SPEC),
    overrides: Overrides = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    data: Annotated[
        bool, typer.Option("--data", help="Also delete mirrors; in a cloud, also what was trained.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the run: its jobs or processes, its objects in the store, its folder on this machine."""
    with errors_as_exit_codes(as_json=as_json):
        spec = None if is_uri(run) else load_spec(run, overrides or ())
        if spec is not None and spec.deployed:
            spec = check_machine_and_store.load_deployed(Path(run), targets.kinds(), overrides or ())
            with errors_as_exit_codes(as_json=as_json, service=CLOUD):
                up_status_destroy_in_clouds.destroy(spec, data=data, approved=yes, as_json=as_json)
            return
        clock = SystemClock()
        uri = run_uri(run, overrides or ())
        if spec is None:
            _refuse_running(uri, data=data)
        leftovers = (
            local_destroy.list_objects(uri, clock)
            if spec is None
            else local_destroy.list_leftovers(spec, clock, data=data)
        )
        if leftovers:
            if not yes:
                confirm(f"{run_text.to_remove(leftovers)}. Destroy it?", flag="--yes")
            leftovers = (
                local_destroy.destroy_objects(uri, clock)
                if spec is None
                else local_destroy.destroy(spec, clock, data=data)
            )
        if as_json:
            typer.echo(to_json(leftovers))
        elif leftovers:
            typer.echo(f"removed {run_text.to_remove(leftovers)}")
        else:
            typer.echo(f"nothing to destroy: no run at {uri}")
        for mirror in () if as_json else leftovers.left:
            typer.echo(f"left: the mirror at {mirror}: `--data` deletes it too")


def _open_run(run: str, overrides: Sequence[str]) -> tuple[Store, RunSettings]:
    """The store and the settings of a run that was started."""
    store = open_run(run, overrides, SystemClock()).store
    return store, run_record.require_settings(store)


def _run_and_round(run: str, round_number: int | None) -> tuple[str, int | None]:
    """`skerry pin 120` names a round of the run of this folder."""
    return (str(DEFAULT_SPEC), int(run)) if round_number is None and run.isdecimal() else (run, round_number)


def _workspace_near(uri: str) -> Workspace | None:
    """The folder that `up` made for the run at a URI, here or beside its store; None if there is none."""
    name = _open_run(uri, ())[1].now.name
    near = [Path.cwd(), *Path(uri.removeprefix(FILE)).parents[:_NEAR]] if uri.startswith(FILE) else [Path.cwd()]
    for workspace in (Workspace(folder / model.WORK_FOLDER / name) for folder in near):
        if workspace.uri_file.is_file() and workspace.uri_file.read_text() == uri:
            return workspace
    return None


def _refuse_running(uri: str, *, data: bool) -> None:
    """Raise Invalid if the run at a URI has replicas at work, or resources in clouds, which only its spec names.

    data: without a state of its resources, delete a run in a cloud all the same (infra decision 0044).
    """
    store = open_store(uri, deadline_s=STATUS_DEADLINE_S)
    settings = run_record.load_settings(store)
    if settings is None:
        return
    if store.list(keys.STATE):
        raise Invalid(f"{uri} was created by `skerry apply`: name its spec, so that its jobs are removed too")
    replicas = _observe(store, settings).replicas
    if working := [replica.slot for replica in replicas if replica.at_work and not replica.silent]:
        raise Invalid(f"{', '.join(working)} of {uri} are at work; stop them first, where `skerry up` runs")
    mark = read_elsewhere(store)
    is_mirror = mark is not None and mark.why == "mirror"
    # Of all starts: a job of an earlier one may be left.
    places = [stored.record.place for stored in read_starts(store, settings.first, {}).members.values()]
    in_clouds = sorted({place.cloud for place in places if place is not None and place.cloud is not None} - {"local"})
    if in_clouds and not is_mirror and not data:
        # A restored run has copies of the starts before it.
        parent = settings.first.parent
        runs = uri if parent is None else f"{uri}, or of {parent.uri}, which it continues,"
        raise Invalid(
            f"replicas of {runs} were started in {', '.join(in_clouds)}, and its store does not name their jobs: name "
            "its spec, so that they are removed too, or delete what was trained alone with `--data`"
        )
    if data and (is_mirror or not in_clouds):
        raise Invalid(f"`--data` also deletes the mirrors of {uri}, which its spec names: name that, or leave it out")


def _observe(store: Store, settings: RunSettings) -> RunView:
    clock = SystemClock()
    return settled_view(Observer(store, settings, clock), clock)


def _log_files(workspace: Workspace, only: str | None) -> Iterator[tuple[str, Path]]:
    files_of = workspace.logs()
    if only is not None and files_of and only not in files_of:
        raise Invalid(f"no replica {only!r} has run here; choose one of {', '.join(files_of)}")
    if not files_of and workspace.lock_holder() is None:
        raise SkerryError("no logs on this machine; `skerry up` writes them")
    for slot, files in files_of.items():
        if only in (None, slot):
            yield from ((slot, file) for file in files)
