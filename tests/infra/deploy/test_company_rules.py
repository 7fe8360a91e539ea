"""A company's rules in a spec: a boundary and a path of roles, a key of the bucket, and the only accounts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.deploy.account import DIGEST, GROUP, skerry, write_run, write_spec

from skerry.infra.clouds import rule_problems
from skerry.infra.clouds.google.gcs import Bucket as GoogleBucket
from skerry.testing.plugin import skerry_clouds, skerry_google

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.both_clouds import Clouds
    from skerry.testing.google import GoogleSandbox
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
    without = skerry("plan", spec, "--detailed-exitcode").output
    assert f"has the permissions boundary {BOUNDARY}, which the spec does not name; this stays" in without


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
    # A bucket with a key keeps it when the spec names none, and replicas, also new ones, keep the right to use it.
    without = skerry("plan", spec).output
    assert f"the key {KEY}, which the spec does not name; this stays" in without
    assert "outside of skerry" not in without
    skerry("apply", str(write_spec(tmp_path, count=2)), "--auto-approve")
    (kept,) = s3.get_bucket_encryption(Bucket=BUCKET)["ServerSideEncryptionConfiguration"]["Rules"]
    assert kept == rule
    replicas = [role["RoleName"] for role in roles(skerry_sandbox) if role["RoleName"].endswith(("-b-0", "-b-1"))]
    assert len(replicas) == 2
    for name in replicas:
        assert iam.get_role_policy(RoleName=name, PolicyName="key")["PolicyDocument"] == document


@pytest.mark.usefixtures("spec")
def test_key_is_not_changed_for_another(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", write_rules(tmp_path, f"kms_key: '{KEY}'"), "--auto-approve")
    skerry_sandbox.calls.clear()
    refused = skerry("apply", write_rules(tmp_path, f"kms_key: '{KEY}-2'"), "--auto-approve", code=2)
    assert f'write `aws: {{kms_key: "{KEY}"}}`' in refused.stderr + refused.stdout
    assert skerry_sandbox.calls.writes == []


def test_bucket_of_another_run_or_of_the_user_is_checked_for_the_key(spec: str, tmp_path: Path) -> None:
    skerry("apply", spec, "--auto-approve")
    ruled = write_rules(tmp_path, f"kms_key: '{KEY}'")
    refused = skerry("plan", ruled, "--set", "run=second", code=1)
    output = " ".join((refused.stdout + refused.stderr).split())
    assert f"has encryption AES256, and this spec demands {KEY}" in output
    assert "write the same rule into the spec of s3://acme-skerry/runs/tiny and run `skerry apply` for it" in output
    noted = skerry("plan", ruled, "--set", "run=second", "--set", "byo.bucket=true").output
    assert f"acme-skerry is yours and has encryption AES256, and this spec demands {KEY}" in noted


def test_key_of_another_region_is_refused_for_bucket_and_mirror(spec: str, tmp_path: Path) -> None:
    other = KEY.replace("us-east-1", "eu-west-1")
    refused = skerry("plan", spec, "--set", f"aws.kms_key='{other}'", code=1)
    assert f"acme-skerry is in us-east-1 and the key {other} in eu-west-1" in refused.stdout + refused.stderr
    mirrored = tmp_path / "mirrored.yaml"
    rules = f"aws: {{kms_key: '{KEY}'}}\nreplication: [{{to: 's3://acme-west/runs', region: us-west-2}}]\n"
    mirrored.write_text((tmp_path / "skerry.yaml").read_text() + rules)
    refused = skerry("plan", str(mirrored), code=1)
    assert f"acme-west is in us-west-2 and the key {KEY} in us-east-1" in refused.stdout + refused.stderr
    assert "acme-skerry is in" not in refused.stdout + refused.stderr


@pytest.mark.parametrize(("location", "fits"), [("us-central1", True), ("US-CENTRAL1", True), ("us", False)])
def test_key_of_another_location_is_refused_on_google(location: str, fits: bool) -> None:  # noqa: FBT001
    key = f"projects/acme/locations/{location}/keyRings/runs/cryptoKeys/runs"
    bucket = GoogleBucket(key="store", name="acme", region="us-central1", kms_key=key)
    assert (rule_problems([bucket]) == []) is fits


def test_key_in_a_spec_encrypts_the_bucket_on_google(tmp_path: Path, skerry_google: GoogleSandbox) -> None:
    skerry_google.any_image = True
    project = skerry_google.project
    key = f"projects/{project}/locations/us-central1/keyRings/runs/cryptoKeys/runs"
    group, store = VERTEX.format(project=project, digest=DIGEST), "gs://acme-skerry/runs"
    ruled = str(write_run(tmp_path, group, store=store, more=f"google: {{kms_key: {key}}}\n"))
    planned = json.loads(skerry("plan", ruled, "--json").stdout)["changes"]
    (bucket,) = (change for change in planned if change["address"] == "google_bucket.store")
    assert bucket["settings"]["kms_key"] == key
    skerry("apply", ruled, "--auto-approve")
    _, row = skerry_google.call("GET", "/storage/v1/b/acme-skerry")
    assert row["encryption"] == {"defaultKmsKeyName": key}
    assert "to change" not in skerry("plan", ruled, "--detailed-exitcode").output
    # Without the rule the bucket keeps its key, and an apply does not put another encryption there.
    without = str(write_run(tmp_path, group, store=store, more="limits: {max_hours: 24}\n"))
    skerry("apply", without, "--auto-approve")
    _, row = skerry_google.call("GET", "/storage/v1/b/acme-skerry")
    assert row["encryption"] == {"defaultKmsKeyName": key}


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
    assert (check["ok"], check["name"]) == (False, "login")
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
