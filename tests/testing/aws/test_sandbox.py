"""The AWS sandbox: recorded calls, injected faults, enforced rights, and a clean close."""

from __future__ import annotations

import http.client
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from moto import settings
from moto.batch.models import Job
from tests.support.batchplace import ECS_TASKS, allow, make_place, make_role, refused, trust

from skerry.runtime.errors import Invalid
from skerry.runtime.store import open_store
from skerry.testing.aws.container_role_keys import role_keys
from skerry.testing.job_runner import StartRefused
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def enforcing() -> Iterator[Sandbox]:
    with Sandbox(enforce_iam=True) as sandbox:
        yield sandbox


def assumed(role: str) -> dict[str, str]:
    """The keys that ECS would give to a task of this role."""
    return {name.lower(): value for name, value in role_keys(role, "test", "us-east-1").items()}


def test_calls_record_caller_parameters_and_status(skerry_sandbox: Sandbox) -> None:
    s3 = skerry_sandbox.client("s3")
    s3.create_bucket(Bucket="run")
    s3.put_object(Bucket="run", Key="a/b", Body=b"x" * 1000, IfNoneMatch="*")
    assert refused(s3.put_object, Bucket="run", Key="a/b", Body=b"y", IfNoneMatch="*") == "PreconditionFailed"
    s3.list_objects_v2(Bucket="run", Prefix="a/")
    make_role(skerry_sandbox, "own")
    skerry_sandbox.client("logs").describe_log_groups()
    calls = list(skerry_sandbox.calls)
    assert [(call.name, call.status, call.writes) for call in calls] == [
        ("s3:CreateBucket", 200, True),
        ("s3:PutObject", 200, True),
        ("s3:PutObject", 412, True),
        ("s3:ListObjectsV2", 200, False),
        ("iam:CreateRole", 200, True),
        ("logs:DescribeLogGroups", 200, False),
    ]
    assert {call.caller for call in calls} == {"user/operator"}
    assert calls[1].params["Key"] == "a/b"
    assert calls[1].params["IfNoneMatch"] == "*"
    assert calls[3].params["Prefix"] == "a/"
    assert calls[4].params["RoleName"] == "own"
    assert len(skerry_sandbox.calls.writes) == 4


def test_writes_include_every_caller_except_containers(skerry_sandbox: Sandbox) -> None:
    role = make_role(skerry_sandbox, "replica")
    skerry_sandbox.client("s3").create_bucket(Bucket="run")
    skerry_sandbox.calls.clear()
    other_user = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
    for keys in (other_user, assumed(role)):
        skerry_sandbox.client("s3", **keys).put_object(Bucket="run", Key="a")
    assert [call.caller for call in skerry_sandbox.calls] == ["anonymous", "role/replica"]
    assert [call.caller for call in skerry_sandbox.calls.writes] == ["anonymous"]


def test_calls_of_batch_are_read_with_their_parameters(skerry_sandbox: Sandbox) -> None:
    place = make_place(skerry_sandbox)
    definition = place.define()
    skerry_sandbox.calls.clear()
    job = place.submit(definition, "job-a", tags={"skerry:run": "s3://b/r"})
    place.batch.list_tags_for_resource(resourceArn=place.job(job)["jobArn"])
    submitted, *reading = skerry_sandbox.calls
    assert (submitted.name, submitted.params["jobName"]) == ("batch:SubmitJob", "job-a")
    assert [call.name for call in reading] == ["batch:DescribeJobs", "batch:ListTagsForResource"]
    assert skerry_sandbox.calls.writes == [submitted]


def test_the_environment_is_all_that_a_store_needs(skerry_sandbox: Sandbox) -> None:
    skerry_sandbox.client("s3").create_bucket(Bucket="run")
    store = open_store("s3://run/tiny")
    assert store.create("state/1.json", b"{}")
    assert not store.create("state/1.json", b"[]")
    assert store.read("state/1.json") == b"{}"
    assert skerry_sandbox.inventory() == {"bucket": ("run",)}


