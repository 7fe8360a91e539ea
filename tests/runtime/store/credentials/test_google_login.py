"""Google credentials of this machine: logins in the forms that google-auth accepts, and its service account."""

from __future__ import annotations

import base64
import json
import os
from typing import TYPE_CHECKING, Final, TypeAlias

import pytest
from joserfc.jwk import RSAKey
from tests.runtime.store.credentials.issuer import GOOGLE_AUDIENCE
from tests.support.batchplace import make_role
from tests.support.clocks import FakeClock
from tests.testing.google.kit import bind, good, make_account, make_bucket

from skerry.runtime.errors import Retryable, Unauthorized
from skerry.runtime.store import open_store
from skerry.runtime.store.credentials.google_login import GoogleLogin, google_login
from skerry.runtime.store.credentials.google_metadata import PATH, MetadataToken, metadata_token
from skerry.testing.aws.container_role_keys import role_keys
from skerry.testing.google.access_tokens import Principal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.runtime.store.credentials.conftest import Pool
    from tests.runtime.store.credentials.issuer import CredentialIssuer

    from skerry.runtime.store.retrying import Retrying
    from skerry.testing.google import GoogleSandbox
    from skerry.testing.sandbox import Sandbox

LogIn: TypeAlias = "Callable[..., Retrying]"
IMPERSONATE: Final = "roles/iam.workloadIdentityUser"


