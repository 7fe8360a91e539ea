"""The network a job's machines are in: a VPC that is there already, and a group that lets nothing in.

No VPC is ever made: the account's default one is used, or the user's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.aws.handling import found, owner_of, tag_list, tags_in
from skerry.infra.clouds.handling import VISIBLE_S, Absent, check_owner, differing, text, waited
from skerry.infra.graph import Resource, Text
from skerry.infra.handler import ADDRESS_TAG, RUN_TAG, Seen
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.handler import Made, Wanted

# EC2 takes 255 characters.
_DESCRIPTION: Final = 255
# Batch lets go of its machines some minutes after the last job.
_RELEASED_S: Final = 600.0


@dataclass(frozen=True, kw_only=True)
class SecurityGroup(Resource):
    """A group whose machines reach everything and are reached by nothing. ingress: always empty; seen if it is not.

    Outputs: id.
    """

    KIND: ClassVar[str] = "aws_security_group"
    FIXED: ClassVar[frozenset[str]] = frozenset({"vpc", "region"})

    vpc: Text
    ingress: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Subnet:
    """One subnet. zone: its availability zone: us-east-1a. public: machines that start in it have a public address."""

    id: str
    zone: str
    public: bool


@dataclass(frozen=True, kw_only=True)
class DefaultVpc:
    """The account's default network in a region. subnets: by zone."""

    vpc: str
    subnets: tuple[Subnet, ...]


def create_request(wanted: Wanted) -> dict[str, Any]:
    """Parameters of CreateSecurityGroup. A new group lets everything out and nothing in."""
    return {
        "GroupName": wanted.name,
        "Description": f"skerry: {wanted.resource.why or wanted.resource.address}"[:_DESCRIPTION],
        "VpcId": text(wanted.settings["vpc"]),
        "TagSpecifications": [{"ResourceType": "security-group", "Tags": tag_list(wanted.tags)}],
    }


