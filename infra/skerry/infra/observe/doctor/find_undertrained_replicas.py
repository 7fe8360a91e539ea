"""Finds replicas that trained little or nothing of a run: absent, cut short, restarted, failed. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.observe.doctor.findings import finding
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.observe.doctor.findings import Finding
    from skerry.infra.observe.participation import Participation


def find_undertrained_replicas(taken: Participation) -> Iterator[Finding]:
    """A warning for each replica that was missing, often cut short, or failed; an info for one that crashed only."""
    for replica in taken.replicas:
        if not replica.text:
            continue
        kind = "missing-in-rounds" if replica.missing else "often-cut-short" if replica.often_cut else "crashed"
        first = replica.missing[0] if replica.missing else None
        yield finding(
            kind,
            keys.members_prefix(replica.slot),
            replica.text,
            round_number=first,
            slot=replica.slot,
            severity="warning" if replica.missing or replica.often_cut or replica.failed else "info",
        )
