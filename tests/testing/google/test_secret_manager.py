"""Secret Manager: versions and their values, and the right to read one secret."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest
from tests.testing.google.kit import good, make_account, refused, token_of

if TYPE_CHECKING:
    from skerry.testing.google import GoogleSandbox

SECRETS = "/v1/projects/skerry-sandbox/secrets"
VERSIONS_ONLY = 'resource.type == "secretmanager.googleapis.com/SecretVersion"'


@pytest.fixture(autouse=True)
def enabled(google: GoogleSandbox) -> None:
    google.enable("secretmanager.googleapis.com")


def make_secret(google: GoogleSandbox, name: str, *values: bytes) -> str:
    good(google, "POST", f"{SECRETS}?secretId={name}", {"replication": {"automatic": {}}})
    for value in values:
        payload = {"payload": {"data": base64.b64encode(value).decode()}}
        good(google, "POST", f"{SECRETS}/{name}:addVersion", payload)
    return f"{SECRETS}/{name}"


def bind(google: GoogleSandbox, secret: str, member: str, expression: str | None) -> None:
    policy = good(google, "GET", f"{secret}:getIamPolicy?options.requestedPolicyVersion=3")
    binding: dict[str, Any] = {"role": "roles/secretmanager.secretAccessor", "members": [member]}
    if expression is not None:
        binding["condition"] = {"title": "t", "expression": expression}
    written = {**policy, "version": 3, "bindings": [*policy.get("bindings", ()), binding]}
    good(google, "POST", f"{secret}:setIamPolicy", {"policy": written})


def value(google: GoogleSandbox, path: str) -> bytes:
    return base64.b64decode(good(google, "GET", f"{path}:access")["payload"]["data"])


def test_versions_are_numbered_and_latest_is_the_newest(google: GoogleSandbox) -> None:
    secret = make_secret(google, "hf", b"old", b"new")
    assert value(google, f"{secret}/versions/1") == b"old"
    assert value(google, f"{secret}/versions/latest") == b"new"
    assert refused(google, "GET", f"{secret}/versions/3:access")[0] == 404
    assert refused(google, "POST", f"{SECRETS}?secretId=hf", {"replication": {"automatic": {}}})[0] == 409
    assert google.inventory() == {"secret": ("hf",)}
    good(google, "DELETE", secret)
    assert refused(google, "GET", f"{secret}:getIamPolicy")[0] == 404
    assert google.inventory() == {}


@pytest.mark.parametrize(("expression", "status"), [(None, 200), (VERSIONS_ONLY, 200), ('resource.type == "x"', 403)])
def test_account_reads_only_the_secret_it_is_bound_to(
    google: GoogleSandbox, expression: str | None, status: int
) -> None:
    secret, other = make_secret(google, "hf", b"x"), make_secret(google, "other", b"y")
    email = make_account(google)
    token = token_of(google, email)
    bind(google, secret, f"serviceAccount:{email}", expression)
    assert google.call("GET", f"{secret}/versions/1:access", token=token)[0] == status
    assert refused(google, "GET", f"{other}/versions/1:access", token=token)[0] == 403
    # An absent secret looks as a forbidden one.
    assert refused(google, "GET", f"{SECRETS}/absent/versions/1:access", token=token)[0] == 403
