"""The metadata server of one machine, and the identity tokens that Google signs for service accounts.

A server of its own for each job: what its container asks for is the job's own account, whatever its address.
Sources: Compute Engine, "About VM metadata" and "Verify VM identity"; google.auth.compute_engine.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from skerry.infra.testing.google.accounts import Account
    from skerry.infra.testing.google.project import Project

ISSUER: Final = "https://accounts.google.com"
_SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
_HOUR_S: Final = 3600


class Mints(Protocol):
    """Where a machine's account and its tokens come from."""

    def account(self) -> Account | None:
        """The machine's; None if it has none, or if it is gone."""
        ...

    def token(self, account: Account) -> tuple[str, int]:
        """An access token and for how many seconds it is good."""
        ...


@dataclass(frozen=True, kw_only=True)
class Served:
    """An answer of the metadata server."""

    status: int
    body: str
    kind: str = "application/text"


_ABSENT: Final = Served(status=404, body="Not Found")


class Metadata:
    """A WSGI application that answers as the metadata server of a machine. seen: told each path that was asked for."""

    def __init__(self, project: Project, mints: Mints, seen: Callable[[str], None]) -> None:
        self._project = project
        self._mints = mints
        self._seen = seen

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        path, query = str(environ["PATH_INFO"]), parse_qs(str(environ.get("QUERY_STRING", "")))
        self._seen(path)
        with self._project.lock:
            answer = self._answer(environ, path, query)
        body = answer.body.encode()
        headers = [("Content-Type", answer.kind), ("Content-Length", str(len(body))), ("Metadata-Flavor", "Google")]
        start(f"{answer.status} metadata", [*headers, ("Server", "Metadata Server for VM")])
        return [body]

    def _answer(self, environ: dict[str, Any], path: str, query: dict[str, list[str]]) -> Served:
        if environ["REQUEST_METHOD"] != "GET":
            return Served(status=405, body="Method Not Allowed")
        if path == "/":
            return Served(status=200, body="computeMetadata/\n")
        if environ.get("HTTP_METADATA_FLAVOR") != "Google" or "HTTP_X_FORWARDED_FOR" in environ:
            return Served(status=403, body="Missing Metadata-Flavor:Google header.")
        return self._at(path.removeprefix("/computeMetadata/v1/").split("/"), query)

    def _at(self, path: list[str], query: dict[str, list[str]]) -> Served:
        match path:
            case ["project", "project-id"]:
                return Served(status=200, body=self._project.id)
            case ["project", "numeric-project-id"]:
                return Served(status=200, body=self._project.number)
            case ["universe", "universe-domain" | "universe_domain"]:
                return Served(status=200, body="googleapis.com")
            case ["instance", "service-accounts", name, *rest]:
                return self._of_account(name, "/".join(rest), query)
            case _:
                return _ABSENT

    def _of_account(self, name: str, rest: str, query: dict[str, list[str]]) -> Served:
        account = self._mints.account()
        if account is None or name not in {"default", account.email}:
            return _ABSENT
        if rest == "identity":
            return self._identity(account, query)
        told: dict[str, Any]
        match rest:
            case "email":
                return Served(status=200, body=account.email)
            case "scopes":
                return Served(status=200, body=_SCOPE + "\n")
            case "":
                told = {"aliases": ["default"], "email": account.email, "scopes": [_SCOPE]}
            case "token":
                token, lifetime_s = self._mints.token(account)
                told = {"access_token": token, "expires_in": lifetime_s, "token_type": "Bearer"}
            case _:
                return _ABSENT
        return Served(status=200, body=json.dumps(told), kind="application/json")

    def _identity(self, account: Account, query: dict[str, list[str]]) -> Served:
        audience = query.get("audience", [""])[0]
        if not audience:
            return Served(status=400, body="non-empty audience parameter required")
        with_email = query.get("format", ["standard"])[0] == "full"
        token = identity_token(self._project, account, audience, azp=account.number, with_email=with_email)
        return Served(status=200, body=token, kind="text/html")


def identity_token(project: Project, account: Account, audience: str, *, azp: str, with_email: bool) -> str:
    """A JWT of Google's form, with a signature that nobody can check.

    azp: the account's number from a metadata server, its address from IAM (google-auth-library-python 746).
    """
    now = int(project.now().timestamp())
    claims: dict[str, Any] = {"aud": audience, "azp": azp, "exp": now + _HOUR_S, "iat": now, "iss": ISSUER}
    claims["sub"] = account.number
    if with_email:
        claims |= {"email": account.email, "email_verified": True}
    header = {"alg": "RS256", "kid": "sandbox", "typ": "JWT"}
    return ".".join([_segment(json.dumps(header)), _segment(json.dumps(claims)), _segment("nobody signed this")])


def _segment(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()
