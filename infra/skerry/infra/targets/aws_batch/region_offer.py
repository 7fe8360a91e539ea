"""Finds the machine types that a region offers for a group, and the subnets in the zones that offer them. Reads only.

Errors name the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws import route_checks
from skerry.infra.clouds.aws.security_group_in_existing_vpc import default_vpc
from skerry.infra.clouds.aws.session import code_of
from skerry.infra.targets.aws_batch.machine_sizing import Machine
from skerry.infra.targets.shared.aws_checks import check_security_groups, network_of_subnets
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.targets.aws_batch.options import AwsBatchTarget

# The regions with most machine types, which an error may suggest.
_LARGE: Final = ("us-east-1", "us-east-2", "us-west-2", "eu-west-1", "eu-central-1", "ap-northeast-1")
# The most alternatives in an error.
_SUGGESTIONS: Final = 6
_ARCHITECTURE: Final = "x86_64"
_OLD_GPUS: Final = ("p3.", "p3dn.", "g3.", "g3s.")


@dataclass(frozen=True, kw_only=True)
class RegionOffer:
    """The machine types and subnets for a group. vpc: None if the machines are the user's own. subnets: sorted.

    stranded: subnets of the default network that are not used, because they have no way out.
    """

    vpc: str | None
    subnets: tuple[str, ...]
    machines: tuple[Machine, ...]
    stranded: tuple[str, ...] = ()


def find_region_offer(aws: Aws, target: AwsBatchTarget) -> RegionOffer:
    """Return what the region offers to a group. Raises Invalid, with what to write instead, if that is not enough."""
    offers = offered(aws, target.region, target.instance_types)
    if missing := [instance_type for instance_type in target.instance_types if instance_type not in offers]:
        raise Invalid(_not_offered(aws, target.region, missing[0]))
    machines = described(aws, target.region, target.instance_types)
    if target.byo.queue is not None or target.byo.compute_environment is not None:
        return RegionOffer(vpc=None, subnets=(), machines=machines)
    zones = frozenset[str]().union(*offers.values())
    if target.zones is not None and not (zones := zones & set(target.zones)):
        types = ", ".join(target.instance_types)
        raise Invalid(f"{types} are offered in none of {', '.join(target.zones)}; choose from {_zones(offers)}")
    network = (
        default_vpc(aws, target.region)
        if target.byo.subnets is None
        else network_of_subnets(aws, target.region, target.byo.subnets)
    )
    subnets = [subnet for subnet in network.subnets if subnet.zone in zones]
    if not subnets:
        types, zones_text = (
            ", ".join(target.instance_types),
            ", ".join(sorted({subnet.zone for subnet in network.subnets})),
        )
        raise Invalid(
            f"{types} are offered in {_zones(offers)}, and subnets are in {zones_text}; write byo: {{subnets}}"
        )
    if target.byo.security_groups is not None:
        check_security_groups(aws, target.region, target.byo.security_groups, network.vpc)
    # The user's own subnets are used as they are; `checks` reports whether they have a way out.
    stranded = () if target.byo.subnets is not None else route_checks.stranded(aws, target.region, network.vpc, subnets)
    if len(stranded) == len(subnets):
        raise Invalid(_no_way_out(target.region, network.vpc, [subnet.id for subnet in subnets]))
    return RegionOffer(
        vpc=network.vpc,
        subnets=tuple(sorted(subnet.id for subnet in subnets if subnet not in stranded)),
        machines=machines,
        stranded=tuple(sorted(subnet.id for subnet in stranded)),
    )


def _no_way_out(region: str, vpc: str, subnets: Sequence[str]) -> str:
    command = f"aws ec2 modify-subnet-attribute --region {region} --subnet-id {subnets[0]} --map-public-ip-on-launch"
    return (
        f"machines in the default VPC {vpc} would reach neither image nor bucket: {', '.join(subnets)} give no public "
        f"address and have no route to a NAT gateway; enable public addresses (`{command}`), or name other subnets: "
        "byo: {subnets}"
    )


def offered(aws: Aws, region: str, types: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """Return the zones that offer each of these types. types: may be patterns like g6e.*."""
    offered: dict[str, set[str]] = {}
    rows = aws.pages(
        "ec2",
        region,
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": list(types)}],
    )
    for row in rows:
        offered.setdefault(str(row["InstanceType"]), set()).add(str(row["Location"]))
    return {name: frozenset(zones) for name, zones in offered.items()}


def described(aws: Aws, region: str, types: Sequence[str]) -> tuple[Machine, ...]:
    """Return the machines of these types, in their order.

    Raises Invalid for a type that the region does not have, with those it has, and for one that cannot run the image.
    """
    rows = aws.pages("ec2", region, "describe_instance_types", "InstanceTypes", InstanceTypes=list(types))
    try:
        known = {str(row["InstanceType"]): row for row in rows}
    except Invalid as error:
        if code_of(error) != "InvalidInstanceType":
            raise
        offers = offered(aws, region, types)
        missing = next((name for name in types if name not in offers), None)
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
            gpus=sum(int(gpu["Count"]) for gpu in known[name].get("GpuInfo", {}).get("Gpus", [])),
        )
        for name in types
    )


def _check_runs(name: str, row: Mapping[str, Any]) -> None:
    """Raise Invalid for a type with another architecture, or with GPUs too old for Amazon's machine image.

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
    alike = sorted(offered(aws, region, [f"{name[0]}*.{size}"]))[:_SUGGESTIONS]
    elsewhere: list[str] = []
    for other in _LARGE:
        try:
            if other != region and offered(aws, other, [name]):
                elsewhere.append(other)
        except SkerryError:  # a region that is not enabled, or not allowed
            continue
    where = f"it is in {', '.join(elsewhere)}" if elsewhere else "nor in any large region; check its spelling"
    return f"{name} is not offered in {region}: {where}; {region} has {', '.join(alike) or 'no similar type'}"


def _zones(offers: Mapping[str, frozenset[str]]) -> str:
    return ", ".join(sorted(frozenset[str]().union(*offers.values())))
