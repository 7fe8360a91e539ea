"""A key of AWS for a token of Google's: each thing that the exchange rests on, and what it gives."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import google.auth.aws
import google.auth.exceptions
import pytest
from google.auth.transport.requests import Request
from tests.support.batchplace import ECS_TASKS, make_role
from tests.testing.google.kit import POOLS, bind, good, make_bucket

from skerry.testing.aws.container_role_keys import role_keys
from skerry.testing.both_clouds import Clouds
from skerry.testing.google import GoogleSandbox
from skerry.testing.google.token_exchange import ExchangeRefusal
from skerry.testing.token_issuer import TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from skerry.testing.sandbox import Sandbox

ROLE = "assertion.arn.extract('assumed-role/{role}/')"
POOL = "//iam.googleapis.com/projects/415104041262/locations/global/workloadIdentityPools/skerry"
AUDIENCE = f"{POOL}/providers/aws-1"
SETS = f"principalSet:{POOL}"
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
AWS4 = "urn:ietf:params:aws:token-type:aws4_request"


@pytest.fixture
def clouds(skerry_sandbox: Sandbox) -> Iterator[Clouds]:
    with GoogleSandbox() as google:
        google.enable("sts.googleapis.com")
        yield Clouds(aws=skerry_sandbox, google=google)


def make_provider(google: GoogleSandbox, **more: Any) -> None:
    body = {
        "aws": {"accountId": "123456789012"},
        "attributeMapping": {"google.subject": "assertion.arn", "attribute.aws_role": ROLE},
        "attributeCondition": f"{ROLE} == 'replica'",
    }
    good(google, "POST", f"{POOLS}?workloadIdentityPoolId=skerry", {})
    path = f"{POOLS}/skerry/providers?workloadIdentityPoolProviderId=aws-1"
    good(google, "POST", path, {name: value for name, value in (body | more).items() if value is not None})


def keys(sandbox: Sandbox, role: str = "replica", session: str = "task-1") -> dict[str, str]:
    """Those that a task of this role has."""
    return role_keys(make_role(sandbox, role), session, "us-east-1", service=ECS_TASKS)


class Supplier(google.auth.aws.AwsSecurityCredentialsSupplier):
    def __init__(self, given: dict[str, str]) -> None:
        self._given = given

    def get_aws_security_credentials(self, context: object, request: object) -> Any:
        del context, request
        return google.auth.aws.AwsSecurityCredentials(*self._given.values())

    def get_aws_region(self, context: object, request: object) -> str:
        del context, request
        return "us-east-1"


def credentials(clouds: Clouds, given: dict[str, str], *, audience: str = AUDIENCE) -> Any:
    """Google's own client for it."""
    return google.auth.aws.Credentials(
        audience=audience,
        subject_token_type=AWS4,
        token_url=f"{clouds.google.endpoint}/v1/token",
        aws_security_credentials_supplier=Supplier(given),
        scopes=[SCOPE],
    )


def exchanged(clouds: Clouds, given: dict[str, str], **more: Any) -> str:
    item = credentials(clouds, given, **more)
    item.refresh(Request())
    return item.token


def test_key_of_a_role_is_exchanged_for_a_token_with_its_bindings(clouds: Clouds) -> None:
    make_provider(clouds.google)
    make_bucket(clouds.google)
    token = exchanged(clouds, keys(clouds.aws))
    principal = clouds.google.principals.principal_of(f"Bearer {token}")
    arn = "arn:aws:sts::123456789012:assumed-role/replica/task-1"
    assert principal.name == f"principal:{POOL}/subject/{arn}"
    assert principal.sets == {f"{SETS}/*", f"{SETS}/attribute.aws_role/replica"}
    objects = "/storage/v1/b/bucket/o"
    assert clouds.google.call("GET", objects, token=token)[0] == 403
    bind(clouds.google, "roles/storage.objectViewer", f"{SETS}/attribute.aws_role/others")
    assert clouds.google.call("GET", objects, token=token)[0] == 403
    bind(clouds.google, "roles/storage.objectViewer", f"{SETS}/attribute.aws_role/replica")
    assert clouds.google.call("GET", objects, token=token)[0] == 200
    assert clouds.google.violations == []
    assert "sts:GetCallerIdentity" in clouds.aws.calls.names


def test_without_a_mapping_google_maps_the_role_s_arn(clouds: Clouds) -> None:
    make_provider(clouds.google, attributeMapping=None, attributeCondition=None)
    principal = clouds.google.principals.principal_of(f"Bearer {exchanged(clouds, keys(clouds.aws))}")
    assert f"{SETS}/attribute.aws_role/arn:aws:sts::123456789012:assumed-role/replica" in principal.sets


