"""Membership of a run: this incarnation's claim on its slot, its heartbeat, and the other slots' heartbeats.

The highest incarnation owns a slot; a lower one notices at its next exchange and stops with Fenced. Liveness is
local: has the object changed since the last look. Nothing here is needed for safety.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.runtime.contract import check_slot
from skerry.runtime.errors import Corrupt, Diverged, Fenced, Invalid, Retryable
from skerry.runtime.log import keys
from skerry.runtime.log.find_moved_run import check_lives_here
from skerry.runtime.log.log import read_record_bytes
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import Abstention, Heartbeat, Member, Memory, Phase
from skerry.runtime.protocol.quorum import ObservedHeartbeat, is_live
from skerry.runtime.store.retrying import Retrying
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from skerry.runtime.clock import Clock
    from skerry.runtime.log.log import RunLog
    from skerry.runtime.log.records import MirrorState, Place, Software
    from skerry.runtime.protocol.quorum import Policy


# A heartbeat is late after this many intervals plus a second: half of the time after which a replica counts as dead.
_LATE_INTERVALS = 3
_LATE_S = 1.0
# A heartbeat needs no look for a newer incarnation within this share of an interval after the exchange's own: between a
# look and the write it may overwrite the new owner's heartbeat in any case, which is then written again.
_OWNED_SHARE = 0.2
# The last heartbeat takes a read and a write; after a stop each is retried for 5 s at most.
_LAST_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The part of a heartbeat that a replica updates; a heartbeat without its identity."""

    round: int = 0
    inner_step: int = 0
    phase: Phase = "joining"
    abstains: Abstention | None = None
    loss: float | None = None
    tokens: int = 0
    tokens_per_s: float | None = None
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    waiting_for: tuple[str, ...] = ()
    notice: str | None = None


