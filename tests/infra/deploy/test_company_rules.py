"""A company's rules in a spec: a boundary and a path of roles, a key of the bucket, and the only accounts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.deploy.account import DIGEST, GROUP, skerry, write_run

from skerry.testing.plugin import skerry_clouds, skerry_google

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.both_clouds import Clouds
    from skerry.testing.sandbox import Sandbox

__all__ = ["skerry_clouds", "skerry_google"]

BUCKET: Final = "acme-skerry"
KEY: Final = "arn:aws:kms:us-east-1:123456789012:key/1234abcd"
VERTEX: Final = """\
  - name: v
    count: 1
    image: us-central1-docker.pkg.dev/{project}/skerry/replica@sha256:{digest}
    target: {{kind: vertex, project: {project}, region: us-central1, machine: n2-standard-4}}
"""
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


FORBIDDEN: Final = "allowed_accounts: ['210987654321']"


COMMANDS: Final = (
    "plan",
    "apply --auto-approve",
    "up --auto-approve",
    "destroy --yes",
    "cancel --auto-approve",
    "extend --rounds 9",
    "status",
    "watch",
    "doctor",
    "doctor --repair",
    "estimate",
    "report",
    "export",
    "artifacts",
    "pin --list",
    "runs",
    "graph --planned",
    "state list",
    "image ship",
)


@pytest.mark.usefixtures("spec")
def test_other_account_is_asked_for_nothing_but_its_name(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    ruled = write_rules(tmp_path, FORBIDDEN)
    for command in COMMANDS:
        words: list[str] = [*command.split()]
        words.insert(2 if words[0] in ("state", "image") else 1, ruled)
        result = skerry(*words, code=1)
        text = "aws account 123456789012 is not among those that the spec allows: 210987654321"
        assert text in " ".join((result.stdout + result.stderr).split()), command
        assert {call.name for call in skerry_sandbox.calls} == {"sts:GetCallerIdentity"}, command


def test_extend_writes_nothing_in_another_account(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    skerry_sandbox.calls.clear()
    skerry("extend", write_rules(tmp_path, FORBIDDEN), "--rounds", "9", code=1)
    assert skerry_sandbox.calls.writes == []


def test_doctor_shows_another_account_as_a_failed_check(spec: str, tmp_path: Path) -> None:
    ruled = write_rules(tmp_path, FORBIDDEN)
    (check,) = json.loads(skerry("doctor", ruled, "--json", code=1).stdout)["checks"]
    assert (check["ok"], check["name"]) == (False, "allowed accounts")
    assert json.loads(skerry("plan", spec, "--set", "aws.allowed_accounts=['123456789012']", "--json").stdout)


def test_local_run_is_not_started_in_another_account(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    path = write_run(tmp_path, "  - {name: a, count: 1, target: {kind: local}}\n", more=f"aws: {{{FORBIDDEN}}}\n")
    assert "is not among those that the spec allows" in skerry("up", str(path), code=1).stderr
    assert {call.name for call in skerry_sandbox.calls} == {"sts:GetCallerIdentity"}


def test_place_that_only_the_state_names_is_checked(tmp_path: Path, skerry_clouds: Clouds) -> None:
    skerry_clouds.aws.any_image = skerry_clouds.google.any_image = True
    google = VERTEX.format(project=skerry_clouds.google.project, digest=DIGEST)
    aws = GROUP.format(count=1, role="replica")
    skerry("apply", str(write_run(tmp_path, aws + google)), "--auto-approve")
    spec = str(write_run(tmp_path, aws, more="limits: {max_hours: 24}\ngoogle: {allowed_projects: [another]}\n"))
    jobs = skerry_clouds.google.inventory()
    skerry_clouds.aws.calls.clear()
    for command in (("plan",), ("apply", "--auto-approve"), ("destroy", "--yes")):
        assert "is not among those that the spec allows: another" in skerry(*command, spec, code=1).stderr
    assert skerry_clouds.google.inventory() == jobs
    assert skerry_clouds.aws.calls.writes == []
