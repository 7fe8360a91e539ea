"""Commands for clouds alone: plan, apply, import, unlock, cancel. Parse, call `deploy`, print."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from skerry.infra import targets
from skerry.infra.cli import deployed_run_commands, job_text, plan_text
from skerry.infra.cli.common import (
    BAD_USAGE,
    CLOUD,
    DEFAULT_SPEC,
    FAILED,
    Approved,
    AsJson,
    Overrides,
    SpecPath,
    TakeOver,
    confirm,
    errors_as_exit_codes,
    print_lines,
    to_json,
)
from skerry.infra.cli.estimate_command import estimate, estimate_of
from skerry.infra.deploy import plan_file
from skerry.infra.deploy.deployment import Deployment, prepare
from skerry.infra.deploy.plan_and_apply import import_resource, make_plan
from skerry.infra.deploy.read_clouds import read_state
from skerry.infra.deploy.running_jobs import jobs_to_stop, stop_jobs
from skerry.infra.errors import in_short
from skerry.infra.run import local_preflight
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

# The exit codes of Terraform: 0 nothing to do, 1 an error, 2 changes.
CHANGES: Final = 2

Only = Annotated[list[str] | None, typer.Option("--target", metavar="ADDRESS", help="Only this, and what it needs.")]
SpecOrPlan = Annotated[
    Path, typer.Argument(metavar="SPEC|PLAN", help="The spec, or a file that `skerry plan --out` wrote.")
]


@dataclass(frozen=True, kw_only=True)
class _Cancelled:
    ok: bool
    stopped: tuple[str, ...]
    searched: tuple[str, ...]
    problems: tuple[str, ...]


def register(app: typer.Typer) -> None:
    """Add these commands, and `estimate`, to `app`."""
    for command in (plan, apply, estimate, unlock, cancel):
        app.command()(command)
    app.command(name="import")(import_)


def plan(
    path: SpecPath = DEFAULT_SPEC,
    overrides: Overrides = None,
    *,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Save the plan, for `apply FILE`.")] = None,
    only: Only = None,
    refresh_only: Annotated[bool, typer.Option("--refresh-only", help="Show what others changed instead.")] = False,
    detailed: Annotated[bool, typer.Option("--detailed-exitcode", help="2 if there are changes.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every setting.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what `apply` would change, in which account, which rights it grants, and what it costs. Changes nothing."""
    with errors_as_exit_codes(as_json=as_json, service=CLOUD, bad_usage=FAILED if detailed else BAD_USAGE):
        deployment = _prepare(path, overrides or ())
        planned = make_plan(deployment, only or ())
        if out is not None:
            plan_file.save(out, path, tuple(overrides or ()), tuple(only or ()), planned)
        drift = list(plan_text.drift_lines(planned))
        if refresh_only and not as_json:
            problems = [f"problem: {problem}" for problem in planned.plan.problems]
            print_lines([*(drift or ["nothing was changed outside of skerry"]), *problems])
        else:
            estimated = estimate_of(deployment, planned.resolved.rates, os.environ)
            if as_json:
                typer.echo(json.dumps(plan_file.document(planned, estimated)))
            else:
                print_lines(plan_text.plan_lines(planned, estimated, verbose=verbose))
        if planned.plan.problems:
            raise typer.Exit(FAILED)
        if detailed and (drift if refresh_only else not planned.plan.empty):
            raise typer.Exit(CHANGES)


