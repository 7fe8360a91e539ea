"""moto 5.2.5 completes training jobs at once; this shim runs them as SageMaker does (`jobs`, `containers`).

Missing in moto: states and their history; stopping and deleting; environment, retries, network and other fields of a
request; reclaimed spot machines; time limits; the folders of /opt/ml, and the failure file there; the role's keys;
output while a job runs.
Sources: SageMaker API reference, DescribeTrainingJob, StopTrainingJob, DeleteTrainingJob; developer guide, "How Amazon
SageMaker AI Runs Your Training Image", "... Provides Training Information", "... Signals Algorithm Success and
Failure".
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any, Final

from moto.core.responses import EmptyResult
from moto.sagemaker.exceptions import AWSValidationException, ResourceInUseException
from moto.sagemaker.models import FakeTrainingJob, SageMakerModelBackend
from moto.sagemaker.responses import SageMakerResponse

from skerry.testing.aws.training_container_setup import TrainingJobHost
from skerry.testing.batch_retry_rules import TIMED_OUT
from skerry.testing.docker_containers import NOT_STARTED
from skerry.testing.job_runner import INTERRUPTED, JobRun, Jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.testing.aws.shims.patching import Patches
    from skerry.testing.batch_retry_rules import Strategy
    from skerry.testing.container_environment import JobDefaults

# Spot machines are replaced as often as they are lost; max_wait is not played here.
_UNLIMITED: Final = 1000
_LONGEST_REASON: Final = 1024
_STATES: Final = {
    "STARTING": ("InProgress", "Downloading"),
    "RUNNING": ("InProgress", "Training"),
    "SUCCEEDED": ("Completed", "Completed"),
}
_NO_REASON: Final = "Please look at the stderr for more information."


def install(patches: Patches, jobs: Jobs, defaults: JobDefaults, looks: Callable[[], int]) -> None:
    """Install the shim: `jobs` runs every training job, by name. looks: descriptions that still report "Stopping"."""

    def create_training_job(self: Any) -> Any:
        request = json.loads(self.body)
        answer = moto_create(self)
        job = self.sagemaker_backend.training_jobs[request["TrainingJobName"]]
        job.skerry_request, job.skerry_looks = request, 0
        job.skerry_host = TrainingJobHost(request, job.arn, self.region, defaults)
        job.skerry = JobRun(
            job=job.training_job_name,
            host=job.skerry_host,
            retry=_retries(request),
            limit_s=float(request.get("StoppingCondition", {}).get("MaxRuntimeInSeconds", 24 * 3600)),
            created_ms=jobs.now_ms(),
        )
        jobs.submit(job.skerry)
        return answer

    def describe_training_job(self: Any, training_job_name: str) -> dict[str, Any]:
        job = _find_job(self, training_job_name)
        description = _description(job)
        job.skerry_looks = max(0, job.skerry_looks - 1)
        return description

    def stop_training_job(self: Any) -> EmptyResult:
        job = _find_job(self.sagemaker_backend, self._get_param("TrainingJobName"))
        status, _ = _status(job)
        if status not in {"InProgress", "Stopping"}:
            raise AWSValidationException(f"The request was rejected because the training job is in status {status}.")
        if status == "InProgress":
            job.skerry_looks = looks()
            jobs.stop(job.skerry.job, "stopped")
        return EmptyResult()

    def delete_training_job(self: Any) -> EmptyResult:
        job = _find_job(self.sagemaker_backend, self._get_param("TrainingJobName"))
        status, _ = _status(job)
        if status in {"InProgress", "Stopping"}:
            raise ResourceInUseException(f"The training job is in status {status} and cannot be deleted.")
        del self.sagemaker_backend.training_jobs[job.training_job_name]
        return EmptyResult()

    moto_create: Any = patches.replace(SageMakerResponse, "create_training_job", create_training_job)
    patches.replace(SageMakerModelBackend, "describe_training_job", describe_training_job)
    patches.replace(SageMakerResponse, "stop_training_job", stop_training_job)
    patches.replace(SageMakerResponse, "delete_training_job", delete_training_job)
    status_property = property(lambda job: _status(job)[0], lambda _job, _word: None)  # moto sets it on creation
    patches.replace(FakeTrainingJob, "training_job_status", status_property)


def _find_job(backend: Any, name: str) -> Any:
    job = backend.training_jobs.get(name)
    if job is None:
        raise AWSValidationException("Requested resource not found.")
    return job


def _retries(request: Mapping[str, Any]) -> Strategy:
    """Replace a lost machine if it is Spot, or as often as the request allows; retry nothing else."""
    spot = request.get("EnableManagedSpotTraining", False)
    attempts = _UNLIMITED if spot else 1 + int(request.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0))
    rules = [{"onStatusReason": "Host EC2*", "action": "RETRY"}, {"onReason": "*", "action": "EXIT"}]
    return {"attempts": attempts, "evaluateOnExit": rules}


def _status(job: Any) -> tuple[str, str]:
    """Return TrainingJobStatus and SecondaryStatus."""
    run: JobRun = job.skerry
    if run.stopping is not None and (not run.is_over or job.skerry_looks):
        return "Stopping", "Stopping"
    if run.status == "FAILED":
        stopped = "MaxRuntimeExceeded" if run.status_reason == TIMED_OUT else "Stopped"
        is_stopped = run.stopping is not None or run.status_reason == TIMED_OUT
        return ("Stopped", stopped) if is_stopped else ("Failed", "Failed")
    if run.status == "RUNNABLE":
        return "InProgress", "Interrupted" if run.attempts else "Pending"
    return _STATES[run.status]


def _description(job: Any) -> dict[str, Any]:
    """Return DescribeTrainingJob's fields: the request and the state."""
    run: JobRun = job.skerry
    status, secondary = _status(job)
    requested = {name: value for name, value in job.skerry_request.items() if name != "Tags"}
    description = {
        **requested,
        "TrainingJobArn": job.arn,
        "TrainingJobStatus": status,
        "SecondaryStatus": secondary,
        "CreationTime": _time(run.created_ms),
        "LastModifiedTime": _time(run.stopped_ms or run.created_ms),
        "SecondaryStatusTransitions": _transitions(run, secondary),
    }
    if run.attempts:
        description["TrainingStartTime"] = _time(run.attempts[0].started_ms)
    if run.stopped_ms is not None and secondary != "Stopping":
        description["TrainingEndTime"] = _time(run.stopped_ms)
        output = f"{requested['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{run.job}/output/model.tar.gz"
        description["ModelArtifacts"] = {"S3ModelArtifacts": output}
    if status == "Failed":
        description["FailureReason"] = _failure(job)[:_LONGEST_REASON]
    return description


