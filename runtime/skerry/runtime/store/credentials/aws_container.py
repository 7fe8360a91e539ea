"""The role of a container (ECS, EKS, Batch, SageMaker), asked for where the platform says: keys that are renewed.

obstore asks such an address only if it comes with a token file. One way for all of them is one way to be proved.
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

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore.store import S3Credential

NO_ANSWER: Final = "this container's credentials did not come"
"""What every error of this file says; obstore keeps only the words."""
# Where ECS answers to a relative address.
_ECS: Final = "http://169.254.170.2"
# Plain HTTP only to these: the keys travel in the answer. ECS, and EKS in both families.
_TRUSTED: Final = frozenset({"localhost", "169.254.170.2", "169.254.170.23", "fd00:ec2::23"})
# It answers from memory; botocore gives it two seconds. For the connection, and then for the whole answer.
_TIMEOUT_S: Final = 5.0
# An answer is about 2 KB, most of it the session token.
_MAX_BYTES: Final = 64 << 10


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


class _Answer(BaseModel):
    """What is used of an answer. A time without a zone could be anybody's, so it is none."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)

    access_key_id: Annotated[str, Field(alias="AccessKeyId", min_length=1)]
    secret_access_key: Annotated[str, Field(alias="SecretAccessKey", min_length=1)]
    token: Annotated[str | None, Field(alias="Token")] = None
    expires: Annotated[AwareDatetime | None, Field(alias="Expiration")] = None


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
            told = _Answer.model_validate_json(self._ask())
        except OSError as error:
            raise OSError(f"{NO_ANSWER}: host={self._url.hostname}: {error}") from error
        except ValidationError as error:
            wrong = ",".join(sorted({str(one["loc"][0]) if one["loc"] else "document" for one in error.errors()}))
            raise OSError(f"{NO_ANSWER}: host={self._url.hostname}: its answer has no good {wrong}") from None
        except (ValueError, http.client.HTTPException) as error:  # their texts quote the token, or what was answered
            raise OSError(f"{NO_ANSWER}: host={self._url.hostname}: {type(error).__name__}") from None
        return {
            "access_key_id": told.access_key_id,
            "secret_access_key": told.secret_access_key,
            "token": told.token,
            # The client takes no other zone.
            "expires_at": None if told.expires is None else told.expires.astimezone(dt.UTC),
        }

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
            connection.connect()
            with _Limit(connection):
                connection.request("GET", path, headers={"Authorization": token} if token else {})
                with connection.getresponse() as answer:
                    body = answer.read(_MAX_BYTES + 1)
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise OSError(f"status {answer.status}")
        if len(body) > _MAX_BYTES:
            raise OSError(f"an answer of more than {_MAX_BYTES} bytes")
        return body


class _Limit:
    """Ends a connection that takes longer than _TIMEOUT_S, however often it gives a byte. Raises OSError then: what was
    read of a body may look whole.
    """

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._socket = cast("socket.socket", connection.sock)
        self._over = threading.Event()
        self._timer = threading.Timer(_TIMEOUT_S, self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._over.is_set():
            raise OSError(f"no whole answer in {_TIMEOUT_S:g} s")

    def _end(self) -> None:
        self._over.set()
        with suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)


def _is_trusted(host: str) -> bool:
    if host in _TRUSTED:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
