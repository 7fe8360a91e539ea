from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from tests.infra.targets.aws import REGION, Answers
from tests.infra.targets.aws_batch.kit import context_of

from skerry.infra.clouds.aws import route_checks
from skerry.infra.targets.aws_batch import checks
from skerry.infra.targets.aws_batch.options import AwsBatchTarget
from skerry.infra.targets.aws_batch.region_offer import find_region_offer
from skerry.runtime.errors import Invalid, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.target_and_store_interfaces import Check, RunContext
    from skerry.infra.targets.aws_batch.region_offer import RegionOffer

GPUS = "instance_types: [g5.xlarge], gpus: 1"
DENIED = Unauthorized("these credentials lack the permission")


@pytest.fixture
def answers(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Answers to the calls that the emulation lacks: all is allowed, and the quota is 8 vCPUs."""
    quota = {"Value": 8.0, "QuotaName": "Running On-Demand G and VT instances"}
    allowed = {"EvaluationResults": [{"EvalDecision": "allowed"}]}
    return Answers(aws, monkeypatch, get_service_quota={"Quota": quota}, simulate_principal_policy=allowed)


@pytest.fixture
def find_offer(aws: Aws, tmp_path: Path) -> Callable[[str], RegionOffer]:
    """Find what the region offers to a group with these options."""
    return lambda options: find_region_offer(aws, AwsBatchTarget.of(context_of(tmp_path, options).spec.replicas[0]))


def first(aws: Aws, context: RunContext, name: str) -> Check:
    """Return the check of this name and run none after it: the emulation lacks operations that they need."""
    return next(check for check in checks.checks(aws, context, context.spec.replicas) if check.name == name)


def checks_by_name(aws: Aws, context: RunContext) -> dict[str, Check]:
    return {check.name: check for check in checks.checks(aws, context, context.spec.replicas)}


@pytest.mark.usefixtures("answers")
def test_checks_pass_if_quotas_and_permissions_suffice(aws: Aws, tmp_path: Path) -> None:
    by_name = checks_by_name(aws, context_of(tmp_path, GPUS, count=2))
    quota = "quota L-DB2E81BA in us-east-1"
    assert list(by_name) == ["machines of batch", quota, "roles", "right iam:PassRole"]
    assert all(check.ok for check in by_name.values())
    text = "Running On-Demand G and VT instances: 8 vCPUs needed at once, 8 allowed"
    assert by_name[quota].text.startswith(text)


def test_missing_quota_or_permission_names_what_to_request(aws: Aws, tmp_path: Path, answers: Answers) -> None:
    answers |= {
        "get_service_quota": {"Quota": {"Value": 0.0, "QuotaName": "All G and VT Spot Instance Requests"}},
        "simulate_principal_policy": {"EvaluationResults": [{"EvalDecision": "implicitDeny"}]},
        "get_account_summary": {"SummaryMap": {"Roles": 998, "RolesQuota": 1000}},
    }
    by_name = checks_by_name(aws, context_of(tmp_path, f"{GPUS}, spot: true", count=2))
    assert [check.ok for check in by_name.values()] == [True, False, False, False]
    assert by_name["quota L-3819A6DF in us-east-1"].advice.endswith("--quota-code L-3819A6DF --desired-value 8")
    assert by_name["roles"].text == "4 are needed, 998 of 1000 exist"
    assert "iam:PassRole" in by_name["right iam:PassRole"].advice


def test_unreadable_facts_are_unknown(aws: Aws, tmp_path: Path, answers: Answers) -> None:
    answers |= dict.fromkeys(("get_service_quota", "simulate_principal_policy", "get_account_summary"), DENIED)
    assert [check.ok for check in checks_by_name(aws, context_of(tmp_path, GPUS)).values()] == [True, None, None, None]


@pytest.mark.usefixtures("answers")
def test_unavailable_machines_do_not_stop_the_other_checks(aws: Aws, tmp_path: Path) -> None:
    by_name = checks_by_name(aws, context_of(tmp_path, "instance_types: [g99.xlarge]"))
    assert (by_name["machines of batch"].ok, by_name["roles"].ok) == (False, True)


@pytest.mark.parametrize(
    ("name", "spot", "quota"),
    [
        ("g6e.xlarge", True, "L-3819A6DF"),
        ("gr6.4xlarge", False, "L-DB2E81BA"),
        ("vt1.3xlarge", False, "L-DB2E81BA"),
        ("p4d.24xlarge", True, "L-7212CCBC"),
        ("p5.48xlarge", True, "L-C4BD4855"),
        ("p5en.48xlarge", False, "L-417A185B"),
        ("c7i.2xlarge", False, "L-1216C47A"),
        ("t3.large", True, "L-34B43A08"),
        ("inf2.xlarge", False, "L-1945791B"),
        ("trn1.2xlarge", True, "L-6B0D517C"),
        ("dl1.24xlarge", False, "L-6E869C2A"),
        ("d3.xlarge", False, "L-1216C47A"),
        ("x2iedn.xlarge", False, "L-7295265B"),
    ],
)
def test_family_of_a_type_selects_the_quota(name: str, *, spot: bool, quota: str) -> None:
    assert checks.quota_of(name, spot=spot) == quota


def test_subnets_are_in_zones_that_offer_a_type(aws: Aws, find_offer: Callable[[str], RegionOffer]) -> None:
    offer = find_offer(f"{GPUS}, zones: [us-east-1b, us-east-1c]")
    rows = aws.call("ec2", REGION, "describe_subnets", SubnetIds=list(offer.subnets))["Subnets"]
    assert {row["AvailabilityZone"] for row in rows} == {"us-east-1b", "us-east-1c"}
    assert offer.vpc is not None
    (machine,) = offer.machines
    assert (machine.vcpus, machine.memory_mib, machine.gpus) == (4, 16384, 1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("instance_types: [g99.xlarge]", "g99.xlarge is not offered in us-east-1: nor in any large region; check its"),
        ("instance_types: [g5.xlarge, g5g.xlarge], gpus: 1", "g5g.xlarge runs arm64, and the replica image x86_64;"),
        ("instance_types: [g5.xlarge], zones: [us-east-1z]", r"offered in none of us-east-1z; choose from us-east-1a"),
        ("instance_types: [g5.xlarge], byo: {subnets: [subnet-0123456789abcdef0]}", "not exist: ec2:DescribeSubnets"),
    ],
)
def test_group_that_the_region_cannot_hold_is_reported(
    find_offer: Callable[[str], RegionOffer], options: str, complaint: str
) -> None:
    with pytest.raises(Invalid, match=complaint):
        find_offer(options)


def test_gpus_without_drivers_are_rejected(find_offer: Callable[[str], RegionOffer], answers: Answers) -> None:
    # The emulation does not offer it any more, AWS does in some regions.
    old = {"InstanceType": "p3.2xlarge", "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]}}
    answers["describe_instance_types"] = [old]
    answers["describe_instance_type_offerings"] = [{"InstanceType": "p3.2xlarge", "Location": "us-east-1a"}]
    with pytest.raises(Invalid, match=r"p3.2xlarge is too old for the machine image.*name another type"):
        find_offer("instance_types: [p3.2xlarge]")


def test_missing_default_network_suggests_byo_subnets(
    find_offer: Callable[[str], RegionOffer], answers: Answers
) -> None:
    answers["describe_vpcs"] = []
    with pytest.raises(Invalid, match="no default VPC in us-east-1"):
        find_offer(GPUS)


def test_default_subnets_without_a_way_out_are_not_used(
    aws: Aws, tmp_path: Path, find_offer: Callable[[str], RegionOffer]
) -> None:
    options = "instance_types: [g5.xlarge], zones: [us-east-1a, us-east-1b]"
    one_subnet, other_subnet = find_offer(options).subnets

    def give_addresses(subnet: str, *, give: bool) -> None:
        aws.call("ec2", REGION, "modify_subnet_attribute", SubnetId=subnet, MapPublicIpOnLaunch={"Value": give})

    try:
        give_addresses(one_subnet, give=False)
        offer = find_offer(options)
        assert (offer.subnets, offer.stranded) == ((other_subnet,), (one_subnet,))
        text = first(aws, context_of(tmp_path, options), "machines of batch").text
        assert f"1 subnets (without {one_subnet}, which have no way out" in text
        give_addresses(other_subnet, give=False)
        complaint = r"neither image nor bucket: .*--map-public-ip-on-launch`\), or name other subnets: "
        with pytest.raises(Invalid, match=complaint):
            find_offer(options)
    finally:
        for subnet in (one_subnet, other_subnet):
            give_addresses(subnet, give=True)


class Private:
    """A network of the user with one subnet; its machines get no public addresses."""

    def __init__(self, aws: Aws, folder: Path, block: str = "10.3.0.0/16") -> None:
        self.aws, self.folder = aws, folder
        self.make = partial(aws.call, "ec2", REGION)
        self.vpc = self.make("create_vpc", CidrBlock=block)["Vpc"]["VpcId"]
        subnet = self.make("create_subnet", VpcId=self.vpc, CidrBlock=block, AvailabilityZone="us-east-1a")
        self.subnet = subnet["Subnet"]["SubnetId"]

    def internet_gateway(self) -> str:
        gateway = self.make("create_internet_gateway")["InternetGateway"]["InternetGatewayId"]
        self.make("attach_internet_gateway", InternetGatewayId=gateway, VpcId=self.vpc)
        return str(gateway)

    def nat_gateway(self) -> str:
        address = self.make("allocate_address", Domain="vpc")["AllocationId"]
        response = self.make("create_nat_gateway", SubnetId=self.subnet, AllocationId=address)
        return str(response["NatGateway"]["NatGatewayId"])

    def security_group(self) -> str:
        response = self.make("create_security_group", GroupName=f"g-{self.vpc}", Description="d", VpcId=self.vpc)
        return str(response["GroupId"])

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
        return first(self.aws, context_of(self.folder, options), "network of batch")


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
    private.make("modify_subnet_attribute", SubnetId=private.subnet, MapPublicIpOnLaunch={"Value": True})
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


def test_unreadable_network_is_unknown(private: Private, answers: Answers) -> None:
    answers["describe_route_tables"] = DENIED
    assert private.check().ok is None


def test_byo_network_must_be_one_network(
    aws: Aws, tmp_path: Path, private: Private, find_offer: Callable[[str], RegionOffer]
) -> None:
    other = Private(aws, tmp_path, "10.4.0.0/16")

    def find(byo: str) -> RegionOffer:
        return find_offer(f"instance_types: [g5.xlarge], byo: {{{byo}}}")

    offer = find(f"subnets: [{private.subnet}], security_groups: [{private.security_group()}]")
    assert (offer.vpc, offer.subnets) == (private.vpc, (private.subnet,))
    with pytest.raises(Invalid, match="are in several networks"):
        find(f"subnets: [{private.subnet}, {other.subnet}]")
    with pytest.raises(Invalid, match=f"is in {other.vpc}, and the subnets in {private.vpc}"):
        find(f"subnets: [{private.subnet}], security_groups: [{other.security_group()}]")
