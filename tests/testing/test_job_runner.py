"""Jobs without containers, driven by the test: the same course and the same words as with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.support.batchplace import make_place

from skerry.testing.batch_retry_rules import EXITED

if TYPE_CHECKING:
    from tests.support.batchplace import Place

    from skerry.testing.sandbox import Sandbox

AGAIN_AFTER_10: Final = {
    "attempts": 3,
    "evaluateOnExit": [
        {"onStatusReason": "Host EC2*", "action": "RETRY"},
        {"onExitCode": "10", "action": "RETRY"},
        {"onReason": "*", "action": "EXIT"},
    ],
}


@pytest.fixture
def place(skerry_sandbox: Sandbox) -> Place:
    return make_place(skerry_sandbox)


def listed(place: Place, status: str) -> list[dict[str, Any]]:
    return list(place.batch.list_jobs(jobQueue="queue", jobStatus=status)["jobSummaryList"])


def test_job_waits_for_its_start_and_runs_to_its_end(place: Place) -> None:
    jobs = place.sandbox.batch
    job = place.submit(place.define())
    assert place.job(job)["status"] == "RUNNABLE"
    assert "startedAt" not in place.job(job)
    jobs.start(job)
    jobs.start(job)
    assert place.job(job)["status"] == "RUNNING"
    assert [item["jobId"] for item in listed(place, "RUNNING")] == [job]
    assert jobs.finish(job) == "SUCCEEDED"
    response = place.job(job)
    assert (response["status"], response["statusReason"], response["container"]["exitCode"]) == ("SUCCEEDED", EXITED, 0)
    assert response["createdAt"] <= response["startedAt"] <= response["stoppedAt"]
    assert listed(place, "SUCCEEDED")[0]["container"] == {"exitCode": 0}
    assert jobs.finish(job, 1) == "SUCCEEDED"


def test_each_attempt_is_described(place: Place) -> None:
    jobs = place.sandbox.batch
    job = place.submit(place.define(retryStrategy=AGAIN_AFTER_10))
    assert jobs.finish(job, 10) == "RUNNABLE"
    jobs.start(job)
    assert [item["container"]["exitCode"] for item in place.job(job)["attempts"]] == [10]
    jobs.interrupt(job)
    assert place.job(job)["status"] == "RUNNABLE"
    assert jobs.finish(job, 20, reason="bad spec") == "FAILED"
    response = place.job(job)["attempts"]
    assert [item["container"].get("exitCode") for item in response] == [10, None, 20]
    assert [item["statusReason"].partition(" (")[0] for item in response] == [EXITED, "Host EC2", EXITED]
    assert response[2]["container"]["reason"] == "bad spec"
    assert all(item["startedAt"] <= item["stoppedAt"] for item in response)


def test_retry_strategy_of_the_submission_overrides_the_definition(place: Place) -> None:
    job = place.submit(place.define(retryStrategy={"attempts": 1}), retryStrategy={"attempts": 2})
    assert place.job(job)["retryStrategy"]["attempts"] == 2
    assert place.sandbox.batch.finish(job, 1) == "RUNNABLE"


@pytest.mark.parametrize("running", [False, True])
def test_terminated_job_fails_with_the_given_reason(
    place: Place,
    running: bool,  # noqa: FBT001  both cases
) -> None:
    job = place.submit(place.define(retryStrategy=AGAIN_AFTER_10))
    if running:
        place.sandbox.batch.start(job)
    place.batch.terminate_job(jobId=job, reason="destroyed")
    response = place.job(job)
    assert (response["status"], response["statusReason"], len(response["attempts"])) == (
        "FAILED",
        "destroyed",
        int(running),
    )
    place.batch.terminate_job(jobId=job, reason="again")
    assert place.job(job)["statusReason"] == "destroyed"
    place.batch.terminate_job(jobId="nobody", reason="there is none")


def test_cancel_ends_only_waiting_jobs(place: Place) -> None:
    definition = place.define()
    waiting, running = place.submit(definition, "one"), place.submit(definition, "two")
    place.sandbox.batch.start(running)
    for job in (waiting, running):
        place.batch.cancel_job(jobId=job, reason="changed my mind")
    assert [place.job(job)["status"] for job in (waiting, running)] == ["FAILED", "RUNNING"]


def test_array_ends_with_its_children_and_ends_them(place: Place) -> None:
    definition = place.define()
    parent = place.submit(definition, arrayProperties={"size": 2})
    assert place.job(parent)["status"] == "PENDING"
    assert place.job(f"{parent}:1")["arrayProperties"] == {"index": 1}
    place.sandbox.batch.finish(f"{parent}:0")
    place.sandbox.batch.finish(f"{parent}:1", 1)
    assert place.job(parent)["status"] == "FAILED"
    other = place.submit(definition, arrayProperties={"size": 2})
    place.batch.terminate_job(jobId=other, reason="over")
    assert [place.job(f"{other}:{index}")["status"] for index in range(2)] == ["FAILED", "FAILED"]


def test_description_repeats_the_definition(place: Place) -> None:
    options = {"awslogs-group": "/skerry/tiny", "awslogs-stream-prefix": "a-0"}
    container = {
        "jobRoleArn": "arn:aws:iam::123456789012:role/a-0",
        "linuxParameters": {"sharedMemorySize": 64},
        "logConfiguration": {"logDriver": "awslogs", "options": options},
    }
    more = {"resourceRequirements": [{"type": "MEMORY", "value": "999"}, {"type": "GPU", "value": "1"}]}
    job = place.submit(place.define(container=container), containerOverrides=more, tags={"skerry:run": "s3://b/r"})
    response = place.job(job)
    assert {name: response["container"][name] for name in container} == container
    wanted = {item["type"]: item["value"] for item in response["container"]["resourceRequirements"]}
    assert wanted == {"VCPU": "1", "MEMORY": "999", "GPU": "1"}
    assert response["tags"] == {"skerry:run": "s3://b/r"}


def test_wait_returns_the_status_or_reports_the_current_one(place: Place) -> None:
    job = place.submit(place.define())
    with pytest.raises(TimeoutError, match="status=RUNNABLE"):
        place.sandbox.batch.wait(job, within_s=0.01)
    place.sandbox.batch.finish(job)
    assert place.sandbox.batch.wait(job) == "SUCCEEDED"
    with pytest.raises(LookupError, match="no running container"):
        place.sandbox.batch.container(job)
