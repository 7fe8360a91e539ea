"""Commands for clouds alone: plan, apply, import, unlock, cancel. Parse, call `deploy`, print."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from skerry.infra.cli import job_text, plan_text, show_resources_commands, up_status_destroy_in_clouds
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
from skerry.infra.cli.show_resources_commands import prepare_deployed
from skerry.infra.deploy import plan_file, removal
from skerry.infra.deploy.list_and_stop_jobs import jobs_to_stop, stop_jobs
from skerry.infra.deploy.plan_and_apply import import_resource, make_plan
from skerry.infra.deploy.read_clouds import read_state
from skerry.infra.provision.observe_resources import CALLS_AT_ONCE
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.infra.cost.estimate import Estimate
    from skerry.infra.deploy.plan_and_apply import Planned

# The exit codes of Terraform: 0 nothing to do, 1 an error, 2 changes.
CHANGES: Final = 2

Only = Annotated[list[str] | None, typer.Option("--target", metavar="ADDRESS", help="Only this, and what it needs.")]
Replace = Annotated[
    list[str] | None, typer.Option("--replace", metavar="ADDRESS", help="Create this anew, though nothing differs.")
]
Parallelism = Annotated[int, typer.Option(min=1, max=256, help="Calls to a cloud at a time; objects aside.")]
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
    for command in (plan, show, apply, estimate, unlock, cancel):
        app.command()(command)
    app.command(name="import")(import_)
    show_resources_commands.register(app)


def plan(
    path: SpecPath = DEFAULT_SPEC,
    overrides: Overrides = None,
    *,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Save the plan, for `apply FILE`.")] = None,
    only: Only = None,
    replace: Replace = None,
    parallelism: Parallelism = CALLS_AT_ONCE,
    removes: Annotated[bool, typer.Option("--destroy", help="What `destroy` would delete instead.")] = False,
    refresh_only: Annotated[bool, typer.Option("--refresh-only", help="Show what others changed instead.")] = False,
    detailed: Annotated[bool, typer.Option("--detailed-exitcode", help="2 if there are changes.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every setting.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what `apply` would change, in which account, which rights it grants, and what it costs. Changes nothing."""
    with errors_as_exit_codes(as_json=as_json, service=CLOUD, bad_usage=FAILED if detailed else BAD_USAGE):
        deployment = prepare_deployed(path, overrides or (), parallelism)
        spec, sets = str(path.absolute()), tuple(overrides or ())
        if removes:
            if only or replace or refresh_only:
                raise Invalid("--destroy removes the whole run: leave out --target, --replace and --refresh-only")
            planned = removal.plan_removal(deployment)
            _finish_plan(
                up_status_destroy_in_clouds.removal_plan(deployment, planned, spec, sets),
                out,
                as_json=as_json,
                detailed=detailed,
            )
            return
        planned = make_plan(deployment, only or (), to_replace=replace or (), at_once=parallelism)
        estimated = estimate_of(deployment, planned.resolved.rates, os.environ)
        saved = plan_file.SavedPlan(
            spec=spec,
            overrides=sets,
            only=tuple(only or ()),
            replace=tuple(replace or ()),
            binding=planned.binding,
            changes=planned.plan.changes,
            review=plan_text.review_of(planned, estimated, deployment.spec, verbose=verbose),
        )
        if out is not None:
            if planned.plan.problems:
                raise Invalid("\n".join(planned.plan.problems))
            plan_file.save(out, saved)
        _report(
            planned, estimated, saved, refresh_only=refresh_only, detailed=detailed, verbose=verbose, as_json=as_json
        )


