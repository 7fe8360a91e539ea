"""What a group's machines and their disks cost by the hour. Asks what machines hold, and what spare ones cost now.

Which of several types Batch takes nobody knows: the dearest is told. Where a price is unknown the group's is.
Sources: EC2 API, DescribeSpotPriceHistory; Batch user guide, "Spot Instances" (never above the price on demand).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.prices import HOURS_A_MONTH, rounded
from skerry.infra.target import Rate
from skerry.infra.targets.aws_batch.layout import target_of
from skerry.infra.targets.aws_batch.machines import own_hours, shape
from skerry.infra.targets.aws_batch.survey import described
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterable, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.placement import AwsBatchTarget
    from skerry.infra.prices import Prices
    from skerry.infra.spec import Replicas
    from skerry.infra.target import Ground
    from skerry.infra.targets.aws_batch.machines import Machine

_LINUX: Final = "Linux/UNIX"
_GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True)
class _Hour:
    """An hour of one machine. source: whose word it is. bound: it costs that or less."""

    usd: float
    source: str
    bound: bool = False


def rates(aws: Aws, prices: Prices, ground: Ground, groups: Sequence[Replicas]) -> list[Rate]:
    """See Target.rates."""
    found: list[Rate] = []
    for group in groups:
        target = target_of(group)
        machines = described(aws, target.region, target.instance_types)
        spot_now: Mapping[str, float] = spot_prices(aws, target) if target.spot else {}
        found.append(group_rate(prices, group, machines, spot_now, firm=ground.firm_prices))
    return found


def group_rate(
    prices: Prices, group: Replicas, machines: Sequence[Machine], spot_now: Mapping[str, float], *, firm: bool
) -> Rate:
    """What a group costs on these machines. Pure.

    spot_now: what spare machines cost now, by type, as far as known. firm: spot prices of now do not count.
    """
    target = target_of(group)
    counts = _counts(target, group.count, machines)
    hours = {one.type: _hour(prices, target, one.type, spot_now, firm=firm) for one in machines}
    missing = [kind for kind, hour in hours.items() if hour is None]
    disk = _disk_hour(prices, target)
    if disk is None:
        missing.append("a disk")
    known = [(counts[kind] * (hour.usd + (disk or 0.0)), hour) for kind, hour in hours.items() if hour is not None]
    if missing or not known:
        per_hour, source = None, f"no price of {' and '.join(missing)} in {target.region}"
    else:
        per_hour, dearest = max(known, key=lambda pair: pair[0])
        at_most = "at most; " if len(known) > 1 or dearest.bound else ""
        source = f"{at_most}{dearest.source}, {'your own disks not counted' if _own_disk(target) else 'disk included'}"
    kind = "spot" if target.spot else "on demand"
    return Rate(
        group=group.name,
        what=f"{' or '.join(target.instance_types)}, {kind}, in {target.region}",
        count=group.count,
        per_hour=per_hour,
        source=source,
        cap_hours=own_hours(target),
    )


def spot_prices(aws: Aws, target: AwsBatchTarget) -> Mapping[str, float]:
    """What spare machines of these types cost now, in the dearest zone; nothing, if that cannot be asked."""
    try:
        rows = aws.pages(
            "ec2",
            target.region,
            "describe_spot_price_history",
            "SpotPriceHistory",
            InstanceTypes=list(target.instance_types),
            ProductDescriptions=[_LINUX],
            # From now on: the price that holds is told, and no history.
            StartTime=aws.clock.utc_text(),
        )
        return dearest_now(rows, target.zones)
    except SkerryError:  # no right to ask, or no answer: the price on demand bounds it
        return {}


def dearest_now(rows: Iterable[Mapping[str, Any]], zones: Sequence[str] | None) -> Mapping[str, float]:
    """The newest price of each type in the dearest of these zones; None is all of them. Pure."""
    newest: dict[tuple[str, str], tuple[dt.datetime, float]] = {}
    for row in rows:
        place = str(row["InstanceType"]), str(row["AvailabilityZone"])
        told = row["Timestamp"], float(row["SpotPrice"])
        if zones is None or place[1] in zones:
            newest[place] = max(newest.get(place, told), told)
    found: dict[str, float] = {}
    for (kind, _), (_, usd) in newest.items():
        found[kind] = max(found.get(kind, 0.0), usd)
    return found


def _hour(
    prices: Prices, target: AwsBatchTarget, kind: str, spot_now: Mapping[str, float], *, firm: bool
) -> _Hour | None:
    """firm: only what still holds tomorrow counts, for a limit is made of it."""
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
    """An hour of one machine's disk; none of a disk whose size is not ours to say."""
    if _own_disk(target):
        return 0.0
    price = prices.disk(target.region)
    return None if price is None else target.disk / _GIB * price.usd / HOURS_A_MONTH


def _own_disk(target: AwsBatchTarget) -> bool:
    own = target.byo
    return any(one is not None for one in (own.queue, own.compute_environment, own.launch_template))


def _counts(target: AwsBatchTarget, count: int, machines: Sequence[Machine]) -> Mapping[str, int]:
    """How many machines of each type hold all replicas, each as large as it has to be for all the types."""
    each = shape(target, count, machines)
    sized = target.model_copy(update={"vcpus": each.vcpus, "memory": each.memory_mib << 20})
    return {one.type: shape(sized, count, [one]).max_vcpus // one.vcpus for one in machines}
