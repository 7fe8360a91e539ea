"""Reads the log of a run repeatedly, immutable records only once, and returns its current view. Never writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.observe.build_view import SILENT_S, LogSnapshot, build_view
from skerry.infra.observe.follow_rounds import REREAD_ROUNDS, RoundFollower
from skerry.infra.observe.read_heartbeats import HeartbeatReader
from skerry.infra.observe.read_starts import StartReader, seconds_since_epoch

if TYPE_CHECKING:
    from skerry.infra.observe.history import RunHistory
    from skerry.infra.observe.run_settings import RunSettings
    from skerry.infra.observe.run_view import RunView
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

# Reads of a look, after the first: a heartbeat of each replica and a few records. Small runs may read more, because
# their rounds may be short, and a few reads cost little.
_MIN_READS: Final = 32
_MORE_READS: Final = 4
# The part of these reads that is left for the records of rounds, however many heartbeats have changed.
_RECORDS_PART: Final = 4


class Observer:
    """Reads one run repeatedly. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        settings: RunSettings,
        clock: Clock,
        history: RunHistory | None = None,
        *,
        reread: int = REREAD_ROUNDS,
    ) -> None:
        """history: of the run until now. Without it the first look takes in the last rounds and starts only.

        reread: so many of the last rounds of the history are read again, because receipts follow their round.
        """
        run = settings.first
        self._store = store
        self._run = run
        self._settings = settings
        self._clock = clock
        self._rounds = RoundFollower(store, run, () if history is None else history.rounds, reread)
        self._starts = StartReader(store, run.nonce, () if history is None else history.starts)
        self._heartbeats = HeartbeatReader(store, run.nonce, clock, history)
        self._wall_s = (seconds_since_epoch(clock.utc_text()) or 0.0) - clock.now()
        self._first = True

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that the run expects, as of the last view."""
        return self._settings.now.slots

    def view(self, patience_s: float = SILENT_S) -> RunView:
        """The current view. Replicas silent for `patience_s` and more are marked from the second call on.

        Makes five or six listings. Reads new records and changed heartbeats: all in the first call, afterwards about
        one for each replica; the next call reads the rest. Raises what the store raises, and Corrupt for a damaged
        commit; other damaged records are skipped, because a view must not fail while the run continues.
        """
        self._settings = self._settings.read_newer(self._store).read_begins(self._store)
        used = self._rounds.look(self._settings) + self._starts.look()
        slots = self._heartbeats.look()
        limit = None
        if not self._first:
            limit = max(1, max(_MIN_READS, slots + _MORE_READS) - used)
            limit -= self._heartbeats.read(limit - min(self._rounds.due, limit // _RECORDS_PART))
        else:
            self._heartbeats.read(None)
        self._rounds.read(limit)
        self._first = False
        return build_view(self._settings.now, self._store.uri, self._snapshot(patience_s))

    def _snapshot(self, patience_s: float) -> LogSnapshot:
        return LogSnapshot(
            closed=self._rounds.closed,
            last_commit=self._rounds.last_commit,
            heartbeats=self._heartbeats.heartbeats,
            outcomes=self._starts.outcomes,
            receipts=self._rounds.receipts,
            silent_s=self._heartbeats.silence,
            patience_s=patience_s,
            now_at=self._wall_s + self._clock.now(),
            created_at=seconds_since_epoch(self._run.created),
            notices=self._heartbeats.notices(self._wall_s),
            rates=self._heartbeats.rates,
            rounds=self._rounds.rounds,
            totals=self._rounds.totals,
            starts=self._starts.starts,
        )
