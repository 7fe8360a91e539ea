"""Observes one undecided exchange for one replica: contributions, their payloads, and the other slots' heartbeats.

Reads with few requests and caches between two looks. Decides nothing: `quorum` does, from what is observed here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from skerry.runtime.errors import Corrupt, Diverged, Invalid
from skerry.runtime.log import keys
from skerry.runtime.protocol.quorum import WORKING, ExchangeState, Observation, ObservedContribution, Policy
from skerry.runtime.store import Span
from skerry.runtime.store.parallel import run_parallel
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.log.log import RunLog, Stored
    from skerry.runtime.log.records import Contribution
    from skerry.runtime.protocol.slot_claim_and_heartbeats import HeartbeatMonitor
    from skerry.runtime.store import Store

Inspect: TypeAlias = "Callable[[Contribution, int], str | None]"
"""Returns why a contribution with a valid record cannot be averaged; None if it can. May read from the store. Gets the
number of contributions that are inspected together, too."""


class ExchangeId(NamedTuple):
    """Identifies an exchange. base: digest of the commit it builds on."""

    round: int
    exchange: int
    base: str


class ExchangeView:
    """One replica's view of one exchange, read with few requests and cached between looks.

    contributions: usable ones, by slot. others_differ: a contribution to other tensors than this replica's was seen.
    taken: is called with each usable one. has_heartbeats: those of slots without a contribution were read since this
    exchange began.
    """

    # Every so many looks the contributions are listed even if no expected one is missing: an unknown slot may join. And
    # if more are missing than this: a listing costs as much as twelve reads on S3, and is one request.
    LIST_EVERY = 8

    def __init__(
        self,
        log: RunLog,
        monitor: HeartbeatMonitor,
        clock: Clock,
        policy: Policy,
        exchange_id: ExchangeId,
        index: str,
        heartbeat_poll_s: float,
    ) -> None:
        self._log = log
        self._monitor = monitor
        self._clock = clock
        self._policy = policy
        self._id = exchange_id
        self._index = index
        self._heartbeat_poll_s = heartbeat_poll_s
        self.contributions: dict[str, ObservedContribution] = {}
        self._refused: dict[str, str] = {}
        self._payload_checked: set[str] = set()
        self._payload_sizes: dict[str, int] = {}
        self._unread: set[str] = set()
        self.others_differ = False
        self.inspect: Inspect | None = None
        self.taken: Callable[[Contribution], None] | None = None
        self.codecs: Mapping[str, str] = {}
        self.steady_since: Callable[[], float] = lambda: 0.0
        self.has_heartbeats = False
        self._heartbeats_due = clock.now()
        self._looks = 0

    def add(self, stored: Stored[Contribution]) -> None:
        """Add a contribution that this replica has written or read itself. Before a proposal it is read again."""
        self._take(stored.record.slot, stored)
        self._unread.add(stored.record.slot)

    def observe(self, state: ExchangeState, *, needs_heartbeats: bool = False) -> Observation:
        """Look for missing contributions, and read the heartbeats of the other slots if they are due.

        A slot that may contribute costs one GET; now and then a listing finds slots that were unknown. Missing ones are
        read after their heartbeats: a replica that has ended by then has contributed before.
        needs_heartbeats: read them now, unless they were read in this exchange.
        """
        now = self._clock.now()
        if self._looks == 0:
            self._list()
            if self._others_watch(state):
                self._heartbeats_due = now + self._heartbeat_poll_s
        if now >= self._heartbeats_due or (needs_heartbeats and not self.has_heartbeats):
            self._monitor.refresh(unless=self.contributions.keys())
            self.has_heartbeats, self._heartbeats_due = True, now + self._heartbeat_poll_s
        missing = self._missing(state)
        if self._looks % self.LIST_EVERY == self.LIST_EVERY - 1 or len(missing) > self.LIST_EVERY:
            self._list()
        else:
            self._read(sorted(missing, key=keys.slot_order))
        self._looks += 1
        return Observation(
            contributions=self.contributions,
            refused=frozenset(self._refused),
            heartbeats=self._monitor.heartbeats,
            steady_since=self.steady_since(),
        )

    def _missing(self, state: ExchangeState) -> set[str]:
        """Slots that may contribute and are not seen to have."""
        slots = {state.me} | set(self._monitor.heartbeats) | self._policy.expected
        return slots - self.contributions.keys() - self._refused.keys()

    def _others_watch(self, state: ExchangeState) -> bool:
        """The first proposer reads the heartbeats of the missing slots, so this replica need not yet.

        Each of them was seen at work before. In an opening round, and while this replica abstains, they matter at once.
        """
        if state.opening or state.me not in self.contributions or self.leads(state.me):
            return False
        known = self._monitor.heartbeats
        return all(slot in known and known[slot].heartbeat.phase in WORKING for slot in self._missing(state))

    def leads(self, me: str) -> bool:
        """This slot is the first of those that have contributed: it is the first to propose."""
        return min(self.contributions, key=keys.slot_order, default=None) == me

    def confirm(self) -> bool:
        """Check before a proposal: no contribution is new, and every listed payload exists."""
        before = set(self.contributions)
        unread = sorted(self._unread & before)  # the store may hold other bytes than those that were written
        for slot in unread:
            del self.contributions[slot]
        self._read(unread)
        self._unread.clear()
        self._list()
        unchecked = [slot for slot in self.contributions if slot not in self._payload_checked]
        if sum(len(self.contributions[slot].contribution.parts) for slot in unchecked) > self.LIST_EVERY:
            listed = self._log.store.list(keys.payloads_prefix(self._id.round))
            self._payload_sizes = {entry.key: entry.size for entry in listed}
        self._check_payloads(unchecked)
        return set(self.contributions) == before

    def _list(self) -> None:
        unknown: list[str] = []
        for entry in self._log.store.list(keys.contributions_prefix(self._id.round, self._id.exchange)):
            try:
                slot = keys.slot_of(entry.key)
            except Invalid as error:  # not an object of skerry
                if entry.key not in self._refused:
                    self._refuse(entry.key, str(error))
                continue
            if slot not in self.contributions and slot not in self._refused:
                unknown.append(slot)
        self._read(unknown)

    def _read(self, slots: Sequence[str]) -> None:
        """Read these slots' contributions, several at once."""

        def read(number: int) -> Stored[Contribution] | str | None:
            try:
                return self._log.read_contribution(self._id.round, self._id.exchange, slots[number])
            except (Corrupt, Diverged) as error:  # Diverged: it is of another run, which excludes its slot and no other
                return str(error)

        for slot, stored in zip(slots, run_parallel(self._log.store, len(slots), read, small=True), strict=True):
            if isinstance(stored, str):
                self._refuse(slot, stored)
            elif stored is not None:
                self._take(slot, stored)

    def _take(self, slot: str, stored: Stored[Contribution]) -> None:
        reason = _unusable(stored.record, slot, self._id, self._index, self.codecs)
        self.others_differ |= stored.record.index != self._index
        if reason is not None:
            self._refuse(slot, reason)
        else:
            self.contributions[slot] = ObservedContribution(contribution=stored.record, digest=stored.digest)
            if self.taken is not None:
                self.taken(stored.record)

    def _check_payloads(self, slots: Sequence[str]) -> None:
        """Refuse contributions that cannot be averaged: a part is missing or of wrong length, or `inspect` fails."""

        def fault(number: int) -> str | None:
            contribution = self.contributions[slots[number]].contribution
            # The record alone shows impossible sizes, before anything is read.
            reason = self.inspect(contribution, len(slots)) if self.inspect is not None else None
            return reason or _payload_fault(self._log.store, contribution, self._payload_sizes)

        for slot, reason in zip(slots, run_parallel(self._log.store, len(slots), fault), strict=True):
            if reason is None:
                self._payload_checked.add(slot)
            else:
                del self.contributions[slot]
                self._refuse(slot, reason)

    def _refuse(self, slot: str, reason: str) -> None:
        self._refused[slot] = reason
        emit(
            "contribution_refused",
            {"round": self._id.round, "exchange": self._id.exchange, "slot": slot, "reason": reason},
            level=logging.WARNING,
        )


