"""Handles jobs of AWS Batch, one for each replica: submits, reads and terminates them.

SubmitJob has no token that makes a repeated request harmless, and names are not unique. So `create` first looks in the
queue for a job of the name and the run, submits once, and looks again if there was no answer. Batch deletes the record
of a job some days after its end; the job is then absent, and only the run's own records have its end.
Sources: Batch API reference, SubmitJob, ListJobs, DescribeJobs, TerminateJob.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.tags import owned_job, owner_of
from skerry.infra.clouds.handler_helpers import Absent, NotYetVisible, text, wait_for
from skerry.infra.provision.handler import ADDRESS_TAG, NamedJob
from skerry.infra.provision.target_and_store_interfaces import stem_of
from skerry.infra.targets.aws_batch import parse_observed_settings, requests
from skerry.infra.targets.aws_batch.resource_types import Job
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.runtime.errors import Invalid, Retryable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.graph import Value
    from skerry.infra.provision.handler import Desired, Observed, StateRecord

# A container has 30 s to stop; then the machine reports its end to Batch.
_ENDED_S: Final = 300.0
# A submitted job appears in the listing; AWS does not document how soon.
_LISTED_S: Final = 10.0
_AT_ONCE: Final = 100
_OURS: Final = "skerry-*"
STOPPED: Final = "skerry: stopped by the operator"
"""The reason of a job that was stopped on request."""


class Jobs:
    """See JobHandler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. Reads a hundred in one call, and lists the queue for jobs without a known id."""
        rows: dict[str, Mapping[str, Any]] = {}
        by_name: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for region, in_region in _by_region(all_desired):
            ids = [job.outputs["id"] for job in in_region if job.outputs.get("id")]
            rows |= {str(row["jobId"]): row for row in described(self._aws, region, ids)}
            for queue, lost in _by_queue([job for job in in_region if not job.outputs.get("id")]):
                for row in self._named(region, queue, f"{_common({job.name for job in lost})}*"):
                    by_name.setdefault((region, str(row["jobName"])), []).append(row)
        seen: list[Observed | None] = []
        for desired in all_desired:
            region = desired.resource.region
            named = by_name.get((region, desired.name), [])
            row = rows.get(desired.outputs.get("id", "")) or next(
                (row for row in named if _is_this(row, desired)), None
            )
            seen.append(None if row is None else parse_observed_settings.job(row, region))
        return seen

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create. Another job of the name is ended first, because a slot has one job."""
        region = desired.resource.region
        existing = [
            row for row in self._named(region, text(desired.settings["queue"]), desired.name) if _is_ours(row, desired)
        ]
        for row in existing:
            if _is_this(row, desired) and row["status"] != "FAILED":
                return parse_observed_settings.job(row, region).outputs
        self._end(region, desired.name, [str(row["jobId"]) for row in existing if _is_live(row)])
        try:
            answer = self._aws.call_once("batch", region, "submit_job", **ready(requests.job(desired)))
        except Retryable as error:
            return self._submitted(desired, error)
        return {"id": str(answer["jobId"]), "arn": str(answer.get("jobArn", ""))}

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. `log_group` is only recorded; all other settings are fixed."""
        if set(changed) <= {"log_group"}:
            return desired.outputs
        raise Invalid(f"a job cannot change: {desired.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, state_record: StateRecord) -> None:
        """See Handler.delete. In any state; a job that has ended, or has no record, counts as deleted."""
        self._end(state_record.region, state_record.name, self._ids_of(state_record))

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Searches every queue, because the user's own queues have no tag of the run."""
        for region in sorted(regions):
            for queue in self._aws.pages("batch", region, "describe_job_queues", "jobQueues"):
                for row in self._named(region, str(queue["jobQueueArn"]), _OURS):
                    outputs, tags = parse_observed_settings.job(row, region).outputs, row.get("tags", {})
                    job = owned_job(Job, run, name=str(row["jobName"]), region=region, tags=tags, outputs=outputs)
                    if job is not None and _is_live(row):
                        yield job

    def stop(self, state_record: StateRecord) -> None:
        """See JobHandler.stop."""
        self._terminate(state_record.region, state_record.outputs["id"])

    def names(self, like: StateRecord, run: str) -> Iterable[NamedJob]:
        """See JobHandler.names. In the queue of `like`."""
        for row in self._listed(like.region, str(like.settings["queue"]), f"{stem_of(run)}-*"):
            yield NamedJob(str(row["jobName"]), over=not _is_live(row))

    def _submitted(self, desired: Desired, lost: Retryable) -> Mapping[str, str]:
        """Return the job of a submission without an answer. Raises `lost` if there is none."""
        region = desired.resource.region

        def ask() -> Mapping[str, str] | None:
            for row in self._named(region, text(desired.settings["queue"]), desired.name):
                if _is_this(row, desired) and row["status"] != "FAILED":
                    return parse_observed_settings.job(row, region).outputs
            return None

        clock = self._aws.clock
        try:
            return wait_for(clock, f"the job {desired.name} is listed", clock.now() + _LISTED_S, ask)
        except NotYetVisible:
            raise lost from None

    def _end(self, region: str, name: str, ids: Sequence[str]) -> None:
        for job in ids:
            self._terminate(region, job)

        def ended() -> bool | None:
            return None if any(map(_is_live, described(self._aws, region, ids))) else True

        if ids:
            deadline = self._aws.clock.now() + _ENDED_S
            wait_for(self._aws.clock, f"the job {name} has ended", deadline, ended)

    def _terminate(self, region: str, job: str) -> None:
        self._aws.call("batch", region, "terminate_job", jobId=job, reason=STOPPED)

    def _ids_of(self, state_record: StateRecord) -> list[str]:
        """Return the ids of the recorded job, or of unrecorded live jobs of its name."""
        if job := state_record.outputs.get("id"):
            return [str(row["jobId"]) for row in described(self._aws, state_record.region, [job]) if _is_live(row)]
        queue = state_record.settings.get("queue")
        if not isinstance(queue, str) or queue.startswith("${"):
            return []
        return [
            str(row["jobId"])
            for row in self._named(state_record.region, queue, state_record.name)
            if row["jobName"] == state_record.name
            and row.get("tags", {}).get(ADDRESS_TAG) == state_record.address
            and _is_live(row)
        ]

    def _named(self, region: str, queue: str, name: str) -> Iterator[Mapping[str, Any]]:
        """Return jobs of a queue by name in any state, newest first. name: may end in "*"; its case is ignored."""
        try:
            rows = sorted(self._listed(region, queue, name), key=lambda row: -int(row.get("createdAt", 0)))
        except (Absent, Invalid) as error:
            if isinstance(error, Absent) or "does not exist" in str(error):
                return  # the queue was deleted, and its jobs with it
            raise
        yield from described(self._aws, region, [str(row["jobId"]) for row in rows])

    def _listed(self, region: str, queue: str, name: str) -> Iterator[Mapping[str, Any]]:
        names = [{"name": "JOB_NAME", "values": [name]}]
        return self._aws.pages("batch", region, "list_jobs", "jobSummaryList", jobQueue=queue, filters=names)


