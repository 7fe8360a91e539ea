from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.targets.aws import Answers
from tests.infra.targets.sagemaker.kit import context_of
from tests.support.batchplace import make_role

from skerry.infra.cost import prices
from skerry.infra.targets.sagemaker.machine_lookup import find_machine
from skerry.infra.targets.sagemaker.options import SageMakerTarget
from skerry.infra.targets.sagemaker.target import SageMaker, checks, costs
from skerry.runtime.errors import Invalid, Unauthorized

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.target_and_store_interfaces import Check, Rate, RunContext
    from skerry.testing.sandbox import Sandbox

PLAIN = "ml.g5.xlarge for training job usage"
SPOT = "ml.g5.xlarge for spot training job usage"
LONGEST = "Longest run time for a training job"
PASS_ROLE = "right iam:PassRole to SageMaker"  # noqa: S105  the name of a check
DENIED = Unauthorized("these credentials lack the permission")


def quotas(**values: float) -> list[dict[str, Any]]:
    return [{"QuotaName": name, "QuotaCode": f"L-{len(name)}", "Value": value} for name, value in values.items()]


@pytest.fixture
def answers(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Answers:
    return Answers(
        aws,
        monkeypatch,
        simulate_principal_policy={"EvaluationResults": [{"EvalDecision": "allowed"}]},
        list_aws_default_service_quotas=quotas(**{PLAIN: 0.0, SPOT: 0.0, LONGEST: 432000.0}),
        list_service_quotas=quotas(**{PLAIN: 4.0}),
    )


def checks_by_name(aws: Aws, context: RunContext) -> dict[str, Check]:
    return {check.name: check for check in checks.checks(aws, context, context.spec.replicas)}


@pytest.mark.usefixtures("answers")
def test_checks_pass_if_quotas_and_permissions_suffice(aws: Aws, tmp_path: Path) -> None:
    by_name = checks_by_name(aws, context_of(tmp_path, count=4, more="limits: {max_hours: 100}\n"))
    assert {name: check.ok for name, check in by_name.items()} == {
        "machine of sm": True,
        f"quota of {PLAIN} in us-east-1": True,
        "longest job in us-east-1": True,
        "artifacts of sm": True,
        PASS_ROLE: True,
    }
    assert by_name["machine of sm"].text == "ml.g5.xlarge: 1 GPUs, disks of its own, in us-east-1"
    assert by_name[f"quota of {PLAIN} in us-east-1"].text.startswith("4 needed at once, 4 allowed")
    # A job without limits has the default time of an account.
    assert checks_by_name(aws, context_of(tmp_path))["longest job in us-east-1"].ok


def test_missing_quota_or_permission_names_what_to_request(aws: Aws, tmp_path: Path, answers: Answers) -> None:
    answers["simulate_principal_policy"] = {"EvaluationResults": [{"EvalDecision": "implicitDeny"}]}
    by_name = checks_by_name(aws, context_of(tmp_path, "spot: true", more="limits: {max_hours: 200}\n"))
    spot, longest = by_name[f"quota of {SPOT} in us-east-1"], by_name["longest job in us-east-1"]
    assert (spot.ok, spot.text) == (False, "2 needed at once, 0 allowed")
    assert spot.advice.endswith(f"--region us-east-1 --quota-code L-{len(SPOT)} --desired-value 2")
    assert (longest.ok, longest.text) == (False, "720000 s are requested, 432000 allowed")
    assert longest.advice.endswith(f"--region us-east-1 --quota-code L-{len(LONGEST)} --desired-value 720000")
    assert "iam:PassRole" in by_name[PASS_ROLE].advice


def test_plan_rejects_jobs_longer_than_the_quota(aws: Aws, tmp_path: Path, answers: Answers) -> None:
    def resources(options: str) -> object:
        context = context_of(tmp_path, options)
        return SageMaker(aws).resources(context, context.spec.replicas)

    with pytest.raises(Invalid, match=r"no job may run for 864000 s in us-east-1, 432000 s are allowed; write a short"):
        resources("max_runtime: 10d")
    answers["list_service_quotas"] = quotas(**{LONGEST: 864000.0})
    assert resources("max_runtime: 10d")
    answers["list_service_quotas"] = DENIED
    assert resources("max_runtime: 20d")
    # The default time of every account needs no request for quotas.
    answers["list_service_quotas"] = answers["list_aws_default_service_quotas"] = AssertionError()
    assert resources("")


def test_pass_role_is_checked_for_every_role(aws: Aws, sandbox: Sandbox, tmp_path: Path, answers: Answers) -> None:
    allowed = answers["simulate_principal_policy"]
    own_role = make_role(sandbox, "own", "sagemaker.amazonaws.com")
    denied = [{"EvalResourceName": own_role, "EvalResourceDecision": "implicitDeny"}]
    answers["simulate_principal_policy"] = {
        "EvaluationResults": [{"EvalDecision": "implicitDeny", "ResourceSpecificResults": denied}]
    }
    for own in (own_role, "own"):
        check = checks_by_name(aws, context_of(tmp_path, f"byo: {{role: '{own}'}}"))[PASS_ROLE]
        assert (check.ok, check.text) == (False, f"implicitDeny for {own_role}")
        assert answers.sent[-1]["ResourceArns"] == [own_role]
    answers["simulate_principal_policy"] = allowed
    context = context_of(tmp_path, "role: replica")
    assert checks_by_name(aws, context)[PASS_ROLE].ok
    checked = answers.sent[-1]["ResourceArns"]
    resources = SageMaker(aws).resources(context, context.spec.replicas)
    roles = [resource.name for resource in resources if resource.KIND == "aws_role"]
    assert len(roles) == 2
    assert checked == [f"arn:aws:iam::123456789012:role/skerry/{role}" for role in roles]


def test_machine_without_a_quota_is_not_offered(aws: Aws, tmp_path: Path, answers: Answers) -> None:
    answers["list_service_quotas"] = answers["list_aws_default_service_quotas"] = []
    check = checks_by_name(aws, context_of(tmp_path))[f"quota of {PLAIN} in us-east-1"]
    assert (check.ok, check.advice) == (False, "name another instance, or another region")


def test_unreadable_facts_are_unknown(aws: Aws, tmp_path: Path, answers: Answers) -> None:
    answers |= dict.fromkeys(("list_aws_default_service_quotas", "simulate_principal_policy", "head_bucket"), DENIED)
    assert [check.ok for check in checks_by_name(aws, context_of(tmp_path)).values()] == [True, None, None, None]


@pytest.mark.usefixtures("answers")
def test_image_with_an_oci_manifest_is_reported(aws: Aws, sandbox: Sandbox, tmp_path: Path) -> None:
    context = context_of(tmp_path)
    assert "format of the image" not in checks_by_name(aws, context)
    sandbox.any_image = False
    # A missing image is reported by the check of the image.
    assert "format of the image" not in checks_by_name(aws, context)
    ecr, kind = sandbox.client("ecr"), "application/vnd.oci.image.index.v1+json"
    ecr.create_repository(repositoryName="skerry")
    manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": []})
    digest = ecr.put_image(repositoryName="skerry", imageManifest=manifest)["image"]["imageId"]["imageDigest"]
    image = f"{context.image.partition('@')[0]}@{digest}"
    check = checks_by_name(aws, replace(context, image=image))["format of the image"]
    assert (check.ok, check.stops_jobs) == (False, False)
    assert f"skerry has a manifest of the type {kind}" in check.text


@pytest.mark.usefixtures("answers")
def test_artifacts_must_be_in_the_region_of_the_machines(aws: Aws, sandbox: Sandbox, tmp_path: Path) -> None:
    context = context_of(tmp_path, "output: s3://mine/artifacts")
    assert checks_by_name(aws, context)["artifacts of sm"].text == "there is no bucket mine"
    where = {"CreateBucketConfiguration": {"LocationConstraint": "eu-west-1"}}
    sandbox.client("s3").create_bucket(Bucket="mine", **where)
    check = checks_by_name(aws, context)["artifacts of sm"]
    text = "mine is in eu-west-1, and the machines in us-east-1: a job that leaves files would fail"
    assert (check.ok, check.text) == (False, text)


@pytest.mark.parametrize(
    ("options", "instance", "complaint"),
    [
        ("", "ml.g99.xlarge", "instance: ml.g99.xlarge is not offered in us-east-1; us-east-1 has no ml.g99"),
        ("", "ml.g5.9xlarge", "instance: ml.g5.9xlarge is not .*; us-east-1 has ml.g5.xlarge, ml.g5.16x"),
        ("", "ml.g5g.xlarge", "ml.g5g.xlarge runs arm64, and the replica image x86_64; name another instance"),
        ("gpus: 2", "ml.g5.xlarge", "gpus: 2 are more than ml.g5.xlarge has; write gpus: 1, or less"),
        ("volume: 200GiB", "ml.g5.xlarge", "volume: ml.g5.xlarge has its own encrypted disks of a fixed size"),
        ("kms_key: abc", "ml.g5.xlarge", "kms_key: ml.g5.xlarge has its own encrypted disks"),
    ],
)
def test_plan_rejects_options_that_the_machine_does_not_support(
    aws: Aws, tmp_path: Path, answers: Answers, options: str, instance: str, complaint: str
) -> None:
    # The emulation does not support patterns of names.
    offered = ("g5.16xlarge", "g5.xlarge") if ".g5." in instance else ()
    answers["describe_instance_type_offerings"] = [{"InstanceType": name} for name in offered]
    context = context_of(tmp_path, options, instance=instance)
    with pytest.raises(Invalid, match=f"replicas sm: {complaint}"):
        SageMaker(aws).resources(context, context.spec.replicas)


def test_byo_network_is_checked(aws: Aws, sandbox: Sandbox, tmp_path: Path) -> None:
    ec2 = sandbox.client("ec2")
    vpcs = [ec2.create_vpc(CidrBlock=f"10.{number}.0.0/16")["Vpc"]["VpcId"] for number in range(2)]
    subnets = [
        ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.{number}.1.0/24")["Subnet"]["SubnetId"]
        for number, vpc in enumerate(vpcs)
    ]
    group = ec2.create_security_group(GroupName="mine", Description="x", VpcId=vpcs[0])["GroupId"]

    def target(subnet: str) -> SageMakerTarget:
        context = context_of(tmp_path, f"byo: {{subnets: [{subnet}], security_groups: [{group}]}}")
        return SageMakerTarget.of(context.spec.replicas[0])

    assert find_machine(aws, target(subnets[0])).own_disk
    with pytest.raises(Invalid, match=f"the security group {group} is in {vpcs[0]}, and the subnets in {vpcs[1]}"):
        find_machine(aws, target(subnets[1]))


def test_rate_is_from_the_price_tables_or_unknown(tmp_path: Path) -> None:
    machines = '{"machines": {"ml.g5.xlarge": 1.4}, "spot": {"ml.g5.xlarge": 0.5}}'
    (tmp_path / "own.json").write_text(f'{{"format": 1, "cloud": "aws", "regions": {{"us-east-1": {machines}}}}}')
    own = prices.load("aws", tmp_path / "own.json")

    def rate(table: prices.Prices, options: str = "", limit: str = "") -> Rate:
        spec = context_of(tmp_path, options, more=f"limits: {{{limit}}}\n").spec
        (rate,) = costs.rates(table, spec.limits, spec.replicas)
        return rate

    steady, spot, unknown = rate(own, "max_runtime: 6h"), rate(own, "spot: true"), rate(prices.Prices("aws"))
    assert (steady.per_hour, steady.cap_hours) == (2.8, 6)
    assert steady.source == "price in own.json, disk not counted"
    assert (spot.per_hour, spot.what) == (1.0, "ml.g5.xlarge, spot, in us-east-1")
    assert (unknown.per_hour, unknown.source) == (None, "no price of ml.g5.xlarge in us-east-1")
    # With limits of the run, the cap is the longest time of a job; the engine applies the limits to it.
    caps = [rate(own, limit=limit).cap_hours for limit in ("", "max_hours: 9", "max_cost_usd: 9")]
    assert caps == [5 * 24, 28 * 24, 28 * 24]
