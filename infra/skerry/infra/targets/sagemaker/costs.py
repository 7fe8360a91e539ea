"""Computes the hourly price of a group's machines from the price tables. Pure.

SageMaker's machines have their own prices, above those of EC2. Current spot prices are not published, but are never
above those on demand (developer guide, "Managed Spot Training"). Disks are not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.provision.target_and_store_interfaces import Rate
from skerry.infra.targets.sagemaker.options import SageMakerTarget
from skerry.infra.targets.sagemaker.resource_graph import cap_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.cost.prices import Prices
    from skerry.infra.spec.model import Limits, Replicas


def rates(prices: Prices, limits: Limits, groups: Sequence[Replicas]) -> list[Rate]:
    """See Target.rates."""
    return [_rate(prices, limits, group) for group in groups]


def _rate(prices: Prices, limits: Limits, group: Replicas) -> Rate:
    target = SageMakerTarget.of(group)
    each, source = _hour(prices, target)
    return Rate(
        group=group.name,
        what=f"{target.instance}, {'spot' if target.spot else 'on demand'}, in {target.region}",
        machine=target.instance,
        purchase="spot" if target.spot else "on demand",
        count=group.count,
        per_hour=None if each is None else group.count * each,
        source=source,
        cap_hours=cap_s(limits, target) / 3600,
        each_start=True,
    )


def _hour(prices: Prices, target: SageMakerTarget) -> tuple[float | None, str]:
    """Return the price of one machine per hour, and its source."""
    listed, own = prices.machine(target.region, target.instance), prices.spot(target.region, target.instance)
    if target.spot and own is not None:
        return own.usd, f"spot {own}, disk not counted"
    if listed is None:
        return None, f"no price of {target.instance} in {target.region}"
    bound = "at most; on demand, " if target.spot else ""
    return listed.usd, f"{bound}{listed}, disk not counted"
