"""Handles jobs of services that number them, label them, and never restart them: creates, finds, stops, describes them.

Such a service prevents no duplicates. So `create` first looks for a live job with the labels, creates one once, and
looks again if there was no answer. The record of an ended job cannot be deleted, so that only its recorded id finds it:
a job from before a destroy must not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from skerry.infra.clouds.google import owner_labels
from skerry.infra.clouds.handler_helpers import Absent, wait_for
from skerry.infra.provision.graph import as_json, refs
from skerry.infra.provision.handler import Condition, NamedJob, Observed
from skerry.infra.provision.target_and_store_interfaces import JobView, LogLine
from skerry.infra.targets.shared.job_view_helpers import (
    AGAIN,
    EXIT_CODES,
    exit_text,
    joined,
    slot_of,
    unknown_job,
)
from skerry.runtime import contract
from skerry.runtime.contract import ExitCode, may_succeed_again
from skerry.runtime.errors import Invalid, Retryable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from skerry.infra.clouds.handler_helpers import Event
    from skerry.infra.provision.graph import Json, Resource
    from skerry.infra.provision.handler import Desired, StateRecord
    from skerry.runtime.clock import Clock

SPEC_LABEL: Final = "skerry-spec"
"""The label with the digest of a job's settings: two jobs of one name and run differ in it."""
NAME_LABEL: Final = "name"
# A container has seconds to stop; then its machine is released.
_ENDED_S: Final = 300.0
_LISTED_S: Final = 10.0
_DIGITS: Final = 16
_EXIT_CODES: Final = {**EXIT_CODES, int(ExitCode.RETRY): f"an outside failure; {AGAIN}"}


@dataclass(frozen=True, kw_only=True)
class LabelledJob:
    """A job as its service reports it. state: the service's own word. settings: those that can be read back.

    why: the meaning of the state, without that of an exit code. passing: it failed without an exit code, and another
    start may succeed. stopped: on request.
    """

    id: str
    labels: Mapping[str, str]
    state: str
    condition: Condition
    settings: Mapping[str, Json] = field(default_factory=dict[str, "Json"])
    why: str = ""
    exit_code: int | None = None
    passing: bool = False
    stopped: bool = False
    started_s: float | None = None
    ended_s: float | None = None

    @property
    def live(self) -> bool:
        """True if it waits or runs."""
        return self.condition is Condition.READY

    @property
    def name(self) -> str:
        """Its name, with the generation."""
        return self.labels.get(NAME_LABEL, "")

    def owner(self, run: str) -> str | None:
        """The given run's URI if it is the run's own job, else another owner; None without labels."""
        mark = owner_labels.of_labels(self.labels)
        return None if mark is None else mark.owner(run)


class JobService(Protocol):
    """One service. Thread-safe. A region is what the service has instead. Calls may raise Retryable, Unauthorized."""

    @property
    def title(self) -> str:
        """Its name, for people."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock for waiting."""
        ...

    def listed(self, region: str, run: str) -> Iterable[LabelledJob]:
        """The jobs with the labels of a run, and live ones that are the run's without them."""
        ...

    def described(self, region: str, job: str) -> LabelledJob | None:
        """The job of this id; None without a record."""
        ...

    def submit(self, desired: Desired) -> str:
        """Create a job, once, and return its id. Raises Retryable if there was no answer."""
        ...

    def stop(self, region: str, job: str) -> None:
        """Ask a job to stop; an ended one counts as stopped. Raises Absent if there is none."""
        ...

    def events(self, region: str, job: str) -> Iterable[Event]:
        """The lines of its log, oldest first, always from the start."""
        ...


