from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.targets.aws_batch.kit import ground_of

from skerry.infra.clouds.aws import route_checks
from skerry.infra.targets.aws_batch import checks
from skerry.infra.targets.aws_batch.region_offer import find_region_offer
from skerry.runtime.errors import Invalid, Unauthorized

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.target import Check, RunContext
    from skerry.infra.targets.aws_batch.options import AwsBatchTarget


def target_of(ground: RunContext) -> AwsBatchTarget:
    target = ground.spec.replicas[0].target
    assert target.kind == "aws_batch"
    return target


def answering(aws: Aws, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> None:
    """Answer operations that the emulation lacks as AWS does; an exception as an answer is raised."""
    real = type(aws).call

    def call(self: Aws, service: str, region: str, operation: str, /, **parameters: object) -> dict[str, Any]:
        answer = answers.get(operation)
        if answer is None:
            return real(self, service, region, operation, **parameters)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(type(aws), "call", call)


def first(aws: Aws, ground: RunContext, name: str) -> Check:
    """Return the check of this name and run none after it: the emulation lacks operations that they need."""
    return next(check for check in checks.checks(aws, ground, ground.spec.replicas) if check.name == name)


def checks_by_name(aws: Aws, ground: RunContext) -> dict[str, Check]:
    return {check.name: check for check in checks.checks(aws, ground, ground.spec.replicas)}


ALLOWED = {"EvaluationResults": [{"EvalDecision": "allowed"}]}


def test_checks_pass_if_quotas_and_permissions_suffice(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = {"Quota": {"Value": 8.0, "QuotaName": "Running On-Demand G and VT instances"}}
    answering(aws, monkeypatch, {"get_service_quota": quota, "simulate_principal_policy": ALLOWED})
    by_name = checks_by_name(aws, ground_of(tmp_path, "instance_types: [g5.xlarge], gpus: 1", count=2))
    assert {name: check.ok for name, check in by_name.items()} == {
        "machines of batch": True,
        "quota L-DB2E81BA in us-east-1": True,
        "roles": True,
        "right iam:PassRole": True,
    }
    assert by_name["quota L-DB2E81BA in us-east-1"].text.startswith(
        "Running On-Demand G and VT instances: 8 vCPUs needed at once, 8 allowed"
    )


def test_missing_quota_or_permission_names_what_to_request(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = {"Quota": {"Value": 0.0, "QuotaName": "All G and VT Spot Instance Requests"}}
    denied = {"EvaluationResults": [{"EvalDecision": "implicitDeny"}]}
    summary = {"SummaryMap": {"Roles": 998, "RolesQuota": 1000}}
    answers = {"get_service_quota": quota, "simulate_principal_policy": denied, "get_account_summary": summary}
    answering(aws, monkeypatch, answers)
    by_name = checks_by_name(aws, ground_of(tmp_path, "instance_types: [g5.xlarge], gpus: 1, spot: true", count=2))
    assert [check.ok for check in by_name.values()] == [True, False, False, False]
    assert by_name["quota L-3819A6DF in us-east-1"].advice.endswith("--quota-code L-3819A6DF --desired-value 8")
    assert by_name["roles"].text == "4 are needed, 998 of 1000 exist"
    assert "iam:PassRole" in by_name["right iam:PassRole"].advice


def test_unreadable_quota_is_unknown(aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no = Unauthorized("these credentials lack the permission")
    names = ("get_service_quota", "simulate_principal_policy", "get_account_summary")
    answering(aws, monkeypatch, dict.fromkeys(names, no))
    by_name = checks_by_name(aws, ground_of(tmp_path, "instance_types: [g5.xlarge], gpus: 1"))
    assert [check.ok for check in by_name.values()] == [True, None, None, None]


def test_unavailable_machines_do_not_stop_the_other_checks(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(aws, monkeypatch, {"simulate_principal_policy": ALLOWED})
    by_name = checks_by_name(aws, ground_of(tmp_path, "instance_types: [g99.xlarge]"))
    assert (by_name["machines of batch"].ok, by_name["roles"].ok) == (False, True)


QUOTAS = {
    ("g6e.xlarge", True): "L-3819A6DF",
    ("gr6.4xlarge", False): "L-DB2E81BA",
    ("vt1.3xlarge", False): "L-DB2E81BA",
    ("p4d.24xlarge", True): "L-7212CCBC",
    ("p5.48xlarge", True): "L-C4BD4855",
    ("p5en.48xlarge", False): "L-417A185B",
    ("c7i.2xlarge", False): "L-1216C47A",
    ("t3.large", True): "L-34B43A08",
    ("inf2.xlarge", False): "L-1945791B",
    ("trn1.2xlarge", True): "L-6B0D517C",
    ("dl1.24xlarge", False): "L-6E869C2A",
    ("d3.xlarge", False): "L-1216C47A",
    ("x2iedn.xlarge", False): "L-7295265B",
}


@pytest.mark.parametrize(("name", "spot"), QUOTAS)
def test_family_of_a_type_selects_the_quota(name: str, *, spot: bool) -> None:
    assert checks.quota_of(name, spot=spot) == QUOTAS[name, spot]


def test_subnets_are_in_zones_that_offer_a_type(aws: Aws, tmp_path: Path) -> None:
    target = target_of(ground_of(tmp_path, "instance_types: [g5.xlarge], gpus: 1, zones: [us-east-1b, us-east-1c]"))
    offer = find_region_offer(aws, target)
    rows = aws.call("ec2", "us-east-1", "describe_subnets", SubnetIds=list(offer.subnets))["Subnets"]
    assert {row["AvailabilityZone"] for row in rows} == {"us-east-1b", "us-east-1c"}
    assert offer.vpc is not None
    (machine,) = offer.machines
    assert (machine.vcpus, machine.memory_mib, machine.gpus) == (4, 16384, 1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            "instance_types: [g99.xlarge]",
            r"g99.xlarge is not offered in us-east-1: nor in any large region; check its spelling",
        ),
        ("instance_types: [g5.xlarge, g5g.xlarge], gpus: 1", "g5g.xlarge runs arm64, and the replica image x86_64;"),
        ("instance_types: [g5.xlarge], zones: [us-east-1z]", r"offered in none of us-east-1z; choose from us-east-1a"),
    ],
)
def test_type_that_is_not_offered_is_reported_with_alternatives(
    aws: Aws, tmp_path: Path, options: str, complaint: str
) -> None:
    with pytest.raises(Invalid, match=complaint):
        find_region_offer(aws, target_of(ground_of(tmp_path, options)))


def test_gpus_without_drivers_are_rejected(aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The emulation does not offer it any more, AWS does in some regions.
    old = {"InstanceType": "p3.2xlarge", "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]}}
    offering = {"InstanceType": "p3.2xlarge", "Location": "us-east-1a"}
    rows = {"describe_instance_types": [old], "describe_instance_type_offerings": [offering]}

    def pages(_aws: Aws, _service: str, _region: str, operation: str, _key: str, /, **_parameters: object) -> Any:
        return iter(rows[operation])

    monkeypatch.setattr(type(aws), "pages", pages)
    with pytest.raises(Invalid, match=r"p3.2xlarge is too old for the machine image.*name another type"):
        find_region_offer(aws, target_of(ground_of(tmp_path, "instance_types: [p3.2xlarge]")))


def test_missing_default_network_suggests_byo_subnets(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(aws).pages

    def pages(self: Aws, service: str, region: str, operation: str, key: str, /, **parameters: object) -> Any:
        return iter(()) if operation == "describe_vpcs" else real(self, service, region, operation, key, **parameters)

    monkeypatch.setattr(type(aws), "pages", pages)
    with pytest.raises(Invalid, match="no default VPC in us-east-1"):
        find_region_offer(aws, target_of(ground_of(tmp_path, "instance_types: [g5.xlarge]")))


def test_default_subnets_without_a_way_out_are_not_used(aws: Aws, tmp_path: Path) -> None:
    target = target_of(ground_of(tmp_path, "instance_types: [g5.xlarge], zones: [us-east-1a, us-east-1b]"))
    first_subnet, second_subnet = find_region_offer(aws, target).subnets

    def give_addresses(subnet: str, *, give: bool) -> None:
        aws.call("ec2", "us-east-1", "modify_subnet_attribute", SubnetId=subnet, MapPublicIpOnLaunch={"Value": give})

    try:
        give_addresses(first_subnet, give=False)
        offer = find_region_offer(aws, target)
        assert (offer.subnets, offer.stranded) == ((second_subnet,), (first_subnet,))
        ground = ground_of(tmp_path, "instance_types: [g5.xlarge], zones: [us-east-1a, us-east-1b]")
        assert (
            f"1 subnets (without {first_subnet}, which have no way out" in first(aws, ground, "machines of batch").text
        )
        give_addresses(second_subnet, give=False)
        with pytest.raises(
            Invalid, match=r"neither image nor bucket: .*--map-public-ip-on-launch`\), or name other subnets: "
        ):
            find_region_offer(aws, target)
    finally:
        for subnet in (first_subnet, second_subnet):
            give_addresses(subnet, give=True)


class Private:
    """A network of the user with one subnet; its machines get no public addresses."""

    def __init__(self, aws: Aws, folder: Path) -> None:
        self.aws, self.folder = aws, folder
        self.vpc = self.make("create_vpc", CidrBlock="10.3.0.0/16")["Vpc"]["VpcId"]
        subnet = self.make("create_subnet", VpcId=self.vpc, CidrBlock="10.3.0.0/24", AvailabilityZone="us-east-1a")
        self.subnet = subnet["Subnet"]["SubnetId"]

    def make(self, operation: str, **parameters: object) -> dict[str, Any]:
        return self.aws.call("ec2", "us-east-1", operation, **parameters)

    def internet_gateway(self) -> str:
        gateway = self.make("create_internet_gateway")["InternetGateway"]["InternetGatewayId"]
        self.make("attach_internet_gateway", InternetGatewayId=gateway, VpcId=self.vpc)
        return str(gateway)

    def nat_gateway(self) -> str:
        address = self.make("allocate_address", Domain="vpc")["AllocationId"]
        response = self.make("create_nat_gateway", SubnetId=self.subnet, AllocationId=address)
        return str(response["NatGateway"]["NatGatewayId"])

    def route(self, *, own_table: bool, **target: str) -> None:
        if own_table:
            table = self.make("create_route_table", VpcId=self.vpc)["RouteTable"]["RouteTableId"]
            self.make("associate_route_table", RouteTableId=table, SubnetId=self.subnet)
        else:
            of_vpc = [{"Name": "vpc-id", "Values": [self.vpc]}]
            table = self.make("describe_route_tables", Filters=of_vpc)["RouteTables"][0]["RouteTableId"]
        self.make("create_route", RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", **target)

    def check(self) -> Check:
        options = f"instance_types: [g5.xlarge], byo: {{subnets: [{self.subnet}]}}"
        return first(self.aws, ground_of(self.folder, options), "network of batch")


@pytest.fixture
def private(aws: Aws, tmp_path: Path) -> Private:
    return Private(aws, tmp_path)


def test_byo_subnet_without_a_visible_way_out_is_unknown(private: Private) -> None:
    check = private.check()
    assert check.ok is None
    assert private.subnet in check.text
    assert "no endpoint for ecr.api, ecr.dkr, ecs, ecs-agent, ecs-telemetry, logs, s3; jobs may wait" in check.text
    assert "NAT gateway" in check.advice


def test_internet_gateway_needs_a_public_address(private: Private) -> None:
    private.route(own_table=False, GatewayId=private.internet_gateway())
    assert private.check().ok is None
    addresses = {"Value": True}
    private.make("modify_subnet_attribute", SubnetId=private.subnet, MapPublicIpOnLaunch=addresses)
    assert private.check().ok is True


@pytest.mark.parametrize("own_table", [True, False])
def test_route_to_a_nat_gateway_is_a_way_out(private: Private, *, own_table: bool) -> None:
    private.route(own_table=own_table, NatGatewayId=private.nat_gateway())
    assert private.check().ok is True


def test_route_table_of_the_subnet_overrides_the_main_table(private: Private) -> None:
    private.route(own_table=False, NatGatewayId=private.nat_gateway())
    private.route(own_table=True, GatewayId=private.internet_gateway())
    assert private.check().ok is None


def test_endpoints_for_all_services_replace_a_way_out(private: Private) -> None:
    for name in route_checks.NEEDED[1:]:
        private.make("create_vpc_endpoint", VpcId=private.vpc, ServiceName=f"com.amazonaws.us-east-1.{name}")
    assert "no endpoint for ecr.api; jobs" in private.check().text
    private.make("create_vpc_endpoint", VpcId=private.vpc, ServiceName="com.amazonaws.us-east-1.ecr.api")
    assert private.check().ok is True


def test_unreadable_network_is_unknown(private: Private, monkeypatch: pytest.MonkeyPatch) -> None:
    def stranded(*_: object) -> tuple[()]:
        raise Unauthorized("these credentials lack the permission ec2:DescribeRouteTables")

    monkeypatch.setattr(route_checks, "stranded", stranded)
    assert private.check().ok is None


def test_byo_network_must_be_one_network(aws: Aws, tmp_path: Path) -> None:
    def make(cidr: str) -> tuple[str, str]:
        vpc = aws.call("ec2", "us-east-1", "create_vpc", CidrBlock=cidr)["Vpc"]["VpcId"]
        subnet = aws.call("ec2", "us-east-1", "create_subnet", VpcId=vpc, CidrBlock=cidr, AvailabilityZone="us-east-1a")
        return str(vpc), str(subnet["Subnet"]["SubnetId"])

    def group_in(vpc: str) -> str:
        response = aws.call(
            "ec2", "us-east-1", "create_security_group", GroupName=f"g-{vpc}", Description="d", VpcId=vpc
        )
        return str(response["GroupId"])

    def target_with(byo: str) -> AwsBatchTarget:
        return target_of(ground_of(tmp_path, f"instance_types: [g5.xlarge], byo: {{{byo}}}"))

    (first_vpc, first_subnet), (second_vpc, second_subnet) = make("10.1.0.0/16"), make("10.2.0.0/16")
    surveyed = find_region_offer(
        aws, target_with(f"subnets: [{first_subnet}], security_groups: [{group_in(first_vpc)}]")
    )
    assert (surveyed.vpc, surveyed.subnets) == (first_vpc, (first_subnet,))
    with pytest.raises(Invalid, match="are in several networks"):
        find_region_offer(aws, target_with(f"subnets: [{first_subnet}, {second_subnet}]"))
    with pytest.raises(Invalid, match=f"is in {second_vpc}, and the subnets in {first_vpc}"):
        find_region_offer(aws, target_with(f"subnets: [{first_subnet}], security_groups: [{group_in(second_vpc)}]"))
    with pytest.raises(Invalid, match="does not exist: ec2:DescribeSubnets"):
        find_region_offer(aws, target_with("subnets: [subnet-0123456789abcdef0]"))
