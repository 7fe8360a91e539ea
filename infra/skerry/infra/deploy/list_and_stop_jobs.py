"""The jobs of a deployment: lists what they are doing, reads their logs, and stops them.

The state names the jobs. While it is missing or unsure, their clouds are searched by tag and name. A place that cannot
be asked is listed with the error, so that no command takes "not asked" for "does not run".
"""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra import targets
from skerry.infra.deploy.lock_owner_identity import this_process
from skerry.infra.deploy.read_clouds import check_accounts, read_state
from skerry.infra.deploy.revived_jobs import is_revivable, note_revived, revivable_handler, with_revived
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.planned_changes import CANCELLED
from skerry.infra.provision.state import Id, StatePhase
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.errors import Invalid, SkerryError
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.state import Entry, State
    from skerry.infra.provision.target_and_store_interfaces import JobView, LogLine, Target
    from skerry.runtime.clock import Clock

_PARALLEL_STOPS: Final = 16


@dataclass(frozen=True, kw_only=True)
class JobList:
    """The jobs of a run: the newest of each replica, and every other one that runs, in slot order.

    state: None if there is none or it cannot be read. searched: without it, the places where jobs were searched for by
    tag and name. unasked: the error of each place that could not be asked. Jobs in any other place are missing.
    """

    state: State | None
    searched: tuple[str, ...]
    jobs: tuple[tuple[StateRecord, JobView], ...]
    unasked: Mapping[str, SkerryError]

    @property
    def unasked_lines(self) -> list[str]:
        """A line for each place that could not be asked."""
        return [f"could not ask {place}: {in_short(error)}" for place, error in self.unasked.items()]


def read_jobs(deployment: Deployment, *, unfinished: bool = True) -> JobList:
    """List the jobs as far as the clouds answer. Raises nothing for a place that does not.

    unfinished: also search for jobs whose creation began and did not finish.
    """
    unasked: dict[str, SkerryError] = {}
    state = None
    try:
        state = read_state(deployment)
    except SkerryError as error:
        unasked[f"the store for the state of {deployment.run}"] = error
    with contextlib.suppress(SkerryError):  # the place is asked again below, and that error counts
        state = with_revived(deployment.run, deployment.handlers, state)
    newest = _newest(deployment, state)
    jobs: list[tuple[StateRecord, JobView]] = []
    for target in deployment.all_targets:
        entries = {key: entry for key, entry in newest.items() if entry.record.kind == target.job_kind}
        try:
            jobs += _read_jobs_of(deployment, target, entries, unfinished=unfinished)
        except SkerryError as error:
            unasked[_place(deployment, target, entries.values())] = error
    return JobList(
        state=state,
        searched=tuple(place for place in searched_places(deployment) if place not in unasked) if state is None else (),
        jobs=tuple(sorted(jobs, key=lambda pair: keys.slot_order(pair[1].slot))),
        unasked=unasked,
    )


def searched_places(deployment: Deployment) -> list[str]:
    """The places that are searched for jobs while there is no state: those that the spec names."""
    return [_place(deployment, target, ()) for target in deployment.targets.values()]


def list_jobs(deployment: Deployment) -> list[tuple[StateRecord, JobView]]:
    """The jobs of `read_jobs`. Raises the first error of a place that could not be asked.

    Unfinished ones are not searched for: the watch of `up` takes them for lost, and its restart adopts the job.
    """
    listed = read_jobs(deployment, unfinished=False)
    for error in listed.unasked.values():
        raise error
    return list(listed.jobs)


def read_log(deployment: Deployment, job: StateRecord, cursor: str | None) -> Iterator[LogLine]:
    """The lines that a job has written after `cursor`."""
    return next(target for target in deployment.all_targets if job.kind == target.job_kind).logs(job, cursor)


@dataclass(frozen=True, kw_only=True)
class JobLogs:
    """The jobs of a run and their lines: `list_jobs` and `read_log` of one that is named by its spec or its URI."""

    clock: Clock
    list_jobs: Callable[[], Sequence[tuple[StateRecord, JobView]]]
    read_log: Callable[[StateRecord, str | None], Iterator[LogLine]]

    @classmethod
    def of(cls, deployment: Deployment) -> JobLogs:
        """Those of a deployment."""
        return cls(
            clock=deployment.clock,
            list_jobs=lambda: list_jobs(deployment),
            read_log=lambda job, cursor: read_log(deployment, job, cursor),
        )


@dataclass(frozen=True, kw_only=True)
class JobsToStop:
    """Jobs that a cancel stops. live: those that run or wait, or may. listed: from which they were chosen.

    The other jobs have ended but would be restarted.
    """

    jobs: tuple[StateRecord, ...]
    live: tuple[StateRecord, ...]
    listed: JobList


