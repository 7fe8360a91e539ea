"""A WSGI server on a free port of this machine, which every sandbox and every metadata server runs."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import traceback
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from werkzeug.exceptions import InternalServerError
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler
from werkzeug.test import run_wsgi_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from werkzeug.datastructures import Headers

# How often the server checks for its end; a test would wait for werkzeug's default of half a second.
_POLL_S: Final = 0.01


class QuietHandler(WSGIRequestHandler):
    """Prints no access log.

    keeps_open: connections are open for further requests, which werkzeug's own never are, and which costs a client of
    many requests a third less time. Clients that nothing closes would warn of their open socket.
    """

    protocol_version = "HTTP/1.1"
    keeps_open: ClassVar[bool] = False
    wbufsize = -1  # head and body leave in one packet
    disable_nagle_algorithm = True

    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002  werkzeug's own name
        """Drop the line: the sandbox records its calls."""

    def finish(self) -> None:
        """End the connection, also if its client has left and the rest of an answer cannot be sent."""
        with self.rfile, contextlib.suppress(OSError):
            super().finish()

    def run_wsgi(self) -> None:
        """Answer one request. Its body is read first, so that the next request of the connection is behind it."""
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.wfile.flush()
        environ = self.make_environ()
        size = -1 if environ.get("wsgi.input_terminated") else int(environ.get("CONTENT_LENGTH") or 0)
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(size))
        try:
            parts, status, headers = run_wsgi_app(self.server.app, environ)
        except Exception:  # noqa: BLE001  a thread's entry: the error is logged and answered
            self.server.log("error", "%s", traceback.format_exc())
            parts, status, headers = run_wsgi_app(InternalServerError(), environ)
        try:
            self._send(status, headers, parts)
        finally:
            if close := getattr(parts, "close", None):
                close()

    def _send(self, status: str, headers: Headers, parts: Iterable[bytes]) -> None:
        code, _, reason = status.partition(" ")
        self.send_response(int(code), reason)
        for name, value in headers:
            self.send_header(name, value)
        bodiless = self.command == "HEAD" or code in {"204", "304"}
        chunked = not bodiless and "Content-Length" not in headers
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        if not self.keeps_open:
            self.send_header("Connection", "close")
        self.end_headers()
        for part in () if bodiless else filter(None, parts):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
            if chunked:
                self.wfile.flush()
        if chunked:
            self.wfile.write(b"0\r\n\r\n")


class _ConnectionServer(ThreadedWSGIServer):
    """Knows its open connections."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection in a thread."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        """End all connections; their threads then end."""
        for connection in tuple(self._connections):
            with contextlib.suppress(OSError):  # the client closed first
                connection.shutdown(socket.SHUT_RDWR)


class Server:
    """One listening server. all_addresses: for containers, which reach this machine by an address of their bridge."""

    def __init__(
        self,
        application: Callable[..., Iterable[bytes]],
        *,
        all_addresses: bool,
        handler: type[WSGIRequestHandler] = QuietHandler,
    ) -> None:
        """Bind a free port; `start` answers requests."""
        address = "0.0.0.0" if all_addresses else "127.0.0.1"  # noqa: S104  see above
        self._server = _ConnectionServer(address, 0, application, handler)
        self._thread: threading.Thread | None = None
        self.port: Final = int(self._server.server_address[1])

    def start(self) -> None:
        """Answer requests in a thread."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _POLL_S}, daemon=True, name="skerry-sandbox"
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, if it was started, end all connections, and free the port."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.end_connections()
        self._server.server_close()


def drop_connection(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
    """Break the connection without a response."""
    connection = cast("socket.socket", environ["werkzeug.socket"])
    with contextlib.suppress(OSError):  # the client closed first
        connection.shutdown(socket.SHUT_RDWR)
    start("500 connection dropped", [("Content-Length", "0")])
    return []
