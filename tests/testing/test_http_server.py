"""The server of the sandboxes, with clients that leave."""

from __future__ import annotations

import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

from skerry.testing.http_server import Server

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def test_client_that_leaves_is_no_error_of_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    came, left, answered = threading.Event(), threading.Event(), threading.Event()

    def application(_environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        came.set()
        left.wait()
        start("200 OK", [("Content-Length", "5")])
        answered.set()
        return [b"right"]

    threads = set(threading.enumerate())
    server = Server(application, all_addresses=False)
    server.start()
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    came.wait()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()  # with a reset: what the server sends fails
    left.set()
    answered.wait()
    server.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join()
    assert not capfd.readouterr().err