class LabelledJobs:
    """See JobHandler. kind: of the resources."""

    def __init__(self, service: JobService, kind: type[Resource]) -> None:
        self._service = service
        self._kind = kind

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. One listing for each region; recorded jobs that are missing from it are read by id."""
        known: dict[tuple[str, str], list[LabelledJob]] = {}
        seen: list[Observed | None] = []
        for desired in all_desired:
            place = (desired.resource.region, desired.run)
            if place not in known:
                known[place] = list(self._service.listed(*place))
            job = self._job_of(desired, known[place])
            seen.append(None if job is None else _observed(job, desired))
        return seen

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create. Another live job of the slot is ended first."""
        region = desired.resource.region
        existing = list(self._named(desired))
        for job in existing:
            if _is_this(job, desired):
                return {"id": job.id}
        for job in existing:
            self._end(region, job.id, desired.name)
        try:
            return {"id": self._service.submit(desired)}
        except Retryable as error:
            return self._submitted(desired, error)

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Every setting of a job is fixed."""
        raise Invalid(f"a job cannot change: {desired.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, state_record: StateRecord) -> None:
        """See Handler.delete. Its record stays at the service."""
        region = state_record.region
        known = state_record.outputs.get("id")
        run = run_of(state_record)
        if known is None and run is not None:
            live = (job for job in self._service.listed(region, run) if job.live)
            ids = [job.id for job in live if job.name == state_record.name]
        else:
            ids = [] if known is None else [known]
        for job in ids:
            self._end(region, job, state_record.name)

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Live jobs only, because ended ones stay at the service for ever."""
        for region in sorted(regions):
            for job in self._service.listed(region, run):
                mark = owner_labels.of_labels(job.labels)
                if job.live and mark is not None and mark.owner(run) == run:
                    yield owner_labels.owned_record(
                        self._kind, mark, name=job.name, region=region, outputs={"id": job.id}
                    )

    def stop(self, state_record: StateRecord) -> None:
        """See JobHandler.stop."""
        self._service.stop(state_record.region, state_record.outputs["id"])

    def names(self, like: StateRecord, run: str) -> Iterable[NamedJob]:
        """See JobHandler.names."""
        for job in self._service.listed(like.region, run):
            yield NamedJob(job.name, over=not job.live)

    def _job_of(self, desired: Desired, jobs: Sequence[LabelledJob]) -> LabelledJob | None:
        known = desired.outputs.get("id")
        if known is None:
            return next((job for job in jobs if job.live and _is_this(job, desired)), None)
        job = next((job for job in jobs if job.id == known), None)
        return self._service.described(desired.resource.region, known) if job is None else job

    def _named(self, desired: Desired) -> Iterator[LabelledJob]:
        """The live jobs of the slot, of any generation."""
        for job in self._service.listed(desired.resource.region, desired.run):
            mark = owner_labels.of_labels(job.labels)
            if job.live and mark is not None and mark.key == desired.resource.key:
                yield job

    def _submitted(self, desired: Desired, lost: Retryable) -> Mapping[str, str]:
        """The job of a request without an answer. Raises `lost` if there is none."""

        def ask() -> Mapping[str, str] | None:
            return next(({"id": job.id} for job in self._named(desired) if _is_this(job, desired)), None)

        clock = self._service.clock
        try:
            return wait_for(clock, f"the job {desired.name} is listed", clock.now() + _LISTED_S, ask)
        except Retryable:
            raise lost from None

    def _end(self, region: str, job: str, name: str) -> None:
        """Stop a live job and wait for its end. Raises NotYetVisible on a timeout."""

        def ended() -> bool | None:
            row = self._service.described(region, job)
            return True if row is None or not row.live else None

        if ended():
            return
        try:
            self._service.stop(region, job)
        except Absent:
            return
        clock = self._service.clock
        wait_for(clock, f"the job {name} has ended", clock.now() + _ENDED_S, ended)


def labels(desired: Desired) -> dict[str, str]:
    """The labels that identify the run and the job, and the user's own."""
    return {**owner_labels.labels(desired), SPEC_LABEL: settings_digest(desired), NAME_LABEL: desired.name}


def settings_digest(desired: Desired) -> str:
    """The digest of the settings that a job is created with."""
    settings = {name: as_json(value) for name, value in desired.settings.items() if name != "region"}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def run_label(run: str) -> tuple[str, str]:
    """The label, with its value, that all jobs of a run have."""
    return owner_labels.RUN_LABEL, owner_labels.run_mark(run)


