"""A server for tests on 127.0.0.1: one function answers every request."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class HttpRequest(NamedTuple):
    """path: with its query. headers: their names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: str


class HttpReply(NamedTuple):
    """The answer to a request."""

    status: int = 200
    body: bytes | str = b""
    headers: Mapping[str, str] = {}


class HttpServer:
    """Serves until the end of the block. requests: all so far, in order."""

    def __init__(self, respond: Callable[[HttpRequest], HttpReply]) -> None:
        self.requests: list[HttpRequest] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _respond(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                headers = {name.lower(): text for name, text in self.headers.items()}
                outer.requests.append(HttpRequest(self.command, self.path, headers, body))
                reply = respond(outer.requests[-1])
                content = reply.body.encode() if isinstance(reply.body, str) else reply.body
                self.send_response_only(reply.status)
                for name, text in {**reply.headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PATCH = _respond  # noqa: N815  the names that the base class calls

            def log_message(self, *_: object) -> None:
                """Logs nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def host(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self._server.server_port}"
