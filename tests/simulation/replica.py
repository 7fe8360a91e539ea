"""One start of a simulated replica: the shipped lifecycle over a toy trainer, and what its end means."""
# Takes the comparison of receipts out of the real recorder where a scenario does without.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tests.simulation.session import ReplicaSettings, join_simulated_run
from tests.simulation.trainer import ToyTrainer
from tests.simulation.training import Batch

from skerry.runtime.checkpointing.receipt_comparison import ReceiptEvidence
from skerry.runtime.errors import Corrupt, Diverged, Fenced, Invalid, Retryable, RunFinished
from skerry.runtime.training.assemble_lifecycle import lifecycle_of

if TYPE_CHECKING:
    from tests.simulation.invariants import Checker
    from tests.simulation.world import Process, SimulatedClock

    from skerry.runtime.store.interface import Store


class NoCheck:
    """Takes the place of `DivergenceCheck`: receipts are written, and not compared."""

    diagnosis = undisputed = settled = None
    suspects = False

    def wants(self, author: str | None) -> bool:
        """Keep no state."""
        del author
        return False

    def look(self, *_: object, last: bool = False) -> None:
        """Read no receipts."""
        del last

    def evidence(self, _: object) -> ReceiptEvidence:
        """Every checkpoint may be loaded."""
        return ReceiptEvidence()

    def healed(self, _: int) -> None:
        """It never heals."""


class Replica:
    """One incarnation from its start to its end, which is left in `process.status`."""

    def __init__(
        self,
        process: Process,
        engine: Store,
        settings: ReplicaSettings,
        checker: Checker,
        clock: SimulatedClock,
        mirror: Store | None = None,
    ) -> None:
        self.process = process
        self._engine = engine
        self._mirror = mirror
        self._settings = settings
        self._clock = clock
        draw = random.Random(process.world.random.getrandbits(64))
        self.trainer = ToyTrainer(process, settings, checker, clock, draw)

    def main(self) -> None:
        """The process. Whatever is raised ends it; the launcher reads what the end means."""
        process = self.process
        try:
            self._begin()
        except Retryable:
            process.status = "retry"
            return
        except (Diverged, Corrupt, Invalid) as error:
            process.status = f"refused: {error!r}"
            return
        try:
            self._train()
        except Fenced:
            process.status = "fenced"
        except RunFinished:
            process.status = "finished"
        except (Retryable, RuntimeError):
            process.status = "retry"
        except Corrupt as error:  # a restart may find what this one could not read
            process.status = "retry" if "can be loaded" in str(error) else f"refused: {error!r}"
        except (Diverged, Invalid) as error:
            process.status = f"refused: {error!r}"

    def _begin(self) -> None:
        settings = self._settings
        session = join_simulated_run(self.process, self._engine, settings, self._clock, self._mirror)
        lifecycle = lifecycle_of(
            session,
            self.trainer,
            self.trainer.state,
            checkpoint_every=settings.run.checkpoint_every,
            max_retries=settings.max_retries,
            unfinished_every_s=settings.unfinished_every_s,
            ends_early=settings.ends_early and not settings.terms.spares,
            new_batch=partial(Batch, self.trainer.model.index),
        )
        if not settings.compares:
            lifecycle.log_follower.recorder._divergence = cast("Any", NoCheck())
        self.trainer.begin(session, lifecycle, self.local_state)

    def local_state(self) -> tuple[object, ...]:
        """All that decides what this replica does from here on, but for the bucket."""
        lifecycle, session = self.trainer.lifecycle, self.trainer.session
        rounds, log_follower, current = lifecycle.rounds, lifecycle.log_follower, lifecycle.rounds.round
        observed = session.watch.heartbeats.items()
        peers = tuple((slot, peer.heartbeat.sequence, peer.changed_at, peer.fresh) for slot, peer in observed)
        followed = (log_follower.following, log_follower.joined, log_follower.nonfinite, log_follower.rescue.stuck)
        flags = (lifecycle.at_boundary, *followed)
        counts = (current.ticks, current.inner_steps, current.tokens, current.share, current.since)
        times = (rounds.failures, rounds.round_seconds, rounds.upload_s, rounds.errored is None)
        monitor = lifecycle.monitor
        checks = () if monitor is None else (monitor.next_check, monitor.failed_checks)
        mine = (lifecycle.position, self.trainer.local_state(), session.presence.progress)
        return (*mine, *flags, *counts, *times, *checks, *peers)

    def _train(self) -> None:
        lifecycle = self.trainer.lifecycle
        try:
            self.trainer.train()
        except Exception:
            lifecycle.finish(wait=True)
            raise
        finished = lifecycle.finished
        lifecycle.finish(wait=True)
        self.process.status = "done" if finished else "stopped"
