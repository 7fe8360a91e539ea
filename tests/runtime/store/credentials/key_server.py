"""The credential server that a container platform runs beside a job: new keys of the job's role for each request.

Source: https://docs.aws.amazon.com/sdkref/latest/guide/feature-container-credentials.html
"""

from __future__ import annotations

import datetime as dt
import json

from tests.kit.http_server import HttpReply, HttpRequest, HttpServer

from skerry.testing.aws.container_role_keys import role_keys


class KeyServer(HttpServer):
    """Each response has other keys (`key-1`, `key-2`, ...), which expire after `life_s`.

    token: the token that a job must send. status: any other than 200 is an outage. body: a fixed response instead of
    new keys. keys: the keys sent so far.
    """

    def __init__(self, *, life_s: float = 3600.0, token: str | None = None) -> None:
        super().__init__(self._respond)
        self.life_s = life_s
        self.token = token
        self.status = 200
        self.body: bytes | str | None = None
        self.keys: list[str] = []

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the platform sets for the job."""
        address = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{self.host}/role?of=job"}
        return address | ({"AWS_CONTAINER_AUTHORIZATION_TOKEN": self.token} if self.token else {})

    def make_keys(self) -> dict[str, str]:
        expires_at = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=self.life_s)
        return {
            "AccessKeyId": f"key-{len(self.keys) + 1}",
            "SecretAccessKey": "secret",
            "Token": "session",
            "Expiration": expires_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def _respond(self, request: HttpRequest) -> HttpReply:
        if request.headers.get("authorization") != self.token:
            return HttpReply(403)
        if self.status != 200 or self.body is not None:
            return HttpReply(self.status, self.body or "{}")
        keys = self.make_keys()
        self.keys.append(keys["AccessKeyId"])
        return HttpReply(body=json.dumps(keys))


class RoleKeyServer(KeyServer):
    """The same with keys of a role in the AWS sandbox."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def make_keys(self) -> dict[str, str]:
        keys = role_keys(self.role, "task-1", "us-east-1")
        return {
            "AccessKeyId": keys["AWS_ACCESS_KEY_ID"],
            "SecretAccessKey": keys["AWS_SECRET_ACCESS_KEY"],
            "Token": keys["AWS_SESSION_TOKEN"],
        }
