"""Decides when a replica votes to leave the run's store, and what it does by the verdict.

It runs beside the training script, in the process that started it: a script that has ended adds nothing to a store, so
a vote is kept. Nothing of this is in the training loop. Needs no torch.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from skerry.runtime.clock import Backoff, wait_until
from skerry.runtime.errors import Conflict, Corrupt, Invalid, SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.log import read_run
from skerry.runtime.log.run_record import Elsewhere, Verdict
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.mirrors.run_from_copy import fork

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.mirrors.ballots import Ballots
    from skerry.runtime.store import Store

Next: TypeAlias = Literal["train", "end", "wait"] | Verdict
"""train: in the run's store. end: the script, then call again. wait: call again later. A verdict: go on there."""

# The slot that has created the verdict makes the run; the others wait for it so long, then make it themselves.
_OTHERS_S: Final = 60.0
_POLL: Final = Backoff(first=0.5, cap=5.0)


class Failover:
    """One start of a replica. Call `step` every few seconds."""

    def __init__(self, ballots: Ballots, after_s: float, clock: Clock) -> None:
        """after_s: how long the run's store is away before the replica votes."""
        self._ballots, self._after_s, self._clock = ballots, after_s, clock
        self._answered_at = clock.now()
        self.problem: SkerryError | OSError | None = None
        """Why the mirror cannot be asked; None if it can."""

    def step(self, *, answers: bool, is_training: bool, claim: int | None) -> Next:
        """Returns the next step of this replica.

        answers: the run's store has just been read. is_training: the script runs. claim: the newest start of its slot
        in the store, if that is this one, so that no other process of the slot contributes there; without it, it must
        not vote.
        """
        if answers:
            self._answered_at = self._clock.now()
        try:
            following = self._step(answers=answers, is_training=is_training, claim=claim)
        except (SkerryError, OSError) as error:
            self.problem = error
            # A script that runs has no vote to keep; one that does not run may have.
            return "train" if is_training else "wait"
        self.problem = None
        return following

    def _step(self, *, answers: bool, is_training: bool, claim: int | None) -> Next:
        verdict = self._ballots.withdraw() if answers else self._ballots.read()
        if verdict is not None:
            return verdict
        if answers:
            return "train"
        if self._clock.now() - self._answered_at < self._after_s:
            return "train" if is_training else "wait"
        if is_training:
            return "end"
        if claim is not None:
            self._ballots.vote(claim)
        return self._ballots.move() or "wait"


def go_on(mirror: Store, verdict: Verdict, target: Store, clock: Clock, slot: str | None = None) -> Run:
    """The run in `target` that goes on by the verdict, which the first that comes makes. slot: this replica's.

    Raises what `fork` raises, Corrupt if the mirror no longer has the rounds of the verdict, and Conflict if `target`
    has another run.
    """
    run = read_run(target)
    if run is None and slot != verdict.by:
        with contextlib.suppress(TimeoutError):  # the one that has created the verdict may be dead
            run = wait_until(clock, lambda: read_run(target), clock.now() + _OTHERS_S, _POLL)
    if run is None:
        run = _fork(mirror, verdict, target)
    if not verdict.leads_to(run):
        raise Conflict(
            f"{target.uri} has run {run.name}, which does not go on from round {verdict.round} of this run; see "
            f"`skerry doctor {mirror.uri}`"
        )
    return run


def _fork(mirror: Store, verdict: Verdict, target: Store) -> Run:
    """Make the run from the newest checkpoint without damage, as the one that has created the verdict could."""
    damage, newest = None, None
    while True:
        try:
            cut = find_cut(mirror, verdict.round, newest)
        except Invalid as error:
            raise damage or error from None
        if cut.commit != verdict.commit:
            raise Corrupt(f"round {verdict.round} at {mirror.uri} is not that of the verdict; see `skerry doctor`")
        try:
            # The time of the parent: limits of the run count from it.
            return fork(mirror, cut, target, cut.run.created, mirrors=())
        except Corrupt as error:
            damage, newest = error, cut.checkpoint - 1


def mark_moved(home: Store, verdict: Verdict) -> None:
    """Say in the store that was left that the run goes on elsewhere, so that no replica starts there. Raises for it."""
    if verdict.uri is None:
        return
    mark = Elsewhere(
        why="moved",
        uri=verdict.uri,
        run=verdict.run,
        round=verdict.round,
        by=verdict.by,
        created=verdict.created,
    )
    home.create(keys.ELSEWHERE, mark.to_bytes())
