from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.targets.vertex.kit import Scene, ground_of

from skerry.infra.provision.handler import Condition
from skerry.infra.targets.vertex.job_views import lines, view, views
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.target import JobView
    from skerry.testing.google.sandbox import GoogleSandbox

NAME = "projects/1/locations/us-central1/customJobs/42"


@pytest.fixture
def scene(google: Google, tmp_path: Path) -> Scene:
    scene = Scene(google, ground_of(tmp_path, "machine: g2-standard-8, scheduling: spot"))
    scene.make()
    return scene


@pytest.fixture
def state_record(google: Google, tmp_path: Path) -> StateRecord:
    return Scene(google, ground_of(tmp_path)).record("vertex_job.vertex-0")


def described(state_record: StateRecord, state: str, code: int = 0, message: str = "", **row: Any) -> JobView:
    error = {"error": {"code": code, "message": message}} if message or code else {}
    return view(state_record, {"name": NAME, "state": f"JOB_STATE_{state}", **error, **row})


EXITED = "The replica workerpool0-0 exited with a non-zero status of {}. To find out more ... check the logs: https://x"
ENDS = {
    "exit code RETRY": (
        3,
        EXITED.format(10),
        10,
        "exit code 10: an outside failure; `skerry apply` starts",
    ),
    "exit code PERMANENT": (3, EXITED.format(20), 20, "exit code 20: the spec, the code or the rights are wrong;"),
    "exit code STOPPED": (3, EXITED.format(30), 30, "exit code 30: its script stopped it, or the time of the run"),
    "exit code of the script": (3, EXITED.format(2), 2, "exit code 2: not a code of the runtime; see its logs"),
    "killed": (
        3,
        "The replica workerpool0-0 ran out-of-memory and exited with a non-zero status of 137(SIGKILL).",
        137,
        "it used more memory than its machine has; take a larger machine; exit code 137: killed, often because memory",
    ),
    "its machine was reclaimed": (
        8,
        "STOCKOUT: the Spot VM was preempted, and resources are insufficient to restart the job.",
        None,
        "its machine was reclaimed, or none is available now; `skerry apply` starts another (STOCKOUT: ",
    ),
    "no machine": (
        8,
        "Resources are insufficient in region: us-central1. Please try a different region or another accelerator.",
        None,
        "no machine of its type is available now: try another machine, region or scheduling (flex_start) (Resources",
    ),
    "no quota": (
        8,
        "The following quota metrics exceed quota limits: custom_model_training_nvidia_l4_gpus",
        None,
        "a quota is used up; see `skerry doctor` (The following quota metrics",
    ),
    "no quota in the words of a machine": (
        8,
        "Insufficient regional quota to satisfy request: resource NVIDIA_L4_GPUS",
        None,
        "a quota is used up; see `skerry doctor` (Insufficient regional quota",
    ),
    "no right in the words of a machine": (
        7,
        "The service account has insufficient permissions to access resource projects/p/buckets/b",
        None,
        "a permission is missing; see `skerry doctor` (The service account",
    ),
    "no words for it": (8, "busy", None, "no machine of its type is available now, or a quota is used up; see"),
    "no image": (
        5,
        "Image us-central1-docker.pkg.dev/p/r/i@sha256:1 not found.",
        None,
        "its image could not be pulled: check that it exists with this digest (Image",
    ),
    "no right to the image": (
        7,
        "Permission artifactregistry.repositories.downloadArtifacts denied on r",
        None,
        "its image could not be pulled: check that the Vertex AI service agent of the project may",
    ),
    "no right": (7, "denied", None, "a permission is missing; see `skerry doctor` (denied)"),
    "no time": (
        4,
        "The job exceeded its timeout.",
        None,
        "its time limit was reached: `limits` or max_runtime of the spec, or",
    ),
    "an internal failure": (
        13,
        "Internal error",
        None,
        "an internal failure of Vertex AI; `skerry apply` starts another",
    ),
    "something new": (3, "the sky fell", None, "the sky fell"),
}

PASSING = {
    "exit code RETRY",
    "exit code of the script",
    "killed",
    "its machine was reclaimed",
    "no machine",
    "an internal failure",
}


@pytest.mark.parametrize("case", ENDS)
def test_failed_job_shows_the_reason_and_the_exit_code(state_record: StateRecord, case: str) -> None:
    code, message, exit_code, expected = ENDS[case]
    job = described(
        state_record, "FAILED", code, message, startTime="2026-11-22T01:00:00.5Z", endTime="2026-11-22T02:00:00Z"
    )
    assert job.why.startswith(expected), job.why
    assert (job.slot, job.state, job.condition) == ("vertex-0", "FAILED", Condition.LOST)
    assert (job.exit_code, job.again) == (exit_code, case in PASSING)
    assert job.started_s is not None
    assert job.ended_s == job.started_s + 3599.5
    assert job.attempt == 1


