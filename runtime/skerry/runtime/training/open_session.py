"""Takes a replica's place in a run: opens and probes the store, finds or starts the run, claims the slot.

The one place where the parts of the protocol are put together; `contribute_and_average` and `round_runner` run on them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from skerry.runtime.checkpointing.garbage_collector import GarbageCollector, Retention
from skerry.runtime.checkpointing.roll_up_writer import RollUpSettings
from skerry.runtime.contract import check_slot
from skerry.runtime.daemon_executors import BackgroundThreads
from skerry.runtime.errors import Corrupt, Invalid, Moved, Retryable, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog, open_run, read_run
from skerry.runtime.log.records import Heartbeat
from skerry.runtime.log.run_record import Run, codec_for
from skerry.runtime.mirrors.ballots import Ballots
from skerry.runtime.mirrors.mirror import Mirror
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.protocol.exchange import Exchange, Interrupted
from skerry.runtime.protocol.quorum import Grace, Policy
from skerry.runtime.protocol.slot_claim_and_heartbeats import (
    HeartbeatMonitor,
    Presence,
    Progress,
    WorkMonitor,
    peak_memory,
)
from skerry.runtime.ranks.interface import SingleRank, combine_digests
from skerry.runtime.store import open_store
from skerry.runtime.store.probe import probe
from skerry.runtime.store.retrying import Retrying
from skerry.runtime.tensors.byte_layout import Index
from skerry.runtime.tensors.tensors_sent_together import TensorBatch
from skerry.runtime.training.contribute_and_average import Averager

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from skerry.runtime.clock import Clock
    from skerry.runtime.log.records import Codec, Phase, Place, Reduction, Software
    from skerry.runtime.log.run_record import CodecSetting
    from skerry.runtime.ranks.interface import Group
    from skerry.runtime.store import Store

# As long as `skerry-replica run` asks the mirror, which has answered it a moment ago.
_MIRROR_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Settings of one replica. heartbeat_s: None chooses by the store. grace: None takes the run's cap.

    max_norm: this replica contributes nothing above it; None: all that is finite. propose_delay_s: how much longer each
    further replica waits before it proposes a decision, too; None chooses by the store. place, software: for people.
    is_watched: `skerry-replica run` has started this process, and ends it before its slot votes to leave a store.
    """

    min_replicas: int
    deadline_s: float
    heartbeat_s: float | None = None
    grace: Grace | None = None
    spares: bool = False
    codec: CodecSetting = "none"
    reduction: Reduction | None = None
    checkpoint_every: int = 1
    max_norm: float | None = None
    propose_delay_s: float | None = None
    retention: Retention = field(default_factory=Retention)
    place: Place | None = None
    software: Software | None = None
    is_watched: bool = False
    roll_ups: RollUpSettings = field(default_factory=RollUpSettings)

    def __post_init__(self) -> None:
        """Raises Invalid for settings that cannot work in any run."""
        if self.max_norm is not None and not self.max_norm > 0:
            raise Invalid(f"max_norm must be above 0, or None for no limit: max_norm={self.max_norm}")
        if self.min_replicas < 1 or self.checkpoint_every < 1:
            raise Invalid(
                f"must be at least 1: min_replica_size={self.min_replicas} checkpoint_every={self.checkpoint_every}"
            )
        if self.codec == "sparse" and self.reduction == "reduce_scatter":
            raise Invalid("codec sparse cannot be averaged by reduce_scatter; set reduction to auto")


def _thread(name: str) -> Executor:
    return BackgroundThreads(1, name)


@dataclass(frozen=True, kw_only=True)
class Session:
    """The parts that one incarnation needs to take part in its run, on one rank. stop: set it to end all waiting.

    executor: makes a background thread that runs its jobs in order. event: makes an event that ends a pause.
    open_mirror: opens the store of a mirror's URI, without a request.
    """

    group: Group
    store: Retrying
    clock: Clock
    log: RunLog
    presence: Presence
    watch: HeartbeatMonitor
    exchange: Exchange
    averager: Averager
    collector: GarbageCollector
    stop: threading.Event
    policy: Policy
    poll_every_s: float
    codec: Codec = "none"
    roll_ups: RollUpSettings = field(default_factory=RollUpSettings)
    executor: Callable[[str], Executor] = _thread
    event: Callable[[], threading.Event] = threading.Event
    open_mirror: Callable[[str], Store] = open_store

    def batch(self) -> TensorBatch:
        """An empty batch for an exchange of this run. A run of an old release has payloads of layout 1."""
        return TensorBatch(self.codec, self.log.run.layout or 1)


