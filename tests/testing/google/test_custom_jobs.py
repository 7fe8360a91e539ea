"""Vertex's jobs as its JobService describes them: driven by the test, from their creation to their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.testing.google.kit import ACCOUNTS, JOBS, create_job, good, job_of, make_account, refused

from skerry.testing.google.refusals import Refusal

if TYPE_CHECKING:
    from skerry.testing.google import GoogleSandbox

FAILED = "The replica workerpool0-0 exited with a non-zero status of {}."
ONCE = {"disableRetries": True}
SPOT = {**ONCE, "strategy": "SPOT"}
G2 = {"machineType": "g2-standard-12", "acceleratorType": "NVIDIA_L4", "acceleratorCount": 1}


def state(google: GoogleSandbox, job: str) -> str:
    return described(google, job)["state"].removeprefix("JOB_STATE_")


def described(google: GoogleSandbox, job: str) -> Any:
    return good(google, "GET", f"/v1/{job}")


def error_of(google: GoogleSandbox, job: str) -> dict[str, Any]:
    """The error of a job that has failed."""
    response = described(google, job)
    assert response["state"] == "JOB_STATE_FAILED"
    return response["error"]


def test_job_waits_for_its_start_and_runs_to_its_end(google: GoogleSandbox) -> None:
    job = create_job(google)
    assert job.startswith(f"projects/{google.number}/locations/us-central1/customJobs/")
    assert "startTime" not in described(google, job)
    states = [state(google, job)]
    for step in (google.jobs.queue, google.jobs.start, google.jobs.start):
        step(job)
        states.append(state(google, job))
    assert states == ["PENDING", "QUEUED", "RUNNING", "RUNNING"]
    for code in (0, 1):
        assert google.jobs.finish(job, code) == "JOB_STATE_SUCCEEDED"
    done = described(google, job)
    assert done["createTime"] <= done["updateTime"]
    assert done["startTime"] <= done["endTime"] == done["updateTime"]
    assert "error" not in done


def test_two_jobs_may_have_the_same_name(google: GoogleSandbox) -> None:
    assert create_job(google) != create_job(google)
    assert google.inventory() == {"job": ("run-replica-0", "run-replica-0")}


# Ends.


@pytest.mark.parametrize("interrupted", [False, True])
def test_failure_ends_a_job_without_retries(google: GoogleSandbox, interrupted: bool) -> None:  # noqa: FBT001
    job = create_job(google, scheduling=SPOT if interrupted else ONCE)
    if interrupted:
        google.jobs.start(job)
        google.jobs.interrupt(job)
    google.jobs.finish(job, 20)
    error = error_of(google, job)
    assert error["code"] == 3
    assert error["message"].startswith(FAILED.format(20))


def test_failed_worker_restarts_five_times_and_its_job_three_times(google: GoogleSandbox) -> None:
    job = create_job(google)
    states = [google.jobs.finish(job, 10) for _ in range(24)]
    assert states == ["JOB_STATE_RUNNING"] * 23 + ["JOB_STATE_FAILED"]


def test_out_of_memory_fails_the_job_at_once(google: GoogleSandbox) -> None:
    job = create_job(google)
    google.jobs.finish(job, 137, reason="OutOfMemoryError: killed")
    assert "ran out-of-memory" in error_of(google, job)["message"]


def test_a_spot_machine_is_replaced_six_times(google: GoogleSandbox) -> None:
    job = create_job(google, scheduling=SPOT)
    states: list[str] = []
    for _ in range(7):
        google.jobs.start(job)
        google.jobs.interrupt(job)
        states.append(google.jobs.state(job))
    assert states == ["JOB_STATE_PENDING"] * 6 + ["JOB_STATE_FAILED"]
    assert error_of(google, job)["message"].startswith("STOCKOUT")


@pytest.mark.parametrize("running", [False, True])
def test_cancel_ends_an_unfinished_job_and_is_refused_for_others(google: GoogleSandbox, running: bool) -> None:  # noqa: FBT001
    job, done = create_job(google), create_job(google)
    google.jobs.finish(done)
    if running:
        google.jobs.start(job)
    assert good(google, "POST", f"/v1/{job}:cancel", {}) == {}
    assert (state(google, job), described(google, job)["error"]["message"]) == ("CANCELLED", "CANCELED")
    status, answer = google.call("POST", f"/v1/{done}:cancel", {})
    assert (status, answer["error"]["status"]) == (400, "FAILED_PRECONDITION")
    assert state(google, done) == "SUCCEEDED"


def test_job_failed_by_vertex_reports_its_error(google: GoogleSandbox) -> None:
    job = create_job(google)
    google.jobs.fail(job, 8, "Resources are insufficient in region: us-central1.")
    assert error_of(google, job) == {"code": 8, "message": "Resources are insufficient in region: us-central1."}


def test_only_an_ended_job_is_deleted(google: GoogleSandbox) -> None:
    job = create_job(google)
    status, answer = google.call("DELETE", f"/v1/{job}")
    assert (status, answer["error"]["status"]) == (400, "FAILED_PRECONDITION")
    google.jobs.finish(job)
    google.settling = 1
    operation = good(google, "DELETE", f"/v1/{job}")
    described(google, job)
    assert good(google, "GET", f"/v1/{operation['name']}")["done"]
    assert refused(google, "GET", f"/v1/{job}")[0] == 404


# What a job may be.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machineSpec": {}}, "Machine type is required"),
        ({"machineSpec": {**G2, "machineType": "g2-standard-24"}}, "not supported with 1 NVIDIA_L4"),
        ({"machineSpec": {"machineType": "g2-standard-12"}}, "not supported with 0"),
        ({"machineSpec": {**G2, "acceleratorType": "NVIDIA_TESLA_T4"}}, "not supported with 1 NVIDIA_TESLA_T4"),
        ({"machineSpec": {**G2, "machineType": "e2-standard-4"}}, "does not support accelerators"),
        ({"containerSpec": {}}, "an image is required"),
        ({"containerSpec": {"imageUri": "x", "env": [{"name": "A-B", "value": "1"}]}}, "environment variable: A-B"),
        ({"containerSpec": {"imageUri": "x", "env": [{"name": "A"}, {"name": "A"}]}}, "environment variable: A"),
        ({"containerSpec": {"imageUri": "x", "env": [{"name": f"A{n}"} for n in range(101)]}}, "more than 100"),
        ({"diskSpec": {"bootDiskSizeGb": 50}}, "boot disk"),
        ({"replicaCount": "2"}, "one worker pool with one replica"),
    ],
)
def test_invalid_worker_pool_is_refused(google: GoogleSandbox, change: dict[str, Any], message: str) -> None:
    body = job_of()
    body["jobSpec"]["workerPoolSpecs"][0] |= change
    assert message in refused(google, "POST", JOBS, body)[1]
    assert google.inventory() == {}


def test_a_machine_with_its_own_accelerator_is_taken(google: GoogleSandbox) -> None:
    body = job_of()
    body["jobSpec"]["workerPoolSpecs"][0]["machineSpec"] = G2
    good(google, "POST", JOBS, body)


@pytest.mark.parametrize(
    "change",
    [
        {"displayName": ""},
        {"displayName": "x" * 129},
        {"labels": {"Run": "a"}},
        {"labels": {"run": "gs://a"}},
        {"labels": {"run": "a" * 64}},
        {"labels": {f"l{n}": "" for n in range(65)}},
    ],
)
def test_names_and_labels_have_limits(google: GoogleSandbox, change: dict[str, Any]) -> None:
    assert refused(google, "POST", JOBS, job_of() | change)[0] == 400


@pytest.mark.parametrize(
    "scheduling", [{"maxWaitDuration": "60s", "strategy": "SPOT"}, {"strategy": "FLEX_START", "timeout": "604801s"}]
)
def test_scheduling_has_rules(google: GoogleSandbox, scheduling: dict[str, Any]) -> None:
    assert refused(google, "POST", JOBS, job_of(scheduling=scheduling))[0] == 400


def test_job_needs_an_account_that_its_creator_may_use(google: GoogleSandbox) -> None:
    email = make_account(google)
    create_job(google, serviceAccount=email)
    gone = email.replace("replica-0", "replica-1")
    assert "does not exist" in refused(google, "POST", JOBS, job_of(serviceAccount=gone))[1]
    google.restrict({"aiplatform.customJobs.create"})
    status, message = refused(google, "POST", JOBS, job_of(serviceAccount=email))
    assert status == 403
    assert "permission to act as service_account" in message


def test_account_is_usable_after_the_settling_time(google: GoogleSandbox) -> None:
    google.settling = 2
    email = make_account(google)
    statuses = [google.call("POST", JOBS, job_of(serviceAccount=email))[0] for _ in range(3)]
    assert statuses == [400, 400, 200]


def test_injected_refusal_applies_to_every_creation(google: GoogleSandbox) -> None:
    google.jobs.refuse(Refusal(429, "Quota exceeded for custom_model_training_nvidia_l4_gpus"))
    assert [google.call("POST", JOBS, job_of())[0] for _ in range(2)] == [429, 429]
    google.jobs.refuse(None)
    create_job(google)


# Lists.


def test_jobs_are_listed_by_label_and_state_newest_first(google: GoogleSandbox) -> None:
    names = [
        good(google, "POST", JOBS, job_of() | {"labels": {"run": run, "slot": f"r-{slot}"}})["name"]
        for run in ("a", "b")
        for slot in range(2)
    ]
    google.jobs.finish(names[3])
    result = good(google, "GET", f"{JOBS}?filter=labels.run%3Da")["customJobs"]
    assert [item["name"] for item in result] == [names[1], names[0]]
    for text, expected in (
        ('labels.run="b" AND labels.slot="r-1"', [names[3]]),
        ('labels.run="b" AND NOT state="JOB_STATE_SUCCEEDED"', [names[2]]),
        ("labels.run:*", list(reversed(names))),
        ("labels.other:*", []),
        ('display_name="run-*"', list(reversed(names))),
    ):
        query = text.replace(" ", "%20").replace('"', "%22").replace("*", "%2A")
        response = good(google, "GET", f"{JOBS}?filter={query}")
        assert [item["name"] for item in response.get("customJobs", [])] == expected
    assert refused(google, "GET", f"{JOBS}?filter=label.run%3Da")[0] == 400
    page = good(google, "GET", f"{JOBS}?pageSize=3")
    rest = good(google, "GET", f"{JOBS}?pageSize=3&pageToken={page['nextPageToken']}")
    assert len(page["customJobs"]) == 3
    assert len(rest["customJobs"]) == 1
    assert good(google, "GET", JOBS.replace("us-central1", "europe-west4")) == {}


def test_job_is_found_by_project_id_or_number(google: GoogleSandbox) -> None:
    job = create_job(google)
    described(google, job.replace(google.number, google.project))
    assert refused(google, "GET", f"/v1/{job.replace(google.number, 'others')}")[0] == 404
    assert refused(google, "GET", f"/v1/{job.replace('us-central1', 'us-east1')}")[0] == 404


def test_wait_timeout_reports_the_current_state(google: GoogleSandbox) -> None:
    job = create_job(google)
    assert google.jobs.wait(job, "JOB_STATE_PENDING") == "JOB_STATE_PENDING"
    with pytest.raises(TimeoutError, match="status=RUNNABLE"):
        google.jobs.wait(job, within_s=0.0)
    with pytest.raises(LookupError, match="no running container"):
        google.jobs.container(job)
    google.jobs.finish(job)
    assert google.jobs.wait(job) == "JOB_STATE_SUCCEEDED"


# Google's own client.


@pytest.mark.slow
def test_numbers_for_enums_from_the_client_library_are_accepted(google: GoogleSandbox) -> None:
    from google.cloud import aiplatform_v1  # noqa: PLC0415  takes seconds
    from google.oauth2.credentials import Credentials  # noqa: PLC0415  same

    client = aiplatform_v1.JobServiceClient(
        credentials=Credentials(google.token), transport="rest", client_options={"api_endpoint": google.endpoint}
    )
    email = good(google, "POST", ACCOUNTS, {"accountId": "replica-0"})["email"]
    body = job_of(serviceAccount=email, scheduling=SPOT)
    body["jobSpec"]["workerPoolSpecs"][0]["machineSpec"] = G2
    parent = "projects/skerry-sandbox/locations/us-central1"
    from google.protobuf import json_format  # noqa: PLC0415  same

    wanted = aiplatform_v1.CustomJob(json_format.ParseDict(body, aiplatform_v1.CustomJob.pb()()))
    created = client.create_custom_job(parent=parent, custom_job=wanted)
    assert created.state == aiplatform_v1.JobState.JOB_STATE_PENDING
    sent = next(call for call in google.calls if call.name.endswith("customJobs.create"))
    assert sent.body["jobSpec"]["scheduling"]["strategy"] == 4
    kept = described(google, created.name)["jobSpec"]
    assert kept["scheduling"] == SPOT
    assert kept["workerPoolSpecs"][0]["machineSpec"]["acceleratorType"] == "NVIDIA_L4"
    google.jobs.finish(created.name, 20)
    result = list(client.list_custom_jobs(parent=parent))
    assert [item.state.name for item in result] == ["JOB_STATE_FAILED"]
    assert result[0].job_spec.scheduling.strategy.name == "SPOT"
    assert result[0].error.message.startswith(FAILED.format(20))
    client.delete_custom_job(name=created.name).result()
    assert google.violations == []
