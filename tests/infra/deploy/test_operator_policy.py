"""The rights that infra/examples/operator-policy.json gives: enough for everything that skerry does, and no more.

moto knows resources of S3 and roles alone; whether the policy covers the names of all that is made is compared here.
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
from skerry.infra.testing.conditions import glob
from skerry.infra.testing.sandbox import Sandbox
from skerry.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator

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
PASSING: Final = {"batch:CreateComputeEnvironment", "batch:RegisterJobDefinition", "iam:AddRoleToInstanceProfile"}
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
        for one in document["Statement"]
    ]
    granted = {action for one in document["Statement"] for action in one["Action"]}
    elsewhere = {"Effect": "Allow", "Action": sorted(granted & MOTO_ELSEWHERE), "Resource": "*"}
    return {**document, "Statement": [*statements, elsewhere]}


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


def everything(spec: str, sandbox: Sandbox) -> None:
    """The life of a run, every command of it."""
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
    skerry("destroy", spec, "--yes", "--data")


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


def test_an_operator_with_this_policy_can_do_everything_and_it_holds_nothing_that_is_not_used(
    spec: str, sandbox: Sandbox
) -> None:
    everything(spec, sandbox)
    assert sandbox.inventory() == {"policy": ("arn:aws:iam::123456789012:policy/platform",), "user": ("platform",)}
    granted = {action for statement in policy()["Statement"] for action in statement["Action"]}
    used = needed(sandbox)
    assert used - granted == set(), "used, and not in the policy"
    assert granted - used == set(), "in the policy, and never used"


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
