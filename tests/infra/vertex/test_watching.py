from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.vertex.ground import Scene, ground_of

from skerry.infra.handler import Condition
from skerry.infra.targets.vertex.watching import lines, view, views
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.handler import Made
    from skerry.infra.target import JobView
    from skerry.infra.testing.google.sandbox import GoogleSandbox

NAME = "projects/1/locations/us-central1/customJobs/42"


@pytest.fixture
def scene(google: Google, tmp_path: Path) -> Scene:
    scene = Scene(google, ground_of(tmp_path, "machine: g2-standard-8, scheduling: spot"))
    scene.make()
    return scene


@pytest.fixture
def made(google: Google, tmp_path: Path) -> Made:
    return Scene(google, ground_of(tmp_path)).made("vertex_job.vertex-0")


def seen(made: Made, state: str, code: int = 0, message: str = "", **row: Any) -> JobView:
    error = {"error": {"code": code, "message": message}} if message or code else {}
    return view(made, {"name": NAME, "state": f"JOB_STATE_{state}", **error, **row})


EXITED = "The replica workerpool0-0 exited with a non-zero status of {}. To find out more ... check the logs: https://x"
ENDS = {
    "our own code for again": (
        3,
        EXITED.format(10),
        10,
        "exit code 10: something outside broke; `skerry apply` starts",
    ),
    "our own code for never": (3, EXITED.format(20), 20, "exit code 20: the spec, the code or the rights are wrong;"),
    "our own code for a stop": (3, EXITED.format(30), 30, "exit code 30: stopped on request, or the run has had its"),
    "a code of somebody else": (3, EXITED.format(2), 2, "exit code 2: not a code of the runtime; see its logs"),
    "killed": (
        3,
        "The replica workerpool0-0 ran out-of-memory and exited with a non-zero status of 137(SIGKILL).",
        137,
        "it used more memory than its machine has; take a larger machine; exit code 137: killed, often for want of",
    ),
    "its machine was taken back": (
        8,
        "STOCKOUT: the Spot VM was preempted, and resources are insufficient to restart the job.",
        None,
        "its machine was taken back, or none is to be had now; `skerry apply` starts another (STOCKOUT: ",
    ),
    "no machine": (
        8,
        "Resources are insufficient in region: us-central1. Please try a different region or another accelerator.",
        None,
        "no machine of its kind is to be had now: another machine, region or scheduling (flex_start) may be (Resources",
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
        "a right is missing; see `skerry doctor` (The service account",
    ),
    "no words for it": (8, "busy", None, "no machine of its kind is to be had now, or a quota is used up; see"),
    "no image": (
        5,
        "Image us-central1-docker.pkg.dev/p/r/i@sha256:1 not found.",
        None,
        "its image could not be fetched: is it there, by this digest? (Image",
    ),
    "no right to the image": (
        7,
        "Permission artifactregistry.repositories.downloadArtifacts denied on r",
        None,
        "its image could not be fetched: may the Vertex AI service agent of the project read the repository? (Perm",
    ),
    "no right": (7, "denied", None, "a right is missing; see `skerry doctor` (denied)"),
    "no time": (4, "The job exceeded its timeout.", None, "its time was up: `limits` or max_runtime of the spec, or"),
    "Google's own fault": (
        13,
        "Internal error",
        None,
        "something broke inside Vertex AI; `skerry apply` starts another",
    ),
    "something new": (3, "the sky fell", None, "the sky fell"),
}

PASSING = {
    "our own code for again",
    "a code of somebody else",
    "killed",
    "its machine was taken back",
    "no machine",
    "Google's own fault",
}


@pytest.mark.parametrize("case", ENDS)
def test_how_a_job_ended_is_said_in_words(made: Made, case: str) -> None:
    code, message, exit_code, expected = ENDS[case]
    found = seen(made, "FAILED", code, message, startTime="2026-11-22T01:00:00.5Z", endTime="2026-11-22T02:00:00Z")
    assert found.why.startswith(expected), found.why
    assert (found.slot, found.state, found.condition) == ("vertex-0", "FAILED", Condition.LOST)
    assert (found.exit_code, found.again) == (exit_code, case in PASSING)
    assert found.started_s is not None
    assert found.ended_s == found.started_s + 3599.5
    assert found.attempt == 1


