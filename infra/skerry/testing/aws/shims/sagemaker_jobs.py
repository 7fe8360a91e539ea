"""moto 5.2.5's training jobs are Completed at once; here they go SageMaker's way (`jobs`, `boxes`).

Missing in moto: states and their history; stopping and deleting; environment, retries, network and what else of a
request it drops; spot machines that are taken back; time limits; the folders of /opt/ml, and the file there that says
why a job failed; the role's keys; output while a job runs.
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

from skerry.infra.testing.boxes import NOT_STARTED
from skerry.infra.testing.jobs import INTERRUPTED, Course, Jobs
from skerry.infra.testing.retries import TIMED_OUT
from skerry.infra.testing.training import TrainingHost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.infra.testing.hosting import Surroundings
    from skerry.infra.testing.retries import Strategy
    from skerry.infra.testing.shims.patches import Patches

# Spare machines are found again as often as they are lost; max_wait is not kept here.
_EVER: Final = 1000
_SHOWN: Final = 1024
_WORDS: Final = {
    "STARTING": ("InProgress", "Downloading"),
    "RUNNING": ("InProgress", "Training"),
    "SUCCEEDED": ("Completed", "Completed"),
}
_SILENT: Final = "Please look at the stderr for more information."


def install(patches: Patches, jobs: Jobs, around: Surroundings, looks: Callable[[], int]) -> None:
    """Give every training job to `jobs`, by its name. looks: descriptions that still tell of a stop that is over."""

    def create_training_job(self: Any) -> Any:
        request = json.loads(self.body)
        answer = moto_s(self)
        job = self.sagemaker_backend.training_jobs[request["TrainingJobName"]]
        job.skerry_request, job.skerry_looks = request, 0
        job.skerry_host = TrainingHost(request, job.arn, self.region, around)
        job.skerry = Course(
            job=job.training_job_name,
            host=job.skerry_host,
            retry=_retries(request),
            limit_s=float(request.get("StoppingCondition", {}).get("MaxRuntimeInSeconds", 24 * 3600)),
            created_ms=jobs.now_ms(),
        )
        jobs.submit(job.skerry)
        return answer

    def describe_training_job(self: Any, training_job_name: str) -> dict[str, Any]:
        job = _found(self, training_job_name)
        told = _told(job)
        job.skerry_looks = max(0, job.skerry_looks - 1)
        return told

    def stop_training_job(self: Any) -> EmptyResult:
        job = _found(self.sagemaker_backend, self._get_param("TrainingJobName"))
        status, _ = _status(job)
        if status not in {"InProgress", "Stopping"}:
            raise AWSValidationException(f"The request was rejected because the training job is in status {status}.")
        if status == "InProgress":
            job.skerry_looks = looks()
            jobs.stop(job.skerry.job, "stopped")
        return EmptyResult()

    def delete_training_job(self: Any) -> EmptyResult:
        job = _found(self.sagemaker_backend, self._get_param("TrainingJobName"))
        status, _ = _status(job)
        if status in {"InProgress", "Stopping"}:
            raise ResourceInUseException(f"The training job is in status {status} and cannot be deleted.")
        del self.sagemaker_backend.training_jobs[job.training_job_name]
        return EmptyResult()

    moto_s: Any = patches.replace(SageMakerResponse, "create_training_job", create_training_job)
    patches.replace(SageMakerModelBackend, "describe_training_job", describe_training_job)
    patches.replace(SageMakerResponse, "stop_training_job", stop_training_job)
    patches.replace(SageMakerResponse, "delete_training_job", delete_training_job)
    told = property(lambda job: _status(job)[0], lambda _job, _word: None)  # moto sets it when it makes one
    patches.replace(FakeTrainingJob, "training_job_status", told)


def _found(backend: Any, name: str) -> Any:
    job = backend.training_jobs.get(name)
    if job is None:
        raise AWSValidationException("Requested resource not found.")
    return job


def _retries(request: Mapping[str, Any]) -> Strategy:
    """A machine that was lost is replaced if it is a spare one, or as often as the request says; nothing else is."""
    spot = request.get("EnableManagedSpotTraining", False)
    attempts = _EVER if spot else 1 + int(request.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0))
    again = [{"onStatusReason": "Host EC2*", "action": "RETRY"}, {"onReason": "*", "action": "EXIT"}]
    return {"attempts": attempts, "evaluateOnExit": again}


def _status(job: Any) -> tuple[str, str]:
    """TrainingJobStatus and SecondaryStatus."""
    course: Course = job.skerry
    if course.stopping is not None and (not course.is_over or job.skerry_looks):
        return "Stopping", "Stopping"
    if course.status == "FAILED":
        stopped = "MaxRuntimeExceeded" if course.status_reason == TIMED_OUT else "Stopped"
        is_stopped = course.stopping is not None or course.status_reason == TIMED_OUT
        return ("Stopped", stopped) if is_stopped else ("Failed", "Failed")
    if course.status == "RUNNABLE":
        return "InProgress", "Interrupted" if course.attempts else "Pending"
    return _WORDS[course.status]


def _told(job: Any) -> dict[str, Any]:
    """As DescribeTrainingJob tells it: what was asked for, and what came of it."""
    course: Course = job.skerry
    status, secondary = _status(job)
    asked = {name: value for name, value in job.skerry_request.items() if name != "Tags"}
    told = {
        **asked,
        "TrainingJobArn": job.arn,
        "TrainingJobStatus": status,
        "SecondaryStatus": secondary,
        "CreationTime": _time(course.created_ms),
        "LastModifiedTime": _time(course.stopped_ms or course.created_ms),
        "SecondaryStatusTransitions": _transitions(course, secondary),
    }
    if course.attempts:
        told["TrainingStartTime"] = _time(course.attempts[0].started_ms)
    if course.stopped_ms is not None and secondary != "Stopping":
        told["TrainingEndTime"] = _time(course.stopped_ms)
        output = f"{asked['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{course.job}/output/model.tar.gz"
        told["ModelArtifacts"] = {"S3ModelArtifacts": output}
    if status == "Failed":
        told["FailureReason"] = _failure(job)[:_SHOWN]
    return told


def _transitions(course: Course, now: str) -> Sequence[Mapping[str, Any]]:
    words: list[tuple[str, int, str]] = [("Starting", course.created_ms, "Preparing the instances for training")]
    for attempt in course.attempts:
        words.append(("Downloading", attempt.started_ms, "Downloading the training image"))
        if attempt.end is None or attempt.end.status_reason != NOT_STARTED:
            words.append(("Training", attempt.started_ms, "Training image download completed. Training in progress."))
        if attempt.end is not None and attempt.stopped_ms is not None and attempt.end.status_reason == INTERRUPTED:
            words.append(("Interrupted", attempt.stopped_ms, "Spot instances were interrupted"))
    if words[-1][0] != now and not (now == "Pending" and not course.attempts):
        words.append((now, course.stopped_ms or words[-1][1], ""))
    ends = [_time(start) for _, start, _ in words[1:]]
    told: list[dict[str, Any]] = [
        {"Status": word, "StartTime": _time(start), "StatusMessage": text} for word, start, text in words
    ]
    for one, end in zip(told, ends, strict=False):
        one["EndTime"] = end
    return told


def _failure(job: Any) -> str:
    course: Course = job.skerry
    end = course.attempts[-1].end if course.attempts else None
    if end is None:
        return str(course.status_reason)
    if end.status_reason == INTERRUPTED:
        return "InternalServerError: We encountered an internal error. Please try again."
    if end.status_reason == NOT_STARTED:
        return f"ClientError: {end.reason}"
    said = job.skerry_host.failure() or end.reason or _SILENT
    return f"AlgorithmError: {said}, exit code: {end.exit_code}"


def _time(milliseconds: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(milliseconds / 1000, tz=dt.UTC)
