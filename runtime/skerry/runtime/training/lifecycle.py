"""One replica's life: joins the run, trains, exchanges, follows when behind, ends rounds early, heals, finishes.

The caller reports what its training loop does: `catch_up`, `before_step`, `begin_round`, `close_round`, `finish`. What
follows from it is decided here, in `catch_up_with_log` and in `round_runner`. Two callers drive it: the manager under
torchft's hooks, and the simulation. For the thread that trains; needs no torch.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from skerry.runtime.errors import Invalid, Retryable, RunFinished
from skerry.runtime.log.keys import slot_order
from skerry.runtime.ranks.interface import RankLost
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from datetime import timedelta

    import torch

    from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
    from skerry.runtime.log.records import Phase, Scope
    from skerry.runtime.tensors.byte_layout import Op
    from skerry.runtime.training.catch_up_with_log import LogFollower
    from skerry.runtime.training.contribute_during_evaluation import Evaluations
    from skerry.runtime.training.current_round import OpenExchange
    from skerry.runtime.training.early_round_end_check import StragglerMonitor
    from skerry.runtime.training.open_session import Session
    from skerry.runtime.training.round_runner import RoundRunner


class Lifecycle:
    """Owns when state is stable: at a boundary, between a closed round and the next inner step, and only there.

    in_exchange: between `begin_round` and `close_round`.
    """

    def __init__(
        self,
        session: Session,
        log_follower: LogFollower,
        rounds: RoundRunner,
        monitor: StragglerMonitor | None,
        evaluations: Evaluations,
        *,
        checkpoint_every: int,
    ) -> None:
        """monitor: None never ends a round early."""
        self.rounds = rounds
        self.log_follower = log_follower
        self.in_exchange = False
        self.at_boundary = True
        self._session = session
        self._train = session.group.channel("train")
        self.monitor = monitor
        self._evaluations = evaluations
        self._checkpoint_every = checkpoint_every
        self._live: tuple[str, ...] = ()
        self._closed = False
        self._calls_catch_up = False

    @property
    def position(self) -> LogPosition:
        """Rounds that are closed and applied, and the last commit."""
        return self.log_follower.position

    @property
    def finished(self) -> bool:
        """All rounds of the run are closed."""
        return self._session.log.run.is_over(self.position.round, self.position.work)

    @property
    def members(self) -> tuple[str, ...]:
        """Of the last closed round; before the first, the replicas that were alive at `begin_round`."""
        return self.position.members or self._live

    def catch_up(self) -> int:
        """Join, follow the log to its head with empty inner steps, or end the round early. Returns rounds followed.

        Before an inner step: inside a round it costs at most one look per heartbeat, at a boundary one request.
        """
        self._calls_catch_up = True
        if not self.at_boundary and not self._ends_early():
            self.log_follower.save_unfinished(self.rounds.round)
            return 0
        followed = self._go_to_head()
        # The others may wait for a replica that resumes: it looks before it trains another step.
        if self._resume() and self._ends_early():
            followed += self._go_to_head()
        self._session.presence.enter("train", round_number=self.position.round)
        return followed

    def evaluating(self) -> AbstractContextManager[None]:
        """Within it nothing is trained, and its time counts neither for the pace nor for the length of the round."""
        return self._evaluations.running()

    def before_step(self) -> None:
        """The inner optimizer is about to step: state of the last round is stable, and an open exchange begins.

        Raises Invalid within `evaluating`.
        """
        if self.rounds.round.telemetry.evaluating_since is not None:
            raise Invalid("an inner step within replica.evaluating(); leave it before the optimizer steps")
        self._boundary(self.log_follower.scope)
        current = self.rounds.round
        if current.inner_steps == 0 and not self.log_follower.idle:
            current.telemetry.learning_rate, current.telemetry.gradient_norm = self.log_follower.trainer.step_facts()
        current.count_step(idle=self.log_follower.idle)
        self.rounds.flush()

    def begin_round(self) -> None:
        """Tensors of the round's exchange follow. Raises RunFinished once all rounds are closed."""
        self.rounds.wait()
        self._boundary("fragments" if self.log_follower.trainer.fragments else "registered")
        if self.finished:
            raise RunFinished(f"all {self.position.round} rounds of run {self._session.log.run.name} are closed")
        self.rounds.restart()
        self.in_exchange = True
        if not self.position.members:
            self._live = self._train.broadcast_from_rank0("look for live replicas", self._live_replicas)

    def add(self, tensor: torch.Tensor, op: Op, *, quantize: bool = False) -> OpenExchange:
        """Take `tensor` along with the round's open exchange; from now on state is not stable."""
        self.at_boundary = False
        return self.rounds.add(tensor, op, quantize=quantize)

    def close_round(self, timeout: timedelta | None = None) -> bool:
        """Close the round: True if this replica holds every average of it; then the caller applies them.

        Raises what must stop a replica. timeout: for the other ranks to come.
        """
        self._warn_without_catch_up()
        try:
            return self.rounds.close(timeout)
        finally:
            self.in_exchange, self.at_boundary = False, True

    def finish(self, *, wait: bool) -> None:
        """Write what is due, leave the run and stop the threads. Idempotent. After an exception nothing is written.

        A replica that ends without a stop request has finished, and the others do not wait for it.
        """
        if self._closed:
            return
        self._closed = True
        without_error = sys.exc_info()[0] is None
        stop = self._session.stop
        try:
            if without_error and self.at_boundary:
                self._record(self.log_follower.scope)
            elif without_error and stop.is_set():
                self.log_follower.save_unfinished(self.rounds.round, now=True)
        except RankLost:
            without_error = False
            raise
        finally:  # a rank that is lost must not keep this one's threads
            finished = self.finished or (without_error and not stop.is_set())
            stop.set()
            self.rounds.shutdown(wait=wait)
            self.log_follower.close(wait=wait)
            self._session.group.close()
            self._session.presence.stop("finished" if finished else "left")

    def leave(self, phase: Phase, reason: str) -> None:
        """End this replica's part with its process, without `finish`. Writes no state, and waits for no exchange.

        reason: how the process ended, for people. Idempotent, and without effect after `finish`.
        """
        self._closed = True
        if phase == "failed":  # the other ranks cannot go on alone
            self._session.group.request_stop()
        self._session.stop.set()
        self._session.group.close()
        self._session.presence.stop("finished" if self.finished else phase, reason)

    def _boundary(self, scope: Scope, *, jump: bool = True) -> None:
        """Once per round, when state is stable: record it, then join, heal or jump."""
        if not self.at_boundary:
            return
        self._look_for_extension()
        self._record(scope)
        dropped = self.log_follower.nonfinite and self.log_follower.trainer.fragments > 0
        self.log_follower.enter_boundary(jump=jump)
        self.rounds.settings.look_for_slots()
        self._look_for_extension()
        self.rounds.update_counts(dropped=dropped)
        self.at_boundary = False
        if not self.log_follower.following:
            self._session.presence.enter("train", round_number=self.position.round)

    def _warn_without_catch_up(self) -> None:
        """Log once that the script never calls `catch_up`, which torchft does not have."""
        if self._calls_catch_up:
            return
        self._calls_catch_up = True
        if self._train.rank == 0:
            remedy = (
                "call manager.catch_up(inner_optimizer) at the top of every inner step, or loop over replica.steps; "
                "without it a restarted replica wastes a round, and a slow replica is late"
            )
            emit("catch_up_missing", {"slot": self._session.presence.slot, "why": remedy}, level=logging.WARNING)

    def _look_for_extension(self) -> None:
        """At what was the end of the run: read if the operator has added rounds."""
        if not self.finished:
            return
        settings = self._session.exchange.settings

        def look() -> tuple[int | None, float | None]:
            with suppress(Retryable):  # then the run is over, as far as this replica can see
                settings.read()
            return settings.end

        self._session.log.set_end(*self._train.broadcast_from_rank0("look for an extension", look))

    def _ends_early(self) -> bool:
        """True if the current round is over for this replica before it has taken all inner steps. DiLoCo only.

        The others have closed it. Or they wait, and would not wait long enough: then it is contributed and closed here.
        """
        current, fragments = self.rounds.round, self.log_follower.trainer.fragments
        if self.monitor is None or not fragments or current.exchanges:
            return False
        if current.is_contributed:  # during an evaluation
            self.log_follower.end_round(lambda: self.rounds.failed)
            return self.at_boundary
        early = self.monitor.check(self.position, current, self.rounds.round_seconds, fragments, self.rounds.upload_s)
        if early.closed or early.share is None:
            return early.closed
        current.share = early.share
        self.log_follower.end_round(lambda: self.rounds.failed)
        return self.at_boundary

    def _go_to_head(self) -> int:
        """To the boundary after the last closed round, and through it. Returns how many rounds were followed."""
        self._boundary(self.log_follower.scope, jump=False)
        before = self.position.round
        behind = self.log_follower.is_behind()
        while behind:
            began = self.position.round
            self._session.presence.enter("joining", round_number=began)
            reached = self.log_follower.follow(lambda: self.rounds.failed)
            if self._train.rank == 0:
                fields = {"slot": self._session.presence.slot, "from_round": began, "round": self.position.round}
                emit("caught_up", fields)
            self._boundary(self.log_follower.scope, jump=False)  # may heal, by a checkpoint that is older than the head
            behind = reached and self.log_follower.is_behind()
        return self.position.round - before

    def _resume(self) -> bool:
        """Once: resume what the slot's last incarnation had begun. True if that is of the current round."""
        partial = self.log_follower.resume()
        if partial is None:
            return False
        is_current = partial.round == self.position.round
        self.rounds.resume(partial, is_current=is_current)
        return is_current

    def _record(self, scope: Scope) -> None:
        self.log_follower.record(self.rounds.take_facts(), scope, self._checkpoint_every)

    def _live_replicas(self) -> tuple[str, ...]:
        """Before the first commit: the replicas that are alive."""
        peers = self._session.watch.refresh()
        live = {slot for slot, peer in peers.items() if peer.heartbeat.phase in {"joining", "train", "sync"}}
        return tuple(sorted(live | {self._session.presence.slot}, key=slot_order))
