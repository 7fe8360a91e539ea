"""Adds up the hours of a run's machines by their kind, from its starts. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.observe.run_view import Machine, MachineTime

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

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
    """The hours and bytes by machine, in order of the first start on it. See `_spans`."""
    times: dict[Machine | None, MachineTime] = {}
    for start, end, runs in _spans(starts, totals, now_at, silent):
        machine, number = machine_of(start.place), (start.slot, start.incarnation)
        before = times.get(machine, MachineTime(machine=machine, hours=0.0, running=0))
        times[machine] = MachineTime(
            machine=machine,
            hours=before.hours + max(0.0, end - start.began_at) / 3600,
            running=before.running + runs,
            uploaded_bytes=before.uploaded_bytes + totals.uploaded[number],
            downloaded_bytes=before.downloaded_bytes + totals.downloaded[number],
        )
    return tuple(times.values())


def running_seconds(starts: Sequence[Start], totals: RunTotals, now_at: float, silent: Collection[str]) -> float | None:
    """The time in which at least one replica ran, without the pause between two `up`s; None without starts."""
    spans = sorted((start.began_at, end) for start, end, _ in _spans(starts, totals, now_at, silent))
    seconds, until = 0.0, float("-inf")
    for began_at, end in spans:
        seconds += max(0.0, end - max(began_at, until))
        until = max(until, end)
    return seconds if spans else None


def _spans(
    starts: Sequence[Start], totals: RunTotals, now_at: float, silent: Collection[str]
) -> Iterator[tuple[Start, float, bool]]:
    """Each start with its end, and whether it runs.

    silent: slots whose last start is not counted as running. totals: of the closed rounds. A start without a record of
    its end ran at least until the last round with a record of it: so much is counted.
    """
    newest = {start.slot: start.incarnation for start in starts}
    for start in starts:
        runs = start.ended_at is None and newest[start.slot] == start.incarnation and start.slot not in silent
        last = totals.seen_at.get((start.slot, start.incarnation), start.began_at)
        yield start, now_at if runs else last if start.ended_at is None else start.ended_at, runs
