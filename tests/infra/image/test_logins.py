"""Logins of registries, from the clouds in memory, through the SDKs that users have."""

from __future__ import annotations

import base64
import os
from typing import TYPE_CHECKING, Final

import pytest
from tests.testing.google.kit import act_as, make_account

from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.image.logins import registry_login
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Unauthorized
from skerry.testing.google import GoogleSandbox
from skerry.testing.plugin import skerry_sandbox

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox

__all__ = ["skerry_sandbox"]

ECR: Final = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/team/skerry"
ARTIFACT_REGISTRY: Final = "europe-west4-docker.pkg.dev/acme/team/skerry"


def test_ecr_login_is_decoded_from_its_token(skerry_sandbox: Sandbox) -> None:
    ecr = skerry_sandbox.client("ecr")
    token = ecr.get_authorization_token(registryIds=["123456789012"])["authorizationData"][0]["authorizationToken"]
    login = registry_login(ECR, OperatorAccess(SystemClock(), os.environ))
    assert login is not None
    assert f"{login['username']}:{login['password']}" == base64.b64decode(token).decode()
    assert login["username"] == "AWS"


def test_missing_aws_credentials_are_unauthorized(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    with pytest.raises(Unauthorized, match=r"no AWS credentials for ecr:GetAuthorizationToken: Unable to"):
        registry_login(ECR, OperatorAccess(SystemClock(), os.environ))


def test_artifact_registry_login_is_the_token_of_the_service_account(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Not the login of the user that runs the tests.
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with GoogleSandbox() as google:
        email = make_account(google)
        act_as(monkeypatch, google, email)
        login = registry_login(ARTIFACT_REGISTRY, OperatorAccess(SystemClock(), os.environ))
        assert login is not None
        assert login["username"] == "oauth2accesstoken"
        assert google.principals.principal_of(f"Bearer {login['password']}").name == f"serviceAccount:{email}"


@pytest.mark.parametrize(
    "repository", ["127.0.0.1:5000/skerry", "docker.io/team/skerry", "ghcr.io/team/skerry", "dkr.ecr.evil.com/x"]
)
def test_other_registries_use_docker_login(repository: str) -> None:
    assert registry_login(repository, OperatorAccess(SystemClock(), {})) is None
