"""One replica's life: joins the run, trains, exchanges, follows when behind, ends rounds early, heals, finishes.

The caller reports what its training loop does: `catch_up`, `before_step`, `begin_round`, `close_round`, `finish`. What
follows from it is decided here, in `catch_up` and in `round_runner`. Two callers drive it: the manager under torchft's
hooks, and the simulation. For the thread that trains; needs no torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from skerry.runtime.errors import RunFinished
from skerry.runtime.events import emit
from skerry.runtime.log.keys import slot_order
from skerry.runtime.ranks.interface import RankLost

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

    from skerry.runtime.checkpointing.log_position import LogPosition
    from skerry.runtime.log.records import Scope
    from skerry.runtime.tensors.layout import Op
    from skerry.runtime.training.catch_up import CatchUp
    from skerry.runtime.training.current_round import OpenExchange
    from skerry.runtime.training.early_end_check import StragglerMonitor
    from skerry.runtime.training.join_run import Session
    from skerry.runtime.training.round_runner import RoundRunner


class Lifecycle:
    """Owns when state is stable: at a boundary, between a closed round and the next inner step, and only there.

    in_exchange: between `begin_round` and `close_round`.
    """

    def __init__(
        self,
        session: Session,
        catch_up: CatchUp,
        rounds: RoundRunner,
        monitor: StragglerMonitor | None,
        *,
        checkpoint_every: int,
    ) -> None:
        """monitor: None never ends a round early."""
        self.rounds = rounds
        self.course = catch_up
        self.in_exchange = False
        self.at_boundary = True
        self._session = session
        self._train = session.group.channel("train")
        self.monitor = monitor
        self._checkpoint_every = checkpoint_every
        self._live: tuple[str, ...] = ()
        self._closed = False

    @property
    def position(self) -> LogPosition:
        """Rounds that are closed and applied, and the last commit."""
        return self.course.position

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
        if not self.at_boundary and not self._ends_early():
            self.course.save_unfinished(self.rounds.round)
            return 0
        followed = self._go_to_head()
        # The others may wait for a replica that resumes: it looks before it trains another step.
        if self._resume() and self._ends_early():
            followed += self._go_to_head()
        self._session.presence.enter("train", round_number=self.position.round)
        return followed

    def before_step(self) -> None:
        """The inner optimizer is about to step: state of the last round is stable, and an open exchange begins."""
        self._boundary(self.course.scope)
        self.rounds.round.count_step(idle=self.course.idle)
        self.rounds.flush()

    def begin_round(self) -> None:
        """Tensors of the round's exchange follow. Raises RunFinished once all rounds are closed."""
        self.rounds.wait()
        self._boundary("fragments" if self.course.trainer.fragments else "registered")
        if self.finished:
            raise RunFinished(f"all {self.position.round} rounds of run {self._session.log.run.name} are closed")
        self.rounds.restart()
        self.in_exchange = True
        if not self.position.members:
            self._live = self._train.broadcast_from_rank0("look for live replicas", self._look_around)

    def add(self, tensor: torch.Tensor, op: Op) -> OpenExchange:
        """Take `tensor` along with the round's open exchange; from now on state is not stable."""
        self.at_boundary = False
        return self.rounds.add(tensor, op)

    def close_round(self, timeout: timedelta | None = None) -> bool:
        """Close the round: True if this replica holds every average of it; then the caller applies them.

        Raises what must stop a replica. timeout: for the other ranks to come.
        """
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
        in_peace = sys.exc_info()[0] is None
        stop = self._session.stop
        try:
            if in_peace and self.at_boundary:
                self._record(self.course.scope)
            elif in_peace and stop.is_set():
                self.course.save_unfinished(self.rounds.round, now=True)
        except RankLost:
            in_peace = False
            raise
        finally:  # a rank that is lost must not keep this one's threads
            finished = self.finished or (in_peace and not stop.is_set())
            stop.set()
            self.rounds.shutdown(wait=wait)
            self.course.close(wait=wait)
            self._session.group.close()
            self._session.presence.stop("finished" if finished else "left")

    def _boundary(self, scope: Scope, *, jump: bool = True) -> None:
        """Once per round, when state is stable: record it, then join, heal or jump."""
        if not self.at_boundary:
            return
        self._record(scope)
        sick = self.course.sick
        self.course.settle(jump=jump)
        self.rounds.settled(sick=sick)
        self.at_boundary = False
        if not self.course.following:
            self._session.presence.enter("train", round_number=self.position.round)

    def _ends_early(self) -> bool:
        """True if the current round is over for this replica before it has taken all inner steps. DiLoCo only.

        The others have closed it. Or they wait, and would not wait long enough: then it is contributed and closed here.
        """
        current, fragments = self.rounds.round, self.course.trainer.fragments
        if self.monitor is None or not fragments or current.bursts:
            return False
        early = self.monitor.look(self.position, current, self.rounds.round_seconds, fragments, self.rounds.upload_s)
        if early.closed or early.share is None:
            return early.closed
        current.share = early.share
        self.course.end_round(lambda: self.rounds.failed)
        return self.at_boundary

    def _go_to_head(self) -> int:
        """To the boundary after the last closed round, and through it. Returns how many rounds were followed."""
        self._boundary(self.course.scope, jump=False)
        before = self.position.round
        behind = self.course.is_behind()
        while behind:
            began = self.position.round
            self._session.presence.enter("joining", round_number=began)
            reached = self.course.follow(lambda: self.rounds.failed)
            if self._train.rank == 0:
                fields = {"slot": self._session.presence.slot, "from_round": began, "round": self.position.round}
                emit("caught_up", fields)
            self._boundary(self.course.scope, jump=False)  # may heal, by a checkpoint that is older than the head
            behind = reached and self.course.is_behind()
        return self.position.round - before

    def _resume(self) -> bool:
        """Once: resume what the slot's last incarnation had begun. True if that is of the current round."""
        partial = self.course.resume()
        if partial is None:
            return False
        is_current = partial.round == self.position.round
        self.rounds.resume(partial, is_current=is_current)
        return is_current

    def _record(self, scope: Scope) -> None:
        self.course.record(self.rounds.take_facts(), scope, self._checkpoint_every)

    def _look_around(self) -> tuple[str, ...]:
        """Before the first commit: the replicas that are alive."""
        peers = self._session.watch.refresh()
        live = {slot for slot, peer in peers.items() if peer.heartbeat.phase in {"joining", "train", "sync"}}
        return tuple(sorted(live | {self._session.presence.slot}, key=slot_order))
