"""The commands up, status, logs, doctor and destroy for a run in clouds; `app` calls them for such a spec."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from skerry.infra.cli import deployed_watch, doctor_text, job_text, plan_text, removal_text, run_text
from skerry.infra.cli.apply_progress import showing_steps
from skerry.infra.cli.common import FAILED, NOT_BY_ALL, ask_take_over, confirm, print_lines, to_json
from skerry.infra.cli.compute_cost_so_far import read_spending
from skerry.infra.cli.deployed_watch import Watch
from skerry.infra.cli.estimate_command import estimate_of
from skerry.infra.cli.interrupts import on_signal, stopping_applies, stopping_watch
from skerry.infra.cli.live_run_table import open_screen
from skerry.infra.cli.status_participation import mirrors_so_far, participation_so_far
from skerry.infra.deploy import plan_file, read_clouds, removal
from skerry.infra.deploy.list_and_stop_jobs import JobLogs, searched_places
from skerry.infra.deploy.lock_owner_identity import abandoned
from skerry.infra.deploy.plan_and_apply import (
    apply_plan,
    binding_of,
    make_plan,
    push_first,
    read_live_elsewhere,
    record_endings,
    without_jobs,
)
from skerry.infra.deploy.prepared_deployment import Deployment, prepare
from skerry.infra.deploy.recorded_jobs import recorded_jobs
from skerry.infra.deploy.tagged_resources import spec_regions
from skerry.infra.observe.live_replicas import shown
from skerry.infra.observe.read_participation import read_participation
from skerry.infra.provision.observe_resources import CALLS_AT_ONCE
from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.infra.run.run_record import load_run
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Conflict, Invalid, SkerryError, Unauthorized

if TYPE_CHECKING:
    from skerry.infra.cli.deployed_watch import Look
    from skerry.infra.deploy.plan_and_apply import Planned
    from skerry.infra.observe.doctor.findings import Examination
    from skerry.infra.observe.run_view import RunView
    from skerry.infra.provision.apply import Outcome
    from skerry.infra.provision.target_and_store_interfaces import JobView
    from skerry.infra.spec.model import SpecFile
    from skerry.runtime.store import Store


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers that the command line gives beforehand. approved: to the plan. take_over: to a run that is live.

    at_once: calls to a cloud in flight.
    """

    approved: bool
    take_over: bool
    at_once: int = CALLS_AT_ONCE


def take_over_lock(deployment: Deployment, *, approved: bool) -> None:
    """Ask whether to take the state's lock from another process, which then stops at its next call.

    Without a terminal and an approval the lock stays, and the apply is refused. Raises Invalid for a no.
    """
    state = read_clouds.read_state(deployment)
    holder = None if state is None else state.holder
    if holder is None or abandoned(holder) or not (approved or sys.stdin.isatty()):
        return
    ask_take_over(f"run {deployment.context.spec.run} is being changed elsewhere: {holder}", approved=approved)
    deployment.open_state().unlock()


def show_and_apply(
    deployment: Deployment, planned: Planned, answers: Answers, *, as_json: bool, is_last: bool = True
) -> None:
    """Show a plan, ask, apply it, and report. Ends the process with 1 if a part of it failed.

    If jobs could not run their image, only its repository is created. Raises PushFirst then. is_last: without a failure
    the JSON of the outcome is the command's own.
    """
    console = Console(stderr=as_json)
    review = review_of(deployment, planned)
    width = console.width if console.is_terminal else None
    print_lines(plan_text.plan_lines(planned.binding, planned.plan.changes, review, width=width), console)
    if planned.plan.problems:
        raise Invalid("\n".join(planned.plan.problems))
    possible = without_jobs(deployment, planned) if planned.stops else planned
    changes = possible.plan.changes
    if live := read_live_elsewhere(deployment, possible):
        text = f"run {deployment.context.spec.run} is live, and the state of this spec does not know it: {shown(live)}"
        ask_take_over(text, approved=answers.take_over)
    if not answers.approved and not possible.plan.empty:
        confirm(f"Apply this: {plan_text.summary(changes)}?", flag="--auto-approve")
    total = sum(change.acts for change in changes)
    with stopping_applies() as on_begin, showing_steps(console, total) as on_step:
        outcome = apply_plan(deployment, possible, on_step, on_begin, answers.at_once)
    print_lines([plan_text.outcome_line(outcome)], console)
    if planned.stops and outcome.ok:
        raise push_first(planned.stops, f"skerry apply {deployment.spec.path}")
    if as_json and (is_last or not outcome.ok):
        typer.echo(to_json(_Applied.of(outcome)))
    if not outcome.ok:
        raise typer.Exit(FAILED)


