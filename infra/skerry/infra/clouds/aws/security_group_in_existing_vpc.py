"""The network of a job's machines: an existing VPC, and a security group that admits no traffic.

No VPC is ever created: jobs use the account's default VPC, or the user's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.aws.tags import owned_record, owner_of, tag_list, tags_in
from skerry.infra.clouds.handler_helpers import Absent, check_owner, differing, text, wait_for, wait_visible
from skerry.infra.provision.graph import Resource, Text
from skerry.infra.provision.handler import ADDRESS_TAG, RUN_TAG, Observed
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.handler import Desired, StateRecord

ALL_EGRESS: Final = "all to 0.0.0.0/0"
# EC2 takes 255 characters.
_DESCRIPTION: Final = 255
# Batch releases its machines some minutes after the last job.
_RELEASED_S: Final = 600.0


@dataclass(frozen=True, kw_only=True)
class SecurityGroup(Resource):
    """A group that allows all traffic out and none in. Outputs: id.

    ingress, egress: constant; they are settings so that an added or revoked rule is found. More rules for egress add
    nothing to ALL_EGRESS, and stay.
    """

    KIND: ClassVar[str] = "aws_security_group"
    FIXED: ClassVar[frozenset[str]] = frozenset({"vpc", "region"})

    vpc: Text
    ingress: tuple[str, ...] = ()
    egress: tuple[str, ...] = (ALL_EGRESS,)


@dataclass(frozen=True, kw_only=True)
class Subnet:
    """One subnet. zone: us-east-1a. public: its machines have public addresses."""

    id: str
    zone: str
    public: bool


@dataclass(frozen=True, kw_only=True)
class DefaultVpc:
    """The account's default network in a region. subnets: by zone."""

    vpc: str
    subnets: tuple[Subnet, ...]


def create_request(desired: Desired) -> dict[str, Any]:
    """Parameters of CreateSecurityGroup. A new group allows all traffic out and none in."""
    return {
        "GroupName": desired.name,
        "Description": f"skerry: {desired.resource.why or desired.resource.address}"[:_DESCRIPTION],
        "VpcId": text(desired.settings["vpc"]),
        "TagSpecifications": [{"ResourceType": "security-group", "Tags": tag_list(desired.tags)}],
    }


class SecurityGroups:
    """Creates security groups. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. One call for all groups of a region."""
        by_place: dict[tuple[str, str], dict[str, Any]] = {}
        for region in {desired.resource.region for desired in all_desired}:
            names = sorted({desired.name for desired in all_desired if desired.resource.region == region})
            by_name = [{"Name": "group-name", "Values": names}]
            for group in self._aws.pages("ec2", region, "describe_security_groups", "SecurityGroups", Filters=by_name):
                by_place[region, str(group["GroupName"])] = group
        return [_seen(desired, by_place.get((desired.resource.region, desired.name))) for desired in all_desired]

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        try:
            self._call(desired.resource.region, "create_security_group", **create_request(desired))
        except Conflict:
            seen = self._visible(desired)
            check_owner(seen, desired, "security group", "delete it, or use a group of your own")
            return self.update(desired, differing(desired, seen))
        return dict(self._visible(desired).outputs)

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Removes added ingress rules, and adds the revoked egress rule."""
        outputs = self._visible(desired).outputs
        if "ingress" in changed:
            if desired.settings["ingress"]:
                raise Invalid(f"{desired.resource.address} admits no traffic: replicas do not connect to each other")
            region = desired.resource.region
            for group in self._call(region, "describe_security_groups", GroupIds=[outputs["id"]])["SecurityGroups"]:
                if rules := group["IpPermissions"]:
                    self._call(region, "revoke_security_group_ingress", GroupId=outputs["id"], IpPermissions=rules)
        if "egress" in changed:
            everything = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
            self._call(
                desired.resource.region,
                "authorize_security_group_egress",
                GroupId=outputs["id"],
                IpPermissions=[everything],
            )
        return dict(outputs)

    def delete(self, record: StateRecord) -> None:
        """See Handler.delete. Machines that end keep their group for a while.

        Read first: a permission that depends on a tag is denied for a group that does not exist.
        """

        def deleted() -> bool | None:
            group = self._id_of(record)
            if group is None:
                return True
            try:
                self._call(record.region, "delete_security_group", GroupId=group)
            except Absent:
                return True
            except Conflict:
                return None
            return True

        what, clock = f"no machine is in the security group {record.name}", self._aws.clock
        wait_for(clock, what, clock.now() + _RELEASED_S, deleted)

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned."""
        for region in sorted(regions):
            tagged = [{"Name": f"tag:{RUN_TAG}", "Values": [run]}]
            for group in self._aws.pages("ec2", region, "describe_security_groups", "SecurityGroups", Filters=tagged):
                outputs, tags = {"id": str(group["GroupId"])}, tags_in(group.get("Tags", []))
                yield owned_record(
                    SecurityGroup, name=str(group["GroupName"]), region=region, tags=tags, outputs=outputs
                )

    def _id_of(self, record: StateRecord) -> str | None:
        """The id of an existing group; one that was created but not recorded is found by its name and tag."""
        if group_id := record.outputs.get("id"):
            wanted = {"group-id": group_id}
        else:
            wanted = {"group-name": record.name, f"tag:{ADDRESS_TAG}": record.address}
        filters = [{"Name": name, "Values": [value]} for name, value in wanted.items()]
        groups = self._aws.pages("ec2", record.region, "describe_security_groups", "SecurityGroups", Filters=filters)
        return next((str(group["GroupId"]) for group in groups), None)

    def _visible(self, desired: Desired) -> Observed:
        return wait_visible(self._aws.clock, f"the security group {desired.name}", lambda: self.read([desired])[0])

    def _call(self, region: str, operation: str, **parameters: object) -> dict[str, Any]:
        return self._aws.call("ec2", region, operation, **parameters)