def apply(
    path: SpecOrPlan = DEFAULT_SPEC,
    overrides: Overrides = None,
    *,
    only: Only = None,
    approved: Approved = False,
    take_over: TakeOver = False,
    as_json: AsJson = False,
) -> None:
    """Change the clouds. A spec is planned and shown first; a saved plan is applied exactly, or refused."""
    with errors_as_exit_codes(as_json=as_json, service=CLOUD):
        if plan_file.is_plan(path):
            if overrides or only:
                raise Invalid("a saved plan is applied exactly: leave out --set and --target")
            saved = plan_file.load(path)
            deployment = _prepare(Path(saved.spec), saved.overrides)
            planned = make_plan(deployment, saved.only)
            plan_file.check_current(saved, planned)
            approved = True
        else:
            deployment = _prepare(path, overrides or ())
            deployed_run_commands.take_over_lock(deployment, approved=take_over)
            planned = make_plan(deployment, only or ())
        answers = deployed_run_commands.Answers(approved=approved, take_over=take_over)
        deployed_run_commands.show_and_apply(deployment, planned, answers, as_json=as_json)


def import_(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="As `skerry plan` names it: aws_bucket.store.")],
    path: SpecPath = DEFAULT_SPEC,
    overrides: Overrides = None,
    *,
    approved: Approved = False,
) -> None:
    """Tag an existing resource as part of this run: `apply` then changes it, and `destroy` deletes it."""
    with errors_as_exit_codes(service=CLOUD):
        deployment = _prepare(path, overrides or ())
        if not approved:
            confirm(f"After this, `skerry destroy` deletes it: import {address}?", flag="--auto-approve")
        name = import_resource(deployment, address)
        typer.echo(f"{address}: {name} now belongs to this run; `skerry plan` shows what would change in it")


def unlock(path: SpecPath = DEFAULT_SPEC, overrides: Overrides = None, *, approved: Approved = False) -> None:
    """Unlock the state after an apply crashed on another machine. What that apply recorded is kept."""
    with errors_as_exit_codes(service=CLOUD):
        deployment = _prepare(path, overrides or ())
        state = read_state(deployment)
        if state is None or state.holder is None:
            typer.echo("the state is not locked")
            return
        if not approved:
            confirm(f"Locked by {state.holder}. Has that process ended for good?", flag="--auto-approve")
        deployment.open_state().unlock()
        typer.echo(f"unlocked; it was locked by {state.holder}; `skerry plan` shows what is left to do")


def cancel(
    path: SpecPath = DEFAULT_SPEC,
    overrides: Overrides = None,
    *,
    replica: Annotated[list[str] | None, typer.Option(metavar="SLOT", help="Only this one.")] = None,
    approved: Approved = False,
    as_json: AsJson = False,
) -> None:
    """Stop the jobs and keep everything else. A watching `skerry up` does not restart them.

    `skerry apply` starts them again; they resume from their last checkpoint.
    """
    with errors_as_exit_codes(as_json=as_json, service=CLOUD):
        deployment = _prepare(path, overrides or ())
        to_stop = jobs_to_stop(deployment, replica or ())
        names = tuple(job.name for job in to_stop.jobs)
        if names and not approved:
            confirm(f"Stop {', '.join(names)}?", flag="--auto-approve")
        failed = stop_jobs(deployment, to_stop)
        stopped = tuple(name for name in names if name not in failed)
        problems = (*(f"not stopped: {name}: {in_short(error)}" for name, error in failed.items()),)
        problems += tuple(to_stop.listed.unasked_lines)
        for problem in problems:
            typer.echo(problem, err=True)
        searched = to_stop.listed.searched
        lines = [f"stopped: {', '.join(stopped)}"] if stopped else [] if problems else ["no job waits or runs"]
        lines += [job_text.searched_line(searched)] if searched else []
        if as_json:
            lines = [to_json(_Cancelled(ok=not problems, stopped=stopped, searched=searched, problems=problems))]
        for line in lines:
            typer.echo(line)
        if problems:
            raise typer.Exit(FAILED)


def _prepare(path: Path, overrides: Sequence[str]) -> Deployment:
    """The deployment of a spec, checked on this machine. Raises Invalid for a spec that runs on this machine."""
    spec = local_preflight.load_deployed(path, targets.kinds(), overrides)
    if not spec.deployed:
        raise Invalid(f"{path} runs on this machine, so there is nothing to create first: `skerry up {path}`")
    return prepare(spec, SystemClock(), os.environ)