def up(spec: SpecFile, export: str, answers: Answers, *, quiet: bool, as_json: bool) -> None:
    """Apply, then watch until the run is over. Ctrl-C ends the watch; the jobs keep running.

    export: the command that exports the model of this run.
    """
    deployment = _prepare(spec)
    take_over_lock(deployment, approved=answers.take_over)
    planned = make_plan(deployment)
    show_and_apply(deployment, planned, answers, as_json=as_json, is_last=False)
    console = Console(stderr=as_json)
    money_of = read_spending(deployment, planned.resolved.rates)
    with stopping_watch() as stop, open_screen(console, deployment.clock, quiet=quiet, money_of=money_of) as screen:
        finished = Watch(deployment, planned.resolved).until_over(console, screen, stop)
    record_endings(deployment, planned.resolved)
    look = Watch(deployment).look()
    if stop.requested.is_set():
        print_lines(["the jobs keep running: `skerry status` shows them, `skerry cancel` stops them"], console)
    elif not finished:
        print_lines(job_text.job_lines(look.jobs), console)
        print_lines(["no job waits or runs any more, and some rounds are not closed: see `skerry logs`"], console)
    money = None if look.run is None else money_of(look.run)
    store = None if look.run is None else read_clouds.find_run_store(deployment)
    taken = None if store is None else read_participation(store)
    if taken is not None and look.run is not None:
        print_lines(run_text.participation_lines(taken, look.run.rounds, figures=True), console)
    if money is not None:
        print_lines(money.lines, console)
    by_all = taken is None or taken.by_all
    if finished:
        ended = f"{spec.spec.run} is finished{'' if by_all else run_text.NOT_BY_ALL_TEXT}"
        print_lines([ended, *run_text.model_lines(look.run, export)], console)
    _end_look(look, ok=finished, as_json=as_json, by_all=by_all, **({} if money is None else money.document))
    if not by_all:
        raise typer.Exit(NOT_BY_ALL)


def status(spec: SpecFile, *, as_json: bool) -> None:
    """Show the jobs, why those that wait do, and the progress of the run."""
    deployment = _prepare(spec)
    watch = Watch(deployment)
    look, move = watch.look(), watch.move
    money = None if look.run is None else read_spending(deployment)(look.run)
    if not as_json:
        print_lines(job_text.job_lines(look.jobs))
        print_lines(f"the slots {first}-* are those of {name}" for name, first in spec.spec.moved.items())
        if not look.jobs and not look.unasked:
            print_lines(["no jobs: `skerry apply` starts them"])
        if look.searched:
            again = "; `skerry apply` records these jobs again" if look.jobs else ""
            print_lines([job_text.searched_line(look.searched) + again])
        if look.run is not None and money is not None:
            print_lines([*run_text.plain(look.run), *money.lines])
            store = read_clouds.find_run_store(deployment)
            print_lines([] if store is None else participation_so_far(store, look.run))
            regions = {uri: bucket.region for uri, bucket in deployment.mirrors().items()}
            regions[spec.run_uri] = deployment.bucket().region
            if move is None:
                print_lines(mirrors_so_far(spec, store, look.run.closed, regions, deployment.open_source))
        if move is not None:
            is_there = look.run is not None or look.unasked
            more = [] if is_there else [f"{move.uri} has no run yet; {read_clouds.COMPLETE}"]
            print_lines([f"the run left {spec.run_uri}: {move}", *more])
    _end_look(look, ok=True, as_json=as_json, **({} if money is None else money.document))


