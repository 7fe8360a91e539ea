"""Routes each request to its service: finds the method, checks request and caller, records the call, injects faults.

A request that the discovery documents do not allow is refused with the problem and recorded as a violation, so that a
test can assert that there was none. An unsupported method is 501 with its name, and recorded as well.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qs, parse_qsl, unquote

from werkzeug.datastructures import EnvironHeaders

from skerry.testing.google import protobuf_enums
from skerry.testing.google.access_tokens import ANONYMOUS
from skerry.testing.google.calls import GoogleCall
from skerry.testing.google.discovery import Method, document
from skerry.testing.google.method_permissions import permission_for
from skerry.testing.google.partial_response import partial
from skerry.testing.google.refusals import Refusal
from skerry.testing.google.shared_state import SandboxRequest
from skerry.testing.google.storage_objects import Object
from skerry.testing.google.storage_xml import StorageXml, XmlRequest
from skerry.testing.google.token_exchange import ExchangeRefusal
from skerry.testing.http_server import drop_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from skerry.testing.calls import Calls
    from skerry.testing.faults import Faults, How
    from skerry.testing.google.access_tokens import Principal
    from skerry.testing.google.image_pull_api import Images
    from skerry.testing.google.refusals import Face
    from skerry.testing.google.shared_state import Handler, Project
    from skerry.testing.google.token_exchange import Exchange

_LOG: Final = logging.getLogger(__name__)
# The supported services, with the version of their documents.
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
    ("secretmanager", "v1"),
)
_FORMATS: Final[dict[str, Face]] = {"v1": "rpc", "v2": "rpc", "v3": "rpc", "compute": "rpc", "storage": "storage"}
_JSON: Final = "application/json; charset=UTF-8"


class GoogleApplication:
    """The WSGI application. violations: descriptions of requests that Google's clients do not send."""

    def __init__(
        self, project: Project, handlers: Mapping[str, Handler], xml: StorageXml, exchange: Exchange, images: Images,
        calls: Calls, faults: Faults,
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
        """Handle one request."""
        raw, _, query = str(environ.get("RAW_URI") or environ["REQUEST_URI"]).partition("?")
        request = _Request(environ, raw, parse_qs(query, keep_blank_values=True))
        try:
            return self._respond(start, *self._route(request))
        except Refusal as error:
            status, kind, body = error.formatted(request.format)
            return self._respond(start, status, {"Content-Type": kind}, body)
        except _ConnectionDropped:
            return drop_connection(environ, start)
        except Exception as error:  # noqa: BLE001  a thread's entry: the error is logged and returned
            _LOG.exception("%s %s failed in the sandbox", request.http, raw)
            refusal = Refusal(501, f"{request.http} {raw} failed in the sandbox: {type(error).__name__}: {error}")
            self.violations.append(refusal.message)
            status, kind, body = refusal.formatted(request.format)
            return self._respond(start, status, {"Content-Type": kind}, body)

    def _route(self, request: _Request) -> tuple[int, Mapping[str, str], bytes]:
        if request.format == "xml":
            return self._handle_xml(request)
        if request.path == "/v1/token" and request.http == "POST" and not request.is_json:
            return self._exchange_token(request)
        if self._images.has(request.path) and request.http == "GET":
            return self._pull_image(request)
        method, names = self._method(request)
        body = request.json()
        problems = list(method.problems(names, request.query, body))
        call = GoogleCall(
            service=method.service,
            operation=method.id.partition(".")[2],
            params=names,
            caller=self._caller_name(request),
            query=request.query,
            body=cast("dict[str, Any]", body) if isinstance(body, dict) else {},
        )
        return self._run(call, lambda: self._handle(request, method, names, body, problems))

    def _method(self, request: _Request) -> tuple[Method, dict[str, str]]:
        first = request.path.split("/")[1]
        documents = [document(*service) for service in SERVICES if (first == "storage") == (service[0] == "storage")]
        matches = [match for service in documents if (match := service.match(request.http, request.path)) is not None]
        # Names of operations have the same format in several services; the first match handles them.
        if matches:
            return matches[0]
        if first == "compute":
            raise self._violation(
                f"the sandbox does not support Compute Engine: {request.http} {request.path}", http=501
            )
        if any(service.knows(request.path) for service in documents):
            raise self._violation(f"no such method: {request.http} {request.path}")
        raise self._violation(f"no such path: {request.http} {request.path}", http=404)

    def _handle(
        self, request: _Request, method: Method, names: Mapping[str, str], body: Any, problems: list[str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        if problems:
            raise self._violation(f"{method.id}: {'; '.join(problems)}")
        if (handler := self._handlers.get(method.id)) is None:
            raise self._violation(f"the sandbox does not support {method.id}", http=501)
        ints = "enum-encoding=int" in "".join(request.query.get("$alt", ()))
        if ints and body is not None:
            body = protobuf_enums.named(method.id, body)
        with self._project.lock:
            self._check_enabled(method.service)
            principal = self._project.principals.principal_of(request.header("Authorization"))
            if (permission := permission_for(method.id)) is not None:
                self._check_right(principal, permission, names)
            sandbox_request = SandboxRequest(
                method=method.id, names=names, query=request.query, body=body or {}, principal=principal
            )
            response = handler(sandbox_request)
        media = response.get("media")
        if isinstance(media, Object):
            return 200, {"Content-Type": media.content_type, "x-goog-generation": str(media.generation)}, media.data
        if method.id in {"storage.buckets.delete", "storage.objects.delete"}:
            return 204, {}, b""
        if ints:
            response = protobuf_enums.numbered(method.id, response)
        if "fields" in request.query:
            response = partial(response, request.query["fields"][0])
        return 200, {"Content-Type": _JSON}, json.dumps(response).encode()

    def _check_enabled(self, service: str) -> None:
        name = f"{service}.googleapis.com"
        # Storage needs only a bucket's policy; its API cannot be disabled in practice.
        if name in self._project.enabled or service in {"storage", "serviceusage"}:
            return
        project = self._project
        details = {
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
            details=(details,),
        )

    def _check_right(self, principal: Principal, permission: str, names: Mapping[str, str]) -> None:
        if "bucket" in names:
            resource = f"projects/_/buckets/{names['bucket']}"
        else:
            resource = names.get("resource") or names.get("name") or self._project.resource
        self._project.check(principal, permission, resource)

    def _handle_xml(self, request: _Request) -> tuple[int, Mapping[str, str], bytes]:
        bucket, _, name = request.path.lstrip("/").partition("/")
        xml_request = XmlRequest(
            http=request.http,
            bucket=unquote(bucket),
            name=unquote(name) or None,
            query=request.query,
            headers={key.lower(): value for key, value in request.headers},
            body=request.body,
            principal=ANONYMOUS,
        )
        service, _, operation = xml_request.method.partition(".")
        params = {"bucket": xml_request.bucket, "object": xml_request.name or ""}
        call = GoogleCall(
            service=service, operation=operation, params=params, caller=self._caller_name(request), query=request.query
        )

        def answer() -> tuple[int, Mapping[str, str], bytes]:
            if problems := xml_request.problems():
                raise self._violation(f"{xml_request.method}: {'; '.join(problems)}")
            with self._project.lock:
                principal = self._project.principals.principal_of(request.header("Authorization"))
                response = self._xml.handle(xml_request.by(principal))
            return response.status, response.headers, b"" if request.http == "HEAD" else response.body

        return self._run(call, answer)

    def _exchange_token(self, request: _Request) -> tuple[int, Mapping[str, str], bytes]:
        form = dict(parse_qsl(request.body.decode(), keep_blank_values=True))
        known = document("sts", "v1").schemas["GoogleIdentityStsV1ExchangeTokenRequest"]["properties"]
        call = GoogleCall(service="sts", operation="token", params=form)

        def answer() -> tuple[int, Mapping[str, str], bytes]:
            if unknown := [name for name in form if protobuf_enums.camel(name) not in known]:
                raise self._violation(f"sts.token: unknown field {unknown[0]}")
            with self._project.lock:
                self._check_enabled("sts")
            try:
                return 200, {"Content-Type": _JSON}, json.dumps(self._exchange.token(form)).encode()
            except ExchangeRefusal as error:
                return error.http, {"Content-Type": _JSON}, error.body

        return self._run(call, answer)

    def _pull_image(self, request: _Request) -> tuple[int, Mapping[str, str], bytes]:
        params = {"path": request.path}
        call = GoogleCall(
            service="artifactregistry", operation="docker.get", params=params, caller=self._caller_name(request)
        )

        def answer() -> tuple[int, Mapping[str, str], bytes]:
            with self._project.lock:
                if not self._images.any_image():
                    self._check_enabled("artifactregistry")
                principal = self._project.principals.principal_of(request.header("Authorization"))
            return self._images.get(request.path, request.header("Accept"), principal)

        return self._run(call, answer)

    def _run(
        self, call: GoogleCall, answer: Callable[[], tuple[int, Mapping[str, str], bytes]]
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Record a call and run it, unless a fault applies."""
        number = self._calls.add(call)
        fault = self._faults.apply(call)
        try:
            if (refusal := _fault_error(fault)) is not None:
                raise refusal
            if fault == "timeout":
                raise _ConnectionDropped
            response = answer()
        except Refusal as error:
            self._calls.answered(number, call, error.http)
            if fault == "lost_reply":
                raise _ConnectionDropped from error
            raise
        if fault == "lost_reply":
            raise _ConnectionDropped
        self._calls.answered(number, call, response[0])
        return response

    def _caller_name(self, request: _Request) -> str:
        try:
            return self._project.principals.principal_of(request.header("Authorization")).name
        except Refusal:
            return "anonymous"

    def _violation(self, problem: str, *, http: int = 400) -> Refusal:
        self.violations.append(problem)
        return Refusal(http, f"sandbox: {problem}")

    def _respond(self, start: Callable[..., Any], status: int, headers: Mapping[str, str], body: bytes) -> list[bytes]:
        all_headers = {"Content-Length": str(len(body)), **headers}
        start(f"{status} sandbox", list(all_headers.items()))
        return [body]


class _ConnectionDropped(Exception):  # noqa: N818  named for what happened
    """The connection breaks without a response."""


class _Request:
    """One HTTP request."""

    def __init__(self, environ: dict[str, Any], path: str, query: dict[str, list[str]]) -> None:
        self.http: Final = str(environ["REQUEST_METHOD"])
        self.path: Final = path
        self.query: Final = query
        self.headers: Final = EnvironHeaders(environ)
        length = -1 if environ.get("wsgi.input_terminated") else int(environ.get("CONTENT_LENGTH") or 0)
        self.body: Final[bytes] = environ["wsgi.input"].read(length)
        first = path.split("/")[1]
        self.format: Final[Face] = _FORMATS.get(first, "xml")

    @property
    def is_json(self) -> bool:
        return self.headers.get("Content-Type", "").startswith("application/json")

    def header(self, name: str) -> str:
        return self.headers.get(name, "")

    def json(self) -> Any:
        """Return the parsed body; None without a body. Raises Refusal."""
        if not self.body:
            return None
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise Refusal(400, "Invalid JSON payload received.") from error


def _fault_error(fault: How | None) -> Refusal | None:
    match fault:
        case "throttle":
            return Refusal(429, "Quota exceeded for quota metric and limit of this service: a fault of the test.")
        case "deny":
            return Refusal(
                403, "The caller does not have permission: a fault that the test asked for", reason="forbidden"
            )
        case _:
            return None