class Presence:
    """One incarnation of a slot. Claims the slot on construction; sends heartbeats in the background once started.

    Thread-safe. Without `start` every change of phase is written at once, in the caller's thread (for a simulator).
    """

    _is_last: bool = False  # the last heartbeat is fixed

    def __init__(
        self,
        log: RunLog,
        clock: Clock,
        slot: str,
        interval_s: float,
        place: Place | None = None,
        software: Software | None = None,
    ) -> None:
        """Claim the next incarnation of `slot`. interval_s: between two heartbeats. The rest: of this process."""
        self.slot = check_slot(slot)
        self.region = None if place is None else place.region
        self._log = log
        self._clock = clock
        self._interval_s = interval_s
        self._progress = Progress()
        self._sequence = 0
        self._steady_since = 0.0
        self._late_since: float | None = None
        self._beaten_at = -math.inf
        self._owned_at = -math.inf
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.mirrors: Callable[[], tuple[MirrorState, ...] | None] = lambda: None
        """For the heartbeats: those to which this replica copies."""
        self.memory: Callable[[], Memory | None] = lambda: None
        """For the heartbeats: see `peak_memory`."""
        self.incarnation = claim_slot(log, slot, clock, place, software)
        emit("joined", {"slot": slot, "incarnation": self.incarnation})

    @property
    def progress(self) -> Progress:
        """The content of the next heartbeat."""
        return self._progress

    @property
    def steady_since(self) -> float:
        """Since when a live replica's heartbeats would have been visible here, on the local clock.

        True while this replica's own heartbeats are written in time and the store responds. A repeated request, or an
        outage shorter than the heartbeat interval, cannot make a live replica look dead and does not count.
        """
        store = self._log.store
        responds_since = store.reachable_since(self._interval_s) if isinstance(store, Retrying) else 0.0
        return max(self._steady_since, responds_since)

    def start(self) -> None:
        """Write a heartbeat now, and continue in the background."""
        self.beat()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{self.slot}", daemon=True)
        self._thread.start()

    def stop(self, phase: Phase, notice: str | None = None) -> None:
        """Write a last heartbeat (finished, left, failed) and end; a replaced incarnation writes none. Idempotent.

        notice: how the replica ended, for operators; None keeps the last notice. The thread of the heartbeats writes,
        and is waited for at most _LAST_S: a store that hangs must not keep the process.
        """
        if self._stopped.is_set():
            return
        self._change(lambda p: replace(p, phase=phase, waiting_for=(), notice=notice or p.notice), last=True)
        self._stopped.set()
        self._wake.set()
        if self._thread is None:
            self._write_last()
        else:
            self._thread.join(_LAST_S)

    def enter(self, phase: Phase, *, round_number: int, waiting_for: tuple[str, ...] = ()) -> None:
        """Publish a change of phase or round at once; waiting_for goes with the next heartbeat."""
        self._change(lambda p: replace(p, waiting_for=waiting_for))
        if self._change(lambda p: replace(p, phase=phase, round=round_number)):
            self._publish()

    def abstain(self, round_number: int, reason: str) -> None:
        """Publish that this slot has no valid contribution to a round."""
        abstention = Abstention(round=round_number, reason=reason[:500])
        if self._change(lambda p: replace(p, abstains=abstention)):
            self._publish()

    def withdraw_abstention(self) -> None:
        """Publish that this slot may contribute after all, because the round is retried."""
        if self._change(lambda p: replace(p, abstains=None)):
            self._publish()

    def report(self, *, inner_step: int, loss: float | None, tokens: int, tokens_per_s: float | None) -> None:
        """Set numbers for operators; written with the next regular heartbeat."""
        finite = None if loss is None or not math.isfinite(loss) else loss
        self._change(lambda p: replace(p, inner_step=inner_step, loss=finite, tokens=tokens, tokens_per_s=tokens_per_s))

    def report_transfers(self, *, uploaded_bytes: int, downloaded_bytes: int) -> None:
        """Set the total bytes moved to and from the store; written with the next regular heartbeat."""
        self._change(lambda p: replace(p, uploaded_bytes=uploaded_bytes, downloaded_bytes=downloaded_bytes))

    def notice(self, text: str) -> None:
        """Publish a message for operators at once (a stop request, a spot notice)."""
        if self._change(lambda p: replace(p, notice=text)):
            self._publish()

    def raise_if_fenced(self, *, known_s: float = 0.0) -> None:
        """Raises Fenced if a newer incarnation has claimed this slot, Moved if it did so to move the run elsewhere.

        Incarnations are numbered without gaps, so one GET of the next number is enough. known_s: a look that is not
        older than so many seconds is enough; 0 looks in any case.
        """
        if not self._is_owned(known_s) and self._replaced():
            check_lives_here(self._log.store, self._log.run)
            raise Fenced(
                f"slot {self.slot} belongs to incarnation {self.incarnation + 1} or later, "
                f"this is {self.incarnation}; exiting"
            )

    def beat(self) -> None:
        """Write the heartbeat now."""
        with self._write_lock:  # a slow write must not overwrite a newer one
            with self._lock:
                self._sequence += 1
                progress, sequence = self._progress, self._sequence
            heartbeat = Heartbeat(
                run=self._log.run.nonce,
                slot=self.slot,
                incarnation=self.incarnation,
                sequence=sequence,
                round=progress.round,
                inner_step=progress.inner_step,
                phase=progress.phase,
                abstains=progress.abstains,
                loss=progress.loss,
                tokens=progress.tokens,
                tokens_per_s=progress.tokens_per_s,
                uploaded_bytes=progress.uploaded_bytes,
                downloaded_bytes=progress.downloaded_bytes,
                waiting_for=progress.waiting_for,
                notice=progress.notice,
                mirrors=self.mirrors(),
                # A replica of an older version could not read it (decision 0062).
                memory=self.memory() if self._log.run.links else None,
            )
            if self._late_since is None:
                self._late_since = self._clock.now()
            self._log.store.replace(keys.heartbeat(self.slot), heartbeat.to_bytes())
            # The other replicas write to the same store: while this write is late, theirs may be late too. A write
            # that raised stays late until one succeeds.
            self._beaten_at = now = self._clock.now()
            if now - self._late_since > _LATE_INTERVALS * self._interval_s + _LATE_S:
                self._steady_since = now
            self._late_since = None

    def _replaced(self) -> bool:
        asked_at = self._clock.now()
        is_replaced = self._log.store.read(keys.member(self.slot, self.incarnation + 1)) is not None
        self._owned_at = -math.inf if is_replaced else asked_at
        return is_replaced

    def _is_owned(self, known_s: float) -> bool:
        """A look of the last `known_s` seconds has shown that no newer incarnation has claimed this slot."""
        return self._clock.now() - self._owned_at < known_s

    def _change(self, change: Callable[[Progress], Progress], *, last: bool = False) -> bool:
        """Returns True if it changed anything. last: later changes have no effect; an exchange may still be running."""
        with self._lock:
            if self._is_last:
                return False
            self._is_last = last
            before, self._progress = self._progress, change(self._progress)
            return self._progress != before

    def _publish(self) -> None:
        if self._thread is not None and not self._stopped.is_set():
            self._wake.set()
        else:
            self.beat()

    def _await_turn(self, wake: threading.Event | None) -> None:
        """Wait as long as the store requires between two writes of one key."""
        left = self._beaten_at + self._log.store.profile.rewrite - self._clock.now()
        if left > 0:
            self._clock.pause(left, wake)

    def _run(self) -> None:
        failing = False
        while not self._stopped.is_set():
            self._clock.pause(self._interval_s, self._wake)
            self._await_turn(self._stopped)
            self._wake.clear()
            if self._stopped.is_set():
                break
            try:
                # The new owner's heartbeat must not be overwritten.
                if not self._is_owned(_OWNED_SHARE * self._interval_s) and self._replaced():
                    return
                self.beat()
                failing = False
            except Exception as error:  # noqa: BLE001  a thread's entry: a heartbeat that fails must not end training
                if not failing:
                    fields = {"slot": self.slot, "error": str(error)}
                    emit("heartbeat_failed", fields, level=logging.WARNING, error=error)
                failing = True
        self._await_turn(None)
        self._write_last()

    def _write_last(self) -> None:
        try:
            if not self._replaced():
                self.beat()
        except Exception as error:  # noqa: BLE001  a thread's entry: the other replicas will find the heartbeat stale
            emit("heartbeat_failed", {"slot": self.slot, "error": str(error)}, level=logging.WARNING, error=error)