def _end_look(look: Look, *, ok: bool, as_json: bool, **more: object) -> None:
    """Report the places that could not be asked. Ends the process with 1 if there are any, or without `ok`.

    more: further keys of the JSON.
    """
    ok = ok and not look.unasked
    for line in look.unasked:
        typer.echo(line, err=True)
    if as_json:
        watched = _Watched(ok=ok, jobs=look.jobs, run=look.run, searched=look.searched, unasked=look.unasked)
        typer.echo(to_json(watched, **more))
    if not ok:
        raise typer.Exit(FAILED)


def logs(spec: SpecFile, *, follow: bool, replica: str | None, verbose: bool) -> None:
    """Print the lines that the replicas wrote."""
    deployment, stop = _prepare(spec), threading.Event()
    if read_clouds.read_state(deployment) is None:
        ended = f"find the lines of ended jobs in the clouds' logs, by names that begin with {deployment.context.stem}"
        typer.echo(f"{job_text.searched_line(searched_places(deployment))}; {ended}", err=True)
    slot = None if replica is None else spec.spec.slot(replica)
    with on_signal(stop.set):
        print_lines(deployed_watch.logs(JobLogs.of(deployment), slot, follow=follow, verbose=verbose, stop=stop))


def logs_of_uri(store: Store, *, follow: bool, replica: str | None, verbose: bool) -> None:
    """Print the lines of the jobs that the state in the store of a run names. Raises SkerryError if there are none."""
    recorded, stop = recorded_jobs(store, SystemClock(), os.environ), threading.Event()
    slots = [view.slot for _, view in recorded.list_jobs()]
    if not slots:
        raise SkerryError(
            f"no lines of the replicas of {store.uri} at {Path.cwd()}, and no jobs in its store: go to the folder of "
            "its spec on the machine that ran `skerry up`, or name the spec of its jobs; "
            f"`skerry doctor {store.uri}` shows how each replica ended"
        )
    if replica is not None and replica not in slots:
        raise Invalid(f"no job of {replica!r}; choose one of {', '.join(slots)}")
    with on_signal(stop.set):
        print_lines(deployed_watch.logs(recorded, replica, follow=follow, verbose=verbose, stop=stop))


def doctor(spec: SpecFile, *, deep: bool, as_json: bool) -> bool:
    """Check what would make an apply fail, and the run's log if there is one. True if nothing is wrong."""
    try:
        deployment = _prepare(spec)
    except Unauthorized as error:
        checks = (Check(name="login", ok=False, text=str(error)),)
        if as_json:
            typer.echo(to_json(_Examined(ok=False, checks=checks, log=None)))
        else:
            print_lines(doctor_text.check_lines(checks))
        return False
    checks = read_clouds.run_checks(deployment)
    if not as_json:
        print_lines(doctor_text.check_lines(checks))
    examination = None
    # The first check is of the credentials: without them nothing can be read.
    unknown = any(check.name == read_clouds.FAILOVER and check.ok is None for check in checks)
    store = read_clouds.find_run_store(deployment) if checks[0].ok and not unknown else None
    if store is not None and load_run(store) is not None:
        examination = doctor_text.examine(store, deployment.clock, deep=deep)
        if not as_json:
            print_lines(Text(line) for line in doctor_text.plain(examination))
    ok = all(check.ok is not False for check in checks) and (examination is None or examination.ok)
    if as_json:
        typer.echo(to_json(_Examined(ok=ok, checks=checks, log=examination)))
    return ok


def destroy(spec: SpecFile, *, data: bool, approved: bool, as_json: bool) -> None:
    """Remove a deployed run. Ends the process with 1 if anything of the run is left."""
    deployment = _prepare(spec)
    planned = removal.plan_removal(deployment)
    console = Console(stderr=as_json)
    if planned.empty:
        print_lines([f"nothing to destroy: no run at {spec.run_uri}"], console)
    else:
        print_lines(removal_text.removal_lines(planned, deployment.bucket(), spec.run_uri, data=data), console)
        if not approved:
            confirm("Destroy it?", flag="--yes")
    _destroy(deployment, planned, console, data=data, as_json=as_json)