class SecurityGroups:
    """Makes security groups. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read. One call for all groups of a region."""
        by_place: dict[tuple[str, str], dict[str, Any]] = {}
        for region in {one.resource.region for one in wanted}:
            names = sorted({one.name for one in wanted if one.resource.region == region})
            by_name = [{"Name": "group-name", "Values": names}]
            for group in self._aws.pages("ec2", region, "describe_security_groups", "SecurityGroups", Filters=by_name):
                by_place[region, str(group["GroupName"])] = group
        return [_seen(one, by_place.get((one.resource.region, one.name))) for one in wanted]

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create."""
        try:
            self._call(wanted.resource.region, "create_security_group", **create_request(wanted))
        except Conflict:
            seen = self._visible(wanted)
            check_owner(seen, wanted, "security group", "delete it, or bring another")
            return self.update(wanted, differing(wanted, seen))
        return dict(self._visible(wanted).outputs)

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. What somebody let in is shut out again."""
        outputs = self._visible(wanted).outputs
        if "ingress" in changed:
            if wanted.settings["ingress"]:
                raise Invalid(f"{wanted.resource.address} lets nothing in: replicas do not talk to each other")
            region = wanted.resource.region
            for group in self._call(region, "describe_security_groups", GroupIds=[outputs["id"]])["SecurityGroups"]:
                if rules := group["IpPermissions"]:
                    self._call(region, "revoke_security_group_ingress", GroupId=outputs["id"], IpPermissions=rules)
        return dict(outputs)

    def delete(self, made: Made) -> None:
        """See Handler.delete. Machines that end hold on to their group for a while.

        Looked for first: whose right hangs on a tag is denied what is not there.
        """

        def gone() -> bool | None:
            group = self._id_of(made)
            if group is None:
                return True
            try:
                self._call(made.region, "delete_security_group", GroupId=group)
            except Absent:
                return True
            except Conflict:
                return None
            return True

        what, clock = f"no machine is in the security group {made.name} any more", self._aws.clock
        waited(clock, what, clock.now() + _RELEASED_S, gone)

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned."""
        for region in sorted(regions):
            tagged = [{"Name": f"tag:{RUN_TAG}", "Values": [run]}]
            for group in self._aws.pages("ec2", region, "describe_security_groups", "SecurityGroups", Filters=tagged):
                outputs, tags = {"id": str(group["GroupId"])}, tags_in(group.get("Tags", []))
                yield found(SecurityGroup, name=str(group["GroupName"]), region=region, tags=tags, outputs=outputs)

    def _id_of(self, made: Made) -> str | None:
        """Of what is there; what was made and never written down is found by its name, and ours by its tag."""
        if known := made.outputs.get("id"):
            asked = {"group-id": known}
        else:
            asked = {"group-name": made.name, f"tag:{ADDRESS_TAG}": made.address}
        filters = [{"Name": name, "Values": [value]} for name, value in asked.items()]
        groups = self._aws.pages("ec2", made.region, "describe_security_groups", "SecurityGroups", Filters=filters)
        return next((str(group["GroupId"]) for group in groups), None)

    def _visible(self, wanted: Wanted) -> Seen:
        what, clock = f"the security group {wanted.name} can be read", self._aws.clock
        return waited(clock, what, clock.now() + VISIBLE_S, lambda: self.read([wanted])[0])

    def _call(self, region: str, operation: str, **parameters: object) -> dict[str, Any]:
        return self._aws.call("ec2", region, operation, **parameters)


def subnet_of(row: Mapping[str, Any]) -> Subnet:
    """From DescribeSubnets."""
    public = row.get("MapPublicIpOnLaunch") is True
    return Subnet(id=str(row["SubnetId"]), zone=str(row["AvailabilityZone"]), public=public)


def default_vpc(aws: Aws, region: str) -> DefaultVpc:
    """The account's default VPC and its default subnets. Raises Invalid if there is none, or it has no subnets."""
    remedy = "make one (`aws ec2 create-default-vpc`), or name subnets of your own in the target's `byo`"
    vpcs = list(aws.pages("ec2", region, "describe_vpcs", "Vpcs", Filters=[{"Name": "is-default", "Values": ["true"]}]))
    if not vpcs:
        raise Invalid(f"the account has no default VPC in {region}: {remedy}")
    vpc = str(vpcs[0]["VpcId"])
    filters = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "default-for-az", "Values": ["true"]}]
    subnets = [subnet_of(subnet) for subnet in aws.pages("ec2", region, "describe_subnets", "Subnets", Filters=filters)]
    if not subnets:
        raise Invalid(f"the default VPC {vpc} in {region} has no default subnets: {remedy}")
    return DefaultVpc(vpc=vpc, subnets=tuple(sorted(subnets, key=lambda subnet: (subnet.zone, subnet.id))))


def _seen(wanted: Wanted, group: dict[str, Any] | None) -> Seen | None:
    if group is None:
        return None
    return Seen(
        outputs={"id": str(group["GroupId"])},
        settings={
            "region": wanted.resource.region,
            "vpc": str(group["VpcId"]),
            "ingress": sorted(rule for permission in group["IpPermissions"] for rule in _told(permission)),
        },
        owner=owner_of(tags_in(group.get("Tags", []))),
    )


def _told(permission: Mapping[str, Any]) -> Iterator[str]:
    """A rule in words, once for each source: tcp 22 from 0.0.0.0/0."""
    protocol = str(permission["IpProtocol"])
    first, last = permission.get("FromPort"), permission.get("ToPort")
    ports = "" if first is None else f" {first}" if first == last else f" {first}-{last}"
    sources = [
        *(str(one["CidrIp"]) for one in permission.get("IpRanges", [])),
        *(str(one["CidrIpv6"]) for one in permission.get("Ipv6Ranges", [])),
        *(str(one["GroupId"]) for one in permission.get("UserIdGroupPairs", [])),
        *(str(one["PrefixListId"]) for one in permission.get("PrefixListIds", [])),
    ]
    for source in sources:
        yield f"{'all' if protocol == '-1' else protocol}{ports} from {source}"
