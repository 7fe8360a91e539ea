"""Finds the machine type of a group as EC2 describes it, and checks the user's own network. Reads only.

SageMaker does not describe its machines; they are those of EC2 with "ml." before the name. Errors name the
alternatives.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.session import code_of
from skerry.infra.targets.shared.aws_checks import check_security_groups, network_of_subnets
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.targets.sagemaker.options import SageMakerTarget

_ML: Final = "ml."
_ARCHITECTURE: Final = "x86_64"
# The most alternatives in an error.
_SUGGESTIONS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A type of machine. own_disk: it has disks of its own, and SageMaker adds none."""

    type: str
    gpus: int
    own_disk: bool


def find_machine(aws: Aws, target: SageMakerTarget) -> Machine:
    """Return the machine of a group. Raises Invalid, with what to write instead, if it does not fit the options."""
    row = _described(aws, target)
    architectures: Sequence[str] = row["ProcessorInfo"]["SupportedArchitectures"]
    if _ARCHITECTURE not in architectures:
        raise Invalid(
            f"{target.instance} runs {', '.join(architectures)}, and the replica image {_ARCHITECTURE}; "
            "name another instance"
        )
    machine = Machine(
        type=target.instance,
        gpus=sum(int(gpu["Count"]) for gpu in row.get("GpuInfo", {}).get("Gpus", [])),
        own_disk=row.get("InstanceStorageSupported") is True,
    )
    _check_options(target, machine)
    if target.byo.subnets is not None and target.byo.security_groups is not None:
        network = network_of_subnets(aws, target.region, target.byo.subnets)
        check_security_groups(aws, target.region, target.byo.security_groups, network.vpc)
    return machine


def _check_options(target: SageMakerTarget, machine: Machine) -> None:
    if target.gpus is not None and target.gpus > machine.gpus:
        raise Invalid(f"gpus: {target.gpus} are more than {machine.type} has; write gpus: {machine.gpus}, or less")
    for option, value in (("volume", target.volume), ("kms_key", target.kms_key)):
        if machine.own_disk and value is not None:
            raise Invalid(
                f"{option}: {machine.type} has its own encrypted disks of a fixed size, and SageMaker accepts no "
                f"{option} for it; remove it"
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
    alike = [_ML + match for match in difflib.get_close_matches(name, known, n=_SUGGESTIONS, cutoff=0.0)]
    available = f"{target.region} has {', '.join(alike)}" if alike else f"{target.region} has no {_ML}{family}"
    raise Invalid(f"instance: {target.instance} is not offered in {target.region}; {available}")
