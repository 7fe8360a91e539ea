"""The role of a container (ECS, EKS, Batch, SageMaker), asked for where the platform says: keys that are renewed.

obstore asks such an address only if it comes with a token file. One way for all of them is one way to be proved.
Source: https://docs.aws.amazon.com/sdkref/latest/guide/feature-container-credentials.html
"""

from __future__ import annotations

import datetime as dt
import http.client
import ipaddress
import json
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import urlsplit

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore.store import S3Credential

NO_ANSWER: Final = "this container's credentials did not come"
"""What every error of this file says; obstore keeps only the words."""
# Where ECS answers to a relative address.
_ECS: Final = "http://169.254.170.2"
# Plain HTTP only to these: the keys travel in the answer. ECS, and EKS in both families.
_TRUSTED: Final = frozenset({"localhost", "169.254.170.2", "169.254.170.23", "fd00:ec2::23"})
# It answers from memory; botocore gives it two seconds.
_TIMEOUT_S: Final = 5.0


def container_credentials(environment: Mapping[str, str]) -> ContainerCredentials | None:
    """The provider that the platform's variables ask for; None without them. Raises Invalid for an unsafe address."""
    relative = environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    full = environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if not relative and not full:
        return None
    return ContainerCredentials(
        _ECS + relative if relative else full or "",
        token=environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN"),
        token_file=environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
    )


class ContainerCredentials:
    """What obstore calls when it has no keys yet and when those it has are about to run out."""

    def __init__(self, url: str, *, token: str | None, token_file: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" and not _is_trusted(parts.hostname or ""):
            raise Invalid(
                f"AWS_CONTAINER_CREDENTIALS_FULL_URI must be https or this machine's own: scheme={parts.scheme} "
                f"host={parts.hostname}"
            )
        self._url = parts
        self._token = token
        self._token_file = token_file

    def __call__(self) -> S3Credential:
        """Ask once. Raises OSError saying NO_ANSWER, never what was answered: that may be a secret."""
        try:
            told = json.loads(self._ask())
            expires = told.get("Expiration")
            return {
                "access_key_id": told["AccessKeyId"],
                "secret_access_key": told["SecretAccessKey"],
                "token": told.get("Token"),
                "expires_at": None if expires is None else dt.datetime.fromisoformat(expires),
            }
        except (OSError, http.client.HTTPException) as error:
            raise OSError(f"{NO_ANSWER}: host={self._url.hostname}: {error}") from error
        except (ValueError, KeyError, AttributeError) as error:
            raise OSError(f"{NO_ANSWER}: host={self._url.hostname}: {type(error).__name__} in its answer") from None

    def _ask(self) -> bytes:
        host, port = cast("str", self._url.hostname), self._url.port
        if self._url.scheme == "https":
            connection = http.client.HTTPSConnection(
                host, port, timeout=_TIMEOUT_S, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        # The file goes first, and is read each time: EKS writes a new token into it.
        token = Path(self._token_file).read_text().strip() if self._token_file else self._token
        try:
            path = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
            connection.request("GET", path, headers={"Authorization": token} if token else {})
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise OSError(f"status {answer.status}")
        return body


def _is_trusted(host: str) -> bool:
    if host in _TRUSTED:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
