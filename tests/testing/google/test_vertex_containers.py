"""Vertex's jobs as real containers: identity, output, end, and cleanup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.e2e.conftest import base, engine
from tests.testing.google.kit import JOBS, bind, good, job_of, make_account, make_bucket

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.testing.docker_containers import LABEL
from skerry.testing.google import GoogleSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.local.docker_engine import Engine

__all__ = ["base", "engine"]

pytestmark = [pytest.mark.docker, pytest.mark.slow]

PUT: Final = """
import json, os, sys, urllib.error, urllib.request
host = os.environ["GCE_METADATA_HOST"]
asked = urllib.request.Request(f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token",
                               headers={"Metadata-Flavor": "Google"})
token = json.load(urllib.request.urlopen(asked))["access_token"]
def put(key, **headers):
    url = os.environ["STORAGE_EMULATOR_HOST"] + "/bucket/" + key
    request = urllib.request.Request(url, data=b"x", method="PUT",
                                     headers={"Authorization": f"Bearer {token}", "Content-Type": "text/plain"})
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        return error.code
print(put("runs/a/x"), put("runs/b/x"), flush=True)
"""
WAITING: Final = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("waiting", flush=True)
signal.sigwait([signal.SIGTERM])
print("stopping", flush=True)
sys.exit(30)
"""
DEAF: Final = "import signal; signal.signal(15, signal.SIG_IGN); print('waiting', flush=True); signal.pause()"
OWN: Final = {"disableRetries": True}


@pytest.fixture
def google(base: str) -> Iterator[GoogleSandbox]:
    assert base
    with GoogleSandbox(containers=True, stop_grace_s=1.0) as running:
        running.enable("aiplatform.googleapis.com")
        yield running


def create(google: GoogleSandbox, base: str, program: str, **more: Any) -> str:
    body = job_of(**more)
    args = ["python3", "-u", "-c", program]
    body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"] |= {"imageUri": base, "args": args}
    return good(google, "POST", JOBS, body)["name"]


def lines(google: GoogleSandbox, job: str) -> list[str]:
    text = f'resource.type="ml_job" AND resource.labels.job_id="{job.rpartition("/")[2]}"'
    response = good(google, "POST", "/v2/entries:list", {"resourceNames": ["projects/skerry-sandbox"], "filter": text})
    return [item["jsonPayload"]["message"].rstrip("\n") for item in response.get("entries", [])]


def wait_for_output(google: GoogleSandbox, job: str, text: str) -> None:
    """Wait until the job has written the text."""
    clock = SystemClock()
    wait_until(clock, lambda: text in lines(google, job) or None, clock.now() + 60.0, Backoff(first=0.05, cap=0.2))


def test_a_container_acts_as_its_own_account(google: GoogleSandbox, base: str) -> None:
    make_bucket(google)
    email = make_account(google)
    own = 'resource.name.startsWith("projects/_/buckets/bucket/objects/runs/a/")'
    bind(google, "roles/storage.objectUser", f"serviceAccount:{email}", own)
    job = create(google, base, PUT, serviceAccount=email, scheduling=OWN)
    assert google.jobs.wait(job) == "JOB_STATE_SUCCEEDED", lines(google, job)
    assert lines(google, job) == ["200 403"]
    assert list(google.objects.buckets["bucket"].objects) == ["runs/a/x"]


def test_exit_code_is_reported(google: GoogleSandbox, base: str) -> None:
    job = create(google, base, "raise SystemExit(20)", scheduling=OWN)
    assert google.jobs.wait(job) == "JOB_STATE_FAILED"
    assert "exited with a non-zero status of 20." in good(google, "GET", f"/v1/{job}")["error"]["message"]


def test_cancelled_container_receives_sigterm_first(google: GoogleSandbox, base: str) -> None:
    job = create(google, base, WAITING, scheduling=OWN)
    wait_for_output(google, job, "waiting")
    good(google, "POST", f"/v1/{job}:cancel", {})
    assert google.jobs.wait(job) == "JOB_STATE_CANCELLED"
    assert lines(google, job) == ["waiting", "stopping"]


def test_container_that_ignores_sigterm_is_killed(google: GoogleSandbox, base: str) -> None:
    job = create(google, base, DEAF, scheduling=OWN)
    wait_for_output(google, job, "waiting")
    good(google, "POST", f"/v1/{job}:cancel", {})
    assert google.jobs.wait(job) == "JOB_STATE_CANCELLED"


def test_a_spot_machine_that_is_taken_away_is_replaced(google: GoogleSandbox, base: str) -> None:
    job = create(google, base, WAITING, scheduling={**OWN, "strategy": "SPOT"})
    wait_for_output(google, job, "waiting")
    first = google.jobs.container(job)
    google.jobs.interrupt(job)
    assert google.jobs.wait(job, "JOB_STATE_RUNNING", attempt=2) == "JOB_STATE_RUNNING"
    assert google.jobs.container(job) != first
    good(google, "POST", f"/v1/{job}:cancel", {})
    assert google.jobs.wait(job) == "JOB_STATE_CANCELLED"


def test_close_removes_all_containers(base: str, engine: Engine) -> None:
    with GoogleSandbox(containers=True, stop_grace_s=1.0) as google:
        google.enable("aiplatform.googleapis.com")
        job = create(google, base, WAITING)
        wait_for_output(google, job, "waiting")
        mark = engine.containers.inspect(google.jobs.container(job))["Config"]["Labels"][LABEL]
        assert len(list(engine.containers.labelled({LABEL: mark}))) == 1
    assert list(engine.containers.labelled({LABEL: mark})) == []


def test_unavailable_image_is_reported(google: GoogleSandbox) -> None:
    job = create(google, "localhost:1/none@sha256:" + "a" * 64, "", scheduling=OWN)
    assert google.jobs.wait(job) == "JOB_STATE_FAILED"
    assert "CannotPull" in good(google, "GET", f"/v1/{job}")["error"]["message"]
