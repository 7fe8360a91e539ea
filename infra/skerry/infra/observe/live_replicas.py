"""Finds replicas of a run that are at work now: their heartbeats change while this process looks. Never writes.

Clocks of two machines are never compared, so a heartbeat proves nothing until it changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.read_heartbeats import HeartbeatReader
from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys
from skerry.runtime.log.records import Member

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.log.records import Heartbeat
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store

_ENDED: Final = ("finished", "left", "failed")
_LOOK_S: Final = 0.2
# A live replica sends a heartbeat in each of its intervals; one of these may be lost to a busy machine.
_INTERVALS: Final = 3
_LISTED: Final = 4


@dataclass(frozen=True, kw_only=True)
class LiveReplica:
    """A replica at work. host, process, since: of its start, None if that record is gone. silent_s: its heartbeat's."""

    slot: str
    host: str | None
    process: int | None
    since: str | None
    round: int
    silent_s: float

    def __str__(self) -> str:
        where = "" if self.host is None else f" on {self.host} (process {self.process}) since {self.since}"
        return f"{self.slot}{where}, in round {self.round}, last heartbeat {self.silent_s:.1f} s ago"


def live_replicas(store: Store, run: Run, clock: Clock, slots: Collection[str]) -> list[LiveReplica]:
    """Those of `slots` that are at work, in slot order.

    Returns at once if the last heartbeat of each says that it has ended, or an outcome does; otherwise when all have
    sent another one, or after three of their intervals: two seconds for a folder, fifteen for a bucket.
    """
    reader = HeartbeatReader(store, run.nonce, clock)
    reader.look()
    reader.read(None)
    first = {slot: beat for slot, beat in reader.heartbeats.items() if slot in slots and _may_live(store, beat)}
    until = clock.now() + _INTERVALS * _interval_s(store)
    while True:
        now = reader.heartbeats
        live = {slot for slot, beat in first.items() if now.get(slot, beat) != beat}
        if live == first.keys() or clock.now() >= until:
            break
        clock.pause(_LOOK_S)
        reader.look()
        reader.read(None)
    return [_live(store, slot, now, reader.silence) for slot in sorted(live, key=keys.slot_order)]


def shown(replicas: Sequence[LiveReplica]) -> str:
    """Describes live replicas in one line."""
    more = f"; and {len(replicas) - _LISTED} more" if len(replicas) > _LISTED else ""
    return "; ".join(map(str, replicas[:_LISTED])) + more


def _may_live(store: Store, beat: Heartbeat) -> bool:
    return beat.phase not in _ENDED and store.read(keys.outcome(beat.slot, beat.incarnation)) is None


def _live(store: Store, slot: str, heartbeats: Mapping[str, Heartbeat], silence: Mapping[str, float]) -> LiveReplica:
    beat = heartbeats[slot]
    key = keys.member(slot, beat.incarnation)
    data = store.read(key)
    try:
        member = None if data is None else Member.parse(data, key)
    except Corrupt:
        member = None
    return LiveReplica(
        slot=slot,
        host=None if member is None else member.host,
        process=None if member is None else member.process,
        since=None if member is None else member.created,
        round=beat.round,
        silent_s=silence.get(slot, 0.0),
    )


def _interval_s(store: Store) -> float:
    """The interval of the heartbeats of a replica with this store, as `training.open_session` chooses it."""
    return min(5.0, max(0.5, 10 * store.profile.poll_cap))
