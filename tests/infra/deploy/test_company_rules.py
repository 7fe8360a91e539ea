"""A company's rules in a spec: a boundary and a path of roles, a key of the bucket, and the only accounts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.deploy.account import skerry

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox

BUCKET: Final = "acme-skerry"
KEY: Final = "arn:aws:kms:us-east-1:123456789012:key/1234abcd"
BOUNDARY: Final = "arn:aws:iam::123456789012:policy/boundary"


def write_rules(tmp_path: Path, rules: str) -> str:
    path = tmp_path / "ruled.yaml"
    path.write_text((tmp_path / "skerry.yaml").read_text() + f"aws: {{{rules}}}\n")
    return str(path)


def roles(sandbox: Sandbox) -> list[dict[str, Any]]:
    iam = sandbox.client("iam")
    existing = [iam.get_role(RoleName=name)["Role"] for name in sandbox.inventory().get("role", ())]
    return [role for role in existing if "aws-service-role" not in role["Path"]]


def bounds(sandbox: Sandbox) -> set[str]:
    return {role.get("PermissionsBoundary", {}).get("PermissionsBoundaryArn", "") for role in roles(sandbox)}


@pytest.mark.usefixtures("spec")
def test_roles_get_boundary_and_path_as_they_are_created(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    ruled = write_rules(tmp_path, f"permissions_boundary: '{BOUNDARY}', role_path: /teams/research/")
    assert "permissions boundary" in skerry("plan", ruled).output
    skerry("apply", ruled, "--auto-approve")
    assert bounds(skerry_sandbox) == {BOUNDARY}
    created = [call for call in skerry_sandbox.calls if call.name == "iam:CreateRole"]
    assert created
    assert {call.params["PermissionsBoundary"] for call in created} == {BOUNDARY}
    assert {role["Path"] for role in roles(skerry_sandbox)} == {"/teams/research/"}
    assert "14 unchanged" in skerry("plan", ruled, "--detailed-exitcode").output
    # Without a state the roles are found at any path.
    s3 = skerry_sandbox.client("s3")
    for entry in s3.list_objects_v2(Bucket=BUCKET, Prefix="runs/tiny/state/")["Contents"]:
        s3.delete_object(Bucket=BUCKET, Key=entry["Key"])
    skerry("destroy", ruled, "--yes", "--data")
    assert roles(skerry_sandbox) == []


def test_boundary_is_added_to_roles_that_exist(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    assert bounds(skerry_sandbox) == {""}
    skerry("apply", write_rules(tmp_path, f"permissions_boundary: '{BOUNDARY}'"), "--auto-approve")
    assert bounds(skerry_sandbox) == {BOUNDARY}
    # A spec without the rule does not remove it.
    assert "has the permissions boundary" in skerry("plan", spec, "--detailed-exitcode").output


def test_key_encrypts_the_bucket_and_replicas_may_use_it(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    ruled = write_rules(tmp_path, f"kms_key: '{KEY}'")
    skerry("apply", ruled, "--auto-approve")
    s3, iam = skerry_sandbox.client("s3"), skerry_sandbox.client("iam")
    (rule,) = s3.get_bucket_encryption(Bucket=BUCKET)["ServerSideEncryptionConfiguration"]["Rules"]
    by_key = rule["ApplyServerSideEncryptionByDefault"]
    assert (by_key["SSEAlgorithm"], by_key["KMSMasterKeyID"], rule["BucketKeyEnabled"]) == ("aws:kms", KEY, True)
    (role,) = (role["RoleName"] for role in roles(skerry_sandbox) if role["RoleName"].endswith("-b-0"))
    document = iam.get_role_policy(RoleName=role, PolicyName="key")["PolicyDocument"]
    (statement,) = document["Statement"]
    assert (statement["Resource"], sorted(statement["Action"])) == ([KEY], ["kms:Decrypt", "kms:GenerateDataKey"])
    assert statement["Condition"] == {"StringEquals": {"kms:ViaService": ["s3.us-east-1.amazonaws.com"]}}
    assert "14 unchanged" in skerry("plan", ruled, "--detailed-exitcode").output
    # A bucket with a key keeps it, also when the spec names none.
    skerry("apply", spec, "--auto-approve")
    (kept,) = s3.get_bucket_encryption(Bucket=BUCKET)["ServerSideEncryptionConfiguration"]["Rules"]
    assert kept == rule


def test_other_accounts_are_refused_before_a_change(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    ruled = write_rules(tmp_path, "allowed_accounts: ['210987654321']")
    for command in (("plan",), ("apply", "--auto-approve"), ("destroy", "--yes"), ("cancel", "--auto-approve")):
        result = skerry(*command, ruled, code=1)
        assert "aws account 123456789012 is not among those that the spec allows: 210987654321" in result.stderr
    assert skerry_sandbox.calls.writes == []
    assert json.loads(skerry("plan", spec, "--set", "aws.allowed_accounts=['123456789012']", "--json").stdout)