def test_reset_keeps_the_operator_and_removes_batch(skerry_sandbox: Sandbox) -> None:
    place = make_place(skerry_sandbox)
    place.submit(place.define())
    skerry_sandbox.reset()
    assert skerry_sandbox.inventory() == {}
    assert skerry_sandbox.client("sts").get_caller_identity()["Arn"].endswith(":user/operator")
    make_place(skerry_sandbox)


def test_inventory_lists_what_was_created_and_nothing_of_aws(skerry_sandbox: Sandbox) -> None:
    assert skerry_sandbox.inventory() == {}
    place = make_place(skerry_sandbox)
    job = place.submit(place.define())
    ec2 = skerry_sandbox.client("ec2")
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    ec2.create_security_group(GroupName="ours", Description="-", VpcId=vpc)
    ec2.create_launch_template(LaunchTemplateName="ours", LaunchTemplateData={"ImageId": "ami-1"})
    skerry_sandbox.client("logs").create_log_group(logGroupName="/skerry/run")
    skerry_sandbox.client("ecr").create_repository(repositoryName="team/skerry")
    assert skerry_sandbox.inventory() == {
        "compute environment": ("spot",),
        "instance profile": ("machine",),
        "job": ("job",),
        "job definition": ("work:1",),
        "job queue": ("queue",),
        "launch template": ("ours",),
        "log group": ("/skerry/run",),
        "repository": ("team/skerry",),
        "role": ("machine",),
        "security group": ("ours",),
    }
    place.batch.terminate_job(jobId=job, reason="over")
    place.batch.deregister_job_definition(jobDefinition="work:1")
    assert not {"job", "job definition"} & skerry_sandbox.inventory().keys()


