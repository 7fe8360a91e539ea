"""A WSGI server on a free port of this machine, which every sandbox and every metadata server runs."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any, Final, cast

from werkzeug.serving import WSGIRequestHandler, make_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# How often the server checks for its end; a test would wait for werkzeug's default of half a second.
_POLL_S: Final = 0.01


class QuietHandler(WSGIRequestHandler):
    """Keeps connections open between requests and prints no access log."""

    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002  werkzeug's own name
        """Drop the line: the sandbox records its calls."""


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
        self._server = make_server(address, 0, application, threaded=True, request_handler=handler)
        self._thread: threading.Thread | None = None
        self.port: Final = int(self._server.server_address[1])

    def start(self) -> None:
        """Answer requests in a thread."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _POLL_S}, daemon=True, name="skerry-sandbox"
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, if it was started, and free the port."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def drop_connection(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
    """Break the connection without a response."""
    connection = cast("socket.socket", environ["werkzeug.socket"])
    with contextlib.suppress(OSError):  # the client closed first
        connection.shutdown(socket.SHUT_RDWR)
    start("500 connection dropped", [("Content-Length", "0")])
    return []
