from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.targets.aws_batch.kit import Scene, ground_of, job_of, set_status

from skerry.infra.provision.handler import Condition
from skerry.infra.targets.aws_batch.job_views import QueueContext, lines, view, views
from skerry.infra.targets.aws_batch.resources import Job
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.target import JobView

REGION = "us-east-1"
OPTIONS = "instance_types: [g5.xlarge], gpus: 1, role: group"
HOST = "Host EC2 (instance i-0a1b) terminated."
QUEUE: dict[str, Any] = {
    "jobQueueName": "q",
    "jobQueueArn": "Q",
    "state": "ENABLED",
    "status": "VALID",
    "computeEnvironmentOrder": [{"order": 1, "computeEnvironment": "E"}],
}
MACHINES: dict[str, Any] = {
    "computeEnvironmentName": "e",
    "computeEnvironmentArn": "E",
    "state": "ENABLED",
    "status": "VALID",
}


@pytest.fixture
def state_record(aws: Aws, tmp_path: Path) -> StateRecord:
    return Scene(aws, ground_of(tmp_path, OPTIONS)).record("aws_batch_job.batch-0")


def described(
    state_record: StateRecord, *, queue: Mapping[str, Any] = QUEUE, machines: Mapping[str, Any] = MACHINES, **row: Any
) -> JobView:
    job = {"jobId": "j", "jobQueue": "Q", "jobDefinition": "D", **row}
    return view(state_record, job, QueueContext(queues={"Q": queue}, environments={"E": machines}))


WAITS = {
    "for a machine": ({}, "waits for a machine; if this lasts, none is free or the quota is used up"),
    "capacity": (
        {"statusReason": "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - no spot"},
        "no machine of its types is available now; add instance_types, zones or a region (CAPACITY:",
    ),
    "too large": (
        {"statusReason": "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - vcpus"},
        "none of the types has what it requests; write less vcpus or memory (MISCONFIGURATION:",
    ),
    "the queue is off": ({"queue": {**QUEUE, "state": "DISABLED"}}, "the queue q is disabled"),
    "the queue is broken": (
        {"queue": {**QUEUE, "status": "INVALID", "statusReason": "gone"}},
        "the queue q is INVALID: gone",
    ),
    "the machines are broken": (
        {"machines": {**MACHINES, "status": "INVALID", "statusReason": "CLIENT_ERROR - no profile"}},
        "the compute environment e is INVALID: CLIENT_ERROR - no profile",
    ),
    "the machines are off": (
        {"machines": {**MACHINES, "state": "DISABLED"}},
        "the compute environment e is disabled",
    ),
}


@pytest.mark.parametrize("case", WAITS)
def test_waiting_job_shows_the_reason(state_record: StateRecord, case: str) -> None:
    options, expected = WAITS[case]
    job = described(state_record, status="RUNNABLE", **options)
    assert job.why.startswith(expected)
    assert (job.slot, job.state, job.condition, job.exit_code) == ("batch-0", "RUNNABLE", Condition.READY, None)


