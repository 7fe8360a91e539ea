"""The parts of a simulated replica that are the runtime's own, assembled as `training.session` does."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tests.simulation.world import FiberEvent, FiberLock

from skerry.runtime.checkpointing.garbage_collector import GarbageCollector, Retention, SweepResult
from skerry.runtime.log.log import RunLog, open_run
from skerry.runtime.protocol.exchange import Exchange
from skerry.runtime.protocol.membership import HeartbeatMonitor, Presence
from skerry.runtime.ranks.interface import SingleRank
from skerry.runtime.store.probe import probe
from skerry.runtime.store.retrying import Retrying
from skerry.runtime.tensors.layout import Index
from skerry.runtime.training.contribute_and_average import Averager
from skerry.runtime.training.join_run import Session

if TYPE_CHECKING:
    import threading
    from collections import Counter
    from collections.abc import Callable

    from tests.simulation.world import Fiber, Process, World

    from skerry.runtime.clock import Clock
    from skerry.runtime.log.log import Stored
    from skerry.runtime.log.records import Contribution, Run
    from skerry.runtime.protocol.exchange import ContributionDraft, ExchangeId
    from skerry.runtime.protocol.quorum import Policy
    from skerry.runtime.store.interface import Store


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """The settings of one simulated replica.

    train_s: of a round of `run.sync_every` inner steps. jitter: how much its steps differ, as a share. abstains,
    poisons: rate per round at which what it trained is not finite, and at which it contributes what no replica can use.
    parts: payload objects of one contribution. ends_early: when others wait for it.
    retention: None deletes nothing. background: heartbeats, and what is left behind, have fibers of
    their own. compares: its receipts with the others', and heals. flips_after: so many rounds, a bit of what it holds.
    """

    policy: Policy
    run: Run
    heartbeat_s: float
    train_s: float
    store_deadline_s: float
    start_deadline_s: float = 30.0
    max_retries: int = 4
    abstains: float = 0.0
    poisons: float = 0.0
    parts: int = 1
    jitter: float = 0.4
    ends_early: bool = True
    retention: Retention | None = None
    background: bool = True
    compares: bool = False
    flips_after: int | None = None


class _FiberThread:
    """Takes the place of the thread of `Presence`."""

    def __init__(self, fiber: Fiber) -> None:
        self._fiber = fiber

    def join(self) -> None:
        self._fiber.join()


class SimulatedPresence(Presence):
    """The real one; its background thread is a fiber."""

    def live(self, process: Process) -> None:
        """Replaces `start`."""
        self._wake = FiberEvent(process.world)
        self._write_lock = cast("threading.Lock", FiberLock(process.world))
        self.beat()
        self._thread = cast("threading.Thread", _FiberThread(process.spawn(self._run)))


class CountedExchange(Exchange):
    """The real one; it counts what an earlier incarnation or attempt has left as the contribution of the slot."""

    facts: Counter[str]

    def contribute(self, place: ExchangeId, load: ContributionDraft) -> Stored[Contribution]:
        stored = super().contribute(place, load)
        self.facts["contributions adopted"] += stored.record.parts != tuple(load.parts)
        return stored


class CountedCollector(GarbageCollector):
    """The real one; it counts what it deletes. is_on: else it deletes nothing."""

    facts: Counter[str]
    is_on: bool

    def collect(self) -> SweepResult:
        if not self.is_on:
            return SweepResult()
        collected = super().collect()
        self.facts["objects deleted"] += collected.objects
        return collected


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

    def __init__(self, process: Process, *, background: bool) -> None:
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


def join_simulated_run(process: Process, engine: Store, settings: ReplicaSettings, clock: Clock) -> Session:
    """Claim the process's slot, starting the run if there is none."""
    store = Retrying(engine, clock, deadline_s=settings.start_deadline_s)
    if settings.background:
        probe(store, clock)
    run = open_run(store, settings.run.model_copy(update={"nonce": clock.nonce()}))
    store = store.with_deadline(settings.store_deadline_s, process.stop)
    log = RunLog(store, run)
    presence = SimulatedPresence(log, clock, process.slot, settings.heartbeat_s)
    process.incarnation = presence.incarnation
    watch = HeartbeatMonitor(log, clock, process.slot)
    exchange = CountedExchange(
        log=log,
        presence=presence,
        monitor=watch,
        clock=clock,
        policy=settings.policy,
        heartbeat_poll_s=settings.heartbeat_s,
        stop=process.stop,
        empty_index=Index(tensors=()).digest,
    )
    exchange.facts = process.world.facts
    averager = Averager(
        log=log,
        exchange=exchange,
        presence=presence,
        clock=clock,
        codec="none",
        ranks=SingleRank(),
        max_norm=None,
    )
    collector = CountedCollector(
        log=log,
        presence=presence,
        watch=watch,
        clock=clock,
        retention=settings.retention or Retention(),
        stale_s=settings.policy.stale_s,
        stop=process.stop,
    )
    collector.facts, collector.is_on = process.world.facts, settings.retention is not None
    if settings.background:
        presence.live(process)
    return Session(
        group=SingleRank(),
        store=store,
        clock=clock,
        log=log,
        presence=presence,
        watch=watch,
        exchange=exchange,
        averager=averager,
        collector=collector,
        stop=process.stop,
        policy=settings.policy,
        poll_every_s=settings.heartbeat_s,
        executor=lambda _: FiberExecutor(process, background=settings.background),
    )
