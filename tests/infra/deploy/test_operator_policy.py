"""infra/examples/operator-policy.json grants every right that skerry needs, and no other.

moto checks resources of S3 and roles only, so this test compares the policy with the names of all resources. Of the
conditions moto checks only the bucket's owner; the others (tags, users of a job, attached policies, services that a
role is passed to) are removed for moto and evaluated here for every call. That AWS has these condition keys for these
actions is taken from its reference; no test can check it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.deploy.account import write_spec
from tests.support.command_line import invoke

from skerry.infra.clouds.aws.errors import action_of
from skerry.infra.clouds.aws.logs import events
from skerry.infra.clouds.aws.session import Aws
from skerry.runtime.clock import SystemClock
from skerry.testing.aws.conditions import glob, holds
from skerry.testing.calls import Call
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = pytest.mark.slow
POLICY: Final = Path(__file__).parents[3] / "infra/examples/operator-policy.json"
KEY_POLICY: Final = POLICY.with_name("operator-policy-kms.json")
KEY: Final = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
# The right on the bucket's key that a call needs (S3 user guide, "Using server-side encryption with AWS KMS keys").
BY_KEY: Final = {
    "s3:CompleteMultipartUpload": ("kms:Decrypt",),
    "s3:CopyObject": ("kms:Decrypt", "kms:GenerateDataKey"),
    "s3:CreateMultipartUpload": ("kms:Decrypt", "kms:GenerateDataKey"),
    "s3:GetObject": ("kms:Decrypt",),
    "s3:PutObject": ("kms:GenerateDataKey",),
    "s3:UploadPart": ("kms:Decrypt",),
}
# The example's bucket, replaced by the user's own.
EXAMPLE_BUCKET: Final = "acme-diloco"
BUCKET: Final = "acme-skerry"
# Characters of a managed policy without white space (IAM quotas).
MAX_CHARACTERS: Final = 6144
# Rights that a call needs in addition to its own (Service Authorization Reference).
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
    "s3:CreateBucket": "s3:TagResource",
}
# The services that a call passes a role to (Service Authorization Reference, "AWS Batch": iam:PassedToService).
PASSING: Final = {
    "batch:CreateComputeEnvironment": ("batch.amazonaws.com", "ec2.amazonaws.com"),
    "batch:RegisterJobDefinition": ("ecs-tasks.amazonaws.com",),
    "iam:AddRoleToInstanceProfile": ("ec2.amazonaws.com",),
}
# The parameters that name the resource of a call.
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
# Calls that need a right for two resources.
KINDS: Final = {"ec2:CreateSecurityGroup": (":security-group/", ":vpc/")}
TAG: Final = "skerry:run"
BOUNDARY: Final = "arn:aws:iam::123456789012:policy/skerry-boundary"
JUDGED_BY_MOTO: Final = {"s3:ResourceAccount"}
# Allowed without any right.
FREE: Final = {"sts:GetCallerIdentity"}
# Rights that moto checks instead of those that AWS checks.
MOTO: Final = {
    "s3:GetBucketPublicAccessBlock": "s3:GetPublicAccessBlock",
    "s3:ListBucket": "s3:HeadBucket",
    "s3:PutBucketPublicAccessBlock": "s3:PutPublicAccessBlock",
}
# Rights that moto checks for another resource: the role instead of the profile, the bucket instead of its objects.
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
    """An account that checks rights; this process acts as an operator with this policy only."""
    with Sandbox(enforce_iam=True) as sandbox:
        sandbox.any_image = True
        for name, value in {**sandbox.environment, **operator(sandbox, as_moto_asks(policy()))}.items():
            monkeypatch.setenv(name, value)
        yield sandbox


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = write_spec(tmp_path, count=1)
    path.write_text(path.read_text() + f"      spot: true\naws: {{permissions_boundary: '{BOUNDARY}'}}\n")
    return str(path)


def policy() -> dict[str, Any]:
    return json.loads(POLICY.read_text().replace(EXAMPLE_BUCKET, BUCKET))


def operator(sandbox: Sandbox, document: dict[str, Any]) -> dict[str, str]:
    iam = sandbox.client("iam")
    iam.create_user(UserName="platform")
    policy = iam.create_policy(PolicyName="platform", PolicyDocument=json.dumps(document))["Policy"]
    iam.attach_user_policy(UserName="platform", PolicyArn=policy["Arn"])
    key = iam.create_access_key(UserName="platform")["AccessKey"]
    sandbox.calls.clear()
    return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}


def as_moto_asks(document: dict[str, Any]) -> dict[str, Any]:
    statements = [
        {
            **statement,
            "Action": [*statement["Action"], *(MOTO[action] for action in statement["Action"] if action in MOTO)],
        }
        for statement in map(unconditional, document["Statement"])
    ]
    granted = {action for statement in document["Statement"] for action in statement["Action"]}
    elsewhere = {"Effect": "Allow", "Action": sorted(granted & MOTO_ELSEWHERE), "Resource": "*"}
    return {**document, "Statement": [*statements, elsewhere]}


def unconditional(statement: dict[str, Any]) -> dict[str, Any]:
    """The statement without conditions that moto does not support."""
    keys = {key for wanted in statement.get("Condition", {}).values() for key in wanted}
    return statement if keys <= JUDGED_BY_MOTO else {**statement, "Condition": {}}


def skerry(*words: str, code: int = 0) -> str:
    result = invoke(*words)
    assert result.exit_code == code, result.output + result.stderr + repr(result.exception)
    return result.output + result.stderr


def change_outside(sandbox: Sandbox) -> str:
    """Change resources that an apply must repair, and add some that a destroy must find; the digest of an image."""
    inventory = sandbox.inventory()
    ecr, iam, ec2, s3 = (sandbox.client(service) for service in ("ecr", "iam", "ec2", "s3"))
    ecr.put_image_tag_mutability(repositoryName="skerry", imageTagMutability="MUTABLE")
    ecr.put_image_scanning_configuration(repositoryName="skerry", imageScanningConfiguration={"scanOnPush": False})
    role = next(name for name in inventory["role"] if name.endswith("-execution"))
    iam.update_role(RoleName=role, MaxSessionDuration=7200)
    iam.update_assume_role_policy(RoleName=role, PolicyDocument=TRUST)
    iam.delete_role_permissions_boundary(RoleName=role)
    iam.put_role_policy(RoleName=role, PolicyName="more", PolicyDocument=MORE)
    groups = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": list(inventory["security group"])}])
    rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    ec2.authorize_security_group_ingress(GroupId=groups["SecurityGroups"][0]["GroupId"], IpPermissions=[rule])
    everything = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    ec2.revoke_security_group_egress(GroupId=groups["SecurityGroups"][0]["GroupId"], IpPermissions=[everything])
    s3.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    batch = sandbox.client("batch")
    batch.update_job_queue(jobQueue=inventory["job queue"][0], priority=7)
    s3.delete_bucket_ownership_controls(Bucket=BUCKET)
    s3.put_object(Bucket=BUCKET, Key="runs/tiny/notes.txt", Body=b"by hand")
    s3.create_multipart_upload(Bucket=BUCKET, Key="runs/tiny/payloads/large")
    kind = "application/vnd.oci.image.manifest.v1+json"
    image: dict[str, object] = {"schemaVersion": 2, "mediaType": kind, "config": {"digest": f"sha256:{'0' * 64}"}}
    image["layers"] = list[object]()
    response = ecr.put_image(repositoryName="skerry", imageManifest=json.dumps(image), imageTag="one")
    return str(response["image"]["imageId"]["imageDigest"])


def read_log(sandbox: Sandbox) -> None:
    """Read a log stream, as `skerry logs` does once a container has written a line."""
    (group,) = sandbox.inventory()["log group"]
    logs = sandbox.client("logs")
    logs.create_log_stream(logGroupName=group, logStreamName="one")
    logs.put_log_events(logGroupName=group, logStreamName="one", logEvents=[{"timestamp": 1, "message": "hello"}])
    list(events(Aws(SystemClock(), os.environ), sandbox.region, group, "one", None))


def hide_a_subnet(sandbox: Sandbox) -> str:
    """Remove the public addresses from a subnet of the default network; its id."""
    ec2 = sandbox.client("ec2")
    (subnet,) = ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": ["us-east-1a"]}])["Subnets"]
    ec2.modify_subnet_attribute(SubnetId=subnet["SubnetId"], MapPublicIpOnLaunch={"Value": False})
    return str(subnet["SubnetId"])


def run_every_command(spec: str, sandbox: Sandbox) -> dict[str, str]:
    """Run every command on one run. Returns the owner of each resource whose ARN holds an id instead of a name."""
    hidden = hide_a_subnet(sandbox)
    skerry("plan", spec)
    skerry("apply", spec, "--auto-approve")
    sandbox.client("s3").delete_bucket_tagging(Bucket=BUCKET)
    skerry("import", "aws_bucket.store", spec, "--auto-approve")
    for command in ("status", "estimate", "unlock"):
        skerry(command, spec)
    queue = sandbox.inventory()["job queue"][0]
    (job,) = sandbox.client("batch").list_jobs(jobQueue=queue, jobStatus="RUNNABLE")["jobSummaryList"]
    sandbox.batch.start(job["jobId"])
    skerry("logs", spec)
    read_log(sandbox)
    digest = change_outside(sandbox)
    skerry("apply", spec, "--auto-approve")
    skerry("cancel", spec, "--auto-approve")
    skerry("apply", spec, "--auto-approve")
    image = f"image=123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry@{digest}"
    skerry("doctor", spec, "--set", image)
    skerry("doctor", spec, "--set", image, "--set", f"replicas[0].target.byo.subnets=[{hidden}]")
    groups = sandbox.client("ec2").describe_security_groups()["SecurityGroups"]
    tagged = {group["GroupId"]: tags_of(group).get(TAG, "") for group in groups}
    skerry("destroy", spec, "--yes", "--data")
    # The repository is kept as long as it has an image.
    sandbox.client("ecr").batch_delete_image(repositoryName="skerry", imageIds=[{"imageDigest": digest}])
    skerry("destroy", spec, "--yes", "--data")
    ended = [call.params["jobId"] for call in sandbox.calls if call.name == "batch:TerminateJob"]
    jobs = sandbox.client("batch").describe_jobs(jobs=ended)["jobs"]
    return tagged | {job["jobId"]: job["tags"].get(TAG, "") for job in jobs}


def needed(sandbox: Sandbox) -> set[str]:
    """The rights that the operator's calls needed."""
    actions: set[str] = set()
    for call in sandbox.calls:
        if call.caller != "user/platform":
            continue
        operation = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", call.operation).lower()
        # The service's model name differs from its signing name, so the operation is unknown.
        actions.add("servicequotas:GetServiceQuota" if "quotas" in call.service else action_of(call.service, operation))
        if call.name in TAGGING:
            actions.add(TAGGING[call.name])
        if call.name in PASSING:
            actions.add("iam:PassRole")
        if call.name == "s3:DeleteObjects":
            actions.add("s3:DeleteObjectVersion")  # by their versions
    return actions - FREE


