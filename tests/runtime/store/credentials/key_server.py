"""The credential server that a container platform runs beside a job: new keys of the job's role for each request.

Loopback, threads. Each response has other keys (`key-1`, `key-2`, ...), which expire after `life_s`.
Source: https://docs.aws.amazon.com/sdkref/latest/guide/feature-container-credentials.html
"""

from __future__ import annotations

import datetime as dt
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class KeyServer:
    """Serves until the end of the block.

    token: the token that a job must send. status: any other than 200 is an outage. body: a fixed response instead of
    new keys. keys: the keys sent so far.
    """

    def __init__(self, *, life_s: float = 3600.0, token: str | None = None) -> None:
        self.life_s = life_s
        self.token = token
        self.status = 200
        self.body: bytes | None = None
        self.keys: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = outer.respond(self.headers.get("Authorization"))
                self.send_response(outer.status if body else 403)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

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
    def environment(self) -> dict[str, str]:
        """The variables that the platform sets for the job."""
        address = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://127.0.0.1:{self._server.server_port}/role?of=job"}
        return address | ({"AWS_CONTAINER_AUTHORIZATION_TOKEN": self.token} if self.token else {})

    def respond(self, token: str | None) -> bytes:
        """New keys; empty for a wrong token."""
        if token != self.token:
            return b""
        if self.status != 200:
            return b"{}"
        return self.make_keys() if self.body is None else self.body

    def make_keys(self) -> bytes:
        """The body of a response with new keys."""
        self.keys.append(f"key-{len(self.keys) + 1}")
        expires_at = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=self.life_s)
        return json.dumps(
            {
                "AccessKeyId": self.keys[-1],
                "SecretAccessKey": "secret",
                "Token": "session",
                "Expiration": expires_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        ).encode()
