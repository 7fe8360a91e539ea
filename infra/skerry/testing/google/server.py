"""Everything that reaches the sandbox's server: which service is meant, whether the request is good, who asks.

A request that the discovery documents do not know is refused with what is wrong about it, and remembered, so that a
test can assert that there was none. What the sandbox cannot do is 501 with its name, and remembered likewise.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qs, parse_qsl, unquote

from werkzeug.datastructures import EnvironHeaders
from werkzeug.serving import WSGIRequestHandler

from skerry.infra.testing.google import enums
from skerry.infra.testing.google.calls import GoogleCall
from skerry.infra.testing.google.documents import Method, document
from skerry.infra.testing.google.exchange import Rejected
from skerry.infra.testing.google.objects import Object
from skerry.infra.testing.google.partial import partial
from skerry.infra.testing.google.principals import NOBODY
from skerry.infra.testing.google.project import Asked
from skerry.infra.testing.google.refusals import Refusal
from skerry.infra.testing.google.rights import permission_for
from skerry.infra.testing.google.xml import XmlFace, XmlRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from skerry.infra.testing.faults import Faults, How
    from skerry.infra.testing.google.calls import GoogleCalls
    from skerry.infra.testing.google.exchange import Exchange
    from skerry.infra.testing.google.images import Images
    from skerry.infra.testing.google.principals import Principal
    from skerry.infra.testing.google.project import Handler, Project
    from skerry.infra.testing.google.refusals import Face

_LOG: Final = logging.getLogger(__name__)
# What is played, with the version of its document.
SERVICES: Final = (
    ("iam", "v1"),
    ("storage", "v1"),
    ("serviceusage", "v1"),
    ("artifactregistry", "v1"),
    ("cloudresourcemanager", "v1"),
    ("cloudresourcemanager", "v3"),
    ("logging", "v2"),
    ("iamcredentials", "v1"),
    ("sts", "v1"),
    ("cloudbilling", "v1"),
    ("aiplatform", "v1"),
)
_FACES: Final[dict[str, Face]] = {"v1": "rpc", "v2": "rpc", "v3": "rpc", "compute": "rpc", "storage": "storage"}
_JSON: Final = "application/json; charset=UTF-8"


class Gate:
    """The WSGI application. violations: what no client of Google's should have sent, in words."""

    def __init__(
        self, project: Project, handlers: Mapping[str, Handler], xml: XmlFace, exchange: Exchange, images: Images,
        calls: GoogleCalls, faults: Faults,
    ) -> None:  # fmt: skip
        self._project = project
        self._handlers = handlers
        self._xml = xml
        self._exchange = exchange
        self._images = images
        self._calls = calls
        self._faults = faults
        self.violations: Final[list[str]] = []

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        raw, _, query = str(environ.get("RAW_URI") or environ["REQUEST_URI"]).partition("?")
        one = _Request(environ, raw, parse_qs(query, keep_blank_values=True))
        try:
            return self._respond(start, *self._answer(one))
        except Refusal as error:
            status, kind, body = error.worded(one.face)
            return self._respond(start, status, {"Content-Type": kind}, body)
        except _HungUp:
            return _hang_up(environ, start)
        except Exception as error:  # noqa: BLE001  a thread's entry: what it stumbled over is told and logged
            _LOG.exception("%s %s failed in the sandbox", one.http, raw)
            refusal = Refusal(501, f"{one.http} {raw} failed in the sandbox: {type(error).__name__}: {error}")
            self.violations.append(refusal.message)
            status, kind, body = refusal.worded(one.face)
            return self._respond(start, status, {"Content-Type": kind}, body)

    def _answer(self, one: _Request) -> tuple[int, Mapping[str, str], bytes]:
        if one.face == "xml":
            return self._xml_answer(one)
        if one.path == "/v1/token" and one.http == "POST" and not one.is_json:
            return self._exchanged(one)
        if self._images.has(one.path) and one.http == "GET":
            return self._pulled(one)
        found = self._method(one)
        method, names = found
        body = one.json()
        wrong = list(method.wrong(names, one.query, body))
        call = GoogleCall(
            service=method.service,
            operation=method.id.partition(".")[2],
            params=names,
            caller=self._name(one),
            query=one.query,
            body=cast("dict[str, Any]", body) if isinstance(body, dict) else {},
        )
        return self._carried_out(call, lambda: self._handled(one, method, names, body, wrong))

    def _method(self, one: _Request) -> tuple[Method, dict[str, str]]:
        first = one.path.split("/")[1]
        known = [document(*service) for service in SERVICES if (first == "storage") == (service[0] == "storage")]
        found = [match for service in known if (match := service.match(one.http, one.path)) is not None]
        # Operations have names of the same form in several services: whoever has begun one is asked.
        if found:
            return found[0]
        if first == "compute":
            raise self._violation(f"Compute Engine is not played by this sandbox: {one.http} {one.path}", http=501)
        if any(service.knows(one.path) for service in known):
            raise self._violation(f"no such method: {one.http} {one.path}")
        raise self._violation(f"no such path: {one.http} {one.path}", http=404)

    def _handled(
        self, one: _Request, method: Method, names: Mapping[str, str], body: Any, wrong: list[str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        if wrong:
            raise self._violation(f"{method.id}: {'; '.join(wrong)}")
        if (handler := self._handlers.get(method.id)) is None:
            raise self._violation(f"{method.id} is not played by this sandbox", http=501)
        ints = "enum-encoding=int" in "".join(one.query.get("$alt", ()))
        if ints and body is not None:
            body = enums.named(method.id, body)
        with self._project.lock:
            self._check_enabled(method.service)
            principal = self._project.principals.asking(one.header("Authorization"))
            if (permission := permission_for(method.id)) is not None:
                self._check_right(principal, permission, names)
            asked = Asked(method=method.id, names=names, query=one.query, body=body or {}, principal=principal)
            told = handler(asked)
        media = told.get("media")
        if isinstance(media, Object):
            return 200, {"Content-Type": media.content_type, "x-goog-generation": str(media.generation)}, media.data
        if method.id in {"storage.buckets.delete", "storage.objects.delete"}:
            return 204, {}, b""
        if ints:
            told = enums.numbered(method.id, told)
        if "fields" in one.query:
            told = partial(told, one.query["fields"][0])
        return 200, {"Content-Type": _JSON}, json.dumps(told).encode()

    def _check_enabled(self, service: str) -> None:
        name = f"{service}.googleapis.com"
        # Storage is for everybody who has a bucket's policy on his side; its API can hardly be disabled.
        if name in self._project.enabled or service in {"storage", "serviceusage"}:
            return
        project = self._project
        info = {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": "SERVICE_DISABLED",
            "domain": "googleapis.com",
            "metadata": {"service": name, "consumer": f"projects/{project.number}"},
        }
        raise Refusal(
            403,
            f"{service} API has not been used in project {project.number} before or it is disabled. Enable it by "
            f"visiting https://console.developers.google.com/apis/api/{name}/overview?project={project.number} then "
            "retry. If you enabled this API recently, wait a few minutes for the action to propagate and retry.",
            details=(info,),
        )

    def _check_right(self, principal: Principal, permission: str, names: Mapping[str, str]) -> None:
        if "bucket" in names:
            resource = f"projects/_/buckets/{names['bucket']}"
        else:
            resource = names.get("resource") or names.get("name") or self._project.resource
        self._project.check(principal, permission, resource)

    def _xml_answer(self, one: _Request) -> tuple[int, Mapping[str, str], bytes]:
        bucket, _, name = one.path.lstrip("/").partition("/")
        asked = XmlRequest(
            http=one.http,
            bucket=unquote(bucket),
            name=unquote(name) or None,
            query=one.query,
            headers={key.lower(): value for key, value in one.headers},
            body=one.body,
            principal=NOBODY,
        )
        service, _, operation = asked.method.partition(".")
        params = {"bucket": asked.bucket, "object": asked.name or ""}
        call = GoogleCall(service=service, operation=operation, params=params, caller=self._name(one), query=one.query)

        def answer() -> tuple[int, Mapping[str, str], bytes]:
            if wrong := asked.wrong():
                raise self._violation(f"{asked.method}: {'; '.join(wrong)}")
            with self._project.lock:
                principal = self._project.principals.asking(one.header("Authorization"))
                told = self._xml.carry_out(asked.by(principal))
            return told.status, told.headers, b"" if one.http == "HEAD" else told.body

        return self._carried_out(call, answer)

    def _exchanged(self, one: _Request) -> tuple[int, Mapping[str, str], bytes]:
        form = dict(parse_qsl(one.body.decode(), keep_blank_values=True))
        known = document("sts", "v1").schemas["GoogleIdentityStsV1ExchangeTokenRequest"]["properties"]
        call = GoogleCall(service="sts", operation="token", params=form)

        def answer() -> tuple[int, Mapping[str, str], bytes]:
            if unknown := [name for name in form if enums.camel(name) not in known]:
                raise self._violation(f"sts.token: unknown field {unknown[0]}")
            with self._project.lock:
                self._check_enabled("sts")
            try:
                return 200, {"Content-Type": _JSON}, json.dumps(self._exchange.token(form)).encode()
            except Rejected as error:
                return error.http, {"Content-Type": _JSON}, error.body

        return self._carried_out(call, answer)

    def _pulled(self, one: _Request) -> tuple[int, Mapping[str, str], bytes]:
        params = {"path": one.path}
        call = GoogleCall(service="artifactregistry", operation="docker.get", params=params, caller=self._name(one))

        def answer() -> tuple[int, Mapping[str, str], bytes]:
            with self._project.lock:
                self._check_enabled("artifactregistry")
                principal = self._project.principals.asking(one.header("Authorization"))
            return self._images.get(one.path, one.header("Accept"), principal)

        return self._carried_out(call, answer)

    def _carried_out(
        self, call: GoogleCall, answer: Callable[[], tuple[int, Mapping[str, str], bytes]]
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Written down, and failing if a test has asked for it."""
        number = self._calls.add(call)
        how = self._faults.strike(call)
        try:
            if (refusal := _failing(how)) is not None:
                raise refusal
            if how == "timeout":
                raise _HungUp
            told = answer()
        except Refusal as error:
            self._calls.answered(number, call, error.http)
            if how == "lost_reply":
                raise _HungUp from error
            raise
        if how == "lost_reply":
            raise _HungUp
        self._calls.answered(number, call, told[0])
        return told

    def _name(self, one: _Request) -> str:
        try:
            return self._project.principals.asking(one.header("Authorization")).name
        except Refusal:
            return "nobody"

    def _violation(self, what: str, *, http: int = 400) -> Refusal:
        self.violations.append(what)
        return Refusal(http, f"sandbox: {what}")

    def _respond(self, start: Callable[..., Any], status: int, headers: Mapping[str, str], body: bytes) -> list[bytes]:
        told = {"Content-Length": str(len(body)), **headers}
        start(f"{status} sandbox", list(told.items()))
        return [body]


class Connection(WSGIRequestHandler):
    """Reads requests for the server, keeps connections, and keeps the terminal quiet."""

    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002  werkzeug's own name
        """Say nothing: the sandbox's calls are the log."""


class _HungUp(Exception):  # noqa: N818  named for what happened
    """The connection breaks without an answer."""


class _Request:
    """One request as it came."""

    def __init__(self, environ: dict[str, Any], path: str, query: dict[str, list[str]]) -> None:
        self.http: Final = str(environ["REQUEST_METHOD"])
        self.path: Final = path
        self.query: Final = query
        self.headers: Final = EnvironHeaders(environ)
        length = -1 if environ.get("wsgi.input_terminated") else int(environ.get("CONTENT_LENGTH") or 0)
        self.body: Final[bytes] = environ["wsgi.input"].read(length)
        first = path.split("/")[1]
        self.face: Final[Face] = _FACES.get(first, "xml")

    @property
    def is_json(self) -> bool:
        return self.headers.get("Content-Type", "").startswith("application/json")

    def header(self, name: str) -> str:
        return self.headers.get(name, "")

    def json(self) -> Any:
        """The body; None without one. Raises Refusal."""
        if not self.body:
            return None
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise Refusal(400, "Invalid JSON payload received.") from error


def _failing(how: How | None) -> Refusal | None:
    match how:
        case "throttle":
            return Refusal(429, "Quota exceeded for quota metric and limit of this service: a fault of the test.")
        case "deny":
            return Refusal(
                403, "The caller does not have permission: a fault that the test asked for", reason="forbidden"
            )
        case _:
            return None


def _hang_up(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
    connection = cast("socket.socket", environ["werkzeug.socket"])
    with contextlib.suppress(OSError):  # the other side was first
        connection.shutdown(socket.SHUT_RDWR)
    start("500 nobody hears it", [("Content-Length", "0")])
    return []
