"""Whether a slow replica should end its round early: in time with what it has, rather than late with everything.

The grace window has begun once a quorum of the others has contributed. Who would miss it takes the rest of its inner
steps empty and contributes now; its weight is its share of their inner steps. Measured (scripts/bench staleness): what
is short and in time helps, what is late does not. Decides, and reads the log; needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.runtime import keys
from skerry.runtime.errors import Corrupt, Diverged, Invalid

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock
    from skerry.runtime.journal import Journal
    from skerry.runtime.records import Contribution
    from skerry.runtime.rounds import Policy
    from skerry.runtime.store import Entry

# Seeing it, uploading and being seen must fit into the other half of the grace window.
_MARGIN = 0.5


class Pace:
    """One replica's pace against the others'."""

    def __init__(self, *, journal: Journal, clock: Clock, policy: Policy, slot: str) -> None:
        self._journal = journal
        self._clock = clock
        self._policy = policy
        self._slot = slot

    def share(self, round_number: int, steps: int, since: float, round_seconds: float | None) -> float | None:
        """What part of the others' inner steps this replica has taken, if it should stop there; else None.

        steps: inner steps taken since `since`. round_seconds: of recent rounds. One listing, and one read for each of
        the others that has contributed.
        """
        if steps == 0:
            return None
        entries = self._journal.store.list(keys.contributions_of(round_number, 0))
        found = {slot: one for slot, one in map(self._read, entries) if one is not None}
        # Below the quorum they wait for this replica anyway; what it has brought already covers it.
        if len(found) < self._policy.min_replicas or self._slot in found:
            return None
        full = max(one.inner_steps for one in found.values())
        left_s = (full - steps) * (self._clock.now() - since) / steps
        if left_s <= _MARGIN * self._policy.grace.window_s(round_seconds):
            return None
        return steps / full

    def _read(self, entry: Entry) -> tuple[str, Contribution | None]:
        """What a slot has contributed; None for what is nobody's, or cannot be read: whoever proposes tells that."""
        try:
            slot, number = keys.slot_of(entry.key), keys.round_of(entry.key)
            sealed = self._journal.contribution(number, 0, slot)
        except (Corrupt, Diverged, Invalid):
            return entry.key, None
        return slot, None if sealed is None else sealed.record