class FollowerPresence(Presence):
    """Presence on ranks above 0: holds the state locally and writes nothing. Rank 0 owns the slot."""

    def __init__(self, slot: str) -> None:
        """Claims nothing."""
        self.slot = check_slot(slot)
        self.incarnation = 0  # of no use here: rank 0 writes all records that name it
        self._progress = Progress()
        self._lock = threading.Lock()

    @property
    def steady_since(self) -> float:
        """Since ever: no heartbeat is late here."""
        return 0.0

    def start(self) -> None:
        """Rank 0 sends heartbeats."""

    def stop(self, phase: Phase, notice: str | None = None) -> None:
        """Rank 0 sends the last heartbeat."""

    def beat(self) -> None:
        """Rank 0 sends heartbeats."""

    def raise_if_fenced(self, *, known_s: float = 0.0) -> None:
        """Rank 0 checks, and all ranks raise."""

    def _publish(self) -> None:
        """Nothing is sent."""


def join_run(
    store: str | Store,
    slot: str,
    terms: SessionOptions,
    clock: Clock,
    group: Group | None = None,
    *,
    new_run: Run | None = None,
    stop: threading.Event | None = None,
) -> Session:
    """Claim `slot` in the run of this prefix, starting a run if there is none. group: None for a replica of one rank.

    new_run: the run to start; None: one without end, named as the last part of the prefix. stop: ends all waiting; None
    makes an event.
    Raises Invalid for a store that ignores conditions, for spares in a run that makes up for lost work, and if a run
    with failover could go on twice.
    """
    opened = open_store(store, clock=clock) if isinstance(store, str) else store
    if not isinstance(opened, Retrying):
        opened = Retrying(opened, clock)
    group = group or SingleRank()
    if group.rank == 0:
        probe(opened, clock)
    run = open_run(opened, new_run or _lone_run(terms, clock, opened.uri))
    _check_terms(run, slot, terms)
    stop = stop or threading.Event()
    # From here on an outage is waited out as long as an exchange may take; a start that cannot reach its store fails.
    opened = opened.with_deadline(terms.deadline_s, stop)
    # A script may ask for fewer: then decisions of fewer are sound.
    run = run.model_copy(update={"min_replicas": min(run.min_replicas, terms.min_replicas)})
    log = RunLog(opened, run)
    heartbeat_s = terms.heartbeat_s if terms.heartbeat_s is not None else _heartbeat_s(opened)
    presence = FollowerPresence(slot) if group.rank else _claim(log, slot, terms, heartbeat_s, clock)
    group.join(run.nonce, presence.slot, presence.incarnation, stop)
    watch = HeartbeatMonitor(log, clock, slot)
    policy = _policy(log.run, terms, heartbeat_s, opened.profile.poll_cap)
    codec = codec_for(terms.codec, is_local=opened.profile.is_local)
    exchange = Exchange(
        log=log,
        presence=presence,
        monitor=watch,
        clock=clock,
        policy=policy,
        heartbeat_poll_s=heartbeat_s,
        stop=stop,
        empty_index=combine_digests([Index(tensors=(), codec=codec, layout=run.layout or 1).digest] * group.size),
    )
    return Session(
        group=group,
        codec=codec,
        store=opened,
        clock=clock,
        log=log,
        presence=presence,
        watch=watch,
        exchange=exchange,
        averager=Averager(
            log=log,
            exchange=exchange,
            presence=presence,
            clock=clock,
            ranks=group.channel("exchange"),
            max_norm=terms.max_norm,
            reduction=terms.reduction,
            others=WorkMonitor(watch, presence, clock, policy, heartbeat_s),
        ),
        collector=GarbageCollector(
            log=log,
            presence=presence,
            watch=watch,
            clock=clock,
            retention=terms.retention,
            stale_s=policy.stale_s,
            stop=stop,
        ),
        stop=stop,
        policy=policy,
        poll_every_s=heartbeat_s,
        roll_ups=terms.roll_ups,
    )


def _claim(log: RunLog, slot: str, terms: SessionOptions, heartbeat_s: float, clock: Clock) -> Presence:
    presence = Presence(log, clock, slot, heartbeat_s, terms.place, terms.software)
    presence.memory = peak_memory
    if log.run.failover is not None:
        _copy_claim(log.store, log.run, log.run.failover.mirror, slot, clock)
    return presence


