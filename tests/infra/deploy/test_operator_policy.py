"""The rights that infra/examples/operator-policy.json gives: enough for everything that skerry does, and no more.

moto knows resources of S3 and roles alone; whether the policy covers the names of all that is made is compared here.
Of its conditions the account in memory judges the owner of a bucket alone. The others (tags of a request and of what it
is for, users of a job, what is attached, to whom a role is passed) are taken out for it, and judged here of every call
that was made. Nobody judges what AWS does: that it has these keys for these actions is from its reference alone.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.deploy.account import write_spec
from typer.testing import CliRunner

from skerry.infra.cli import app
from skerry.infra.clouds.aws.codes import action_of
from skerry.infra.clouds.aws.logs import events
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.testing.calls import Call
from skerry.infra.testing.conditions import glob, holds
from skerry.infra.testing.sandbox import Sandbox
from skerry.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = pytest.mark.slow
POLICY: Final = Path(__file__).parents[3] / "infra/examples/operator-policy.json"
# What stands in the example for what a user has of his own.
EXAMPLE_BUCKET: Final = "acme-diloco"
BUCKET: Final = "acme-skerry"
# Characters of a managed policy, white space not counted (IAM quotas).
LONGEST: Final = 6144
# Rights that a call needs besides its own, or in its place (Service Authorization Reference).
TAGGING: Final = {
    "batch:CreateComputeEnvironment": "batch:TagResource",
    "batch:CreateJobQueue": "batch:TagResource",
    "batch:RegisterJobDefinition": "batch:TagResource",
    "batch:SubmitJob": "batch:TagResource",
    "ec2:CreateLaunchTemplate": "ec2:CreateTags",
    "ec2:CreateSecurityGroup": "ec2:CreateTags",
    "ecr:CreateRepository": "ecr:TagResource",
    "iam:CreateInstanceProfile": "iam:TagInstanceProfile",
    "iam:CreateRole": "iam:TagRole",
    "logs:CreateLogGroup": "logs:TagResource",
}
# To whom a call passes a role (Service Authorization Reference, "AWS Batch": iam:PassedToService).
PASSING: Final = {
    "batch:CreateComputeEnvironment": ("batch.amazonaws.com", "ec2.amazonaws.com"),
    "batch:RegisterJobDefinition": ("ecs-tasks.amazonaws.com",),
    "iam:AddRoleToInstanceProfile": ("ec2.amazonaws.com",),
}
# What a call is for, in its parameters: what made it calls it so, and what takes it away.
NAMES: Final = (
    "GroupId",
    "InstanceProfileName",
    "LaunchTemplateName",
    "RoleName",
    "computeEnvironment",
    "computeEnvironmentName",
    "jobDefinition",
    "jobDefinitionName",
    "jobId",
    "jobQueue",
    "jobQueueName",
    "logGroupName",
    "repositoryName",
)
# What needs a right for two things at once.
KINDS: Final = {"ec2:CreateSecurityGroup": (":security-group/", ":vpc/")}
TAG: Final = "skerry:run"
JUDGED_BY_MOTO: Final = {"s3:ResourceAccount"}
# Everybody may ask who he is.
FREE: Final = {"sts:GetCallerIdentity"}
# What moto asks for where AWS asks for another right.
MOTO: Final = {
    "s3:GetBucketPublicAccessBlock": "s3:GetPublicAccessBlock",
    "s3:ListBucket": "s3:HeadBucket",
    "s3:PutBucketPublicAccessBlock": "s3:PutPublicAccessBlock",
}
# What moto asks of something else than AWS: of the role and not of the profile, of the bucket and not of its objects.
MOTO_ELSEWHERE: Final = {"iam:AddRoleToInstanceProfile", "iam:RemoveRoleFromInstanceProfile", "s3:DeleteObject"}
TRUST: Final = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}],
    }
)
MORE: Final = json.dumps(
    {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:ListAllMyBuckets", "Resource": "*"}]}
)


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """An account that checks rights, in the environment of an operator who has this policy and nothing else."""
    with Sandbox(enforce_iam=True) as sandbox:
        for name, value in {**sandbox.environment, **operator(sandbox, as_moto_asks(policy()))}.items():
            monkeypatch.setenv(name, value)
        yield sandbox


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = write_spec(tmp_path, count=1)
    path.write_text(path.read_text() + "      spot: true\n")
    return str(path)


def policy() -> dict[str, Any]:
    return json.loads(POLICY.read_text().replace(EXAMPLE_BUCKET, BUCKET))


def operator(sandbox: Sandbox, document: dict[str, Any]) -> dict[str, str]:
    iam = sandbox.client("iam")
    iam.create_user(UserName="platform")
    made = iam.create_policy(PolicyName="platform", PolicyDocument=json.dumps(document))["Policy"]
    iam.attach_user_policy(UserName="platform", PolicyArn=made["Arn"])
    key = iam.create_access_key(UserName="platform")["AccessKey"]
    sandbox.calls.clear()
    return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}


def as_moto_asks(document: dict[str, Any]) -> dict[str, Any]:
    statements = [
        {**one, "Action": [*one["Action"], *(MOTO[action] for action in one["Action"] if action in MOTO)]}
        for one in map(unconditional, document["Statement"])
    ]
    granted = {action for one in document["Statement"] for action in one["Action"]}
    elsewhere = {"Effect": "Allow", "Action": sorted(granted & MOTO_ELSEWHERE), "Resource": "*"}
    return {**document, "Statement": [*statements, elsewhere]}


def unconditional(statement: dict[str, Any]) -> dict[str, Any]:
    """The statement without a condition that moto knows nothing of."""
    keys = {key for wanted in statement.get("Condition", {}).values() for key in wanted}
    return statement if keys <= JUDGED_BY_MOTO else {**statement, "Condition": {}}


def skerry(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output + result.stderr + repr(result.exception)
    return result.output + result.stderr


def meddle(sandbox: Sandbox) -> str:
    """What an apply has to put right, and what a destroy finds besides; the digest of an image."""
    there = sandbox.inventory()
    ecr, iam, ec2, s3 = (sandbox.client(service) for service in ("ecr", "iam", "ec2", "s3"))
    ecr.put_image_tag_mutability(repositoryName="skerry", imageTagMutability="MUTABLE")
    ecr.put_image_scanning_configuration(repositoryName="skerry", imageScanningConfiguration={"scanOnPush": False})
    role = next(name for name in there["role"] if name.endswith("-execution"))
    iam.update_role(RoleName=role, MaxSessionDuration=7200)
    iam.update_assume_role_policy(RoleName=role, PolicyDocument=TRUST)
    iam.put_role_policy(RoleName=role, PolicyName="more", PolicyDocument=MORE)
    groups = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": list(there["security group"])}])
    rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    ec2.authorize_security_group_ingress(GroupId=groups["SecurityGroups"][0]["GroupId"], IpPermissions=[rule])
    batch = sandbox.client("batch")
    batch.update_job_queue(jobQueue=there["job queue"][0], priority=7)
    s3.put_object(Bucket=BUCKET, Key="runs/tiny/notes.txt", Body=b"by hand")
    s3.create_multipart_upload(Bucket=BUCKET, Key="runs/tiny/payloads/large")
    kind = "application/vnd.oci.image.manifest.v1+json"
    image: dict[str, object] = {"schemaVersion": 2, "mediaType": kind, "config": {"digest": f"sha256:{'0' * 64}"}}
    image["layers"] = list[object]()
    told = ecr.put_image(repositoryName="skerry", imageManifest=json.dumps(image), imageTag="one")
    return str(told["image"]["imageId"]["imageDigest"])


def read_log(sandbox: Sandbox) -> None:
    """As `skerry logs` does once a container has written something."""
    (group,) = sandbox.inventory()["log group"]
    logs = sandbox.client("logs")
    logs.create_log_stream(logGroupName=group, logStreamName="one")
    logs.put_log_events(logGroupName=group, logStreamName="one", logEvents=[{"timestamp": 1, "message": "hello"}])
    list(events(Aws(SystemClock(), os.environ), sandbox.region, group, "one", None))


def hide_a_subnet(sandbox: Sandbox) -> str:
    """From now on machines in one of the default network's subnets would have no way out."""
    ec2 = sandbox.client("ec2")
    (subnet,) = ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": ["us-east-1a"]}])["Subnets"]
    ec2.modify_subnet_attribute(SubnetId=subnet["SubnetId"], MapPublicIpOnLaunch={"Value": False})
    return str(subnet["SubnetId"])


