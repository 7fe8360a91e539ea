"""Gets registry logins from cloud credentials, for ECR and Artifact Registry. Others use what `docker login` stored.

Sources: ECR GetAuthorizationToken; Artifact Registry, "Configure authentication to Artifact Registry for Docker".
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.ecr import HOST

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess

_ARTIFACT_REGISTRY: Final = re.compile(r"(?:[a-z0-9-]+-docker\.pkg\.dev|(?:[a-z]+\.)?gcr\.io)")


def registry_login(repository: str, access: OperatorAccess) -> Mapping[str, str] | None:
    """User name and password for the registry of `repository`; None to use the login stored by `docker login`.

    Raises Invalid if the SDK for it is not installed, Unauthorized if there are no credentials.
    """
    host = repository.partition("/")[0]
    if (ecr := HOST.fullmatch(host)) is not None:
        account, region = ecr.groups()
        response = access.aws.call("ecr", region, "get_authorization_token", registryIds=[account])
        token = base64.b64decode(response["authorizationData"][0]["authorizationToken"]).decode()
        return dict(zip(("username", "password"), token.split(":", 1), strict=True))
    if _ARTIFACT_REGISTRY.fullmatch(host) is not None:
        return {"username": "oauth2accesstoken", "password": access.google.login.access_token()}
    return None
