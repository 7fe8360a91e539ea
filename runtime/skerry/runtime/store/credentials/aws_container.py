"""AWS credentials of a container's role (ECS, EKS, Batch, SageMaker), from the address that the platform sets.

obstore asks such an address only together with a token file. This module is one tested implementation for all
platforms.
Source: https://docs.aws.amazon.com/sdkref/latest/guide/feature-container-credentials.html
"""

from __future__ import annotations

import datetime as dt
import http.client
import ipaddress
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, cast
from urllib.parse import urlsplit

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from skerry.runtime.errors import Invalid
from skerry.runtime.store.credentials.http import invalid_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore.store import S3Credential

FETCH_FAILED: Final = "cannot fetch this container's credentials"
"""In every error of this module: obstore passes on only the text."""
# The host of ECS's relative addresses.
_ECS: Final = "http://169.254.170.2"
# Plain HTTP only to these, because the response contains keys: ECS, and EKS with IPv4 and IPv6.
_TRUSTED: Final = frozenset({"localhost", "169.254.170.2", "169.254.170.23", "fd00:ec2::23"})
# For the connection, and then for the whole response. The server responds from memory; botocore waits two seconds.
_TIMEOUT_S: Final = 5.0
# A response has about 2 KB, most of it the session token.
_MAX_BYTES: Final = 64 << 10


def container_credentials(environment: Mapping[str, str]) -> ContainerCredentials | None:
    """The provider that the platform's variables select; None without them. Raises Invalid for an unsafe address."""
    relative = environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    full = environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if not relative and not full:
        return None
    return ContainerCredentials(
        _ECS + relative if relative else full or "",
        token=environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN"),
        token_file=environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
    )


class _KeysResponse(BaseModel):
    """The fields of the response that are used. A time without a zone is invalid because it is ambiguous."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)

    access_key_id: Annotated[str, Field(alias="AccessKeyId", min_length=1)]
    secret_access_key: Annotated[str, Field(alias="SecretAccessKey", min_length=1)]
    token: Annotated[str | None, Field(alias="Token")] = None
    expires: Annotated[AwareDatetime | None, Field(alias="Expiration")] = None


class ContainerCredentials:
    """An obstore credential provider: keys of the container's role. Called when keys are about to expire.

    timeout_s: for the connection, and then for the whole response.
    """

    def __init__(self, url: str, *, token: str | None, token_file: str | None, timeout_s: float = _TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" and not _is_trusted(parts.hostname or ""):
            raise Invalid(
                "unsafe AWS_CONTAINER_CREDENTIALS_FULL_URI, use https or an address of this machine: "
                f"scheme={parts.scheme} host={parts.hostname}"
            )
        self.url: Final = url
        self._parts = parts
        self._token = token
        self._token_file = token_file
        self._timeout_s = timeout_s

    def __call__(self) -> S3Credential:
        """Fetches the keys. Raises OSError with FETCH_FAILED, never with the response, which may contain a secret."""
        failure = f"{FETCH_FAILED}: host={self._parts.hostname}"
        try:
            keys = _KeysResponse.model_validate_json(self._fetch())
        except OSError as error:
            raise OSError(f"{failure}: {error}") from error
        except ValidationError as error:
            raise OSError(f"{failure}: invalid fields={invalid_fields(error)}") from None
        except (ValueError, http.client.HTTPException) as error:  # their texts quote the token or the response
            raise OSError(f"{failure}: {type(error).__name__}") from None
        return {
            "access_key_id": keys.access_key_id,
            "secret_access_key": keys.secret_access_key,
            "token": keys.token,
            # obstore accepts no other zone.
            "expires_at": None if keys.expires is None else keys.expires.astimezone(dt.UTC),
        }

    def _fetch(self) -> bytes:
        host, port, timeout_s = cast("str", self._parts.hostname), self._parts.port, self._timeout_s
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        # The file has precedence and is read each time: EKS writes a new token into it.
        token = Path(self._token_file).read_text().strip() if self._token_file else self._token
        try:
            path = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
            connection.connect()
            with _ResponseDeadline(connection, timeout_s):
                connection.request("GET", path, headers={"Authorization": token} if token else {})
                with connection.getresponse() as response:
                    body = response.read(_MAX_BYTES + 1)
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise OSError(f"status {response.status}")
        if len(body) > _MAX_BYTES:
            raise OSError(f"response larger than {_MAX_BYTES} bytes")
        return body


class _ResponseDeadline:
    """Closes a connection at a deadline, however many bytes still arrive, and raises OSError.

    Without the error, a body that was cut by the close could look complete.
    """

    def __init__(self, connection: http.client.HTTPConnection, timeout_s: float) -> None:
        self._socket = cast("socket.socket", connection.sock)
        self._timeout_s = timeout_s
        self._expired = threading.Event()
        self._timer = threading.Timer(timeout_s, self._close)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._expired.is_set():
            raise OSError(f"incomplete response after {self._timeout_s:g} s")

    def _close(self) -> None:
        self._expired.set()
        with suppress(OSError):  # already closed by the server
            self._socket.shutdown(socket.SHUT_RDWR)


def _is_trusted(host: str) -> bool:
    if host in _TRUSTED:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
