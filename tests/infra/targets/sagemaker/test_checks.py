from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.targets.sagemaker.kit import ground_of
from tests.support.batchplace import make_role

from skerry.infra.cost import prices
from skerry.infra.targets.sagemaker.machine_lookup import find_machine
from skerry.infra.targets.sagemaker.target import SageMaker, checks, costs
from skerry.runtime.errors import Invalid, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.target import Check, Rate, RunContext
    from skerry.infra.targets.sagemaker.options import SageMakerTarget
    from skerry.testing.sandbox import Sandbox

PLAIN = "ml.g5.xlarge for training job usage"
SPOT = "ml.g5.xlarge for spot training job usage"
LONGEST = "Longest run time for a training job"
ALLOWED = {"EvaluationResults": [{"EvalDecision": "allowed"}]}


def target_of(ground: RunContext) -> SageMakerTarget:
    target = ground.spec.replicas[0].target
    assert target.kind == "sagemaker"
    return target


_ASKED: list[Any] = []


def quotas(**values: float) -> list[dict[str, Any]]:
    return [{"QuotaName": name, "QuotaCode": f"L-{len(name)}", "Value": value} for name, value in values.items()]


@pytest.fixture
def answering(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answer operations that the emulation lacks as AWS does; an exception as an answer is raised."""
    _ASKED.clear()
    answers: dict[str, Any] = {
        "simulate_principal_policy": ALLOWED,
        "list_aws_default_service_quotas": quotas(**{PLAIN: 0.0, SPOT: 0.0, LONGEST: 432000.0}),
        "list_service_quotas": quotas(**{PLAIN: 4.0}),
    }

    def answer(operation: str) -> Any:
        prepared = answers.get(operation)
        if isinstance(prepared, Exception):
            raise prepared
        return prepared

    calling, paging = type(aws).call, type(aws).pages

    def call(self: Aws, service: str, region: str, operation: str, /, **parameters: object) -> dict[str, Any]:
        if operation == "simulate_principal_policy":
            _ASKED.append(parameters["ResourceArns"])
        prepared = answer(operation)
        return calling(self, service, region, operation, **parameters) if prepared is None else prepared

    def pages(
        self: Aws, service: str, region: str, operation: str, key: str, /, **parameters: object
    ) -> Iterator[dict[str, Any]]:
        prepared = answer(operation)
        return paging(self, service, region, operation, key, **parameters) if prepared is None else iter(prepared)

    monkeypatch.setattr(type(aws), "call", call)
    monkeypatch.setattr(type(aws), "pages", pages)
    return answers


def checks_by_name(aws: Aws, ground: RunContext) -> dict[str, Check]:
    return {check.name: check for check in checks.checks(aws, ground, ground.spec.replicas)}


def test_checks_pass_if_quotas_and_permissions_suffice(aws: Aws, tmp_path: Path, answering: dict[str, Any]) -> None:
    del answering
    by_name = checks_by_name(aws, ground_of(tmp_path, count=4, more="limits: {max_hours: 100}\n"))
    assert {name: check.ok for name, check in by_name.items()} == {
        "machine of sm": True,
        f"quota of {PLAIN} in us-east-1": True,
        "longest job in us-east-1": True,
        "artifacts of sm": True,
        "right iam:PassRole to SageMaker": True,
    }
    assert by_name["machine of sm"].text == "ml.g5.xlarge: 1 GPUs, disks of its own, in us-east-1"
    assert by_name[f"quota of {PLAIN} in us-east-1"].text.startswith("4 needed at once, 4 allowed")


def test_missing_quota_or_permission_names_what_to_request(aws: Aws, tmp_path: Path, answering: dict[str, Any]) -> None:
    answering["simulate_principal_policy"] = {"EvaluationResults": [{"EvalDecision": "implicitDeny"}]}
    by_name = checks_by_name(aws, ground_of(tmp_path, "spot: true", more="limits: {max_hours: 200}\n"))
    spot = by_name[f"quota of {SPOT} in us-east-1"]
    assert (spot.ok, spot.text) == (False, "2 needed at once, 0 allowed")
    assert spot.advice.endswith(f"--region us-east-1 --quota-code L-{len(SPOT)} --desired-value 2")
    longest = by_name["longest job in us-east-1"]
    assert (longest.ok, longest.text) == (False, "720000 s are requested, 432000 allowed")
    assert longest.advice.endswith(f"--region us-east-1 --quota-code L-{len(LONGEST)} --desired-value 720000")
    assert "iam:PassRole" in by_name["right iam:PassRole to SageMaker"].advice


def test_job_without_limits_gets_the_default_time_of_an_account(
    aws: Aws, tmp_path: Path, answering: dict[str, Any]
) -> None:
    del answering
    assert checks_by_name(aws, ground_of(tmp_path))["longest job in us-east-1"].ok


def test_plan_rejects_jobs_longer_than_the_quota(aws: Aws, tmp_path: Path, answering: dict[str, Any]) -> None:
    def resources(options: str) -> object:
        ground = ground_of(tmp_path, options)
        return SageMaker(aws).resources(ground, ground.spec.replicas)

    with pytest.raises(Invalid, match=r"no job may run for 864000 s in us-east-1, 432000 s are allowed; write a short"):
        resources("max_runtime: 10d")
    answering["list_service_quotas"] = quotas(**{LONGEST: 864000.0})
    assert resources("max_runtime: 10d")
    answering["list_service_quotas"] = Unauthorized("these credentials lack the permission")
    assert resources("max_runtime: 20d")
    # The default time of every account needs no request for quotas.
    answering["list_service_quotas"] = answering["list_aws_default_service_quotas"] = AssertionError()
    assert resources("")


def test_pass_role_is_checked_for_every_role(
    aws: Aws, sandbox: Sandbox, tmp_path: Path, answering: dict[str, Any]
) -> None:
    name = "right iam:PassRole to SageMaker"
    own_role = make_role(sandbox, "own", "sagemaker.amazonaws.com")
    answering["simulate_principal_policy"] = {
        "EvaluationResults": [
            {
                "EvalDecision": "implicitDeny",
                "ResourceSpecificResults": [{"EvalResourceName": own_role, "EvalResourceDecision": "implicitDeny"}],
            }
        ]
    }
    for own in (own_role, "own"):
        check = checks_by_name(aws, ground_of(tmp_path, f"byo: {{role: '{own}'}}"))[name]
        assert (check.ok, check.text) == (False, f"implicitDeny for {own_role}")
        assert _ASKED[-1] == [own_role]
    answering["simulate_principal_policy"] = ALLOWED
    ground = ground_of(tmp_path, "role: replica")
    assert checks_by_name(aws, ground)[name].ok
    roles = [
        resource.name
        for resource in SageMaker(aws).resources(ground, ground.spec.replicas)
        if resource.KIND == "aws_role"
    ]
    assert _ASKED[-1] == [f"arn:aws:iam::123456789012:role/skerry/{role}" for role in roles]
    assert len(roles) == 2


def test_machine_without_a_quota_is_not_offered(aws: Aws, tmp_path: Path, answering: dict[str, Any]) -> None:
    answering["list_service_quotas"] = answering["list_aws_default_service_quotas"] = []
    check = checks_by_name(aws, ground_of(tmp_path))[f"quota of {PLAIN} in us-east-1"]
    assert (check.ok, check.advice) == (False, "name another instance, or another region")


def test_unreadable_quotas_are_unknown(aws: Aws, tmp_path: Path, answering: dict[str, Any]) -> None:
    no = Unauthorized("these credentials lack the permission")
    answering |= dict.fromkeys(("list_aws_default_service_quotas", "simulate_principal_policy", "head_bucket"), no)
    by_name = checks_by_name(aws, ground_of(tmp_path))
    assert [check.ok for check in by_name.values()] == [True, None, None, None]


def test_artifacts_must_be_in_the_region_of_the_machines(
    aws: Aws, sandbox: Sandbox, tmp_path: Path, answering: dict[str, Any]
) -> None:
    del answering
    ground = ground_of(tmp_path, "output: s3://mine/artifacts")
    assert checks_by_name(aws, ground)["artifacts of sm"].text == "there is no bucket mine"
    where = {"CreateBucketConfiguration": {"LocationConstraint": "eu-west-1"}}
    sandbox.client("s3").create_bucket(Bucket="mine", **where)
    check = checks_by_name(aws, ground)["artifacts of sm"]
    assert (check.ok, check.text) == (
        False,
        "mine is in eu-west-1, and the machines in us-east-1: a job that leaves files would fail",
    )


@pytest.mark.parametrize(
    ("options", "instance", "complaint"),
    [
        ("", "ml.g99.xlarge", "instance: ml.g99.xlarge is not offered in us-east-1; us-east-1 has no ml.g99"),
        (
            "",
            "ml.g5.9xlarge",
            "instance: ml.g5.9xlarge is not offered in us-east-1; us-east-1 has ml.g5.xlarge, ml.g5.16x",
        ),
        ("", "ml.g5g.xlarge", "ml.g5g.xlarge runs arm64, and the replica image x86_64; name another instance"),
        ("gpus: 2", "ml.g5.xlarge", "gpus: 2 are more than ml.g5.xlarge has; write gpus: 1, or less"),
        ("volume: 200GiB", "ml.g5.xlarge", "volume: ml.g5.xlarge has its own encrypted disks of a fixed size"),
        ("kms_key: abc", "ml.g5.xlarge", "kms_key: ml.g5.xlarge has its own encrypted disks"),
    ],
)
def test_plan_rejects_options_that_the_machine_does_not_support(
    aws: Aws, tmp_path: Path, answering: dict[str, Any], options: str, instance: str, complaint: str
) -> None:
    # The emulation does not support patterns of names.
    offered = ("ml.g5.16xlarge", "ml.g5.xlarge") if ".g5." in instance else ()
    answering["describe_instance_type_offerings"] = [{"InstanceType": name.removeprefix("ml.")} for name in offered]
    ground = ground_of(tmp_path, options, instance=instance)
    with pytest.raises(Invalid, match=f"replicas sm: {complaint}"):
        SageMaker(aws).resources(ground, ground.spec.replicas)


def test_byo_network_must_be_one_network(aws: Aws, sandbox: Sandbox, tmp_path: Path) -> None:
    ec2 = sandbox.client("ec2")
    vpcs = [ec2.create_vpc(CidrBlock=f"10.{number}.0.0/16")["Vpc"]["VpcId"] for number in range(2)]
    subnets = [
        ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.{number}.1.0/24")["Subnet"]["SubnetId"]
        for number, vpc in enumerate(vpcs)
    ]
    group = ec2.create_security_group(GroupName="mine", Description="x", VpcId=vpcs[0])["GroupId"]

    def target(*named: str) -> SageMakerTarget:
        options = f"byo: {{subnets: [{', '.join(named)}], security_groups: [{group}]}}"
        return target_of(ground_of(tmp_path, options))

    assert find_machine(aws, target(subnets[0])).own_disk
    with pytest.raises(Invalid, match="are in several networks"):
        find_machine(aws, target(*subnets))
    with pytest.raises(Invalid, match=f"the security group {group} is in {vpcs[0]}, and the subnets in {vpcs[1]}"):
        find_machine(aws, target(subnets[1]))


OWN = (
    '{"format": 1, "cloud": "aws", "regions": {"us-east-1": {"machines": {"ml.g5.xlarge": 1.4}, '
    '"spot": {"ml.g5.xlarge": 0.5}}}}'
)


def test_rate_is_from_the_price_tables_or_unknown(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(OWN)
    own = prices.load("aws", tmp_path / "own.json")

    def rate(prices_: prices.Prices, options: str = "", more: str = "") -> Rate:
        spec = ground_of(tmp_path, options, more=more).spec
        (rate,) = costs.rates(prices_, spec.limits, spec.replicas)
        return rate

    steady = rate(own, "max_runtime: 6h")
    assert (steady.per_hour, steady.cap_hours) == (2.8, 6)
    assert steady.source == "price in own.json, disk not counted"
    spot = rate(own, "spot: true")
    assert (spot.per_hour, spot.what) == (1.0, "ml.g5.xlarge, spot, in us-east-1")
    unknown = rate(prices.Prices("aws"))
    assert (unknown.per_hour, unknown.source) == (None, "no price of ml.g5.xlarge in us-east-1")
    # With limits of the run, the cap is the longest time of a job; the engine applies the limits to it.
    limits = ("", "max_hours: 9", "max_cost_usd: 9")
    capped = [rate(own, more=f"limits: {{{limit}}}\n").cap_hours for limit in limits]
    assert capped == [5 * 24, 28 * 24, 28 * 24]
