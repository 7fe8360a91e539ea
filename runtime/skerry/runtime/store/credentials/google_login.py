"""Google credentials of a login on this machine: a person, a key file, or a federated pipeline.

Uses google-auth, and so every kind of login that Google's own clients accept. google-auth is imported on the first
request.
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Unauthorized
from skerry.runtime.store.credentials.cache import CredentialCache, TemporaryCredentials
from skerry.runtime.store.credentials.google_from_aws import SCOPES
from skerry.runtime.store.credentials.http import google_auth_transport, google_error_text, redact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from obstore.store import GCSCredential

    from skerry.runtime.clock import Clock

ACCESS_TOKEN: Final = "CLOUDSDK_AUTH_ACCESS_TOKEN"  # noqa: S105  the name of a variable
"""gcloud's variable for an access token to use instead of a login."""
_ALL_SERVICES: Final = ("https://www.googleapis.com/auth/cloud-platform",)
# For credentials that do not state their end.
_DEFAULT_LIFE_S: Final = 3600.0


def google_login(environment: Mapping[str, str], clock: Clock | None = None) -> GoogleLogin | None:
    """The provider for the login on this machine; None without a login or without google-auth.

    environment: the process's own, which google-auth reads. Without a login obstore finds the machine's own account.
    """
    key_file = environment.get("GOOGLE_APPLICATION_CREDENTIALS")
    folder = environment.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")  # noqa: PTH111  returns the text unchanged if there is no home, where Path raises
    if not key_file and not (Path(folder) / "application_default_credentials.json").is_file():
        return None
    return GoogleLogin(clock or SystemClock()) if _has_google_auth() else None


def login_token_of_job(environment: Mapping[str, str], clock: Clock) -> str | None:
    """A token for all services, by the file that the job's variable names; None without one. Raises as a login does."""
    named = environment.get("GOOGLE_APPLICATION_CREDENTIALS")
    return GoogleLogin(clock, _ALL_SERVICES)()["token"] if named else None


class GoogleLogin:
    """An obstore credential provider: tokens of a login, in any form that google-auth accepts.

    obstore itself supports only key files and persons.
    """

    # See AwsWebIdentity.
    refresh_threshold: ClassVar = dt.timedelta(days=1)

    def __init__(self, clock: Clock, scopes: Sequence[str] = SCOPES) -> None:
        self._clock = clock
        self._scopes = scopes
        self._cache = CredentialCache(self._fetch, clock)

    def __call__(self) -> GCSCredential:
        """A valid token. Raises Unauthorized or Retryable."""
        token, expires_at = self._cache.current()
        return {"token": token, "expires_at": expires_at}

    def _fetch(self) -> TemporaryCredentials[str]:
        """Reads the login again each time, because it may have been renewed by hand."""
        from google import auth  # noqa: PLC0415  a fifth of a second; few need it
        from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415  same

        library: Any = auth  # it has no types
        started_at = dt.datetime.fromisoformat(self._clock.utc_text())
        try:
            login, _ = library.default(scopes=self._scopes, request=google_auth_transport)
            login.refresh(google_auth_transport)
        # google-auth does not wrap the errors of its parsers for files that are not Google's.
        except (GoogleAuthError, OSError, AttributeError, TypeError, ValueError) as error:
            raise Unauthorized(
                f"no working Google login: {redact(google_error_text(error))}; run `gcloud auth application-default "
                f"login`, or set GOOGLE_APPLICATION_CREDENTIALS or {ACCESS_TOKEN}"
            ) from None
        expiry = login.expiry  # in UTC, without a time zone
        if expiry is not None and not expiry.tzinfo:
            expiry = expiry.replace(tzinfo=dt.UTC)
        life_s = _DEFAULT_LIFE_S if expiry is None else (expiry - started_at).total_seconds()
        return TemporaryCredentials(credentials=str(login.token), life_s=life_s)


def _has_google_auth() -> bool:
    try:
        return importlib.util.find_spec("google.auth") is not None
    except ModuleNotFoundError:  # not even `google`
        return False