def everything(spec: str, sandbox: Sandbox) -> dict[str, str]:
    """The life of a run, every command of it. Returns whose is what has no name in its ARN, before it was destroyed."""
    hidden = hide_a_subnet(sandbox)
    skerry("plan", spec)
    skerry("apply", spec, "--auto-approve")
    for command in ("status", "estimate", "unlock"):
        skerry(command, spec)
    queue = sandbox.inventory()["job queue"][0]
    (job,) = sandbox.client("batch").list_jobs(jobQueue=queue, jobStatus="RUNNABLE")["jobSummaryList"]
    sandbox.batch.start(job["jobId"])
    skerry("logs", spec)
    read_log(sandbox)
    digest = meddle(sandbox)
    skerry("apply", spec, "--auto-approve")
    skerry("cancel", spec, "--auto-approve")
    skerry("apply", spec, "--auto-approve")
    image = f"image=123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry@{digest}"
    skerry("doctor", spec, "--set", image)
    skerry("doctor", spec, "--set", image, "--set", f"replicas[0].target.byo.subnets=[{hidden}]")
    groups = sandbox.client("ec2").describe_security_groups()["SecurityGroups"]
    tagged = {group["GroupId"]: tags_of(group).get(TAG, "") for group in groups}
    skerry("destroy", spec, "--yes", "--data")
    ended = [call.params["jobId"] for call in sandbox.calls if call.name == "batch:TerminateJob"]
    jobs = sandbox.client("batch").describe_jobs(jobs=ended)["jobs"]
    return tagged | {job["jobId"]: job["tags"].get(TAG, "") for job in jobs}


