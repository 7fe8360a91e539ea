"""Keeps evaluation out of the pace of a replica, and its round in time while the script evaluates.

Nothing is trained within an evaluation, and the others wait no longer than their grace window. So this watches the
round from the exchange thread: if the window would be over before the evaluation, it contributes the steps that the
replica has taken. The round then ends with the next `catch_up`. Never applies an average, never moves the replica.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from skerry.runtime.protocol.exchange_view import ExchangeId
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Generator
    from concurrent.futures import Executor, Future

    from skerry.runtime.tensors.tensors_sent_together import TensorBatch
    from skerry.runtime.training.catch_up_with_log import LogFollower
    from skerry.runtime.training.early_round_end_check import StragglerMonitor
    from skerry.runtime.training.open_session import Session
    from skerry.runtime.training.round_runner import RoundRunner


class Evaluations:
    """Measures evaluations, and contributes during one if it must. For the thread that trains."""

    def __init__(
        self,
        session: Session,
        log_follower: LogFollower,
        rounds: RoundRunner,
        monitor: StragglerMonitor | None,
        thread: Executor,
        new_batch: Callable[[], TensorBatch],
    ) -> None:
        """thread: runs the exchanges. monitor: None never contributes before a round is over."""
        self._session = session
        self._log_follower = log_follower
        self._rounds = rounds
        self._monitor = monitor
        self._thread = thread
        self._new_batch = new_batch

    @contextmanager
    def running(self) -> Generator[None]:
        """Time in here is an evaluation's. One within another is part of it."""
        telemetry, clock = self._rounds.round.telemetry, self._session.clock
        if telemetry.evaluating_since is not None:
            yield
            return
        done = self._session.event()
        telemetry.evaluating_since = clock.now()
        watch = self._watch(done)
        try:
            yield
        except BaseException as error:
            done.set()
            if isinstance(error, Exception):
                self._end(watch)
            raise
        done.set()
        self._end(watch)

    def _end(self, watch: Future[None] | None) -> None:
        if watch is not None:  # it may be uploading, and it looks at the round as this thread does
            watch.exception()
        self._rounds.round.telemetry.end_evaluation(self._session.clock.now())

    def _watch(self, done: threading.Event) -> Future[None] | None:
        """Begin to watch the round. A replica of several ranks, which do not evaluate in step, only measures."""
        follower, current = self._log_follower, self._rounds.round
        fragments = follower.trainer.fragments
        if self._monitor is None or not fragments or current.exchanges or self._session.group.size > 1:
            return None
        batch = self._new_batch()
        fragment = follower.position.round % fragments
        if current.inner_steps:  # copied now: an evaluation may set other parameters for a while
            for tensor in follower.trainer.contribution(fragment):
                batch.add(tensor, "avg")
            batch.parameters = follower.trainer.parameters_of(fragment)
        return self._thread.submit(self._look_until, done, self._monitor, batch)

    def _look_until(self, done: threading.Event, monitor: StragglerMonitor, batch: TensorBatch) -> None:
        """Look at the round once for each heartbeat; contribute and return if it cannot wait for the evaluation."""
        rounds, position = self._rounds, self._log_follower.position
        fragments = self._log_follower.trainer.fragments
        try:
            while not done.is_set() and not self._session.stop.is_set():
                early = monitor.check(position, rounds.round, rounds.round_seconds, fragments, rounds.upload_s)
                if early.closed:
                    return
                if early.share is not None:
                    self._contribute(batch, early.share)
                    return
                self._session.clock.pause(self._session.poll_every_s, done)
        except Exception as error:  # noqa: BLE001  a thread's entry: the round's own exchange contributes
            fields = {"round": position.round, "slot": self._session.presence.slot, "error": str(error)}
            emit("early_contribution_failed", fields, level=logging.WARNING, error=error)

    def _contribute(self, batch: TensorBatch, share: float) -> None:
        follower, current, position = self._log_follower, self._rounds.round, self._log_follower.position
        if not batch.hosts() or follower.quarantine is not None or self._rounds.errored is not None:
            return
        current.share = share
        trained = current.trained(position.round, follower.trainer.fragments, self._session.clock.now())
        place = ExchangeId(position.round, 0, position.previous)
        current.is_contributed = self._session.averager.contribute(place, batch, trained)
        if not current.is_contributed:
            current.share = None
