from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.sagemaker.ground import Scene, ground_of

from skerry.infra.handler import Condition, Made
from skerry.infra.targets.sagemaker.resources import TrainingJob
from skerry.infra.targets.sagemaker.watching import lines, view, views
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.target import JobView
    from skerry.infra.testing.sandbox import Sandbox

MADE = Made(
    address="sagemaker_job.sm-0",
    kind=TrainingJob.KIND,
    name="skerry-tiny-0a1b2c-sm-0-3d4e5f",
    generation=0,
    region="us-east-1",
    life=TrainingJob.LIFE,
    brought=False,
    settings={},
    outputs={"name": "skerry-tiny-0a1b2c-sm-0-3d4e5f", "arn": "arn:1"},
    needs=(),
)
STARTED = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
ROW: dict[str, Any] = {
    "TrainingJobName": MADE.name,
    "TrainingJobArn": "arn:1",
    "AlgorithmSpecification": {"TrainingImage": "image"},
    "RoleArn": "role",
    "ResourceConfig": {"InstanceType": "ml.g5.xlarge"},
    "StoppingCondition": {"MaxRuntimeInSeconds": 60},
    "OutputDataConfig": {"S3OutputPath": "s3://acme/x"},
}


def seen(status: str, secondary: str = "", *transitions: str, **row: Any) -> JobView:
    told = [{"Status": word, "StatusMessage": f"about {word}"} for word in transitions]
    more = {"SecondaryStatus": secondary or status, "SecondaryStatusTransitions": told}
    return view(MADE, {**ROW, "TrainingJobStatus": status, **more, **row})


WAITS = {
    "Starting": "a machine is being found and set up",
    "Pending": "waits for a machine: if it stays so, none of its type is free",
    "Downloading": "its image is being fetched",
    "Interrupted": "its spare machine was taken back; it waits for another",
    "Restarting": "it is being started again",
    "Uploading": "it has ended, and what it left in /opt/ml/model is being stored",
    "Training": "",
    "a word that came later": "",
}


@pytest.mark.parametrize("secondary", WAITS)
def test_why_a_job_waits_is_said_in_words(secondary: str) -> None:
    found = seen("InProgress", secondary, "Starting")
    assert (found.state, found.why, found.condition, found.exit_code) == (
        secondary,
        WAITS[secondary],
        Condition.READY,
        None,
    )


def test_a_lack_of_machines_is_told_while_sagemaker_goes_on_trying() -> None:
    row = {
        "SecondaryStatusTransitions": [
            {"Status": "Starting", "StatusMessage": "Insufficient capacity error, retrying!"}
        ]
    }
    assert seen("InProgress", "Starting", **row).why.startswith("no machine of its type is to be had now: try another")


ENDS = {
    "our own failure file": (
        "AlgorithmError: skerry: exit code 20: Invalid: no such run, exit code: 20",
        20,
        (
            "its container ended with an error (AlgorithmError: skerry: exit code 20: Invalid: no such run, exit code: "
            "20); exit code 20: the spec, the code or the rights are wrong; see its logs"
        ),
    ),
    "a file that was cut": (
        "AlgorithmError: skerry: exit code 10: the store was aw",
        10,
        (
            "its container ended with an error (AlgorithmError: skerry: exit code 10: the store was aw); "
            "exit code 10: something outside broke; `skerry apply` starts it again"
        ),
    ),
    "a script's own code": (
        "AlgorithmError: Please look at the stderr for more information., exit code: 3",
        3,
        (
            "its container ended with an error (AlgorithmError: Please look at the stderr for more information., exit "
            "code: 3); exit code 3: no code of the runtime; see its logs"
        ),
    ),
    "no machine": (
        "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance.",
        None,
        (
            "no machine of its type is to be had now: try another instance or region, spot, or max_pending "
            "(CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML "
            "instance.)"
        ),
    ),
    "its own fault": (
        "InternalServerError: We encountered an internal error. Please try again.",
        None,
        (
            "SageMaker failed by its own fault; `skerry apply` starts it again "
            "(InternalServerError: We encountered an internal error. Please try again.)"
        ),
    ),
    "no image": (
        "ClientError: Cannot pull algorithm container.",
        None,
        (
            "SageMaker could not run it as it was asked to: image, role, network or places in S3 "
            "(ClientError: Cannot pull algorithm container.)"
        ),
    ),
    "something else": ("UnheardOf: x", None, "UnheardOf: x"),
}

