"""What a container platform runs beside a job: an address that gives the job's role keys, new ones when asked again.

Loopback, threads. Each answer has keys of its own (`key-1`, `key-2`, ...) that say they last `lasts_s`.
Source: https://docs.aws.amazon.com/sdkref/latest/guide/feature-container-credentials.html
"""

from __future__ import annotations

import datetime as dt
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class KeyServer:
    """Serve until the end of the block.

    only_for: the token that a job must show. status: other than 200 is an outage. keys: those given so far.
    """

    def __init__(self, *, lasts_s: float = 3600.0, only_for: str | None = None) -> None:
        self.lasts_s = lasts_s
        self.only_for = only_for
        self.status = 200
        self.keys: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = outer.answer(self.headers.get("Authorization"))
                self.send_response(outer.status if body else 403)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

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
        """What the platform sets for the job."""
        told = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://127.0.0.1:{self._server.server_port}/role?of=job"}
        return told | ({"AWS_CONTAINER_AUTHORIZATION_TOKEN": self.only_for} if self.only_for else {})

    def answer(self, token: str | None) -> bytes:
        """New keys, or nothing for whoever may not have them."""
        if token != self.only_for:
            return b""
        if self.status != 200:
            return b"{}"
        self.keys.append(f"key-{len(self.keys) + 1}")
        expires = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=self.lasts_s)
        return json.dumps(
            {
                "AccessKeyId": self.keys[-1],
                "SecretAccessKey": "secret",
                "Token": "session",
                "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        ).encode()
