"""Security groups admit no traffic; the default VPC is found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.clouds.aws.account import REGION, answer, check_golden, check_model, wanted
from tests.infra.clouds.aws.handlers import AwsHandlerSuite

from skerry.infra.clouds.aws.security_group_in_existing_vpc import (
    SecurityGroup,
    SecurityGroups,
    create_request,
    default_vpc,
)
from skerry.infra.clouds.handler_helpers import NotYetVisible
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.graph import Resource

GROUP = SecurityGroup(
    key="batch",
    name="skerry-tiny-gpt-abc123-batch",
    region=REGION,
    why="the network of batch's replicas",
    vpc="vpc-1",
)


def rules(aws: Aws, group: str) -> list[dict[str, Any]]:
    return aws.call("ec2", REGION, "describe_security_groups", GroupIds=[group])["SecurityGroups"]


class TestSecurityGroups(AwsHandlerSuite):
    """None of its settings can be updated in place: only changes by other users are possible."""

    HANDLER = SecurityGroups

    def resource(self, aws: Aws) -> Resource:
        return replace(GROUP, vpc=default_vpc(aws, REGION).vpc)

    def test_group_allows_all_egress_and_no_ingress(self, aws: Aws) -> None:
        record = self.created(aws, wanted(self.resource(aws)))
        (seen,) = rules(aws, record.outputs["id"])
        assert seen["IpPermissions"] == []
        assert [desired["IpProtocol"] for desired in seen["IpPermissionsEgress"]] == ["-1"]

    def test_added_ingress_rule_is_reported_and_removed(self, aws: Aws) -> None:
        desired = wanted(self.resource(aws))
        group = self.created(aws, desired).outputs["id"]
        ingress = [
            {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]},
            {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]},
        ]
        aws.call("ec2", REGION, "authorize_security_group_ingress", GroupId=group, IpPermissions=ingress)
        seen = self.assert_restored(aws, desired, "ingress")
        assert seen.settings["ingress"] == [f"all from {group}", "tcp 22 from 0.0.0.0/0"]

    def test_ingress_rules_are_refused(self, aws: Aws) -> None:
        group = self.resource(aws)
        SecurityGroups(aws).create(wanted(group))
        with pytest.raises(Invalid, match="admits no traffic"):
            SecurityGroups(aws).update(wanted(replace(group, ingress=("tcp 22 from 0.0.0.0/0",))), {"ingress"})

    def test_groups_are_read_in_one_call(self, aws: Aws, calls: list[str]) -> None:
        desired = wanted(self.resource(aws))
        SecurityGroups(aws).create(desired)
        calls.clear()
        SecurityGroups(aws).read([replace(desired, generation=number) for number in range(5)])
        assert calls == ["ec2:DescribeSecurityGroups"]

    def test_delete_waits_for_the_last_machine(self, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        desired = wanted(self.resource(aws))
        record = self.created(aws, desired)
        released = aws.clock.now() + 900

        def delete(forward: Callable[..., dict[str, Any]], **parameters: object) -> dict[str, Any]:
            if aws.clock.now() < released:
                raise Conflict("DependencyViolation")
            return forward(**parameters)

        answer(monkeypatch, "delete_security_group", delete)
        with pytest.raises(NotYetVisible, match="600 s, waiting until no machine is in the security group skerry"):
            SecurityGroups(aws).delete(record)
        SecurityGroups(aws).delete(record)
        assert aws.clock.now() >= released
        assert list(SecurityGroups(aws).read([desired])) == [None]

    def test_unrecorded_group_is_deleted_by_name(self, aws: Aws) -> None:
        desired = wanted(self.resource(aws))
        SecurityGroups(aws).create(desired)
        for _ in range(2):
            SecurityGroups(aws).delete(desired.to_record({}))
            assert list(SecurityGroups(aws).read([desired])) == [None]

    def test_foreign_group_of_the_same_name_is_kept(self, aws: Aws) -> None:
        desired = wanted(self.resource(aws))
        request = {**create_request(desired), "TagSpecifications": []}
        foreign = aws.call("ec2", REGION, "create_security_group", **request)["GroupId"]
        SecurityGroups(aws).delete(desired.to_record({}))
        assert rules(aws, foreign)


def test_default_vpc_has_a_subnet_in_each_zone(aws: Aws) -> None:
    network = default_vpc(aws, REGION)
    assert network.vpc.startswith("vpc-")
    assert [subnet.zone for subnet in network.subnets] == [f"{REGION}{letter}" for letter in "abc"]
    assert len({subnet.id for subnet in network.subnets}) == 3


def test_missing_default_vpc_names_the_remedy(aws: Aws) -> None:
    network = default_vpc(aws, REGION)
    for subnet in network.subnets:
        aws.call("ec2", REGION, "delete_subnet", SubnetId=subnet.id)
    with pytest.raises(Invalid, match=r"no default subnets.*create-default-vpc.*byo"):
        default_vpc(aws, REGION)
    aws.call("ec2", REGION, "delete_vpc", VpcId=network.vpc)
    with pytest.raises(Invalid, match=rf"no default VPC in {REGION}.*create-default-vpc.*byo"):
        default_vpc(aws, REGION)


def test_request_equals_the_golden_file() -> None:
    request = create_request(wanted(GROUP))
    check_model("ec2", "CreateSecurityGroup", request)
    check_golden("security_group", request)
