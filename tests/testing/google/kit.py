"""A Google project for a test: calls that have to succeed, and the resources that most tests need."""

from __future__ import annotations

import base64
import importlib
import json
from typing import TYPE_CHECKING, Any

from obstore.store import GCSStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

    from skerry.testing.google import GoogleSandbox

POOLS = "/v1/projects/skerry-sandbox/locations/global/workloadIdentityPools"
ACCOUNTS = "/v1/projects/skerry-sandbox/serviceAccounts"
JOBS = "/v1/projects/skerry-sandbox/locations/us-central1/customJobs"


def good(google: GoogleSandbox, http: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """The answer of a call that has to succeed."""
    status, response = google.call(http, path, body)
    assert status in {200, 204}, (http, path, response)
    return response


def refused(
    google: GoogleSandbox, http: str, path: str, body: Mapping[str, Any] | None = None, *, token: str | None = None
) -> tuple[int, str]:
    """Status and message of a call that has to fail."""
    status, response = google.call(http, path, body, token=token)
    assert status >= 400, (http, path, response)
    return status, response["error"]["message"]


def make_bucket(google: GoogleSandbox, name: str = "bucket") -> None:
    body = {"name": name, "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}}}
    good(google, "POST", "/storage/v1/b?project=skerry-sandbox", body | {"softDeletePolicy": SOFT_DELETE_OFF})


SOFT_DELETE_OFF = {"retentionDurationSeconds": "0"}


def make_account(google: GoogleSandbox, name: str = "replica-0") -> str:
    """The address of a new service account."""
    return good(google, "POST", ACCOUNTS, {"accountId": name})["email"]


def bind(
    google: GoogleSandbox, role: str, member: str, expression: str | None = None, *, bucket: str = "bucket"
) -> None:
    """Add a binding to a bucket's policy, as one should: read, modify, write."""
    path = f"/storage/v1/b/{bucket}/iam"
    policy = good(google, "GET", f"{path}?optionsRequestedPolicyVersion=3")
    binding: dict[str, Any] = {"role": role, "members": [member]}
    if expression is not None:
        binding["condition"] = {"title": "test", "expression": expression}
    policy["bindings"] = [*policy.get("bindings", ()), binding]
    good(google, "PUT", path, {"version": 3, "etag": policy["etag"], "bindings": policy["bindings"]})


def token_of(google: GoogleSandbox, email: str) -> str:
    """A token of a service account."""
    account = google.accounts.of_machine(email)
    assert account is not None
    return google.accounts.token(account)


def act_as(monkeypatch: pytest.MonkeyPatch, google: GoogleSandbox, email: str) -> None:
    """Let google-auth in this process find the account of a machine in the sandbox."""
    environment = google.acting_as(email)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    host = environment["GCE_METADATA_HOST"]
    # google-auth reads the variables when it is imported, which another test may have done.
    metadata = importlib.import_module("google.auth.compute_engine._metadata")
    monkeypatch.setattr(metadata, "_GCE_METADATA_HOST", host, raising=False)
    monkeypatch.setattr(metadata, "_METADATA_ROOT", f"http://{host}/computeMetadata/v1/", raising=False)
    monkeypatch.setattr(metadata, "_METADATA_IP_ROOT", f"http://{host}", raising=False)
    monkeypatch.setattr(metadata, "_NO_GCE_CHECK", False, raising=False)


def claims(token: str) -> dict[str, Any]:
    """The claims of an identity token."""
    return json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))


def gcs(google: GoogleSandbox, token: str | None = None) -> GCSStore:
    """object_store's own client of the bucket, as the operator unless there is another token."""
    return GCSStore(
        config={"bucket": "bucket", "base_url": google.endpoint, "bearer_token": token or google.token},
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


def create_job(google: GoogleSandbox, **more: Any) -> str:
    """The name of a new job. more: fields of its jobSpec."""
    return good(google, "POST", JOBS, job_of(**more))["name"]


def job_of(**more: Any) -> dict[str, Any]:
    """A custom job that Vertex takes. more: fields of its jobSpec."""
    pool = {
        "machineSpec": {"machineType": "n1-standard-4"},
        "replicaCount": "1",
        "containerSpec": {"imageUri": "lab/replica:1"},
    }
    return {"displayName": "run-replica-0", "jobSpec": {"workerPoolSpecs": [pool], **more}}
