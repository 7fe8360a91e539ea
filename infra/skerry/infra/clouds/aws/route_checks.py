"""Finds subnets without a route to the internet or to the endpoints that jobs need. Changes nothing.

A machine that reaches neither ECS nor the image's registry never takes a job, and AWS reports no cause: the job waits.
An internet gateway does not help a machine without a public address.
Sources: VPC user guide, "Subnet route tables", "Internet gateways"; Batch user guide, "Jobs stuck in a RUNNABLE
status"; ECS developer guide and ECR user guide, "Interface VPC endpoints".
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.security_group_in_existing_vpc import Subnet
    from skerry.infra.clouds.aws.session import Aws

NEEDED: Final = ("ecr.api", "ecr.dkr", "ecs", "ecs-agent", "ecs-telemetry", "logs", "s3")
"""The endpoints that a machine needs to start a job with an image in ECR and no route to the internet."""

_EVERYWHERE: Final = "0.0.0.0/0"
_INTERNET: Final = "igw-"


def stranded(aws: Aws, region: str, vpc: str, subnets: Iterable[Subnet]) -> tuple[Subnet, ...]:
    """The subnets without public addresses and without a route out. Makes calls only if a subnet is private."""
    private = [subnet for subnet in subnets if not subnet.public]
    if not private:
        return ()
    of_vpc = [{"Name": "vpc-id", "Values": [vpc]}]
    tables = list(aws.pages("ec2", region, "describe_route_tables", "RouteTables", Filters=of_vpc))
    return tuple(subnet for subnet in private if not _leads_out(_table_of(subnet.id, tables)))


def lacking_endpoints(aws: Aws, region: str, vpc: str) -> tuple[str, ...]:
    """Those of `NEEDED` that the network has no endpoint for."""
    ready = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "vpc-endpoint-state", "Values": ["available"]}]
    rows = aws.pages("ec2", region, "describe_vpc_endpoints", "VpcEndpoints", Filters=ready)
    existing = {str(row["ServiceName"]).rpartition(f".{region}.")[2] for row in rows}
    return tuple(name for name in NEEDED if name not in existing)


def _table_of(subnet: str, tables: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The subnet's own route table; without one, the network's."""

    def associated(name: str, value: object) -> Iterator[Mapping[str, Any]]:
        return (table for table in tables if any(row.get(name) == value for row in table.get("Associations", [])))

    return next(itertools.chain(associated("SubnetId", subnet), associated("Main", True)), None)  # noqa: FBT003  AWS's


def _leads_out(table: Mapping[str, Any] | None) -> bool:
    return table is not None and any(
        route.get("DestinationCidrBlock") == _EVERYWHERE
        and route.get("State", "active") == "active"
        and not str(route.get("GatewayId", "")).startswith(_INTERNET)
        for route in table.get("Routes", [])
    )