PASSING = {"a file that was cut", "a script's own code", "no machine", "its own fault"}


@pytest.mark.parametrize("case", ENDS)
def test_how_a_job_failed_is_said_in_words_with_the_contracts_codes(case: str) -> None:
    reason, code, expected = ENDS[case]
    times = {"TrainingStartTime": STARTED, "TrainingEndTime": STARTED + dt.timedelta(minutes=1)}
    found = seen("Failed", "", "Starting", "Training", "Failed", FailureReason=reason, **times)
    assert (found.why, found.exit_code, found.condition, found.state) == (expected, code, Condition.LOST, "Failed")
    assert (found.started_s, found.ended_s) == (STARTED.timestamp(), STARTED.timestamp() + 60)
    assert found.again == (case in PASSING)


STOPS = {
    ("Stopped", "Stopped"): ("Stopped", "stopped on request"),
    ("Stopped", "MaxRuntimeExceeded"): ("MaxRuntimeExceeded", "its time was up: `limits` or max_runtime of the spec"),
    ("Stopped", "MaxWaitTimeExceeded"): (
        "MaxWaitTimeExceeded",
        "it waited for spare machines, and ran, as long as max_wait of the spec allows",
    ),
    ("Stopping", "Stopping"): ("Stopping", "it is being stopped, and has two minutes for that"),
}


@pytest.mark.parametrize("words", STOPS)
def test_why_a_job_was_stopped_is_said(words: tuple[str, str]) -> None:
    found = seen(*words)
    assert ((found.state, found.why), found.condition, found.again) == (STOPS[words], Condition.LOST, False)


def test_starts_are_counted_over_interruptions() -> None:
    first = ("Starting", "Downloading", "Training")
    assert seen("InProgress", "Starting", "Starting").attempt == 0
    assert seen("InProgress", "Training", *first).attempt == 1
    again = seen("InProgress", "Training", *first, "Interrupted", "Starting", "Training", "Training")
    assert (again.attempt, again.why) == (2, "its machine was taken back 1 time so far")
    third = seen("InProgress", "Interrupted", *first, "Interrupted", "Training", "Interrupted")
    assert (
        third.why == "its spare machine was taken back; it waits for another; its machine was taken back 2 times so far"
    )


def test_a_job_that_ended_well_is_done() -> None:
    found = seen("Completed")
    assert (found.why, found.exit_code, found.condition) == ("done", 0, Condition.DONE)


def test_jobs_are_told_in_the_order_asked_and_those_without_a_record_say_so(
    aws: Aws, sandbox: Sandbox, tmp_path: Path
) -> None:
    scene = Scene(aws, ground_of(tmp_path))
    scene.make()
    one, other = (scene.made(f"sagemaker_job.sm-{number}") for number in range(2))
    sandbox.training.start(other.name)
    assert [(job.slot, job.state) for job in views(aws, [other, one])] == [("sm-1", "Training"), ("sm-0", "Pending")]
    scene.jobs.delete(one)
    (gone,) = views(aws, [one])
    assert (gone.state, gone.condition) == ("UNKNOWN", Condition.LOST)
    assert gone.why.startswith("SageMaker has no record of it")
    assert list(lines(aws, one, None)) == []


def test_lines_of_all_starts_come_one_after_the_other_and_go_on_at_a_cursor(
    aws: Aws, sandbox: Sandbox, tmp_path: Path
) -> None:
    scene = Scene(aws, ground_of(tmp_path, "spot: true", count=1))
    scene.make()
    made = scene.made("sagemaker_job.sm-0")
    texts: list[str] = []
    for start in range(2):
        for number in range(3):
            texts.append(f"{start} {number}")
            sandbox.training.write(made.name, texts[-1])
        sandbox.training.interrupt(made.name)
    found = list(lines(aws, made, None))
    assert [(line.slot, line.text) for line in found] == [("sm-0", text) for text in texts]
    for number, line in enumerate(found):
        assert [after.text for after in lines(aws, made, line.cursor)] == texts[number + 1 :]
    with pytest.raises(Invalid, match="not a place in a job's log"):
        list(lines(aws, made, "yesterday"))
