"""The views of jobs that wait, run or have ended, for all targets."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import JobInfo
from tests.infra.kit import record_of
from tests.infra.targets.tables import read_cases

from skerry.infra.executors.cloud_executor_base import ending_of
from skerry.infra.targets.aws_batch import job_views as batch
from skerry.infra.targets.aws_batch.resource_types import Job as BatchJob
from skerry.infra.targets.hf_jobs import labelled_jobs_service as hf_jobs
from skerry.infra.targets.sagemaker import job_views as sagemaker
from skerry.infra.targets.sagemaker.resource_types import Job as TrainingJob
from skerry.infra.targets.shared import labelled_jobs
from skerry.infra.targets.slurm import job_views as slurm
from skerry.infra.targets.slurm.resource_types import Job as SlurmJob
from skerry.infra.targets.slurm.responses import ENDED as ENDED_STATES
from skerry.infra.targets.slurm.responses import Row
from skerry.infra.targets.vertex import job_views as vertex
from skerry.infra.targets.vertex.resource_types import Job as CustomJob

if TYPE_CHECKING:
    from skerry.infra.provision.target_and_store_interfaces import JobView

STARTED = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
ENDED = STARTED + dt.timedelta(minutes=1)
NO_QUEUES = batch.QueueContext(queues={}, environments={})
TRAINING_ROW: dict[str, Any] = {
    "TrainingJobName": "job",
    "TrainingJobArn": "arn:1",
    "AlgorithmSpecification": {"TrainingImage": "image"},
    "RoleArn": "role",
    "ResourceConfig": {"InstanceType": "ml.g5.xlarge"},
    "StoppingCondition": {"MaxRuntimeInSeconds": 60},
    "OutputDataConfig": {"S3OutputPath": "s3://acme/x"},
}


def view_batch(status: str, reason: str = "", container: str = "", code: str = "", **row: Any) -> JobView:
    ended = {"reason": container, **({"exitCode": int(code)} if code else {})}
    job = {"jobId": "42", "jobQueue": "Q", "jobDefinition": "D", "status": status, "statusReason": reason}
    times = {"startedAt": STARTED.timestamp() * 1000, "stoppedAt": ENDED.timestamp() * 1000}
    return batch.view(record_of(BatchJob), {**job, **times, "container": ended, **row}, NO_QUEUES)


def view_sagemaker(status: str, secondary: str = "", reason: str = "", *transitions: str) -> JobView:
    shown = [{"Status": word, "StatusMessage": reason} for word in transitions]
    row = {
        **TRAINING_ROW,
        "TrainingJobStatus": status,
        "SecondaryStatus": secondary or status,
        "SecondaryStatusTransitions": shown,
        "FailureReason": reason,
        "TrainingStartTime": STARTED,
        "TrainingEndTime": ENDED,
    }
    return sagemaker.view(record_of(TrainingJob), row)


def view_vertex(state: str, code: str = "0", message: str = "", generation: int = 0, **row: Any) -> JobView:
    error = {"error": {"code": int(code), "message": message}} if message else {}
    times = {"startTime": STARTED.isoformat(), "endTime": ENDED.isoformat()}
    name = "projects/1/locations/us-central1/customJobs/42"
    return vertex.view(
        record_of(CustomJob, generation), {"name": name, "state": f"JOB_STATE_{state}", **error, **times, **row}
    )


def view_slurm(state: str, reason: str = "", code: str = "", restarts: str = "0") -> JobView:
    row = Row(
        id="42",
        name="job",
        state=state,
        reason=reason,
        exit_code=int(code) if code else None,
        starts_before=int(restarts),
        started_s=None if state == "PENDING" else STARTED.timestamp(),
        ended_s=ENDED.timestamp() if state in ENDED_STATES else None,
    )
    return slurm.view(record_of(SlurmJob), row)


def view_hf_jobs(stage: str, message: str = "") -> JobView:
    started, ended = (time.isoformat().replace("+00:00", "Z") for time in (STARTED, ENDED))
    times = {"createdAt": started, "startedAt": started, "finishedAt": ended}
    owner = {"id": "1", "name": "acme", "type": "org"}
    row = JobInfo(id="42", status={"stage": stage, "message": message or None}, owner=owner, labels=None, **times)
    return labelled_jobs.view_of("a-0", 0, hf_jobs.parse(row))


VIEWS = {
    "hf_jobs": view_hf_jobs,
    "slurm": view_slurm,
    "aws_batch": view_batch,
    "sagemaker": view_sagemaker,
    "vertex": view_vertex,
}


@pytest.mark.parametrize("case", read_cases("job_views.txt"), ids=lambda case: case[0][:60])
def test_job_shows_its_condition_reason_and_exit_code(case: list[str]) -> None:
    """A line of job_views.txt is "target|status|..." with the words of the cloud; the view follows."""
    words, expected = case
    target, status, *more = words.split("|")
    job = VIEWS[target](status, *more)
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    again = ", may succeed again" if job.again else ""
    assert f"{job.state}, {job.condition.value}{code}{again}: {job.why}".strip() == expected
    assert job.slot == "a-0"
    if status.upper() == "FAILED":
        assert (job.started_s, job.ended_s) == (STARTED.timestamp(), ENDED.timestamp())


def test_why_of_an_executors_ending_refers_to_no_spec() -> None:
    cases = (words.split("|") for words, _ in read_cases("job_views.txt"))
    endings = [ending_of(VIEWS[target](*status)) for target, *status in cases]
    texts = [ending.why for ending in endings if ending is not None]
    assert len(texts) > 20
    assert [text for text in texts if "spec" in text or "`skerry" in text or "`limits`" in text] == []


def test_batch_job_shows_how_its_previous_attempt_ended() -> None:
    host = "Host EC2 (instance i-0a1b) terminated."
    before = [{"container": {"exitCode": 10}, "statusReason": host, "stoppedAt": 5}]
    running = view_batch("RUNNING", attempts=before)
    assert (running.attempt, running.ended_s, running.exit_code) == (2, None, None)
    assert running.why.startswith("attempt 1 ended: its machine was reclaimed or lost")
    waiting = view_batch("RUNNABLE", attempts=before, startedAt=0)
    assert (waiting.attempt, waiting.started_s) == (1, None)
    assert "; attempt 1 ended: " in waiting.why
    assert view_batch("SUBMITTED").attempt == 0
    # A job without a container of its own shows that of its last attempt.
    killed = {"exitCode": 137, "reason": "OutOfMemoryError: Container killed"}
    failed = view_batch("FAILED", attempts=[{"container": killed}])
    assert failed.exit_code == 137
    assert failed.why.startswith("it used more memory than it requested; raise `memory` (OutOfMemoryError")


def test_starts_of_a_training_job_are_counted_over_interruptions() -> None:
    first = ("Starting", "Downloading", "Training")
    assert view_sagemaker("InProgress", "Starting", "", "Starting").attempt == 0
    assert view_sagemaker("InProgress", "Training", "", *first).attempt == 1
    again = view_sagemaker("InProgress", "Training", "", *first, "Interrupted", "Starting", "Training", "Training")
    assert (again.attempt, again.why) == (2, "its machine was reclaimed 1 time so far")
    third = view_sagemaker("InProgress", "Interrupted", "", *first, "Interrupted", "Training", "Interrupted")
    assert third.why == "its spot machine was reclaimed; it waits for another; its machine was reclaimed 2 times so far"


def test_attempt_of_a_custom_job_is_the_number_of_its_generation() -> None:
    assert view_vertex("RUNNING", generation=2).attempt == 3
    assert view_vertex("PENDING", generation=2, startTime="").attempt == 0


def test_starts_of_a_slurm_job_are_counted_over_requeues() -> None:
    assert view_slurm("PENDING", "Priority").attempt == 0
    assert view_slurm("RUNNING", restarts="2").attempt == 3
    assert view_slurm("PENDING", "BeginTime", restarts="2").attempt == 2
