from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.targets.sagemaker.kit import Scene, ground_of

from skerry.infra.provision.handler import Condition, StateRecord
from skerry.infra.targets.sagemaker.job_views import lines, view, views
from skerry.infra.targets.sagemaker.resources import Job
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.target import JobView
    from skerry.testing.sandbox import Sandbox

RECORD = StateRecord(
    address="sagemaker_job.sm-0",
    kind=Job.KIND,
    name="skerry-tiny-0a1b2c-sm-0-3d4e5f",
    generation=0,
    region="us-east-1",
    life=Job.LIFE,
    brought=False,
    settings={},
    outputs={"name": "skerry-tiny-0a1b2c-sm-0-3d4e5f", "arn": "arn:1"},
    needs=(),
)
STARTED = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
ROW: dict[str, Any] = {
    "TrainingJobName": RECORD.name,
    "TrainingJobArn": "arn:1",
    "AlgorithmSpecification": {"TrainingImage": "image"},
    "RoleArn": "role",
    "ResourceConfig": {"InstanceType": "ml.g5.xlarge"},
    "StoppingCondition": {"MaxRuntimeInSeconds": 60},
    "OutputDataConfig": {"S3OutputPath": "s3://acme/x"},
}


def described(status: str, secondary: str = "", *transitions: str, **row: Any) -> JobView:
    shown = [{"Status": word, "StatusMessage": f"about {word}"} for word in transitions]
    more = {"SecondaryStatus": secondary or status, "SecondaryStatusTransitions": shown}
    return view(RECORD, {**ROW, "TrainingJobStatus": status, **more, **row})


WAITS = {
    "Starting": "its machine is being started",
    "Pending": "waits for a machine; if this lasts, none of its type is free",
    "Downloading": "its image is being pulled",
    "Interrupted": "its spot machine was reclaimed; it waits for another",
    "Restarting": "it is being restarted",
    "Uploading": "it has ended, and the files in /opt/ml/model are being stored",
    "Training": "",
    "a status of a later version": "",
}


@pytest.mark.parametrize("secondary", WAITS)
def test_waiting_job_shows_the_reason(secondary: str) -> None:
    job = described("InProgress", secondary, "Starting")
    assert (job.state, job.why, job.condition, job.exit_code) == (
        secondary,
        WAITS[secondary],
        Condition.READY,
        None,
    )


def test_lack_of_machines_is_shown_while_sagemaker_retries() -> None:
    row = {
        "SecondaryStatusTransitions": [
            {"Status": "Starting", "StatusMessage": "Insufficient capacity error, retrying!"}
        ]
    }
    assert described("InProgress", "Starting", **row).why.startswith(
        "no machine of its type is available now: try another"
    )


ENDS = {
    "our own failure file": (
        "AlgorithmError: skerry: exit code 20: Invalid: no such run, exit code: 20",
        20,
        (
            "its container ended with an error (AlgorithmError: skerry: exit code 20: Invalid: no such run, exit code: "
            "20); exit code 20: the spec, the code or the rights are wrong; see its logs"
        ),
    ),
    "a truncated failure file": (
        "AlgorithmError: skerry: exit code 10: the store was aw",
        10,
        (
            "its container ended with an error (AlgorithmError: skerry: exit code 10: the store was aw); "
            "exit code 10: an outside failure; `skerry apply` starts it again"
        ),
    ),
    "a script's own code": (
        "AlgorithmError: Please look at the stderr for more information., exit code: 3",
        3,
        (
            "its container ended with an error (AlgorithmError: Please look at the stderr for more information., exit "
            "code: 3); exit code 3: not a code of the runtime; see its logs"
        ),
    ),
    "no machine": (
        "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance.",
        None,
        (
            "no machine of its type is available now: try another instance or region, spot, or max_pending "
            "(CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML "
            "instance.)"
        ),
    ),
    "an internal failure": (
        "InternalServerError: We encountered an internal error. Please try again.",
        None,
        (
            "an internal failure of SageMaker; `skerry apply` starts it again "
            "(InternalServerError: We encountered an internal error. Please try again.)"
        ),
    ),
    "no image": (
        "ClientError: Cannot pull algorithm container.",
        None,
        (
            "SageMaker could not run it as requested: check image, role, network and S3 locations "
            "(ClientError: Cannot pull algorithm container.)"
        ),
    ),
    "something else": ("UnheardOf: x", None, "UnheardOf: x"),
}

