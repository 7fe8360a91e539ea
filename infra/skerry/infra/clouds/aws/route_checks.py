"""Whether machines in a subnet reach what is outside of their network, as far as it can be seen. Changes nothing.

A machine that reaches neither ECS nor the image's registry never takes a job, and nobody says why: the job waits. An
internet gateway is no way out for a machine without a public address.
Sources: VPC user guide, "Subnet route tables", "Internet gateways"; Batch user guide, "Jobs stuck in a RUNNABLE
status"; ECS developer guide and ECR user guide, "Interface VPC endpoints".
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.network import Subnet
    from skerry.infra.clouds.aws.session import Aws

NEEDED: Final = ("ecr.api", "ecr.dkr", "ecs", "ecs-agent", "ecs-telemetry", "logs", "s3")
"""What a machine talks to that starts a job whose image is in ECR; a network without a way out needs all of them."""

_EVERYWHERE: Final = "0.0.0.0/0"
_INTERNET: Final = "igw-"


def stranded(aws: Aws, region: str, vpc: str, subnets: Iterable[Subnet]) -> tuple[Subnet, ...]:
    """Those that give machines no public address and have no route out. vpc: where they are. Asks only if need be."""
    private = [subnet for subnet in subnets if not subnet.public]
    if not private:
        return ()
    of_vpc = [{"Name": "vpc-id", "Values": [vpc]}]
    tables = list(aws.pages("ec2", region, "describe_route_tables", "RouteTables", Filters=of_vpc))
    return tuple(subnet for subnet in private if not _leads_out(_table_of(subnet.id, tables)))


def lacking_endpoints(aws: Aws, region: str, vpc: str) -> tuple[str, ...]:
    """Which of `NEEDED` the network has no endpoint of its own for."""
    ready = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "vpc-endpoint-state", "Values": ["available"]}]
    rows = aws.pages("ec2", region, "describe_vpc_endpoints", "VpcEndpoints", Filters=ready)
    there = {str(row["ServiceName"]).rpartition(f".{region}.")[2] for row in rows}
    return tuple(name for name in NEEDED if name not in there)


def _table_of(subnet: str, tables: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The subnet's own; without one, the network's."""

    def associated(name: str, value: object) -> Iterator[Mapping[str, Any]]:
        return (table for table in tables if any(one.get(name) == value for one in table.get("Associations", [])))

    return next(itertools.chain(associated("SubnetId", subnet), associated("Main", True)), None)  # noqa: FBT003  AWS's


def _leads_out(table: Mapping[str, Any] | None) -> bool:
    return table is not None and any(
        route.get("DestinationCidrBlock") == _EVERYWHERE
        and route.get("State", "active") == "active"
        and not str(route.get("GatewayId", "")).startswith(_INTERNET)
        for route in table.get("Routes", [])
    )
