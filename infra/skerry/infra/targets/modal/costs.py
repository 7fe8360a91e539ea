"""Computes the hourly price of a group's replicas from the user's own prices: Modal's API lists none. Pure.

The prices are under `machines` in the region "modal": of a GPU by its type, of a core as `cpu`, and of a GiB of
memory as `memory`, all for an hour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.provision.target_and_store_interfaces import Rate
from skerry.infra.targets.modal.options import ModalTarget
from skerry.infra.targets.modal.resource_graph import timeout_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.cost.prices import Prices
    from skerry.infra.spec.model import Limits, Replicas

_REGION: Final = "modal"
_HOUR_S: Final = 3600


def rates(prices: Prices, limits: Limits, groups: Sequence[Replicas]) -> list[Rate]:
    """See Target.rates."""
    return [_rate(prices, limits, group) for group in groups]


def _rate(prices: Prices, limits: Limits, group: Replicas) -> Rate:
    target = ModalTarget.of(group)
    gpus = [] if target.gpu is None else [(target.gpu.rstrip("!+"), float(target.gpus))]
    parts = [*gpus, ("cpu", target.cpu), ("memory", target.memory / (1 << 30))]
    parts_with_prices = [(name, count, prices.machine(_REGION, name)) for name, count in parts]
    known = [(price.usd * count, price) for _, count, price in parts_with_prices if price is not None]
    missing = [name for name, _, price in parts_with_prices if price is None]
    with_gpus = "" if target.gpu is None else f" with {target.gpus} {target.gpu}"
    return Rate(
        group=group.name,
        what=f"a sandbox of {target.cpu:g} cores{with_gpus} in the environment {target.environment}",
        machine=f"{target.cpu:g} cores{with_gpus}",
        count=group.count,
        per_hour=None if missing else group.count * sum(usd for usd, _ in known),
        source=f"no price of {' and '.join(missing)} at Modal" if missing else str(known[0][1]),
        cap_hours=timeout_s(limits.max_hours, target) / _HOUR_S,
        each_start=True,
    )
