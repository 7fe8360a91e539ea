"""The service account of a machine of Google's, asked for where GCE_METADATA_HOST says: a token that is renewed.

obstore asks there too, but for a login of gcloud's that it finds first: a person's token is not for an emulator.
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
"""In every error of this file; obstore keeps only the words, and its own errors name it too."""
# It answers from memory; google-auth gives it three seconds.
_TIMEOUT_S: Final = 5.0
# A token is 1 KB, or 2 with the claims of a federated identity.
_MAX_BYTES: Final = 64 << 10


def machine_token(environment: Mapping[str, str]) -> MachineToken | None:
    """The provider that the variable asks for; None without it."""
    host = environment.get("GCE_METADATA_HOST")
    return MachineToken(host) if host else None


class _Answer(BaseModel):
    """What is used of an answer."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)

    access_token: Annotated[str, Field(min_length=1)]
    expires_in: Annotated[int, Field(ge=0)]


class MachineToken:
    """What obstore calls when it has no token yet and when the one it has is about to run out."""

    def __init__(self, host: str) -> None:
        self._host = host

    def __call__(self) -> GCSCredential:
        """Ask once. Raises OSError with the host, never with what was answered: that may be a secret."""
        # Counted from before it was asked for: the answer may have taken a while.
        asked = dt.datetime.fromisoformat(SystemClock().utc_text())
        try:
            told = _Answer.model_validate_json(self._ask())
        except OSError as error:
            raise OSError(f"no token: host={self._host} path={PATH}: {error}") from error
        except (ValidationError, ValueError, http.client.HTTPException) as error:
            raise OSError(f"no token: host={self._host} path={PATH}: {type(error).__name__}") from None
        return {"token": told.access_token, "expires_at": asked + dt.timedelta(seconds=told.expires_in)}

    def _ask(self) -> bytes:
        connection = http.client.HTTPConnection(self._host, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", PATH, headers={"Metadata-Flavor": "Google"})
            with connection.getresponse() as answer:
                body = answer.read(_MAX_BYTES + 1)
        finally:
            connection.close()
        if answer.status != http.client.OK:
            # In these words a status is recognised in errors of obstore's own, too.
            raise OSError(f"status code: {answer.status}")
        if len(body) > _MAX_BYTES:
            raise OSError(f"an answer of more than {_MAX_BYTES} bytes")
        return body