def _transitions(run: JobRun, now: str) -> Sequence[Mapping[str, Any]]:
    states: list[tuple[str, int, str]] = [("Starting", run.created_ms, "Preparing the instances for training")]
    for attempt in run.attempts:
        states.append(("Downloading", attempt.started_ms, "Downloading the training image"))
        if attempt.end is None or attempt.end.status_reason != NOT_STARTED:
            states.append(("Training", attempt.started_ms, "Training image download completed. Training in progress."))
        if attempt.end is not None and attempt.stopped_ms is not None and attempt.end.status_reason == INTERRUPTED:
            states.append(("Interrupted", attempt.stopped_ms, "Spot instances were interrupted"))
    if states[-1][0] != now and not (now == "Pending" and not run.attempts):
        states.append((now, run.stopped_ms or states[-1][1], ""))
    ends = [_time(start) for _, start, _ in states[1:]]
    transitions: list[dict[str, Any]] = [
        {"Status": state, "StartTime": _time(start), "StatusMessage": text} for state, start, text in states
    ]
    for transition, end in zip(transitions, ends, strict=False):
        transition["EndTime"] = end
    return transitions


def _failure(job: Any) -> str:
    run: JobRun = job.skerry
    end = run.attempts[-1].end if run.attempts else None
    if end is None:
        return str(run.status_reason)
    if end.status_reason == INTERRUPTED:
        return "InternalServerError: We encountered an internal error. Please try again."
    if end.status_reason == NOT_STARTED:
        return f"ClientError: {end.reason}"
    reason = job.skerry_host.failure() or end.reason or _NO_REASON
    return f"AlgorithmError: {reason}, exit code: {end.exit_code}"


def _time(milliseconds: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(milliseconds / 1000, tz=dt.UTC)
