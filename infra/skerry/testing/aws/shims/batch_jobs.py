"""moto 5.2.5's jobs are tried once, whatever their retryStrategy; here they go AWS's way (`jobs`, `boxes`).

Missing in moto: attempts with exit codes, reasons and streams; evaluateOnExit; timeouts that are told; SIGTERM before
SIGKILL; memory and sharedMemorySize; output while a job runs, and in the definition's own log group; the role's keys;
exitCode in DescribeJobs; a reason that a late TerminateJob does not overwrite; an array parent that ends with its
children and takes them along. Images in ECR come from the sandbox's registry.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flask import has_request_context, request
from moto.batch.models import Job

from skerry.infra.testing.hosting import JobHost, Surroundings, requirement
from skerry.infra.testing.jobs import OVER, Course, Jobs, attempt_told

if TYPE_CHECKING:
    from skerry.infra.testing.shims.patches import Patches

_COPIED: Final = (
    "image",
    "jobRoleArn",
    "executionRoleArn",
    "linuxParameters",
    "logConfiguration",
    "mountPoints",
    "user",
)


def install(patches: Patches, jobs: Jobs, around: Surroundings) -> None:
    """Give every job to `jobs`."""

    def start(self: Any) -> None:
        self.skerry = Course(
            job=self.job_id,
            host=JobHost(self, around),
            retry=_asked("retryStrategy") or self.job_definition.retry_strategy,
            limit_s=self._get_attempt_duration(),
            created_ms=jobs.now_ms(),
        )
        jobs.submit(self.skerry)

    def terminate(self: Any, reason: str) -> None:
        for child in self._child_jobs or ():
            child.terminate(reason)
        if (course := _course(self)) is not None:
            jobs.stop(course.job, reason)

    def describe(self: Any) -> dict[str, Any]:
        told = {**moto_s(self), **_short(self)}
        told["retryStrategy"] = {"attempts": 1, **(self.job_definition.retry_strategy or {})}
        if (course := _course(self)) is not None:
            told["retryStrategy"] |= course.retry or {}
            told["attempts"] = [attempt_told(one) for one in course.attempts if one.end is not None]
            told["container"] = {**told["container"], **_container(self, course)}
            told["isTerminated"] = course.stopping is not None
        if "index" in self.array_properties:
            told["arrayProperties"] = {"index": self.array_properties["index"]}
        return told

    patches.replace(Job, "start", start)
    patches.replace(Job, "terminate", terminate)
    patches.replace(Job, "status", property(_status, lambda _self, _value: None))
    patches.replace(Job, "describe_short", _short)
    moto_s: Any = patches.replace(Job, "describe", describe)


def _course(job: Any) -> Course | None:
    """None for the parent of an array, which never runs."""
    return getattr(job, "skerry", None)


def _status(job: Any) -> str:
    if (course := _course(job)) is not None:
        return course.status
    children = {child.status for child in job._child_jobs or ()}  # noqa: SLF001  moto has no other way to ask
    if children <= OVER and children:
        return "FAILED" if "FAILED" in children else "SUCCEEDED"
    return "PENDING" if children else "SUBMITTED"


def _asked(name: str) -> Any:
    """A parameter of the SubmitJob that is being answered."""
    return (request.get_json(silent=True, force=True) or {}).get(name) if has_request_context() else None


def _short(job: Any) -> dict[str, Any]:
    course = _course(job)
    told = {
        "jobId": job.job_id,
        "jobArn": job.arn,
        "jobName": job.job_name,
        "status": _status(job),
        "jobDefinition": job.job_definition.arn,
        "createdAt": int(job.job_created_at.timestamp() * 1000) if course is None else course.created_ms,
    }
    if course is None:
        return told
    if course.status_reason is not None:
        told["statusReason"] = course.status_reason
    if course.last is not None:
        told["startedAt"] = course.last.started_ms
        told["container"] = {name: value for name, value in _end(course).items() if name != "logStreamName"}
    if course.stopped_ms is not None:
        told["stoppedAt"] = course.stopped_ms
    return told


def _end(course: Course) -> dict[str, Any]:
    """exitCode, reason and stream of the attempt that runs, or ran last."""
    if course.last is None:
        return {}
    told = attempt_told(course.last)["container"]
    return {name: told[name] for name in ("exitCode", "reason", "logStreamName") if name in told}


def _container(job: Any, course: Course) -> dict[str, Any]:
    properties = job.job_definition.container_properties
    kinds = {kind: requirement(job, kind) for kind in ("VCPU", "MEMORY", "GPU")}
    return {
        **{name: properties[name] for name in _COPIED if name in properties},
        "resourceRequirements": [{"type": kind, "value": value} for kind, value in kinds.items() if value != "0"],
        **({} if course.last is None else {"taskArn": course.last.task}),
        **_end(course),
    }