@pytest.mark.parametrize(
    ("service", "call", "code"),
    [
        ("s3", lambda client: client.create_bucket(Bucket="run"), "SlowDown"),
        ("iam", lambda client: client.create_role(RoleName="r", AssumeRolePolicyDocument="{}"), "Throttling"),
        ("logs", lambda client: client.create_log_group(logGroupName="g"), "ThrottlingException"),
        ("batch", lambda client: client.deregister_job_definition(jobDefinition="a:1"), "TooManyRequestsException"),
        ("ec2", lambda client: client.delete_security_group(GroupId="sg-1"), "RequestLimitExceeded"),
    ],
)
def test_each_service_throttles_and_denies_in_its_own_words(
    skerry_sandbox: Sandbox, service: str, call: Any, code: str
) -> None:
    client = skerry_sandbox.client(service)
    skerry_sandbox.fail(how="throttle")
    assert refused(lambda: call(client)) == code
    skerry_sandbox.fail(how="deny")
    assert refused(lambda: call(client)) in {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation"}
    assert skerry_sandbox.inventory() == {}


def test_unsupported_operation_is_501_with_its_name(skerry_sandbox: Sandbox) -> None:
    quotas = skerry_sandbox.client("iam")
    assert refused(quotas.simulate_principal_policy, PolicySourceArn="arn:aws:iam::1:user/u", ActionNames=["a:B"]) == (
        "NotImplemented"
    )


def test_rights_are_checked_from_the_first_call_on(enforcing: Sandbox) -> None:
    s3 = enforcing.client("s3")
    s3.create_bucket(Bucket="run")
    own = {"Action": ["s3:GetObject", "s3:PutObject"], "Resource": "arn:aws:s3:::run/tiny/*"}
    listing = {
        "Action": "s3:ListBucket",
        "Resource": "arn:aws:s3:::run",
        "Condition": {"StringLike": {"s3:prefix": "tiny/*"}},
    }
    role = make_role(enforcing, "replica", policy=allow(own, listing))
    foreign = enforcing.client("s3", **assumed(role))
    foreign.put_object(Bucket="run", Key="tiny/a", Body=b"1")
    assert foreign.get_object(Bucket="run", Key="tiny/a")["Body"].read() == b"1"
    foreign.head_object(Bucket="run", Key="tiny/a")
    foreign.list_objects_v2(Bucket="run", Prefix="tiny/x")
    assert refused(foreign.list_objects_v2, Bucket="run", Prefix="other/") == "AccessDenied"
    assert refused(foreign.put_object, Bucket="run", Key="other/a") == "AccessDenied"
    assert refused(foreign.delete_object, Bucket="run", Key="tiny/a") == "AccessDenied"
    assert refused(enforcing.client("iam", **assumed(role)).list_roles) == "AccessDenied"
    assert refused(enforcing.client("s3", aws_access_key_id="AKIAX", aws_secret_access_key="x").list_buckets)  # noqa: S106  unknown key


def test_role_keys_require_a_trust_policy_for_the_service(enforcing: Sandbox) -> None:
    role = make_role(enforcing, "replica")
    assume = enforcing.client("sts").assume_role
    assert refused(assume, RoleArn=role, RoleSessionName="test") == "AccessDenied"
    machine = make_role(enforcing, "machine", "ec2.amazonaws.com")
    with pytest.raises(StartRefused, match="does not allow ecs-tasks"):
        role_keys(machine, "test", "us-east-1")
    with pytest.raises(StartRefused, match="it does not exist"):
        role_keys(f"{role}-gone", "test", "us-east-1")


def test_a_role_s_trust_may_name_the_account(skerry_sandbox: Sandbox) -> None:
    role = make_role(skerry_sandbox, "replica")
    for account in (skerry_sandbox.account, "999999999999"):
        trusting = json.loads(trust(ECS_TASKS))
        trusting["Statement"][0]["Condition"] = {"StringEquals": {"aws:SourceAccount": account}}
        skerry_sandbox.client("iam").update_assume_role_policy(RoleName="replica", PolicyDocument=json.dumps(trusting))
        if account == skerry_sandbox.account:
            assert role_keys(role, "test", "us-east-1")
        else:
            with pytest.raises(StartRefused):
                role_keys(role, "test", "us-east-1")


def test_unsigned_requests_are_denied(enforcing: Sandbox) -> None:
    import boto3  # noqa: PLC0415
    from botocore import UNSIGNED  # noqa: PLC0415  for this test only
    from botocore.config import Config  # noqa: PLC0415

    enforcing.client("s3").create_bucket(Bucket="run")
    unsigned = boto3.client(
        "s3", endpoint_url=enforcing.endpoint, region_name="us-east-1", config=Config(signature_version=UNSIGNED)
    )
    assert refused(unsigned.put_object, Bucket="run", Key="a") == "AccessDenied"


def test_second_sandbox_is_refused_and_close_leaves_nothing() -> None:
    start, before = Job.start, set(threading.enumerate())
    sandbox = Sandbox(enforce_iam=True)
    with pytest.raises(Invalid, match="already running"):
        Sandbox()
    make_place(sandbox)
    sandbox.close()
    sandbox.close()
    assert Job.start is start
    assert float("inf") == settings.INITIAL_NO_AUTH_ACTION_COUNT
    for thread in set(threading.enumerate()) - before:  # those of connections end soon after these
        thread.join(60)
        assert not thread.is_alive()
    with pytest.raises(LookupError, match="unknown shim: nonsense"):
        Sandbox(without={"nonsense"})
    with Sandbox() as again:
        assert again.inventory() == {}
        assert json.loads(json.dumps(dict(again.environment)))["AWS_ENDPOINT_URL"] == again.endpoint


def test_connection_stays_open_until_the_sandbox_ends() -> None:
    with Sandbox() as sandbox:
        connection = http.client.HTTPConnection(sandbox.endpoint.removeprefix("http://"))
        connection.connect()
        connection.auto_open = 0
        for body in (b"a body that nothing reads", b""):
            connection.request("PUT", "/acme-skerry", body, {"Expect": "100-continue"})
            connection.getresponse().read()
    assert connection.sock.recv(1) == b""
    connection.close()