def subnet_of(row: Mapping[str, Any]) -> Subnet:
    """From DescribeSubnets."""
    public = row.get("MapPublicIpOnLaunch") is True
    return Subnet(id=str(row["SubnetId"]), zone=str(row["AvailabilityZone"]), public=public)


def default_vpc(aws: Aws, region: str) -> DefaultVpc:
    """The account's default VPC and its default subnets. Raises Invalid without VPC or subnets."""
    remedy = "create one (`aws ec2 create-default-vpc`), or name your own subnets in the target's `byo`"
    vpcs = list(aws.pages("ec2", region, "describe_vpcs", "Vpcs", Filters=[{"Name": "is-default", "Values": ["true"]}]))
    if not vpcs:
        raise Invalid(f"the account has no default VPC in {region}: {remedy}")
    vpc = str(vpcs[0]["VpcId"])
    filters = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "default-for-az", "Values": ["true"]}]
    subnets = [subnet_of(subnet) for subnet in aws.pages("ec2", region, "describe_subnets", "Subnets", Filters=filters)]
    if not subnets:
        raise Invalid(f"the default VPC {vpc} in {region} has no default subnets: {remedy}")
    return DefaultVpc(vpc=vpc, subnets=tuple(sorted(subnets, key=lambda subnet: (subnet.zone, subnet.id))))


def _seen(desired: Desired, group: dict[str, Any] | None) -> Observed | None:
    if group is None:
        return None
    egress = _rules(group.get("IpPermissionsEgress", []), "to")
    return Observed(
        outputs={"id": str(group["GroupId"])},
        settings={
            "region": desired.resource.region,
            "vpc": str(group["VpcId"]),
            "ingress": _rules(group["IpPermissions"], "from"),
            "egress": [ALL_EGRESS] if ALL_EGRESS in egress else list(egress),
        },
        owner=owner_of(tags_in(group.get("Tags", []))),
    )


def _rules(permissions: Sequence[Mapping[str, Any]], preposition: str) -> list[str]:
    return sorted(rule for permission in permissions for rule in _described(permission, preposition))


def _described(permission: Mapping[str, Any], preposition: str) -> Iterator[str]:
    """A rule as text, once for each peer: tcp 22 from 0.0.0.0/0."""
    protocol = str(permission["IpProtocol"])
    first, last = permission.get("FromPort"), permission.get("ToPort")
    ports = "" if first is None else f" {first}" if first == last else f" {first}-{last}"
    sources = [
        *(str(row["CidrIp"]) for row in permission.get("IpRanges", [])),
        *(str(row["CidrIpv6"]) for row in permission.get("Ipv6Ranges", [])),
        *(str(row["GroupId"]) for row in permission.get("UserIdGroupPairs", [])),
        *(str(row["PrefixListId"]) for row in permission.get("PrefixListIds", [])),
    ]
    for source in sources:
        yield f"{'all' if protocol == '-1' else protocol}{ports} {preposition} {source}"
