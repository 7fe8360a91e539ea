"""Calls to Google: translation of errors, retries, credentials, listings and operations."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.clouds.answering import Answers, at_once
from tests.support.clocks import FakeClock

from skerry.infra.clouds.google.errors import Kind, failure, kind_of, parse_refusal
from skerry.infra.clouds.google.login import Impersonation
from skerry.infra.clouds.google.session import Disabled, Google, Identity, refused
from skerry.infra.clouds.handler_helpers import Absent, NotYetVisible
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.infra.kit import Listener

    from skerry.testing.google import GoogleSandbox

INFO = "type.googleapis.com/google.rpc.ErrorInfo"
BAD = "type.googleapis.com/google.rpc.BadRequest"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Answers]:
    with Answers() as answers:
        yield answers


@pytest.fixture
def server(shared_server: Answers) -> Answers:
    shared_server.give((200, b"{}"))
    return shared_server


def environment(endpoint: str, **more: str) -> dict[str, str]:
    names = ("IAM", "STORAGE", "CLOUDRESOURCEMANAGER", "SERVICEUSAGE", "AIPLATFORM", "ARTIFACTREGISTRY")
    return {
        **{f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": endpoint for name in names},
        "CLOUDSDK_AUTH_ACCESS_TOKEN": "token",
        "GOOGLE_CLOUD_PROJECT": "acme",
        **more,
    }


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def google(server: Answers, clock: FakeClock) -> Google:
    return Google(clock, environment(server.endpoint))


def row(**answer: Any) -> tuple[int, bytes]:
    return 200, json.dumps(answer).encode()


def refusal(code: int, status: str, message: str, *details: Mapping[str, Any], **more: Any) -> tuple[int, bytes]:
    error = {"code": code, "status": status, "message": message, "details": list(details), **more}
    return code, json.dumps({"error": error}).encode()


def older(code: int, reason: str, message: str) -> tuple[int, bytes]:
    row = {"domain": "global", "reason": reason, "message": message}
    return code, json.dumps({"error": {"code": code, "message": message, "errors": [row]}}).encode()


def info(reason: str, **metadata: str) -> dict[str, Any]:
    return {"@type": INFO, "reason": reason, "domain": "googleapis.com", "metadata": metadata}


denied = partial(refusal, 403, "PERMISSION_DENIED")
NO_RIGHT = info("IAM_PERMISSION_DENIED", permission="iam.serviceAccounts.actAs")
NO_SERVICE = info("SERVICE_DISABLED", service="iam.googleapis.com")
TOO_SHORT = {"@type": BAD, "fieldViolations": [{"field": "account_id", "description": "too short"}]}
OLD_DENIAL = "a@b.c does not have storage.buckets.create access to the Google Cloud project."
REFUSALS = [
    (refusal(429, "RESOURCE_EXHAUSTED", "Quota exceeded for 'CPUs'"), Retryable, "or a quota is used up.*CPUs"),
    (refusal(503, "UNAVAILABLE", "later"), Retryable, "Google is busy"),
    ((502, b"<html>Bad Gateway</html>"), Retryable, "Bad Gateway"),
    (older(403, "rateLimitExceeded", "too fast"), Retryable, "Google is busy"),
    (
        denied("Permission 'iam.roles.create' denied on resource 'x' (or it may not exist)."),
        Unauthorized,
        r"lack the permission iam\.roles\.create: iam POST",
    ),
    (denied("no", NO_RIGHT), Unauthorized, r"lack the permission iam\.serviceAccounts\.actAs"),
    (older(403, "forbidden", OLD_DENIAL), Unauthorized, r"lack the permission storage\.buckets\.create:"),
    (denied("The caller does not have permission"), Unauthorized, "lack the permission: iam"),
    (
        denied("off", NO_SERVICE),
        Disabled,
        "iam.googleapis.com is not enabled in the project acme: enable it with `gcloud services enable iam.goo",
    ),
    (older(403, "accessNotConfigured", "off"), Disabled, "gcloud services enable iam.googleapis.com --project acme"),
    (denied("no billing", info("BILLING_DISABLED")), Invalid, "Google refuses: .*no billing"),
    (refusal(401, "UNAUTHENTICATED", "expired"), Unauthorized, "no valid credentials of Google Cloud"),
    (refusal(404, "NOT_FOUND", "Unknown service account"), Absent, "does not exist: iam POST v1/x: NOT_FOUND: Unknown"),
    (refusal(409, "ALREADY_EXISTS", "Requested entity already exists"), Conflict, "exists already"),
    (refusal(409, "ABORTED", "There were concurrent policy changes."), Conflict, "was changed meanwhile"),
    (older(412, "conditionNotMet", "Precondition Failed"), Conflict, "was changed meanwhile"),
    (
        refusal(400, "INVALID_ARGUMENT", "Invalid JSON payload", TOO_SHORT),
        Invalid,
        "Google refuses: iam POST v1/x: INVALID_ARGUMENT: Invalid JSON payload; account_id: too short",
    ),
    (refusal(400, "FAILED_PRECONDITION", "not yet"), Invalid, "not yet"),
    (refusal(501, "UNIMPLEMENTED", "never"), Invalid, "never"),
]


@pytest.mark.parametrize(("answer", "error", "text"), REFUSALS)
def test_refusal_selects_the_error_type(
    google: Google, server: Answers, answer: tuple[int, bytes], error: type[SkerryError], text: str
) -> None:
    server.give(answer)
    with pytest.raises(error, match=text) as caught:
        google.call("iam", "POST", "v1/x", body={})
    assert type(caught.value) is error


def off(consumer: str, service: str = "iam") -> tuple[int, bytes]:
    return denied(
        f"The {service}.googleapis.com API requires a quota project, which is not set by default.",
        info("SERVICE_DISABLED", service=f"{service}.googleapis.com", consumer=f"projects/{consumer}"),
    )


PROJECT = (200, b'{"projectId": "acme", "name": "projects/415104041262"}')
COUNTED = (
    r"counted for the project {}, which is not acme; iam\.googleapis\.com is not enabled there: run `gcloud auth "
    r"application-default set-quota-project acme`, or set GOOGLE_CLOUD_QUOTA_PROJECT=acme; .* serviceusage.services.use"
)


@pytest.mark.parametrize("consumer", ["764086051850", "999999999999"])
def test_service_disabled_in_the_quota_project_is_invalid(
    google: Google, server: Answers, clock: FakeClock, consumer: str
) -> None:
    """User logins without a quota project, or with another one, get this answer."""
    server.give(*([off(consumer), PROJECT] if consumer.startswith("9") else [off(consumer)]))
    google.enabled("iam")
    with pytest.raises(Invalid, match=COUNTED.format(consumer)) as caught:
        google.call("iam", "GET", "v1/x")
    assert type(caught.value) is Invalid
    assert clock.pauses == []


@pytest.mark.parametrize("consumer", ["415104041262", "acme"])
def test_service_disabled_in_our_project_is_disabled(google: Google, server: Answers, consumer: str) -> None:
    server.give(off(consumer), PROJECT)
    with pytest.raises(Disabled, match=r"iam.googleapis.com is not enabled in the project acme.*--project acme`$"):
        google.call("iam", "GET", "v1/x")


def test_unknown_project_number_names_both_remedies(google: Google, server: Answers) -> None:
    server.give(off("999999999999", "cloudresourcemanager"), off("999999999999", "serviceusage"))
    with pytest.raises(Disabled, match=r"serviceusage.googleapis.com is not enabled .*; if 999999999999 is not the n"):
        google.identity()
    server.give(off("764086051850", "cloudresourcemanager"))
    with pytest.raises(Invalid, match=r"calls are counted for the project 764086051850, which is not acme"):
        google.identity()


def test_token_uses_the_quota_project(server: Answers, clock: FakeClock) -> None:
    for more in ({}, {"GOOGLE_CLOUD_QUOTA_PROJECT": "acme"}):
        Google(clock, environment(server.endpoint, **more)).call("iam", "GET", "v1/x")
    assert [request.headers.get("x-goog-user-project") for request in server.requests] == [None, "acme"]


def test_refusal_is_available_from_the_error(google: Google, server: Answers) -> None:
    server.give(refusal(404, "NOT_FOUND", "nothing"))
    with pytest.raises(Absent) as caught:
        google.call("iam", "GET", "v1/x")
    body = refused(caught.value)
    assert body is not None
    assert (body.http, body.status, body.message) == (404, "NOT_FOUND", "nothing")
    assert refused(ValueError("x")) is None


def test_busy_service_is_retried(google: Google, server: Answers, clock: FakeClock) -> None:
    server.give((503, b""), refusal(429, "RESOURCE_EXHAUSTED", "slow"), row(name="x"))
    assert google.call("iam", "GET", "v1/x") == {"name": "x"}
    assert clock.pauses == sorted(clock.pauses)
    assert len(clock.pauses) == 2
    server.give((503, b""))
    with pytest.raises(Retryable):
        google.call("iam", "GET", "v1/x")
    assert len(server.requests) == 5


@pytest.mark.parametrize(
    "answer",
    [
        refusal(429, "RESOURCE_EXHAUSTED", "slow", info("RATE_LIMIT_EXCEEDED")),
        refusal(429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Writes' and limit 'Writes per minute'"),
        older(429, "rateLimitExceeded", "The rate of change requests to the bucket exceeds the rate limit."),
    ],
)
def test_rate_limit_is_retried_for_minutes(
    google: Google, server: Answers, clock: FakeClock, answer: tuple[int, bytes]
) -> None:
    server.give(*[answer] * 10, row(name="x"))
    assert google.call_once("iam", "POST", "v1/x", body={}) == {"name": "x"}
    assert 60 < sum(clock.pauses) < 150
    server.give(answer)
    began = clock.now()
    with pytest.raises(Retryable):
        google.call("iam", "GET", "v1/x")
    assert 120 < clock.now() - began < 200


@pytest.mark.parametrize(
    ("answer", "requests"),
    [
        ((503, b""), 1),
        ((500, b""), 1),
        (refusal(429, "RESOURCE_EXHAUSTED", "slow"), 5),
        (refusal(409, "ALREADY_EXISTS", "there"), 1),
    ],
)
def test_call_once_repeats_only_throttled_requests(
    google: Google, server: Answers, answer: tuple[int, bytes], requests: int
) -> None:
    server.give(answer)
    with pytest.raises(SkerryError):
        google.call_once("aiplatform", "POST", "v1/projects/p/locations/us-east1/customJobs", body={})
    assert len(server.requests) == requests


def test_call_once_repeats_unsent_requests(clock: FakeClock) -> None:
    with pytest.raises(Retryable, match="no answer from Google: iam"):
        Google(clock, environment("http://127.0.0.1:9")).call_once("iam", "POST", "v1/x", body={})
    assert len(clock.pauses) == 4


def test_lost_answer_is_repeated_only_by_call(sandbox: GoogleSandbox, clock: FakeClock) -> None:
    path = f"v1/projects/{sandbox.project}/serviceAccounts"
    google = Google(clock, sandbox.environment)
    for call, name, error in ((google.call, "skerry-lost", Conflict), (google.call_once, "skerry-once", Retryable)):
        sandbox.fail(how="lost_reply")
        with pytest.raises(error):
            call("iam", "POST", path, body={"accountId": name, "serviceAccount": {"displayName": "x"}})
    assert len([call for call in sandbox.calls if call.name == "iam.projects.serviceAccounts.create"]) == 3


def test_malformed_answer_is_retried(google: Google, server: Answers) -> None:
    server.give((200, b"<html>"), (200, b"{}"))
    assert google.call("iam", "GET", "v1/x") == {}
    server.give((200, b"<html>"))
    with pytest.raises(Retryable, match="not JSON"):
        google.call("iam", "GET", "v1/x")


def test_request_is_sent_unchanged(google: Google, server: Answers) -> None:
    query = {"project": "p", "names": ["a", "b"]}
    google.call("storage", "PATCH", "storage/v1/b/x%2Fy", body={"a": [1]}, query=query)
    google.call("iam", "GET", "v1/y")
    first, second = server.requests
    assert (first.method, first.path) == ("PATCH", "/storage/v1/b/x%2Fy?project=p&names=a&names=b")
    assert (first.headers["authorization"], json.loads(first.body), second.body) == ("Bearer token", {"a": [1]}, "")


def test_listing_reads_all_pages(google: Google, server: Answers) -> None:
    server.give(row(items=[1, 2], nextPageToken="t=1"), row(nextPageToken="2"), row(items=[3]))
    assert list(google.pages("iam", "v1/x", "items", query={"pageSize": "2"})) == [1, 2, 3]
    assert [request.path for request in server.requests] == [
        f"/v1/x?pageSize=2{token}" for token in ("", "&pageToken=t%3D1", "&pageToken=2")
    ]


def test_listing_by_post_has_its_token_in_the_body(google: Google, server: Answers) -> None:
    server.give(row(entries=[1], nextPageToken="t"), row())
    assert list(google.pages("iam", "v2/entries:list", "entries", body={"filter": "x"})) == [1]
    bodies = [json.loads(request.body) for request in server.requests]
    assert bodies == [{"filter": "x"}, {"filter": "x", "pageToken": "t"}]


def test_finished_operation_returns_its_response(google: Google, server: Answers) -> None:
    running, done = {"name": "operations/1"}, {"name": "operations/1", "done": True, "response": {"a": 1}}
    server.give(row(**running), row(**done))
    assert google.finished("iam", running, "x is made") == google.finished("iam", done, "x is made") == {"a": 1}
    assert [request.path for request in server.requests] == ["/v1/operations/1"] * 2


@pytest.mark.parametrize(
    ("code", "error"),
    [(5, Absent), (6, Conflict), (7, Unauthorized), (8, Retryable), (3, Invalid), (10, Conflict), (13, Retryable)],
)
def test_failed_operation_raises_its_error(google: Google, code: int, error: type[SkerryError]) -> None:
    failed = {"name": "operations/1", "done": True, "error": {"code": code, "message": "because"}}
    with pytest.raises(error, match="because"):
        google.finished("iam", failed, "x is made")


def test_operation_that_times_out_names_its_condition(google: Google, server: Answers) -> None:
    server.give(row(name="operations/1"))
    with pytest.raises(NotYetVisible, match="timed out after 300 s, waiting until x is made"):
        google.finished("iam", {"name": "operations/1"}, "x is made")


@pytest.mark.parametrize(
    ("given", "project"),
    [
        ({"GOOGLE_CLOUD_PROJECT": "one", "CLOUDSDK_CORE_PROJECT": "two"}, "one"),
        ({"CLOUDSDK_CORE_PROJECT": "two"}, "two"),
    ],
)
def test_project_comes_from_the_environment(given: dict[str, str], project: str) -> None:
    assert Google(FakeClock(), given).project == project
    assert Google(FakeClock(), given, project="the-specs").project == "the-specs"


def test_missing_project_is_an_error() -> None:
    with pytest.raises(Invalid, match=r"no project of Google Cloud is set: add `project`.*GOOGLE_CLOUD_PROJECT"):
        _ = Google(FakeClock(), {"CLOUDSDK_AUTH_ACCESS_TOKEN": "x"}).project


def test_project_of_the_credentials_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "user.json"
    user = {"client_id": "x", "client_secret": "y", "refresh_token": "z", "quota_project_id": "q"}
    file.write_text(json.dumps({"type": "authorized_user", **user}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "of-the-process")
    assert Google(FakeClock(), {}).project == "of-the-process"


def test_missing_credentials_are_unauthorized(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        Unauthorized, match=r"no valid credentials of Google Cloud.*gcloud auth application-default login"
    ):
        Google(FakeClock(), {"GOOGLE_CLOUD_PROJECT": "acme"}).identity()


def test_missing_credentials_file_is_unauthorized(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(Unauthorized, match=r"none\.json"):
        Google(FakeClock(), {"GOOGLE_CLOUD_PROJECT": "acme"}).identity()


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (refusal(503, "UNAVAILABLE", "later"), Retryable, "no credentials from Google: later"),
        (refusal(429, "RESOURCE_EXHAUSTED", "slower"), Retryable, "no credentials from Google: slower"),
        ((502, b"<html>Bad Gateway</html>"), Retryable, "no credentials from Google: .*Bad Gateway"),
        (row(accessToken="ya29.secret"), Retryable, r"no credentials from Google: [^.]*\(RefreshError\)$"),
        (
            refusal(401, "UNAUTHENTICATED", "expired"),
            Unauthorized,
            "no valid credentials of Google Cloud: expired; ",
        ),
        (denied("no"), Unauthorized, "spec: .* may not act as a@b.c: no; give them roles/iam.serviceAccountTokenCr"),
        (denied("off", NO_SERVICE), Unauthorized, "may not act as a@b.c: off; run `gcloud services enable iamcreden"),
        (refusal(404, "NOT_FOUND", "unknown account"), Unauthorized, "may not act as a@b.c: unknown account$"),
    ],
)
def test_refusal_to_act_as_an_account_is_translated(
    server: Answers, clock: FakeClock, answer: tuple[int, bytes], error: type[SkerryError], text: str
) -> None:
    server.give(answer)
    google = acting(server.endpoint, clock)
    for call in (google.login.access_token, google.identity):
        with pytest.raises(error, match=text):
            call()


def test_call_is_repeated_while_iam_is_busy(server: Answers, clock: FakeClock) -> None:
    token = row(accessToken="token", expireTime="2999-01-01T00:00:00Z")
    server.give(refusal(503, "UNAVAILABLE", "later"), token, row(name="x"))
    assert acting(server.endpoint, clock).call_once("iam", "POST", "v1/x") == {"name": "x"}
    assert len(server.requests) == 3


def test_unreachable_iam_is_retryable(clock: FakeClock) -> None:
    with pytest.raises(Retryable, match="no credentials from Google"):
        acting("http://127.0.0.1:9", clock).login.access_token()


def acting(endpoint: str, clock: FakeClock) -> Google:
    variables = environment(endpoint, CLOUDSDK_API_ENDPOINT_OVERRIDES_IAMCREDENTIALS=endpoint)
    return Google(clock, variables, impersonation=Impersonation(account="a@b.c", place="spec"))


def test_missing_library_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.auth.transport.requests", None)
    with pytest.raises(Invalid, match=r"pip install 'skerry\[gcp\]'"):
        Google(FakeClock(), {"GOOGLE_CLOUD_PROJECT": "acme"}).identity()


def test_identity_is_read_once(sandbox: GoogleSandbox, listener: Listener, clock: FakeClock) -> None:
    google = Google(clock, sandbox.environment, heard=listener.heard)
    expected = Identity(project=sandbox.project, number=sandbox.number, principal="the token's owner")
    assert set(at_once(google.identity)) == {expected}
    assert len(listener.calls) == 1


def test_project_number_needs_no_resource_manager(sandbox: GoogleSandbox, clock: FakeClock) -> None:
    google = Google(clock, sandbox.environment)
    path = f"v1/projects/{sandbox.project}/services/cloudresourcemanager.googleapis.com:disable"
    google.call("serviceusage", "POST", path, body={})
    assert google.identity().number == sandbox.number


@pytest.mark.parametrize(
    ("given", "service", "path", "expected"),
    [
        ("", "iam", "v1/x", "https://iam.googleapis.com"),
        (
            "",
            "aiplatform",
            "v1/projects/p/locations/europe-west4/customJobs",
            "https://europe-west4-aiplatform.googleapis.com",
        ),
        ("https://iam.p.example.com/", "iam", "v1/x", "https://iam.p.example.com"),
        ("https://s.p.example.com/storage/v1/", "storage", "storage/v1/b", "https://s.p.example.com"),
        ("https://a.p.example.com", "aiplatform", "v1/projects/p/locations/x/customJobs", "https://a.p.example.com"),
    ],
)
def test_endpoint_comes_from_the_variables_of_gcloud(given: str, service: str, path: str, expected: str) -> None:
    variables = {f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service.upper()}": given} if given else {}
    assert Google(FakeClock(), variables).endpoint(service, path) == expected


def test_registry_content_is_fetched_with_the_credentials(google: Google, server: Answers) -> None:
    url = f"{server.endpoint}/v2/a/b/manifests"
    server.give((503, b""), (200, b"bytes"))
    assert google.fetched(f"{url}/1", "application/x") == b"bytes"
    _, path, headers, _ = server.requests[1]
    sent = path, headers["accept"], headers["authorization"]
    assert sent == ("/v2/a/b/manifests/1", "application/x", "Bearer token")
    server.give((404, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}'))
    with pytest.raises(Absent, match="MANIFEST_UNKNOWN"):
        google.fetched(f"{url}/2", "x")


@pytest.mark.parametrize(
    ("http_", "body", "kind"),
    [
        (400, b'{"error": "invalid_grant", "error_description": "bad"}', Kind.EXPIRED),
        (410, b"", Kind.ABSENT),
        (408, b"", Kind.BUSY),
        (400, b"[]", Kind.REFUSED),
        (403, b"not json", Kind.DENIED),
    ],
)
def test_error_bodies_have_kinds(http_: int, body: bytes, kind: Kind) -> None:
    assert kind_of(parse_refusal(http_, body)) is kind


def test_unknown_failure_code_is_busy() -> None:
    assert kind_of(failure({"code": 99, "message": "x"})) is Kind.BUSY
    assert kind_of(failure({})) is Kind.BUSY