def test_queued_job_shows_its_quota_and_the_page_of_quotas(state_record: StateRecord) -> None:
    job = described(state_record, "QUEUED")
    assert job.why == (
        "waits for a machine: none is free in us-central1, or its quota "
        "aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus is used up; see `skerry doctor` and "
        "https://console.cloud.google.com/iam-admin/quotas?project=skerry-sandbox"
    )
    assert (job.condition, job.attempt, job.exit_code) == (Condition.READY, 0, None)
    spot = described(replace(state_record, settings={**state_record.settings, "scheduling": "spot"}), "QUEUED")
    assert "custom_model_training_preemptible_nvidia_l4_gpus" in spot.why
    queued = described(replace(state_record, settings={**state_record.settings, "scheduling": "flex_start"}), "QUEUED")
    assert queued.why == "queued for machines by flex_start, until max_wait is over"


@pytest.mark.parametrize(
    ("state", "condition", "expected"),
    [
        ("PENDING", Condition.READY, "its machine is being started, or its image pulled"),
        ("RUNNING", Condition.READY, ""),
        ("CANCELLING", Condition.READY, "it is being stopped"),
        ("SUCCEEDED", Condition.DONE, "done"),
        ("CANCELLED", Condition.LOST, "it was stopped; `skerry apply` starts another (CANCELED)"),
        ("EXPIRED", Condition.LOST, "its time limit was reached before it ran; `skerry apply` starts another"),
    ],
)
def test_state_is_described(state_record: StateRecord, state: str, condition: Condition, expected: str) -> None:
    error = ("CANCELED", 1) if state == "CANCELLED" else ("", 0)
    job = described(state_record, state, error[1], error[0])
    assert (job.state, job.condition, job.why) == (state, condition, expected)
    assert (job.exit_code, job.again) == (0 if state == "SUCCEEDED" else None, False)


def test_attempt_is_the_number_of_the_generation(state_record: StateRecord) -> None:
    third = replace(state_record, generation=2)
    assert described(third, "RUNNING", startTime="2026-11-22T01:00:00Z").attempt == 3
    assert described(third, "PENDING").attempt == 0


def test_views_keep_their_order_and_need_one_listing(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    first, second = (scene.record(f"vertex_job.vertex-{number}") for number in (0, 1))
    sandbox.jobs.start(first.outputs["id"])
    sandbox.jobs.finish(second.outputs["id"], 20)
    sandbox.calls.clear()
    jobs = views(google, [second, first])
    assert [(each.slot, each.state, each.exit_code) for each in jobs] == [
        ("vertex-1", "FAILED", 20),
        ("vertex-0", "RUNNING", None),
    ]
    assert [call.operation for call in sandbox.calls] == ["projects.locations.customJobs.list"]
    assert views(google, []) == []


def test_logs_of_a_deleted_job_can_still_be_read(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    record = scene.record("vertex_job.vertex-0")
    sandbox.jobs.write(record.outputs["id"], "hello")
    scene.handlers[record.kind].delete(record)
    (job,) = views(google, [record])
    assert (job.state, job.condition) == ("UNKNOWN", Condition.LOST)
    assert job.why == "Vertex AI has no record of it: it was stopped and deleted; `skerry apply` starts another"
    assert [line.text for line in lines(google, record, None)] == ["hello"]


def test_lines_continue_at_a_cursor(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    record, other = (scene.record(f"vertex_job.vertex-{number}") for number in (0, 1))
    assert list(lines(google, record, None)) == []
    for text in ("one", "two"):
        sandbox.jobs.write(record.outputs["id"], text)
    sandbox.jobs.write(other.outputs["id"], "not mine")
    log = list(lines(google, record, None))
    assert [(line.slot, line.text) for line in log] == [("vertex-0", "one"), ("vertex-0", "two")]
    assert [line.text for line in lines(google, record, log[0].cursor)] == ["two"]
    sandbox.jobs.write(record.outputs["id"], "three")
    assert [line.text for line in lines(google, record, log[-1].cursor)] == ["three"]


def test_lines_of_a_job_that_was_never_created_are_an_error(google: Google, state_record: StateRecord) -> None:
    with pytest.raises(Invalid, match=re.escape("its job was never created; run `skerry apply` again")):
        list(lines(google, state_record, None))
