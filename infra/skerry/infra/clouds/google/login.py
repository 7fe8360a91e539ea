"""The credentials of calls to Google Cloud: those of the environment, or an account that they act as. Imports late."""

from __future__ import annotations

import importlib
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.google.errors import Kind, Refusal, kind_of, parse_refusal
from skerry.infra.clouds.session_credentials_for_store_client import StoreCredentials
from skerry.runtime.errors import Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.store.credentials.http import google_error_text, redact

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.runtime.clock import Clock

TOKEN: Final = "CLOUDSDK_AUTH_ACCESS_TOKEN"  # noqa: S105  the name of a variable
"""gcloud's own variable for an access token, instead of the default credentials."""
QUOTA: Final = "GOOGLE_CLOUD_QUOTA_PROJECT"
"""google-auth's own variable for the project that calls are counted for."""

_SCOPES: Final = ("https://www.googleapis.com/auth/cloud-platform",)
# In google-auth's error if IAM refuses a token of the account.
_REFUSED: Final = "Unable to acquire impersonated credentials"
_ADVICE: Final[Mapping[Kind | None, str]] = {
    Kind.DENIED: "; give them roles/iam.serviceAccountTokenCreator on it",
    Kind.DISABLED: "; run `gcloud services enable iamcredentials.googleapis.com` in the project that it names",
}
# Of an answer that is not IAM's own, such as a proxy's page.
_BAD_GATEWAY: Final = 502


@dataclass(frozen=True, kw_only=True)
class Impersonation:
    """The service account that all calls are made as. place: in the spec, for errors."""

    account: str
    place: str = "google.impersonate"


class Login:
    """The credentials of a session, which renew themselves. Thread-safe; makes no calls before the first use.

    environment: has a token; google-auth finds other credentials in the process's own environment. iam: the address of
    the service iamcredentials.
    """

    def __init__(self, environment: Mapping[str, str], impersonation: Impersonation | None, iam: str) -> None:
        self._environment = environment
        self.impersonation: Final = impersonation
        self._iam = iam
        self._lock = threading.Lock()
        self._credentials: Any = None
        self.default_project: str | None = None

    @property
    def credentials(self) -> Any:
        """google-auth's own. Raises Unauthorized if there are none, and Invalid without the SDK."""
        with self._lock:
            if self._credentials is None:
                source, self.default_project = self._find()
                self._credentials = source if self.impersonation is None else self._act_as(self.impersonation, source)
            return self._credentials

    def principal(self) -> str:
        """The name in the credentials; user logins have none."""
        for name in ("service_account_email", "account"):
            if principal := getattr(self.credentials, name, ""):
                return str(principal)
        return "the token's owner" if self._environment.get(TOKEN) else "your own login"

    def access_token(self) -> str:
        """An access token that is valid now. Raises Unauthorized, or Retryable without an answer."""
        credentials = self.credentials
        with self._lock:
            if not credentials.valid:
                try:
                    credentials.refresh(importlib.import_module("google.auth.transport.requests").Request())
                except importlib.import_module("google.auth.exceptions").GoogleAuthError as error:
                    raise self.meaning(error) from error
            return str(credentials.token)

    def store_credentials(self, clock: Clock) -> StoreCredentials | None:
        """The credentials for a store's client; None if the client finds those of the environment itself."""
        if self.impersonation is None:
            return None
        return StoreCredentials(lambda: {"token": self.access_token()}, clock)

    def meaning(self, error: Exception) -> SkerryError:
        """The error for an error of google-auth: no answer, no valid credentials, or they may not act as the account.

        None of these requests reached the service that was called.
        """
        acting = self.impersonation
        refused = None if acting is None or _REFUSED not in str(error) else _refusal_of(error)
        # Further arguments are whole responses, which may contain a token.
        text = str(error.args[0] if error.args else error) if refused is None else redact(google_error_text(error))
        kind = None if refused is None else kind_of(refused)
        if kind is Kind.BUSY or getattr(error, "retryable", False) or _is_of_transport(error):
            return Retryable(f"no credentials from Google: {text}")
        if acting is None or kind in {None, Kind.EXPIRED}:
            return Unauthorized(
                f"no valid credentials of Google Cloud: {text}; run `gcloud auth application-default login`, or set "
                f"GOOGLE_APPLICATION_CREDENTIALS or {TOKEN}"
            )
        advice = _ADVICE.get(kind, "")
        return Unauthorized(f"{acting.place}: these credentials may not act as {acting.account}: {text}{advice}")

    def _find(self) -> tuple[Any, str | None]:
        try:
            importlib.import_module("google.auth.transport.requests")
        except ImportError as error:
            raise Invalid("Google Cloud needs google-auth and requests: pip install 'skerry[gcp]'") from error
        quota = self._environment.get(QUOTA) or None
        if token := self._environment.get(TOKEN):
            return importlib.import_module("google.oauth2.credentials").Credentials(token, quota_project_id=quota), None
        auth = importlib.import_module("google.auth")
        try:
            return auth.default(scopes=_SCOPES)
        except auth.exceptions.GoogleAuthError as error:
            raise self.meaning(error) from error

    def _act_as(self, acting: Impersonation, source: Any) -> Any:
        return importlib.import_module("google.auth.impersonated_credentials").Credentials(
            source_credentials=source,
            target_principal=acting.account,
            target_scopes=list(_SCOPES),
            quota_project_id=self._environment.get(QUOTA) or None,
            iam_endpoint_override=f"{self._iam}/v1/projects/-/serviceAccounts/{acting.account}:generateAccessToken",
        )


def _refusal_of(error: Exception) -> Refusal:
    """IAM's answer, which google-auth passes on without its status."""
    body = str(error.args[-1])
    try:
        status = int(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        status = _BAD_GATEWAY
    return parse_refusal(status, body.encode())


def _is_of_transport(error: Exception) -> bool:
    return isinstance(error, importlib.import_module("google.auth.exceptions").TransportError)
