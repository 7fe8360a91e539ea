"""Computes what the machines of a run have cost, and cost an hour, from its view and the prices of their clouds. Pure.

A machine without a known cloud, type or price is unknown, never free.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.infra.cost.prices import load, own_file, rounded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from skerry.infra.cost.prices import Prices
    from skerry.infra.observe.run_view import Machine, RunView


@dataclass(frozen=True, kw_only=True)
class Spending:
    """Dollars for machines. so_far: of those with a known price; None without any. to_come: at the current pace until
    the end; None if unknown. complete: the price of every machine is known. hourly: by machine, None if unknown.
    """

    so_far: float | None
    to_come: float | None
    complete: bool
    hourly: Mapping[Machine, float | None]

    def an_hour(self, machine: Machine | None) -> str:
        """The price of a machine for an hour; "-" if it is unknown."""
        usd = None if machine is None else self.hourly.get(machine)
        return "-" if usd is None else rounded(usd).removeprefix("$")

    @property
    def text(self) -> str:
        """For people: $18.20 of about $31.10; empty if nothing is known."""
        if self.so_far is None:
            return ""
        more = "" if self.complete else " + unpriced machines"
        total = "" if self.to_come is None else f" of about {rounded(self.so_far + self.to_come)}"
        return f"{rounded(self.so_far)}{total}{more}"


def spending(view: RunView, price_of: Callable[[Machine], float | None]) -> Spending:
    """The dollars of a run. price_of: of a machine for an hour; None if unknown."""
    hourly = {time.machine: price_of(time.machine) for time in view.machine_times if time.machine is not None}
    known = [
        (time, usd)
        for time in view.machine_times
        if time.machine is not None and (usd := hourly[time.machine]) is not None
    ]
    rate = sum(usd * time.running for time, usd in known)
    return Spending(
        so_far=sum(usd * time.hours for time, usd in known) if known else None,
        to_come=None if view.left_s is None else rate * view.left_s / 3600,
        complete=len(known) == len(view.machine_times),
        hourly=hourly,
    )


def read_prices() -> Callable[[Machine], float | None]:
    """Prices of machines from the tables of this package and the user's own file; each table is read once.

    Raises Invalid if the user's own file cannot be read.
    """
    own: Path | None = own_file(os.environ)
    tables: dict[str, Prices] = {}

    def price_of(machine: Machine) -> float | None:
        if machine.cloud is None or machine.region is None or machine.machine is None:
            return None
        if machine.cloud not in tables:
            tables[machine.cloud] = load(machine.cloud, own)
        table = tables[machine.cloud]
        find = table.spot if machine.spot else table.machine
        price = find(machine.region, machine.machine)
        return None if price is None else price.usd

    return price_of