def described(aws: Aws, region: str, ids: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the descriptions of these jobs, in their order, without jobs that have no record any more."""
    rows: dict[str, Mapping[str, Any]] = {}
    for start in range(0, len(ids), _AT_ONCE):
        answer = aws.call("batch", region, "describe_jobs", jobs=list(ids[start : start + _AT_ONCE]))
        rows |= {str(row["jobId"]): row for row in answer["jobs"]}
    return [rows[job] for job in ids if job in rows]


def _is_ours(row: Mapping[str, Any], desired: Desired) -> bool:
    """Return whether a job has this name, whose case Batch ignores, and belongs to this run."""
    return row["jobName"] == desired.name and owner_of(row.get("tags", {})) == desired.run


def _is_this(row: Mapping[str, Any], desired: Desired) -> bool:
    """Return whether it is this job: a job from before a destroy has another revision of the definition."""
    definition = desired.settings.get("definition")
    known = not isinstance(definition, str) or row["jobDefinition"] == definition
    return known and _is_ours(row, desired)


def _is_live(row: Mapping[str, Any]) -> bool:
    return row["status"] in parse_observed_settings.LIVE


def _common(names: Collection[str]) -> str:
    """Return the common beginning of all names."""
    first, last = min(names), max(names)
    length = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


def _by_region(all_desired: Sequence[Desired]) -> Iterator[tuple[str, list[Desired]]]:
    def region(desired: Desired) -> str:
        return desired.resource.region

    for name, in_region in groupby(sorted(all_desired, key=region), key=region):
        yield name, list(in_region)


def _by_queue(all_desired: Sequence[Desired]) -> Iterator[tuple[str, list[Desired]]]:
    """Group by queue, without jobs whose queue does not exist yet."""
    found_in: dict[str, list[Desired]] = {}
    for desired in all_desired:
        queue: Value = desired.settings.get("queue")
        if isinstance(queue, str):
            found_in.setdefault(queue, []).append(desired)
    yield from found_in.items()
