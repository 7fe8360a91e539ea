"""Changes made outside of skerry: a plan shows each, and an apply reverts it or says why it stays."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.deploy.account import skerry

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.testing.sandbox import Sandbox

BUCKET: Final = "acme-skerry"
KEY: Final = "arn:aws:kms:us-east-1:123456789012:key/1234abcd"
BOUNDARY: Final = "arn:aws:iam::123456789012:policy/boundary"
ALL: Final[dict[str, Any]] = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}


def security_group(sandbox: Sandbox) -> dict[str, Any]:
    names = [{"Name": "group-name", "Values": list(sandbox.inventory()["security group"])}]
    return sandbox.client("ec2").describe_security_groups(Filters=names)["SecurityGroups"][0]


def compute_environment(sandbox: Sandbox) -> dict[str, Any]:
    return sandbox.client("batch").describe_compute_environments()["computeEnvironments"][0]


def execution_role(sandbox: Sandbox) -> str:
    return next(name for name in sandbox.inventory()["role"] if name.endswith("-execution"))


def raise_minimum(sandbox: Sandbox) -> None:
    name = compute_environment(sandbox)["computeEnvironmentName"]
    sandbox.client("batch").update_compute_environment(computeEnvironment=name, computeResources={"minvCpus": 2})


def revoke_egress(sandbox: Sandbox) -> None:
    group = security_group(sandbox)["GroupId"]
    sandbox.client("ec2").revoke_security_group_egress(GroupId=group, IpPermissions=[ALL])


def keep_versions(sandbox: Sandbox) -> None:
    sandbox.client("s3").put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})


def remove_encryption(sandbox: Sandbox) -> None:
    sandbox.client("s3").delete_bucket_encryption(Bucket=BUCKET)


def encryption(sandbox: Sandbox) -> Any:
    rules = sandbox.client("s3").get_bucket_encryption(Bucket=BUCKET)["ServerSideEncryptionConfiguration"]["Rules"]
    return rules[0]["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"]


def encrypt_by_a_key(sandbox: Sandbox) -> None:
    by_key = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": KEY}}
    configuration = {"Rules": [by_key]}
    sandbox.client("s3").put_bucket_encryption(Bucket=BUCKET, ServerSideEncryptionConfiguration=configuration)


def set_boundary(sandbox: Sandbox) -> None:
    role = execution_role(sandbox)
    sandbox.client("iam").put_role_permissions_boundary(RoleName=role, PermissionsBoundary=BOUNDARY)


def boundary(sandbox: Sandbox) -> Any:
    role = sandbox.client("iam").get_role(RoleName=execution_role(sandbox))["Role"]
    return role["PermissionsBoundary"]["PermissionsBoundaryArn"]


@pytest.mark.parametrize(
    ("change", "text", "read", "after"),
    [
        (
            raise_minimum,
            "min_vcpus: 2 -> 0",
            lambda sandbox: compute_environment(sandbox)["computeResources"]["minvCpus"],
            0,
        ),
        (
            revoke_egress,
            'egress: [] -> ["all to 0.0.0.0/0"]',
            lambda sandbox: [rule["IpProtocol"] for rule in security_group(sandbox)["IpPermissionsEgress"]],
            ["-1"],
        ),
        (
            keep_versions,
            "versioning: true -> false",
            lambda sandbox: sandbox.client("s3").get_bucket_versioning(Bucket=BUCKET)["Status"],
            "Suspended",
        ),
        (remove_encryption, "encryption: none -> AES256", encryption, "AES256"),
        (encrypt_by_a_key, f"it is encrypted with aws:kms and the key {KEY}", encryption, "aws:kms"),
        (set_boundary, f"-execution has the permissions boundary {BOUNDARY}", boundary, BOUNDARY),
    ],
)
def test_drift_is_shown_and_reverted_unless_the_account_may_require_it(
    spec: str,
    skerry_sandbox: Sandbox,
    change: Callable[[Sandbox], None],
    text: str,
    read: Callable[[Sandbox], object],
    after: object,
) -> None:
    skerry("apply", spec, "--auto-approve")
    change(skerry_sandbox)
    stays = " -> " not in text
    (line,) = [line for line in skerry("plan", spec).output.splitlines() if text in line]
    if stays:
        assert line.startswith("note: ")
        assert "this stays, because" in line
    else:
        assert line.endswith(f"{text} (changed outside of skerry)")
    assert text in skerry("plan", spec, "--refresh-only", "--detailed-exitcode", code=2).output
    skerry("apply", spec, "--auto-approve")
    assert read(skerry_sandbox) == after
    skerry("plan", spec, "--detailed-exitcode")


def test_changed_trust_is_shown_whole(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    iam, role = skerry_sandbox.client("iam"), execution_role(skerry_sandbox)
    trust = iam.get_role(RoleName=role)["Role"]["AssumeRolePolicyDocument"]
    others = [f"arn:aws:iam::{number:012}:root" for number in range(1, 20)]
    trust["Statement"].append({"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"AWS": others}})
    iam.update_assume_role_policy(RoleName=role, PolicyDocument=json.dumps(trust))
    (line,) = [line for line in skerry("plan", spec).output.splitlines() if line.strip().startswith("trust: ")]
    assert [other for other in others if other not in line] == []
