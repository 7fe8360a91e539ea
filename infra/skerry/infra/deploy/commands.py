"""The commands that change clouds, or look at what runs there: they parse, print and ask. Decide nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from skerry.infra import preflight, render
from skerry.infra.deploy import jobs as working
from skerry.infra.deploy import removal as removing
from skerry.infra.deploy import saved as saving
from skerry.infra.deploy import showing, watching
from skerry.infra.deploy.deployment import Deployment
from skerry.infra.deploy.estimating import estimate, estimate_of
from skerry.infra.deploy.planning import carry_out, carry_out_noted, make_plan, take_in
from skerry.infra.deploy.progress import telling
from skerry.infra.deploy.reviving import Stop
from skerry.infra.deploy.watching import Watch
from skerry.infra.founding import find_run
from skerry.infra.observe import doctor as examining
from skerry.infra.observe import showing as reading
from skerry.infra.terminal import BAD_USAGE, FAILED, AsJson, Overrides, SpecPath, confirm, errors_as_exit_codes
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from contextlib import AbstractContextManager
    from types import FrameType

    from skerry.infra.apply import Applying, Outcome
    from skerry.infra.deploy.planning import Planned
    from skerry.infra.observe.findings import Examination
    from skerry.infra.spec import SpecFile
    from skerry.infra.target import Check, JobView
    from skerry.infra.view import RunView

# As Terraform has it: 0 nothing to do, 1 an error, 2 changes.
CHANGES = 2

_DEFAULT = Path("skerry.yaml")
_CLOUD = "the cloud"
Approve = Annotated[bool, typer.Option("--auto-approve", help="Do not ask.")]
Only = Annotated[list[str] | None, typer.Option("--target", metavar="ADDRESS", help="Only this, and what it needs.")]
Where = Annotated[Path, typer.Argument(metavar="SPEC|PLAN", help="The spec, or what `skerry plan --out` wrote.")]


def register(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    for command in (plan, apply, estimate, unlock, cancel):
        app.command()(command)
    app.command(name="import")(take)


def plan(
    path: SpecPath = _DEFAULT,
    overrides: Overrides = None,
    *,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Keep the plan, for `apply FILE`.")] = None,
    only: Only = None,
    refresh_only: Annotated[bool, typer.Option("--refresh-only", help="Show what others changed instead.")] = False,
    detailed: Annotated[bool, typer.Option("--detailed-exitcode", help="2 if there are changes.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every setting.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what `apply` would do to which account, what it grants, and what it costs. Changes nothing."""
    with errors_as_exit_codes(as_json=as_json, what=_CLOUD, bad_usage=FAILED if detailed else BAD_USAGE):
        deployment = _deployment(path, overrides or ())
        planned = make_plan(deployment, only or ())
        if out is not None:
            saving.save(out, path, tuple(overrides or ()), tuple(only or ()), planned)
        drift = list(showing.drift_lines(planned))
        if as_json:
            typer.echo(json.dumps(saving.document(planned, estimate_of(deployment, planned.rates, os.environ))))
        elif refresh_only:
            _print(drift or ["nothing was changed outside of skerry"])
        else:
            _print(showing.plan_lines(planned, estimate_of(deployment, planned.rates, os.environ), verbose=verbose))
        if planned.plan.problems:
            raise typer.Exit(FAILED)
        if detailed and (drift if refresh_only else not planned.plan.empty):
            raise typer.Exit(CHANGES)


def apply(
    path: Where = _DEFAULT,
    overrides: Overrides = None,
    *,
    only: Only = None,
    approved: Approve = False,
    as_json: AsJson = False,
) -> None:
    """Make it so. A spec is planned, shown, and asked about; a plan in a file is carried out as it is, or refused."""
    with errors_as_exit_codes(as_json=as_json, what=_CLOUD):
        if saving.is_plan(path):
            if overrides or only:
                raise Invalid("a plan in a file is carried out as it is: leave out --set and --target")
            saved = saving.load(path)
            deployment = _deployment(Path(saved.spec), saved.overrides)
            planned = make_plan(deployment, saved.only)
            saving.check(saved, planned)
            approved = True
        else:
            deployment = _deployment(path, overrides or ())
            planned = make_plan(deployment, only or ())
        show_and_apply(deployment, planned, approved=approved, as_json=as_json)


