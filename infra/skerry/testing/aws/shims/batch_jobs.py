"""moto 5.2.5 runs each job once, whatever its retryStrategy; this shim runs jobs as AWS does (`jobs`, `containers`).

Missing in moto: attempts with exit codes, reasons and streams; evaluateOnExit; reported timeouts; SIGTERM before
SIGKILL; memory and sharedMemorySize; output while a job runs, and in the definition's log group; the role's keys;
exitCode in DescribeJobs; a reason that a late TerminateJob does not overwrite; an array parent that ends with its
children and terminates them. Images in ECR come from the sandbox's registry.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flask import has_request_context, request
from moto.batch.models import Job

from skerry.testing.aws.batch_container_setup import BatchJobHost, requirement
from skerry.testing.job_runner import OVER, JobRun, Jobs, attempt_fields

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches
    from skerry.testing.container_environment import JobDefaults

_COPIED: Final = (
    "image",
    "jobRoleArn",
    "executionRoleArn",
    "linuxParameters",
    "logConfiguration",
    "mountPoints",
    "user",
)


def install(patches: Patches, jobs: Jobs, defaults: JobDefaults) -> None:
    """Install the shim: `jobs` runs every job."""

    def start(self: Any) -> None:
        self.skerry = JobRun(
            job=self.job_id,
            host=BatchJobHost(self, defaults),
            retry=_submit_parameter("retryStrategy") or self.job_definition.retry_strategy,
            limit_s=self._get_attempt_duration(),
            created_ms=jobs.now_ms(),
        )
        jobs.submit(self.skerry)

    def terminate(self: Any, reason: str) -> None:
        for child in self._child_jobs or ():
            child.terminate(reason)
        if (run := _run_of(self)) is not None:
            jobs.stop(run.job, reason)

    def describe(self: Any) -> dict[str, Any]:
        description = {**moto_describe(self), **_summary(self)}
        description["retryStrategy"] = {"attempts": 1, **(self.job_definition.retry_strategy or {})}
        if (run := _run_of(self)) is not None:
            description["retryStrategy"] |= run.retry or {}
            description["attempts"] = [attempt_fields(attempt) for attempt in run.attempts if attempt.end is not None]
            description["container"] = {**description["container"], **_container(self, run)}
            description["isTerminated"] = run.stopping is not None
        if "index" in self.array_properties:
            description["arrayProperties"] = {"index": self.array_properties["index"]}
        return description

    patches.replace(Job, "start", start)
    patches.replace(Job, "terminate", terminate)
    patches.replace(Job, "status", property(_status, lambda _self, _value: None))
    patches.replace(Job, "describe_short", _summary)
    moto_describe: Any = patches.replace(Job, "describe", describe)


def _run_of(job: Any) -> JobRun | None:
    """Return the run of a job; None for the parent of an array, which never runs."""
    return getattr(job, "skerry", None)


def _status(job: Any) -> str:
    if (run := _run_of(job)) is not None:
        return run.status
    children = {child.status for child in job._child_jobs or ()}  # noqa: SLF001  moto has no other way to ask
    if children <= OVER and children:
        return "FAILED" if "FAILED" in children else "SUCCEEDED"
    return "PENDING" if children else "SUBMITTED"


def _submit_parameter(name: str) -> Any:
    """Return a parameter of the current SubmitJob request."""
    return (request.get_json(silent=True, force=True) or {}).get(name) if has_request_context() else None


def _summary(job: Any) -> dict[str, Any]:
    run = _run_of(job)
    summary = {
        "jobId": job.job_id,
        "jobArn": job.arn,
        "jobName": job.job_name,
        "status": _status(job),
        "jobDefinition": job.job_definition.arn,
        "createdAt": int(job.job_created_at.timestamp() * 1000) if run is None else run.created_ms,
    }
    if run is None:
        return summary
    if run.status_reason is not None:
        summary["statusReason"] = run.status_reason
    if run.last is not None:
        summary["startedAt"] = run.last.started_ms
        summary["container"] = {name: value for name, value in _end_fields(run).items() if name != "logStreamName"}
    if run.stopped_ms is not None:
        summary["stoppedAt"] = run.stopped_ms
    return summary


def _end_fields(run: JobRun) -> dict[str, Any]:
    """Return exitCode, reason and stream of the current or latest attempt."""
    if run.last is None:
        return {}
    fields = attempt_fields(run.last)["container"]
    return {name: fields[name] for name in ("exitCode", "reason", "logStreamName") if name in fields}


def _container(job: Any, run: JobRun) -> dict[str, Any]:
    properties = job.job_definition.container_properties
    kinds = {kind: requirement(job, kind) for kind in ("VCPU", "MEMORY", "GPU")}
    return {
        **{name: properties[name] for name in _COPIED if name in properties},
        "resourceRequirements": [{"type": kind, "value": value} for kind, value in kinds.items() if value != "0"],
        **({} if run.last is None else {"taskArn": run.last.task}),
        **_end_fields(run),
    }