# By case: the job's role and session, a part of the audience that is replaced, and the answer.
REFUSED: dict[str, tuple[dict[str, str], tuple[str, str], str]] = {
    "another role": ({"role": "others"}, ("", ""), "rejected by the attribute condition"),
    "a long session": ({"session": "s" * 64}, ("", ""), "127 bytes"),
    "another provider": ({}, ("aws-1", "aws-2"), "invalid_target"),
    "the project's id": ({}, ("415104041262", "skerry-sandbox"), "Invalid value for audience"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_exchange_is_refused(clouds: Clouds, case: str) -> None:
    named, (before, after), message = REFUSED[case]
    subject = "assertion.arn + assertion.arn" if case == "a long session" else "assertion.arn"
    make_provider(clouds.google, attributeMapping={"google.subject": subject, "attribute.aws_role": ROLE})
    with pytest.raises(google.auth.exceptions.GoogleAuthError, match=message):
        exchanged(clouds, keys(clouds.aws, **named), audience=AUDIENCE.replace(before, after))


def test_exchange_of_a_made_up_key_is_refused(clouds: Clouds) -> None:
    make_provider(clouds.google)
    with pytest.raises(google.auth.exceptions.GoogleAuthError, match="AWS does not know the key"):
        exchanged(clouds, {"id": "AKIAIOSFODNN7EXAMPLE", "secret": "x", "token": "y"})


@pytest.mark.parametrize("what", ["pool", "provider", "disabled", "account"])
def test_exchange_is_refused_for_an_absent_or_foreign_provider(clouds: Clouds, what: str) -> None:
    account = {"aws": {"accountId": "999999999999"}} if what == "account" else {}
    make_provider(clouds.google, **account)
    path = {"pool": f"{POOLS}/skerry", "provider": f"{POOLS}/skerry/providers/aws-1"}.get(what)
    if path is not None:
        good(clouds.google, "DELETE", path)
    if what == "disabled":
        good(clouds.google, "PATCH", f"{POOLS}/skerry/providers/aws-1?updateMask=disabled", {"disabled": True})
    message = "account of the subject token is not the provider's" if what == "account" else "invalid_target"
    with pytest.raises(google.auth.exceptions.GoogleAuthError, match=message):
        exchanged(clouds, keys(clouds.aws))


# What Google's own client never gets wrong.


@pytest.fixture
def form(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A good request's form."""
    make_provider(clouds.google)
    bodies: list[str] = []
    real = Request.__call__

    def call(self: Request, url: str, method: str = "GET", body: Any = None, **more: Any) -> Any:
        bodies.append(body.decode() if isinstance(body, bytes) else body)
        return real(self, url, method, body, **more)

    monkeypatch.setattr(Request, "__call__", call)
    exchanged(clouds, keys(clouds.aws))
    return dict(parse_qsl(bodies[-1]))


def posted(clouds: Clouds, form: dict[str, str]) -> tuple[int, str]:
    data = urlencode(form).encode()
    try:
        with urllib.request.urlopen(f"{clouds.google.endpoint}/v1/token", data=data) as answer:  # noqa: S310  loopback
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def subject(form: dict[str, str], change: Callable[[dict[str, Any]], None]) -> dict[str, str]:
    """The form with another subject token."""
    response = json.loads(unquote(form["subject_token"]))
    change(response)
    return form | {"subject_token": quote(json.dumps(response))}


def header(name: str, value: str | None) -> Callable[[dict[str, Any]], None]:
    def change(response: dict[str, Any]) -> None:
        response["headers"] = [item for item in response["headers"] if item["key"].lower() != name]
        if value is not None:
            response["headers"].append({"key": name, "value": value})

    return change


def unsign(response: dict[str, Any]) -> None:
    for item in response["headers"]:
        if item["key"].lower() == "authorization":
            item["value"] = item["value"].replace(";x-amz-date", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda form: form | {"grant_type": "x"}, "grant_type is not"),
        (lambda form: form | {"requested_token_type": "x"}, "requested_token_type is not"),
        (lambda form: form | {"subject_token_type": "urn:ietf:params:oauth:token-type:saml2"}, "exchanges only urn"),
        (lambda form: form | {"subject_token_type": "urn:ietf:params:oauth:token-type:jwt"}, "is not of type oidc"),
        (lambda form: form | {"scope": "https://www.googleapis.com/auth/drive"}, "invalid_scope"),
        (lambda form: form | {"subject_token": "x"}, "Unable to parse"),
        (lambda form: form | {"subject_tokn": "x"}, "unknown field subject_tokn"),
        (
            lambda form: subject(form, lambda response: response.update(url="https://evil.example.com/")),
            "not a request to AWS",
        ),
        (lambda form: subject(form, lambda response: response.update(method="GET")), "not a request to AWS"),
        (
            lambda form: subject(
                form, lambda response: response.update(url=response["url"].replace("GetCaller", "GetSession"))
            ),
            "not GetCallerIdentity",
        ),
        (lambda form: subject(form, header("authorization", None)), "no signature"),
        (lambda form: subject(form, header("x-goog-cloud-target-resource", f"{POOL}/providers/x")), "another audience"),
        (lambda form: subject(form, header("x-goog-cloud-target-resource", None)), "another audience"),
        (lambda form: subject(form, unsign), "does not cover host and x-amz-date"),
        (lambda form: subject(form, header("x-amz-date", "20200101T000000Z")), "has expired"),
        (lambda form: subject(form, header("x-amz-date", "today")), "no valid x-amz-date"),
        (lambda form: subject(form, header("host", "sts.eu-west-1.amazonaws.com")), "another host"),
    ],
)
def test_tampered_exchange_request_is_refused(
    clouds: Clouds, form: dict[str, str], change: Callable[[dict[str, str]], dict[str, str]], message: str
) -> None:
    assert posted(clouds, form)[0] == 200
    status, body = posted(clouds, change(form))
    assert status == 400
    assert message in body


def test_exchange_without_an_aws_endpoint_is_refused(clouds: Clouds, form: dict[str, str]) -> None:
    clouds.google.exchange.aws = "http://127.0.0.1:1"
    assert posted(clouds, form)[0] == 503
    clouds.google.exchange.aws = None
    assert posted(clouds, form)[0] == 503


def test_exchange_requires_the_enabled_service(clouds: Clouds, form: dict[str, str]) -> None:
    clouds.google.reset()
    status, body = posted(clouds, form)
    assert status == 403
    assert "SERVICE_DISABLED" in body


# Tokens of an OIDC issuer.

ISSUER = "https://oidc.example.com/id/0123"
ACCOUNT = "system:serviceaccount:train:skerry-a-0"
OF_A_CLUSTER: dict[str, Any] = {
    "aws": None,
    "oidc": {"issuerUri": ISSUER},
    "attributeMapping": {"google.subject": "assertion.sub"},
    "attributeCondition": "assertion.sub.startsWith('system:serviceaccount:train:skerry-')",
}


def answer_to(google: GoogleSandbox, issuer: TokenIssuer, **claims: Any) -> tuple[str, str]:
    """The error of an exchange, or none and the principal of its token."""
    token = issuer.token({"sub": ACCOUNT, "aud": [f"https:{AUDIENCE}"], "exp": 4_000_000_000} | claims)
    form = {
        "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
        "requested_token_type": "urn:ietf:params:oauth:token-type:access_token",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "audience": AUDIENCE,
        "scope": SCOPE,
        "subject_token": token,
    }
    try:
        answer = google.exchange.token(form)
    except ExchangeRefusal as error:
        refusal = json.loads(error.body)
        return str(refusal["error"]), str(refusal["error_description"])
    return "", google.principals.principal_of(f"Bearer {answer['access_token']}").name


def test_token_of_a_cluster_is_verified_before_it_is_exchanged() -> None:
    cluster, thief = TokenIssuer(ISSUER), TokenIssuer(ISSUER)
    with GoogleSandbox() as google:
        google.enable("sts.googleapis.com")
        make_provider(google, **OF_A_CLUSTER)
        assert answer_to(google, cluster)[1] == "Error connecting to the given credential's issuer."
        google.exchange.issuers[ISSUER] = cluster.keys
        assert answer_to(google, cluster) == ("", f"principal:{POOL}/subject/{ACCOUNT}")
        assert answer_to(google, thief)[1].startswith("Unable to verify the ID Token: ")
        for claims, expected in (
            ({"iss": "https://oidc.example.com/id/4567"}, "The issuer in ID Token "),
            ({"aud": ["sts.amazonaws.com"]}, "The audience in ID Token "),
            ({"exp": 1_700_000_000}, "ID Token is stale to sign-in."),
            ({"sub": "system:serviceaccount:train:another"}, "The given credential is rejected by the attribute"),
        ):
            assert answer_to(google, cluster, **claims)[1].startswith(expected), claims