def show_and_apply(deployment: Deployment, planned: Planned, *, approved: bool, as_json: bool) -> None:
    """Show a plan, ask, apply it, and tell. Ends the process with 1 if a part of it failed."""
    console = Console(stderr=as_json)
    _print(showing.plan_lines(planned, estimate_of(deployment, planned.rates, os.environ)), console)
    if planned.plan.problems:
        raise Invalid("\n".join(planned.plan.problems))
    if not approved and not planned.plan.empty:
        confirm(f"Apply this: {showing.summary(planned.plan.changes)}?", flag="--auto-approve")
    acting = sum(change.acts for change in planned.plan.changes)
    with _stopped_by_signals() as told, telling(console, acting) as on_step:
        outcome = carry_out(deployment, planned, on_step, told)
    console.print(showing.outcome_line(outcome), highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(render.as_json(_Applied.of(outcome)))
    if not outcome.ok:
        raise typer.Exit(FAILED)


def up(found: SpecFile, *, approved: bool, quiet: bool, as_json: bool) -> None:
    """Apply, then watch until the run is over. Ctrl-C ends the watching; the jobs go on."""
    deployment = Deployment(found, SystemClock(), os.environ)
    show_and_apply(deployment, make_plan(deployment), approved=approved, as_json=False)
    console = Console(stderr=as_json)
    with _stopped_watching() as stop, render.screen(console, deployment.clock, quiet=quiet) as screen:
        finished = Watch(deployment).until_over(console, screen, stop)
    # A cloud forgets how a job ended; the state does not.
    carry_out_noted(deployment)
    jobs, view = Watch(deployment).look()
    if stop.asked.is_set():
        console.print("the jobs go on: `skerry status` looks again, `skerry cancel` stops them", highlight=False)
    elif not finished:
        _print(showing.job_lines(jobs), console)
        console.print("no job waits or runs any more, and not every round is closed: see `skerry logs`")
    if as_json:
        typer.echo(render.as_json(_Watched(ok=finished, jobs=tuple(jobs), run=view)))
    if not finished:
        raise typer.Exit(FAILED)


def status(found: SpecFile, *, as_json: bool) -> None:
    """Show the jobs, and why those that wait do, and where the run is."""
    jobs, view = Watch(Deployment(found, SystemClock(), os.environ)).look()
    if as_json:
        typer.echo(render.as_json(_Watched(ok=True, jobs=tuple(jobs), run=view)))
        return
    console = Console()
    _print(showing.job_lines(jobs) if jobs else ["no jobs: `skerry apply` starts them"], console)
    if view is not None:
        _print([Text(line) for line in render.plain(view)], console)


def logs(found: SpecFile, *, follow: bool, replica: str | None) -> None:
    """Print what the replicas wrote."""
    stop = threading.Event()
    with _heard(stop):
        _print(watching.logs(Deployment(found, SystemClock(), os.environ), replica, follow=follow, stop=stop))


def doctor(found: SpecFile, *, deep: bool, as_json: bool) -> bool:
    """Look at what would fail later, and at the run's log if there is one. Whether nothing is wrong."""
    deployment = Deployment(found, SystemClock(), os.environ)
    checks = tuple(deployment.checks())
    console = Console()
    if not as_json:
        _print(showing.check_lines(checks), console)
    sound = all(check.ok is not False for check in checks)
    log = None
    # Without credentials there is nothing to read.
    if checks[0].ok and deployment.has_bucket() and find_run(deployment.store) is not None:
        if deep:
            with reading.reading(Console(stderr=True), deployment.clock) as on_progress:
                log = examining.visit(deployment.store, on_progress)
        else:
            log = examining.visit(deployment.store)
        if not as_json:
            _print([Text(line) for line in reading.plain(log)], console)
    if as_json:
        typer.echo(render.as_json(_Examined(ok=sound and (log is None or log.ok), checks=checks, log=log)))
    return sound and (log is None or log.ok)


def destroy(found: SpecFile, *, data: bool, approved: bool, as_json: bool) -> None:
    """Take a deployed run away. Ends the process with 1 if anything of ours is left."""
    deployment = Deployment(found, SystemClock(), os.environ)
    removal = removing.survey(deployment)
    console = Console(stderr=as_json)
    if removal.empty:
        console.print(f"nothing to destroy: no run at {found.run_uri}", highlight=False, soft_wrap=True)
    else:
        _print(showing.removal_lines(removal, found.run_uri, data=data), console)
        if not approved:
            confirm("Destroy it?", flag="--yes")
    acting = sum(change.acts for change in removal.plan.changes)
    with _stopped_by_signals() as told, telling(console, acting) as on_step:
        removed = removing.destroy(deployment, removal, data=data, on_step=on_step, applying=told)
    _print(showing.removed_lines(removed), console)
    if as_json:
        typer.echo(render.as_json(_Destroyed(ok=removed.ok, left=removed.left)))
    if not removed.ok:
        raise typer.Exit(FAILED)


def take(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="As `skerry plan` names it: aws_bucket.store.")],
    path: SpecPath = _DEFAULT,
    overrides: Overrides = None,
    *,
    approved: Approve = False,
) -> None:
    """Make what is there under a resource's name this run's: from then on it is changed, and destroyed, with it."""
    with errors_as_exit_codes(what=_CLOUD):
        deployment = _deployment(path, overrides or ())
        if not approved:
            confirm(f"From then on `skerry destroy` deletes it: take in {address}?", flag="--auto-approve")
        name = take_in(deployment, address)
        typer.echo(f"{address}: {name} is this run's; `skerry plan` says what of it would change")


