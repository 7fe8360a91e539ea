"""Reads and writes the log of one run: typed records and their digests. Makes no decisions.

A record of another run (with another nonce) means that two runs share a prefix: Diverged, at once. A commit counts only
if its predecessors are there; one that is not, and that no contributions back, is stray and ignored (decision 0050).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from skerry.runtime.errors import Corrupt, Diverged, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.find_moved_run import check_lives_here
from skerry.runtime.log.recent_records_cache import RecentRecords
from skerry.runtime.log.record_parsing import MAX_RECORD_BYTES, Record, digest_of
from skerry.runtime.log.records import GENESIS, Commit, Contribution, Decision, Member, Outcome, Receipt
from skerry.runtime.log.run_record import Run, Settings, is_over
from skerry.runtime.store import Span
from skerry.runtime.store.parallel import run_parallel
from skerry.runtime.store.retrying import read_existing
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store import Store

LogRecord = Member | Contribution | Decision | Commit | Receipt | Outcome | Settings
R = TypeVar("R", bound=Record)
L = TypeVar("L", bound=LogRecord)

# One byte more than a record may have: a longer object is refused by its length and never read whole.
_RECORD_SPAN = Span(0, MAX_RECORD_BYTES + 1)
STRAY_REMEDY: Final = "run `skerry doctor RUN`: it reports stray records, and --quarantine moves them away"
# Commits behind a gap that one look verifies: of a log that has lost a record, the first of them is backed.
_MOST_VERIFIED: Final = 8
# A folder is listed by reading the names of all commits in it. After each so many rounds one more look in between reads
# only the next commit's key, so that a look costs the same however long the log is (decision 0056).
_ROUNDS_FOR_A_READ: Final = 256


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
        # Rounds whose commits were there before these rounds. They stay stray when the head comes to them, unless they
        # are backed then: an operator has moved the stray one away meanwhile.
        self._stray: set[int] = set()
        self._reads_left = 0

    def read_contribution(
        self, round_number: int, exchange: int, slot: str, *, exists: bool = False
    ) -> Stored[Contribution] | None:
        """The contribution of `slot` to an exchange. exists: another record proves it; see `Retrying.read_existing`."""
        return self._read(Contribution, keys.contribution(round_number, exchange, slot), exists=exists)

    def read_decision(self, round_number: int, exchange: int, *, exists: bool = False) -> Stored[Decision] | None:
        """The decision of an exchange. exists: another record proves it; see `Retrying.read_existing`."""
        return self._read(Decision, keys.decision(round_number, exchange), exists=exists)

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

        Ignores objects among the commits with names that are no keys of commits, and stray commits, which it reports
        once. Raises Diverged if a commit is lost: one behind it is backed. In a long log most looks are one read while
        round `known` is open; the next listing shows what is behind it.
        """
        if self._reads_left and known not in self._stray and read_record_bytes(self.store, keys.commit(known)) is None:
            self._reads_left -= 1
            return known
        entries = self.store.list(keys.COMMITS, after=keys.commit(known - 1) if known else None)
        head = known
        beyond: list[int] = []
        for entry in entries:
            try:
                closed = keys.round_of(entry.key)
            except Invalid:
                continue
            # A listing may miss an existing key; only a GET proves that a round was not closed.
            while not beyond and closed not in self._stray and head < closed:
                if self.read_commit(head, exists=True) is None:
                    break
                head += 1
            if closed == head and (closed not in self._stray or self._is_backed_round(closed)):
                self._stray.discard(closed)
                head += 1
            else:
                beyond.append(closed)
        if new := [number for number in beyond if number not in self._stray]:
            self._check_stray(head, new)
        self._reads_left = head // _ROUNDS_FOR_A_READ
        return head

    def is_backed(self, commit: Commit) -> bool:
        """True if the log has the commit's decisions, and contributions of as many members as a decision needs.

        A sound replica commits a round after that. Costs a read of each decision and contribution.
        """
        # Of another run, or damaged: that does not back it either.
        with suppress(Corrupt, Diverged):
            return bool(commit.exchanges) and all(
                self._is_backed_exchange(commit, exchange) for exchange in range(len(commit.exchanges))
            )
        return False

    def check_backed(self, closed: int) -> Stored[Commit] | None:
        """The commit of the last of `closed` rounds; None if `closed` is 0. Raises Corrupt unless it is backed."""
        last = None if closed == 0 else self.read_commit(closed - 1, exists=True)
        if closed and (last is None or not self.is_backed(last.record)):
            raise Corrupt(
                f"checkpoint {keys.checkpoint_manifest(closed)} is stray: no contributions of "
                f"min_replicas={self.run.min_replicas} replicas have closed round {closed - 1}; {STRAY_REMEDY}; if a "
                "script asks for fewer (min_replica_size), it is sound"
            )
        return last

    def _is_backed_exchange(self, commit: Commit, exchange: int) -> bool:
        decision = self.read_decision(commit.round, exchange, exists=True)
        if decision is None or decision.digest != commit.exchanges[exchange]:
            return False
        members = decision.record.members
        if decision.record.base != commit.previous or not decision.record.has_quorum(self.run.min_replicas):
            return False

        def read(number: int) -> Stored[Contribution] | None:
            return self.read_contribution(commit.round, exchange, members[number].slot, exists=True)

        contributions = run_parallel(self.store, len(members), read, small=True)
        return all(
            stored is not None and (stored.digest, stored.record.base) == (share.contribution, commit.previous)
            for share, stored in zip(members, contributions, strict=True)
        )

    def _is_backed_round(self, number: int) -> bool:
        with suppress(Corrupt, Diverged):
            commit = self.read_commit(number)
            return commit is not None and self.is_backed(commit.record)
        return False

    def _check_stray(self, head: int, beyond: Sequence[int]) -> None:
        """Reports commits behind an open round. Raises Diverged if one of them is backed: the log has lost a record."""
        for number in beyond[:_MOST_VERIFIED]:
            if self._is_backed_round(number):
                raise Diverged(
                    f"the log has a gap: round {head} is not closed, but {keys.commit(number)} exists; run "
                    "`skerry doctor RUN --repair` to restore the record from a copy"
                )
        self._stray.update(beyond)
        fields = {"round": head, "objects": len(beyond), "first": keys.commit(beyond[0]), "next": STRAY_REMEDY}
        emit("stray_records", fields, level=logging.WARNING)

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
        try:
            record = kind.parse(data, key)
        except Corrupt as error:
            raise Corrupt(f"{error}; {STRAY_REMEDY}") if kind in {Decision, Commit} else error from error.__cause__
        if record.run != self.run.nonce:
            raise Diverged(
                f"two runs share this prefix: {self.store.uri}/{key} has run={record.run}, "
                f"this replica run={self.run.nonce}; give every run its own prefix"
            )
        self.recent.keep(key, data)
        return Stored(record, digest_of(data))
