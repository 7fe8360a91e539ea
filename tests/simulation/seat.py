"""The parts of a simulated replica that are the runtime's own, put together as `skerry.runtime.seat` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from tests.simulation.training import index_of
from tests.simulation.world import Signal, Turn

from skerry.runtime import seat
from skerry.runtime.averaging import Averager
from skerry.runtime.codec.layout import Index
from skerry.runtime.exchange import Exchange
from skerry.runtime.garbage import Collector, Retention
from skerry.runtime.journal import Journal, open_run
from skerry.runtime.membership import Presence, Watch
from skerry.runtime.pace import Pace
from skerry.runtime.ranks import Alone
from skerry.runtime.store.probe import probe
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    import threading
    from collections import Counter

    from tests.simulation.world import Fiber, Process

    from skerry.runtime.clock import Clock
    from skerry.runtime.exchange import Load, Place
    from skerry.runtime.journal import Sealed
    from skerry.runtime.records import Contribution, Run
    from skerry.runtime.rounds import Policy
    from skerry.runtime.store.interface import Store

# How long a boundary waits for a store that is away (`skerry.runtime.course`).
PATIENCE_S: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How one replica goes about its work.

    train_s: of a round of `run.sync_every` inner steps. jitter: how much its steps differ, as a share. abstains,
    poisons: rate per round at which what it trained is not finite, and at which it contributes what nobody can use.
    parts: payload objects of one contribution. keeps_late: it trains as DiLoCo does; else late work is dropped, and no
    round ended early. retention: None deletes nothing. background: heartbeats, and what is left behind, have fibers of
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
    keeps_late: bool = True
    retention: Retention | None = None
    background: bool = True
    compares: bool = False
    flips_after: int | None = None


class _Heart:
    """What `Presence` takes for its thread."""

    def __init__(self, fiber: Fiber) -> None:
        self._fiber = fiber

    def join(self) -> None:
        self._fiber.join()


class SimulatedPresence(Presence):
    """The real one; its background thread is a fiber."""

    def live(self, process: Process) -> None:
        """What `start` does."""
        self._wake = Signal(process.world)
        self._write_lock = cast("threading.Lock", Turn(process.world))
        self.beat()
        self._thread = cast("threading.Thread", _Heart(process.spawn(self._run)))


class CountedExchange(Exchange):
    """The real one; it counts what an earlier incarnation or attempt has left to speak for the slot."""

    facts: Counter[str]

    def contribute(self, place: Place, load: Load) -> Sealed[Contribution]:
        stands = super().contribute(place, load)
        self.facts["contributions adopted"] += stands.record.parts != tuple(load.parts)
        return stands


@dataclass(frozen=True, kw_only=True)
class Seat(seat.Seat):
    """The real one, and what the manager puts beside it.

    impatient, one_try: the log, for looks that cannot wait. collects: what is garbage is deleted.
    """

    impatient: Journal
    one_try: Journal
    pace: Pace
    index: Index
    collects: bool


def take_seat(process: Process, engine: Store, habits: Habits, clock: Clock) -> Seat:
    """Claim the process's slot, starting the run if there is none."""
    store = Retrying(engine, clock, deadline_s=habits.start_deadline_s)
    if habits.background:
        probe(store, clock)
    run = open_run(store, habits.run.model_copy(update={"nonce": clock.nonce()}))
    store = store.insisting(habits.store_deadline_s, process.stop)
    journal = Journal(store, run)
    presence = SimulatedPresence(journal, clock, process.slot, habits.heartbeat_s)
    process.incarnation = presence.incarnation
    watch = Watch(journal, clock, process.slot)
    exchange = CountedExchange(
        journal=journal,
        presence=presence,
        watch=watch,
        clock=clock,
        policy=habits.policy,
        look_every_s=habits.heartbeat_s,
        stop=process.stop,
        nothing=Index(tensors=()).digest,
    )
    exchange.facts = process.world.facts
    averager = Averager(
        journal=journal, exchange=exchange, presence=presence, clock=clock, codec="none", ranks=Alone(), max_norm=None
    )
    collector = Collector(
        journal=journal,
        presence=presence,
        watch=watch,
        clock=clock,
        retention=habits.retention or Retention(),
        stale_s=habits.policy.stale_s,
        stop=process.stop,
    )
    if habits.background:
        presence.live(process)
    one_try = Journal(store.insisting(0.0, process.stop), run)
    return Seat(
        group=Alone(),
        store=store,
        clock=clock,
        journal=journal,
        presence=presence,
        watch=watch,
        exchange=exchange,
        averager=averager,
        collector=collector,
        stop=process.stop,
        policy=habits.policy,
        look_every_s=habits.heartbeat_s,
        impatient=Journal(store.insisting(PATIENCE_S, process.stop), run),
        one_try=one_try,
        pace=Pace(journal=one_try, clock=clock, policy=habits.policy, slot=process.slot),
        index=index_of(habits.parts),
        collects=habits.retention is not None,
    )