def unlock(path: SpecPath = _DEFAULT, overrides: Overrides = None, *, approved: Approve = False) -> None:
    """Free the state from a holder that is gone: a crashed apply on another machine. What it noted is kept."""
    with errors_as_exit_codes(what=_CLOUD):
        deployment = _deployment(path, overrides or ())
        state = deployment.state()
        if state is None or state.holder is None:
            typer.echo("nobody holds the state")
            return
        if not approved:
            confirm(f"Held: {state.holder}. Is it gone for good?", flag="--auto-approve")
        deployment.state_file.unlock()
        typer.echo(f"freed from {state.holder}; `skerry plan` says what is left to do")


def cancel(
    path: SpecPath = _DEFAULT,
    overrides: Overrides = None,
    *,
    replica: Annotated[list[str] | None, typer.Option(metavar="SLOT", help="Only this one.")] = None,
    approved: Approve = False,
    as_json: AsJson = False,
) -> None:
    """Stop the jobs, and leave everything else; no `skerry up` starts one of them again that is lost already.

    `skerry apply` starts them, and they go on where they were.
    """
    with errors_as_exit_codes(as_json=as_json, what=_CLOUD):
        deployment = _deployment(path, overrides or ())
        doomed = working.doomed(deployment, replica or ())
        names = tuple(made.name for made in doomed.made)
        if names and not approved:
            confirm(f"Stop {', '.join(names)}?", flag="--auto-approve")
        working.end(deployment, doomed)
        typer.echo(
            render.as_json(_Cancelled(stopped=names))
            if as_json
            else f"stopped: {', '.join(names)}"
            if names
            else "no job waits or runs"
        )


@dataclass(frozen=True, kw_only=True)
class _Applied:
    ok: bool
    done: tuple[str, ...]
    failed: dict[str, str]
    skipped: tuple[str, ...]

    @classmethod
    def of(cls, outcome: Outcome) -> _Applied:
        return cls(
            ok=outcome.ok,
            done=tuple(str(change.id) for change in outcome.done),
            failed={str(key): str(error) for key, error in outcome.failed.items()},
            skipped=tuple(str(change.id) for change in outcome.skipped),
        )


@dataclass(frozen=True, kw_only=True)
class _Watched:
    ok: bool
    jobs: tuple[JobView, ...]
    run: RunView | None


@dataclass(frozen=True, kw_only=True)
class _Examined:
    ok: bool
    checks: tuple[Check, ...]
    log: Examination | None


@dataclass(frozen=True, kw_only=True)
class _Destroyed:
    ok: bool
    left: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Cancelled:
    stopped: tuple[str, ...]


def _deployment(path: Path, overrides: Sequence[str]) -> Deployment:
    """The spec, checked as far as this machine can, and its clouds. Raises Invalid for one that runs here."""
    clock = SystemClock()
    found = preflight.load_deployed(path, overrides)
    if not found.deployed:
        raise Invalid(f"{path} runs on this machine, where nothing has to be made first: `skerry up {path}`")
    return Deployment(found, clock, os.environ)


def _print(lines: Iterable[Text | str], console: Console | None = None) -> None:
    console = Console() if console is None else console
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


@contextlib.contextmanager
def _stopped_by_signals() -> Generator[Callable[[Applying], None]]:
    """Ctrl-C lets what is in flight end, and begins nothing more; a second one interrupts. What was done is noted."""
    at_work: list[Applying] = []
    asked = threading.Event()

    def stop() -> None:
        if asked.is_set() or not any(one.running for one in at_work):
            raise KeyboardInterrupt
        asked.set()
        for one in at_work:
            one.stop()

    with _on_signal(stop):
        yield at_work.append


@contextlib.contextmanager
def _stopped_watching() -> Generator[Stop]:
    """Ctrl-C ends the watching, and begins nothing more; a second one interrupts a start that is on its way."""
    stop = Stop()

    def heard() -> None:
        if stop.asked.is_set() and stop.at_work:
            raise KeyboardInterrupt
        stop()

    with _on_signal(heard):
        yield stop


def _heard(stop: threading.Event) -> AbstractContextManager[None]:
    """Ctrl-C sets the event."""
    return _on_signal(stop.set)


@contextlib.contextmanager
def _on_signal(act: Callable[[], None]) -> Generator[None]:
    def handle(_number: int, _frame: FrameType | None) -> None:
        act()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
