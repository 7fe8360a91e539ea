from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.targets.aws import REGION
from tests.infra.targets.aws_batch.kit import Scene, context_of, job_of, set_status

from skerry.infra.provision.handler import Condition
from skerry.infra.targets.aws_batch.job_views import QueueContext, lines, view, views
from skerry.infra.targets.aws_batch.resource_types import Job
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws

HEALTHY = {"state": "ENABLED", "status": "VALID"}
OFF = {"state": "DISABLED", "status": "VALID"}
BROKEN = {"state": "ENABLED", "status": "INVALID", "statusReason": "no profile"}


@pytest.fixture
def scene(aws: Aws, tmp_path: Path) -> Scene:
    """Return a run whose resources and jobs exist."""
    scene = Scene(aws, context_of(tmp_path, "instance_types: [g5.xlarge], gpus: 1, role: group"))
    scene.make()
    return scene


@pytest.mark.parametrize(
    ("queue", "machines", "expected"),
    [
        (HEALTHY, HEALTHY, "waits for a machine; if this lasts, none is free or the quota is used up (see "),
        (OFF, HEALTHY, "the queue q is disabled"),
        (BROKEN, HEALTHY, "the queue q is INVALID: no profile"),
        (HEALTHY, BROKEN, "the compute environment e is INVALID: no profile"),
        (HEALTHY, OFF, "the compute environment e is disabled"),
    ],
)
def test_waiting_job_shows_the_state_of_its_queue_and_machines(
    scene: Scene, queue: dict[str, Any], machines: dict[str, Any], expected: str
) -> None:
    order = [{"order": 1, "computeEnvironment": "E"}]
    context = QueueContext(
        queues={"Q": {"jobQueueName": "q", "computeEnvironmentOrder": order, **queue}},
        environments={"E": {"computeEnvironmentName": "e", **machines}},
    )
    row = {"jobId": "j", "jobQueue": "Q", "jobDefinition": "D", "status": "RUNNABLE"}
    assert view(scene.record("aws_batch_job.batch-0"), row, context).why.startswith(expected)


def test_views_keep_their_order_and_report_deleted_records(aws: Aws, scene: Scene) -> None:
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


def test_lines_of_all_attempts_are_in_order_and_continue_at_a_cursor(aws: Aws, scene: Scene) -> None:
    record = scene.record("aws_batch_job.batch-0")
    began_ms = int(time.time() * 1000) - 60_000  # moto rejects old events, as the service does
    group = str(record.settings["log_group"])
    job = job_of(record)
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
