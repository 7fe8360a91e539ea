"""Finds replicas that trained little or nothing of a run: absent, cut short, restarted, failed. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.observe.doctor.findings import finding
from skerry.infra.observe.participation import participation
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.observe.doctor.findings import Finding
    from skerry.infra.observe.doctor.read_log import RunRecords


def check_participation(log: RunRecords) -> Iterator[Finding]:
    """A warning for each replica that is missing in closed rounds, and one if it was often cut short."""
    for replica in participation(log).replicas:
        if not replica.missing and not replica.often_cut:
            continue
        kind = "missing-in-rounds" if replica.missing else "often-cut-short"
        first = replica.missing[0] if replica.missing else None
        yield finding(
            kind,
            keys.members_prefix(replica.slot),
            replica.text,
            round_number=first,
            slot=replica.slot,
            severity="warning",
        )