def test_why_a_job_waits_is_said_with_the_quota_and_where_it_is_shown(made: Made) -> None:
    found = seen(made, "QUEUED")
    assert found.why == (
        "waits for a machine: none is free in us-central1, or the quota "
        "aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus is used up there; see `skerry doctor` and "
        "https://console.cloud.google.com/iam-admin/quotas?project=skerry-sandbox"
    )
    assert (found.condition, found.attempt, found.exit_code) == (Condition.READY, 0, None)
    spot = seen(replace(made, settings={**made.settings, "scheduling": "spot"}), "QUEUED")
    assert "custom_model_training_preemptible_nvidia_l4_gpus" in spot.why
    queued = seen(replace(made, settings={**made.settings, "scheduling": "flex_start"}), "QUEUED")
    assert queued.why == "queues for machines, as flex_start does, until max_wait is over"


@pytest.mark.parametrize(
    ("state", "condition", "expected"),
    [
        ("PENDING", Condition.READY, "its machine is being found and started, or its image fetched"),
        ("RUNNING", Condition.READY, ""),
        ("CANCELLING", Condition.READY, "it is being stopped"),
        ("SUCCEEDED", Condition.DONE, "done"),
        ("CANCELLED", Condition.LOST, "it was stopped; `skerry apply` starts another (CANCELED)"),
        ("EXPIRED", Condition.LOST, "it ran out of time before it ran; `skerry apply` starts another"),
    ],
)
def test_every_state_has_words(made: Made, state: str, condition: Condition, expected: str) -> None:
    error = ("CANCELED", 1) if state == "CANCELLED" else ("", 0)
    found = seen(made, state, error[1], error[0])
    assert (found.state, found.condition, found.why) == (state, condition, expected)
    assert (found.exit_code, found.again) == (0 if state == "SUCCEEDED" else None, False)


def test_the_next_generation_is_the_next_attempt(made: Made) -> None:
    again = replace(made, generation=2)
    assert seen(again, "RUNNING", startTime="2026-11-22T01:00:00Z").attempt == 3
    assert seen(again, "PENDING").attempt == 0


def test_jobs_are_told_in_the_order_asked_with_one_listing(
    google: Google, sandbox: GoogleSandbox, scene: Scene
) -> None:
    one, other = (scene.made(f"vertex_job.vertex-{number}") for number in (0, 1))
    sandbox.jobs.start(one.outputs["id"])
    sandbox.jobs.finish(other.outputs["id"], 20)
    sandbox.calls.clear()
    found = views(google, [other, one])
    assert [(each.slot, each.state, each.exit_code) for each in found] == [
        ("vertex-1", "FAILED", 20),
        ("vertex-0", "RUNNING", None),
    ]
    assert [call.operation for call in sandbox.calls] == ["projects.locations.customJobs.list"]
    assert views(google, []) == []


def test_a_job_that_was_stopped_has_no_record_and_what_it_wrote_can_still_be_read(
    google: Google, sandbox: GoogleSandbox, scene: Scene
) -> None:
    made = scene.made("vertex_job.vertex-0")
    sandbox.jobs.write(made.outputs["id"], "hello")
    scene.handlers[made.kind].delete(made)
    (found,) = views(google, [made])
    assert (found.state, found.condition) == ("UNKNOWN", Condition.LOST)
    assert found.why == "Vertex AI has no record of it: it was stopped and deleted; `skerry apply` starts another"
    assert [line.text for line in lines(google, made, None)] == ["hello"]


def test_lines_are_read_on_from_where_a_reader_was(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    made, other = (scene.made(f"vertex_job.vertex-{number}") for number in (0, 1))
    assert list(lines(google, made, None)) == []
    for text in ("one", "two"):
        sandbox.jobs.write(made.outputs["id"], text)
    sandbox.jobs.write(other.outputs["id"], "not mine")
    found = list(lines(google, made, None))
    assert [(line.slot, line.text) for line in found] == [("vertex-0", "one"), ("vertex-0", "two")]
    assert [line.text for line in lines(google, made, found[0].cursor)] == ["two"]
    sandbox.jobs.write(made.outputs["id"], "three")
    assert [line.text for line in lines(google, made, found[-1].cursor)] == ["three"]


def test_of_a_job_that_was_never_made_there_is_nothing_to_read(google: Google, made: Made) -> None:
    with pytest.raises(Invalid, match=re.escape("was never made, and has written nothing; run `skerry apply` again")):
        list(lines(google, made, None))
