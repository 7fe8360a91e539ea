"""A server for tests that issues credentials: Google's metadata, AWS STS, Google STS and a container's keys.

It accepts every request; the sandboxes test the rights. A test sets lifetimes and failures.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
from email.utils import format_datetime
from typing import Final
from urllib.parse import parse_qs

from tests.kit.http_server import HttpReply, HttpRequest, HttpServer

ROLE: Final = "arn:aws:iam::123456789012:role/visitor"
AWS_AUDIENCE: Final = "skerry/123456789012/run"
GOOGLE_AUDIENCE: Final = (
    "//iam.googleapis.com/projects/415104041262/locations/global/workloadIdentityPools/skerry-run/providers/batch"
)
SECRET: Final = "hunter2hunter2hunter2hunter2hunter2hunter2hunter2hunter2"  # noqa: S105  not a real one
"""Part of every secret that is issued."""
STS: Final = "https://sts.amazonaws.com/doc/2011-06-15/"
_ARN: Final = "<Arn>arn:aws:sts::123456789012:assumed-role/visitor/a</Arn>"


class CredentialIssuer(HttpServer):
    """issued: the keys and tokens so far, in order. forms: the forms received.

    life_s: the lifetime of credentials. skew_s: the offset of its clock. failures: responses by path: status, body.
    """

    def __init__(self) -> None:
        super().__init__(self._respond)
        self.life_s = 3600.0
        self.skew_s = 0.0
        self.failures: dict[str, tuple[int, str]] = {}
        self.issued: list[str] = []
        self.forms: list[dict[str, str]] = []

    @property
    def aws(self) -> dict[str, str]:
        """The environment of a job on Google Cloud with its store in S3."""
        return {
            "GCE_METADATA_HOST": self.host,
            "SKERRY_AWS_ROLE": ROLE,
            "SKERRY_AWS_AUDIENCE": AWS_AUDIENCE,
            "AWS_REGION": "eu-west-1",
            "AWS_ENDPOINT_URL_STS": f"http://{self.host}",
            "SKERRY_SLOT": "a",
        }

    @property
    def google(self) -> dict[str, str]:
        """The environment of a job on AWS with its store in Cloud Storage."""
        return {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{self.host}/role",
            "SKERRY_GOOGLE_AUDIENCE": GOOGLE_AUDIENCE,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STS": f"http://{self.host}/",
            "AWS_ENDPOINT_URL": f"http://{self.host}",
        }

    def now(self) -> dt.datetime:
        """The time by its own clock."""
        return dt.datetime.now(dt.UTC).replace(microsecond=0) + dt.timedelta(seconds=self.skew_s)

    def _respond(self, request: HttpRequest) -> HttpReply:
        path = request.path.partition("?")[0]
        form = {name: values[0] for name, values in parse_qs(request.body).items()}
        status, body = self.failures.get(path) or (200, self._issue(path, form))
        return HttpReply(status, body, {"Date": format_datetime(self.now(), usegmt=True)})

    def _issue(self, path: str, form: dict[str, str]) -> str:
        """The response of the service at this path."""
        match path:
            case "/" if not form:
                return f'<R xmlns="{STS}"><GetCallerIdentityResult>{_ARN}</GetCallerIdentityResult></R>'
            case "/":
                expires_at = (self.now() + dt.timedelta(seconds=self.life_s)).isoformat().replace("+00:00", "Z")
                return sts_keys(self._next_key(form), expires_at)
            case "/v1/token":
                token = {"access_token": self._next_key(form), "expires_in": int(self.life_s), "token_type": "Bearer"}
                return json.dumps(token)
            case "/role":
                return json.dumps({"AccessKeyId": "ASIA", "SecretAccessKey": SECRET, "Token": SECRET})
            case _:
                return identity_token()

    def _next_key(self, form: dict[str, str]) -> str:
        self.forms.append(form)
        self.issued.append(f"key-{len(self.issued) + 1}")
        return self.issued[-1]


def identity_token() -> str:
    """An identity token of a service account, with a secret signature."""
    parts = ({"alg": "RS256"}, {"sub": "1122", "azp": "1122", "aud": AWS_AUDIENCE})
    texts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*texts, SECRET])


def sts_keys(key: str, expires_at: str) -> str:
    """AWS STS's response with keys of a role."""
    return (
        f'<R xmlns="{STS}"><Result><AssumedRoleUser>{_ARN}</AssumedRoleUser><Credentials>'
        f"<AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{SECRET}</SecretAccessKey>"
        f"<SessionToken>{SECRET}</SessionToken><Expiration>{expires_at}</Expiration></Credentials></Result></R>"
    )


def sts_error(code: str, message: str = "no") -> str:
    """AWS STS's response with an error."""
    return (
        f'<ErrorResponse xmlns="{STS}"><Error><Code>{code}</Code><Message>{message}</Message></Error></ErrorResponse>'
    )
