"""Computes what machines and traffic of a run have cost, and cost an hour, from its view and the clouds' prices.

Traffic is priced only if the region of the bucket is known, which a spec names and a URI does not. A machine without a
known cloud, type or price is unknown, never free. A spot machine without a price of its own costs at most as much as on
demand.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from skerry.infra.cost.estimate import Cost, Estimate, cost_of
from skerry.infra.cost.prices import load, own_file, rounded
from skerry.infra.deploy import read_clouds
from skerry.infra.observe.run_view import Machine
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.infra.cost.prices import Price, Prices
    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.infra.observe.run_view import MachineTime, RunView
    from skerry.infra.provision.target_and_store_interfaces import Rate


class HourlyPrice(NamedTuple):
    """US dollars for an hour of a machine. at_most: an upper bound."""

    usd: float
    at_most: bool = False


@dataclass(frozen=True, kw_only=True)
class Spending:
    """Dollars for machines and traffic. so_far: with known prices; None without any. to_come: at the current
    pace until the end; None if unknown. complete: the price of every machine is known. at_most: of some it is an upper
    bound. traffic: in so_far; None if the bucket's region is unknown. hourly: by machine, None if unknown. estimate: of
    the spec, for all its machines in the time in which any has run; None if unknown.
    """

    so_far: float | None
    to_come: float | None
    complete: bool
    at_most: bool
    hourly: Mapping[Machine, HourlyPrice | None]
    traffic: Cost | None = None
    estimate: float | None = None

    def an_hour(self, machine: Machine | None) -> str:
        """The price of a machine for an hour; "-" if it is unknown."""
        price = None if machine is None else self.hourly.get(machine)
        return "-" if price is None else ("≤" if price.at_most else "") + rounded(price.usd).removeprefix("$")

    @property
    def text(self) -> str:
        """For people: $18.20 of about $31.10; empty if no price is known."""
        if self.so_far is None:
            return ""
        more = "" if self.complete else " + unpriced machines"
        more += " + unpriced traffic" if self.traffic is not None and self.traffic.missing else ""
        total = "" if self.to_come is None else f" of about {rounded(self.so_far + self.to_come)}"
        return f"{'at most ' if self.at_most else ''}{rounded(self.so_far)}{total}{more}"

    @property
    def estimate_text(self) -> str:
        """For people: estimate $20.00; empty if it is unknown."""
        return f"estimate {rounded(self.estimate)}" if self.estimate is not None else ""

    @property
    def document(self) -> dict[str, float | None]:
        """For programs."""
        return {"usd": self.so_far, "usd_to_come": self.to_come, "usd_estimate": self.estimate}

    @property
    def lines(self) -> list[str]:
        """A line for people; none if nothing is known."""
        parts = filter(None, (self.text, self.estimate_text and f"{self.estimate_text} for the machines until now"))
        line = "; ".join(parts)
        return [f"dollars: {line}"] if line else []


def spending(
    view: RunView,
    price_of: Callable[[Machine], HourlyPrice | None],
    routes: TrafficPrices | None = None,
    estimated: float | None = None,
) -> Spending:
    """The dollars of a run. Pure.

    price_of: of a machine for an hour; None if unknown. routes: None prices no traffic. estimated: for an hour of all
    machines of the spec.
    """
    hourly = {time.machine: price_of(time.machine) for time in view.machine_times if time.machine is not None}
    known = [
        (time, price)
        for time in view.machine_times
        if time.machine is not None and (price := hourly[time.machine]) is not None
    ]
    rate = sum(price.usd * time.running for time, price in known)
    traffic = None if routes is None else sum(map(routes.cost_of, view.machine_times), Cost())
    moved = 0.0 if traffic is None else traffic.known
    left = 0.0 if view.rounds is None else moved * max(0, view.rounds - view.closed) / max(1, view.closed)
    return Spending(
        so_far=moved + sum(price.usd * time.hours for time, price in known) if known or moved else None,
        to_come=None if view.left_s is None else rate * view.left_s / 3600 + left,
        traffic=traffic,
        complete=len(known) == len(view.machine_times),
        at_most=any(price.at_most for _, price in known),
        hourly=hourly,
        estimate=None if estimated is None or view.running_s is None else estimated * view.running_s / 3600,
    )


@dataclass(frozen=True, kw_only=True)
class TrafficPrices:
    """Prices of traffic between machines and a bucket in `region`. bucket: of its cloud; prices_of: of any cloud."""

    region: str
    bucket: Prices
    prices_of: Callable[[str], Prices]

    def cost_of(self, time: MachineTime) -> Cost:
        """The dollars for the bytes of all starts on one kind of machine, each at the price of the place it leaves."""
        machine = time.machine or Machine()
        inside = machine.cloud == self.bucket.cloud and machine.region is not None
        up = None
        if machine.cloud is not None and machine.region is not None:
            up = self.prices_of(machine.cloud).transfer(machine.region, self.region if inside else None)
        down = self.bucket.transfer(self.region, machine.region if inside else None)
        if machine.cloud is None or (machine.cloud == self.bucket.cloud and not inside):
            down = None  # it may be in the bucket's region, or anywhere else
        ways = (("to", time.uploaded_bytes, up), ("from", time.downloaded_bytes, down))
        return sum((cost_of(size / 1e9, price, f"a GB {way} the bucket") for way, size, price in ways if size), Cost())

    @property
    def write(self) -> float | None:
        """The dollars for a request that writes, of all requests the most expensive one; None if unknown."""
        price = self.bucket.write(self.region)
        return None if price is None else price.usd / 1000


def read_spending(
    deployment: Deployment | None = None, rates: Sequence[Rate] | None = None
) -> Callable[[RunView], Spending]:
    """The function that prices a view; prices, the region of the bucket and the estimate are read once, now.

    deployment: None prices no traffic and has no estimate. rates: of a plan; None asks the clouds. A cloud that does
    not answer leaves its part unknown. Raises Invalid if the user's own file of prices cannot be read.
    """
    price_of, routes = read_prices(), read_traffic_prices(deployment)
    if rates is None and deployment is not None:
        try:
            rates = read_clouds.read_prices(deployment)
        except SkerryError:
            rates = None
    estimated = None if rates is None else Estimate(rates=tuple(rates)).per_hour
    return lambda view: spending(view, price_of, routes, estimated)


def read_traffic_prices(deployment: Deployment | None) -> TrafficPrices | None:
    """The prices for the bucket of a deployment; None without one, or if its region cannot be read."""
    try:
        region = None if deployment is None else read_clouds.read_bucket_region(deployment)
    except SkerryError:
        region = None
    if deployment is None or region is None:
        return None
    prices_of = _read_tables()
    return TrafficPrices(region=region, bucket=prices_of(deployment.home_name), prices_of=prices_of)


def read_prices() -> Callable[[Machine], HourlyPrice | None]:
    """Prices of machines from the tables of this package and the user's own file; each table is read once.

    Raises Invalid if the user's own file cannot be read.
    """
    table_of = _read_tables()

    def price_of(machine: Machine) -> HourlyPrice | None:
        if machine.cloud is None or machine.region is None or machine.machine is None:
            return None
        return machine_price(table_of(machine.cloud), machine.region, machine.machine, machine)

    return price_of


def _read_tables() -> Callable[[str], Prices]:
    """The table of a cloud, each read once, with the user's own file."""
    own = own_file(os.environ)

    @functools.cache
    def table(cloud: str) -> Prices:
        return load(cloud, own)

    return table


def machine_price(table: Prices, region: str, kind: str, machine: Machine) -> HourlyPrice | None:
    """The price of a machine of this type with its accelerators, from the table of its cloud. Pure."""
    parts = table.parts_of(kind, machine.accelerator, machine.accelerators)

    def total(find: Callable[[str, str], Price | None]) -> float | None:
        known = [price.usd * count for name, count in parts if (price := find(region, name)) is not None]
        return sum(known) if len(known) == len(parts) else None

    if machine.spot and (spot := total(table.spot)) is not None:
        return HourlyPrice(spot)
    listed = total(table.machine)
    return None if listed is None else HourlyPrice(listed, at_most=machine.spot is True)
