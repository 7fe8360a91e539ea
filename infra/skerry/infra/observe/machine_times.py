"""Adds up the hours of a run's machines by their kind, from its starts. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.observe.run_view import Machine, MachineTime

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from skerry.infra.observe.history import Start
    from skerry.runtime.log.records import Place


def machine_of(place: Place | None) -> Machine | None:
    """The machine of a start; None if its record names none."""
    if place is None:
        return None
    return Machine(
        cloud=place.cloud,
        region=place.region,
        machine=place.machine,
        accelerator=place.accelerator,
        accelerators=place.accelerators,
        spot=place.spot,
    )


def machine_times(
    starts: Sequence[Start], seen_at: Mapping[tuple[str, int], float], now_at: float, silent: Collection[str]
) -> tuple[MachineTime, ...]:
    """The hours by machine, in order of the first start on it.

    silent: slots whose last start is not counted as running. seen_at: when the last round with a record of a slot and
    incarnation was closed. A start without a record of its end ran at least until then: so much is counted.
    """
    newest = {start.slot: start.incarnation for start in starts}
    hours: dict[Machine | None, float] = {}
    running: dict[Machine | None, int] = {}
    for start in starts:
        machine = machine_of(start.place)
        runs = start.ended_at is None and newest[start.slot] == start.incarnation and start.slot not in silent
        last = seen_at.get((start.slot, start.incarnation), start.began_at)
        end = now_at if runs else last if start.ended_at is None else start.ended_at
        hours[machine] = hours.get(machine, 0.0) + max(0.0, end - start.began_at) / 3600
        running[machine] = running.get(machine, 0) + runs
    return tuple(
        MachineTime(machine=machine, hours=value, running=running[machine]) for machine, value in hours.items()
    )
