"""Computes the hourly price of a group's replicas from the user's own prices: a cluster publishes none. Pure.

The price of an hour of a replica stands under `machines`, by the partition's name, in the region of the login node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.provision.target_and_store_interfaces import Rate
from skerry.infra.targets.slurm.options import SlurmTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.cost.prices import Prices
    from skerry.infra.spec.model import Limits, Replicas


def rates(prices: Prices, limits: Limits, groups: Sequence[Replicas]) -> list[Rate]:
    """See Target.rates. A job is requeued without a limit, so only the run's own limit is a cap."""
    return [_rate(prices, limits, group) for group in groups]


def _rate(prices: Prices, limits: Limits, group: Replicas) -> Rate:
    target = SlurmTarget.of(group)
    machine = target.partition or "default"
    price = prices.machine(target.region, machine)
    gpus = f" with {target.gpus} {target.gpu_type or 'GPU'}" if target.gpus else ""
    return Rate(
        group=group.name,
        what=f"partition {machine}{gpus}, {target.cpus} CPUs, at {target.region}",
        machine=f"partition {machine}{gpus}, {target.cpus} CPUs",
        count=group.count,
        per_hour=None if price is None else group.count * price.usd,
        source=f"no price of {machine} at {target.region}" if price is None else str(price),
        cap_hours=limits.max_hours,
    )