PASSING = {"a truncated failure file", "a script's own code", "no machine", "an internal failure"}


@pytest.mark.parametrize("case", ENDS)
def test_failed_job_shows_the_reason_and_the_exit_code(case: str) -> None:
    reason, code, expected = ENDS[case]
    times = {"TrainingStartTime": STARTED, "TrainingEndTime": STARTED + dt.timedelta(minutes=1)}
    job = described("Failed", "", "Starting", "Training", "Failed", FailureReason=reason, **times)
    assert (job.why, job.exit_code, job.condition, job.state) == (expected, code, Condition.LOST, "Failed")
    assert (job.started_s, job.ended_s) == (STARTED.timestamp(), STARTED.timestamp() + 60)
    assert job.again == (case in PASSING)


STOPS = {
    ("Stopped", "Stopped"): ("Stopped", "stopped on request"),
    ("Stopped", "MaxRuntimeExceeded"): (
        "MaxRuntimeExceeded",
        "its time limit was reached: `limits` or max_runtime of the spec",
    ),
    ("Stopped", "MaxWaitTimeExceeded"): (
        "MaxWaitTimeExceeded",
        "it waited for spot machines and ran as long as max_wait of the spec allows",
    ),
    ("Stopping", "Stopping"): ("Stopping", "it is being stopped, within two minutes"),
}


@pytest.mark.parametrize("words", STOPS)
def test_stopped_job_shows_the_reason(words: tuple[str, str]) -> None:
    job = described(*words)
    assert ((job.state, job.why), job.condition, job.again) == (STOPS[words], Condition.LOST, False)


def test_attempts_are_counted_over_interruptions() -> None:
    first = ("Starting", "Downloading", "Training")
    assert described("InProgress", "Starting", "Starting").attempt == 0
    assert described("InProgress", "Training", *first).attempt == 1
    again = described("InProgress", "Training", *first, "Interrupted", "Starting", "Training", "Training")
    assert (again.attempt, again.why) == (2, "its machine was reclaimed 1 time so far")
    third = described("InProgress", "Interrupted", *first, "Interrupted", "Training", "Interrupted")
    assert third.why == "its spot machine was reclaimed; it waits for another; its machine was reclaimed 2 times so far"


def test_completed_job_is_done() -> None:
    job = described("Completed")
    assert (job.why, job.exit_code, job.condition) == ("done", 0, Condition.DONE)


def test_views_keep_their_order_and_report_deleted_records(aws: Aws, sandbox: Sandbox, tmp_path: Path) -> None:
    scene = Scene(aws, ground_of(tmp_path))
    scene.make()
    first, second = (scene.record(f"sagemaker_job.sm-{number}") for number in range(2))
    sandbox.training.start(second.name)
    assert [(job.slot, job.state) for job in views(aws, [second, first])] == [("sm-1", "Training"), ("sm-0", "Pending")]
    scene.jobs.delete(first)
    (deleted,) = views(aws, [first])
    assert (deleted.state, deleted.condition) == ("UNKNOWN", Condition.LOST)
    assert deleted.why.startswith("SageMaker has no record of it")
    assert list(lines(aws, first, None)) == []


def test_lines_of_all_starts_are_in_order_and_continue_at_a_cursor(aws: Aws, sandbox: Sandbox, tmp_path: Path) -> None:
    scene = Scene(aws, ground_of(tmp_path, "spot: true", count=1))
    scene.make()
    record = scene.record("sagemaker_job.sm-0")
    texts: list[str] = []
    for start in range(2):
        for number in range(3):
            texts.append(f"{start} {number}")
            sandbox.training.write(record.name, texts[-1])
        sandbox.training.interrupt(record.name)
    log = list(lines(aws, record, None))
    assert [(line.slot, line.text) for line in log] == [("sm-0", text) for text in texts]
    for number, line in enumerate(log):
        assert [after.text for after in lines(aws, record, line.cursor)] == texts[number + 1 :]
    with pytest.raises(Invalid, match="not a place in a job's log"):
        list(lines(aws, record, "yesterday"))
