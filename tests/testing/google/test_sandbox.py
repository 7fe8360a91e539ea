"""The project itself: what is written down of it, what fails on demand, and that nothing is left."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
import urllib.error
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from tests.testing.google.kit import (
    ACCOUNTS,
    JOBS,
    POOLS,
    bind,
    good,
    job_of,
    make_account,
    make_bucket,
    refused,
    token_of,
)

from skerry.runtime.errors import Invalid
from skerry.runtime.store import open_store
from skerry.testing.google import GoogleSandbox

if TYPE_CHECKING:
    from skerry.testing.both_clouds import Clouds
    from skerry.testing.faults import How


def test_calls_record_caller_parameters_and_status(google: GoogleSandbox) -> None:
    make_bucket(google)
    email = make_account(google)
    bind(google, "roles/storage.objectViewer", f"serviceAccount:{email}")
    google.call("GET", "/storage/v1/b/bucket/o", token=token_of(google, email))
    google.call("GET", "/storage/v1/b/bucket/o", token="")
    calls = list(google.calls)
    assert [(call.name, call.status, call.writes) for call in calls] == [
        ("storage.buckets.insert", 200, True),
        ("iam.projects.serviceAccounts.create", 200, True),
        ("storage.buckets.getIamPolicy", 200, False),
        ("storage.buckets.setIamPolicy", 200, True),
        ("storage.objects.list", 200, False),
        ("storage.objects.list", 401, False),
    ]
    who = ["user:operator@example.com"] * 4 + [f"serviceAccount:{email}", "allUsers"]
    assert [call.caller for call in calls] == who
    assert calls[0].query == {"project": ["skerry-sandbox"]}
    assert calls[1].body == {"accountId": "replica-0"}
    assert calls[3].params == {"bucket": "bucket"}
    assert len(google.calls.writes) == 3


def test_writes_include_every_caller_except_job_accounts(google: GoogleSandbox) -> None:
    make_bucket(google)
    email = make_account(google)
    bind(google, "roles/storage.objectUser", f"serviceAccount:{email}")
    google.calls.clear()
    good(google, "POST", JOBS, job_of())
    google.call("DELETE", "/storage/v1/b/bucket/o/a", token=token_of(google, email))
    assert [call.name for call in google.calls.writes] == ["aiplatform.projects.locations.customJobs.create"]


# Faults.


@pytest.mark.parametrize(("how", "status"), [("throttle", 429), ("deny", 403)])
def test_a_call_is_refused_before_it_has_an_effect(google: GoogleSandbox, how: How, status: int) -> None:
    google.fail(how=how)
    assert refused(google, "POST", ACCOUNTS, {"accountId": "replica-0"})[0] == status
    assert google.inventory() == {}
    make_account(google)


@pytest.mark.parametrize(("how", "done"), [("timeout", False), ("lost_reply", True)])
def test_a_connection_breaks_before_or_after(google: GoogleSandbox, how: How, done: bool) -> None:  # noqa: FBT001
    google.fail(how=how)
    with pytest.raises((urllib.error.URLError, http.client.HTTPException, ConnectionError)):
        make_account(google)
    assert bool(google.inventory()) is done
    assert [call.status for call in google.calls] == [None]


def test_the_n_th_call_of_a_method_fails_and_reading_never_counts(google: GoogleSandbox) -> None:
    fault = google.fail(how="deny", after=1, on="iam.projects.serviceAccounts.create", times=2)
    make_bucket(google)
    statuses = [google.call("POST", ACCOUNTS, {"accountId": f"replica-{n}"})[0] for n in range(4)]
    assert statuses == [200, 403, 403, 200]
    assert fault.fired == 2
    google.fail(how="deny", times=None)
    good(google, "GET", ACCOUNTS)
    assert refused(google, "DELETE", "/storage/v1/b/bucket")[0] == 403
    google.heal()
    good(google, "DELETE", "/storage/v1/b/bucket")


def test_a_write_by_the_xml_api_fails_in_its_own_words(google: GoogleSandbox) -> None:
    make_bucket(google)
    google.fail(how="throttle", on="storage.objects.insert")
    connection = http.client.HTTPConnection(urlsplit(google.endpoint).netloc)
    connection.request("PUT", "/bucket/a", body=b"x", headers={"Authorization": f"Bearer {google.token}"})
    answer = connection.getresponse()
    assert (answer.status, b"<Code>SlowDown</Code>" in answer.read()) == (429, True)
    connection.close()


def test_internal_error_is_501_and_a_violation(google: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google.accounts, "resource_name", lambda _: 1 / 0)
    status, message = refused(google, "GET", f"{ACCOUNTS}/a@b:getIamPolicy")
    assert status == 400, "it is a POST"
    status, message = refused(google, "POST", f"{ACCOUNTS}/a@b:getIamPolicy")
    assert status == 501
    assert "ZeroDivisionError" in message
    assert "ZeroDivisionError" in google.violations[-1]


# All of it.


def everything(google: GoogleSandbox) -> None:
    make_bucket(google)
    make_account(google)
    good(google, "POST", f"{POOLS}?workloadIdentityPoolId=skerry", {})
    body = {"aws": {"accountId": "123456789012"}}
    good(google, "POST", f"{POOLS}/skerry/providers?workloadIdentityPoolProviderId=aws-1", body)
    path = "/v1/projects/skerry-sandbox/locations/us-central1/repositories?repositoryId=skerry"
    good(google, "POST", path, {"format": "DOCKER"})
    good(google, "POST", JOBS, job_of())


def test_all_that_exists_is_listed_and_nothing_else(google: GoogleSandbox) -> None:
    assert google.inventory() == {}
    everything(google)
    assert google.inventory() == {
        "bucket": ("bucket",),
        "identity pool": ("skerry",),
        "identity provider": ("skerry/aws-1",),
        "job": ("run-replica-0",),
        "repository": ("us-central1/skerry",),
        "service account": ("replica-0@skerry-sandbox.iam.gserviceaccount.com",),
    }


def test_reset_empties_the_project_and_keeps_the_operator(google: GoogleSandbox) -> None:
    everything(google)
    token = token_of(google, "replica-0@skerry-sandbox.iam.gserviceaccount.com")
    google.fail(how="deny", times=None)
    google.buckets.taken.add("fresh")
    google.reset()
    google.enable("aiplatform.googleapis.com", "artifactregistry.googleapis.com")
    assert google.inventory() == {}
    assert len(google.calls) == 0
    assert good(google, "GET", f"{POOLS}?showDeleted=true") == {}
    assert refused(google, "GET", ACCOUNTS, token=token)[0] == 401
    everything(google)
    make_bucket(google, "fresh")


def test_several_run_at_once_and_know_nothing_of_each_other() -> None:
    with GoogleSandbox() as item, GoogleSandbox() as other:
        make_bucket(item)
        assert other.inventory() == {}
        assert refused(other, "GET", ACCOUNTS, token=item.token)[0] == 401


def test_close_leaves_no_thread_and_no_open_port() -> None:
    before = set(threading.enumerate())
    sandbox = GoogleSandbox()
    host = sandbox.acting_as("anybody@example.com")["GCE_METADATA_HOST"]
    sandbox.close()
    sandbox.close()
    assert set(threading.enumerate()) <= before
    for address in (urlsplit(sandbox.endpoint).netloc, host):
        name, _, port = address.partition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((name, int(port)))


def test_it_is_there_and_gone_in_less_than_a_blink() -> None:
    GoogleSandbox().close()  # what is loaded once is not counted
    took: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        GoogleSandbox().close()
        took.append(time.perf_counter() - started)
    assert min(took) < 0.3, took


def test_without_a_registry_nothing_is_published(google: GoogleSandbox) -> None:
    with pytest.raises(Invalid, match="has no registry"):
        google.publish("image", "skerry/replica")


# Fixtures.


def test_the_fixture_leads_everything_here(skerry_google: GoogleSandbox) -> None:
    make_bucket(skerry_google)
    store = open_store("gs://bucket/runs/a")
    assert store.create("a", b"x")
    assert "GOOGLE_APPLICATION_CREDENTIALS" not in os.environ
    assert os.environ["CLOUDSDK_AUTH_ACCESS_TOKEN"] == skerry_google.token
    assert all(
        os.environ[name].startswith("http://127.0.0.1:")
        for name in os.environ
        if name.startswith("CLOUDSDK_API_ENDPOINT_OVERRIDES_")
    )


def test_connected_clouds_have_each_others_endpoints(skerry_clouds: Clouds) -> None:
    assert skerry_clouds.google.exchange.aws == skerry_clouds.aws.endpoint
    assert skerry_clouds.google.variables["AWS_ENDPOINT_URL"] == skerry_clouds.aws.endpoint
    assert os.environ["AWS_ENDPOINT_URL"] == skerry_clouds.aws.endpoint
    assert os.environ["STORAGE_EMULATOR_HOST"] == skerry_clouds.google.endpoint
    assert {*skerry_clouds.aws.environment, *skerry_clouds.google.environment} == {*skerry_clouds.environment}
