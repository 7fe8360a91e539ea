"""Decides when a slow replica ends its round early, to contribute in time the steps that it has.

The grace window has begun once a quorum of the others has contributed. A replica that would miss it takes the rest of
its inner steps empty and contributes now; its weight is its share of their inner steps. Measured (decision
0017): a short contribution in time helps, a late one does not. Decides, and reads the log; needs no torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Corrupt, Diverged, Invalid
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock
    from skerry.runtime.log.log import RunLog
    from skerry.runtime.log.records import Contribution
    from skerry.runtime.protocol.quorum import Policy
    from skerry.runtime.store import Entry

# Seeing it, uploading and being seen must fit into the other half of the grace window.
_MARGIN = 0.5


@dataclass(frozen=True, kw_only=True)
class EarlierSteps:
    """The rounds since the last exchange of the fragment that the current round exchanges. steps: taken in them.

    plan: inner steps of a round here, up to its exchange; None until one was seen.
    """

    rounds: int = 0
    steps: int = 0
    plan: int | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluations in the current round: their time so far, and whether one is running now."""

    seconds: float
    is_running: bool


_NOTHING_EARLIER: Final = EarlierSteps()


class EarlyEndPolicy:
    """Compares one replica's pace with the others' contributions."""

    def __init__(self, *, log: RunLog, clock: Clock, policy: Policy, slot: str, look_every_s: float = 0.0) -> None:
        """look_every_s: seconds between two calls of `share`."""
        self._log = log
        self._clock = clock
        self._policy = policy
        self._slot = slot
        self._round = -1
        self._found: dict[str, Contribution | None] = {}
        self._mark = (0, 0.0)
        self._look_every_s = look_every_s
        self._last_step_s = 0.0
        self._without_quorum = 0.0

    def share(
        self,
        round_number: int,
        base: str,
        steps: int,
        since: float,
        round_seconds: float | None,
        earlier: EarlierSteps = _NOTHING_EARLIER,
        *,
        upload_s: float = 0.0,
        evaluation: Evaluation | None = None,
    ) -> float | None:
        """The share of the others' inner steps that this replica has taken, if it should end the round now; else None.

        base: the commit that the round builds on. steps: inner steps taken in it since `since`. round_seconds: of
        recent rounds. earlier: what else is in the pseudo-gradient. upload_s: of the last contribution. evaluation: its
        time is none of training; a round with one is ended as late as the others' window allows, and not as soon as it
        is seen to be too short.
        One listing, and one read for each contribution since the last look. Raises what the store does.
        """
        if round_number != self._round:
            self._round, self._found, self._mark = round_number, {}, (0, since)
            self._without_quorum = since
        now = self._clock.now()
        step_s = self._step_s(steps, now - (0.0 if evaluation is None else evaluation.seconds))
        for entry in self._log.store.list(keys.contributions_prefix(round_number, 0)):
            if entry.key not in self._found:
                self._found[entry.key] = self._read(entry)
        read = [contribution for contribution in self._found.values() if contribution is not None]
        # A discounted one is an earlier version's late work, whose replica may still train.
        waiting = [entry for entry in read if entry.base == base and entry.discount == 1.0]
        # Contributions of other tensors are refused, so they make no quorum.
        indexes = Counter(contribution.index for contribution in waiting)
        # Below the quorum they wait for this replica anyway; if it has contributed, there is nothing to end.
        if max(indexes.values(), default=0) < self._policy.min_replicas:
            self._without_quorum = now
            return None
        if steps == 0 or self._has_spoken():
            return None
        # The fewest: a contribution may include steps of an earlier round, which do not belong to this one.
        full = min(contribution.inner_steps / contribution.work for contribution in waiting)
        in_round = full / (1 + earlier.rounds)
        left_s = (min(in_round, earlier.plan or in_round) - steps) * step_s
        # A replica that has just joined has timed no round yet, so it assumes the shortest window.
        known_s = 0.0 if round_seconds is None and round_number > 0 else round_seconds
        window_s = self._policy.grace.window_s(known_s)
        if evaluation is None:
            in_time = left_s <= window_s - max(_MARGIN * window_s, upload_s)
        else:
            # The others' window began after the last look without a quorum; uploading and being seen take the rest.
            latest = self._without_quorum + window_s - upload_s - self._look_every_s
            next_s = self._look_every_s if evaluation.is_running else max(self._look_every_s, step_s)
            in_time = now + (next_s if evaluation.is_running else min(left_s, next_s)) <= latest
        return None if in_time else min(1.0, (earlier.steps + steps) / full)

    @property
    def sees_quorum(self) -> bool:
        """At the last look enough slots had contributed that the round may be closed."""
        return len(self._found) >= self._policy.min_replicas

    def _step_s(self, steps: int, now: float) -> float:
        """Seconds that this replica takes for an inner step, by those since the last look: the first may compile."""
        at, since = self._mark
        if steps < at:  # the last attempt at this round has failed, and its steps are gone
            at, since = 0, now
        if steps != at:
            self._mark = steps, now
        if steps == at:  # it takes at least as long as it has taken since then, or as the last ones did
            return max(now - since, self._last_step_s)
        self._last_step_s = (now - since) / (steps - at)
        return self._last_step_s

    def _has_spoken(self) -> bool:
        return any(
            contribution is not None and contribution.slot == self._slot for contribution in self._found.values()
        )

    def _read(self, entry: Entry) -> Contribution | None:
        """Read a slot's contribution; None if it cannot be read: proposers log that."""
        try:
            sealed = self._log.read_contribution(keys.round_of(entry.key), 0, keys.slot_of(entry.key))
        except (Corrupt, Diverged, Invalid):
            return None
        return None if sealed is None else sealed.record