def _payload_fault(store: Store, contribution: Contribution, sizes: Mapping[str, int]) -> str | None:
    """The first fault of the contribution's payload objects; None if each exists in its length.

    sizes: of the objects that a listing has shown. It may have missed others; those are read.
    """

    def fault(number: int) -> str | None:
        part = contribution.parts[number]
        key = keys.payload(contribution.round, contribution.slot, part.digest)
        if sizes.get(key) == part.total_bytes:
            return None
        last = store.read(key, Span(max(0, part.total_bytes - 1), part.total_bytes + 1))
        if last is None or len(last) != min(1, part.total_bytes):
            return f"payload is missing or of another length: key={key} bytes={part.total_bytes}"
        return None

    faults = run_parallel(store, len(contribution.parts), fault, small=True)
    return next((fault for fault in faults if fault is not None), None)


def difference(index: str, mine: str, codecs: Mapping[str, str]) -> str:
    """The difference between two lists of tensors with these digests. codecs: of my tensors with each codec."""
    digests = f"index={index} mine={mine}"
    if index in codecs and mine in codecs:
        return f"codec {codecs[index]} instead of this replica's {codecs[mine]}: {digests}; choose one for all replicas"
    return f"tensors or codec differ: {digests}; check that all replicas run the same model and codec"


def _unusable(
    record: Contribution, slot: str, exchange_id: ExchangeId, index: str, codecs: Mapping[str, str]
) -> str | None:
    """The reason why a contribution cannot be averaged with this replica's; None if it can."""
    identity = (record.slot, record.round, record.exchange)
    if identity != (slot, exchange_id.round, exchange_id.exchange):
        return f"its record names another slot or exchange: {identity}"
    if record.base != exchange_id.base:
        return f"it builds on commit {record.base[:12]}, this round on {exchange_id.base[:12]}"
    if record.index != index:
        return difference(record.index, index, codecs)
    return None
