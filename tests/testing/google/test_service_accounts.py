"""Service accounts: their names and numbers, what becomes of those that are deleted, and credentials for them."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.testing.google.ground import ACCOUNTS, good, make_account, refused, token_of

if TYPE_CHECKING:
    from tests.support.clocks import FakeClock

    from skerry.infra.testing.google import GoogleSandbox

EMAIL = "replica-0@skerry-sandbox.iam.gserviceaccount.com"


def claims(token: str) -> dict[str, Any]:
    return json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))


def test_an_account_is_found_by_address_and_by_number(google: GoogleSandbox) -> None:
    made = good(google, "POST", ACCOUNTS, {"accountId": "replica-0", "serviceAccount": {"displayName": "a"}})
    assert made["email"] == EMAIL
    assert made["name"] == f"projects/skerry-sandbox/serviceAccounts/{EMAIL}"
    assert made["uniqueId"].isdecimal()
    assert len(made["uniqueId"]) == 21
    for name in (EMAIL, made["uniqueId"]):
        for project in ("skerry-sandbox", "-"):
            assert good(google, "GET", f"/v1/projects/{project}/serviceAccounts/{name}") == made
    assert good(google, "GET", ACCOUNTS) == {"accounts": [made]}


@pytest.mark.parametrize("name", ["short", "0replica", "Replica-0", "replica_0", "replica-0-", "r" * 31, ""])
def test_a_name_that_is_none_is_refused(google: GoogleSandbox, name: str) -> None:
    assert refused(google, "POST", ACCOUNTS, {"accountId": name})[0] == 400


def test_a_name_is_taken_once_and_a_project_holds_a_hundred(google: GoogleSandbox) -> None:
    make_account(google)
    assert refused(google, "POST", ACCOUNTS, {"accountId": "replica-0"})[0] == 409
    for number in range(1, 100):
        make_account(google, f"replica-{number}")
    status, told = google.call("POST", ACCOUNTS, {"accountId": "replica-100"})
    assert (status, told["error"]["status"]) == (429, "RESOURCE_EXHAUSTED")
    page = good(google, "GET", f"{ACCOUNTS}?pageSize=60")
    rest = good(google, "GET", f"{ACCOUNTS}?pageSize=60&pageToken={page['nextPageToken']}")
    assert len(page["accounts"]) == 60
    assert len(rest["accounts"]) == 40
    assert "nextPageToken" not in rest


def test_a_new_account_is_not_known_everywhere_at_once(google: GoogleSandbox) -> None:
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


def test_what_is_not_there_is_forbidden_to_who_names_no_project_of_it(google: GoogleSandbox) -> None:
    """As the discovery document of iam v1 says of "-"."""
    email = make_account(google)
    for project, there, absent in (("skerry-sandbox", 200, 404), ("-", 200, 403), ("another", 403, 403)):
        accounts = f"/v1/projects/{project}/serviceAccounts"
        assert google.call("GET", f"{accounts}/{email}")[0] == there
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
    status, told = google.call("POST", f"{path}:generateAccessToken", body, token=token)
    assert status == 200
    assert google.principals.asking(f"Bearer {told['accessToken']}").name == f"serviceAccount:{email}"
    assert refused(google, "POST", f"{path}:generateAccessToken", {**body, "lifetime": "7200s"})[0] == 400


def test_a_generated_token_ends_when_it_says(google: GoogleSandbox, clock: FakeClock) -> None:
    email = make_account(google)
    body = {"scope": ["https://www.googleapis.com/auth/cloud-platform"], "lifetime": "600s"}
    told = good(google, "POST", f"/v1/projects/-/serviceAccounts/{email}:generateAccessToken", body)
    assert told["expireTime"].startswith("2026-01-01T00:10:00")
    clock.advance(599.0)
    assert google.call("GET", ACCOUNTS, token=told["accessToken"])[0] == 403
    clock.advance(1.0)
    assert google.call("GET", ACCOUNTS, token=told["accessToken"])[0] == 401


def test_an_identity_token_of_iam_names_the_address_as_its_presenter(google: GoogleSandbox) -> None:
    email = make_account(google)
    number = good(google, "GET", f"{ACCOUNTS}/{email}")["uniqueId"]
    body = {"audience": "skerry/1/run", "includeEmail": True}
    told = claims(good(google, "POST", f"/v1/projects/-/serviceAccounts/{email}:generateIdToken", body)["token"])
    assert {told[name] for name in ("azp", "email")} == {email}
    assert (told["iss"], told["aud"], told["sub"]) == ("https://accounts.google.com", "skerry/1/run", number)
    assert told["exp"] - told["iat"] == 3600