def _report(
    planned: Planned,
    estimated: Estimate,
    saved: plan_file.SavedPlan,
    *,
    refresh_only: bool,
    detailed: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Show a plan, or only what others changed, and end the process with the exit code that it has."""
    drift = list(plan_text.drift_lines(planned))
    if refresh_only and not as_json:
        problems = [f"problem: {problem}" for problem in planned.plan.problems]
        print_lines([*(drift or ["nothing was changed outside of skerry"]), *problems])
    elif as_json:
        typer.echo(json.dumps(plan_file.document(planned, estimated)))
    else:
        _show(saved, verbose=verbose)
    if planned.plan.problems:
        raise typer.Exit(FAILED)
    if detailed and (drift if refresh_only else not planned.plan.empty):
        raise typer.Exit(CHANGES)


def _finish_plan(saved: plan_file.SavedPlan, out: Path | None, *, as_json: bool, detailed: bool) -> None:
    """Save and show the plan of a removal."""
    if out is not None:
        plan_file.save(out, saved)
    _show(saved, as_json=as_json)
    if detailed and saved.changes:
        raise typer.Exit(CHANGES)


def show(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A file that `skerry plan --out` wrote.")],
    *,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every setting.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a saved plan. Asks no cloud."""
    with errors_as_exit_codes(as_json=as_json):
        _show(plan_file.load(path), verbose=verbose, as_json=as_json)


def _show(saved: plan_file.SavedPlan, *, verbose: bool = False, as_json: bool = False) -> None:
    if as_json:
        typer.echo(plan_file.to_json(saved))
        return
    console = Console()
    width = console.width if console.is_terminal else None
    print_lines(plan_text.plan_lines(saved.binding, saved.changes, saved.review, verbose=verbose, width=width), console)


def apply(
    path: SpecOrPlan = DEFAULT_SPEC,
    overrides: Overrides = None,
    *,
    only: Only = None,
    replace: Replace = None,
    parallelism: Parallelism = CALLS_AT_ONCE,
    approved: Approved = False,
    take_over: TakeOver = False,
    as_json: AsJson = False,
) -> None:
    """Change the clouds. A spec is planned and shown first; a saved plan is applied exactly, or refused."""
    with errors_as_exit_codes(as_json=as_json, service=CLOUD):
        if plan_file.is_plan(path):
            if overrides or only or replace:
                raise Invalid("a saved plan is applied exactly: leave out --set, --target and --replace")
            saved = plan_file.load(path)
            deployment = prepare_deployed(Path(saved.spec), saved.overrides, parallelism)
            if saved.destroy is not None:
                up_status_destroy_in_clouds.destroy_as_planned(deployment, saved, as_json=as_json)
                return
            planned = make_plan(deployment, saved.only, to_replace=saved.replace, at_once=parallelism)
            review = up_status_destroy_in_clouds.review_of(deployment, planned, verbose=saved.review.verbose)
            plan_file.check_current(saved, planned.binding, planned.plan.changes, review)
            approved = True
        else:
            deployment = prepare_deployed(path, overrides or (), parallelism)
            up_status_destroy_in_clouds.take_over_lock(deployment, approved=take_over)
            planned = make_plan(deployment, only or (), to_replace=replace or (), at_once=parallelism)
        answers = up_status_destroy_in_clouds.Answers(approved=approved, take_over=take_over, at_once=parallelism)
        up_status_destroy_in_clouds.show_and_apply(deployment, planned, answers, as_json=as_json)


def import_(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="As `skerry plan` names it: aws_bucket.store.")],
    path: SpecPath = DEFAULT_SPEC,
    overrides: Overrides = None,
    *,
    approved: Approved = False,
) -> None:
    """Tag an existing resource as part of this run: `apply` then changes it, and `destroy` deletes it."""
    with errors_as_exit_codes(service=CLOUD):
        deployment = prepare_deployed(path, overrides or ())
        if not approved:
            confirm(f"After this, `skerry destroy` deletes it: import {address}?", flag="--auto-approve")
        name = import_resource(deployment, address)
        typer.echo(f"{address}: {name} now belongs to this run; `skerry plan` shows what would change in it")


def unlock(path: SpecPath = DEFAULT_SPEC, overrides: Overrides = None, *, approved: Approved = False) -> None:
    """Unlock the state after an apply crashed on another machine. What that apply recorded is kept."""
    with errors_as_exit_codes(service=CLOUD):
        deployment = prepare_deployed(path, overrides or ())
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
        deployment = prepare_deployed(path, overrides or ())
        to_stop = jobs_to_stop(deployment, [deployment.spec.spec.slot(name) for name in replica or ()])
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
