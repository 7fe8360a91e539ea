"""Takes a replica's place in a run: opens and probes the store, finds or starts the run, claims the slot.

The one place where the parts of the protocol are put together; what runs on them is `averaging`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.runtime.averaging import Averager
from skerry.runtime.codec.layout import Index
from skerry.runtime.errors import Invalid
from skerry.runtime.exchange import Exchange
from skerry.runtime.garbage import Collector, Retention
from skerry.runtime.journal import Journal, open_run
from skerry.runtime.membership import Presence, Watch
from skerry.runtime.records import Run
from skerry.runtime.rounds import Grace, Policy
from skerry.runtime.store import open_store
from skerry.runtime.store.probe import probe
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock
    from skerry.runtime.codec.layout import Codec
    from skerry.runtime.store import Store


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How one replica takes part. heartbeat_s: None chooses by the store. grace: None takes the run's cap."""

    min_replicas: int
    deadline_s: float
    heartbeat_s: float | None = None
    grace: Grace | None = None
    spares: bool = False
    codec: Codec = "none"
    checkpoint_every: int = 1
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One incarnation's place in its run. stop: set it to end all waiting."""

    store: Retrying
    clock: Clock
    journal: Journal
    presence: Presence
    watch: Watch
    exchange: Exchange
    averager: Averager
    collector: Collector
    stop: threading.Event
    look_every_s: float


def take_seat(store: str | Store, slot: str, terms: Terms, clock: Clock) -> Seat:
    """Claim `slot` in the run of this prefix, starting a run if there is none.

    Raises Invalid for terms that cannot work, and for a store that ignores conditions.
    """
    if terms.min_replicas < 1 or terms.checkpoint_every < 1:
        raise Invalid(
            f"must be at least 1: min_replica_size={terms.min_replicas} checkpoint_every={terms.checkpoint_every}"
        )
    opened = open_store(store, clock=clock) if isinstance(store, str) else store
    if not isinstance(opened, Retrying):
        opened = Retrying(opened, clock)
    probe(opened, clock)
    run = open_run(opened, _lone_run(terms, clock))
    stop = threading.Event()
    # From here on an outage is waited out as long as an exchange may take; a start that cannot reach its store fails.
    opened = opened.insisting(terms.deadline_s, stop)
    journal = Journal(opened, run)
    heartbeat_s = terms.heartbeat_s if terms.heartbeat_s is not None else _heartbeat_s(opened)
    presence = Presence(journal, clock, slot, heartbeat_s)
    watch = Watch(journal, clock, slot)
    policy = _policy(journal.run, terms, heartbeat_s, opened.profile.poll_first)
    exchange = Exchange(
        journal=journal,
        presence=presence,
        watch=watch,
        clock=clock,
        policy=policy,
        look_every_s=heartbeat_s,
        stop=stop,
        nothing=Index(tensors=(), codec=terms.codec).digest,
    )
    return Seat(
        store=opened,
        clock=clock,
        journal=journal,
        presence=presence,
        watch=watch,
        exchange=exchange,
        averager=Averager(journal=journal, exchange=exchange, presence=presence, clock=clock, codec=terms.codec),
        collector=Collector(
            journal=journal,
            presence=presence,
            watch=watch,
            clock=clock,
            retention=terms.retention,
            stale_s=policy.stale_s,
            stop=stop,
        ),
        stop=stop,
        look_every_s=heartbeat_s,
    )


def _policy(run: Run, terms: Terms, heartbeat_s: float, poll_s: float) -> Policy:
    return Policy(
        min_replicas=terms.min_replicas,
        expected=frozenset(run.slots),
        start_window_s=run.start_window_s,
        grace=terms.grace or Grace(cap_s=run.grace_s),
        # Six missed beats, and two seconds for a machine that is busy importing torch.
        stale_s=6 * heartbeat_s + 2.0,
        deadline_s=terms.deadline_s,
        propose_delay_s=5 * poll_s,
        spares=terms.spares,
        weighting=run.weighting,
    )


def _heartbeat_s(store: Store) -> float:
    """Ten of the store's longest polls, between half a second and five: a put per beat must stay cheap."""
    return min(5.0, max(0.5, 10 * store.profile.poll_cap))


def _lone_run(terms: Terms, clock: Clock) -> Run:
    """The run that a replica starts when nobody did: no end, nobody expected beyond the quorum."""
    return Run(
        nonce=clock.nonce(),
        name="unnamed",
        spec=None,
        slots=(),
        rounds=None,
        sync_every=0,
        fragments=1,
        outer_lr=0.0,
        outer_momentum=0.0,
        min_replicas=terms.min_replicas,
        grace_s=Grace().cap_s,
        start_window_s=0.0,
        checkpoint_every=terms.checkpoint_every,
        codec=terms.codec,
        weighting="uniform",
        created=clock.utc_text(),
    )
