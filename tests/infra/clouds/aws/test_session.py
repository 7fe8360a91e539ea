"""Calls to AWS: translation of errors, retries, credentials and listings."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
from botocore.awsrequest import AWSResponse
from tests.infra.clouds.answering import Answers, at_once
from tests.infra.clouds.aws.account import ACCOUNT, REGION, environment
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.errors import Kind, action_of, kind_of
from skerry.infra.clouds.aws.session import Aws, Login, code_of
from skerry.infra.clouds.handler_helpers import Absent
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


@pytest.fixture(scope="module")
def server() -> Iterator[Answers]:
    with Answers() as answers:
        yield answers


def session(server: Answers, attempts: int = 1) -> Aws:
    return Aws(FakeClock(), environment(server.endpoint, AWS_MAX_ATTEMPTS=str(attempts)))


def refusal(status: int, code: str, message: str = "") -> tuple[int, bytes]:
    text = f"<ErrorResponse><Error><Code>{code}</Code><Message>{message}</Message></Error></ErrorResponse>"
    return status, text.encode()


def create_role(call: Callable[..., object]) -> object:
    return call("iam", "", "create_role", RoleName="x", AssumeRolePolicyDocument="{}")


@pytest.mark.parametrize(
    ("status", "code", "message", "error", "text"),
    [
        (400, "Throttling", "Rate exceeded", Retryable, "AWS is busy: iam:CreateRole: Throttling"),
        (503, "ServiceUnavailable", "", Retryable, "AWS is busy"),
        (500, "Unheard", "of", Retryable, "AWS is busy"),
        (409, "ConcurrentModification", "", Retryable, "AWS is busy"),
        (403, "AccessDenied", "", Unauthorized, "lack the permission iam:CreateRole"),
        (
            403,
            "AccessDenied",
            "User: x is not authorized to perform: iam:PassRole on resource: y",
            Unauthorized,
            "lack the permission iam:PassRole:",
        ),
        (403, "ExpiredToken", "The security token is expired", Unauthorized, "have expired.*log in again"),
        (403, "InvalidClientTokenId", "", Unauthorized, "not valid"),
        (404, "NoSuchEntity", "The role x cannot be found.", Absent, "iam:CreateRole: NoSuchEntity: The role x"),
        (409, "EntityAlreadyExists", "Role x", Conflict, "exists already"),
        (409, "DeleteConflict", "", Conflict, "in use"),
        (409, "LimitExceeded", "Cannot exceed 1000", Invalid, "AWS refuses: iam:CreateRole: LimitExceeded: Cannot"),
        (400, "MalformedPolicyDocument", "bad", Invalid, "iam:CreateRole: MalformedPolicyDocument: bad"),
    ],
)
def test_error_code_selects_the_error_type(
    server: Answers, status: int, code: str, message: str, error: type[SkerryError], text: str
) -> None:
    server.give(refusal(status, code, message))
    with pytest.raises(error, match=text) as caught:
        create_role(session(server).call)
    assert type(caught.value) is error
    assert code_of(caught.value) == code


def test_busy_service_is_retried(server: Answers) -> None:
    server.give(refusal(503, "ServiceUnavailable"))
    with pytest.raises(Retryable):
        session(server, attempts=2).call("iam", "", "list_roles")
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("status", "code", "requests"),
    [(503, "ServiceUnavailable", 1), (500, "InternalFailure", 1), (400, "Throttling", 3), (429, "Unheard", 1)],
)
def test_call_once_repeats_only_throttled_requests(server: Answers, status: int, code: str, requests: int) -> None:
    server.give(refusal(status, code, "Rate exceeded"))
    with pytest.raises(Retryable):
        create_role(session(server, attempts=3).call_once)
    assert len(server.requests) == requests


@pytest.mark.parametrize(("once", "pauses"), [(False, 0), (True, 2)])
def test_unsent_requests_are_retryable_and_repeated_by_call_once(once: bool, pauses: int) -> None:  # noqa: FBT001
    clock = FakeClock()
    aws = Aws(clock, environment("http://127.0.0.1:9", AWS_MAX_ATTEMPTS="3" if once else "1"))
    with pytest.raises(Retryable, match="no answer from AWS's iam: iam:CreateRole"):
        create_role(aws.call_once if once else aws.call)
    assert len(clock.pauses) == pauses


def test_invalid_parameters_are_not_sent(server: Answers) -> None:
    server.give((200, b""))
    with pytest.raises(Invalid, match="cannot call AWS: iam:CreateRole"):
        session(server).call("iam", "", "create_role", RoleName="x")
    assert server.requests == []


def test_malformed_answer_is_retryable(server: Answers) -> None:
    server.give((200, b"<ErrorResponse><Error><Code><"))
    with pytest.raises(Retryable, match="no answer"):
        session(server).call("iam", "", "list_roles")


def test_missing_credentials_are_unauthorized(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(Unauthorized, match=r"no AWS credentials for sts:GetCallerIdentity.*AWS_PROFILE"):
        Aws(FakeClock(), {"AWS_DEFAULT_REGION": REGION}).identity()


@pytest.mark.parametrize("written", ["0", "many", "-1"])
def test_malformed_number_of_attempts_is_refused(written: str) -> None:
    with pytest.raises(Invalid, match="AWS_MAX_ATTEMPTS is"):
        Aws(FakeClock(), {"AWS_MAX_ATTEMPTS": written}).identity()


def test_missing_profile_is_named() -> None:
    with pytest.raises(Invalid, match="nobodys-profile"):
        Aws(FakeClock(), {"AWS_PROFILE": "nobodys-profile"}).identity()


def test_profile_of_a_login_replaces_one_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("[profile prod]\nregion = cn-north-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "nobodys-profile")
    assert Aws(FakeClock(), os.environ, Login(profile="prod")).partition("cn-north-1") == "aws-cn"


@pytest.mark.parametrize("account", ["123456789012", "210987654321"])
def test_keys_that_are_replaced_in_their_file_are_read_again(
    server: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, account: str
) -> None:
    """Some tools write temporary keys into a profile every hour, of the account to which a person logs in."""
    file = tmp_path / "credentials"
    text = "[prod]\naws_access_key_id = {}\naws_secret_access_key = x\n"
    file.write_text(text.format("OLD"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    clock = FakeClock()
    aws = Aws(clock, environment(server.endpoint), Login(profile="prod"))
    credentials = aws.store_credentials()
    assert credentials is not None
    server.give(caller_in("123456789012"))
    aws.identity()

    def keys() -> set[str]:
        server.requests.clear()
        aws.call("sts", "", "get_caller_identity")
        used = server.requests[-1][2]["authorization"].partition("Credential=")[2].partition("/")[0]
        return {used, credentials()["access_key_id"]}

    assert keys() == {"OLD"}
    file.write_text(text.format("NEW"))
    assert keys() == {"OLD"}
    clock.pause(60)
    server.give(caller_in(account))
    if account == "123456789012":
        assert keys() == {"NEW"}
    else:
        with pytest.raises(Unauthorized, match=f"of aws account {account} now, not of 123456789012; log in"):
            keys()
        assert keys() == {"OLD"}


def caller_in(account: str) -> tuple[int, bytes]:
    row = f"<Arn>arn:aws:iam::{account}:user/ada</Arn><UserId>x</UserId><Account>{account}</Account>"
    name = "GetCallerIdentity"
    return 200, f"<{name}Response><{name}Result>{row}</{name}Result></{name}Response>".encode()


def test_profile_of_a_login_without_keys_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    session_ = "[sso-session s]\nsso_region = us-east-1\nsso_start_url = https://acme.example/start\n"
    profile = "[profile prod]\nsso_session = s\nsso_account_id = 123456789012\nsso_role_name = x\n"
    (tmp_path / "config").write_text(profile + session_)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    aws = Aws(FakeClock(), {}, Login(profile="prod", profile_place="aws.profile (spec:3:4)"))
    with pytest.raises(Unauthorized, match=r"aws\.profile \(spec:3:4\) has none: run `aws sso login --profile prod`"):
        aws.identity()


def test_region_comes_from_environment_or_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text("[profile north]\nregion = cn-north-1\n\n[profile nowhere]\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert Aws(FakeClock(), {"AWS_PROFILE": "north"}).region() == "cn-north-1"
    assert Aws(FakeClock(), {"AWS_PROFILE": "north", "AWS_REGION": REGION}).region() == REGION
    assert Aws(FakeClock(), {"AWS_PROFILE": "nowhere"}).region() is None


@pytest.mark.parametrize(
    ("partition", "region"), [("aws", "us-east-1"), ("aws-cn", "cn-north-1"), ("aws-us-gov", "us-gov-east-1")]
)
def test_partition_of_the_role_has_its_own_region(server: Answers, partition: str, region: str) -> None:
    server.give(refusal(403, "AccessDenied"))
    regions: list[str] = []
    variables = environment(server.endpoint, AWS_MAX_ATTEMPTS="1")
    without = {name: value for name, value in variables.items() if "REGION" not in name}
    role = Login(role=f"arn:{partition}:iam::123456789012:role/deployer")
    aws = Aws(FakeClock(), without, role, client_made=lambda _, client: regions.append(client.meta.region_name))
    with pytest.raises(Unauthorized, match=r"aws\.assume_role: these credentials lack the permission sts:AssumeRole"):
        aws.identity()
    assert regions == [region, region]


def test_missing_boto3_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    for environment_ in ({}, {"AWS_REGION": REGION}):
        with pytest.raises(Invalid, match="pip install 'skerry"):
            Aws(FakeClock(), environment_).identity()


def test_identity_is_read_once(account: Mapping[str, str]) -> None:
    services: list[str] = []
    fresh = Aws(FakeClock(), account, client_made=lambda service, _client: services.append(service))
    identities = set(at_once(fresh.identity))
    assert {(identity.account, identity.partition) for identity in identities} == {(ACCOUNT, "aws")}
    assert len(identities) == 1
    assert services == ["sts"]


@pytest.mark.parametrize(
    ("region", "partition"),
    [
        ("eu-central-1", "aws"),
        ("cn-north-1", "aws-cn"),
        ("us-gov-west-1", "aws-us-gov"),
        ("us-iso-east-1", "aws-iso"),
        ("us-isob-east-1", "aws-iso-b"),
        ("eu-isoe-west-1", "aws-iso-e"),
        ("us-isof-south-1", "aws-iso-f"),
        ("eusc-de-east-1", "aws-eusc"),
        ("eu-central-9", "aws"),
    ],
)
def test_region_has_a_partition(aws: Aws, region: str, partition: str) -> None:
    assert aws.partition(region) == partition


def test_unknown_region_is_refused(aws: Aws) -> None:
    with pytest.raises(Invalid, match="Unknown region: 'moon-1'"):
        aws.partition("moon-1")


def test_service_endpoint_overrides_the_general_one(account: Mapping[str, str]) -> None:
    aws = Aws(FakeClock(), {**account, "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS": "http://127.0.0.1:9"})
    assert aws.call("iam", "", "list_roles")["Roles"] == []
    with pytest.raises(Retryable):
        aws.call("logs", REGION, "describe_log_groups")


def listed(aws: Aws) -> list[str]:
    """Of five objects, two on a page."""
    place = {"CreateBucketConfiguration": {"LocationConstraint": REGION}}
    aws.call("s3", REGION, "create_bucket", Bucket="acme-listed", **place)
    for number in range(5):
        aws.call("s3", REGION, "put_object", Bucket="acme-listed", Key=f"k{number}", Body=b"x")
    paging: dict[str, Any] = {"PaginationConfig": {"PageSize": 2}}
    rows = aws.pages("s3", REGION, "list_objects_v2", "Contents", Bucket="acme-listed", **paging)
    return [str(row["Key"]) for row in rows]


def test_listing_reads_all_pages(aws: Aws) -> None:
    assert listed(aws) == [f"k{number}" for number in range(5)]


def test_throttled_listing_resumes_at_its_position(account: Mapping[str, str]) -> None:
    requests: list[str] = []

    def throttled(model: Any, **_: object) -> tuple[AWSResponse, dict[str, Any]] | None:
        requests.append(model.name)
        if len(requests) != 3:
            return None
        error = {"Error": {"Code": "SlowDown", "Message": "Reduce your request rate."}}
        return AWSResponse("", 503, {}, None), {**error, "ResponseMetadata": {"HTTPStatusCode": 503}}

    def client_made(_service: str, client: Any) -> None:
        client.meta.events.register("before-call.s3.ListObjectsV2", throttled)

    clock = FakeClock()
    written = {name: value for name, value in account.items() if name != "AWS_MAX_ATTEMPTS"}
    assert listed(Aws(clock, written, client_made=client_made)) == [f"k{number}" for number in range(5)]
    # Two pages, the refusal, and all three from the start.
    assert (len(requests), len(clock.pauses)) == (6, 1)


def test_listing_of_a_missing_resource_is_absent(aws: Aws) -> None:
    with pytest.raises(Absent):
        list(aws.pages("iam", "", "list_attached_role_policies", "AttachedPolicies", RoleName="nobody"))


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("404", 404, Kind.ABSENT),
        ("403", 403, Kind.DENIED),
        ("AccessDeniedException", 400, Kind.DENIED),
        ("InvalidLaunchTemplateName.NotFoundException", 400, Kind.ABSENT),
        ("InvalidGroup.NotFound", 400, Kind.ABSENT),
        ("InvalidParameterValue", 400, Kind.REFUSED),
        ("DependencyViolation", 400, Kind.TAKEN),
        ("OperationAborted", 409, Kind.BUSY),
        ("UnauthorizedOperation", 403, Kind.DENIED),
        ("SignatureDoesNotMatch", 403, Kind.EXPIRED),
    ],
)
def test_error_codes_have_kinds(code: str, status: int, kind: Kind) -> None:
    assert kind_of(code, status, "") is kind


@pytest.mark.parametrize(
    ("service", "operation", "action"),
    [
        ("iam", "create_role", "iam:CreateRole"),
        ("s3", "head_bucket", "s3:ListBucket"),
        ("s3", "put_bucket_lifecycle_configuration", "s3:PutLifecycleConfiguration"),
    ],
)
def test_operation_has_its_iam_action(service: str, operation: str, action: str) -> None:
    assert action_of(service, operation) == action
