"""Calls to Google: translation of errors, retries, credentials, listings and operations."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from tests.support.clocks import FakeClock

from skerry.infra.clouds.google.errors import Kind, failure, kind_of, parse_refusal
from skerry.infra.clouds.google.session import Disabled, Google, Identity, refused
from skerry.infra.clouds.shared import Absent, NotYetVisible
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from email.message import Message

    from tests.infra.kit import Listener

    from skerry.testing.google import GoogleSandbox

ROOT = Path(__file__).parents[4]
INFO = "type.googleapis.com/google.rpc.ErrorInfo"
BAD = "type.googleapis.com/google.rpc.BadRequest"


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers requests with `answers` in order; the last one repeats."""

    protocol_version = "HTTP/1.1"
    answers: ClassVar[list[tuple[int, bytes]]]
    requests: ClassVar[list[tuple[str, str, Message, bytes]]]

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append((self.command, self.path, self.headers, body))
        status, answer_body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer_body)))
        self.end_headers()
        self.wfile.write(answer_body)

    do_POST = do_GET  # noqa: N815  the server's own name
    do_PATCH = do_GET  # noqa: N815  the server's own name

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def environment(endpoint: str, *services: str, **more: str) -> dict[str, str]:
    names = services or ("IAM", "STORAGE", "CLOUDRESOURCEMANAGER", "SERVICEUSAGE", "AIPLATFORM", "ARTIFACTREGISTRY")
    return {
        **{f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": endpoint for name in names},
        "CLOUDSDK_AUTH_ACCESS_TOKEN": "token",
        "GOOGLE_CLOUD_PROJECT": "acme",
        **more,
    }


@pytest.fixture
def answering(endpoint: str) -> Google:
    Answering.answers, Answering.requests = [(200, b"{}")], []
    return Google(FakeClock(), environment(endpoint))


def told(code: int, status: str, message: str, *details: Mapping[str, Any], **more: Any) -> tuple[int, bytes]:
    error = {"code": code, "status": status, "message": message, "details": list(details), **more}
    return code, json.dumps({"error": error}).encode()


def older(code: int, reason: str, message: str) -> tuple[int, bytes]:
    row = {"domain": "global", "reason": reason, "message": message}
    return code, json.dumps({"error": {"code": code, "message": message, "errors": [row]}}).encode()


def info(reason: str, **metadata: str) -> dict[str, Any]:
    return {"@type": INFO, "reason": reason, "domain": "googleapis.com", "metadata": metadata}


REFUSALS = [
    (
        told(429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'CPUs'"),
        Retryable,
        "or a quota is used up.*CPUs",
    ),
    (told(503, "UNAVAILABLE", "later"), Retryable, "Google is busy"),
    ((502, b"<html>Bad Gateway</html>"), Retryable, "Bad Gateway"),
    (older(403, "rateLimitExceeded", "too fast"), Retryable, "Google is busy"),
    (
        told(403, "PERMISSION_DENIED", "Permission 'iam.roles.create' denied on resource 'x' (or it may not exist)."),
        Unauthorized,
        r"lack the permission iam\.roles\.create: iam POST",
    ),
    (
        told(403, "PERMISSION_DENIED", "no", info("IAM_PERMISSION_DENIED", permission="iam.serviceAccounts.actAs")),
        Unauthorized,
        r"lack the permission iam\.serviceAccounts\.actAs",
    ),
    (
        older(403, "forbidden", "a@b.c does not have storage.buckets.create access to the Google Cloud project."),
        Unauthorized,
        r"lack the permission storage\.buckets\.create:",
    ),
    (told(403, "PERMISSION_DENIED", "The caller does not have permission"), Unauthorized, "lack the permission: iam"),
    (
        told(403, "PERMISSION_DENIED", "off", info("SERVICE_DISABLED", service="iam.googleapis.com")),
        Disabled,
        "iam.googleapis.com is not enabled in the project acme: `skerry apply` enables.*gcloud services enable iam.goo",
    ),
    (older(403, "accessNotConfigured", "off"), Disabled, "gcloud services enable iam.googleapis.com --project acme"),
    (told(403, "PERMISSION_DENIED", "no billing", info("BILLING_DISABLED")), Invalid, "Google refuses: .*no billing"),
    (told(401, "UNAUTHENTICATED", "expired"), Unauthorized, "no valid credentials of Google Cloud"),
    (told(404, "NOT_FOUND", "Unknown service account"), Absent, "does not exist: iam POST v1/x: NOT_FOUND: Unknown"),
    (told(409, "ALREADY_EXISTS", "Requested entity already exists"), Conflict, "exists already"),
    (told(409, "ABORTED", "There were concurrent policy changes."), Conflict, "was changed meanwhile"),
    (older(412, "conditionNotMet", "Precondition Failed"), Conflict, "was changed meanwhile"),
    (
        told(
            400,
            "INVALID_ARGUMENT",
            "Invalid JSON payload",
            {"@type": BAD, "fieldViolations": [{"field": "account_id", "description": "too short"}]},
        ),
        Invalid,
        "Google refuses: iam POST v1/x: INVALID_ARGUMENT: Invalid JSON payload; account_id: too short",
    ),
    (told(400, "FAILED_PRECONDITION", "not yet"), Invalid, "not yet"),
    (told(501, "UNIMPLEMENTED", "never"), Invalid, "never"),
]


@pytest.mark.parametrize(("answer", "error", "text"), REFUSALS)
def test_refusal_selects_the_error_type(
    answering: Google, answer: tuple[int, bytes], error: type[SkerryError], text: str
) -> None:
    Answering.answers = [answer]
    with pytest.raises(error, match=text) as caught:
        answering.call("iam", "POST", "v1/x", body={})
    assert type(caught.value) is error


def off(consumer: str, service: str = "iam") -> tuple[int, bytes]:
    return told(
        403,
        "PERMISSION_DENIED",
        f"The {service}.googleapis.com API requires a quota project, which is not set by default.",
        info("SERVICE_DISABLED", service=f"{service}.googleapis.com", consumer=f"projects/{consumer}"),
    )


PROJECT = (200, b'{"projectId": "acme", "name": "projects/415104041262"}')
COUNTED = (
    r"counted for the project {}, which is not acme; iam\.googleapis\.com is not enabled there: run `gcloud auth "
    r"application-default set-quota-project acme`, or set GOOGLE_CLOUD_QUOTA_PROJECT=acme; .* serviceusage.services.use"
)


@pytest.mark.parametrize("consumer", ["764086051850", "999999999999"])
def test_service_disabled_in_the_quota_project_is_invalid(answering: Google, consumer: str) -> None:
    """User logins without a quota project, or with another one, get this answer."""
    Answering.answers = [off(consumer), PROJECT] if consumer.startswith("9") else [off(consumer)]
    answering.enabled("iam")
    with pytest.raises(Invalid, match=COUNTED.format(consumer)) as caught:
        answering.call("iam", "GET", "v1/x")
    assert type(caught.value) is Invalid
    assert isinstance(answering.clock, FakeClock)
    assert answering.clock.pauses == []


@pytest.mark.parametrize("consumer", ["415104041262", "acme"])
def test_service_disabled_in_our_project_is_disabled(answering: Google, consumer: str) -> None:
    Answering.answers = [off(consumer), PROJECT]
    with pytest.raises(Disabled, match=r"iam.googleapis.com is not enabled in the project acme.*--project acme`$"):
        answering.call("iam", "GET", "v1/x")


def test_unknown_project_number_names_both_remedies(answering: Google) -> None:
    Answering.answers = [off("999999999999", "cloudresourcemanager"), off("999999999999", "serviceusage")]
    with pytest.raises(Disabled, match=r"serviceusage.googleapis.com is not enabled .*; if 999999999999 is not the n"):
        answering.identity()
    Answering.answers = [off("764086051850", "cloudresourcemanager")]
    with pytest.raises(Invalid, match=r"calls are counted for the project 764086051850, which is not acme"):
        answering.identity()


def test_token_uses_the_quota_project(endpoint: str) -> None:
    Answering.answers, Answering.requests = [(200, b"{}")], []
    for more in ({}, {"GOOGLE_CLOUD_QUOTA_PROJECT": "acme"}):
        Google(FakeClock(), environment(endpoint, **more)).call("iam", "GET", "v1/x")
    assert [headers["x-goog-user-project"] for _, _, headers, _ in Answering.requests] == [None, "acme"]


def test_refusal_is_available_from_the_error(answering: Google) -> None:
    Answering.answers = [told(404, "NOT_FOUND", "nothing")]
    with pytest.raises(Absent) as caught:
        answering.call("iam", "GET", "v1/x")
    answer_body = refused(caught.value)
    assert answer_body is not None
    assert (answer_body.http, answer_body.status, answer_body.message) == (404, "NOT_FOUND", "nothing")
    assert refused(ValueError("x")) is None


def test_busy_service_is_retried(answering: Google) -> None:
    Answering.answers = [(503, b""), told(429, "RESOURCE_EXHAUSTED", "slow"), (200, b'{"name": "x"}')]
    assert answering.call("iam", "GET", "v1/x") == {"name": "x"}
    assert isinstance(answering.clock, FakeClock)
    assert answering.clock.pauses == sorted(answering.clock.pauses)
    assert len(answering.clock.pauses) == 2
    Answering.answers = [(503, b"")]
    Answering.requests.clear()
    with pytest.raises(Retryable):
        answering.call("iam", "GET", "v1/x")
    assert len(Answering.requests) == 5


@pytest.mark.parametrize(
    "answer",
    [
        told(429, "RESOURCE_EXHAUSTED", "slow", info("RATE_LIMIT_EXCEEDED")),
        told(429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Writes' and limit 'Writes per minute'"),
        older(429, "rateLimitExceeded", "The rate of change requests to the bucket exceeds the rate limit."),
    ],
)
def test_rate_limit_is_retried_for_minutes(answering: Google, answer: tuple[int, bytes]) -> None:
    Answering.answers = [answer] * 10 + [(200, b'{"name": "x"}')]
    assert answering.call_once("iam", "POST", "v1/x", body={}) == {"name": "x"}
    assert isinstance(answering.clock, FakeClock)
    assert 60 < sum(answering.clock.pauses) < 150
    Answering.answers = [answer]
    began = answering.clock.now()
    with pytest.raises(Retryable):
        answering.call("iam", "GET", "v1/x")
    assert 120 < answering.clock.now() - began < 200


@pytest.mark.parametrize(
    ("answer", "requests"),
    [
        ((503, b""), 1),
        ((500, b""), 1),
        (told(429, "RESOURCE_EXHAUSTED", "slow"), 5),
        (told(409, "ALREADY_EXISTS", "there"), 1),
    ],
)
def test_call_once_repeats_only_throttled_requests(answering: Google, answer: tuple[int, bytes], requests: int) -> None:
    Answering.answers = [answer]
    with pytest.raises(SkerryError):
        answering.call_once("aiplatform", "POST", "v1/projects/p/locations/us-east1/customJobs", body={})
    assert len(Answering.requests) == requests


def test_call_once_repeats_unsent_requests() -> None:
    clock = FakeClock()
    google = Google(clock, environment("http://127.0.0.1:9"))
    with pytest.raises(Retryable, match="no answer from Google: iam"):
        google.call_once("iam", "POST", "v1/x", body={})
    assert len(clock.pauses) == 4


def test_lost_answer_is_repeated_only_by_call(sandbox: GoogleSandbox) -> None:
    path = f"v1/projects/{sandbox.project}/serviceAccounts"
    body = {"accountId": "skerry-lost", "serviceAccount": {"displayName": "x"}}
    google = Google(FakeClock(), sandbox.environment)
    sandbox.fail(how="lost_reply")
    with pytest.raises(Conflict):
        google.call("iam", "POST", path, body=body)
    sandbox.fail(how="lost_reply")
    with pytest.raises(Retryable):
        google.call_once("iam", "POST", path, body={**body, "accountId": "skerry-once"})
    assert len([call for call in sandbox.calls if call.name == "iam.projects.serviceAccounts.create"]) == 3


def test_malformed_answer_is_retried(answering: Google) -> None:
    Answering.answers = [(200, b"<html>"), (200, b"{}")]
    assert answering.call("iam", "GET", "v1/x") == {}
    Answering.answers = [(200, b"<html>")]
    with pytest.raises(Retryable, match="not JSON"):
        answering.call("iam", "GET", "v1/x")


def test_request_is_sent_unchanged(answering: Google) -> None:
    answering.call(
        "storage", "PATCH", "storage/v1/b/x%2Fy", body={"a": [1]}, query={"project": "p", "names": ["a", "b"]}
    )
    ((method, path, headers, body),) = Answering.requests
    assert (method, path) == ("PATCH", "/storage/v1/b/x%2Fy?project=p&names=a&names=b")
    assert (headers["Authorization"], json.loads(body)) == ("Bearer token", {"a": [1]})
    answering.call("iam", "GET", "v1/y")
    assert Answering.requests[1][3] == b""


def test_listing_reads_all_pages(answering: Google) -> None:
    Answering.answers = [(200, b'{"items": [1, 2], "nextPageToken": "t=1"}'), (200, b'{"nextPageToken": "2"}')]
    Answering.answers.append((200, b'{"items": [3]}'))
    assert list(answering.pages("iam", "v1/x", "items", query={"pageSize": "2"})) == [1, 2, 3]
    assert [path for _, path, _, _ in Answering.requests] == [
        "/v1/x?pageSize=2",
        "/v1/x?pageSize=2&pageToken=t%3D1",
        "/v1/x?pageSize=2&pageToken=2",
    ]


def test_listing_by_post_has_its_token_in_the_body(answering: Google) -> None:
    Answering.answers = [(200, b'{"entries": [1], "nextPageToken": "t"}'), (200, b"{}")]
    assert list(answering.pages("iam", "v2/entries:list", "entries", body={"filter": "x"})) == [1]
    bodies = [json.loads(body) for _, _, _, body in Answering.requests]
    assert bodies == [{"filter": "x"}, {"filter": "x", "pageToken": "t"}]


def test_finished_operation_returns_its_response(answering: Google) -> None:
    running, done = {"name": "operations/1"}, {"name": "operations/1", "done": True, "response": {"a": 1}}
    Answering.answers = [(200, json.dumps(running).encode()), (200, json.dumps(done).encode())]
    assert answering.finished("iam", running, "x is made") == {"a": 1}
    assert answering.finished("iam", done, "x is made") == {"a": 1}
    assert [path for _, path, _, _ in Answering.requests] == ["/v1/operations/1"] * 2


@pytest.mark.parametrize(
    ("code", "error"),
    [(5, Absent), (6, Conflict), (7, Unauthorized), (8, Retryable), (3, Invalid), (10, Conflict), (13, Retryable)],
)
def test_failed_operation_raises_its_error(answering: Google, code: int, error: type[SkerryError]) -> None:
    failed = {"name": "operations/1", "done": True, "error": {"code": code, "message": "because"}}
    with pytest.raises(error, match="because"):
        answering.finished("iam", failed, "x is made")


def test_operation_that_times_out_names_its_condition(answering: Google) -> None:
    Answering.answers = [(200, b'{"name": "operations/1"}')]
    with pytest.raises(NotYetVisible, match="timed out after 300 s, waiting until x is made"):
        answering.finished("iam", {"name": "operations/1"}, "x is made")


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


def test_missing_library_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.auth.transport.requests", None)
    with pytest.raises(Invalid, match=r"pip install 'skerry\[gcp\]'"):
        Google(FakeClock(), {"GOOGLE_CLOUD_PROJECT": "acme"}).identity()


def test_identity_is_read_once(sandbox: GoogleSandbox, listener: Listener) -> None:
    google = Google(FakeClock(), sandbox.environment, heard=listener.heard)
    identities: list[Identity] = []
    threads = [threading.Thread(target=lambda: identities.append(google.identity())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(identities) == {Identity(project=sandbox.project, number=sandbox.number, principal="the token's owner")}
    assert len(listener.calls) == 1


def test_project_number_needs_no_resource_manager(sandbox: GoogleSandbox) -> None:
    google = Google(FakeClock(), sandbox.environment)
    path = f"v1/projects/{sandbox.project}/services/cloudresourcemanager.googleapis.com:disable"
    google.call("serviceusage", "POST", path, body={})
    assert google.identity().number == sandbox.number


@pytest.mark.parametrize(
    ("given", "service", "path", "told_"),
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
def test_endpoint_comes_from_the_variables_of_gcloud(given: str, service: str, path: str, told_: str) -> None:
    variables = {f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service.upper()}": given} if given else {}
    assert Google(FakeClock(), variables).endpoint(service, path) == told_


def test_registry_content_is_fetched_with_the_credentials(endpoint: str, answering: Google) -> None:
    Answering.answers = [(503, b""), (200, b"bytes")]
    assert answering.fetched(f"{endpoint}/v2/a/b/manifests/1", "application/x") == b"bytes"
    _, path, headers, _ = Answering.requests[1]
    assert (path, headers["Accept"], headers["Authorization"]) == (
        "/v2/a/b/manifests/1",
        "application/x",
        "Bearer token",
    )
    Answering.answers = [(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')]
    with pytest.raises(Absent, match="MANIFEST_UNKNOWN"):
        answering.fetched(f"{endpoint}/v2/a/b/manifests/2", "x")


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


def test_importing_the_package_imports_no_library() -> None:
    names = sorted(path.stem for path in (ROOT / "infra/skerry/infra/clouds/google").glob("[a-z]*.py"))
    modules = [f"skerry.infra.clouds.google.{name}" for name in names] + ["skerry.infra.clouds.cross_cloud"]
    assert "skerry.infra.clouds.google.session" in modules
    loaded = "sys.exit(any(name in sys.modules for name in ('google.auth', 'requests', 'boto3', 'botocore')))"
    program = f"import sys\nfor name in {modules!r}: __import__(name)\n{loaded}"
    path = f"{ROOT / 'runtime'}:{ROOT / 'infra'}"
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, check=True, timeout=60)
