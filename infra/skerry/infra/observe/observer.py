"""Reads the log of a run repeatedly, immutable records only once, and returns its current view. Never writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.observe.build_view import SILENT_S, LogSnapshot, build_view
from skerry.infra.observe.follow_rounds import REREAD_ROUNDS, RoundFollower
from skerry.infra.observe.read_heartbeats import HeartbeatReader
from skerry.infra.observe.read_starts import StartReader, seconds_since_epoch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.observe.history import RunHistory, Start
    from skerry.infra.observe.read_changed_settings import RunSettings
    from skerry.infra.observe.run_view import RunView
    from skerry.runtime.clock import Clock
    from skerry.runtime.log.records import Heartbeat
    from skerry.runtime.log.summarize_round import RoundHistory
    from skerry.runtime.store import Store

# Records that a sparing look reads, after the first: a heartbeat of each replica and a few more. Small runs may read
# more, because their rounds may be short, and a few reads cost little.
_MIN_READS: Final = 32
_MORE_READS: Final = 4
# The part of these reads that is left for the records of rounds, however many heartbeats have changed.
_RECORDS_PART: Final = 4
# A sparing observer asks for what no heartbeat announces this often.
_SELDOM_S: Final = 60.0
# An end is recorded within this time after the last heartbeat. One that no heartbeat announces is looked for after two
# times the longest time between two heartbeats.
_END_RECORDED_S: Final = 30.0
_SILENT_END_S: Final = 10.0
_ENDED: Final = ("finished", "left", "failed")


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
        sparing: bool = False,
    ) -> None:
        """history: of the run until now. Without it the first look takes in the last rounds and starts only.

        reread: so many of the last rounds of the history are read again, because receipts follow their round.
        sparing: a look asks only for what the heartbeats announce, and once a minute for the rest; a run that closes
        many records at once is read over several looks. Else every look asks for all, and reads all.
        """
        run = settings.first
        self._store = store
        self._run = run
        self._settings = settings
        self._clock = clock
        self._sparing = sparing
        self._rounds = RoundFollower(store, run, () if history is None else history.rounds, reread)
        self._starts = StartReader(store, run.nonce, () if history is None else history.starts)
        self._heartbeats = HeartbeatReader(store, run.nonce, clock, history)
        self._wall_s = (seconds_since_epoch(clock.utc_text()) or 0.0) - clock.now()
        self._asked_at: float | None = None

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that the run expects, as of the last view."""
        return self._settings.now.slots

    @property
    def slots_at_start(self) -> tuple[str, ...]:
        """The slots of run.json."""
        return self._run.slots

    @property
    def closed(self) -> int:
        """The closed rounds, as of the last view."""
        return self._rounds.closed

    @property
    def settled(self) -> int:
        """See RoundFollower.settled."""
        return self._rounds.settled

    @property
    def starts(self) -> tuple[Start, ...]:
        """The known starts in slot order."""
        return self._starts.starts

    @property
    def heartbeats(self) -> Mapping[str, Heartbeat]:
        """The last heartbeat of each slot."""
        return self._heartbeats.heartbeats

    def rounds(self, first: int, end: int) -> list[RoundHistory]:
        """The closed rounds from `first` to before `end`, each with all replicas; RECENT and some more at most."""
        return [item for item in self._rounds.rounds if first <= item.round < end]

    def view(self, patience_s: float = SILENT_S) -> RunView:
        """The current view. Replicas silent for `patience_s` and more are marked from the second call on.

        Lists the heartbeats, and reads those that changed. Then asks for new commits, receipts, starts, ends and
        settings, and reads each of their records once. Raises what the store raises, and Corrupt for a damaged commit;
        other damaged records are skipped, because a view must not fail while the run continues.
        """
        now, first = self._clock.now(), self._asked_at is None
        asks_all = self._asked_at is None or not self._sparing or now - self._asked_at >= _SELDOM_S
        closed = self._rounds.closed
        if asks_all or self._rounds.has_other_settings(self._settings):
            self._settings = self._settings.read_newer(self._store)
        slots = self._heartbeats.look()
        limit = None if first or not self._sparing else max(_MIN_READS, slots + _MORE_READS)
        if limit is None:
            self._heartbeats.read(None)
        else:
            limit -= self._heartbeats.read(limit - min(self._rounds.due, limit // _RECORDS_PART))
        used = 0
        if asks_all or any(beat.round > closed for beat in self._heartbeats.heartbeats.values()):
            self._settings = self._settings.read_begins(self._store)
            used += self._rounds.look(self._settings)
        if asks_all or self._rounds.lacks_receipts(closed):
            self._rounds.list_receipts(closed)
        if asks_all or self._has_unknown_starts():
            used += self._starts.look()
        self._rounds.read(None if limit is None else max(1, limit - used))
        self._asked_at = now if asks_all else self._asked_at
        return build_view(self._settings.now, self._store.uri, self._snapshot(patience_s))

    def _has_unknown_starts(self) -> bool:
        """True if a heartbeat is of a start that is not known, or if an end that is not known should be recorded."""
        known = {(start.slot, start.incarnation): start for start in self._starts.starts}
        silence = self._heartbeats.silence
        for slot, beat in self._heartbeats.heartbeats.items():
            start, silent_s = known.get((slot, beat.incarnation)), silence.get(slot, 0.0)
            if start is None:
                return True
            has_ended = beat.phase in _ENDED or silent_s > _SILENT_END_S
            if start.outcome is None and has_ended and silent_s < _END_RECORDED_S:
                return True
        return False

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
            settings=self._settings,
        )
