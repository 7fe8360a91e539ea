from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.batch.ground import Scene, ground_of, job_of, set_status

from skerry.infra.handler import Condition
from skerry.infra.targets.aws_batch.resources import Job
from skerry.infra.targets.aws_batch.watching import Around, lines, view, views
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.handler import Made
    from skerry.infra.target import JobView

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
def made(aws: Aws, tmp_path: Path) -> Made:
    return Scene(aws, ground_of(tmp_path, OPTIONS)).made("aws_batch_job.batch-0")


def seen(
    made: Made, *, queue: Mapping[str, Any] = QUEUE, machines: Mapping[str, Any] = MACHINES, **row: Any
) -> JobView:
    told = {"jobId": "j", "jobQueue": "Q", "jobDefinition": "D", **row}
    return view(made, told, Around(queues={"Q": queue}, environments={"E": machines}))


WAITS = {
    "for a machine": ({}, "waits for a machine: if it stays so, none is free, or the quota for them is used up"),
    "capacity": (
        {"statusReason": "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - no spot"},
        "no machine of its types is to be had now; add instance_types, zones or a region (CAPACITY:",
    ),
    "too large": (
        {"statusReason": "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - vcpus"},
        "none of the types has what it asks for; ask less vcpus or memory (MISCONFIGURATION:",
    ),
    "the queue is off": ({"queue": {**QUEUE, "state": "DISABLED"}}, "the queue q is switched off"),
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
        "the compute environment e is switched off",
    ),
}


@pytest.mark.parametrize("case", WAITS)
def test_why_a_job_waits_is_said_in_words(made: Made, case: str) -> None:
    options, expected = WAITS[case]
    found = seen(made, status="RUNNABLE", **options)
    assert found.why.startswith(expected)
    assert (found.slot, found.state, found.condition, found.exit_code) == ("batch-0", "RUNNABLE", Condition.READY, None)


ENDS = {
    "lost machine": (
        {"statusReason": HOST},
        None,
        "its machine was taken back or was lost (Host EC2 (instance i-0a1b) terminated.)",
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
            "Task failed to start; its image could not be fetched: is it there, and may the execution role read it? "
            "(CannotPullContainerError: not found)"
        ),
    ),
    "no time": (
        {"statusReason": "Job attempt duration exceeded timeout", "container": {"exitCode": 30}},
        30,
        (
            "its time was up: `limits` or max_runtime of the spec (Job attempt duration exceeded timeout); "
            "exit code 30: stopped by its script, or the run has had its time: see its logs"
        ),
    ),
    "no memory": (
        {"attempts": [{"container": {"exitCode": 137, "reason": "OutOfMemoryError: Container killed"}}]},
        137,
        (
            "it used more memory than it asked for; raise `memory` (OutOfMemoryError: Container killed); "
            "exit code 137: killed, often for want of memory"
        ),
    ),
    "a script's own code": (
        {"statusReason": "Essential container in task exited", "container": {"exitCode": 3}},
        3,
        "Essential container in task exited; exit code 3: not a code of the runtime; see its logs",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_how_a_job_ended_is_said_in_words_with_the_contracts_codes(made: Made, case: str) -> None:
    row, code, expected = ENDS[case]
    found = seen(made, status="FAILED", startedAt=1000, stoppedAt=61000, **row)
    assert (found.why, found.exit_code, found.condition) == (expected, code, Condition.LOST)
    assert (found.started_s, found.ended_s) == (1.0, 61.0)


def test_an_attempt_that_went_before_is_told_while_the_next_one_waits_or_runs(made: Made) -> None:
    before = [{"container": {"exitCode": 10}, "statusReason": HOST, "stoppedAt": 5}]
    running = seen(made, status="RUNNING", attempts=before, startedAt=9000)
    assert (running.attempt, running.ended_s, running.exit_code) == (2, None, None)
    assert running.why.startswith("attempt 1 ended: its machine was taken back or was lost")
    waiting = seen(made, status="RUNNABLE", attempts=before)
    assert (waiting.attempt, waiting.started_s) == (1, None)
    assert "; attempt 1 ended: " in waiting.why
    assert seen(made, status="SUBMITTED").attempt == 0


def test_a_job_that_ended_well_is_done(made: Made) -> None:
    found = seen(made, status="SUCCEEDED", attempts=[{"container": {"exitCode": 0}}])
    assert (found.why, found.exit_code, found.attempt, found.condition) == ("done", 0, 1, Condition.DONE)


def test_jobs_are_told_in_the_order_asked_and_those_forgotten_say_so(aws: Aws, tmp_path: Path) -> None:
    scene = Scene(aws, ground_of(tmp_path, OPTIONS))
    scene.make()
    one, other = (scene.made(job.address) for job in scene.graph if isinstance(job, Job))
    set_status(other.outputs["id"], "RUNNABLE")
    aws.call("batch", REGION, "update_job_queue", jobQueue=scene.made("aws_batch_queue.batch").name, state="DISABLED")
    found = views(aws, [other, one])
    assert [(job.slot, job.state) for job in found] == [("batch-1", "RUNNABLE"), ("batch-0", "SUCCEEDED")]
    assert found[0].why.endswith("is switched off")
    one = replace(one, outputs={"id": "00000000-forgotten"})
    (forgotten,) = views(aws, [one])
    assert (forgotten.state, forgotten.condition) == ("UNKNOWN", Condition.LOST)
    assert forgotten.why.startswith("Batch has forgotten it")
    with pytest.raises(Invalid, match="Batch has forgotten"):
        list(lines(aws, one, None))


def test_lines_of_all_attempts_come_one_after_the_other_and_go_on_at_a_cursor(aws: Aws, tmp_path: Path) -> None:
    scene = Scene(aws, ground_of(tmp_path, OPTIONS))
    scene.make()
    made = scene.made("aws_batch_job.batch-0")
    began_ms = int(time.time() * 1000) - 60_000  # moto takes no event that is older than the service would
    group = str(made.settings["log_group"])
    job: Any = job_of(made)
    job.attempts = [{"container": {"logStreamName": "a/1"}, "stoppedAt": 1}, {"container": {"logStreamName": "a/2"}}]
    job.log_stream_name = "a/2"
    for stream, start in (("a/1", 1000), ("a/2", 9000)):
        aws.call("logs", REGION, "create_log_stream", logGroupName=group, logStreamName=stream)
        events = [{"timestamp": began_ms + start + number, "message": f"{stream} {number}"} for number in range(3)]
        aws.call("logs", REGION, "put_log_events", logGroupName=group, logStreamName=stream, logEvents=events)
    found = list(lines(aws, made, None))
    texts = ["a/1 0", "a/1 1", "a/1 2", "a/2 0", "a/2 1", "a/2 2"]
    assert [(line.slot, line.text) for line in found] == [("batch-0", text) for text in texts]
    for number, line in enumerate(found):
        assert [after.text for after in lines(aws, made, line.cursor)] == texts[number + 1 :]
    with pytest.raises(Invalid, match="not a place in a job's log"):
        list(lines(aws, made, "yesterday"))