def peak_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Memory | None:
    """The memory of this process; None if the system does not have it.

    Without pages of files, which a data set in a memory map has: the kernel takes them back before it ends a process.
    The limit is that of the machine, or a lower one of a group (cgroup 1 or 2) that the process is in.
    """
    try:
        peak = _kilobytes(proc / "self/status", "VmHWM") - _kilobytes(proc / "self/status", "RssFile")
        limits = [_kilobytes(proc / "meminfo", "MemTotal"), *_group_limits(proc / "self/cgroup", cgroups)]
        return Memory(peak_bytes=peak, limit_bytes=min(limits))
    except (OSError, ValueError, StopIteration):
        return None


def _kilobytes(file: Path, name: str) -> int:
    line = next(line for line in file.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def _group_limits(file: Path, cgroups: Path) -> Iterator[int]:
    """The limits of the groups in `file`, and of those above them. A container sees its own group as the root."""
    for line in file.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                with suppress(OSError, ValueError):  # no limit, or not seen from here
                    yield int((folder / ("memory.limit_in_bytes" if controllers else "memory.max")).read_text())


class HeartbeatMonitor:
    """Reads the other slots' heartbeats and records the local time at which each was seen to change."""

    def __init__(self, log: RunLog, clock: Clock, me: str) -> None:
        self._log = log
        self._clock = clock
        self._me = me
        self._heartbeats: dict[str, ObservedHeartbeat] = {}
        self._damaged: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def heartbeats(self) -> Mapping[str, ObservedHeartbeat]:
        """The newest of each slot that were read."""
        return self._heartbeats

    def refresh(self, unless: Collection[str] = ()) -> Mapping[str, ObservedHeartbeat]:
        """Read every heartbeat but those of the slots in `unless`, which count as unchanged. One listing.

        A damaged one, or one under another slot's key, counts as unchanged, because its owner will overwrite it; it is
        logged once. Two threads may refresh at once: of each slot the newest heartbeat that either has read stays.
        """
        read: dict[str, tuple[Heartbeat, float]] = {}
        damaged: dict[str, str] = {}
        for entry in self._log.store.list(keys.HEARTBEATS):
            try:
                slot = keys.slot_of(entry.key)
            except Invalid:  # not an object of skerry
                continue
            if slot == self._me or slot in unless or (data := read_record_bytes(self._log.store, entry.key)) is None:
                continue
            try:
                read[slot] = self._parse(slot, data, entry.key), self._clock.now()
            except Corrupt as error:
                damaged[entry.key] = digest_of(data)
                if damaged[entry.key] != self._damaged.get(entry.key):
                    emit("heartbeat_failed", {"key": entry.key, "error": str(error)}, level=logging.WARNING)
        with self._lock:
            self._damaged, known = damaged, self._heartbeats
            self._heartbeats = known | {slot: _updated(known.get(slot), *seen) for slot, seen in read.items()}
            return self._heartbeats

    def _parse(self, slot: str, data: memoryview, key: str) -> Heartbeat:
        heartbeat = Heartbeat.parse(data, key)
        if heartbeat.run != self._log.run.nonce:
            raise Diverged(f"two runs share this prefix: {self._log.store.uri}/{key} is of run {heartbeat.run}")
        if heartbeat.slot != slot:
            raise Corrupt(f"heartbeat names another slot: key={key} slot={heartbeat.slot}")
        return heartbeat


class WorkMonitor:
    """Looks whether replicas that others wait for are still at work. every_s: reads heartbeats no more often."""

    def __init__(
        self, monitor: HeartbeatMonitor, presence: Presence, clock: Clock, policy: Policy, every_s: float
    ) -> None:
        self._monitor = monitor
        self._presence = presence
        self._clock = clock
        self._policy = policy
        self._every_s = every_s
        self._due = clock.now()

    @property
    def patience_s(self) -> float:
        """The longest wait of an exchange for them: half of its deadline, so that their work can be done here then."""
        return self._policy.deadline_s / 2

    def any_at_work(self, slots: Collection[str], round_number: int) -> bool:
        """Return whether one of these slots is live and has not left the round behind, or the store is away."""
        known = self._monitor.heartbeats
        if self._clock.now() >= self._due:
            self._due = self._clock.now() + self._every_s
            try:
                known = self._monitor.refresh(unless=known.keys() - set(slots))
            except Retryable:  # nothing is known of them now
                return True
        now, steady_since = self._clock.now(), self._presence.steady_since
        return any(
            known[slot].heartbeat.round <= round_number and is_live(self._policy, known[slot], steady_since, now)
            for slot in known.keys() & set(slots)
        )


def claim_slot(log: RunLog, slot: str, clock: Clock, place: Place | None, software: Software | None) -> int:
    """Claim a slot for this process; the number of its incarnation, the lowest above all others."""
    incarnation = keys.newest_incarnation([entry.key for entry in log.store.list(keys.members_prefix(slot))]) + 1
    while True:
        mine = Member(
            run=log.run.nonce,
            slot=slot,
            incarnation=incarnation,
            nonce=clock.nonce(),
            host=socket.gethostname(),
            process=os.getpid(),
            created=clock.utc_text(),
            place=place,
            software=software,
        )
        if log.create(keys.member(slot, incarnation), mine).record.nonce == mine.nonce:
            return incarnation
        incarnation += 1


def _updated(before: ObservedHeartbeat | None, heartbeat: Heartbeat, now: float) -> ObservedHeartbeat:
    """The slot's observation after one more look. A late write by a replaced incarnation changes nothing."""
    if before is None:
        return ObservedHeartbeat(heartbeat=heartbeat, changed_at=now, fresh=False)
    known = (before.heartbeat.incarnation, before.heartbeat.sequence)
    if (heartbeat.incarnation, heartbeat.sequence) <= known:
        return before
    return ObservedHeartbeat(heartbeat=heartbeat, changed_at=now)
