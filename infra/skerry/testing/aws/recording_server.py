"""Wraps moto's server: records every request, injects faults, and checks signatures.

Requests that moto cannot answer get 501 with the reason: clients would repeat moto's own 500 for 20 seconds.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's request and application have few types.

from __future__ import annotations

import contextlib
import functools
import io
import logging
import threading
from typing import TYPE_CHECKING, Any, Final, cast

from moto.core.request import Request
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app

from skerry.testing.aws import errors
from skerry.testing.aws.callers import caller, signed_by, signed_for
from skerry.testing.aws.requests import parse_request
from skerry.testing.http_server import QuietHandler, drop_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from skerry.testing.calls import Call, Calls
    from skerry.testing.faults import Faults

_LOG: Final = logging.getLogger(__name__)
# Signing names that differ from botocore's name of the service.
_NAMES: Final = {"s3express": "s3", "servicequotas": "service-quotas"}
# Its routes are the same in every account, and to compile them takes longer than to answer requests.
_APPLICATION_OF: Final = functools.cache(create_backend_app)


class AwsApplication:
    """A WSGI application around moto's. Each request is recorded, and fails if a fault applies."""

    def __init__(
        self, application: Callable[..., Iterable[bytes]], calls: Calls, faults: Faults, *, needs_signature: bool
    ) -> None:
        """needs_signature: refuse unsigned requests, except those that exchange a token for keys."""
        self._needs_signature = needs_signature
        self._application = application
        self._calls = calls
        self._faults = faults
        # moto iterates over a role's policies while another request may add one to it.
        self._iam = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Handle one request."""
        body = _body(environ)
        request = Request({**environ, "wsgi.input": io.BytesIO(body)})
        environ["wsgi.input"] = io.BytesIO(body)
        if request.path.startswith("/moto-api"):
            return self._application(environ, start)
        authorization = request.headers.get("Authorization", "")
        service = signed_for(authorization) or _unsigned(request)
        service = _NAMES.get(service, service)
        call = parse_request(request, service, caller(authorization).name)
        number = self._calls.add(call)

        def begin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            self._calls.answered(number, call, int(status.partition(" ")[0]))
            return start(status, headers, *rest)

        if self._needs_signature and service != "sts" and signed_by(authorization) is None:
            return _answer(begin, *errors.error_response(service, 403, "AccessDenied", "Access Denied"))
        match self._faults.apply(call):
            case "throttle" | "deny" as fault:
                return _answer(begin, *errors.injected_error(service, fault))
            case "timeout":
                return drop_connection(environ, start)
            case "lost_reply":
                _drain(self._run(environ, lambda *_: None, call))
                return drop_connection(environ, start)
            case None:
                return self._run(environ, begin, call)

    def _run(self, environ: dict[str, Any], start: Callable[..., Any], call: Call) -> Iterable[bytes]:
        try:
            with self._iam if call.service == "iam" else contextlib.nullcontext():
                return self._application(environ, start)
        except NotImplementedError as error:
            return _answer(start, *errors.error_response(call.service, 501, "NotImplemented", f"{call.name}: {error}"))
        except Exception as error:  # noqa: BLE001  a thread's entry: moto's error is logged and returned
            _LOG.exception("%s failed in the sandbox", call.name)
            text = f"{call.name} failed in the sandbox: {type(error).__name__}: {error}"
            return _answer(start, *errors.error_response(call.service, 501, "SandboxFailed", text))


class MotoApplication(DomainDispatcherApplication):
    """Wraps moto's application so that it looks up each host once, instead of listing its folders for every request."""

    def __init__(self) -> None:
        """Create one without services: each is added with its first request."""
        super().__init__(_APPLICATION_OF)
        self._services: dict[str | None, Any] = {}

    def get_backend_for_host(self, host: str | None) -> Any:
        """Return the name of the service at `host`."""
        if host not in self._services:
            self._services[host] = super().get_backend_for_host(host)
        return self._services[host]


class QuietMotoHandler(QuietHandler, MotoRequestHandler):
    """Our request handler, with moto's names of headers."""

    keeps_open = True


def _body(environ: dict[str, Any]) -> bytes:
    stream = cast("io.BufferedIOBase", environ["wsgi.input"])
    if environ.get("wsgi.input_terminated"):
        return stream.read()
    return stream.read(int(environ.get("CONTENT_LENGTH") or 0))


def _unsigned(request: Request) -> str:
    """The service of an unsigned request: STS exchanges web identity tokens; anything else is for a bucket."""
    return "sts" if str(request.values.get("Action", "")).startswith("AssumeRole") else "s3"


def _answer(start: Callable[..., Any], status: int, content_type: str, body: bytes) -> list[bytes]:
    start(f"{status} sandbox", [("Content-Type", content_type), ("Content-Length", str(len(body)))])
    return [body]


def _drain(answer: Iterable[bytes]) -> None:
    for _ in answer:
        pass
    if close := getattr(answer, "close", None):
        close()
