"""What a region has for a group of replicas: machines that are offered, and subnets in the zones that offer them.

Asks, changes nothing. What cannot be is an error that says what there is instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws import routes
from skerry.infra.clouds.aws.network import DefaultVpc, default_vpc, subnet_of
from skerry.infra.clouds.aws.session import code_of
from skerry.infra.targets.aws_batch.machines import Machine
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.placement import AwsBatchTarget

# Looked at only for an error's sake: where AWS has most of its machines.
_LARGE: Final = ("us-east-1", "us-east-2", "us-west-2", "eu-west-1", "eu-central-1", "ap-northeast-1")
# So many alternatives are told.
_TOLD: Final = 6
_ARCHITECTURE: Final = "x86_64"
_OLD_GPUS: Final = ("p3.", "p3dn.", "g3.", "g3s.")


@dataclass(frozen=True, kw_only=True)
class Terrain:
    """Where a group's machines start. vpc: None if the machines are the user's own. subnets: sorted.

    stranded: subnets of the default network that are left out, since no machine would get out of them.
    """

    vpc: str | None
    subnets: tuple[str, ...]
    machines: tuple[Machine, ...]
    stranded: tuple[str, ...] = ()


def survey(aws: Aws, target: AwsBatchTarget) -> Terrain:
    """The terrain of a group. Raises Invalid if there is none, saying what to write instead."""
    offers = offered(aws, target.region, target.instance_types)
    if missing := [one for one in target.instance_types if one not in offers]:
        raise Invalid(_not_offered(aws, target.region, missing[0]))
    machines = described(aws, target.region, target.instance_types)
    if target.byo.queue is not None or target.byo.compute_environment is not None:
        return Terrain(vpc=None, subnets=(), machines=machines)
    zones = frozenset[str]().union(*offers.values())
    if target.zones is not None and not (zones := zones & set(target.zones)):
        types = ", ".join(target.instance_types)
        raise Invalid(f"{types} are offered in none of {', '.join(target.zones)}; there are {_zones(offers)}")
    network = (
        default_vpc(aws, target.region) if target.byo.subnets is None else _brought(aws, target, target.byo.subnets)
    )
    subnets = [subnet for subnet in network.subnets if subnet.zone in zones]
    if not subnets:
        types, there = ", ".join(target.instance_types), ", ".join(sorted({one.zone for one in network.subnets}))
        raise Invalid(f"{types} are offered in {_zones(offers)}, and subnets are in {there}; write byo: {{subnets}}")
    if target.byo.security_groups is not None:
        _check_groups(aws, target, target.byo.security_groups, network.vpc)
    # What the user names is the user's affair; `checks` says what it looks like.
    stranded = () if target.byo.subnets is not None else routes.stranded(aws, target.region, network.vpc, subnets)
    if len(stranded) == len(subnets):
        raise Invalid(_no_way_out(target.region, network.vpc, [one.id for one in subnets]))
    return Terrain(
        vpc=network.vpc,
        subnets=tuple(sorted(one.id for one in subnets if one not in stranded)),
        machines=machines,
        stranded=tuple(sorted(one.id for one in stranded)),
    )


def _no_way_out(region: str, vpc: str, subnets: Sequence[str]) -> str:
    command = f"aws ec2 modify-subnet-attribute --region {region} --subnet-id {subnets[0]} --map-public-ip-on-launch"
    return (
        f"machines in the default VPC {vpc} would reach neither image nor bucket: {', '.join(subnets)} give no public "
        f"address and have no route to a NAT gateway; switch that on (`{command}`), or name others: byo: {{subnets}}"
    )


def _brought(aws: Aws, target: AwsBatchTarget, ids: Sequence[str]) -> DefaultVpc:
    """The user's subnets, and the network they lie in."""
    rows = aws.call("ec2", target.region, "describe_subnets", SubnetIds=list(ids))["Subnets"]
    networks = sorted({str(row["VpcId"]) for row in rows})
    if len(networks) != 1:
        raise Invalid(f"the subnets in `byo` lie in several networks: {', '.join(networks)}; name those of one")
    return DefaultVpc(vpc=networks[0], subnets=tuple(map(subnet_of, rows)))


