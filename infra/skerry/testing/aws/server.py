"""Everything that reaches the sandbox's server goes through here: it is written down, and fails if a test asked for it.

What moto cannot do is answered at once and in words: its own 500 would be repeated by every client for 20 seconds.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's request and application have few types.

from __future__ import annotations

import contextlib
import io
import logging
import socket
from typing import TYPE_CHECKING, Any, Final, cast

from moto.core.request import Request
from moto.moto_server.werkzeug_app import MotoRequestHandler

from skerry.infra.testing import calls, faults
from skerry.infra.testing.callers import caller, signed_by, signed_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from skerry.infra.testing.faults import Faults

_LOG: Final = logging.getLogger(__name__)
# Signing names that are not what botocore calls the service.
_NAMES: Final = {"s3express": "s3", "servicequotas": "service-quotas"}


class Gate:
    """A WSGI application around moto's."""

    def __init__(
        self, application: Callable[..., Iterable[bytes]], seen: calls.Calls, faults_: Faults, *, enforces: bool
    ) -> None:
        """enforces: nobody may do anything without a signature, but for exchanging a token for keys."""
        self._enforces = enforces
        self._application = application
        self._seen = seen
        self._faults = faults_

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        body = _body(environ)
        request = Request({**environ, "wsgi.input": io.BytesIO(body)})
        environ["wsgi.input"] = io.BytesIO(body)
        if request.path.startswith("/moto-api"):
            return self._application(environ, start)
        authorization = request.headers.get("Authorization", "")
        service = signed_for(authorization) or _unsigned(request)
        service = _NAMES.get(service, service)
        call = calls.read(request, service, caller(authorization).name)
        number = self._seen.add(call)

        def begin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            self._seen.answered(number, call, int(status.partition(" ")[0]))
            return start(status, headers, *rest)

        if self._enforces and service != "sts" and signed_by(authorization) is None:
            return _answer(begin, *faults.error(service, 403, "AccessDenied", "Access Denied"))
        match self._faults.strike(call):
            case "throttle" | "deny" as how:
                return _answer(begin, *faults.answer(service, how))
            case "timeout":
                return _hang_up(environ, start)
            case "lost_reply":
                _drain(self._carried_out(environ, lambda *_: None, call))
                return _hang_up(environ, start)
            case None:
                return self._carried_out(environ, begin, call)

    def _carried_out(self, environ: dict[str, Any], start: Callable[..., Any], call: calls.Call) -> Iterable[bytes]:
        try:
            return self._application(environ, start)
        except NotImplementedError as error:
            return _answer(start, *faults.error(call.service, 501, "NotImplemented", f"{call.name}: {error}"))
        except Exception as error:  # noqa: BLE001  a thread's entry: what moto stumbled over is told and logged
            _LOG.exception("%s failed in the sandbox", call.name)
            text = f"{call.name} failed in the sandbox: {type(error).__name__}: {error}"
            return _answer(start, *faults.error(call.service, 501, "SandboxFailed", text))


class Handler(MotoRequestHandler):
    """Reads requests for the server, and keeps the terminal quiet."""

    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002  werkzeug's own name
        """Say nothing: the sandbox's calls are the log."""


def _body(environ: dict[str, Any]) -> bytes:
    stream = cast("io.BufferedIOBase", environ["wsgi.input"])
    if environ.get("wsgi.input_terminated"):
        return stream.read()
    return stream.read(int(environ.get("CONTENT_LENGTH") or 0))


def _unsigned(request: Request) -> str:
    """Tokens of a web identity are exchanged without a signature; whatever else comes without one is for a bucket."""
    return "sts" if str(request.values.get("Action", "")).startswith("AssumeRole") else "s3"


def _answer(start: Callable[..., Any], status: int, content_type: str, body: bytes) -> list[bytes]:
    start(f"{status} sandbox", [("Content-Type", content_type), ("Content-Length", str(len(body)))])
    return [body]


def _hang_up(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
    connection = cast("socket.socket", environ["werkzeug.socket"])
    with contextlib.suppress(OSError):  # the other side was first
        connection.shutdown(socket.SHUT_RDWR)
    start("500 nobody hears it", [("Content-Length", "0")])
    return []


def _drain(answer: Iterable[bytes]) -> None:
    for _ in answer:
        pass
    if close := getattr(answer, "close", None):
        close()
