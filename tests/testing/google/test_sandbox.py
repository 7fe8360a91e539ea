"""The project itself: what is written down of it, what fails on demand, and that nothing is left."""

from __future__ import annotations

import http.client
import os
import socket
import threading
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


def test_fault_in_the_xml_api_is_an_xml_error(google: GoogleSandbox) -> None:
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


def everything(google: GoogleSandbox) -> None:
    make_bucket(google)
    make_account(google)
    good(google, "POST", f"{POOLS}?workloadIdentityPoolId=skerry", {})
    body = {"aws": {"accountId": "123456789012"}}
    good(google, "POST", f"{POOLS}/skerry/providers?workloadIdentityPoolProviderId=aws-1", body)
    path = "/v1/projects/skerry-sandbox/locations/us-central1/repositories?repositoryId=skerry"
    good(google, "POST", path, {"format": "DOCKER"})
    good(google, "POST", JOBS, job_of())


def test_inventory_lists_all_resources(google: GoogleSandbox) -> None:
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


def test_reset_ends_tokens_and_frees_names(google: GoogleSandbox) -> None:
    everything(google)
    token = token_of(google, "replica-0@skerry-sandbox.iam.gserviceaccount.com")
    google.buckets.taken.add("fresh")
    google.reset()
    google.enable("aiplatform.googleapis.com", "artifactregistry.googleapis.com")
    assert google.inventory() == {}
    assert good(google, "GET", f"{POOLS}?showDeleted=true") == {}
    assert refused(google, "GET", ACCOUNTS, token=token)[0] == 401
    everything(google)
    make_bucket(google, "fresh")


def test_concurrent_sandboxes_are_independent() -> None:
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


def test_without_a_registry_nothing_is_published(google: GoogleSandbox) -> None:
    with pytest.raises(Invalid, match="has no registry"):
        google.publish("image", "skerry/replica")


def test_fixture_redirects_every_client_to_the_sandbox(skerry_google: GoogleSandbox) -> None:
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
