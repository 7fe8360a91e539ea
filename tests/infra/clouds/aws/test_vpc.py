"""The security group lets nothing in, whatever somebody adds; the network is one that is there already."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.aws.account import REGION, check_golden, check_model, wanted
from tests.infra.aws.handlers import AwsHandlerSuite
from tests.infra.ground import made

from skerry.infra.clouds.aws.network import SecurityGroup, SecurityGroups, create_request, default_vpc
from skerry.infra.clouds.handling import Late
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.graph import Resource

NAME = "skerry-tiny-gpt-abc123-batch"


def group(aws: Aws) -> SecurityGroup:
    return SecurityGroup(key="batch", name=NAME, region=REGION, why="replicas", vpc=default_vpc(aws, REGION).vpc)


class TestSecurityGroups(AwsHandlerSuite):
    def handler(self, aws: Aws) -> SecurityGroups:
        return SecurityGroups(aws)

    def resource(self, aws: Aws) -> SecurityGroup:
        return group(aws)

    def changed(self, resource: Resource) -> None:
        """All that ever changes is what somebody else did to it."""

    def test_it_lets_everything_out_and_nothing_in(self, aws: Aws) -> None:
        outputs = SecurityGroups(aws).create(wanted(group(aws)))
        (seen,) = self.rules(aws, outputs["id"])
        assert seen["IpPermissions"] == []
        assert [one["IpProtocol"] for one in seen["IpPermissionsEgress"]] == ["-1"]

    def test_a_door_that_somebody_opened_is_seen_and_shut(self, aws: Aws) -> None:
        one = wanted(group(aws))
        outputs = SecurityGroups(aws).create(one)
        rules = [
            {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]},
            {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": outputs["id"]}]},
        ]
        ingress = {"GroupId": outputs["id"], "IpPermissions": rules}
        aws.call("ec2", REGION, "authorize_security_group_ingress", **ingress)
        seen = self.seen(aws, one)
        assert seen.settings["ingress"] == [f"all from {outputs['id']}", "tcp 22 from 0.0.0.0/0"]
        assert self.differing(one, seen) == {"ingress"}
        assert SecurityGroups(aws).update(one, {"ingress"}) == outputs
        self.assert_as_wanted(one, self.seen(aws, one))

    def test_it_never_lets_anything_in(self, aws: Aws) -> None:
        SecurityGroups(aws).create(wanted(group(aws)))
        with pytest.raises(Invalid, match="lets nothing in"):
            SecurityGroups(aws).update(wanted(replace(group(aws), ingress=("tcp 22 from 0.0.0.0/0",))), {"ingress"})

    def test_several_are_read_in_one_call(self, aws: Aws, calls: list[str]) -> None:
        one = wanted(group(aws))
        SecurityGroups(aws).create(one)
        calls.clear()
        SecurityGroups(aws).read([replace(one, generation=number) for number in range(5)])
        assert calls == ["ec2:DescribeSecurityGroups"]

    def test_its_delete_waits_until_no_machine_is_in_it(self, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        one = wanted(group(aws))
        this = made(one, SecurityGroups(aws).create(one))
        released = aws.clock.now() + 900
        call = type(aws).call

        def in_use(self: Aws, service: str, region: str, operation: str, /, **parameters: object) -> dict[str, Any]:
            if operation == "delete_security_group" and aws.clock.now() < released:
                raise Conflict("DependencyViolation")
            return call(self, service, region, operation, **parameters)

        monkeypatch.setattr(type(aws), "call", in_use)
        with pytest.raises(
            Late, match=r"waited 600 s in vain until no machine is in the security group skerry-\S+ any"
        ):
            SecurityGroups(aws).delete(this)
        SecurityGroups(aws).delete(this)
        assert aws.clock.now() >= released
        assert list(SecurityGroups(aws).read([one])) == [None]

    def test_one_that_was_made_and_never_written_down_is_deleted_by_its_name(self, aws: Aws) -> None:
        one = wanted(group(aws))
        SecurityGroups(aws).create(one)
        for _ in range(2):
            SecurityGroups(aws).delete(made(one, {}))
            assert list(SecurityGroups(aws).read([one])) == [None]

    def test_somebody_elses_is_not_deleted_because_of_its_name(self, aws: Aws) -> None:
        one = wanted(group(aws))
        request = {**create_request(one), "TagSpecifications": []}
        theirs = aws.call("ec2", REGION, "create_security_group", **request)["GroupId"]
        SecurityGroups(aws).delete(made(one, {}))
        assert self.rules(aws, theirs)

    def rules(self, aws: Aws, name: str) -> list[dict[str, Any]]:
        return aws.call("ec2", REGION, "describe_security_groups", GroupIds=[name])["SecurityGroups"]


def test_the_default_network_has_a_subnet_in_each_zone(aws: Aws) -> None:
    found = default_vpc(aws, REGION)
    assert found.vpc.startswith("vpc-")
    assert [subnet.zone for subnet in found.subnets] == [f"{REGION}{letter}" for letter in "abc"]
    assert len({subnet.id for subnet in found.subnets}) == 3


def test_without_a_default_network_it_says_what_to_do(aws: Aws) -> None:
    found = default_vpc(aws, REGION)
    for subnet in found.subnets:
        aws.call("ec2", REGION, "delete_subnet", SubnetId=subnet.id)
    with pytest.raises(Invalid, match=r"no default subnets.*create-default-vpc.*byo"):
        default_vpc(aws, REGION)
    aws.call("ec2", REGION, "delete_vpc", VpcId=found.vpc)
    with pytest.raises(Invalid, match=rf"no default VPC in {REGION}.*create-default-vpc.*byo"):
        default_vpc(aws, REGION)


def test_the_request_is_that_of_the_golden_file() -> None:
    resource = SecurityGroup(key="batch", name=NAME, region=REGION, why="the network of batch's replicas", vpc="vpc-1")
    request = create_request(wanted(resource))
    check_model("ec2", "CreateSecurityGroup", request)
    check_golden("security_group", request)