def review_of(deployment: Deployment, planned: Planned, *, verbose: bool = False) -> plan_file.Review:
    """The parts of a plan for people, at the prices that this environment names."""
    estimated = estimate_of(deployment, planned.resolved.rates, os.environ)
    return plan_text.review_of(planned, estimated, deployment.spec, verbose=verbose)


def removal_plan(
    deployment: Deployment, planned: removal.Removal, spec: str, overrides: tuple[str, ...] = ()
) -> plan_file.SavedPlan:
    """Returns the plan of a `destroy` without --data, for a file. spec, overrides: of the file."""
    kept = removal.kept_addresses(deployment, planned)
    lines = removal_text.kept_lines(planned, deployment.bucket(), deployment.run, data=False)
    accounts = read_clouds.read_accounts(deployment)
    return plan_file.SavedPlan(
        spec=spec,
        overrides=overrides,
        destroy=plan_file.Destruction(
            strays=tuple(sorted(f"{record.kind} {record.name}" for record in planned.strays)),
            in_use=tuple(sorted(planned.in_use)),
            mirrors=tuple(mirror.uri for mirror in planned.mirrors),
            bucket=planned.bucket is not None,
        ),
        binding=binding_of(deployment, planned.state, accounts),
        changes=tuple(change for change in planned.plan.changes if change.address not in kept),
        review=plan_file.Review(
            principals=read_clouds.read_principals(deployment, accounts),
            remarks=tuple((str(line.style), line.plain) for line in lines),
        ),
    )


def destroy_as_planned(deployment: Deployment, saved: plan_file.SavedPlan, *, as_json: bool) -> None:
    """Remove a run as a saved plan shows. Raises Conflict if it would delete or keep anything else now."""
    planned = removal.plan_removal(deployment)
    now = removal_plan(deployment, planned, saved.spec)
    plan_file.check_current(saved, now.binding, now.changes, None)
    if saved.destroy != now.destroy:
        raise Conflict("stale plan: what it keeps, or deletes beside the state, has changed; run `skerry plan` again")
    console = Console(stderr=as_json)
    # As now: the file's own lines are for people, and a run that is live writes further objects.
    run = deployment.spec.run_uri
    print_lines(removal_text.removal_lines(planned, deployment.bucket(), run, data=False), console)
    _destroy(deployment, planned, console, data=False, as_json=as_json)


def _destroy(deployment: Deployment, planned: removal.Removal, console: Console, *, data: bool, as_json: bool) -> None:
    spec = deployment.spec
    if planned.state is None:
        places = [f"{cloud} in {', '.join(sorted(names))}" for cloud, names in spec_regions(deployment).items()]
        print_lines([job_text.searched_line(places)], console)
    total = sum(change.acts for change in planned.plan.changes) + len(planned.strays)
    with stopping_applies() as on_begin, showing_steps(console, total) as on_step:
        removed = removal.destroy(deployment, planned, data=data, on_step=on_step, on_begin=on_begin)
    print_lines(removal_text.removed_lines(removed, spec.run_uri), console)
    if as_json:
        deleted = tuple(str(change.id) for change in removed.outcome.done)
        objects = removed.objects.objects
        typer.echo(
            to_json(_Destroyed(ok=removed.ok, deleted=deleted, objects=objects, kept=removed.kept, left=removed.left))
        )
    if not removed.ok:
        raise typer.Exit(FAILED)


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
    searched: tuple[str, ...]
    unasked: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Examined:
    ok: bool
    checks: tuple[Check, ...]
    log: Examination | None


@dataclass(frozen=True, kw_only=True)
class _Destroyed:
    ok: bool
    deleted: tuple[str, ...]
    objects: int
    kept: tuple[str, ...]
    left: tuple[str, ...]


def _prepare(spec: SpecFile) -> Deployment:
    return prepare(spec, SystemClock(), os.environ)
