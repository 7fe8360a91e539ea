"""Both cross-cloud providers: unavailable services are retried, refusals are final, no secret is shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import obstore
import pytest
from obstore.store import GCSStore, S3Store
from tests.runtime.store.credentials.issuer import (
    AWS_AUDIENCE,
    GOOGLE_AUDIENCE,
    SECRET,
    CredentialIssuer,
    sts_error,
    sts_keys,
)
from tests.support.clocks import FakeClock, WallClock
from tests.support.gcsserver import GcsServer
from tests.support.s3server import Request, Response, S3Server, refusal

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.container.identify_cloud_account import identify
from skerry.runtime.errors import Unauthorized
from skerry.runtime.store import open_store
from skerry.runtime.store.credentials.aws_from_google import IDENTITY_PATH, AwsFromGoogle, aws_from_google
from skerry.runtime.store.credentials.google_from_aws import GoogleFromAws, google_from_aws

if TYPE_CHECKING:
    from collections.abc import Callable

STS_PATH: Final = {"aws": "/", "google": "/v1/token"}

both_clouds = pytest.mark.parametrize("cloud", ["aws", "google"])


def provider_of(cloud: str, issuer: CredentialIssuer, clock: FakeClock) -> AwsFromGoogle | GoogleFromAws:
    provider = aws_from_google(issuer.aws, clock) if cloud == "aws" else google_from_aws(issuer.google, clock)
    assert provider is not None
    return provider


def store_of(cloud: str, issuer: CredentialIssuer) -> tuple[str, dict[str, str]]:
    """URI and environment."""
    return ("s3://bucket/run", issuer.aws) if cloud == "aws" else ("gs://bucket/run", issuer.google)


UNAVAILABLE: Final = {
    "aws": {
        "metadata": (IDENTITY_PATH, (503, "")),
        "server error": ("/", (500, "oh")),
        "throttled": ("/", (400, sts_error("Throttling"))),
        "too many requests": ("/", (429, "")),
        "Google does not answer AWS": ("/", (400, sts_error("IDPCommunicationError"))),
        "a proxy's page": ("/", (200, "<html><br></html>")),
        "no keys": ("/", (200, "<R/>")),
        "a declaration": ("/", (200, f'<!DOCTYPE R [<!ENTITY a "b">]>{sts_keys("&a;", "2100-01-01T00:00:00Z")}')),
        "oversized": ("/", (200, "<R>" + "x" * 70_000)),
    },
    "google": {
        "server error": ("/v1/token", (502, "oh")),
        "too many requests": ("/v1/token", (429, "{}")),
        "no token": ("/v1/token", (200, '{"access_token": "", "expires_in": 1}')),
        "no JSON": ("/v1/token", (200, "<html>")),
        "the container": ("/role", (500, "")),
    },
}


@pytest.mark.parametrize(("cloud", "case"), [(cloud, case) for cloud, cases in UNAVAILABLE.items() for case in cases])
def test_unavailable_service_is_retried_from_the_first_request(issuer: CredentialIssuer, cloud: str, case: str) -> None:
    path, response = UNAVAILABLE[cloud][case]
    issuer.failures[path] = response
    clock = FakeClock()

    def recover() -> None:
        if len(clock.pauses) > 2:
            issuer.failures.clear()

    clock.on_pause = recover
    uri, environment = store_of(cloud, issuer)
    with S3Server() as s3, GcsServer() as gcs:
        endpoints = {"aws": {"AWS_ENDPOINT_URL": s3.endpoint}, "google": {"STORAGE_EMULATOR_HOST": gcs.endpoint}}
        assert open_store(uri, environment=environment | endpoints[cloud], clock=clock).create("a", b"body")
    assert len(clock.pauses) == 3


REFUSED: Final = {
    ("aws", "InvalidIdentityToken"): (
        400,
        sts_error("InvalidIdentityToken", f"{SECRET} AssumeRoleWithWebIdentity"),
    ),
    ("aws", "identity token has expired"): (400, sts_error("ExpiredTokenException")),
    ("aws", "IDPRejectedClaim"): (403, sts_error("IDPRejectedClaim", SECRET)),
    ("aws", "STS is not activated"): (403, sts_error("RegionDisabledException", "STS is not activated in this region")),
    ("google", "invalid_grant: ExpiredToken"): (
        400,
        json.dumps({"error": "invalid_grant", "error_description": f"ExpiredToken {SECRET}"}),
    ),
    ("google", "sts API has not been used"): (
        403,
        json.dumps({"error": {"code": 403, "message": "sts API has not been used"}}),
    ),
    ("google", "<html>"): (404, f"<html>{SECRET}"),
}


@pytest.mark.parametrize(("cloud", "words"), REFUSED)
def test_refusal_is_unauthorized_without_a_secret(issuer: CredentialIssuer, cloud: str, words: str) -> None:
    """Also if the service quotes the secret, or words that the store recognises as other errors."""
    issuer.failures[STS_PATH[cloud]] = REFUSED[cloud, words]
    clock = WallClock()
    audience = AWS_AUDIENCE if cloud == "aws" else GOOGLE_AUDIENCE
    with pytest.raises(Unauthorized, match=words) as raised:
        provider_of(cloud, issuer, clock)()
    assert f"audience={audience}" in str(raised.value)
    uri, environment = store_of(cloud, issuer)
    with pytest.raises(Unauthorized) as through:
        open_store(uri, environment=environment, clock=clock).create("a", b"body")
    reported = identify(uri, environment, SystemClock())
    assert reported.principal is None
    for text in (str(raised.value), str(through.value), str(through.value.__cause__), str(reported)):
        assert SECRET not in text
        assert "eyJ" not in text
    assert clock.pauses == []


def objects_in(value: object) -> list[object]:
    """An object of ours and those in its attributes."""
    if not type(value).__module__.startswith("skerry."):
        return []
    return [value, *(part for attribute in vars(value).values() for part in objects_in(attribute))]


@both_clouds
def test_no_repr_shows_a_secret(issuer: CredentialIssuer, cloud: str) -> None:
    provider = provider_of(cloud, issuer, WallClock())
    credentials: dict[str, Any] = dict(provider())
    assert credentials.get("secret_access_key", SECRET) == SECRET
    objects = objects_in(provider)
    assert len(objects) > 3
    assert all(SECRET not in repr(value) for value in objects)


@both_clouds
def test_container_check_reports_the_principal(issuer: CredentialIssuer, cloud: str) -> None:
    uri, environment = store_of(cloud, issuer)
    reported = identify(uri, environment, SystemClock())
    arn = "arn:aws:sts::123456789012:assumed-role/visitor/a"
    pool = GOOGLE_AUDIENCE.partition("/providers/")[0]
    assert reported.principal == (arn if cloud == "aws" else f"principal:{pool}/subject/{arn}")
    assert reported.problem is None
    assert SECRET not in str(reported)
    issuer.failures[STS_PATH[cloud]] = 500, ""
    assert "failed: status=500" in str(identify(uri, environment, SystemClock()).problem)


class TokenServer(GcsServer):
    """Records and refuses Google's tokens as its base class does AWS's keys."""

    def check_access(self, request: Request) -> Response | None:
        token = request.headers["authorization"].removeprefix("Bearer ")
        self.used.setdefault(token)
        return refusal(self.expired[token], "Unauthorized") if token in self.expired else None


def client_of(cloud: str) -> tuple[S3Server, Callable[[Any], S3Store | GCSStore]]:
    """A server, and a function that connects an obstore client to it."""
    options = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}
    if cloud == "google":
        gcs = TokenServer()
        config = {"base_url": gcs.endpoint}
        return gcs, lambda provider: GCSStore("bucket", config=config, credential_provider=provider, **options)
    s3 = S3Server()
    config = {"endpoint": s3.endpoint, "region": "eu-west-1"}
    return s3, lambda provider: S3Store("bucket", config=config, credential_provider=provider, **options)


@both_clouds
def test_client_in_use_renews_at_half_of_the_lifetime(issuer: CredentialIssuer, cloud: str) -> None:
    """obstore would cache credentials until five minutes before their end."""
    clock, real = WallClock(), SystemClock()
    server, connect = client_of(cloud)
    with server:
        client = connect(provider_of(cloud, issuer, clock))
        obstore.put(client, "a", b"body")
        clock.advance(1800.0)

        def used_two() -> bool | None:
            obstore.put(client, "a", b"body")
            return True if len(server.used) == 2 else None

        # obstore asks its provider at most ten times a second.
        assert wait_until(real, used_two, real.now() + 10.0, Backoff(first=0.02, cap=0.1))
        assert list(server.used) == issuer.issued == ["key-1", "key-2"]


def test_variables_for_the_other_cloud_are_ignored(issuer: CredentialIssuer) -> None:
    """A run in both clouds sets them for every job."""
    with S3Server() as server:
        environment = issuer.google | {"AWS_ENDPOINT_URL_S3": server.endpoint, "AWS_REGION": "eu-west-1"}
        assert open_store("s3://bucket/run", environment=environment, clock=FakeClock()).create("a", b"body")
        assert list(server.used) == ["ASIA"]
