"""Passes closed rounds that a replica cannot follow, because a payload is damaged or missing.

If a mirror of the run has the payload, it is read from there; one of the replica's own slot is put back. Otherwise only
replicas that read it before it was damaged have the next state; one of them writes an extra checkpoint so that the
others can skip the round. The others wait for it up to a limit of their own, and try the round again now and then,
because the object may have been restored. A replica at the end of the run does not leave while it may be the only one
that can write the last checkpoint.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, TypeAlias

from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Fenced, Invalid, Moved, Retryable, SkerryError
from skerry.runtime.log.keys import slot_order
from skerry.runtime.log.log import RunLog
from skerry.runtime.mirrors.repair_from_copies import Copies, RoundMender
from skerry.runtime.store.retrying import apart
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from skerry.runtime.checkpointing.receipt_and_checkpoint_writer import Recorder
    from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
    from skerry.runtime.log.records import Heartbeat
    from skerry.runtime.protocol.quorum import ObservedHeartbeat
    from skerry.runtime.store import Store
    from skerry.runtime.training.open_session import Session
    from skerry.runtime.training.trainer_interface import Trainer

# What cannot be followed is downloaded again at every attempt; checkpoints are looked for meanwhile.
_ATTEMPTS = Backoff(first=0.2, cap=60.0)
# One call to the store or a mirror, while a round is mended.
_CALL_S = 10.0
_PRESENT = frozenset({"joining", "train", "sync"})


_Way: TypeAlias = Literal["checkpoint", "try again", "timed out"]


class UnreadableRound:
    """One closed round that cannot be followed, until a checkpoint beyond it exists."""

    def __init__(self, session: Session, recorder: Recorder, round_number: int, patience_s: float | None) -> None:
        """patience_s: how long to wait from now on; None: without limit."""
        self._session = session
        self._recorder = recorder
        self._round = round_number
        self._patience_s = patience_s
        self._since = session.clock.now()
        self._attempts = 0
        self._cause: Exception | None = None
        self._passed = round_number
        self._mender: RoundMender | None = None
        self._copies: tuple[tuple[str, str], ...] = ()  # keys of payloads, and the URIs to read them from
        self._reported: set[str] = set()

    def met(self, cause: Exception | None) -> None:
        """Record a failed attempt. The heartbeat then shows that this slot abstains from a closed round."""
        self._attempts += 1
        self._cause = cause
        self._session.presence.abstain(self._round, f"cannot follow: {cause!r}")

    def wait_for_way(self, store: Store) -> bool:
        """Wait. True: a new checkpoint beyond the round exists; False: it is time for another attempt.

        store: to look at; an outage of it is waited out. The same on all ranks. Raises RuntimeError, with what is
        damaged, once patience is over.
        """
        self._session.presence.enter("joining", round_number=self._round)  # replicas that can help search for it
        way, copies = self._session.group.channel("train").broadcast_from_rank0(
            "wait for a checkpoint", lambda: (self._way(store), self._copies)
        )
        opened = self._opened(uri for _, uri in copies)
        self._session.averager.read_from({key: opened[uri] for key, uri in copies if uri in opened})
        if way == "timed out":
            raise RuntimeError(
                f"round {self._round} is closed and cannot be followed, and no checkpoint beyond it came within "
                f"{self._patience_s:g} s: restore what is damaged, or start this replica again; last: {self._cause!r}"
            ) from self._cause
        return way == "checkpoint"

    def _way(self, store: Store) -> _Way:
        clock, stop = self._session.clock, self._session.stop
        if self._session.log.run.mirrors and self._mend():
            return "try again"
        # Further ranks wait for the answer no longer than a few exchanges may take.
        again = clock.now() + min(_ATTEMPTS.delay(self._attempts, clock), self._session.policy.deadline_s)
        pauses = Backoff(first=store.profile.poll_first, cap=self._session.poll_every_s, factor=1.5)
        attempt = 0
        while True:
            newest = self._newest(store)
            if newest > self._passed:
                self._passed = newest
                return "checkpoint"
            now = clock.now()
            if self._patience_s is not None and now - self._since >= self._patience_s:
                return "timed out"
            if now >= again or stop.is_set():
                return "try again"
            clock.pause(min(again - now, pauses.delay(attempt, clock)), stop)
            attempt += 1

    def _mend(self) -> bool:
        """Put payloads of this slot back that a mirror has, and find those of others there. True if that may help."""
        session, fields = self._session, {"round": self._round, "slot": self._session.presence.slot}
        # Further ranks wait for the answer no longer than a few exchanges may take.
        until = session.clock.now() + session.policy.deadline_s

        def open_copies() -> Copies:
            return Copies(list(self._opened(mirror.uri for mirror in session.log.run.mirrors or ()).values()))

        if self._mender is None:
            log = RunLog(apart(session.store, _CALL_S), session.log.run)
            # The others may have collected the payloads of a round that a replaced process still looks at.
            self._mender = RoundMender(
                log, session.presence.slot, self._round, open_copies, session.presence.raise_if_fenced
            )
        try:
            mended, failed = self._mender.mend(lambda: session.stop.is_set() or session.clock.now() >= until)
        except (Fenced, Moved):
            raise
        except SkerryError as error:  # the run's store is away, or refuses; the round is tried again as before
            mended, failed = [], [error]
        for item in mended:
            emit("payload_mended", {**fields, "key": item.key, "uri": item.uri, "was": item.was})
        before, copies = self._copies, self._mender.copies
        self._copies = tuple((key, copy.uri) for key, copy in copies.items())
        for copy in copies.values():
            if copy.key not in dict(before):
                where = {"key": copy.key, "uri": copy.uri, "was": copy.was}
                emit("payload_read_from_copy", {**fields, **where}, level=logging.WARNING)
        for error in failed:
            self._report(error)
        return bool(mended) or not set(self._copies) <= set(before)

    def _opened(self, uris: Iterable[str]) -> dict[str, Store]:
        """The mirrors by URI, without those that cannot be opened."""
        opened: dict[str, Store] = {}
        for uri in dict.fromkeys(uris):
            try:
                opened[uri] = apart(self._session.open_mirror(uri), _CALL_S)
            except SkerryError as error:
                self._report(error)
        return opened

    def _report(self, error: SkerryError) -> None:
        """Tell once why a payload is not mended."""
        if str(error) not in self._reported:
            self._reported.add(str(error))
            fields = {"round": self._round, "slot": self._session.presence.slot, "error": str(error)}
            emit("payload_not_mended", fields, level=logging.WARNING)

    def _newest(self, store: Store) -> int:
        try:
            return next(iter(self._recorder.complete(store)), 0)
        except Retryable:
            return 0


class RescueCheckpoints:
    """Writes extra checkpoints for replicas that cannot follow a round. DiLoCo only.

    stuck: a round could not be decided in time; the others may be unable to come, until the next boundary.
    """

    def __init__(self, session: Session, recorder: Recorder, trainer: Trainer) -> None:
        self.stuck = False
        self._session = session
        self._recorder = recorder
        self._trainer = trainer
        self._train = session.group.channel("train")
        self._helped = 0

    def help_peers_behind(self, position: LogPosition) -> None:
        """At a boundary, once if stuck: write a checkpoint if a live replica is in an earlier round."""
        if not self.stuck:
            return
        self.stuck = False

        def is_behind(peer: Heartbeat) -> bool:
            return peer.round < position.round and peer.phase in _PRESENT

        def must_help() -> bool:
            peers = self._session.watch.refresh().values()
            return any(is_behind(peer.heartbeat) for peer in peers) and self._lacks(position)

        self._help(position, must_help)

    def help_blocked_peers(self, position: LogPosition) -> None:
        """While this replica waits in its own round: write one checkpoint for replicas that cannot follow.

        Costs nothing while no replica is blocked: the exchange has read the heartbeats. What DiLoCo registers does not
        change before the round is closed. A replica of several ranks, which do not wait in step, helps when stuck.
        """
        if self._train.size > 1 or self._helped >= position.round or self._recorder.is_saving:
            return
        if any(_is_blocked(peer.heartbeat, position.round) for peer in self._session.watch.heartbeats.values()):
            self._helped = position.round
            self._help(position, lambda: self._lacks(position))

    def wait_for_others(self, position: LogPosition) -> None:
        """At the end of the run: wait until its last checkpoint exists, or all live replicas are at the end.

        The first of the staying replicas writes it once a blocked replica needs it, or if all replicas that are
        behind are silent. Returns at a stop request, and at the latest after the time of an exchange.
        """
        self._help(position, lambda: self._must_save_last(position))

    def _must_save_last(self, position: LogPosition) -> bool:
        """Wait. True: the last checkpoint is needed, and no other replica will write it."""
        clock, policy, stop = self._session.clock, self._session.policy, self._session.stop
        since = clock.now()
        while self._lacks(position) and not stop.is_set():
            peers = self._session.watch.refresh()
            behind = [
                peer
                for peer in peers.values()
                if peer.heartbeat.round < position.round and peer.heartbeat.phase != "finished"
            ]
            if not behind:
                return False
            now = clock.now()
            # Its author may still be following the log to here, or be writing it.
            alone = now - since >= policy.stale_s and not any(self._is_present(peer, now) for peer in behind)
            is_needed = any(_is_blocked(peer.heartbeat, position.round) for peer in behind)
            if (alone or is_needed) and not self._recorder.is_saving:
                staying = {
                    slot
                    for slot, peer in peers.items()
                    if peer.heartbeat.round >= position.round and self._is_present(peer, now)
                }
                if self._session.presence.slot == min(staying | {self._session.presence.slot}, key=slot_order):
                    return True
            if now - since >= policy.deadline_s:
                return not self._recorder.is_saving
            clock.pause(self._session.poll_every_s, stop)
        return False

    def _is_present(self, peer: ObservedHeartbeat, now: float) -> bool:
        """The peer is alive and has not left."""
        heard = max(peer.changed_at, self._session.presence.steady_since)
        return peer.heartbeat.phase in _PRESENT and now - heard < self._session.policy.stale_s

    def _lacks(self, position: LogPosition) -> bool:
        """No checkpoint of this position exists, and this replica's state is known to be right."""
        return self._recorder.is_sound and position.round not in self._recorder.complete(self._session.log.store)

    def _help(self, position: LogPosition, must_help: Callable[[], bool]) -> None:
        if not self._trainer.fragments or position.round == 0:
            return
        try:
            if self._train.broadcast_from_rank0("look for replicas behind", must_help):
                self._recorder.save_now(position)
        except (Retryable, Invalid) as error:  # it is tried again after the next round that fails
            fields = {"round": position.round, "error": str(error)}
            emit("checkpoint_failed", fields, level=logging.WARNING, error=error)


def _is_blocked(peer: Heartbeat, round_number: int) -> bool:
    """The peer cannot follow a closed round before `round_number`."""
    abstains = peer.abstains is not None and peer.abstains.round == peer.round
    return abstains and peer.round < round_number and peer.phase == "joining"
