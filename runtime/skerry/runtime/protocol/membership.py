"""Who is here: this incarnation's claim on its slot, its heartbeat, and what other slots say.

The highest incarnation owns a slot; a lower one notices at its next exchange and stops with Fenced. Liveness is
local: has this object changed since I last looked. Nothing here is needed for safety.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skerry.runtime import keys
from skerry.runtime.errors import Corrupt, Diverged, Fenced, Invalid, SkerryError
from skerry.runtime.events import emit
from skerry.runtime.journal import read_bytes
from skerry.runtime.records import Abstention, Heartbeat, Member, Phase, digest_of
from skerry.runtime.rounds import Peer
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.runtime.clock import Clock
    from skerry.runtime.journal import Journal
    from skerry.runtime.store import Entry


# A beat that comes so many intervals, and a second, late: half of the time after which silence counts as death.
_LATE_BEATS = 3
_LATE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a replica says about itself; a heartbeat without its identity."""

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
    """One incarnation of a slot. Claims the slot on construction; beats in the background once started.

    Thread-safe. Without `start` every change of phase beats at once, in the caller's thread (a simulator's way).
    """

    def __init__(self, journal: Journal, clock: Clock, slot: str, interval_s: float) -> None:
        """Claim the next incarnation of `slot`."""
        self.slot = keys.check_slot(slot)
        self._journal = journal
        self._clock = clock
        self._interval_s = interval_s
        self._progress = Progress()
        self._sequence = 0
        self._steady_since = 0.0
        self._late_since: float | None = None
        self._beaten_at = -math.inf
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.incarnation = self._claim()
        emit("joined", {"slot": slot, "incarnation": self.incarnation})

    @property
    def progress(self) -> Progress:
        """What the next heartbeat will say."""
        return self._progress

    @property
    def steady_since(self) -> float:
        """Since when a live replica's beats could be heard, on my clock: mine go through, and the store answers.

        A call that had to be repeated, or a store that is away for less than the time between two beats, hides nobody
        for so long that it would count as dead.
        """
        store = self._journal.store
        answers_since = store.steady_since(self._interval_s) if isinstance(store, Retrying) else 0.0
        return max(self._steady_since, answers_since)

    def start(self) -> None:
        """Beat now, and from now on in the background."""
        self.beat()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{self.slot}", daemon=True)
        self._thread.start()

    def stop(self, phase: Phase) -> None:
        """Say the last word (finished, left, failed) and fall silent; a replaced incarnation says none. Idempotent."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if self._replaced():
                return
        except SkerryError as error:
            emit("heartbeat_failed", {"slot": self.slot, "error": str(error)}, level=logging.WARNING)
            return
        self._change(lambda p: replace(p, phase=phase, waiting_for=()))
        if self._thread is not None:
            self._await_turn(None)
        try:
            self.beat()
        except SkerryError as error:  # the others will find it stale
            emit("heartbeat_failed", {"slot": self.slot, "error": str(error)}, level=logging.WARNING)

    def enter(self, phase: Phase, *, round_number: int, waiting_for: tuple[str, ...] = ()) -> None:
        """Tell a change of phase or round at once."""
        if self._change(lambda p: replace(p, phase=phase, round=round_number, waiting_for=waiting_for)):
            self._soon()

    def abstain(self, round_number: int, reason: str) -> None:
        """Tell everybody that this slot has nothing good to offer to a round."""
        abstention = Abstention(round=round_number, reason=reason[:500])
        if self._change(lambda p: replace(p, abstains=abstention)):
            self._soon()

    def withdraw_abstention(self) -> None:
        """A retry of the round may contribute after all."""
        if self._change(lambda p: replace(p, abstains=None)):
            self._soon()

    def report(self, *, inner_step: int, loss: float | None, tokens: int, tokens_per_s: float | None) -> None:
        """Numbers for people; told with the next regular beat."""
        finite = None if loss is None or not math.isfinite(loss) else loss
        self._change(lambda p: replace(p, inner_step=inner_step, loss=finite, tokens=tokens, tokens_per_s=tokens_per_s))

    def moved(self, *, uploaded_bytes: int, downloaded_bytes: int) -> None:
        """Total bytes that went through the store; told with the next regular beat."""
        self._change(lambda p: replace(p, uploaded_bytes=uploaded_bytes, downloaded_bytes=downloaded_bytes))

    def notice(self, text: str) -> None:
        """Tell something for people at once (a stop request, a spot notice)."""
        if self._change(lambda p: replace(p, notice=text)):
            self._soon()

    def fence(self) -> None:
        """Raises Fenced if a newer incarnation has claimed this slot.

        Incarnations are numbered without gaps, so one GET of the next number is enough.
        """
        if self._replaced():
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
                run=self._journal.run.nonce,
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
            )
            if self._late_since is None:
                self._late_since = self._clock.now()
            self._journal.store.replace(keys.heartbeat(self.slot), heartbeat.to_bytes())
            # The others write where I do. What raised is late until one goes through.
            self._beaten_at = now = self._clock.now()
            if now - self._late_since > _LATE_BEATS * self._interval_s + _LATE_S:
                self._steady_since = now
            self._late_since = None

    def _replaced(self) -> bool:
        return self._journal.store.read(keys.member(self.slot, self.incarnation + 1)) is not None

    def _claim(self) -> int:
        taken = map(_incarnation, self._journal.store.list(keys.members_of(self.slot)))
        incarnation = max((number + 1 for number in taken if number is not None), default=0)
        while True:
            mine = Member(
                run=self._journal.run.nonce,
                slot=self.slot,
                incarnation=incarnation,
                nonce=self._clock.nonce(),
                host=socket.gethostname(),
                process=os.getpid(),
                created=self._clock.utc_text(),
            )
            if self._journal.create(keys.member(self.slot, incarnation), mine).record.nonce == mine.nonce:
                return incarnation
            incarnation += 1

    def _change(self, change: Callable[[Progress], Progress]) -> bool:
        with self._lock:
            before, self._progress = self._progress, change(self._progress)
            return self._progress != before

    def _soon(self) -> None:
        if self._thread is not None and not self._stopped.is_set():
            self._wake.set()
        else:
            self.beat()

    def _await_turn(self, wake: threading.Event | None) -> None:
        """Leave the store the time that it wants between two writes of one key."""
        left = self._beaten_at + self._journal.store.profile.rewrite - self._clock.now()
        if left > 0:
            self._clock.pause(left, wake)

    def _run(self) -> None:
        failing = False
        while not self._stopped.is_set():
            self._clock.pause(self._interval_s, self._wake)
            self._await_turn(self._stopped)
            self._wake.clear()
            if self._stopped.is_set():
                return
            try:
                if self._replaced():  # the new owner's heartbeat must not be overwritten
                    return
                self.beat()
                failing = False
            except Exception as error:  # noqa: BLE001  a thread's entry: a heartbeat that fails must not end training
                if not failing:
                    emit(
                        "heartbeat_failed",
                        {"slot": self.slot, "error": str(error)},
                        level=logging.WARNING,
                        error=error,
                    )
                failing = True


class Watch:
    """The other slots' heartbeats, with the local time at which each was seen to change."""

    def __init__(self, journal: Journal, clock: Clock, me: str) -> None:
        self._journal = journal
        self._clock = clock
        self._me = me
        self._peers: dict[str, Peer] = {}
        self._damaged: dict[str, str] = {}

    @property
    def peers(self) -> Mapping[str, Peer]:
        """What the last look saw."""
        return self._peers

    def look(self) -> Mapping[str, Peer]:
        """Read every heartbeat. A damaged one, or one under another's key, is no news: it is a hint, and its owner will
        replace it. It is told once.
        """
        peers: dict[str, Peer] = {}
        damaged: dict[str, str] = {}
        for entry in self._journal.store.list(keys.HEARTBEATS):
            try:
                slot = keys.slot_of(entry.key)
            except Invalid:  # somebody else's object
                continue
            if slot == self._me:
                continue
            data = read_bytes(self._journal.store, entry.key)
            if data is None:
                continue
            before = self._peers.get(slot)
            try:
                peers[slot] = _seen(before, self._parse(slot, data, entry.key), self._clock.now())
            except Corrupt as error:
                damaged[entry.key] = digest_of(data)
                if damaged[entry.key] != self._damaged.get(entry.key):
                    emit("heartbeat_failed", {"key": entry.key, "error": str(error)}, level=logging.WARNING)
                if before is not None:
                    peers[slot] = before
        self._peers, self._damaged = peers, damaged
        return peers

    def _parse(self, slot: str, data: memoryview, key: str) -> Heartbeat:
        heartbeat = Heartbeat.parse(data, key)
        if heartbeat.run != self._journal.run.nonce:
            raise Diverged(f"two runs share this prefix: {self._journal.store.uri}/{key} is of run {heartbeat.run}")
        if heartbeat.slot != slot:
            raise Corrupt(f"heartbeat speaks for another slot: key={key} slot={heartbeat.slot}")
        return heartbeat


def _incarnation(entry: Entry) -> int | None:
    """The incarnation of a claim; None for somebody else's object."""
    try:
        return keys.incarnation_of(entry.key)
    except Invalid:
        return None


def _seen(before: Peer | None, heartbeat: Heartbeat, now: float) -> Peer:
    """What is known of a slot after one more look. A replaced incarnation's late beat is not news."""
    if before is None:
        return Peer(heartbeat=heartbeat, changed_at=now, fresh=False)
    known = (before.heartbeat.incarnation, before.heartbeat.sequence)
    if (heartbeat.incarnation, heartbeat.sequence) <= known:
        return before
    return Peer(heartbeat=heartbeat, changed_at=now)
