"""Starts and ends jobs of AWS Batch, one for each replica.

SubmitJob has no token that would make a repeat harmless, and names are not unique: whoever submits looks first for a
job of that name and of this run in the queue, asks once, and looks again if there was no answer. Batch forgets a job
some days after it ended; then it is as if it was never there, and the caller's own records say how it ended.
Sources: Batch API reference, SubmitJob, ListJobs, DescribeJobs, TerminateJob.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.handling import found, owner_of
from skerry.infra.clouds.handling import Absent, Late, text, waited
from skerry.infra.handler import ADDRESS_TAG
from skerry.infra.targets.aws_batch import reading, requests
from skerry.infra.targets.aws_batch.resources import Job
from skerry.runtime.errors import Invalid, Retryable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.graph import Value
    from skerry.infra.handler import Made, Seen, Wanted

# A stop gives a container 30 s; then a machine has to tell, and Batch has to believe it.
_ENDED_S: Final = 300.0
# Whether a job was submitted shows in a listing; how soon, AWS does not say.
_LISTED_S: Final = 10.0
_AT_ONCE: Final = 100
_OURS: Final = "skerry-*"


class Jobs:
    """See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read. A hundred in one call; those whose id is not known are looked for in their queue."""
        rows: dict[str, Mapping[str, Any]] = {}
        by_name: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for region, some in _by_region(wanted):
            ids = [one.outputs["id"] for one in some if one.outputs.get("id")]
            rows |= {str(row["jobId"]): row for row in described(self._aws, region, ids)}
            for queue, lost in _by_queue([one for one in some if not one.outputs.get("id")]):
                for row in self._named(region, queue, f"{_common({one.name for one in lost})}*"):
                    by_name.setdefault((region, str(row["jobName"])), []).append(row)
        seen: list[Seen | None] = []
        for one in wanted:
            region = one.resource.region
            named = by_name.get((region, one.name), [])
            row = rows.get(one.outputs.get("id", "")) or next((row for row in named if _is_this(row, one)), None)
            seen.append(None if row is None else reading.job(row, region))
        return seen

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create. A job of that name that runs something else is ended first: a slot has one."""
        region = wanted.resource.region
        there = [
            row for row in self._named(region, text(wanted.settings["queue"]), wanted.name) if _is_ours(row, wanted)
        ]
        for row in there:
            if _is_this(row, wanted) and row["status"] != "FAILED":
                return reading.job(row, region).outputs
        self._end(region, wanted.name, [str(row["jobId"]) for row in there if _is_live(row)])
        try:
            told = self._aws.call_once("batch", region, "submit_job", **requests.ready(requests.job(wanted)))
        except Retryable as error:
            return self._submitted(wanted, error)
        return {"id": str(told["jobId"]), "arn": str(told.get("jobArn", ""))}

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. What a job writes its logs to is told for readers alone; the rest is fixed."""
        if set(changed) <= {"log_group"}:
            return wanted.outputs
        raise Invalid(f"a job cannot change: {wanted.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, made: Made) -> None:
        """See Handler.delete. Whatever it is doing; ended already, or forgotten, is success."""
        self._end(made.region, made.name, self._ids_of(made))

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned. In every queue: one that the user brought carries no tag of ours."""
        for region in sorted(regions):
            for queue in self._aws.pages("batch", region, "describe_job_queues", "jobQueues"):
                for row in self._named(region, str(queue["jobQueueArn"]), _OURS):
                    tags: Mapping[str, str] = row.get("tags", {})
                    if owner_of(tags) == run and _is_live(row):
                        outputs = reading.job(row, region).outputs
                        yield found(Job, name=str(row["jobName"]), region=region, tags=tags, outputs=outputs)

    def _submitted(self, wanted: Wanted, lost: Retryable) -> Mapping[str, str]:
        """What became of a submission without an answer. Raises `lost` if no job is seen: the next apply looks, too."""
        region = wanted.resource.region

        def ask() -> Mapping[str, str] | None:
            for row in self._named(region, text(wanted.settings["queue"]), wanted.name):
                if _is_this(row, wanted) and row["status"] != "FAILED":
                    return reading.job(row, region).outputs
            return None

        clock = self._aws.clock
        try:
            return waited(clock, f"the job {wanted.name} is listed", clock.now() + _LISTED_S, ask)
        except Late:
            raise lost from None

    def _end(self, region: str, name: str, ids: Sequence[str]) -> None:
        for job in ids:
            reason = "skerry: stopped by the operator"
            self._aws.call("batch", region, "terminate_job", jobId=job, reason=reason)

        def ended() -> bool | None:
            return None if any(map(_is_live, described(self._aws, region, ids))) else True

        if ids:
            deadline = self._aws.clock.now() + _ENDED_S
            waited(self._aws.clock, f"the job {name} has ended", deadline, ended)

    def _ids_of(self, made: Made) -> list[str]:
        """Of what is to be ended: the job as recorded, or whatever of its name was submitted and never recorded."""
        if job := made.outputs.get("id"):
            return [str(row["jobId"]) for row in described(self._aws, made.region, [job]) if _is_live(row)]
        queue = made.settings.get("queue")
        if not isinstance(queue, str) or queue.startswith("${"):
            return []
        return [
            str(row["jobId"])
            for row in self._named(made.region, queue, made.name)
            if row["jobName"] == made.name and row.get("tags", {}).get(ADDRESS_TAG) == made.address and _is_live(row)
        ]

    def _named(self, region: str, queue: str, name: str) -> Iterator[Mapping[str, Any]]:
        """Jobs of a queue by name, newest first, whatever became of them. name: may end in "*"; its case is ignored."""
        listed = self._aws.pages(
            "batch",
            region,
            "list_jobs",
            "jobSummaryList",
            jobQueue=queue,
            filters=[{"name": "JOB_NAME", "values": [name]}],
        )
        try:
            rows = sorted(listed, key=lambda row: -int(row.get("createdAt", 0)))
        except (Absent, Invalid) as error:
            if isinstance(error, Absent) or "does not exist" in str(error):
                return  # the queue has gone, and its jobs with it
            raise
        yield from described(self._aws, region, [str(row["jobId"]) for row in rows])


