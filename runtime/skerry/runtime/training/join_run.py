"""Takes a replica's place in a run: opens and probes the store, finds or starts the run, claims the slot.

The one place where the parts of the protocol are put together; what runs on them is `averaging`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.runtime import keys
from skerry.runtime.averaging import Averager
from skerry.runtime.codec.layout import Index
from skerry.runtime.errors import Corrupt, Invalid, Retryable
from skerry.runtime.exchange import Exchange, Interrupted
from skerry.runtime.garbage import Collector, Retention
from skerry.runtime.journal import Journal, open_run
from skerry.runtime.membership import Presence, Progress, Watch
from skerry.runtime.ranks import Alone, fold
from skerry.runtime.records import Heartbeat, Record, Run
from skerry.runtime.rounds import Grace, Policy
from skerry.runtime.store import open_store
from skerry.runtime.store.probe import probe
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock
    from skerry.runtime.codec.layout import Codec
    from skerry.runtime.ranks import Group
    from skerry.runtime.records import Phase
    from skerry.runtime.store import Store


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How one replica takes part. heartbeat_s: None chooses by the store. grace: None takes the run's cap.

    max_norm: this replica offers nothing above it; None: whatever is finite.
    """

    min_replicas: int
    deadline_s: float
    heartbeat_s: float | None = None
    grace: Grace | None = None
    spares: bool = False
    codec: Codec = "none"
    checkpoint_every: int = 1
    max_norm: float | None = None
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One incarnation's place in its run, as one of its ranks has it. stop: set it to end all waiting."""

    group: Group
    store: Retrying
    clock: Clock
    journal: Journal
    presence: Presence
    watch: Watch
    exchange: Exchange
    averager: Averager
    collector: Collector
    stop: threading.Event
    policy: Policy
    look_every_s: float


class _Alive(Record):
    """Somebody beats."""

    value: bool


class Quiet(Presence):
    """A further rank of a replica: it knows what its replica says, and says nothing itself. Rank 0 has the claim."""

    def __init__(self, slot: str) -> None:
        """For the rank's own use: nothing is claimed."""
        self.slot = keys.check_slot(slot)
        self.incarnation = 0  # of no use here: rank 0 writes all records that name it
        self._progress = Progress()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Rank 0 beats."""

    def stop(self, phase: Phase) -> None:
        """Rank 0 has the last word."""

    def beat(self) -> None:
        """Rank 0 beats."""

    def fence(self) -> None:
        """Rank 0 looks, and tells."""

    def _soon(self) -> None:
        """Nothing is told."""


def take_seat(store: str | Store, slot: str, terms: Terms, clock: Clock, group: Group | None = None) -> Seat:
    """Claim `slot` in the run of this prefix, starting a run if there is none. group: None for a replica of one rank.

    Raises Invalid for terms that cannot work, and for a store that ignores conditions.
    """
    if terms.max_norm is not None and not terms.max_norm > 0:
        raise Invalid(f"max_norm must be above 0, or None for no limit: max_norm={terms.max_norm}")
    if terms.min_replicas < 1 or terms.checkpoint_every < 1:
        raise Invalid(
            f"must be at least 1: min_replica_size={terms.min_replicas} checkpoint_every={terms.checkpoint_every}"
        )
    opened = open_store(store, clock=clock) if isinstance(store, str) else store
    if not isinstance(opened, Retrying):
        opened = Retrying(opened, clock)
    group = group or Alone()
    if group.rank == 0:
        probe(opened, clock)
    run = open_run(opened, _lone_run(terms, clock))
    if run.work is not None and terms.spares:
        raise Invalid(
            f"run {run.name} makes up for work that was lost (faults.make_up), which counts every replica; "
            f"world_size_mode=FIXED_WITH_SPARES averages {terms.min_replicas} of them: leave out one of the two"
        )
    stop = threading.Event()
    # From here on an outage is waited out as long as an exchange may take; a start that cannot reach its store fails.
    opened = opened.insisting(terms.deadline_s, stop)
    journal = Journal(opened, run)
    heartbeat_s = terms.heartbeat_s if terms.heartbeat_s is not None else _heartbeat_s(opened)
    presence = Presence(journal, clock, slot, heartbeat_s) if group.rank == 0 else Quiet(slot)
    group.seat(run.nonce, presence.slot, presence.incarnation, stop)
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
        nothing=fold([Index(tensors=(), codec=terms.codec).digest] * group.size),
    )
    return Seat(
        group=group,
        store=opened,
        clock=clock,
        journal=journal,
        presence=presence,
        watch=watch,
        exchange=exchange,
        averager=Averager(
            journal=journal,
            exchange=exchange,
            presence=presence,
            clock=clock,
            codec=terms.codec,
            ranks=group.line("exchange"),
            max_norm=terms.max_norm,
        ),
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
        policy=policy,
        look_every_s=heartbeat_s,
    )


def successor_lives(seat: Seat) -> bool:
    """Whether a newer incarnation of this slot beats: two different beats of one, within `stale_s` on my clock.

    A claim alone proves nothing, nor does the first beat: who claimed may have died right after it, and then nobody
    has the slot. A store that does not answer counts as silence. The same on all ranks, for rank 0 looks.
    Raises Interrupted on a stop.
    """
    return seat.group.line("train").first("look for a successor", lambda: _Alive(value=_beats(seat)), _Alive).value


def _beats(seat: Seat) -> bool:
    deadline = seat.clock.now() + seat.policy.stale_s
    store = seat.store.insisting(0.0, seat.stop)
    before: Heartbeat | None = None
    while True:
        try:
            data = store.read(keys.heartbeat(seat.presence.slot))
            found = None if data is None else Heartbeat.parse(data, keys.heartbeat(seat.presence.slot))
        except (Corrupt, Retryable):
            found = None
        if found is not None and found.incarnation > seat.presence.incarnation:
            if before is not None and before.incarnation == found.incarnation and before.sequence != found.sequence:
                return True
            before = found
        left = deadline - seat.clock.now()
        if seat.stop.is_set():
            raise Interrupted(f"stopped while looking whether the newer incarnation of {seat.presence.slot} lives")
        if left <= 0:
            return False
        seat.clock.pause(min(left, seat.look_every_s), seat.stop)


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
