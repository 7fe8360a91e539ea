"""Looks, between two inner steps, if the current round ends early for this replica.

`early_round_end_policy` decides when it does; `lifecycle` ends it, with the empty steps of `catch_up`. Nothing waits
for the store here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from skerry.runtime.errors import Retryable
from skerry.runtime.log.log import RunLog
from skerry.runtime.log.record_parsing import Record
from skerry.runtime.structured_logging import emit
from skerry.runtime.training.early_round_end_policy import EarlyEndPolicy, Evaluation

if TYPE_CHECKING:
    from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
    from skerry.runtime.training.current_round import CurrentRound
    from skerry.runtime.training.open_session import Session

# Doublings of the time between two looks at the others while the store is away.
_MAX_DOUBLINGS = 6


class EarlyEnd(Record):
    """The end of the current round before its time: closed by the others, or with a share of its steps."""

    closed: bool = False
    share: Annotated[float, Field(gt=0, le=1)] | None = None


class StragglerMonitor:
    """Watches the others while this replica trains. For the thread that trains; rank 0 looks for all ranks."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._train = session.group.channel("train")
        self._one_try = RunLog(session.store.with_deadline(0.0, session.stop), session.log.run)
        self._pace = EarlyEndPolicy(
            log=self._one_try,
            clock=session.clock,
            policy=session.policy,
            slot=session.presence.slot,
            look_every_s=session.poll_every_s,
        )
        self._first_round: int | None = None
        self._has_warned = False
        self.next_check = 0.0
        self.failed_checks = 0

    def check(
        self,
        position: LogPosition,
        current: CurrentRound,
        round_seconds: float | None,
        fragments: int,
        upload_s: float = 0.0,
    ) -> EarlyEnd:
        """Look if the others have closed the round, or wait and would not wait long enough.

        upload_s: of this replica's last contribution.

        The same on all ranks. At most one look for each heartbeat; in an outage ever fewer.
        """
        return self._train.broadcast_from_rank0(
            "pace", lambda: self._check(position, current, round_seconds, fragments, upload_s), EarlyEnd
        )

    def _check(
        self,
        position: LogPosition,
        current: CurrentRound,
        round_seconds: float | None,
        fragments: int,
        upload_s: float = 0.0,
    ) -> EarlyEnd:
        now = self._session.clock.now()
        if now < self.next_check:
            return EarlyEnd()
        self.next_check = now + self._session.poll_every_s
        number, steps = position.round, current.inner_steps
        self._first_round = number if self._first_round is None else self._first_round
        try:
            earlier = current.earlier(number, fragments)
            share = self._pace.share(
                number,
                position.previous,
                steps,
                current.since,
                round_seconds,
                earlier,
                upload_s=upload_s,
                evaluation=_evaluation_in(current, now),
            )
            # Without a quorum in sight there is no need to list commits too: a round is closed only after one.
            if self._pace.sees_quorum and self._one_try.find_head(number) > number:
                return EarlyEnd(closed=True)
        except Retryable:  # training goes on to the sync point, which can wait
            self.failed_checks += 1
            self.next_check = now + 2 ** min(self.failed_checks, _MAX_DOUBLINGS) * self._session.poll_every_s
            return EarlyEnd()
        self.failed_checks = 0
        if share is not None:
            self._report(number, steps, share, current.telemetry.evaluated_s(now))
        return EarlyEnd(share=share)

    def _report(self, number: int, steps: int, share: float, evaluated_s: float) -> None:
        """Log the early end; the first one of this process is a warning, with the reason and what to do.

        Not in its first round, unless it evaluated: a replica that has just joined began later than the others.
        """
        fields = {"round": number, "slot": self._session.presence.slot, "steps": steps, "share": share}
        if self._has_warned or (number == self._first_round and not evaluated_s):
            emit("round_ended_early", fields)
            return
        self._has_warned = True
        remedy = (
            f"it has evaluated for {evaluated_s:.0f} s of this round: evaluate on less data or in fewer rounds, or "
            "choose a larger sync_every"
            if evaluated_s
            else "put evaluation, saving, sampling and profiling within replica.evaluating(); if its machine is "
            "slower, its share counts, and a larger faults.grace lets the others wait for the rest"
        )
        why = f"the others wait, and this replica has {share:.0%} of their inner steps, which it contributes; {remedy}"
        emit("round_ended_early", {**fields, "why": why}, level=logging.WARNING)


def _evaluation_in(current: CurrentRound, now: float) -> Evaluation | None:
    """The time that this replica has evaluated for in the round; None if it has not."""
    seconds, is_running = current.telemetry.evaluated_s(now), current.telemetry.evaluating_since is not None
    return Evaluation(seconds=seconds, is_running=is_running) if seconds or is_running else None
