"""Services, repositories, and the project: the small things that a run is provisioned with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.testing.google.kit import ACCOUNTS, good, make_bucket, refused

from skerry.testing.google import GoogleSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICES = "/v1/projects/skerry-sandbox/services"
REPOSITORIES = "/v1/projects/skerry-sandbox/locations/us-central1/repositories"
JOBS = "/v1/projects/skerry-sandbox/locations/us-central1/customJobs"


@pytest.fixture
def fresh() -> Iterator[GoogleSandbox]:
    """A project with the default services only."""
    with GoogleSandbox() as running:
        yield running


def test_disabled_service_is_refused_by_name(fresh: GoogleSandbox) -> None:
    status, response = fresh.call("GET", JOBS)
    assert (status, response["error"]["status"]) == (403, "PERMISSION_DENIED")
    (info,) = response["error"]["details"]
    assert info["reason"] == "SERVICE_DISABLED"
    assert info["metadata"]["service"] == "aiplatform.googleapis.com"
    assert good(fresh, "GET", f"{SERVICES}/aiplatform.googleapis.com")["state"] == "DISABLED"
    operation = good(fresh, "POST", f"{SERVICES}/aiplatform.googleapis.com:enable", {})
    assert operation["response"]["service"]["state"] == "ENABLED"
    assert good(fresh, "GET", JOBS) == {}
    good(fresh, "POST", f"{SERVICES}/aiplatform.googleapis.com:disable", {})
    assert refused(fresh, "GET", JOBS)[0] == 403


def test_several_services_are_enabled_at_once(fresh: GoogleSandbox) -> None:
    wanted = ["sts.googleapis.com", "artifactregistry.googleapis.com"]
    fresh.settling = 1
    operation = good(fresh, "POST", f"{SERVICES}:batchEnable", {"serviceIds": wanted})
    assert "done" not in operation
    assert good(fresh, "GET", f"{SERVICES}/sts.googleapis.com")["state"] == "DISABLED"
    assert len(good(fresh, "GET", f"/v1/{operation['name']}")["response"]["services"]) == 2
    response = good(fresh, "GET", f"{SERVICES}?filter=state:ENABLED&pageSize=200")["services"]
    assert set(wanted) < {item["config"]["name"] for item in response}
    assert refused(fresh, "GET", f"{SERVICES}?filter=state:DISABLED")[0] == 400
    assert refused(fresh, "POST", f"{SERVICES}:batchEnable", {"serviceIds": ["x.googleapis.com"] * 21})[0] == 400
    assert refused(fresh, "POST", f"{SERVICES}/sts:enable", {})[0] == 403


def test_project_number_is_in_both_versions(google: GoogleSandbox) -> None:
    assert good(google, "GET", "/v1/projects/skerry-sandbox")["projectNumber"] == google.number
    for name in ("skerry-sandbox", google.number):
        assert good(google, "GET", f"/v3/projects/{name}")["name"] == f"projects/{google.number}"
    assert refused(google, "GET", "/v3/projects/others")[0] == 403


def test_project_without_billing_refuses_creations(google: GoogleSandbox) -> None:
    assert good(google, "GET", "/v1/projects/skerry-sandbox/billingInfo")["billingEnabled"] is True
    google.unpay()
    assert good(google, "GET", "/v1/projects/skerry-sandbox/billingInfo")["billingEnabled"] is False
    status, response = google.call("POST", "/storage/v1/b?project=skerry-sandbox", {"name": "bucket"})
    assert (status, response["error"]["errors"][0]["reason"]) == (403, "accountDisabled")
    google.reset()
    make_bucket(google)


def test_a_repository_is_made_changed_and_deleted(google: GoogleSandbox) -> None:
    google.settling = 1
    operation = good(google, "POST", f"{REPOSITORIES}?repositoryId=skerry", {"format": "DOCKER"})
    assert refused(google, "GET", f"{REPOSITORIES}/skerry")[0] == 404
    assert good(google, "GET", f"/v1/{operation['name']}")["done"]
    response = good(google, "GET", f"{REPOSITORIES}/skerry")
    assert response["registryUri"] == "us-central1-docker.pkg.dev/skerry-sandbox/skerry"
    google.settling = 0
    assert refused(google, "POST", f"{REPOSITORIES}?repositoryId=skerry", {"format": "DOCKER"})[0] == 409
    change = {"dockerConfig": {"immutableTags": True}, "description": "x"}
    response = good(google, "PATCH", f"{REPOSITORIES}/skerry?updateMask=dockerConfig", change)
    assert response["dockerConfig"] == {"immutableTags": True}
    assert "description" not in response
    assert refused(google, "PATCH", f"{REPOSITORIES}/skerry?updateMask=format", {"format": "NPM"})[0] == 400
    assert [item["name"] for item in good(google, "GET", REPOSITORIES)["repositories"]] == [response["name"]]
    assert google.inventory() == {"repository": ("us-central1/skerry",)}
    good(google, "DELETE", f"{REPOSITORIES}/skerry")
    assert google.inventory() == {}


@pytest.mark.parametrize(
    ("name", "body"), [("Skerry", {"format": "DOCKER"}), ("skerry-", {"format": "DOCKER"}), ("skerry", {})]
)
def test_invalid_repository_is_refused(google: GoogleSandbox, name: str, body: dict[str, str]) -> None:
    assert refused(google, "POST", f"{REPOSITORIES}?repositoryId={name}", body)[0] == 400


def test_a_repository_has_a_policy(google: GoogleSandbox) -> None:
    good(google, "POST", f"{REPOSITORIES}?repositoryId=skerry", {"format": "DOCKER"})
    email = good(google, "POST", ACCOUNTS, {"accountId": "replica-0"})["email"]
    bindings = [{"role": "roles/artifactregistry.reader", "members": [f"serviceAccount:{email}"]}]
    path = f"{REPOSITORIES}/skerry"
    etag = good(google, "GET", f"{path}:getIamPolicy")["etag"]
    good(google, "POST", f"{path}:setIamPolicy", {"policy": {"etag": etag, "bindings": bindings}})
    assert good(google, "GET", f"{path}:getIamPolicy?options.requestedPolicyVersion=3")["bindings"] == bindings
    status, _ = refused(google, "POST", f"{path}:setIamPolicy", {"policy": {"etag": etag}})
    assert status == 409
