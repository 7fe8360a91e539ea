"""Writes a roll-up after every hundred rounds, in rotation, from the records of these rounds alone.

The member whose turn it is looks at a few rounds after the last one, and writes when all receipts exist, or after so
many later rounds without them. The writer of the next roll-up also writes the one before, if that is missing. Runs in
the background with a store of its own: its failures are logged, nothing is retried, and no round depends on it.
Decisions 0021 and 0057. Needs no torch.
"""

from __future__ import annotations

import logging
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import RoundListing, list_roll_ups
from skerry.runtime.log.recorded_starts import read_starts_since
from skerry.runtime.log.roll_up import MAX_BYTES, ROUNDS, RollUp
from skerry.runtime.log.summarize_round import RecordedRound
from skerry.runtime.store.retrying import apart
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor, Future

    from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
    from skerry.runtime.clock import Clock
    from skerry.runtime.log.log import RunLog

T = TypeVar("T")

# One call.
_CALL_S: Final = 10.0
# Less than a stop may take, whatever is left to read.
_CLOSE_S: Final = 15.0
_END_POLL_S: Final = 0.5
# Receipts are written in the background, but within so many rounds, or never: their writer was killed.
_RECEIPTS_TRAIL: Final = 4


@dataclass(frozen=True, kw_only=True)
class RollUpSettings:
    """Times at which roll-ups are written.

    rounds: of each. looks: so many rounds after its last one, the writer looks if it can be written; from the last look
    on without missing receipts. end_wait_s: for receipts, after the end of the run.
    """

    rounds: int = ROUNDS
    looks: tuple[int, ...] = (2, 8, 32, 64)
    end_wait_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """The look at one roll-up that is due. stage: how many looks are due by now. closed: closed rounds."""

    rounds: range
    stage: int
    closed: int
    at_end: bool


def due_look(closed: int, settings: RollUpSettings, *, is_over: bool) -> Look | None:
    """The look that is due after so many closed rounds, at the newest roll-up; None if there is none. Pure.

    A run with fewer rounds than one roll-up has needs none.
    """
    if is_over and closed >= settings.rounds:
        first = (closed - 1) // settings.rounds * settings.rounds
        return Look(rounds=range(first, closed), stage=0, closed=closed, at_end=True)
    end = (closed - settings.looks[0]) // settings.rounds * settings.rounds
    if end <= 0:
        return None
    stage = sum(look <= closed - end for look in settings.looks)
    return Look(rounds=range(end - settings.rounds, end), stage=stage, closed=closed, at_end=False)


class RollUpWriter:
    """Writes roll-ups of one replica. Call it from the thread that trains, on rank 0."""

    def __init__(self, log: RunLog, slot: str, clock: Clock, pool: Executor, settings: RollUpSettings) -> None:
        """pool: where it reads and writes, one roll-up at a time."""
        self._log = log
        self._slot = slot
        self._clock = clock
        self._pool = pool
        self._settings = settings
        # Apart: a role without the right to write roll-ups must not look like an outage of the store.
        self._store = apart(log.store, _CALL_S)
        self._last: tuple[range, int] | None = None
        self._end: Future[None] | None = None
        self._closing = False

    def note_closed(self, position: LogPosition) -> None:
        """A round was closed, and this replica is at the head of the log. Sends no request itself."""
        is_over = self._log.run.is_over(position.round, position.work)
        look = due_look(position.round, self._settings, is_over=is_over)
        if look is None or (look.rounds, look.stage) == self._last:
            return
        if self._last is None or self._last[0] != look.rounds:
            self._pool.submit(self._log.recent.forget, look.rounds.start)
        self._last = look.rounds, look.stage
        number = look.rounds.start // self._settings.rounds
        if position.members and position.members[number % len(position.members)] == self._slot:
            job = self._pool.submit(self._look, look, position.members)
            self._end = job if look.at_end else None

    def close(self, *, wait: bool) -> None:
        """Stop the background thread. wait: for the last roll-up of the run, some seconds; another one is given up."""
        self._closing = True
        if wait and self._end is not None:
            with suppress(CancelledError, TimeoutError):
                self._end.exception(_CLOSE_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look(self, look: Look, members: Sequence[str]) -> None:
        """Write this roll-up and the one before, each as if it were the only one."""
        missing = self._or_report(look.rounds, lambda: self._missing(look)) or []
        for rounds in missing:
            self._or_report(rounds, partial(self._write_if_ready, look, rounds, members))

    @staticmethod
    def _or_report(rounds: range, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except Exception as error:  # noqa: BLE001  a thread's entry: readers then read the single records
            fields = {"first": rounds.start, "last": rounds.stop - 1, "error": str(error)}
            emit("roll_up_failed", fields, level=logging.WARNING, error=error)
            return None

    def _missing(self, look: Look) -> list[range]:
        """The rounds of the roll-up before this one, and of this one, where they do not exist. One listing."""
        before = look.rounds.start - self._settings.rounds
        stored = list_roll_ups(self._store, max(0, before))
        return [
            wanted
            for wanted in (range(before, look.rounds.start), look.rounds)
            if wanted.start >= 0
            and not any(rounds.start <= wanted.start and wanted.stop <= rounds.stop for rounds in stored)
        ]

    def _write_if_ready(self, look: Look, rounds: range, members: Sequence[str]) -> None:
        until = self._clock.now() + (self._settings.end_wait_s if look.at_end else 0.0)
        listing = RoundListing(self._store, self._log.run.nonce, rounds)
        while look.closed - rounds.stop < self._settings.looks[-1] and not self._has_receipts(listing, look, members):
            if self._clock.now() >= until or (self._closing and not look.at_end):
                return
            self._clock.pause(_END_POLL_S)
            listing.list_receipts()
        self._write(listing)

    def _has_receipts(self, listing: RoundListing, look: Look, members: Sequence[str]) -> bool:
        """True if every slot of the run has a receipt of every round; at the end, if none will be written any more."""
        receipts = listing.receipts
        if look.at_end:
            newest = listing.rounds[-_RECEIPTS_TRAIL:]
            return all(listing.contributors[number] & set(members) <= receipts[number] for number in newest)
        slots = set(self._log.run.slots).union(*receipts.values())
        return all(slots <= receipts[number] for number in listing.rounds)

    def _write(self, listing: RoundListing) -> None:
        rounds = listing.rounds
        singles = list(listing.read(self._log.recent))
        unusable = [single.number for single in singles if not single.is_complete]
        if unusable or len(singles) != len(rounds):
            raise Corrupt(f"records of rounds are missing or damaged: rounds={len(rounds)} unusable={unusable[:8]}")
        recorded = [RecordedRound.of(single.number, single.closed_at, single.records) for single in singles]
        # By one clock, so that each start or end is in the roll-up of the rounds in which it was recorded.
        since = singles[0].closed_at if rounds.start else 0.0
        starts = None if since is None else read_starts_since(self._store, self._log.run.nonce, since)
        roll_up = RollUp.of(self._log.run.nonce, self._slot, singles[-1].commit or "", recorded, starts)
        data = roll_up.to_stored()
        if len(data) > MAX_BYTES:
            raise Invalid(f"roll-up too large: bytes={len(data)} limit={MAX_BYTES}")
        if self._store.create(keys.roll_up(roll_up.first, roll_up.last), data):
            emit("rolled_up", {"slot": self._slot, "first": roll_up.first, "last": roll_up.last, "bytes": len(data)})
