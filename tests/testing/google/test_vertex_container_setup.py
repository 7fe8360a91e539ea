"""A Vertex job's container has its own account, its own variables, and an image that the engine finds."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from tests.testing.google.kit import JOBS, create_job, good, job_of, make_account

from skerry.testing.google import GoogleSandbox
from skerry.testing.job_runner import StartRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.testing.docker_containers import JobContainer

DIGEST = "@sha256:" + "a" * 64


def box(google: GoogleSandbox, **of_container: Any) -> JobContainer:
    """The first attempt's container of a job that is made so."""
    email = make_account(google)
    body = job_of(serviceAccount=email, baseOutputDirectory={"outputUriPrefix": "gs://bucket/out/"})
    body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"] |= of_container
    number = good(google, "POST", JOBS, body)["name"].rpartition("/")[2]
    return google.custom_jobs.find(number).run.host.container_for(1)


@pytest.fixture
def stocked() -> Iterator[GoogleSandbox]:
    with GoogleSandbox(registry="127.0.0.1:5000") as running:
        running.enable("aiplatform.googleapis.com")
        yield running


def test_container_has_the_variables_of_vertex_and_its_own(google: GoogleSandbox) -> None:
    google.variables["AWS_ENDPOINT_URL"] = "http://127.0.0.1:1"
    given = [{"name": "SKERRY_SLOT", "value": "r-0"}, {"name": "EMPTY"}, {"name": "CLOUD_ML_JOB_ID", "value": "mine"}]
    created = box(google, args=["--rounds", "3"], env=given)
    assert created.command == ["--rounds", "3"]
    response = dict(created.environment)
    assert (response["SKERRY_SLOT"], response["EMPTY"], response["AWS_ENDPOINT_URL"]) == (
        "r-0",
        "",
        "http://127.0.0.1:1",
    )
    assert response["CLOUD_ML_JOB_ID"].isdecimal(), "Vertex's own word counts"
    assert response["CLOUD_ML_PROJECT_ID"] == google.number
    assert json.loads(response["CLUSTER_SPEC"])["task"] == {"type": "workerpool0", "index": 0}
    assert response["AIP_MODEL_DIR"] == "gs://bucket/out/model/"
    assert response["AIP_CHECKPOINT_DIR"] == "gs://bucket/out/checkpoints/"
    assert response["STORAGE_EMULATOR_HOST"] == google.endpoint
    assert response["GCE_METADATA_HOST"] == response["GCE_METADATA_IP"] != google.environment["GCE_METADATA_HOST"]


def test_metadata_server_of_a_job_returns_its_account(google: GoogleSandbox) -> None:
    host = box(google).environment["GCE_METADATA_HOST"]
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/email"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request) as answer:  # noqa: S310  same
        assert answer.read() == b"replica-0@skerry-sandbox.iam.gserviceaccount.com"


def test_all_attempts_have_the_same_metadata_server(google: GoogleSandbox) -> None:
    host = google.custom_jobs.find(create_job(google)).run.host
    first, second = host.container_for(1), host.container_for(2)
    assert first.environment["GCE_METADATA_HOST"] == second.environment["GCE_METADATA_HOST"]
    assert first.name != second.name


def test_image_of_artifact_registry_is_pulled_from_the_registry(stocked: GoogleSandbox) -> None:
    image = f"us-central1-docker.pkg.dev/skerry-sandbox/skerry/replica{DIGEST}"
    assert box(stocked, imageUri=image).image == f"127.0.0.1:5000/skerry-sandbox/skerry/replica{DIGEST}"


def test_image_pull_without_a_registry_fails(google: GoogleSandbox) -> None:
    with pytest.raises(StartRefused, match="Image pull failed"):
        box(google, imageUri=f"us-central1-docker.pkg.dev/skerry-sandbox/skerry/replica{DIGEST}")


def test_command_of_a_container_is_refused(google: GoogleSandbox) -> None:
    with pytest.raises(StartRefused, match="does not support command"):
        box(google, command=["python"])