def run_of(state_record: StateRecord) -> str | None:
    """The run's URI in a recorded job; None if its record lacks it."""
    environment = state_record.settings.get("environment")
    run = environment.get(contract.RUN_URI) if isinstance(environment, Mapping) else None
    return run if isinstance(run, str) else None


def views(service: JobService, state_records: Sequence[StateRecord]) -> list[JobView]:
    """The views of these jobs, in their order. One listing for each region and run; a single job is read by its id."""
    several = state_records if len(state_records) > 1 else ()
    places = {(record.region, run) for record in several if (run := run_of(record)) is not None}
    jobs = {job.id: job for place in places for job in service.listed(*place)}
    return [_view(service, record, jobs) for record in state_records]


def _view(service: JobService, state_record: StateRecord, jobs: Mapping[str, LabelledJob]) -> JobView:
    known = state_record.outputs.get("id")
    if known is None:
        return unknown_job(state_record, state_record.name, f"its job was never created; {AGAIN}")
    job = jobs.get(known) or service.described(state_record.region, known)
    if job is None:
        return unknown_job(state_record, known, f"{service.title} has no record of it; {AGAIN}")
    return view_of(slot_of(state_record), state_record.generation, job)


def view_of(slot: str, generation: int, job: LabelledJob) -> JobView:
    """Describe one job. Pure."""
    done = job.condition is Condition.DONE
    code = 0 if done else job.exit_code
    return JobView(
        slot=slot,
        job=job.id,
        state=job.state,
        condition=job.condition,
        why="done" if done else joined(job.why, exit_text(code, _EXIT_CODES)),
        # A job that replaces a lost one is the next generation. Modal shows no start, but one that has a code has run.
        attempt=0 if job.started_s is None and code is None else generation + 1,
        exit_code=code,
        started_s=job.started_s,
        ended_s=job.ended_s,
        again=_may_succeed_again(job),
        stopped=job.stopped,
    )


def lines(service: JobService, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
    """The log lines of a job, oldest first, after `cursor` only: a number of lines. Raises Invalid if it has no job."""
    job = state_record.outputs.get("id")
    if not job:
        raise Invalid(f"no logs of {state_record.name}: its job was never created; run `skerry apply` again")
    if cursor is not None and not cursor.isdecimal():
        raise Invalid(f"not a place in a job's log: {cursor!r}")
    for number, event in enumerate(service.events(state_record.region, job), 1):
        if number > int(cursor or 0):
            yield LogLine(slot=slot_of(state_record), at_s=event.at_s, text=event.text, cursor=str(number))


def _may_succeed_again(job: LabelledJob) -> bool:
    """Return whether the job failed and another start may succeed. A stop is not a failure."""
    if job.condition is not Condition.LOST or job.stopped:
        return False
    return job.passing if job.exit_code is None else may_succeed_again(job.exit_code)


def _observed(job: LabelledJob, desired: Desired) -> Observed:
    settings: dict[str, Json] = {"region": desired.resource.region, **job.settings}
    if not job.settings and not _has_settings(job, desired):  # its settings cannot be read, and are others
        settings["environment"] = {SPEC_LABEL: job.labels.get(SPEC_LABEL, "")}
    return Observed(
        outputs={"id": job.id},
        settings=settings,
        owner=job.owner(desired.run),
        condition=job.condition,
        detail=job.why or job.state.lower(),
    )


def _is_this(job: LabelledJob, desired: Desired) -> bool:
    """Return whether it is this job: a job from before a destroy may have other settings."""
    return job.name == desired.name and _has_settings(job, desired)


def _has_settings(job: LabelledJob, desired: Desired) -> bool:
    unknown = any(True for _ in refs(desired.settings))  # a setting of a resource that does not exist yet
    return unknown or job.labels.get(SPEC_LABEL) == settings_digest(desired)
