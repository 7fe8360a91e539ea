"""Computes what the machines of a run have cost, and cost an hour, from its view and the prices of their clouds. Pure.

A machine without a known cloud, type or price is unknown, never free. A spot machine without a price of its own costs
at most as much as on demand.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from skerry.infra.cost.prices import load, own_file, rounded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from skerry.infra.cost.prices import Price, Prices
    from skerry.infra.observe.run_view import Machine, RunView


class HourlyPrice(NamedTuple):
    """US dollars for an hour of a machine. at_most: an upper bound."""

    usd: float
    at_most: bool = False


@dataclass(frozen=True, kw_only=True)
class Spending:
    """Dollars for machines. so_far: of those with a known price; None without any. to_come: at the current pace until
    the end; None if unknown. complete: the price of every machine is known. at_most: of some it is an upper bound.
    hourly: by machine, None if unknown.
    """

    so_far: float | None
    to_come: float | None
    complete: bool
    at_most: bool
    hourly: Mapping[Machine, HourlyPrice | None]

    def an_hour(self, machine: Machine | None) -> str:
        """The price of a machine for an hour; "-" if it is unknown."""
        price = None if machine is None else self.hourly.get(machine)
        return "-" if price is None else ("≤" if price.at_most else "") + rounded(price.usd).removeprefix("$")

    @property
    def text(self) -> str:
        """For people: $18.20 of about $31.10; empty if nothing is known."""
        if self.so_far is None:
            return ""
        more = "" if self.complete else " + unpriced machines"
        total = "" if self.to_come is None else f" of about {rounded(self.so_far + self.to_come)}"
        return f"{'at most ' if self.at_most else ''}{rounded(self.so_far)}{total}{more}"


def spending(view: RunView, price_of: Callable[[Machine], HourlyPrice | None]) -> Spending:
    """The dollars of a run. price_of: of a machine for an hour; None if unknown."""
    hourly = {time.machine: price_of(time.machine) for time in view.machine_times if time.machine is not None}
    known = [
        (time, price)
        for time in view.machine_times
        if time.machine is not None and (price := hourly[time.machine]) is not None
    ]
    rate = sum(price.usd * time.running for time, price in known)
    return Spending(
        so_far=sum(price.usd * time.hours for time, price in known) if known else None,
        to_come=None if view.left_s is None else rate * view.left_s / 3600,
        complete=len(known) == len(view.machine_times),
        at_most=any(price.at_most for _, price in known),
        hourly=hourly,
    )


def read_prices() -> Callable[[Machine], HourlyPrice | None]:
    """Prices of machines from the tables of this package and the user's own file; each table is read once.

    Raises Invalid if the user's own file cannot be read.
    """
    own: Path | None = own_file(os.environ)
    tables: dict[str, Prices] = {}

    def price_of(machine: Machine) -> HourlyPrice | None:
        if machine.cloud is None or machine.region is None or machine.machine is None:
            return None
        if machine.cloud not in tables:
            tables[machine.cloud] = load(machine.cloud, own)
        return machine_price(tables[machine.cloud], machine.region, machine.machine, machine)

    return price_of


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
