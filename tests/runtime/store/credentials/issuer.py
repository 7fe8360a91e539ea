"""What lends credentials to a visitor, on loopback: Google's metadata, AWS's STS, Google's STS and a container's keys.

It believes everybody: who is let in is the sandboxes' part. Here a test says how long things last and what goes wrong.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import threading
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import parse_qs

from tests.support.clocks import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable

ROLE: Final = "arn:aws:iam::123456789012:role/visitor"
AUDIENCE: Final = (
    "//iam.googleapis.com/projects/415104041262/locations/global/workloadIdentityPools/skerry-run/providers/batch"
)
HIDDEN: Final = "hunter2hunter2hunter2hunter2hunter2hunter2hunter2hunter2"
"""Stands in every secret that is lent."""
STS: Final = "https://sts.amazonaws.com/doc/2011-06-15/"
_ARN: Final = "<Arn>arn:aws:sts::123456789012:assumed-role/visitor/a</Arn>"


class Days(FakeClock):
    """A fake clock with a wall clock that goes along, but for jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.start = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=self.time)

    def utc_text(self) -> str:
        return (self.start + dt.timedelta(seconds=self.time)).isoformat()

    def jump(self, seconds: float) -> None:
        """Set the wall clock, and no other."""
        self.start += dt.timedelta(seconds=seconds)


class Lender:
    """Serve until the end of the block. lent: the keys and tokens so far, in order.

    life_s: how long they last. skew_s: how far its clock is off. fails: answers instead, by path: status, body.
    """

    def __init__(self) -> None:
        self.life_s = 3600.0
        self.skew_s = 0.0
        self.fails: dict[str, tuple[int, str]] = {}
        self.lent: list[str] = []
        self.forms: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                form = {name: values[0] for name, values in parse_qs(body).items()}
                path = self.path.partition("?")[0]
                status, text = outer.fails.get(path) or (200, outer.answers(path)(form))
                self.send_response_only(status)
                self.send_header("Date", format_datetime(outer.now(), usegmt=True))
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = _answer  # noqa: N815  the names that the base class looks for

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
    def aws(self) -> dict[str, str]:
        """What a job on Google is told, with its store in S3."""
        return {
            "GCE_METADATA_HOST": self._host,
            "SKERRY_AWS_ROLE": ROLE,
            "SKERRY_AWS_AUDIENCE": "skerry/123456789012/run",
            "AWS_REGION": "eu-west-1",
            "AWS_ENDPOINT_URL_STS": f"http://{self._host}",
            "SKERRY_SLOT": "a",
        }

    @property
    def google(self) -> dict[str, str]:
        """What a job on AWS is told, with its store in Cloud Storage."""
        return {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{self._host}/role",
            "SKERRY_GOOGLE_AUDIENCE": AUDIENCE,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STS": f"http://{self._host}/",
            "AWS_ENDPOINT_URL": f"http://{self._host}",
        }

    def answers(self, path: str) -> Callable[[dict[str, str]], str]:
        """Who answers at this path."""
        named: dict[str, Callable[[dict[str, str]], str]] = {
            "/": self._sts,
            "/role": lambda _: json.dumps({"AccessKeyId": "ASIA", "SecretAccessKey": HIDDEN, "Token": HIDDEN}),
            "/v1/token": self._token,
        }
        return named.get(path, lambda _: identity_token())

    def now(self) -> dt.datetime:
        """By its own clock."""
        return dt.datetime.now(dt.UTC).replace(microsecond=0) + dt.timedelta(seconds=self.skew_s)

    @property
    def _host(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def _next(self) -> str:
        self.lent.append(f"key-{len(self.lent) + 1}")
        return self.lent[-1]

    def _sts(self, form: dict[str, str]) -> str:
        if not form:
            return f'<R xmlns="{STS}"><GetCallerIdentityResult>{_ARN}</GetCallerIdentityResult></R>'
        self.forms.append(form)
        ends = (self.now() + dt.timedelta(seconds=self.life_s)).isoformat().replace("+00:00", "Z")
        return sts_answer(self._next(), ends)

    def _token(self, form: dict[str, str]) -> str:
        self.forms.append(form)
        return json.dumps({"access_token": self._next(), "expires_in": int(self.life_s), "token_type": "Bearer"})


def identity_token() -> str:
    """Of a service account, with a signature that is a secret."""
    parts = ({"alg": "RS256"}, {"sub": "1122", "azp": "1122", "aud": "skerry/123456789012/run"})
    texts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*texts, HIDDEN])


def sts_answer(key: str, ends: str) -> str:
    """Keys of a role, as STS gives them."""
    return (
        f'<R xmlns="{STS}"><Result><AssumedRoleUser>{_ARN}</AssumedRoleUser><Credentials>'
        f"<AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{HIDDEN}</SecretAccessKey>"
        f"<SessionToken>{HIDDEN}</SessionToken><Expiration>{ends}</Expiration></Credentials></Result></R>"
    )


def sts_error(code: str, message: str = "no") -> str:
    """As STS says it."""
    return (
        f'<ErrorResponse xmlns="{STS}"><Error><Code>{code}</Code><Message>{message}</Message></Error></ErrorResponse>'
    )