def needed(sandbox: Sandbox) -> set[str]:
    """The rights behind the calls that this operator made."""
    found: set[str] = set()
    for call in sandbox.calls:
        if call.caller != "user/platform":
            continue
        operation = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", call.operation).lower()
        # Its model has another name than its signatures, so that nobody tells which operation it was.
        found.add("servicequotas:GetServiceQuota" if "quotas" in call.service else action_of(call.service, operation))
        if call.name in TAGGING:
            found.add(TAGGING[call.name])
        if call.name in PASSING:
            found.add("iam:PassRole")
        if call.name == "s3:DeleteObjects":
            found.add("s3:DeleteObjectVersion")  # by their versions
    return found - FREE


def tags_of(params: Mapping[str, Any]) -> dict[str, str]:
    """The tags that a request gives, or an answer tells, however its service writes them."""
    told: Any = (
        params.get("tags")
        or params.get("Tags")
        or [tag for one in params.get("TagSpecifications", []) for tag in one.get("Tags", [])]
    )
    return told if isinstance(told, dict) else {tag["Key"]: tag["Value"] for tag in told}


def name_in(call: Call) -> str:
    """What the call is for."""
    name = next((str(call.params[key]) for key in NAMES if key in call.params), "")
    return name.rpartition("/")[2].rpartition(":")[0] if name.startswith("arn:") else name