def _copy_claim(home: Store, run: Run, mirror_uri: str, slot: str, clock: Clock) -> None:
    """Copy this start to the mirror before it trains: no vote of an older process of the slot counts beside it.

    Then make a vote of before void. Raises Moved if the run has left this store, and Retryable if the mirror's bucket
    was deleted, or refuses this replica: the run is healthy, and the mirror may come back. Raises Invalid if it has
    another run.
    """
    mirror = open_store(mirror_uri, clock=clock, deadline_s=_MIRROR_S)
    try:
        read_run(mirror)
    except (Invalid, Unauthorized) as error:
        raise Retryable(f"the mirror {mirror.uri}, by which the run may leave its store: {error}") from error
    Mirror(home, mirror, clock, by=slot).copy_members()
    verdict = Ballots(mirror, run, slot, clock, find_cut).withdraw()
    if verdict is not None:
        raise Moved(f"run {run.name} goes on at {verdict.uri}, from round {verdict.round} on; use that URI")


def _check_terms(run: Run, slot: str, terms: SessionOptions) -> None:
    """Raise Invalid for terms that contradict the run.

    In a run with failover, no replica may train after its vote, or close rounds among too few of the others.
    """
    if run.work is not None and terms.spares:
        raise Invalid(
            f"run {run.name} makes up for work that was lost (faults.make_up), which counts every replica; "
            f"world_size_mode=FIXED_WITH_SPARES averages {terms.min_replicas} of them: leave out one of the two"
        )
    if run.failover is None:
        return
    if not terms.is_watched:
        raise Invalid(f"run {run.name} has failover: start this script by `skerry-replica run`")
    if terms.min_replicas < run.min_replicas:
        raise Invalid(
            f"run {run.name} has failover, and with fewer replicas than its min_replicas={run.min_replicas} it could "
            f"go on in two stores: min_replica_size={terms.min_replicas}; use `replica.manager()`, or raise it"
        )
    if slot not in run.slots:  # it has no vote, and would count for the quorum of those that are left behind
        raise Invalid(f"run {run.name} has failover, and no slot {slot!r}; its slots are {', '.join(run.slots)}")


def successor_lives(session: Session) -> bool:
    """True if a newer incarnation of this slot sends two different heartbeats within `stale_s`.

    A claim alone proves nothing, nor does the first heartbeat: the new incarnation may have died right after it, and
    then the slot is empty. A store that does not answer counts as silence. The same on all ranks, because rank 0 looks.
    Raises Interrupted on a stop.
    """
    return session.group.channel("train").broadcast_from_rank0("look for a successor", lambda: _beats(session))


def _beats(session: Session) -> bool:
    deadline = session.clock.now() + session.policy.stale_s
    store = session.store.with_deadline(0.0, session.stop)
    before: Heartbeat | None = None
    while True:
        try:
            data = store.read(keys.heartbeat(session.presence.slot))
            current = None if data is None else Heartbeat.parse(data, keys.heartbeat(session.presence.slot))
        except (Corrupt, Retryable):
            current = None
        if current is not None and current.incarnation > session.presence.incarnation:
            if before is not None and before.incarnation == current.incarnation and before.sequence != current.sequence:
                return True
            before = current
        left = deadline - session.clock.now()
        if session.stop.is_set():
            raise Interrupted(f"stopped while watching for a newer incarnation: slot={session.presence.slot}")
        if left <= 0:
            return False
        session.clock.pause(min(left, session.poll_every_s), session.stop)


def _policy(run: Run, terms: SessionOptions, heartbeat_s: float, longest_poll_s: float) -> Policy:
    return Policy(
        min_replicas=terms.min_replicas,
        expected=frozenset(run.slots),
        start_window_s=run.start_window_s,
        grace=terms.grace or Grace(cap_s=run.grace_s),
        # Six missed beats, and two seconds for a machine that is busy importing torch.
        stale_s=6 * heartbeat_s + 2.0,
        deadline_s=terms.deadline_s,
        propose_delay_s=longest_poll_s / 2 if terms.propose_delay_s is None else terms.propose_delay_s,
        spares=terms.spares,
        weighting=run.weighting,
    )


def _heartbeat_s(store: Store) -> float:
    """Ten of the store's longest polls, between half a second and five: a put per beat must stay cheap."""
    return min(5.0, max(0.5, 10 * store.profile.poll_cap))


def _lone_run(terms: SessionOptions, clock: Clock, uri: str) -> Run:
    """The run that a replica starts if none exists: without end, expecting only the quorum."""
    return Run(
        nonce=clock.nonce(),
        name=uri.partition("://")[2].rstrip("/").rpartition("/")[2][:256] or "unnamed",
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
        layout=2,
        links=True,
        created=clock.utc_text(),
    )
