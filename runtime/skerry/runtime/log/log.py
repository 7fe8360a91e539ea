"""Reads and writes the log of one run: typed records and their digests. Makes no decisions.

A record of another run (with another nonce) means that two runs share a prefix: Diverged, at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from skerry.runtime.errors import Corrupt, Diverged, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.find_moved_run import check_lives_here
from skerry.runtime.log.recent_records_cache import RecentRecords
from skerry.runtime.log.records import (
    GENESIS,
    MAX_RECORD_BYTES,
    Commit,
    Contribution,
    Decision,
    Member,
    Outcome,
    Receipt,
    Record,
    digest_of,
)
from skerry.runtime.log.run_record import Run, Settings, is_over
from skerry.runtime.store import Span
from skerry.runtime.store.retrying import read_existing

if TYPE_CHECKING:
    from skerry.runtime.store import Store

LogRecord = Member | Contribution | Decision | Commit | Receipt | Outcome | Settings
R = TypeVar("R", bound=Record)
L = TypeVar("L", bound=LogRecord)

# One byte more than a record may have: a longer object is refused by its length and never read whole.
_RECORD_SPAN = Span(0, MAX_RECORD_BYTES + 1)


class Stored(NamedTuple, Generic[R]):
    """A stored record and the sha256 of its bytes, by which other records refer to it."""

    record: R
    digest: str


def open_run(store: Store, proposed: Run) -> Run:
    """The run of this prefix: the existing one, or `proposed`, which is then created.

    Raises Moved and Invalid as `check_lives_here`.
    """
    if (existing := read_run(store)) is not None:
        check_lives_here(store, existing)
        return existing
    if store.create(keys.RUN, proposed.to_bytes()):
        return proposed
    existing = read_run(store)
    if existing is None:
        raise Corrupt(f"run record disappeared while it was created: {store.uri}/{keys.RUN}")
    return existing


def read_run(store: Store) -> Run | None:
    """run.json; None if no run was started."""
    data = read_record_bytes(store, keys.RUN)
    return None if data is None else Run.parse(data, keys.RUN)


def read_record_bytes(store: Store, key: str) -> memoryview | None:
    """The bytes of a record, or of a longer object as many as `parse` needs to refuse it; None if it is absent."""
    return store.read(key, _RECORD_SPAN)


class RunLog:
    """The log of one run. Thread-safe if its store is. run: with the end that the newest known settings give it.

    slots: those by which the replica is numbered in this round; None while only its launcher numbers it. recent: the
    bytes of the records of rounds that were read or written through it.
    """

    def __init__(self, store: Store, run: Run) -> None:
        self.store = store
        self.run = run
        self.slots: tuple[str, ...] | None = None
        self.recent = RecentRecords()
        # Ends that the run has had, and the round after which each was reached.
        self._ends: dict[tuple[int | None, float | None], int | None] = {(run.rounds, run.work): None}

    def read_contribution(
        self, round_number: int, exchange: int, slot: str, *, exists: bool = False
    ) -> Stored[Contribution] | None:
        """The contribution of `slot` to an exchange. exists: another record proves it; see `Retrying.read_existing`."""
        return self._read(Contribution, keys.contribution(round_number, exchange, slot), exists=exists)

    def read_decision(self, round_number: int, exchange: int) -> Stored[Decision] | None:
        """The decision of an exchange."""
        return self._read(Decision, keys.decision(round_number, exchange))

    def read_commit(self, round_number: int, *, exists: bool = False) -> Stored[Commit] | None:
        """The commit of a round. exists: another record proves it; see `Retrying.read_existing`."""
        return self._read(Commit, keys.commit(round_number), exists=exists)

    def read_settings(self, number: int, *, exists: bool = False) -> Stored[Settings] | None:
        """The settings of a number. exists: another record proves it; see `Retrying.read_existing`."""
        return self._read(Settings, keys.settings(number), exists=exists)

    def set_end(self, rounds: int | None, work: float | None) -> None:
        """The run ends after so many rounds, and so much work: by settings that were stored after its start."""
        if (self.run.rounds, self.run.work) != (rounds, work):
            self.run = self.run.model_copy(update={"rounds": rounds, "work": work})
            self._ends.setdefault((rounds, work), None)

    def is_end(self, closed: int, work: float) -> bool:
        """True if the run ends after `closed` rounds with this work, or once did: others may have left there."""
        for end, reached in list(self._ends.items()):
            if reached is None and is_over(*end, closed, work):
                self._ends[end] = closed
        return self.run.is_over(closed, work) or closed in self._ends.values()

    def create(self, key: str, record: L) -> Stored[L]:
        """Writes `record` if `key` is absent, and returns the stored record: this one or another writer's.

        Needs a store whose `create` is reliable (`skerry.runtime.store.retrying`).
        """
        data = record.to_bytes()
        if self.store.create(key, data):
            self.recent.keep(key, data)
            return Stored(record, digest_of(data))
        existing = self._read(type(record), key)
        if existing is None:
            raise Corrupt(f"record disappeared during the run: key={key}; check the bucket for lifecycle rules")
        return existing

    def find_head(self, known: int) -> int:
        """The first round that is not closed. known: a round at or below it, at which the search begins.

        Ignores objects among the commits with names that are no keys of commits.
        """
        entries = self.store.list(keys.COMMITS, after=keys.commit(known - 1) if known else None)
        head = known
        for entry in entries:
            try:
                closed = keys.round_of(entry.key)
            except Invalid:
                continue
            # A listing may miss an existing key; only a GET proves that a round was not closed.
            while head < closed and self.read_commit(head, exists=True) is not None:
                head += 1
            if closed != head:
                raise Diverged(f"the log has a gap: round {head} is not closed, but {entry.key} exists")
            head += 1
        return head

    def read_previous_digest(self, round_number: int) -> str:
        """The digest of the commit before a round, which all contributions to the round name as their base."""
        last = self.read_last_commit(round_number)
        return GENESIS if last is None else last.digest

    def read_last_commit(self, closed: int) -> Stored[Commit] | None:
        """The commit of the last of `closed` rounds; None if `closed` is 0."""
        if closed == 0:
            return None
        last = self.read_commit(closed - 1, exists=True)
        if last is None:
            raise Diverged(f"the log has a gap: the commit of round {closed - 1} disappeared")
        return last

    def _read(self, kind: type[L], key: str, *, exists: bool = False) -> Stored[L] | None:
        data = read_existing(self.store, key, _RECORD_SPAN) if exists else read_record_bytes(self.store, key)
        if data is None:
            return None
        record = kind.parse(data, key)
        if record.run != self.run.nonce:
            raise Diverged(
                f"two runs share this prefix: {self.store.uri}/{key} has run={record.run}, "
                f"this replica run={self.run.nonce}; give every run its own prefix"
            )
        self.recent.keep(key, data)
        return Stored(record, digest_of(data))
