"""The parts of a simulated replica that are not the runtime's own: its settings, and fibers in the place of threads."""
# Puts fibers in the place of the threads of `Presence`.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from tests.simulation.links import DrawnLink
from tests.simulation.world import FiberEvent, FiberLock

from skerry.runtime.checkpointing.garbage_collector import SweepResult
from skerry.runtime.store.retrying import Retrying
from skerry.runtime.training.open_session import Session, SessionOptions, join_run

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    from tests.simulation.world import Fiber, Process, World

    from skerry.runtime.checkpointing.garbage_collector import GarbageCollector
    from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
    from skerry.runtime.clock import Clock
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.protocol.slot_claim_and_heartbeats import Presence
    from skerry.runtime.store.interface import Store

Mode: TypeAlias = Literal["diloco", "local_sgd", "ddp"]
EXCHANGES: Final[Mapping[Mode, int]] = {"diloco": 1, "local_sgd": 1, "ddp": 2}
"""Exchanges of a round."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """The settings of one simulated replica. terms: those that a real one has.

    train_s: of a round of `run.sync_every` inner steps. jitter: how much its steps differ, as a share. abstains,
    poisons: rate per round at which what it trained is not finite, and at which it contributes what no replica can use.
    parts: payload objects of one contribution. ends_early: when others wait for it. unfinished_every_s: seconds between
    two saves of the current round; None saves none. collects: deletes garbage. background: heartbeats and writers have
    fibers of their own. compares: its receipts with the others', and heals. flips_after: so many rounds, a bit of what
    it holds. fails: how often a round of DDP raises between its exchanges. evaluate_s: of an evaluation, before every
    so many inner steps (evaluate_every); 0 evaluates never. measures: evaluates within `evaluating`. draws_links: it
    records another link with each contribution.
    """

    terms: SessionOptions
    run: Run
    train_s: float
    start_deadline_s: float = 30.0
    max_retries: int = 4
    abstains: float = 0.0
    poisons: float = 0.0
    parts: int = 1
    jitter: float = 0.4
    ends_early: bool = True
    unfinished_every_s: float | None = None
    collects: bool = False
    background: bool = True
    compares: bool = False
    fails: float = 0.0
    flips_after: int | None = None
    evaluate_s: float = 0.0
    evaluate_every: int = 1
    measures: bool = True
    draws_links: bool = False
    mode: Mode = "diloco"

    @property
    def fragments(self) -> int:
        """Of the model; LocalSGD and DDP have none."""
        return self.run.fragments if self.mode == "diloco" else 0


class _FiberThread:
    """Takes the place of the thread of `Presence`."""

    def __init__(self, fiber: Fiber) -> None:
        self._fiber = fiber

    def join(self, timeout: float) -> None:
        del timeout  # a request to a simulated store always ends
        self._fiber.join()


def start_presence(presence: Presence, process: Process) -> None:
    """Start heartbeats as `Presence.start` does, in a fiber."""
    presence._wake = FiberEvent(process.world)
    presence._write_lock = cast("threading.Lock", FiberLock(process.world))
    presence.beat()
    presence._thread = cast("threading.Thread", _FiberThread(process.spawn(presence._run)))


class NoCollector:
    """Takes the place of `GarbageCollector`: nothing is deleted."""

    def note_closed(self, rounds: int) -> None:
        """Keep nothing."""

    def collect(self, settled: int | None = None) -> SweepResult:
        """Report that nothing was deleted."""
        del settled
        return SweepResult(objects=0, bytes=0)

    def collect_own(self, position: LogPosition, turn: int | None, settled: int | None = None) -> SweepResult:
        """Report that nothing was deleted."""
        del position, turn
        return self.collect(settled)


class FiberJob(Future[Any]):
    """The result of a `FiberExecutor`: a future whose waiting is a fiber's."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._waiting: list[tuple[Fiber, int]] = []

    def work(self, function: Callable[[], object]) -> None:
        """Run it in the current fiber."""
        try:
            self.set_result(function())
        except Exception as error:  # noqa: BLE001  as in a thread: it is kept for the caller of `result`
            self.set_exception(error)
        self._world.wake(self._waiting)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._world.wait(self._waiting, timeout)
        return super().exception(0)

    def result(self, timeout: float | None = None) -> Any:
        self.exception(timeout)
        return super().result(0)


class FiberExecutor(Executor):
    """Takes the place of a thread: jobs run in order, in fibers, or at once where there is no background."""

    def __init__(self, process: Process, background: bool, name: str) -> None:  # noqa: FBT001  the name comes last
        del name
        self._process = process
        self._background = background
        self._last: FiberJob | None = None

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> FiberJob:
        job, before = FiberJob(self._process.world), self._last

        def run() -> None:
            if before is not None:
                before.exception()
            job.work(lambda: function(*args, **named))

        self._last = job
        if self._background:
            self._process.spawn(run)
        else:
            run()
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  of Executor
        del cancel_futures
        if wait and self._last is not None and not self._process.dead:
            self._last.exception()


def join_simulated_run(
    process: Process, engine: Store, settings: ReplicaSettings, clock: Clock, mirror: Store | None = None
) -> Session:
    """Claim the process's slot, starting the run if there is none. mirror: the store of the run's mirror."""
    store = Retrying(engine, clock, deadline_s=settings.start_deadline_s)
    if settings.draws_links:
        store.meter = DrawnLink(random.Random(clock.nonce()))
    new_run = settings.run.model_copy(update={"nonce": clock.nonce()})
    session = join_run(store, process.slot, settings.terms, clock, new_run=new_run, stop=process.stop)
    session.presence.memory = lambda: None  # that of this process is no part of a simulated run
    process.incarnation = session.presence.incarnation
    if settings.background:
        start_presence(session.presence, process)
    return replace(
        session,
        executor=partial(FiberExecutor, process, settings.background),
        event=partial(FiberEvent, process.world),
        open_mirror=lambda _: Retrying(cast("Store", mirror), clock),
        collector=session.collector if settings.collects else cast("GarbageCollector", NoCollector()),
    )
