"""Serves instance metadata and identity tokens, with one server for each job.

A container finds its own job's account at its own server, independent of its network address.
Sources: Compute Engine, "About VM metadata" and "Verify VM identity"; google.auth.compute_engine.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import parse_qs

from skerry.testing.google.access_tokens import TOKEN_S
from skerry.testing.http_server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from skerry.testing.google.service_accounts import Account, Accounts
    from skerry.testing.google.shared_state import Project

ISSUER: Final = "https://accounts.google.com"
_SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
_HOUR_S: Final = 3600


class TokenSource(Protocol):
    """Provides a machine's account and its tokens."""

    def account(self) -> Account | None:
        """Return the machine's account; None if it has none or if it was deleted."""
        ...

    def token(self, account: Account) -> tuple[str, int]:
        """Return an access token and its lifetime in seconds."""
        ...


@dataclass(frozen=True, kw_only=True)
class MetadataResponse:
    """A response of the metadata server."""

    status: int
    body: str
    content_type: str = "application/text"


_ABSENT: Final = MetadataResponse(status=404, body="Not Found")


class Metadata:
    """A WSGI application that plays the metadata server of a machine. record_path: called with each requested path."""

    def __init__(self, project: Project, tokens: TokenSource, record_path: Callable[[str], None]) -> None:
        self._project = project
        self._tokens = tokens
        self._record_path = record_path

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Handle one request."""
        path, query = str(environ["PATH_INFO"]), parse_qs(str(environ.get("QUERY_STRING", "")))
        self._record_path(path)
        with self._project.lock:
            response = self._respond(environ, path, query)
        body = response.body.encode()
        headers = [
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(body))),
            ("Metadata-Flavor", "Google"),
        ]
        start(f"{response.status} metadata", [*headers, ("Server", "Metadata Server for VM")])
        return [body]

    def _respond(self, environ: dict[str, Any], path: str, query: dict[str, list[str]]) -> MetadataResponse:
        if environ["REQUEST_METHOD"] != "GET":
            return MetadataResponse(status=405, body="Method Not Allowed")
        if path == "/":
            return MetadataResponse(status=200, body="computeMetadata/\n")
        if environ.get("HTTP_METADATA_FLAVOR") != "Google" or "HTTP_X_FORWARDED_FOR" in environ:
            return MetadataResponse(status=403, body="Missing Metadata-Flavor:Google header.")
        return self._response_at(path.removeprefix("/computeMetadata/v1/").split("/"), query)

    def _response_at(self, path: list[str], query: dict[str, list[str]]) -> MetadataResponse:
        match path:
            case ["project", "project-id"]:
                return MetadataResponse(status=200, body=self._project.id)
            case ["project", "numeric-project-id"]:
                return MetadataResponse(status=200, body=self._project.number)
            case ["universe", "universe-domain" | "universe_domain"]:
                return MetadataResponse(status=200, body="googleapis.com")
            case ["instance", "service-accounts", name, *rest]:
                return self._of_account(name, "/".join(rest), query)
            case _:
                return _ABSENT

    def _of_account(self, name: str, rest: str, query: dict[str, list[str]]) -> MetadataResponse:
        account = self._tokens.account()
        if account is None or name not in {"default", account.email}:
            return _ABSENT
        if rest == "identity":
            return self._identity(account, query)
        document: dict[str, Any]
        match rest:
            case "email":
                return MetadataResponse(status=200, body=account.email)
            case "scopes":
                return MetadataResponse(status=200, body=_SCOPE + "\n")
            case "":
                document = {"aliases": ["default"], "email": account.email, "scopes": [_SCOPE]}
            case "token":
                token, lifetime_s = self._tokens.token(account)
                document = {"access_token": token, "expires_in": lifetime_s, "token_type": "Bearer"}
            case _:
                return _ABSENT
        return MetadataResponse(status=200, body=json.dumps(document), content_type="application/json")

    def _identity(self, account: Account, query: dict[str, list[str]]) -> MetadataResponse:
        audience = query.get("audience", [""])[0]
        if not audience:
            return MetadataResponse(status=400, body="non-empty audience parameter required")
        with_email = query.get("format", ["standard"])[0] == "full"
        token = identity_token(self._project, account, audience, azp=account.number, with_email=with_email)
        return MetadataResponse(status=200, body=token, content_type="text/html")


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """A machine; its account is looked up at each request, because it may be deleted meanwhile."""

    accounts: Accounts
    email: str
    lifetime_s: Callable[[], int]

    def account(self) -> Account | None:
        return self.accounts.of_machine(self.email)

    def token(self, account: Account) -> tuple[str, int]:
        lifetime_s = self.lifetime_s()
        return self.accounts.token(account, lifetime_s), lifetime_s


class Machines:
    """The metadata servers of a sandbox, each on its own port, which GCE_METADATA_HOST gives to its job."""

    def __init__(self, project: Project, accounts: Accounts, *, all_addresses: bool, host: str) -> None:
        """all_addresses: listen for containers too. host: the name by which clients reach this machine."""
        self._project = project
        self._accounts = accounts
        self._all_addresses = all_addresses
        self._host = host
        self._servers: list[Server] = []
        self.token_s = TOKEN_S
        self.paths: Final[list[str]] = []

    def serve(self, email: str) -> str:
        """Start a metadata server for a machine that runs as this account and return its host:port."""
        machine = _Machine(accounts=self._accounts, email=email, lifetime_s=lambda: self.token_s)
        server = Server(Metadata(self._project, machine, self.paths.append), all_addresses=self._all_addresses)
        server.start()
        self._servers.append(server)
        return f"{self._host}:{server.port}"

    def close(self) -> None:
        """Stop all servers."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()


def identity_token(project: Project, account: Account, audience: str, *, azp: str, with_email: bool) -> str:
    """Return a JWT in Google's format with an invalid signature.

    azp: the account's number from a metadata server, its address from IAM (google-auth-library-python 746).
    """
    now = int(project.now().timestamp())
    claims: dict[str, Any] = {"aud": audience, "azp": azp, "exp": now + _HOUR_S, "iat": now, "iss": ISSUER}
    claims["sub"] = account.number
    if with_email:
        claims |= {"email": account.email, "email_verified": True}
    header = {"alg": "RS256", "kid": "sandbox", "typ": "JWT"}
    return ".".join([_segment(json.dumps(header)), _segment(json.dumps(claims)), _segment("not a signature")])


def _segment(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()
