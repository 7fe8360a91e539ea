"""Computes the hourly price of a group's machines from the price tables. Pure.

The price of a machine includes its built-in accelerators. An accelerator that is attached to an n1 machine is counted
by its own name: n1-standard-8 and nvidia-tesla-t4 are two entries under `machines`. Vertex AI's prices are about 15 %
above those of Compute Engine ("Vertex AI pricing", custom training), so a table of the latter is too low. Current spot
prices are not published. Disks are not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.provision.target_and_store_interfaces import Rate
from skerry.infra.targets.vertex.accelerators_disk_time_and_quota import cap_hours, fitting
from skerry.infra.targets.vertex.options import VertexTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.cost.prices import Prices
    from skerry.infra.spec.model import Limits, Replicas


def rates(prices: Prices, limits: Limits, groups: Sequence[Replicas]) -> list[Rate]:
    """See Target.rates."""
    return [_rate(prices, limits, group) for group in groups]


def _rate(prices: Prices, limits: Limits, group: Replicas) -> Rate:
    target = VertexTarget.of(group)
    has = fitting(target)
    each, source = _hour(prices, target)
    inside = f" with {has.accelerators} {has.accelerator}" if has.accelerator else ""
    return Rate(
        group=group.name,
        what=f"{target.machine}{inside}, {target.scheduling.replace('_', ' ')}, in {target.region}",
        machine=f"{target.machine}{inside}",
        purchase=target.scheduling.replace("_", " "),
        count=group.count,
        per_hour=None if each is None else group.count * each,
        source=source,
        cap_hours=cap_hours(limits, target),
        each_start=True,
    )


def _hour(prices: Prices, target: VertexTarget) -> tuple[float | None, str]:
    """Return the price of one machine per hour with its attached accelerators, and its source."""
    has = fitting(target)
    parts = prices.parts_of(target.machine, has.accelerator, has.accelerators)
    spot = [(prices.spot(target.region, name), count) for name, count in parts]
    listed = [(prices.machine(target.region, name), count) for name, count in parts]
    own = [(price, count) for price, count in spot if price is not None]
    if target.scheduling == "spot" and len(own) == len(parts):
        return sum(price.usd * count for price, count in own), f"spot {own[0][0]}, disk not counted"
    known = [(price, count) for price, count in listed if price is not None]
    if len(known) < len(parts):
        missing = [name for (name, _), (price, _) in zip(parts, listed, strict=True) if price is None]
        return None, f"no price of {' and '.join(missing)} in {target.region}"
    bound = "at most; standard, " if target.scheduling != "standard" else ""
    return sum(price.usd * count for price, count in known), f"{bound}{known[0][0]}, disk not counted"