def _check_groups(aws: Aws, target: AwsBatchTarget, ids: Sequence[str], vpc: str) -> None:
    """The user's security groups must lie where the subnets do."""
    for row in aws.call("ec2", target.region, "describe_security_groups", GroupIds=list(ids))["SecurityGroups"]:
        if row["VpcId"] != vpc:
            raise Invalid(f"the security group {row['GroupId']} lies in {row['VpcId']}, and the subnets in {vpc}")


def offered(aws: Aws, region: str, types: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """The zones of a region that offer each of these types, or of those that fit patterns like g6e.*."""
    found: dict[str, set[str]] = {}
    rows = aws.pages(
        "ec2",
        region,
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": list(types)}],
    )
    for row in rows:
        found.setdefault(str(row["InstanceType"]), set()).add(str(row["Location"]))
    return {name: frozenset(zones) for name, zones in found.items()}


def described(aws: Aws, region: str, types: Sequence[str]) -> tuple[Machine, ...]:
    """The machines of these types, in the order asked. Raises Invalid if the region lacks one, saying what it has, and
    for one that cannot run the image.
    """
    rows = aws.pages("ec2", region, "describe_instance_types", "InstanceTypes", InstanceTypes=list(types))
    try:
        known = {str(row["InstanceType"]): row for row in rows}
    except Invalid as error:
        if code_of(error) != "InvalidInstanceType":
            raise
        offers = offered(aws, region, types)
        missing = next((one for one in types if one not in offers), None)
        if missing is None:
            raise
        raise Invalid(_not_offered(aws, region, missing)) from error
    for name in types:
        _check_runs(name, known[name])
    return tuple(
        Machine(
            type=name,
            vcpus=int(known[name]["VCpuInfo"]["DefaultVCpus"]),
            memory_mib=int(known[name]["MemoryInfo"]["SizeInMiB"]),
            gpus=sum(int(one["Count"]) for one in known[name].get("GpuInfo", {}).get("Gpus", [])),
        )
        for name in types
    )


def _check_runs(name: str, row: Mapping[str, Any]) -> None:
    """The replica image is built for one architecture, and Amazon's own GPU machine image has drivers for newer GPUs.

    Source: Batch API reference, Ec2Configuration.imageType: ECS_AL2023_NVIDIA does not support p3 and g3.
    """
    architectures: Sequence[str] = row["ProcessorInfo"]["SupportedArchitectures"]
    if _ARCHITECTURE not in architectures:
        raise Invalid(
            f"{name} runs {', '.join(architectures)}, and the replica image {_ARCHITECTURE}; name another type"
        )
    if name.startswith(_OLD_GPUS):
        raise Invalid(f"{name} is too old for the machine image that Batch starts with GPUs; name another type")


def _not_offered(aws: Aws, region: str, name: str) -> str:
    size = name.partition(".")[2]
    alike = sorted(offered(aws, region, [f"{name[0]}*.{size}"]))[:_TOLD]
    elsewhere: list[str] = []
    for other in _LARGE:
        try:
            if other != region and offered(aws, other, [name]):
                elsewhere.append(other)
        except SkerryError:  # a region that is not enabled, or not allowed; the first error is the one to tell
            continue
    where = f"it is in {', '.join(elsewhere)}" if elsewhere else "nor in any large region; is it spelt right?"
    return f"{name} is not offered in {region}: {where}; {region} has {', '.join(alike) or 'nothing like it'}"


def _zones(offers: Mapping[str, frozenset[str]]) -> str:
    return ", ".join(sorted(frozenset[str]().union(*offers.values())))
