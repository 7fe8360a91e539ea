"""What a region has for a group of replicas: the machine as EC2 knows it, and the user's own network.

Asks, changes nothing. SageMaker describes its machines nowhere; they are EC2's, with "ml." before the name. What cannot
be is an error that says what to write instead.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.session import code_of
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.placement import SageMakerTarget

_ML: Final = "ml."
_ARCHITECTURE: Final = "x86_64"
# So many alternatives are told.
_TOLD: Final = 5


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A type of machine. own_disk: it has disks of its own, and SageMaker adds none."""

    type: str
    gpus: int
    own_disk: bool


def survey(aws: Aws, target: SageMakerTarget) -> Machine:
    """The machine of a group. Raises Invalid if it, or what is wanted of it, cannot be, saying what can."""
    row = _described(aws, target)
    architectures: Sequence[str] = row["ProcessorInfo"]["SupportedArchitectures"]
    if _ARCHITECTURE not in architectures:
        raise Invalid(
            f"{target.instance} runs {', '.join(architectures)}, and the replica image {_ARCHITECTURE}; "
            "name another instance"
        )
    machine = Machine(
        type=target.instance,
        gpus=sum(int(one["Count"]) for one in row.get("GpuInfo", {}).get("Gpus", [])),
        own_disk=row.get("InstanceStorageSupported") is True,
    )
    _check_options(target, machine)
    _check_network(aws, target)
    return machine


def _check_options(target: SageMakerTarget, machine: Machine) -> None:
    if target.gpus is not None and target.gpus > machine.gpus:
        raise Invalid(f"gpus: {target.gpus} are more than {machine.type} has; write gpus: {machine.gpus}, or less")
    for option, value in (("volume", target.volume), ("kms_key", target.kms_key)):
        if machine.own_disk and value is not None:
            raise Invalid(
                f"{option}: {machine.type} has disks of its own, encrypted and of one size, and SageMaker takes no "
                f"{option} for it; take it out"
            )


def _described(aws: Aws, target: SageMakerTarget) -> Mapping[str, Any]:
    name = target.instance.removeprefix(_ML)
    try:
        for row in aws.pages("ec2", target.region, "describe_instance_types", "InstanceTypes", InstanceTypes=[name]):
            return row
    except Invalid as error:
        if code_of(error) != "InvalidInstanceType":
            raise
    family = name.partition(".")[0]
    offers = aws.pages(
        "ec2",
        target.region,
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": [f"{family}.*"]}],
    )
    known = sorted({str(row["InstanceType"]) for row in offers})
    alike = [_ML + one for one in difflib.get_close_matches(name, known, n=_TOLD, cutoff=0.0)]
    there = f"{target.region} has {', '.join(alike)}" if alike else f"{target.region} has nothing of {_ML}{family}"
    raise Invalid(f"instance: {target.instance} is not offered in {target.region}; {there}")


def _check_network(aws: Aws, target: SageMakerTarget) -> None:
    """The user's subnets and security groups must lie in one network."""
    subnets, groups = target.byo.subnets, target.byo.security_groups
    if subnets is None or groups is None:
        return
    rows = aws.call("ec2", target.region, "describe_subnets", SubnetIds=list(subnets))["Subnets"]
    networks = sorted({str(row["VpcId"]) for row in rows})
    if len(networks) != 1:
        raise Invalid(f"the subnets in `byo` lie in several networks: {', '.join(networks)}; name those of one")
    for row in aws.call("ec2", target.region, "describe_security_groups", GroupIds=list(groups))["SecurityGroups"]:
        if row["VpcId"] != networks[0]:
            raise Invalid(
                f"the security group {row['GroupId']} lies in {row['VpcId']}, and the subnets in {networks[0]}"
            )
