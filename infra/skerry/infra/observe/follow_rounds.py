"""Follows the closed rounds of a run: reads each of their records once, the newest round first. Never writes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from skerry.infra.observe.history import fill_in_absent
from skerry.infra.observe.pace_of_recent_rounds import RECENT
from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.infra.observe.run_totals import RunTotals
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import list_closed
from skerry.runtime.log.records import Commit, Contribution, Decision, Receipt
from skerry.runtime.log.summarize_round import RoundRecords, summarize_round
from skerry.runtime.store.parallel import run_parallel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from skerry.runtime.log.run_record import Run
    from skerry.runtime.log.summarize_round import RoundHistory
    from skerry.runtime.store import Entry, Store

R = TypeVar("R", Contribution, Decision, Receipt)

# Receipts trail the head by a round or two, after a restart by more: so many rounds are open for further records. With
# the whole history read before, fewer, because their records are read again.
OPEN_ROUNDS: Final = 8
REREAD_ROUNDS: Final = 2


@dataclass
class _Open:
    """A closed round whose records are being read, by key; None for a record that does not parse or is of another run.

    wanted: keys of contributions and receipts to be read.
    """

    closed_at: float | None
    decisions: dict[str, Decision | None] = field(default_factory=dict[str, Decision | None])
    contributions: dict[str, Contribution | None] = field(default_factory=dict[str, Contribution | None])
    receipts: dict[str, Receipt | None] = field(default_factory=dict[str, Receipt | None])
    wanted: dict[str, type[Contribution | Receipt]] = field(default_factory=dict[str, type[Contribution | Receipt]])


class RoundFollower:
    """The closed rounds of one run. Not thread-safe."""

    def __init__(
        self, store: Store, run: Run, rounds: Sequence[RoundHistory] = (), reread: int = REREAD_ROUNDS
    ) -> None:
        """rounds: known before, all of the run until then, each with all replicas. reread: so many of the last ones."""
        self._store = store
        self._run = run
        self._settings = RunSettings(first=run)
        self.last_commit: Commit | None = None
        self._totals = RunTotals()
        self._final: list[RoundHistory] = []
        self._open: dict[int, _Open] = {}
        self._listed = 0
        self._settings_in_use: str | None = None
        known = rounds[: max(0, len(rounds) - reread)]
        for item in known:
            self._finish(item)
        self.closed = rounds[len(known)].round if len(known) < len(rounds) else known[-1].round + 1 if known else 0

    @property
    def rounds(self) -> tuple[RoundHistory, ...]:
        """The last closed rounds, RECENT and some more, each with all replicas of the run."""
        return (*self._final, *self._summaries())

    @property
    def totals(self) -> RunTotals:
        """The totals of all known rounds."""
        return self._totals.plus(self._summaries())

    @property
    def receipts(self) -> list[Receipt]:
        """The receipts of the open rounds."""
        return [receipt for item in self._open.values() for receipt in item.receipts.values() if receipt is not None]

    @property
    def due(self) -> int:
        """The number of records of open rounds that are not read yet."""
        return sum(len(item.wanted) for item in self._open.values())

    @property
    def settled(self) -> int:
        """All records of the rounds before this one are read; their receipts were listed after they had closed."""
        return min([self._listed, *(number for number, item in self._open.items() if item.wanted)])

    def lacks_receipts(self, closed: int) -> bool:
        """True if receipts were not listed since `closed` rounds are known as closed."""
        return self._listed < closed

    def has_other_settings(self, settings: RunSettings) -> bool:
        """True if the newest decision names settings that are not among these."""
        return self._settings_in_use is not None and self._settings_in_use not in settings.digests

    def look(self, settings: RunSettings) -> int:
        """List the commits, and read the newest one and the decisions of new ones. Returns the number of reads.

        settings: the newest, which name the slots of each round.
        The first look at a run of unknown history takes in its last rounds only. Raises Corrupt for a damaged commit.
        """
        self._settings = settings
        for number in sorted(number for number in self._open if number < self.closed - OPEN_ROUNDS):
            [item] = self._filled([self._summary(number)])
            self._finish(item)
            del self._open[number]
        used, listed = 0, list_closed(self._store, self.closed)
        if listed:
            used = self._take_commits(listed[-1].key, listed)
        elif self.closed and self.last_commit is None:
            used = self._take_commits(keys.commit(self.closed - 1), ())
        return used

    def list_receipts(self, closed: int) -> None:
        """List the receipts of open rounds. closed: so many rounds were known as closed before this look."""
        self._listed = closed
        if not self._open:
            return
        for entry in self._store.list(keys.RECEIPTS, after=keys.receipts_prefix(min(self._open))):
            try:
                item = self._open.get(keys.round_of(entry.key))
            except Invalid:  # a foreign object
                continue
            if item is not None and entry.key not in item.receipts:
                item.wanted[entry.key] = Receipt

    def read(self, limit: int | None) -> int:
        """Read contributions and receipts, at most `limit`, those of the newest round first. Returns how many."""
        due = [
            (item, key, kind)
            for _, item in sorted(self._open.items(), reverse=True)
            for key, kind in item.wanted.items()
        ][:limit]
        bodies = run_parallel(self._store, len(due), lambda index: self._store.read(due[index][1]))
        for (item, key, kind), data in zip(due, bodies, strict=True):
            del item.wanted[key]
            if kind is Contribution:
                item.contributions[key] = self._parsed(Contribution, key, data)
            else:
                item.receipts[key] = self._parsed(Receipt, key, data)
        return len(due)

    def _take_commits(self, last: str, listed: Sequence[Entry]) -> int:
        """last: the key of the last commit. listed: the new ones. Returns the number of reads."""
        data = self._store.read(last)
        if data is None:
            return 1
        self.last_commit = Commit.parse(data, last)
        if not listed:
            return 1
        before, self.closed = self.closed, self.last_commit.round + 1
        # After a long pause only the last rounds are shown.
        first = max(before, self.closed - (RECENT if before else OPEN_ROUNDS))
        for entry in listed:
            if (number := keys.round_of(entry.key)) >= first:
                self._open[number] = _Open(closed_at=entry.modified or None)
        return 1 + self._read_decisions(self.last_commit, first)

    def _read_decisions(self, commit: Commit, first: int) -> int:
        """Read the decisions of the rounds from `first` to the commit, whose own keys follow from it."""
        if first == commit.round:
            decided = [(first, keys.decision(first, number)) for number in range(len(commit.exchanges))]
        else:
            decided = self._list_decisions(first)
        bodies = run_parallel(self._store, len(decided), lambda index: self._store.read(decided[index][1]))
        for (number, key), data in zip(decided, bodies, strict=True):
            decision = self._parsed(Decision, key, data)
            self._open[number].decisions[key] = decision
            if decision is not None:
                self._settings_in_use = decision.settings
                members = (keys.contribution(number, decision.exchange, share.slot) for share in decision.members)
                self._open[number].wanted |= dict.fromkeys(members, Contribution)
        return len(decided)

    def _list_decisions(self, first: int) -> list[tuple[int, str]]:
        decided: list[tuple[int, str]] = []
        for entry in self._store.list(keys.EXCHANGES, after=keys.start_after(keys.EXCHANGES, first)):
            with suppress(Invalid):  # a foreign object
                if (number := keys.round_of(entry.key)) in self._open and first <= number < self.closed:
                    decided.append((number, entry.key))
        return decided

    def _parsed(self, kind: type[R], key: str, data: memoryview | None) -> R | None:
        try:
            record = None if data is None else kind.parse(data, key)
        except Corrupt:
            return None
        return record if record is not None and record.run == self._run.nonce else None

    def _summary(self, number: int) -> RoundHistory:
        item = self._open[number]
        records = RoundRecords(
            decisions=[decision for decision in item.decisions.values() if decision is not None],
            contributions=[contribution for contribution in item.contributions.values() if contribution is not None],
            receipts=[receipt for receipt in item.receipts.values() if receipt is not None],
        )
        return summarize_round(number, item.closed_at, records)

    def _summaries(self) -> tuple[RoundHistory, ...]:
        return self._filled(map(self._summary, sorted(self._open)))

    def _filled(self, rounds: Iterable[RoundHistory]) -> tuple[RoundHistory, ...]:
        """The rounds with all replicas of the run."""
        known = {replica.slot for replica in self._final[-1].replicas} if self._final else set[str]()
        return fill_in_absent(self._settings, rounds, known)

    def _finish(self, item: RoundHistory) -> None:
        self._totals.add(item)
        self._final = [*self._final[-RECENT:], item]