ENDS = {
    "lost machine": (
        {"statusReason": HOST},
        None,
        "its machine was reclaimed or lost (Host EC2 (instance i-0a1b) terminated.)",
    ),
    "wrong code": (
        {"statusReason": "Essential container in task exited", "container": {"exitCode": 20}},
        20,
        "Essential container in task exited; exit code 20: the spec, the code or the rights are wrong; see its logs",
    ),
    "no image": (
        {"statusReason": "Task failed to start", "container": {"reason": "CannotPullContainerError: not found"}},
        None,
        (
            "Task failed to start; its image could not be pulled: check that it exists and its execution role may "
            "read it (CannotPullContainerError: not found)"
        ),
    ),
    "no time": (
        {"statusReason": "Job attempt duration exceeded timeout", "container": {"exitCode": 30}},
        30,
        (
            "its time limit was reached: `limits` or max_runtime of the spec (Job attempt duration exceeded timeout); "
            "exit code 30: its script stopped it, or the time of the run is over; see its logs"
        ),
    ),
    "no memory": (
        {"attempts": [{"container": {"exitCode": 137, "reason": "OutOfMemoryError: Container killed"}}]},
        137,
        (
            "it used more memory than it requested; raise `memory` (OutOfMemoryError: Container killed); "
            "exit code 137: killed, often because memory was short"
        ),
    ),
    "a script's own code": (
        {"statusReason": "Essential container in task exited", "container": {"exitCode": 3}},
        3,
        "Essential container in task exited; exit code 3: not a code of the runtime; see its logs",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_failed_job_shows_the_reason_and_the_exit_code(state_record: StateRecord, case: str) -> None:
    row, code, expected = ENDS[case]
    job = described(state_record, status="FAILED", startedAt=1000, stoppedAt=61000, **row)
    assert (job.why, job.exit_code, job.condition) == (expected, code, Condition.LOST)
    assert (job.started_s, job.ended_s) == (1.0, 61.0)


def test_job_shows_how_its_previous_attempt_ended(state_record: StateRecord) -> None:
    before = [{"container": {"exitCode": 10}, "statusReason": HOST, "stoppedAt": 5}]
    running = described(state_record, status="RUNNING", attempts=before, startedAt=9000)
    assert (running.attempt, running.ended_s, running.exit_code) == (2, None, None)
    assert running.why.startswith("attempt 1 ended: its machine was reclaimed or lost")
    waiting = described(state_record, status="RUNNABLE", attempts=before)
    assert (waiting.attempt, waiting.started_s) == (1, None)
    assert "; attempt 1 ended: " in waiting.why
    assert described(state_record, status="SUBMITTED").attempt == 0


def test_succeeded_job_is_done(state_record: StateRecord) -> None:
    job = described(state_record, status="SUCCEEDED", attempts=[{"container": {"exitCode": 0}}])
    assert (job.why, job.exit_code, job.attempt, job.condition) == ("done", 0, 1, Condition.DONE)


def test_views_keep_their_order_and_report_deleted_records(aws: Aws, tmp_path: Path) -> None:
    scene = Scene(aws, ground_of(tmp_path, OPTIONS))
    scene.make()
    first, second = (scene.record(job.address) for job in scene.graph if isinstance(job, Job))
    set_status(second.outputs["id"], "RUNNABLE")
    aws.call("batch", REGION, "update_job_queue", jobQueue=scene.record("aws_batch_queue.batch").name, state="DISABLED")
    jobs = views(aws, [second, first])
    assert [(job.slot, job.state) for job in jobs] == [("batch-1", "RUNNABLE"), ("batch-0", "SUCCEEDED")]
    assert jobs[0].why.endswith("is disabled")
    first = replace(first, outputs={"id": "00000000-forgotten"})
    (deleted,) = views(aws, [first])
    assert (deleted.state, deleted.condition) == ("UNKNOWN", Condition.LOST)
    assert deleted.why.startswith("Batch has deleted its record")
    with pytest.raises(Invalid, match="Batch has no record"):
        list(lines(aws, first, None))


def test_lines_of_all_attempts_are_in_order_and_continue_at_a_cursor(aws: Aws, tmp_path: Path) -> None:
    scene = Scene(aws, ground_of(tmp_path, OPTIONS))
    scene.make()
    record = scene.record("aws_batch_job.batch-0")
    began_ms = int(time.time() * 1000) - 60_000  # moto rejects old events, as the service does
    group = str(record.settings["log_group"])
    job: Any = job_of(record)
    job.attempts = [{"container": {"logStreamName": "a/1"}, "stoppedAt": 1}, {"container": {"logStreamName": "a/2"}}]
    job.log_stream_name = "a/2"
    for stream, start in (("a/1", 1000), ("a/2", 9000)):
        aws.call("logs", REGION, "create_log_stream", logGroupName=group, logStreamName=stream)
        events = [{"timestamp": began_ms + start + number, "message": f"{stream} {number}"} for number in range(3)]
        aws.call("logs", REGION, "put_log_events", logGroupName=group, logStreamName=stream, logEvents=events)
    log = list(lines(aws, record, None))
    texts = ["a/1 0", "a/1 1", "a/1 2", "a/2 0", "a/2 1", "a/2 2"]
    assert [(line.slot, line.text) for line in log] == [("batch-0", text) for text in texts]
    for number, line in enumerate(log):
        assert [after.text for after in lines(aws, record, line.cursor)] == texts[number + 1 :]
    with pytest.raises(Invalid, match="not a place in a job's log"):
        list(lines(aws, record, "yesterday"))