def asked(call: Call, whose: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The rights that conditions are put on, and what is known of the request in each condition's key."""
    container = call.params.get("containerProperties", {})
    context = {
        "aws:requesttag/skerry:run": tags_of(call.params).get(TAG, ""),
        "aws:resourcetag/skerry:run": whose.get(name_in(call), ""),
        "batch:user": container.get("user", ""),
        "ec2:createaction": call.operation,
        "iam:awsservicename": call.params.get("AWSServiceName", ""),
        "iam:passedtoservice": "",
        "iam:policyarn": call.params.get("PolicyArn", ""),
        "s3:resourceaccount": "123456789012",
    }
    yield call.name, context
    if call.name in TAGGING:
        yield TAGGING[call.name], context
    for service in PASSING.get(call.name, ()):
        yield "iam:PassRole", {**context, "iam:passedtoservice": service}


def allowed(action: str, context: Mapping[str, str], document: Mapping[str, Any]) -> bool:
    """Whether a statement with this action has no condition, or one that holds, for each kind of what it is for."""
    return all(
        any(
            action in one["Action"] and kind in str(one["Resource"]) and holds(one.get("Condition", {}), context)
            for one in document["Statement"]
        )
        for kind in KINDS.get(action, ("",))
    )


def refused(sandbox: Sandbox, whose: Mapping[str, str], document: Mapping[str, Any]) -> list[str]:
    """The rights whose conditions did not hold at some call of this operator."""
    conditional = {action for one in document["Statement"] if "Condition" in one for action in one["Action"]}
    found = {
        action
        for call in sandbox.calls
        if call.caller == "user/platform"
        for action, context in asked(call, whose)
        if action in conditional and not allowed(action, context, document)
    }
    return sorted(found)


def test_an_operator_with_this_policy_can_do_everything_and_it_holds_nothing_that_is_not_used(
    spec: str, sandbox: Sandbox
) -> None:
    tagged = everything(spec, sandbox)
    assert sandbox.inventory() == {"policy": ("arn:aws:iam::123456789012:policy/platform",), "user": ("platform",)}
    granted = {action for statement in policy()["Statement"] for action in statement["Action"]}
    used = needed(sandbox)
    assert used - granted == set(), "used, and not in the policy"
    assert granted - used == set(), "in the policy, and never used"
    whose = tagged | {
        name_in(call): tags[TAG] for call in sandbox.calls if call.writes and TAG in (tags := tags_of(call.params))
    }
    assert refused(sandbox, whose, policy()) == []
    # That they are asked at all: of another bucket's runs nothing could be made, and nothing taken away.
    elsewhere = json.loads(json.dumps(policy()).replace(f"s3://{BUCKET}/", "s3://another/"))
    tagging = {
        action for one in policy()["Statement"] if "Tag/" in str(one.get("Condition")) for action in one["Action"]
    }
    assert set(refused(sandbox, whose, elsewhere)) == tagging


def test_what_a_condition_is_for_is_refused(sandbox: Sandbox) -> None:
    document, run = policy(), f"s3://{BUCKET}/runs/tiny"
    del sandbox

    def judged(name: str, whose: str = run, **params: Any) -> bool:
        service, _, operation = name.partition(":")
        call = Call(service=service, operation=operation, params=params)
        return all(allowed(action, context, document) for action, context in asked(call, {"it": whose}))

    managed = "arn:aws:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
    assert judged("iam:AttachRolePolicy", RoleName="it", PolicyArn=managed)
    assert not judged("iam:AttachRolePolicy", RoleName="it", PolicyArn="arn:aws:iam::aws:policy/AdministratorAccess")
    assert judged("batch:RegisterJobDefinition", tags={TAG: run}, containerProperties={"user": "10001:10001"})
    for user in ("0", "root", ""):
        assert not judged("batch:RegisterJobDefinition", tags={TAG: run}, containerProperties={"user": user})
    assert judged("batch:TerminateJob", jobId="it")
    assert not judged("batch:TerminateJob", "s3://another/run", jobId="it")
    assert not judged("batch:TerminateJob", "", jobId="it")
    specification = [{"Tags": [{"Key": TAG, "Value": run}]}]
    assert judged("ec2:CreateSecurityGroup", TagSpecifications=specification)
    # Whoever could tag what is there could make it the run's, and then delete it.
    assert not judged("ec2:CreateTags", Tags=specification[0]["Tags"])
    assert not judged("iam:CreateServiceLinkedRole", AWSServiceName="ecs.amazonaws.com")


def test_without_one_of_its_rights_the_missing_one_is_named(spec: str, sandbox: Sandbox) -> None:
    document = as_moto_asks(policy())
    for statement in document["Statement"]:
        statement["Action"] = [action for action in statement["Action"] if action != "batch:CreateJobQueue"]
    made = "arn:aws:iam::123456789012:policy/platform"
    sandbox.client("iam").create_policy_version(PolicyArn=made, PolicyDocument=json.dumps(document), SetAsDefault=True)
    assert "batch:CreateJobQueue" in skerry("apply", spec, "--auto-approve", code=1)


def test_what_is_made_has_names_that_the_policy_covers(spec: str, sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    s3 = sandbox.client("s3")
    newest = s3.list_objects_v2(Bucket=BUCKET, Prefix="runs/tiny/state/")["Contents"][-1]["Key"]
    state = json.loads(s3.get_object(Bucket=BUCKET, Key=newest)["Body"].read())
    made = [entry["made"] for entry in state["entries"]]
    arns = {one["address"]: one["outputs"]["arn"] for one in made if one["outputs"].get("arn")}
    assert len(arns) > 8
    # By service and kind: what is listed for everybody says nothing of what may be changed.
    patterns = [
        pattern
        for statement in policy()["Statement"]
        if statement["Sid"] != "Look"
        for pattern in ([statement["Resource"]] if isinstance(statement["Resource"], str) else statement["Resource"])
    ]
    assert [arn for arn in arns.values() if not any(glob(pattern, arn) for pattern in patterns)] == []


def test_it_fits_into_a_managed_policy_and_gives_all_resources_to_looking_alone() -> None:
    document = policy()
    assert len(json.dumps(document, separators=(",", ":"))) <= LONGEST
    everywhere = [one for one in document["Statement"] if one["Resource"] == "*"]
    assert [one["Sid"] for one in everywhere] == ["Look"]
    reading = ("Describe", "Get", "List", "Simulate")
    assert [action for action in everywhere[0]["Action"] if not action.split(":")[1].startswith(reading)] == []
    assert not [action for one in document["Statement"] for action in one["Action"] if "*" in action]