@pytest.fixture
def log_in(pool: Pool, aws: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogIn:
    """Writes the login file of a pipeline with a role on AWS, and opens the store at a private endpoint of Google."""

    def open_with_login(role: str = "replica", clock: FakeClock | None = None, **changes: str) -> Retrying:
        check = "https://sts.{region}.amazonaws.com?Action=GetCallerIdentity&Version=2011-06-15"
        content = {
            "type": "external_account",
            "audience": GOOGLE_AUDIENCE,
            "subject_token_type": "urn:ietf:params:aws:token-type:aws4_request",
            "token_url": f"{pool.google.endpoint}/v1/token",
            "credential_source": {"environment_id": "aws1", "regional_cred_verification_url": check},
        }
        file = tmp_path / "login.json"
        file.write_text(json.dumps({**content, **changes}))
        variables = {"GOOGLE_APPLICATION_CREDENTIALS": str(file), "GOOGLE_CLOUD_PROJECT": "skerry-sandbox"}
        keys = role_keys(make_role(aws, role), "task-1", "us-east-1")
        for name, value in (variables | keys | {"AWS_REGION": "us-east-1"}).items():
            monkeypatch.setenv(name, value)
        # The variable of gcloud, which names the path of the JSON API.
        environment = {"CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{pool.google.endpoint}/storage/v1/"}
        clock = clock or FakeClock()
        return open_store("gs://bucket/tiny", environment=environment, clock=clock, deadline_s=1.0)

    return open_with_login


def inserters(google: GoogleSandbox) -> list[str | None]:
    return [call.caller for call in google.calls if call.name == "storage.objects.insert"]


def test_federated_login_opens_the_store_and_is_renewed(pool: Pool, log_in: LogIn) -> None:
    store = log_in()
    assert store.create("a", b"body")
    assert inserters(pool.google) == [pool.subject("replica", "task-1")]
    pool.google.principals.expire()
    assert store.read("a") == b"body"
    assert store.usage.retries == 1


def test_login_that_impersonates_an_account_acts_as_it(pool: Pool, log_in: LogIn) -> None:
    email = make_account(pool.google)
    policy = {"bindings": [{"role": IMPERSONATE, "members": [pool.principals("replica")]}]}
    account = f"/v1/projects/skerry-sandbox/serviceAccounts/{email}"
    good(pool.google, "POST", f"{account}:setIamPolicy", {"policy": policy})
    bind(pool.google, "roles/storage.objectUser", f"serviceAccount:{email}")
    pool.google.enable("iamcredentials.googleapis.com")
    url = f"{pool.google.endpoint}/v1/projects/-/serviceAccounts/{email}:generateAccessToken"
    assert log_in(service_account_impersonation_url=url).create("a", b"body")
    assert inserters(pool.google) == [f"serviceAccount:{email}"]


def test_login_that_google_refuses_is_unauthorized(log_in: LogIn, tmp_path: Path) -> None:
    clock = FakeClock()
    store = log_in("stranger", clock)
    with pytest.raises(Unauthorized, match=r"no working Google login: .*rejected by the attribute") as raised:
        store.create("a", b"body")
    assert not any(os.environ[name] in str(raised.value) for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"))
    (tmp_path / "login.json").write_text('{"type": "something else"}')
    with pytest.raises(Unauthorized, match="no working Google login"):
        store.read("a")
    assert clock.pauses == []


def test_response_without_an_error_is_not_quoted(log_in: LogIn, issuer: CredentialIssuer) -> None:
    """google-auth puts whole responses into its errors; this one contains a token, with an end that is no time."""
    path = "/v1/projects/-/serviceAccounts/a@example.com:generateAccessToken"
    issuer.failures[path] = 200, json.dumps({"accessToken": "ya29.hunter2", "expireTime": "soon"})
    store = log_in(service_account_impersonation_url=f"http://{issuer.host}{path}")
    with pytest.raises(Unauthorized, match="no working Google login: response without an error") as raised:
        store.read("a")
    assert "hunter2" not in str(raised.value)


def test_unreachable_login_server_is_retryable(log_in: LogIn) -> None:
    store = log_in(token_url="http://127.0.0.1:1/v1/token")  # noqa: S106  an address
    with pytest.raises(Retryable, match=r"no response from 127\.0\.0\.1:1"):
        store.read("a")


def test_token_in_the_environment_is_used_and_never_shown(google: GoogleSandbox) -> None:
    make_bucket(google)
    token = google.principals.token(Principal(name="user:person@example.com", grants=None))
    environment = {
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": google.environment["CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE"],
        "CLOUDSDK_AUTH_ACCESS_TOKEN": token,
    }
    clock = FakeClock()
    store = open_store("gs://bucket/tiny", environment=environment, clock=clock)
    assert store.create("a", b"body")
    google.principals.expire()
    with pytest.raises(Unauthorized, match="cannot be renewed") as raised:
        store.read("a")
    assert token not in str(raised.value) + repr(store) + repr(vars(store))
    with pytest.raises(Unauthorized, match="the store refuses these credentials"):
        open_store("gs://bucket/tiny", environment=environment, clock=clock).read("a")
    assert clock.pauses == []


def test_login_is_found_in_the_places_of_googles_own_clients(tmp_path: Path) -> None:
    (tmp_path / "application_default_credentials.json").write_text("{}")
    assert isinstance(google_login({"CLOUDSDK_CONFIG": str(tmp_path)}), GoogleLogin)
    assert isinstance(google_login({"GOOGLE_APPLICATION_CREDENTIALS": "login.json"}), GoogleLogin)
    assert google_login({"CLOUDSDK_CONFIG": str(tmp_path / "absent")}) is None


def test_key_in_a_variable_signs_the_requests(google: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore signs each token with the key in the Secret; the sandbox is set to accept tokens of this account."""
    make_bucket(google)
    pem = RSAKey.generate_key(2048).as_pem(private=True).decode()
    email = "pods@acme.iam.gserviceaccount.com"
    key = {"type": "service_account", "client_email": email, "private_key": pem, "private_key_id": "1"}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
    monkeypatch.setenv("CLOUDSDK_CONFIG", os.devnull)
    heard: list[str] = []

    def accept(authorization: str) -> Principal:
        heard.append(authorization)
        return Principal(name=f"serviceAccount:{email}", grants=None)

    monkeypatch.setattr(google.principals, "principal_of", accept)
    environment = {"CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{google.endpoint}/storage/v1/"}
    assert open_store("gs://bucket/tiny", environment=environment).create("a", b"body")
    claims = json.loads(base64.urlsafe_b64decode(heard[0].split(".")[1] + "=="))
    assert (claims["iss"], claims["sub"]) == (email, email)


# The machine's service account.


def test_metadata_server_is_selected_by_the_variable() -> None:
    assert metadata_token({}) is None
    assert isinstance(metadata_token({"GCE_METADATA_HOST": "metadata"}), MetadataToken)


@pytest.mark.parametrize(
    "body", ["[]", "{}", '{"access_token": "", "expires_in": 1}', '{"access_token": "hunter2"}', "x" * 70_000]
)
def test_malformed_metadata_is_an_error_without_its_content(issuer: CredentialIssuer, body: str) -> None:
    issuer.failures[PATH] = 200, body
    with pytest.raises(OSError, match=f"no token: host={issuer.host}") as raised:
        MetadataToken(issuer.host)()
    assert "hunter2" not in str(raised.value)