def tags_of(params: Mapping[str, Any]) -> dict[str, str]:
    """The tags in a request or response, in any of the services' formats."""
    tags: Any = (
        params.get("tags")
        or params.get("Tags")
        or [tag for specification in params.get("TagSpecifications", []) for tag in specification.get("Tags", [])]
    )
    return tags if isinstance(tags, dict) else {tag["Key"]: tag["Value"] for tag in tags}


def name_in(call: Call) -> str:
    """The name of the resource that the call is for."""
    name = next((str(call.params[key]) for key in NAMES if key in call.params), "")
    return name.rpartition("/")[2].rpartition(":")[0] if name.startswith("arn:") else name


def required_rights(call: Call, owners: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The rights that a call needs, each with the values of the condition keys.

    Roles get their boundary in the call that creates them, or before any policy.
    """
    bound = "" if call.operation in ("CreateRole", "PutRolePermissionsBoundary") else BOUNDARY
    container = call.params.get("containerProperties", {})
    context = {
        "aws:requesttag/skerry:run": tags_of(call.params).get(TAG, ""),
        "aws:resourcetag/skerry:run": owners.get(name_in(call), ""),
        "batch:user": container.get("user", ""),
        "ec2:createaction": call.operation,
        "iam:awsservicename": call.params.get("AWSServiceName", ""),
        "iam:passedtoservice": "",
        "iam:permissionsboundary": call.params.get("PermissionsBoundary", bound),
        "iam:policyarn": call.params.get("PolicyArn", ""),
        "s3:resourceaccount": "123456789012",
    }
    yield call.name, context
    if call.name in TAGGING:
        yield TAGGING[call.name], context
    for service in PASSING.get(call.name, ()):
        yield "iam:PassRole", {**context, "iam:passedtoservice": service}


def allowed(action: str, context: Mapping[str, str], document: Mapping[str, Any]) -> bool:
    """True if a statement allows this action unconditionally or its condition holds, for each kind of resource."""
    return all(
        any(
            action in statement["Action"]
            and kind in str(statement["Resource"])
            and holds(statement.get("Condition", {}), context)
            for statement in document["Statement"]
        )
        for kind in KINDS.get(action, ("",))
    )


def refused(sandbox: Sandbox, owners: Mapping[str, str], document: Mapping[str, Any]) -> list[str]:
    """The rights with a condition that refused a call of the operator."""
    conditional = {
        action for statement in document["Statement"] if "Condition" in statement for action in statement["Action"]
    }
    used = {
        action
        for call in sandbox.calls
        if call.caller == "user/platform"
        for action, context in required_rights(call, owners)
        if action in conditional and not allowed(action, context, document)
    }
    return sorted(used)


def test_policy_grants_exactly_the_rights_that_are_used(spec: str, sandbox: Sandbox) -> None:
    tagged = run_every_command(spec, sandbox)
    assert sandbox.inventory() == {"policy": ("arn:aws:iam::123456789012:policy/platform",), "user": ("platform",)}
    granted = {action for statement in policy()["Statement"] for action in statement["Action"]}
    used = needed(sandbox)
    assert used - granted == set(), "used, and not in the policy"
    assert granted - used == set(), "in the policy, and never used"
    owners = tagged | {
        name_in(call): tags[TAG] for call in sandbox.calls if call.writes and TAG in (tags := tags_of(call.params))
    }
    assert refused(sandbox, owners, policy()) == []
    # Counter-check: with another bucket in the policy, every right with a tag condition is refused.
    elsewhere = json.loads(json.dumps(policy()).replace(f"s3://{BUCKET}/", "s3://another/"))
    tagging = {
        action
        for statement in policy()["Statement"]
        if "Tag/" in str(statement.get("Condition"))
        for action in statement["Action"]
    }
    assert set(refused(sandbox, owners, elsewhere)) == tagging


def test_operator_of_a_bucket_with_a_key_needs_its_policy_and_no_more(spec: str, sandbox: Sandbox) -> None:
    path = Path(spec)
    path.write_text(path.read_text().replace("aws: {", f"aws: {{kms_key: '{KEY}', "))
    for command in (("plan",), ("apply", "--auto-approve"), ("status",), ("destroy", "--yes", "--data")):
        skerry(*command, spec)
    calls = [call for call in sandbox.calls if call.caller == "user/platform"]
    used = {action for call in calls for action in BY_KEY.get(call.name, ())}
    assert not any(call.service == "kms" for call in calls)
    document = json.loads(KEY_POLICY.read_text())
    (statement,) = document["Statement"]
    assert (set(statement["Action"]), statement["Resource"]) == (used, KEY)
    for action in used:
        assert not allowed(action, {}, policy())
        assert allowed(action, {"kms:viaservice": "s3.us-east-1.amazonaws.com"}, document)
        for other in ("s3.eu-west-1.amazonaws.com", "ec2.us-east-1.amazonaws.com", ""):
            assert not allowed(action, {"kms:viaservice": other}, document)


def test_conditions_refuse_what_they_are_written_for(sandbox: Sandbox) -> None:
    document, run = policy(), f"s3://{BUCKET}/runs/tiny"
    del sandbox

    def judged(name: str, owners: str = run, **params: Any) -> bool:
        service, _, operation = name.partition(":")
        call = Call(service=service, operation=operation, params=params)
        return all(allowed(action, context, document) for action, context in required_rights(call, {"it": owners}))

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
    # A right to tag existing resources would allow to adopt and then delete them.
    assert not judged("ec2:CreateTags", Tags=specification[0]["Tags"])
    assert not judged("iam:CreateServiceLinkedRole", AWSServiceName="ecs.amazonaws.com")
    # Without the boundary a role with any rights could be created, and passed to a job.
    tags = [{"Key": TAG, "Value": run}]
    assert judged("iam:CreateRole", Tags=tags, PermissionsBoundary=BOUNDARY)
    assert not judged("iam:CreateRole", Tags=tags)
    assert not judged(
        "iam:PutRolePermissionsBoundary", PermissionsBoundary="arn:aws:iam::aws:policy/AdministratorAccess"
    )
    granted = {action for statement in document["Statement"] for action in statement["Action"]}
    assert "iam:DeleteRolePermissionsBoundary" not in granted


def test_missing_right_is_named_in_the_error(spec: str, sandbox: Sandbox) -> None:
    document = as_moto_asks(policy())
    for statement in document["Statement"]:
        statement["Action"] = [action for action in statement["Action"] if action != "batch:CreateJobQueue"]
    policy_arn = "arn:aws:iam::123456789012:policy/platform"
    sandbox.client("iam").create_policy_version(
        PolicyArn=policy_arn, PolicyDocument=json.dumps(document), SetAsDefault=True
    )
    assert "batch:CreateJobQueue" in skerry("apply", spec, "--auto-approve", code=1)


def test_policy_covers_the_names_of_all_resources(spec: str, sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    s3 = sandbox.client("s3")
    newest = s3.list_objects_v2(Bucket=BUCKET, Prefix="runs/tiny/state/")["Contents"][-1]["Key"]
    state = json.loads(s3.get_object(Bucket=BUCKET, Key=newest)["Body"].read())
    records = [entry["made"] for entry in state["entries"]]
    arns = {record["address"]: record["outputs"]["arn"] for record in records if record["outputs"].get("arn")}
    assert len(arns) > 8
    # The statement for reading applies to all resources, so it proves nothing.
    patterns = [
        pattern
        for statement in policy()["Statement"]
        if statement["Sid"] != "Look"
        for pattern in ([statement["Resource"]] if isinstance(statement["Resource"], str) else statement["Resource"])
    ]
    assert [arn for arn in arns.values() if not any(glob(pattern, arn) for pattern in patterns)] == []


def test_policy_fits_its_quota_and_only_reads_all_resources() -> None:
    document = policy()
    assert len(json.dumps(document, separators=(",", ":"))) <= MAX_CHARACTERS
    everywhere = [statement for statement in document["Statement"] if statement["Resource"] == "*"]
    assert [statement["Sid"] for statement in everywhere] == ["Look"]
    reading = ("Describe", "Get", "List", "Simulate")
    assert [action for action in everywhere[0]["Action"] if not action.split(":")[1].startswith(reading)] == []
    assert not [action for statement in document["Statement"] for action in statement["Action"] if "*" in action]
