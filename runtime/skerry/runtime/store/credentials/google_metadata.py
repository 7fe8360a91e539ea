"""Google credentials of a machine's service account, from the metadata server named by GCE_METADATA_HOST.

obstore asks a metadata server, too, but only after gcloud's login; an emulator must not receive a person's token.
Source: https://cloud.google.com/compute/docs/access/authenticate-workloads#applications
"""

from __future__ import annotations

import datetime as dt
import http.client
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skerry.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore.store import GCSCredential

PATH: Final = "/computeMetadata/v1/instance/service-accounts/default/token"
"""In every error of this module: obstore passes on only the text, and its own errors contain this path, too."""
_HOST: Final = "metadata.google.internal"
# The server responds from memory; google-auth waits three seconds.
_TIMEOUT_S: Final = 5.0
# A token has 1 KB, or 2 with the claims of a federated identity.
_MAX_BYTES: Final = 64 << 10


def metadata_token(environment: Mapping[str, str]) -> MetadataToken | None:
    """The provider that GCE_METADATA_HOST selects; None without it."""
    host = environment.get("GCE_METADATA_HOST")
    return MetadataToken(host) if host else None


def metadata_token_of_job(environment: Mapping[str, str]) -> str:
    """A token of the job's service account. Raises OSError, whose text contains no secret."""
    return MetadataToken(environment.get("GCE_METADATA_HOST") or _HOST)()["token"]


class _TokenResponse(BaseModel):
    """The fields of the response that are used."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)

    access_token: Annotated[str, Field(min_length=1)]
    expires_in: Annotated[int, Field(ge=0)]


class MetadataToken:
    """An obstore credential provider: tokens of the machine's service account."""

    def __init__(self, host: str) -> None:
        self._host = host

    def __call__(self) -> GCSCredential:
        """Fetches a token. Raises OSError with the host, never with the response, which may contain a secret."""
        # Lifetime is counted from before the request, which may take a while.
        started_at = dt.datetime.fromisoformat(SystemClock().utc_text())
        try:
            token = _TokenResponse.model_validate_json(self._fetch())
        except OSError as error:
            raise OSError(f"no token: host={self._host} path={PATH}: {error}") from error
        except (ValidationError, ValueError, http.client.HTTPException) as error:
            raise OSError(f"no token: host={self._host} path={PATH}: {type(error).__name__}") from None
        return {"token": token.access_token, "expires_at": started_at + dt.timedelta(seconds=token.expires_in)}

    def _fetch(self) -> bytes:
        connection = http.client.HTTPConnection(self._host, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", PATH, headers={"Metadata-Flavor": "Google"})
            with connection.getresponse() as response:
                body = response.read(_MAX_BYTES + 1)
        finally:
            connection.close()
        if response.status != http.client.OK:
            # The words in which obstore's own errors state a status, so that both are recognised alike.
            raise OSError(f"status code: {response.status}")
        if len(body) > _MAX_BYTES:
            raise OSError(f"response larger than {_MAX_BYTES} bytes")
        return body
