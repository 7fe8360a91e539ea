"""Secrets of a job: fetched with its role, found in the command's environment only, and never in an error."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Final

import pytest
from tests.kit.http_server import HttpReply, HttpRequest, HttpServer
from tests.support.clocks import FakeClock
from tests.support.container import vertex

from skerry.runtime.container.run import PERMISSIONS_TIMEOUT_S, fetch_secrets_with_new_permissions
from skerry.runtime.container.secrets import fetch_secrets
from skerry.runtime.errors import Invalid, Retryable, SkerryError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.container import ContainerStarts

VALUE: Final = "kaffee-und-kuchen-4711"
ARN: Final = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:hf-AbCdEf"
PARAMETER: Final = "arn:aws:ssm:us-east-1:123456789012:parameter/hf"
VERSION: Final = "projects/acme/secrets/hf/versions/3"
KEYS: Final = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "key", "AWS_SESSION_TOKEN": "session"}


def in_base64(text: bytes) -> str:
    return base64.b64encode(text).decode()


def reply(document: object, status: int = 200) -> Callable[[HttpRequest], HttpReply]:
    """A server of every service. document: of a request for a secret."""

    def respond(request: HttpRequest) -> HttpReply:
        if request.path.startswith("/computeMetadata/"):
            return HttpReply(body=json.dumps({"access_token": "metadata-token", "expires_in": 60}))
        return HttpReply(status=status, body=json.dumps(document))

    return respond


def fetch(reference: str, respond: Callable[[HttpRequest], HttpReply]) -> tuple[str, HttpRequest]:
    """The value of a secret, and the last request."""
    with HttpServer(respond) as server:
        values = fetch_secrets({"TOKEN": reference}, environment_of(server), FakeClock())
        return values["TOKEN"], server.requests[-1]


def environment_of(server: HttpServer) -> dict[str, str]:
    endpoint = f"http://{server.host}"
    google = {"GCE_METADATA_HOST": server.host, "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER": f"{endpoint}/"}
    return {"AWS_ENDPOINT_URL": endpoint, **KEYS, **google}


SOURCES: Final = {
    f"aws_secretsmanager:{ARN}": {"SecretString": VALUE},
    f"aws_secretsmanager:{ARN}#hf": {"SecretString": json.dumps({"hf": VALUE})},
    f"aws_ssm:{PARAMETER}": {"Parameter": {"Value": VALUE}},
    f"google_secret:{VERSION}": {"payload": {"data": in_base64(VALUE.encode())}},
}


@pytest.mark.parametrize(("reference", "document"), SOURCES.items())
def test_reference_gives_the_value(reference: str, document: object) -> None:
    assert fetch(reference, reply(document))[0] == VALUE


def test_aws_request_is_signed_for_the_region_of_the_arn() -> None:
    _, request = fetch(f"aws_secretsmanager:{ARN}", reply({"SecretString": VALUE}))
    assert "/eu-west-1/secretsmanager/aws4_request" in request.headers["authorization"]
    assert request.headers["x-amz-target"] == "secretsmanager.GetSecretValue"
    assert request.headers["x-amz-security-token"] == "session"
    assert json.loads(request.body) == {"SecretId": ARN}
    _, request = fetch(f"aws_ssm:{PARAMETER}", reply({"Parameter": {"Value": VALUE}}))
    assert json.loads(request.body) == {"Name": PARAMETER, "WithDecryption": True}


def test_google_request_has_the_machines_token() -> None:
    _, request = fetch(f"google_secret:{VERSION}", reply({"payload": {"data": in_base64(b"x")}}))
    assert (request.path, request.headers["authorization"]) == (f"/v1/{VERSION}:access", "Bearer metadata-token")


def amazon(code: str) -> dict[str, str]:
    return {"__type": f"com.amazonaws#{code}", "message": f"denied: {VALUE}"}


GOOGLE_DENIES: Final = {"error": {"status": "PERMISSION_DENIED", "message": VALUE}}


@pytest.mark.parametrize(
    ("reference", "status", "document", "kind", "text"),
    [
        (
            f"aws_secretsmanager:{ARN}",
            400,
            amazon("AccessDeniedException"),
            Unauthorized,
            "let this job's role read it",
        ),
        (f"aws_secretsmanager:{ARN}", 400, amazon("ResourceNotFoundException"), Invalid, "code=ResourceNotFound"),
        (f"aws_ssm:{PARAMETER}", 400, amazon("ThrottlingException"), Retryable, "code=ThrottlingException"),
        (f"aws_ssm:{PARAMETER}", 200, {"Parameter": VALUE}, Retryable, "holds no value"),
        (f"aws_ssm:{PARAMETER}", 503, {"message": VALUE}, Retryable, "failed: status=503"),
        (f"google_secret:{VERSION}", 403, GOOGLE_DENIES, Unauthorized, "code=PERMISSION_DENIED"),
        (f"google_secret:{VERSION}", 404, {"error": VALUE}, Invalid, "status=404 code=none"),
        (f"google_secret:{VERSION}", 200, {"payload": {"data": VALUE}}, Retryable, "holds no value"),
        (f"google_secret:{VERSION}", 200, {"payload": {"data": in_base64(b"\xff")}}, Invalid, "not UTF-8"),
        (f"google_secret:{VERSION}", 200, {"payload": {"data": in_base64(b"a\0b")}}, Invalid, "zero byte"),
        (f"aws_secretsmanager:{ARN}#hf", 200, {"SecretString": VALUE}, Invalid, "not a JSON object with text at 'hf'"),
        (f"aws_secretsmanager:{ARN}#hf", 200, {"SecretString": f'{{"hf": ["{VALUE}"]}}'}, Invalid, "with text at 'hf'"),
    ],
)
def test_error_names_variable_and_reference_and_no_value(
    reference: str, status: int, document: object, kind: type[SkerryError], text: str
) -> None:
    with pytest.raises(kind) as error:
        fetch(reference, reply(document, status))
    assert text in str(error.value)
    if status != 503:
        assert f"cannot read the secret of TOKEN, {reference}: " in str(error.value)
    chain: BaseException | None = error.value
    while chain is not None:
        assert VALUE not in f"{chain!r}"
        chain = None if chain.__suppress_context__ else chain.__context__


@pytest.mark.parametrize("reference", ["vault:secret/hf", "aws_ssm:", VALUE])
def test_unknown_reference_is_invalid(reference: str) -> None:
    with pytest.raises(Invalid, match="not the reference of a secret: TOKEN"):
        fetch_secrets({"TOKEN": reference}, {}, FakeClock())


def test_job_without_a_role_on_aws_is_unauthorized() -> None:
    with pytest.raises(Unauthorized, match="this job has no AWS role"):
        fetch_secrets({"TOKEN": f"aws_ssm:{PARAMETER}"}, {}, FakeClock())


def test_fetch_is_repeated_while_a_new_right_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    granted_at = clock.now() + PERMISSIONS_TIMEOUT_S

    def respond(request: HttpRequest) -> HttpReply:
        if clock.now() < granted_at:
            return HttpReply(status=400, body=json.dumps(amazon("AccessDeniedException")))
        return reply({"Parameter": {"Value": VALUE}})(request)

    references = {"TOKEN": f"aws_ssm:{PARAMETER}"}
    with HttpServer(respond) as server:
        environment = environment_of(server)
        assert fetch_secrets_with_new_permissions(references, environment, clock) == {"TOKEN": VALUE}
        granted_at = float("inf")
        with pytest.raises(Unauthorized):
            fetch_secrets_with_new_permissions(references, environment, clock)
    logged = capsys.readouterr().err
    assert logged.count("retrying for 120 s: new permissions") == 2
    assert VALUE not in logged


@pytest.mark.slow
def test_only_the_command_sees_the_value(container: ContainerStarts) -> None:
    script = (
        "cat /proc/1/environ /proc/$PPID/environ 2>/dev/null | tr '\\0' '\\n' | grep -c \"$TOKEN\"; echo GOT $TOKEN"
    )
    with HttpServer(reply({"payload": {"data": in_base64(VALUE.encode())}})) as server:
        variables = {**environment_of(server), "SKERRY_SECRET_TOKEN": f"google_secret:{VERSION}"}
        exit_code, output = container.run("sh", "-c", script, cloud=vertex(), **variables)
    assert exit_code == 0, output
    assert output.count(VALUE) == 1
    assert f"0\nGOT {VALUE}" in output


def test_secret_that_does_not_exist_ends_with_permanent_and_its_reason(container: ContainerStarts) -> None:
    with HttpServer(reply({"error": {"status": "NOT_FOUND"}}, 404)) as server:
        variables = {**environment_of(server), "SKERRY_SECRET_TOKEN": f"google_secret:{VERSION}"}
        exit_code, output = container.run("true", cloud=vertex(), **variables)
    assert (exit_code, "code=NOT_FOUND" in output) == (20, True)
    assert f"cannot read the secret of TOKEN, google_secret:{VERSION}" in container.outcome().reason
