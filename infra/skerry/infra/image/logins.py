"""Gets registry logins from cloud credentials: ECR through boto3, Artifact Registry through google-auth.

Each SDK is imported lazily, for its own registry only. Other registries use the login stored by `docker login`.
Sources: ECR GetAuthorizationToken; Artifact Registry, "Configure authentication to Artifact Registry for Docker".
"""
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingModuleSource=false
# Neither SDK is required, and neither has annotations.

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Invalid, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Mapping

_ECR: Final = re.compile(r"(\d{12})\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?")
_ARTIFACT_REGISTRY: Final = re.compile(r"(?:[a-z0-9-]+-docker\.pkg\.dev|(?:[a-z]+\.)?gcr\.io)")


def registry_login(repository: str) -> Mapping[str, str] | None:
    """User name and password for the registry of `repository`; None to use the login stored by `docker login`.

    Raises Invalid if the SDK for it is not installed, Unauthorized if there are no credentials.
    """
    host = repository.partition("/")[0]
    if (ecr := _ECR.fullmatch(host)) is not None:
        return _ecr(account=ecr[1], region=ecr[2])
    if _ARTIFACT_REGISTRY.fullmatch(host) is not None:
        return _artifact_registry()
    return None


def _ecr(account: str, region: str) -> Mapping[str, str]:
    try:
        import boto3  # noqa: PLC0415  only for this registry
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415  same
    except ImportError as error:
        raise Invalid("a push to ECR needs boto3: pip install boto3") from error
    try:
        response = boto3.Session(region_name=region).client("ecr").get_authorization_token(registryIds=[account])
    except (BotoCoreError, ClientError) as error:
        raise Unauthorized(f"no ECR login: account={account} region={region}: {error}") from error
    token = base64.b64decode(response["authorizationData"][0]["authorizationToken"]).decode()
    name, _, password = token.partition(":")
    return {"username": name, "password": password}


def _artifact_registry() -> Mapping[str, str]:
    try:
        import google.auth  # noqa: PLC0415  only for this registry
        from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415  same
        from google.auth.transport.requests import Request  # noqa: PLC0415  same
    except ImportError as error:
        raise Invalid("a push to Artifact Registry needs google-auth: pip install google-auth requests") from error
    try:
        credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
        credentials.refresh(Request())
    except GoogleAuthError as error:
        raise Unauthorized(f"no Google login: {error}; run `gcloud auth application-default login`") from error
    return {"username": "oauth2accesstoken", "password": str(credentials.token)}
