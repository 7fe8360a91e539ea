"""Computes the hourly price of a group's machines and disks. Reads machine types and current spot prices from EC2.

Of several types the most expensive one counts, because Batch may choose any. If one price is unknown, so is the
group's.
Sources: EC2 API, DescribeSpotPriceHistory; Batch user guide, "Spot Instances" (never above the price on demand).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.cost.prices import HOURS_A_MONTH, rounded
from skerry.infra.provision.target_and_store_interfaces import Rate
from skerry.infra.targets.aws_batch.machine_sizing import own_hours, shape
from skerry.infra.targets.aws_batch.options import AwsBatchTarget
from skerry.infra.targets.aws_batch.region_offer import described
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterable, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.cost.prices import Prices
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import Replicas
    from skerry.infra.targets.aws_batch.machine_sizing import Machine

_LINUX: Final = "Linux/UNIX"
_GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True)
class _Hour:
    """The price of a machine per hour. source: where it is from. bound: it is an upper bound."""

    usd: float
    source: str
    bound: bool = False


def rates(aws: Aws, prices: Prices, context: RunContext, groups: Sequence[Replicas]) -> list[Rate]:
    """See Target.rates."""
    group_rates: list[Rate] = []
    for group in groups:
        target = AwsBatchTarget.of(group)
        machines = described(aws, target.region, target.instance_types)
        spot_now: Mapping[str, float] = spot_prices(aws, target) if target.spot else {}
        group_rates.append(group_rate(prices, group, machines, spot_now, firm=context.firm_prices))
    return group_rates


def group_rate(
    prices: Prices, group: Replicas, machines: Sequence[Machine], spot_now: Mapping[str, float], *, firm: bool
) -> Rate:
    """Return the rate of a group on these machines. Pure.

    spot_now: the current spot prices by type, as far as known. firm: ignore current spot prices.
    """
    target = AwsBatchTarget.of(group)
    counts = _counts(target, group.count, machines)
    hours = {machine.type: _hour(prices, target, machine.type, spot_now, firm=firm) for machine in machines}
    missing = [kind for kind, hour in hours.items() if hour is None]
    disk = _disk_hour(prices, target)
    if disk is None:
        missing.append("a disk")
    known = [(counts[kind] * (hour.usd + (disk or 0.0)), hour) for kind, hour in hours.items() if hour is not None]
    if missing or not known:
        per_hour, source = None, f"no price of {' and '.join(missing)} in {target.region}"
    else:
        per_hour, highest = max(known, key=lambda pair: pair[0])
        at_most = "at most; " if len(known) > 1 or highest.bound else ""
        source = f"{at_most}{highest.source}, {'your own disks not counted' if _own_disk(target) else 'disk included'}"
    kind = "spot" if target.spot else "on demand"
    return Rate(
        group=group.name,
        what=f"{' or '.join(target.instance_types)}, {kind}, in {target.region}",
        machine=" or ".join(target.instance_types),
        purchase=kind,
        count=group.count,
        per_hour=per_hour,
        source=source,
        cap_hours=own_hours(target),
    )


def spot_prices(aws: Aws, target: AwsBatchTarget) -> Mapping[str, float]:
    """Return the current spot price of each type in its most expensive zone; empty if they cannot be read."""
    try:
        rows = aws.pages(
            "ec2",
            target.region,
            "describe_spot_price_history",
            "SpotPriceHistory",
            InstanceTypes=list(target.instance_types),
            ProductDescriptions=[_LINUX],
            # From now on, AWS returns only the current price.
            StartTime=aws.clock.utc_text(),
        )
        return highest_current(rows, target.zones)
    except SkerryError:  # no permission, or no answer: the price on demand is the bound
        return {}


def highest_current(rows: Iterable[Mapping[str, Any]], zones: Sequence[str] | None) -> Mapping[str, float]:
    """Return the newest price of each type in its most expensive zone. zones: None is all of them. Pure."""
    newest: dict[tuple[str, str], tuple[dt.datetime, float]] = {}
    for row in rows:
        place = str(row["InstanceType"]), str(row["AvailabilityZone"])
        price = row["Timestamp"], float(row["SpotPrice"])
        if zones is None or place[1] in zones:
            newest[place] = max(newest.get(place, price), price)
    highest: dict[str, float] = {}
    for (kind, _), (_, usd) in newest.items():
        highest[kind] = max(highest.get(kind, 0.0), usd)
    return highest


def _hour(
    prices: Prices, target: AwsBatchTarget, kind: str, spot_now: Mapping[str, float], *, firm: bool
) -> _Hour | None:
    """Return the price of one machine. firm: without prices that change, because a limit is computed from it."""
    listed = prices.machine(target.region, kind)
    if not target.spot:
        return None if listed is None else _Hour(usd=listed.usd, source=str(listed))
    own, now = prices.spot(target.region, kind), spot_now.get(kind)
    if own is not None:
        return _Hour(usd=own.usd, source=f"spot {own}")
    if now is not None and not firm:
        above = "" if listed is None else f", {rounded(listed.usd)} each on demand"
        return _Hour(usd=now, source=f"spot price now{above}")
    if listed is None:
        return None
    below = "" if now is None else f", {rounded(now)} each now"
    return _Hour(usd=listed.usd, source=f"on demand, {listed}{below}", bound=True)


def _disk_hour(prices: Prices, target: AwsBatchTarget) -> float | None:
    """Return the price of a machine's disk per hour; 0 if a launch template or machines of the user define it."""
    if _own_disk(target):
        return 0.0
    price = prices.disk(target.region)
    return None if price is None else target.disk / _GIB * price.usd / HOURS_A_MONTH


def _own_disk(target: AwsBatchTarget) -> bool:
    byo = target.byo
    return any(name is not None for name in (byo.queue, byo.compute_environment, byo.launch_template))


def _counts(target: AwsBatchTarget, count: int, machines: Sequence[Machine]) -> Mapping[str, int]:
    """Return the number of machines of each type that hold all replicas."""
    each = shape(target, count, machines)
    sized = target.model_copy(update={"vcpus": each.vcpus, "memory": each.memory_mib << 20})
    return {machine.type: shape(sized, count, [machine]).max_vcpus // machine.vcpus for machine in machines}
