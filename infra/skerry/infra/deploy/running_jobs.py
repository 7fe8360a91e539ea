"""The jobs of a deployment: lists what they are doing, reads their logs, and stops them."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.deploy.lock_owner_identity import this_process
from skerry.infra.deploy.read_clouds import read_state
from skerry.infra.provision.graph import Life
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.state import Id, StatePhase
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.deploy.deployment import Deployment
    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.state import Entry, State
    from skerry.infra.provision.target import JobView, LogLine

_PARALLEL_STOPS: Final = 16


def list_jobs(deployment: Deployment) -> list[tuple[StateRecord, JobView]]:
    """The newest job of each replica and what it is doing, in slot order."""
    return _list_jobs(deployment, read_state(deployment))


def read_log(deployment: Deployment, job: StateRecord, cursor: str | None) -> Iterator[LogLine]:
    """The lines that a job has written after `cursor`."""
    return next(target for target in deployment.all_targets if job.kind in target.handlers()).logs(job, cursor)


@dataclass(frozen=True, kw_only=True)
class JobsToStop:
    """Jobs that a cancel stops. state: when they were listed. live: those that run or wait, or may; the cloud is asked.

    The other jobs have ended but would be restarted.
    """

    state: State | None
    jobs: tuple[StateRecord, ...]
    live: tuple[StateRecord, ...]


def jobs_to_stop(deployment: Deployment, slots: Sequence[str] = ()) -> JobsToStop:
    """The jobs of these slots, or of all, that run, wait, or may be restarted. Raises Invalid for an unknown slot."""
    state = read_state(deployment)
    views = _list_jobs(deployment, state)
    if unknown := set(slots) - {view.slot for _, view in views}:
        raise Invalid(f"no job of {', '.join(sorted(unknown))}; `skerry status` lists the jobs")
    chosen = [(job, view) for job, view in views if not slots or view.slot in slots]
    # A job whose creation began may exist even if the cloud does not list it yet.
    creating = {address for address, entry in _newest(state).items() if entry.phase is StatePhase.CREATING}
    live = [job for job, view in chosen if view.condition is Condition.READY or job.address in creating]
    return JobsToStop(
        state=state, jobs=tuple(job for job, view in chosen if job in live or view.again), live=tuple(live)
    )


def stop_jobs(deployment: Deployment, to_stop: JobsToStop) -> None:
    """Stop these jobs and wait until they have ended; a watching `up` restarts none of them.

    Raises Conflict, having stopped nothing, if the state changed since they were listed, or is locked by an apply or by
    an `up` that restarts a job.
    """
    if not to_stop.jobs:
        return
    holder = this_process("cancel", deployment.clock)
    with deployment.open_state().hold(holder, to_stop.state, deployment.run) as hold:
        for job in to_stop.jobs:
            key = Id(job.address, job.generation)
            if (entry := hold.entry(key)) is not None:
                hold.note(key, dataclasses.replace(entry, stopped=True))

    def stop(job: StateRecord) -> None:
        deployment.handlers[job.kind].delete(job)

    with ThreadPoolExecutor(_PARALLEL_STOPS) as pool:
        for _ in pool.map(stop, to_stop.live):
            pass


def _list_jobs(deployment: Deployment, state: State | None) -> list[tuple[StateRecord, JobView]]:
    newest = _newest(state)
    pairs: list[tuple[StateRecord, JobView]] = []
    for target in deployment.all_targets:
        jobs = [entry.record for entry in newest.values() if entry.record.kind in target.handlers()]
        if jobs:  # a cloud that runs no job of this run is not asked
            pairs += zip(jobs, target.jobs(jobs), strict=True)
    views = [(job, _with_stop(view, newest[job.address])) for job, view in pairs]
    return sorted(views, key=lambda pair: keys.slot_order(pair[1].slot))


def _with_stop(view: JobView, entry: Entry) -> JobView:
    """The cloud's view and the state's: a job that `skerry cancel` stopped is not restarted."""
    return dataclasses.replace(view, again=view.again and not entry.stopped, stopped=entry.stopped)


def _newest(state: State | None) -> dict[str, Entry]:
    """The newest generation of each job, by address."""
    entries = {} if state is None else state.by_id()
    newest = {entry.record.address: entry for _, entry in sorted(entries.items())}
    return {address: entry for address, entry in newest.items() if entry.record.life is Life.JOB}