def described(aws: Aws, region: str, ids: Sequence[str]) -> list[Mapping[str, Any]]:
    """What Batch says of these jobs, in the order asked, a hundred in one call; what it has forgotten is left out."""
    rows: dict[str, Mapping[str, Any]] = {}
    for start in range(0, len(ids), _AT_ONCE):
        told = aws.call("batch", region, "describe_jobs", jobs=list(ids[start : start + _AT_ONCE]))
        rows |= {str(row["jobId"]): row for row in told["jobs"]}
    return [rows[job] for job in ids if job in rows]


def _is_ours(row: Mapping[str, Any], wanted: Wanted) -> bool:
    """Whether a job is of this name, whose case Batch ignores, and of this run."""
    return row["jobName"] == wanted.name and owner_of(row.get("tags", {})) == wanted.run


def _is_this(row: Mapping[str, Any], wanted: Wanted) -> bool:
    """Whether it is the very one: what ran under the name before a destroy had another revision of the definition."""
    definition = wanted.settings.get("definition")
    known = not isinstance(definition, str) or row["jobDefinition"] == definition
    return known and _is_ours(row, wanted)


def _is_live(row: Mapping[str, Any]) -> bool:
    return row["status"] in reading.LIVE


def _common(names: Collection[str]) -> str:
    """What all names begin with."""
    first, last = min(names), max(names)
    length = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[:length]


def _by_region(wanted: Sequence[Wanted]) -> Iterator[tuple[str, list[Wanted]]]:
    def region(one: Wanted) -> str:
        return one.resource.region

    for name, some in groupby(sorted(wanted, key=region), key=region):
        yield name, list(some)


def _by_queue(wanted: Sequence[Wanted]) -> Iterator[tuple[str, list[Wanted]]]:
    """By the queue they are in, as far as there is one yet."""
    found_in: dict[str, list[Wanted]] = {}
    for one in wanted:
        queue: Value = one.settings.get("queue")
        if isinstance(queue, str):
            found_in.setdefault(queue, []).append(one)
    yield from found_in.items()
