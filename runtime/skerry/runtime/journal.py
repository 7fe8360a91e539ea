"""Reads and writes the log of one run: typed records, their digests, and the checks that stop a replica.

A record of another run (its nonce differs) means two runs share a prefix: Diverged, at once. Never decides anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from skerry.runtime import keys
from skerry.runtime.errors import Corrupt, Diverged, Invalid
from skerry.runtime.records import (
    GENESIS,
    MAX_RECORD_BYTES,
    Commit,
    Contribution,
    Decision,
    Member,
    Outcome,
    Receipt,
    Record,
    Run,
    digest_of,
)
from skerry.runtime.store import Span

if TYPE_CHECKING:
    from skerry.runtime.store import Store

LogRecord = Member | Contribution | Decision | Commit | Receipt | Outcome
R = TypeVar("R", bound=Record)
L = TypeVar("L", bound=LogRecord)

# One byte more than a record may have: what is longer is refused by its length, and never held whole.
_WHOLE = Span(0, MAX_RECORD_BYTES + 1)


class Sealed(NamedTuple, Generic[R]):
    """A stored record and the sha256 of its stored bytes: what other records name it by."""

    record: R
    digest: str


def open_run(store: Store, proposed: Run) -> Run:
    """The run of this prefix: `proposed` if this call is the first, else what stands there already."""
    if (found := read_run(store)) is not None:
        return found
    if store.create(keys.RUN, proposed.to_bytes()):
        return proposed
    found = read_run(store)
    if found is None:
        raise Corrupt(f"run record vanished while it was being created: {store.uri}/{keys.RUN}")
    return found


def read_run(store: Store) -> Run | None:
    """run.json, or None where no run was started."""
    data = read_bytes(store, keys.RUN)
    return None if data is None else Run.parse(data, keys.RUN)


def read_bytes(store: Store, key: str) -> memoryview | None:
    """The bytes of a record, or as many of a longer object as `parse` needs to refuse it; None if there is none."""
    return store.read(key, _WHOLE)


class Journal:
    """The log of one run. Thread-safe as its store is."""

    def __init__(self, store: Store, run: Run) -> None:
        self.store = store
        self.run = run

    def contribution(self, round_number: int, exchange: int, slot: str) -> Sealed[Contribution] | None:
        """What `slot` offers to an exchange."""
        return self._read(Contribution, keys.contribution(round_number, exchange, slot))

    def decision(self, round_number: int, exchange: int) -> Sealed[Decision] | None:
        """The decision of an exchange, once there is one."""
        return self._read(Decision, keys.decision(round_number, exchange))

    def commit(self, round_number: int) -> Sealed[Commit] | None:
        """What closed a round, once something did."""
        return self._read(Commit, keys.commit(round_number))

    def create(self, key: str, record: L) -> Sealed[L]:
        """Write `record` if `key` is absent, and return what stands there now: mine or theirs.

        The reply of a conditional put is never trusted for this: the store wrapper reads back whatever is in doubt,
        and a loser reads the winner here.
        """
        data = record.to_bytes()
        if self.store.create(key, data):
            return Sealed(record, digest_of(data))
        found = self._read(type(record), key)
        if found is None:
            raise Corrupt(f"record vanished while the run lives: key={key}; was a lifecycle rule set on records?")
        return found

    def head(self, known: int) -> int:
        """The first round not yet closed. known: a round at or below it, to start looking from.

        An object among the commits whose name is none of ours is passed over.
        """
        listed = self.store.list(keys.COMMITS, after=keys.commit(known - 1) if known else None)
        head = known
        for entry in listed:
            try:
                closed = keys.round_of(entry.key)
            except Invalid:
                continue
            # A listing may miss a key that is there; only a GET proves that a round was never closed.
            while head < closed and self.commit(head) is not None:
                head += 1
            if closed != head:
                raise Diverged(f"the log has a gap: round {head} is not closed, but {entry.key} exists")
            head += 1
        return head

    def previous(self, round_number: int) -> str:
        """Digest of the commit before a round: the base of everything that is offered to it."""
        last = self.last_commit(round_number)
        return GENESIS if last is None else last.digest

    def last_commit(self, closed: int) -> Sealed[Commit] | None:
        """What closed the last of so many rounds; None if they are none."""
        if closed == 0:
            return None
        last = self.commit(closed - 1)
        if last is None:
            raise Diverged(f"the log has a gap: round {closed - 1} was closed and its record is gone")
        return last

    def _read(self, kind: type[L], key: str) -> Sealed[L] | None:
        data = read_bytes(self.store, key)
        if data is None:
            return None
        record = kind.parse(data, key)
        if record.run != self.run.nonce:
            raise Diverged(
                f"two runs share this prefix: {self.store.uri}/{key} is of run {record.run}, "
                f"this replica of {self.run.nonce}; give every run its own prefix"
            )
        return Sealed(record, digest_of(data))
