"""Fetches the secrets of a job, with the job's own role, and returns their values for the command's environment only.

A launcher passes references (`contract.SECRET`), so no description of a job holds a value. No value is ever logged,
recorded or part of an error: an error names the variable, the reference and the service's error code.
Sources: AWS Secrets Manager API, GetSecretValue; Systems Manager API, GetParameter; Secret Manager (Google), REST
reference of projects.secrets.versions.access.
"""

from __future__ import annotations

import base64
import datetime as dt
import http.client
import json
import re
from typing import TYPE_CHECKING, Final, cast

from skerry.runtime.errors import Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.store.credentials.aws_json_api import call_aws, error_code, kind_of_refusal
from skerry.runtime.store.credentials.find_aws_keys import keys_of_job
from skerry.runtime.store.credentials.google_login import login_token_of_job
from skerry.runtime.store.credentials.google_metadata import metadata_token_of_job
from skerry.runtime.store.credentials.http import send_request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.runtime.clock import Clock
    from skerry.runtime.store.credentials.http import HttpResponse

_GOOGLE_ENDPOINT: Final = "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER"
# A secret has up to 64 KiB, in base64 and JSON a third more.
_MAX_BYTES: Final = 256 << 10
_ADVICE: Final[Mapping[type[SkerryError], str]] = {
    Unauthorized: "; let this job's role read it",
    Invalid: "; compare the reference with the secret",
}
# Other texts of a service may quote the request.
_CODE: Final = re.compile(r"[A-Za-z_]{1,64}")


class _Secret:
    """One reference. Its errors name the variable and the reference, never the value."""

    def __init__(self, variable: str, text: str) -> None:
        reference, _, key = text.partition("#")
        kind, _, self.name = reference.partition(":")
        self.key = key or None
        self._what = f"the secret of {variable}, {text}"
        self.fetch = _KINDS.get(kind)
        if self.fetch is None or not self.name:
            raise Invalid(
                f"not the reference of a secret: {variable} refers to {text!r}; write one of {', '.join(_KINDS)}"
            )

    def error(self, kind: type[SkerryError], text: str) -> SkerryError:
        return kind(f"cannot read {self._what}: {text}")

    def refusal(self, status: int, named: object) -> SkerryError:
        """The error for a response that is not OK. named: the service's error code, as far as it is one."""
        code = named if isinstance(named, str) and _CODE.fullmatch(named) else ""
        facts = f"status={status} code={code or 'none'}"
        kind = kind_of_refusal(status, code)
        return self.error(kind, facts + _ADVICE.get(kind, ""))

    def text_of(self, value: bytes) -> str:
        """The text that becomes the variable: the value, or the text at `key` of its JSON object."""
        try:
            text = value.decode()
        except UnicodeDecodeError:
            raise self.error(Invalid, "it is not UTF-8 text, and a variable holds only text") from None
        if self.key is not None:
            text = self._inner(text, self.key)
        if "\0" in text:
            raise self.error(Invalid, "it contains a zero byte, which no variable can hold")
        return text

    def _inner(self, text: str, key: str) -> str:
        try:
            document: object = json.loads(text)
        except ValueError:
            document = None
        if not isinstance(value := _at(document, key), str):
            raise self.error(Invalid, f"it is not a JSON object with text at {key!r}")
        return value


def fetch_secrets(references: Mapping[str, str], environment: Mapping[str, str], clock: Clock) -> dict[str, str]:
    """The values of secrets by the names of their variables. references: as in the job's variables.

    Raises Unauthorized, Retryable or Invalid.
    """
    values: dict[str, str] = {}
    for variable, text in references.items():
        secret = _Secret(variable, text)
        values[variable] = secret.text_of(cast("_Fetch", secret.fetch)(secret, environment, clock))
    return values


def _from_secrets_manager(secret: _Secret, environment: Mapping[str, str], clock: Clock) -> bytes:
    answer = _ask_aws(secret, environment, clock, "secretsmanager.GetSecretValue", {"SecretId": secret.name})
    if isinstance(text := _at(answer, "SecretString"), str):
        return text.encode()
    return _decoded(secret, _at(answer, "SecretBinary"))


def _from_ssm(secret: _Secret, environment: Mapping[str, str], clock: Clock) -> bytes:
    request = {"Name": secret.name, "WithDecryption": True}
    answer = _ask_aws(secret, environment, clock, "AmazonSSM.GetParameter", request)
    value = _at(answer, "Parameter", "Value")
    if not isinstance(value, str):
        raise secret.error(Retryable, "the response holds no value")
    return value.encode()


def _ask_aws(
    secret: _Secret, environment: Mapping[str, str], clock: Clock, action: str, request: Mapping[str, object]
) -> object:
    """The JSON document of a service's response. The service and its region are those of the ARN."""
    parts = secret.name.split(":")
    if len(parts) < len(("arn", "aws", "service", "region", "account", "name")):
        raise secret.error(Invalid, "it is not an ARN")
    service, region = parts[2], parts[3]
    keys = keys_of_job(environment)
    if keys is None:
        raise secret.error(
            Unauthorized, "this job has no AWS role; run it on AWS, or refer to a secret of its own cloud"
        )
    response = call_aws(
        keys,
        environment,
        service=service,
        region=region,
        action=action,
        request=request,
        now=dt.datetime.fromisoformat(clock.utc_text()),
        max_bytes=_MAX_BYTES,
    )
    document = _document(response)
    if response.status != http.client.OK:
        raise secret.refusal(response.status, error_code(document))
    return document


def _from_google(secret: _Secret, environment: Mapping[str, str], clock: Clock) -> bytes:
    try:
        token = login_token_of_job(environment, clock) or metadata_token_of_job(environment)
    except SkerryError as error:
        raise secret.error(type(error), str(error)) from None
    except OSError as error:  # its text contains no secret
        raise secret.error(Retryable, str(error)) from None
    endpoint = environment.get(_GOOGLE_ENDPOINT) or "https://secretmanager.googleapis.com/"
    url = f"{endpoint.rstrip('/')}/v1/{secret.name}:access"
    headers = {"Authorization": f"Bearer {token}"}
    response = send_request("GET", url, headers, None, max_bytes=_MAX_BYTES)
    document = _document(response)
    if response.status != http.client.OK:
        raise secret.refusal(response.status, _at(document, "error", "status"))
    return _decoded(secret, _at(document, "payload", "data"))


def _decoded(secret: _Secret, text: object) -> bytes:
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except ValueError:
        pass
    raise secret.error(Retryable, "the response holds no value")


def _document(response: HttpResponse) -> object:
    try:
        return json.loads(response.body)
    except ValueError:
        return None


def _at(document: object, *names: str) -> object:
    """The value at a path of a JSON document; None if there is none."""
    for name in names:
        document = cast("dict[str, object]", document).get(name) if isinstance(document, dict) else None
    return document


if TYPE_CHECKING:
    _Fetch = Callable[[_Secret, Mapping[str, str], Clock], bytes]

_KINDS: Final[dict[str, _Fetch]] = {
    "aws_secretsmanager": _from_secrets_manager,
    "aws_ssm": _from_ssm,
    "google_secret": _from_google,
}
