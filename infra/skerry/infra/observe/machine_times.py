"""Adds up the hours of a run's machines by their kind, from its starts. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.observe.run_view import Machine, MachineTime

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from skerry.infra.observe.history import Start
    from skerry.infra.observe.run_totals import RunTotals
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
    starts: Sequence[Start], totals: RunTotals, now_at: float, silent: Collection[str]
) -> tuple[MachineTime, ...]:
    """The hours and bytes by machine, in order of the first start on it.

    silent: slots whose last start is not counted as running. totals: of the closed rounds. A start without a record of
    its end ran at least until the last round with a record of it: so much is counted.
    """
    newest = {start.slot: start.incarnation for start in starts}
    times: dict[Machine | None, MachineTime] = {}
    for start in starts:
        machine = machine_of(start.place)
        runs = start.ended_at is None and newest[start.slot] == start.incarnation and start.slot not in silent
        number = start.slot, start.incarnation
        last = totals.seen_at.get(number, start.began_at)
        end = now_at if runs else last if start.ended_at is None else start.ended_at
        before = times.get(machine, MachineTime(machine=machine, hours=0.0, running=0))
        times[machine] = MachineTime(
            machine=machine,
            hours=before.hours + max(0.0, end - start.began_at) / 3600,
            running=before.running + runs,
            uploaded_bytes=before.uploaded_bytes + totals.uploaded[number],
            downloaded_bytes=before.downloaded_bytes + totals.downloaded[number],
        )
    return tuple(times.values())
