"""What a group's machines cost by the hour, as the tables of prices say. Pure.

A machine's price is for all that is in it; what is attached to one (n1) is counted by its own name: n1-standard-8 and
nvidia-tesla-t4 are two entries under `machines`. Vertex AI's prices are some 15 % above those of Compute Engine
("Vertex AI pricing", custom training), so a table of the latter says too little. Nobody tells what spare machines cost
now. Disks are not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.target import Rate
from skerry.infra.targets.vertex.layout import target_of
from skerry.infra.targets.vertex.machines import cap_hours, fitting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.placement import VertexTarget
    from skerry.infra.prices import Prices
    from skerry.infra.spec import Limits, Replicas


def rates(prices: Prices, limits: Limits, groups: Sequence[Replicas]) -> list[Rate]:
    """See Target.rates."""
    return [_rate(prices, limits, group) for group in groups]


def _rate(prices: Prices, limits: Limits, group: Replicas) -> Rate:
    target = target_of(group)
    has = fitting(target)
    each, source = _hour(prices, target)
    inside = f" with {has.accelerators} {has.accelerator}" if has.accelerator else ""
    return Rate(
        group=group.name,
        what=f"{target.machine}{inside}, {target.scheduling.replace('_', ' ')}, in {target.region}",
        count=group.count,
        per_hour=None if each is None else group.count * each,
        source=source,
        cap_hours=cap_hours(limits, target),
        each_start=True,
    )


def _hour(prices: Prices, target: VertexTarget) -> tuple[float | None, str]:
    """An hour of one machine with what is attached to it, and whose word that is."""
    has = fitting(target)
    parts = [(target.machine, 1)]
    if target.machine.startswith("n1-") and has.accelerator is not None:
        parts.append((has.accelerator, has.accelerators))
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
