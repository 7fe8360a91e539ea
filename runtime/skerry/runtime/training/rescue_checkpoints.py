"""A closed round that a replica cannot follow: what its members offered is damaged, or is gone.

Only who had read it before holds the state after it, and leads the others past it by a checkpoint out of turn. It is
waited for with a patience of its own; now and then the round is tried again, for somebody may have restored the object.
Who has come to the end of the run does not leave while it may be the only one to lead others there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from skerry.runtime import checkpoint
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Invalid, Retryable
from skerry.runtime.events import emit
from skerry.runtime.keys import slot_order
from skerry.runtime.records import Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.recording import Recorder, SharedState, Standing
    from skerry.runtime.records import Heartbeat
    from skerry.runtime.rounds import Peer
    from skerry.runtime.seat import Seat
    from skerry.runtime.store import Store

# What cannot be followed is downloaded again at every attempt; checkpoints are looked for meanwhile.
_ATTEMPTS = Backoff(first=0.2, cap=60.0)
_HERE = frozenset({"joining", "train", "sync"})


class _Way(Record):
    """How it goes on: by a checkpoint, by another attempt, or not at all."""

    jump: bool = False
    over: bool = False


class _Wanted(Record):
    """Somebody cannot come to where this replica stands without its checkpoint."""

    value: bool


class Impasse:
    """One closed round, from when it is found that it cannot be followed until a checkpoint leads past it."""

    def __init__(self, seat: Seat, round_number: int, patience_s: float | None) -> None:
        """patience_s: how long to wait from now on; None: for ever."""
        self._seat = seat
        self._round = round_number
        self._patience_s = patience_s
        self._since = seat.clock.now()
        self._attempts = 0
        self._cause: Exception | None = None
        self._passed = round_number

    def met(self, cause: Exception | None) -> None:
        """An attempt has failed. Tells the others: this slot abstains from a round that is over."""
        self._attempts += 1
        self._cause = cause
        self._seat.presence.abstain(self._round, f"cannot follow: {cause!r}")

    def leads_on(self, store: Store) -> bool:
        """Wait. True: there is a checkpoint beyond the round, not seen before; False: it is time for another attempt.

        store: to look at; an outage of it is waited out. The same on all ranks. Raises RuntimeError, with what is
        damaged, once patience is over.
        """
        self._seat.presence.enter("joining", round_number=self._round)  # those who can help look for it
        way = self._seat.group.line("train").first("wait for a checkpoint", lambda: self._way(store), _Way)
        if way.over:
            raise RuntimeError(
                f"round {self._round} is closed and cannot be followed, and no checkpoint beyond it came within "
                f"{self._patience_s:g} s: restore what is damaged, or start this replica again; last: {self._cause!r}"
            ) from self._cause
        return way.jump

    def _way(self, store: Store) -> _Way:
        clock, stop = self._seat.clock, self._seat.stop
        # Further ranks wait for the answer no longer than a few exchanges may take.
        again = clock.now() + min(_ATTEMPTS.delay(self._attempts, clock), self._seat.policy.deadline_s)
        looks = Backoff(first=store.profile.poll_first, cap=self._seat.look_every_s, factor=1.5)
        attempt = 0
        while True:
            newest = _newest(store)
            if newest > self._passed:
                self._passed = newest
                return _Way(jump=True)
            now = clock.now()
            if self._patience_s is not None and now - self._since >= self._patience_s:
                return _Way(over=True)
            if now >= again or stop.is_set():
                return _Way()
            clock.pause(min(again - now, looks.delay(attempt, clock)), stop)
            attempt += 1


class Guide:
    """Leads others past rounds that they cannot follow, from where this replica stands. DiLoCo only.

    stuck: a round could not be decided in time; the others may be unable to come, until the next boundary.
    """

    def __init__(self, seat: Seat, recorder: Recorder, state: SharedState) -> None:
        self.stuck = False
        self._seat = seat
        self._recorder = recorder
        self._state = state
        self._train = seat.group.line("train")
        self._helped = 0

    def help_those_behind(self, standing: Standing) -> None:
        """At a boundary, once if stuck: write a checkpoint if somebody alive is in an earlier round."""
        if not self.stuck:
            return
        self.stuck = False

        def is_behind(peer: Heartbeat) -> bool:
            return peer.round < standing.round and peer.phase in _HERE

        def look() -> _Wanted:
            peers = self._seat.watch.look().values()
            return _Wanted(value=any(is_behind(peer.heartbeat) for peer in peers) and self._lacks(standing))

        self._help(standing, look)

    def help_who_asks(self, standing: Standing) -> None:
        """While this replica waits in its own round: write a checkpoint for who abstains from one that is over. Once.

        Costs nothing while nobody asks: the exchange has looked at the heartbeats. What DiLoCo registers does not
        change before the round is closed. A replica of several ranks, which do not wait in step, helps when stuck.
        """
        if self._train.size > 1 or self._helped >= standing.round or self._recorder.is_saving:
            return
        if any(_asks(peer.heartbeat, standing.round) for peer in self._seat.watch.peers.values()):
            self._helped = standing.round
            self._help(standing, lambda: _Wanted(value=self._lacks(standing)))

    def see_off(self, standing: Standing) -> None:
        """At the end of the run: stay until its last checkpoint is there, or everybody has come as far.

        Writes it, as the first of those who stay, once somebody asks for it, or if nobody who lives is expected to.
        Returns at a stop request, and at the latest after the time of an exchange.
        """
        self._help(standing, lambda: _Wanted(value=self._is_left_to_me(standing)))

    def _is_left_to_me(self, standing: Standing) -> bool:
        """Wait. True: the last checkpoint is needed, and nobody else will write it."""
        clock, policy, stop = self._seat.clock, self._seat.policy, self._seat.stop
        since = clock.now()
        while self._lacks(standing) and not stop.is_set():
            peers = self._seat.watch.look()
            behind = [
                peer
                for peer in peers.values()
                if peer.heartbeat.round < standing.round and peer.heartbeat.phase != "finished"
            ]
            if not behind:
                return False
            now = clock.now()
            # Its author may be on its way here, or be writing it.
            alone = now - since >= policy.stale_s and not any(self._is_here(peer, now) for peer in behind)
            asked = any(_asks(peer.heartbeat, standing.round) for peer in behind)
            if (alone or asked) and not self._recorder.is_saving:
                staying = {
                    slot
                    for slot, peer in peers.items()
                    if peer.heartbeat.round >= standing.round and self._is_here(peer, now)
                }
                if self._seat.presence.slot == min(staying | {self._seat.presence.slot}, key=slot_order):
                    return True
            if now - since >= policy.deadline_s:
                return not self._recorder.is_saving
            clock.pause(self._seat.look_every_s, stop)
        return False

    def _is_here(self, peer: Peer, now: float) -> bool:
        """It lives, and has not said good-bye."""
        heard = max(peer.changed_at, self._seat.presence.steady_since)
        return peer.heartbeat.phase in _HERE and now - heard < self._seat.policy.stale_s

    def _lacks(self, standing: Standing) -> bool:
        """There is none of where this replica stands, and what it holds is right."""
        return self._recorder.is_sound and standing.round not in checkpoint.complete(self._seat.journal.store)

    def _help(self, standing: Standing, look: Callable[[], _Wanted]) -> None:
        if not self._state.has_fragments or standing.round == 0:
            return
        try:
            if self._train.first("who is behind", look, _Wanted).value:
                self._recorder.save_now(standing)
        except (Retryable, Invalid) as error:  # it is tried again after the next round that fails
            fields = {"round": standing.round, "error": str(error)}
            emit("checkpoint_failed", fields, level=logging.WARNING, error=error)


def _asks(peer: Heartbeat, round_number: int) -> bool:
    """It cannot follow a round that is over, on its way to `round_number`."""
    abstains = peer.abstains is not None and peer.abstains.round == peer.round
    return abstains and peer.round < round_number and peer.phase == "joining"


def _newest(store: Store) -> int:
    try:
        return next(iter(checkpoint.complete(store)), 0)
    except Retryable:
        return 0
