"""The metadata server as google-auth meets it: one for each machine, which knows its own account alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from google import auth
from google.auth.transport.requests import AuthorizedSession, Request
from google.oauth2 import id_token
from tests.testing.google.kit import ACCOUNTS, act_as, bind, claims, good, make_account, make_bucket

if TYPE_CHECKING:
    from skerry.testing.google import GoogleSandbox

ROOT = "computeMetadata/v1"
DEFAULT = f"{ROOT}/instance/service-accounts/default"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def response_of(host: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    headers = {"Metadata-Flavor": "Google"} if headers is None else headers
    request = urllib.request.Request(f"http://{host}/{path}", headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:  # noqa: S310  same
            assert answer.headers["Metadata-Flavor"] == "Google"
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture
def host(google: GoogleSandbox) -> str:
    return google.acting_as(make_account(google))["GCE_METADATA_HOST"]


def test_metadata_has_project_and_account(google: GoogleSandbox, host: str) -> None:
    assert response_of(host, f"{ROOT}/project/project-id") == (200, "skerry-sandbox")
    assert response_of(host, f"{ROOT}/project/numeric-project-id") == (200, google.number)
    email = "replica-0@skerry-sandbox.iam.gserviceaccount.com"
    assert response_of(host, f"{DEFAULT}/email") == (200, email)
    assert json.loads(response_of(host, f"{DEFAULT}/?recursive=true")[1])["email"] == email
    assert response_of(host, f"{ROOT}/instance/service-accounts/{email}/email") == (200, email)
    assert response_of(host, f"{ROOT}/instance/service-accounts/others/email")[0] == 404
    assert response_of(host, f"{ROOT}/instance/nothing")[0] == 404
    assert response_of(host, f"{DEFAULT}/nothing")[0] == 404


@pytest.mark.parametrize("headers", [{}, {"Metadata-Flavor": "Google", "X-Forwarded-For": "10.0.0.1"}])
def test_request_without_the_flavor_header_is_refused(host: str, headers: dict[str, str]) -> None:
    assert response_of(host, f"{DEFAULT}/token", headers)[0] == 403
    assert response_of(host, "", headers)[0] == 200, "but for the question whether it is there"


def test_identity_token_has_audience_and_account_number_as_azp(google: GoogleSandbox, host: str) -> None:
    number = good(google, "GET", ACCOUNTS)["accounts"][0]["uniqueId"]
    response = claims(response_of(host, f"{DEFAULT}/identity?audience=skerry%2F1%2Frun")[1])
    assert {response["sub"], response["azp"]} == {number}
    assert (response["iss"], response["aud"]) == ("https://accounts.google.com", "skerry/1/run")
    assert "email" not in response
    full = claims(response_of(host, f"{DEFAULT}/identity?audience=x&format=full")[1])
    assert full["email"] == "replica-0@skerry-sandbox.iam.gserviceaccount.com"
    assert response_of(host, f"{DEFAULT}/identity")[0] == 400


def test_machine_with_deleted_account_has_no_account(google: GoogleSandbox, host: str) -> None:
    assert response_of(host, f"{DEFAULT}/token")[0] == 200
    good(google, "DELETE", f"{ACCOUNTS}/replica-0@skerry-sandbox.iam.gserviceaccount.com")
    assert response_of(host, f"{DEFAULT}/token")[0] == 404


@pytest.fixture
def default(google: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> Any:
    """google-auth's default credentials on a machine of the sandbox."""
    act_as(monkeypatch, google, make_account(google))
    credentials, project = auth.default(scopes=[SCOPE])
    assert project == "skerry-sandbox"
    return credentials


def test_google_s_own_library_acts_as_the_machine_s_account(google: GoogleSandbox, default: Any) -> None:
    make_bucket(google)
    bind(google, "roles/storage.objectViewer", "serviceAccount:replica-0@skerry-sandbox.iam.gserviceaccount.com")
    session = AuthorizedSession(default)
    with session:
        answer = session.get(f"{google.endpoint}/storage/v1/b/bucket/o")
        assert answer.status_code == 200
        # Its own renewal when a token has ended early.
        google.principals.expire()
        assert session.get(f"{google.endpoint}/storage/v1/b/bucket/o").status_code == 200
    assert google.calls.names[-1] == "storage.objects.list"


def test_google_s_own_library_gets_an_identity_token(default: Any) -> None:
    del default
    assert claims(id_token.fetch_id_token(Request(), "skerry/1/run"))["aud"] == "skerry/1/run"