def jobs_to_stop(deployment: Deployment, slots: Sequence[str] = ()) -> JobsToStop:
    """The jobs of these slots, or of all, that run, wait, or may be restarted.

    Raises Invalid for an unknown slot, Conflict if the jobs are in another account.
    """
    listed = read_jobs(deployment)
    if listed.state is not None and listed.state.accounts:
        for target in deployment.targets.values():
            accounts: Mapping[str, str] = {}
            with contextlib.suppress(SkerryError):  # a place that does not answer must not keep the others running
                accounts = target.identity()
            check_accounts(deployment, listed.state, accounts)
    if unknown := set(slots) - {view.slot for _, view in listed.jobs}:
        text = f"no job of {', '.join(sorted(unknown))}; `skerry status` lists the jobs"
        raise Invalid("; ".join([text, *listed.unasked_lines]))
    chosen = [(job, view) for job, view in listed.jobs if not slots or view.slot in slots]
    # A job whose creation began may exist even if the cloud does not list it yet.
    newest = _newest(deployment, listed.state)
    creating = {address for address, entry in newest.items() if entry.phase is StatePhase.CREATING}
    live = [job for job, view in chosen if view.condition is Condition.READY or job.address in creating]
    jobs = tuple(job for job, view in chosen if job in live or view.again)
    return JobsToStop(jobs=jobs, live=tuple(live), listed=listed)


def stop_jobs(deployment: Deployment, to_stop: JobsToStop) -> Mapping[str, SkerryError]:
    """Stop these jobs and wait until they have ended; no `up` or other replica restarts them. Returns what failed.

    Raises Conflict, having stopped nothing, if the state changed since they were listed, or is locked by an apply or by
    an `up` that restarts a job. Without a state there is nothing to record: no `up` restarts a job that has no entry.
    """
    state = to_stop.listed.state
    if to_stop.jobs and state is not None:
        holder = this_process("cancel", deployment.clock)
        with deployment.open_state().hold(holder, state, deployment.run) as hold:
            note_revived(hold, state)
            for job in to_stop.jobs:
                key = Id(job.address, job.generation)
                if (entry := hold.entry(key)) is not None:
                    hold.note(key, dataclasses.replace(entry, stopped=True))

    def stop(job: StateRecord) -> SkerryError | None:
        try:
            if is_revivable(job):
                revivable_handler(deployment.handlers, job).forbid_revival(job)
            if job in to_stop.live:
                deployment.handlers[job.kind].delete(job)
        except SkerryError as error:
            return error
        return None

    with ThreadPoolExecutor(_PARALLEL_STOPS) as pool:
        results = zip(to_stop.jobs, pool.map(stop, to_stop.jobs), strict=True)
        return {job.name: error for job, error in results if error is not None}


def _read_jobs_of(
    deployment: Deployment, target: Target, newest: Mapping[str, Entry], *, unfinished: bool
) -> Iterator[tuple[StateRecord, JobView]]:
    """The jobs of one target. newest: its entries in the state, by address."""
    recorded = [entry.record for entry in newest.values()]
    listed: Iterable[StateRecord] = ()
    unsure = not newest or (unfinished and any(entry.phase is not StatePhase.READY for entry in newest.values()))
    # A cloud that the spec does not name is asked only for the jobs that the state has there.
    if unsure and (newest or target in deployment.targets.values()):
        regions = _regions(deployment, target, newest.values())
        listed = deployment.handlers[target.job_kind].list_owned(deployment.run, regions)
    jobs = _with_listed(recorded, listed)
    for number, (job, view) in enumerate(zip(jobs, target.jobs(jobs) if jobs else (), strict=True)):
        if number < len(recorded):
            yield job, _with_entry(view, newest[job.address])
        elif view.condition is Condition.READY:  # of an unrecorded job only whether it runs matters
            yield job, view


def _with_listed(recorded: Sequence[StateRecord], listed: Iterable[StateRecord]) -> list[StateRecord]:
    """The recorded jobs, then those that the cloud lists and that are none of them.

    A recorded job whose creation did not finish has no outputs yet and gets those of the listed one.
    """
    jobs = list(recorded)
    for job in listed:
        same = (at for at, known in enumerate(jobs) if _is_same(known, job))
        at = next(same, None)
        if at is None:
            jobs.append(job)
        else:
            jobs[at] = dataclasses.replace(jobs[at], outputs=job.outputs)
    return jobs


def _is_same(recorded: StateRecord, listed: StateRecord) -> bool:
    return recorded.name == listed.name and recorded.outputs.items() <= listed.outputs.items()


def _with_entry(view: JobView, entry: Entry) -> JobView:
    """The cloud's view and the state's: a job that `skerry cancel` stopped is not restarted, and says so."""
    why = view.why
    if entry.stopped and view.condition is Condition.LOST:
        why = f"{CANCELLED}; `skerry apply` starts it again"
    return dataclasses.replace(view, why=why, again=view.again and not entry.stopped, stopped=entry.stopped)


def _regions(deployment: Deployment, target: Target, entries: Iterable[Entry]) -> set[str]:
    """The regions in which a target's jobs may be: those that the spec names in its cloud, and those of the entries."""
    named = deployment.context.regions(targets.cloud_of(target.job_kind))
    return {*named, *(entry.record.region for entry in entries)}


def _place(deployment: Deployment, target: Target, entries: Iterable[Entry]) -> str:
    return f"{target.job_kind} in {', '.join(sorted(_regions(deployment, target, entries)))}"


def _newest(deployment: Deployment, state: State | None) -> dict[str, Entry]:
    """The newest generation of each job, by address."""
    entries = {} if state is None else state.by_id()
    newest = {entry.record.address: entry for _, entry in sorted(entries.items())}
    kinds = {target.job_kind for target in deployment.all_targets}
    return {address: entry for address, entry in newest.items() if entry.record.kind in kinds}
