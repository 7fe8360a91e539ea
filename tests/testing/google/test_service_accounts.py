"""Service accounts: their names and numbers, what becomes of those that are deleted, and credentials for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.testing.google.kit import ACCOUNTS, claims, good, make_account, refused, token_of

if TYPE_CHECKING:
    from tests.support.clocks import FakeClock

    from skerry.testing.google import GoogleSandbox

EMAIL = "replica-0@skerry-sandbox.iam.gserviceaccount.com"


def test_an_account_is_found_by_address_and_by_number(google: GoogleSandbox) -> None:
    created = good(google, "POST", ACCOUNTS, {"accountId": "replica-0", "serviceAccount": {"displayName": "a"}})
    assert created["email"] == EMAIL
    assert created["name"] == f"projects/skerry-sandbox/serviceAccounts/{EMAIL}"
    assert created["uniqueId"].isdecimal()
    assert len(created["uniqueId"]) == 21
    for name in (EMAIL, created["uniqueId"]):
        for project in ("skerry-sandbox", "-"):
            assert good(google, "GET", f"/v1/projects/{project}/serviceAccounts/{name}") == created
    assert good(google, "GET", ACCOUNTS) == {"accounts": [created]}


@pytest.mark.parametrize("name", ["short", "0replica", "Replica-0", "replica_0", "replica-0-", "r" * 31, ""])
def test_invalid_account_name_is_refused(google: GoogleSandbox, name: str) -> None:
    assert refused(google, "POST", ACCOUNTS, {"accountId": name})[0] == 400


def test_account_name_is_unique_and_a_project_has_a_hundred(google: GoogleSandbox) -> None:
    make_account(google)
    assert refused(google, "POST", ACCOUNTS, {"accountId": "replica-0"})[0] == 409
    for number in range(1, 100):
        make_account(google, f"replica-{number}")
    status, response = google.call("POST", ACCOUNTS, {"accountId": "replica-100"})
    assert (status, response["error"]["status"]) == (429, "RESOURCE_EXHAUSTED")
    page = good(google, "GET", f"{ACCOUNTS}?pageSize=60")
    rest = good(google, "GET", f"{ACCOUNTS}?pageSize=60&pageToken={page['nextPageToken']}")
    assert len(page["accounts"]) == 60
    assert len(rest["accounts"]) == 40
    assert "nextPageToken" not in rest


def test_new_account_is_visible_after_the_settling_time(google: GoogleSandbox) -> None:
    google.settling = 2
    make_account(google)
    assert [google.call("GET", f"{ACCOUNTS}/{EMAIL}")[0] for _ in range(3)] == [404, 404, 200]


def test_only_its_description_and_display_name_change(google: GoogleSandbox) -> None:
    make_account(google)
    body = {"serviceAccount": {"displayName": "new", "description": "x"}, "updateMask": "displayName,description"}
    assert good(google, "PATCH", f"{ACCOUNTS}/{EMAIL}", body)["displayName"] == "new"
    body = {"serviceAccount": {"description": ""}, "updateMask": "email"}
    assert refused(google, "PATCH", f"{ACCOUNTS}/{EMAIL}", body)[0] == 400


def test_a_deleted_account_comes_back_by_its_number_alone(google: GoogleSandbox) -> None:
    make_account(google)
    number = good(google, "GET", f"{ACCOUNTS}/{EMAIL}")["uniqueId"]
    token = token_of(google, EMAIL)
    good(google, "DELETE", f"{ACCOUNTS}/{EMAIL}")
    assert refused(google, "GET", f"{ACCOUNTS}/{EMAIL}")[0] == 404
    assert refused(google, "DELETE", f"{ACCOUNTS}/{EMAIL}")[0] == 404
    assert refused(google, "GET", ACCOUNTS, token=token)[0] == 401, "its tokens end with it"
    assert google.inventory() == {}
    good(google, "POST", f"{ACCOUNTS}/{number}:undelete", {})
    assert good(google, "GET", f"{ACCOUNTS}/{EMAIL}")["uniqueId"] == number


def test_absent_account_is_403_without_the_project_in_the_name(google: GoogleSandbox) -> None:
    """As the discovery document of iam v1 says of "-"."""
    email = make_account(google)
    for project, existing, absent in (("skerry-sandbox", 200, 404), ("-", 200, 403), ("another", 403, 403)):
        accounts = f"/v1/projects/{project}/serviceAccounts"
        assert google.call("GET", f"{accounts}/{email}")[0] == existing
        for name in ("nobody@skerry-sandbox.iam.gserviceaccount.com", "100000000000000000009"):
            assert refused(google, "GET", f"{accounts}/{name}")[0] == absent
            assert refused(google, "DELETE", f"{accounts}/{name}")[0] == absent


def test_credentials_of_an_account_need_a_role_on_it(google: GoogleSandbox) -> None:
    email, other = make_account(google), make_account(google, "replica-1")
    body = {"scope": ["https://www.googleapis.com/auth/cloud-platform"], "lifetime": "600s"}
    token = token_of(google, other)
    path = f"/v1/projects/-/serviceAccounts/{email}"
    assert refused(google, "POST", f"{path}:generateAccessToken", body, token=token)[0] == 403
    policy = {"bindings": [{"role": "roles/iam.serviceAccountTokenCreator", "members": [f"serviceAccount:{other}"]}]}
    good(google, "POST", f"{ACCOUNTS}/{email}:setIamPolicy", {"policy": policy})
    status, response = google.call("POST", f"{path}:generateAccessToken", body, token=token)
    assert status == 200
    assert google.principals.principal_of(f"Bearer {response['accessToken']}").name == f"serviceAccount:{email}"
    assert refused(google, "POST", f"{path}:generateAccessToken", {**body, "lifetime": "7200s"})[0] == 400


def test_generated_token_expires_after_its_lifetime(google: GoogleSandbox, clock: FakeClock) -> None:
    email = make_account(google)
    body = {"scope": ["https://www.googleapis.com/auth/cloud-platform"], "lifetime": "600s"}
    response = good(google, "POST", f"/v1/projects/-/serviceAccounts/{email}:generateAccessToken", body)
    assert response["expireTime"].startswith("2026-01-01T00:10:00")
    clock.advance(599.0)
    assert google.call("GET", ACCOUNTS, token=response["accessToken"])[0] == 403
    clock.advance(1.0)
    assert google.call("GET", ACCOUNTS, token=response["accessToken"])[0] == 401


def test_identity_token_of_iam_has_the_address_as_azp(google: GoogleSandbox) -> None:
    email = make_account(google)
    number = good(google, "GET", f"{ACCOUNTS}/{email}")["uniqueId"]
    body = {"audience": "skerry/1/run", "includeEmail": True}
    response = claims(good(google, "POST", f"/v1/projects/-/serviceAccounts/{email}:generateIdToken", body)["token"])
    assert {response[name] for name in ("azp", "email")} == {email}
    assert (response["iss"], response["aud"], response["sub"]) == (
        "https://accounts.google.com",
        "skerry/1/run",
        number,
    )
    assert response["exp"] - response["iat"] == 3600
