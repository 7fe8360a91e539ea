"""The one driver of the round protocol: contributes, waits for the decision, proposes it, closes the round.

Runs on any Store and any Clock, without torch: what is exchanged are parts of bytes with a name. All waiting and all
effects are here; what to do next is decided in `skerry.runtime.rounds`.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from skerry.runtime import keys
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Corrupt, Diverged, Invalid, SkerryError
from skerry.runtime.events import emit
from skerry.runtime.records import Commit, Contribution, Decision, Part
from skerry.runtime.rounds import (
    GiveUp,
    Observation,
    Offer,
    Policy,
    Propose,
    Unreachable,
    Wait,
    Waiting,
    may_bring_tensors,
    step,
)
from skerry.runtime.store import Span

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.journal import Journal, Sealed
    from skerry.runtime.membership import Presence, Watch
    from skerry.runtime.store import Data, Profile, Store

T = TypeVar("T")
Inspect: TypeAlias = "Callable[[Contribution], str | None]"
"""Why a contribution that looks right cannot be averaged; None if it can. May read from the store."""


class Interrupted(SkerryError):  # noqa: N818  named for the next step: the caller asked to stop waiting
    """Waiting was ended by a stop request; the contribution stays valid."""


class Place(NamedTuple):
    """Which exchange, and on which commit it builds."""

    round: int
    exchange: int
    base: str


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a slot brings to an exchange.

    parts: its payload objects. data(i): the bytes of part i, asked for when it is uploaded. norm: told, not used.
    ranks: how many parts each rank of the replica has, and has uploaded; () for a replica of one rank.
    """

    index: str
    parts: Sequence[Part]
    data: Callable[[int], Data]
    tokens: int
    inner_steps: int
    share: float = 1.0
    late: float = 0.0
    discount: float = 1.0
    norm: float | None = None
    ranks: tuple[int, ...] = ()


class Exchange:
    """Takes one replica through its exchanges. One call at a time; `stop` may be set from any thread."""

    def __init__(
        self,
        *,
        journal: Journal,
        presence: Presence,
        watch: Watch,
        clock: Clock,
        policy: Policy,
        look_every_s: float,
        stop: threading.Event,
        nothing: str,
    ) -> None:
        """look_every_s: how often to read heartbeats. nothing: the index of an exchange without tensors."""
        self._nothing = nothing
        self._journal = journal
        self._presence = presence
        self._watch = watch
        self._clock = clock
        self._policy = policy
        self._look_every_s = look_every_s
        self._stop = stop

    def contribute(self, place: Place, load: Load) -> Sealed[Contribution]:
        """Upload the parts, then make the record. Returns what stands in the log for this slot: possibly the
        contribution of an earlier incarnation or attempt, which then IS this slot's contribution.

        Raises Fenced if a newer incarnation owns the slot.
        """
        self._presence.fence()
        mine = self._presence.slot
        found = self._journal.contribution(place.round, place.exchange, mine)
        if found is not None:
            if found.record.index == self._nothing != load.index:
                raise Unreachable(f"{mine} has closed its part of round {place.round} without tensors; it is followed")
            if found.record.index != load.index:
                raise Diverged(
                    f"incarnation {found.record.incarnation} of {mine} has contributed other tensors to round "
                    f"{place.round} than this one holds; is it another script or model?"
                )
            return found
        if load.index == self._nothing:
            self._let_others_come(place)
        if not load.ranks:
            self.upload(place.round, load)
        record = Contribution(
            run=self._journal.run.nonce,
            round=place.round,
            exchange=place.exchange,
            slot=mine,
            incarnation=self._presence.incarnation,
            base=place.base,
            index=load.index,
            parts=tuple(load.parts),
            tokens=load.tokens,
            inner_steps=load.inner_steps,
            share=load.share,
            late=load.late,
            discount=load.discount,
            ranks=load.ranks,
            nonce=self._clock.nonce(),
        )
        sealed = self._journal.create(keys.contribution(place.round, place.exchange, mine), record)
        emit("contributed", {"round": place.round, "exchange": place.exchange, "slot": mine, "norm": load.norm})
        return sealed

    def decide(
        self,
        place: Place,
        index: str,
        *,
        abstaining: bool = False,
        round_seconds: float | None = None,
        inspect: Inspect | None = None,
    ) -> Sealed[Decision]:
        """Wait for the exchange's decision, proposing it when it is this replica's turn.

        round_seconds: how long recent rounds took, for the adaptive grace window; None if none was timed. inspect: a
        last look at each contribution before it is proposed, once its payload is seen to be there.
        Raises TimeoutError, Unreachable or RunFinished when there will be none, Interrupted on a stop request,
        Unreachable if this replica has no tensors and the others have, Diverged if the decision is about other tensors
        or builds on another commit than ours.
        """
        if (decided := self._journal.decision(place.round, place.exchange)) is None:
            look, waiting = self._look_at(place, index, abstaining=abstaining, round_seconds=round_seconds)
            look.inspect = inspect
            decided = self._wait_for_decision(place, index, look, waiting)
        decision = decided.record
        if decision.base != place.base:
            raise Diverged(
                f"decision of round {place.round} builds on another log: base={decision.base[:12]} "
                f"mine={place.base[:12]}"
            )
        if decision.index != index and index == self._nothing:
            raise _others_average(place)
        if decision.index != index:
            raise Diverged(
                f"decision of round {place.round} exchange {place.exchange} averages other tensors than mine: "
                f"index={decision.index} mine={index}; do all replicas run the same model and codec?"
            )
        return decided

    def contributions(self, decision: Decision) -> list[Contribution]:
        """The listed members' contributions in order, each the very record the decision names."""
        found: list[Contribution] = []
        for share in decision.members:
            key = keys.contribution(decision.round, decision.exchange, share.slot)
            sealed = self._journal.contribution(decision.round, decision.exchange, share.slot)
            if sealed is None:
                raise Corrupt(f"contribution is gone: key={key}; it is listed in a decision and must never be deleted")
            if sealed.digest != share.contribution:
                raise Corrupt(
                    f"contribution is not the decided one: key={key} digest={sealed.digest} "
                    f"decided={share.contribution}"
                )
            found.append(sealed.record)
        return found

    def close(self, place: Place, decisions: Sequence[Sealed[Decision]], *, work: float) -> Sealed[Commit]:
        """Close a round whose every exchange this replica holds. Raises Diverged if it was closed differently.

        work: of all rounds, this one included.
        """
        record = Commit(
            run=self._journal.run.nonce,
            round=place.round,
            exchanges=tuple(decision.digest for decision in decisions),
            participants=min(len(decision.record.members) for decision in decisions),
            work=work,
            previous=place.base,
        )
        sealed = self._journal.create(keys.commit(place.round), record)
        # Of a round that was closed before commits told of work, it says nothing.
        mine = record if sealed.record.work else record.model_copy(update={"work": 0.0})
        if sealed.record != mine:
            raise Diverged(f"round {place.round} was closed differently: log={sealed.record!r} mine={record!r}")
        return sealed

    def is_closed_with(self, place: Place, decisions: Sequence[Sealed[Decision]]) -> bool:
        """The round is closed, and by exactly these exchanges."""
        closed = self._journal.commit(place.round)
        return closed is not None and closed.record.exchanges == tuple(decision.digest for decision in decisions)

    def _let_others_come(self, place: Place) -> None:
        """Wait until nobody at work may still bring tensors: an empty contribution would shut this slot out of them.

        Raises Unreachable as soon as somebody has brought some, TimeoutError at the deadline, Interrupted on a stop.
        """
        look, waiting = self._look_at(place, self._nothing, abstaining=False, round_seconds=None)
        self._presence.enter("sync", round_number=place.round)
        backoff, attempt = _polls(self._journal.store.profile), 0
        while True:
            seen = look.observe(waiting.me)
            if look.others_differ:
                raise _others_average(place)
            coming = may_bring_tensors(self._policy, waiting, seen, self._clock.now())
            if not coming or self._journal.decision(place.round, place.exchange) is not None:
                return
            if self._clock.now() - waiting.since >= self._policy.deadline_s:
                raise TimeoutError(
                    f"round {place.round}: {','.join(sorted(coming))} neither brought tensors nor waited"
                )
            if self._stop.is_set():
                raise Interrupted(f"stopped while waiting for round {place.round}")
            self._clock.pause(backoff.delay(attempt, self._clock), self._stop)
            attempt += 1

    def _look_at(
        self, place: Place, index: str, *, abstaining: bool, round_seconds: float | None
    ) -> tuple[_Look, Waiting]:
        look = _Look(self._journal, self._watch, self._clock, self._policy, place, index, self._look_every_s)
        look.steady_since = lambda: self._presence.steady_since
        waiting = Waiting(
            round=place.round,
            exchange=place.exchange,
            me=self._presence.slot,
            abstaining=abstaining,
            since=self._clock.now(),
            round_seconds=round_seconds,
        )
        return look, waiting

    def upload(self, round_number: int, load: Load) -> None:
        """Put the parts; an existing one has the same bytes, for its name is their digest. Makes no record."""
        store, slot = self._journal.store, self._presence.slot

        def put(i: int) -> None:
            store.create(keys.payload(round_number, slot, load.parts[i].digest), load.data(i))

        in_streams(store, len(load.parts), put)

    def _wait_for_decision(self, place: Place, index: str, look: _Look, waiting: Waiting) -> Sealed[Decision]:
        profile = self._journal.store.profile
        backoff, attempt = _polls(profile), 0
        while True:
            decided = self._journal.decision(place.round, place.exchange)
            if decided is not None:
                return decided
            seen = look.observe(waiting.me)
            if index == self._nothing and look.others_differ:
                raise _others_average(place)
            waiting, action = step(self._policy, waiting, seen, self._clock.now())
            match action:
                case GiveUp(error=error):
                    raise error
                case Propose():
                    if look.complete():
                        self._propose(place, index, action)
                case Wait(until=until, waiting_for=slots):
                    self._presence.enter("sync", round_number=place.round, waiting_for=slots)
                    left = max(until - self._clock.now(), profile.poll_first)
                    self._clock.pause(min(left, backoff.delay(attempt, self._clock)), self._stop)
                    attempt += 1
            if self._stop.is_set():
                raise Interrupted(f"stopped while waiting for round {place.round}")

    def _propose(self, place: Place, index: str, action: Propose) -> None:
        decision = Decision(
            run=self._journal.run.nonce,
            round=place.round,
            exchange=place.exchange,
            base=place.base,
            index=index,
            reduction="all_gather",
            members=action.members,
            proposer=self._presence.slot,
            nonce=self._clock.nonce(),
        )
        self._presence.fence()
        # Whoever wins: the next look reads the decision back, and everybody uses what it says.
        sealed = self._journal.create(keys.decision(place.round, place.exchange), decision)
        emit(
            "decided",
            {
                "round": place.round,
                "exchange": place.exchange,
                "members": ",".join(s.slot for s in sealed.record.members),
            },
        )


class _Look:
    """What one replica sees of one exchange, gathered with few requests and remembered between looks."""

    # Every how many looks the contributions are listed although every expected one is known (an unknown slot may come).
    LIST_EVERY = 8

    def __init__(
        self,
        journal: Journal,
        watch: Watch,
        clock: Clock,
        policy: Policy,
        place: Place,
        index: str,
        look_every_s: float,
    ) -> None:
        self._journal = journal
        self._watch = watch
        self._clock = clock
        self._policy = policy
        self._place = place
        self._index = index
        self._look_every_s = look_every_s
        self._offers: dict[str, Offer] = {}
        self._refused: dict[str, str] = {}
        self._present: set[str] = set()
        self.others_differ = False
        self.inspect: Inspect | None = None
        self.steady_since: Callable[[], float] = lambda: 0.0
        self._looked_at: float | None = None
        self._looks = 0

    def observe(self, me: str) -> Observation:
        """One look at contributions, and at heartbeats when it is time again."""
        now = self._clock.now()
        if self._looked_at is None or now - self._looked_at >= self._look_every_s:
            self._watch.look()
            self._looked_at = now
        self._find(me)
        return Observation(
            offers=self._offers,
            refused=frozenset(self._refused),
            peers=self._watch.peers,
            steady_since=self.steady_since(),
        )

    def complete(self) -> bool:
        """A last listing before a proposal: nobody new came, and every listed payload is there."""
        before = set(self._offers)
        self._list()
        for slot in list(self._offers):
            if slot not in self._present:
                self._check_payload(slot)
        return set(self._offers) == before

    def _find(self, me: str) -> None:
        """Look for the contributions of slots that may come, one GET each; now and then list, for slots unknown."""
        candidates = (
            ({me} | set(self._watch.peers) | self._policy.expected) - self._offers.keys() - self._refused.keys()
        )
        if self._looks % self.LIST_EVERY == 0 or len(candidates) > self.LIST_EVERY:
            self._list()
        else:
            for slot in sorted(candidates, key=keys.slot_order):
                self._take(slot)
        self._looks += 1

    def _list(self) -> None:
        for entry in self._journal.store.list(keys.contributions_of(self._place.round, self._place.exchange)):
            try:
                slot = keys.slot_of(entry.key)
            except Invalid as error:  # somebody else's object
                if entry.key not in self._refused:
                    self._refuse(entry.key, str(error))
                continue
            if slot not in self._offers and slot not in self._refused:
                self._take(slot)

    def _take(self, slot: str) -> None:
        try:
            sealed = self._journal.contribution(self._place.round, self._place.exchange, slot)
        except (Corrupt, Diverged) as error:  # Diverged: it is of another run, which costs its slot and no other
            self._refuse(slot, str(error))
            return
        if sealed is None:
            return
        reason = _unusable(sealed.record, slot, self._place, self._index)
        self.others_differ |= sealed.record.index != self._index
        if reason is not None:
            self._refuse(slot, reason)
        else:
            self._offers[slot] = Offer(contribution=sealed.record, digest=sealed.digest)

    def _check_payload(self, slot: str) -> None:
        """A decision may only list what can be averaged: every part is there in its length, and passes `inspect`."""
        contribution = self._offers[slot].contribution
        store = self._journal.store

        def fault(number: int) -> str | None:
            part = contribution.parts[number]
            key = keys.payload(self._place.round, slot, part.digest)
            last = store.read(key, Span(max(0, part.total_bytes - 1), part.total_bytes + 1))
            if last is None or len(last) != min(1, part.total_bytes):
                return f"payload is missing or of another length: key={key} bytes={part.total_bytes}"
            return None

        # Sizes that cannot be are told by the record alone, before anything is read.
        reason = self.inspect(contribution) if self.inspect is not None else None
        if reason is None:
            faults = in_streams(store, len(contribution.parts), fault)
            reason = next((one for one in faults if one is not None), None)
        if reason is None:
            self._present.add(slot)
            return
        del self._offers[slot]
        self._refuse(slot, reason)

    def _refuse(self, slot: str, reason: str) -> None:
        self._refused[slot] = reason
        emit(
            "contribution_refused",
            {"round": self._place.round, "exchange": self._place.exchange, "slot": slot, "reason": reason},
            level=logging.WARNING,
        )


def in_streams(store: Store, count: int, work: Callable[[int], T]) -> list[T]:
    """`work` of 0 to `count` - 1, in order, with as many requests at once as the store likes."""
    streams = min(store.profile.streams, count)
    if streams <= 1:
        return [work(number) for number in range(count)]
    with ThreadPoolExecutor(streams, thread_name_prefix="parts") as pool:
        return list(pool.map(work, range(count)))


def _polls(profile: Profile) -> Backoff:
    """Each pause is a quarter longer: a poll is then at most that share of the wait too late."""
    return Backoff(first=profile.poll_first, cap=profile.poll_cap, factor=1.25)


def _others_average(place: Place) -> Unreachable:
    return Unreachable(
        f"round {place.round} exchange {place.exchange} averages tensors and this replica issued none: "
        "should_commit without the allreduce calls of the others; the round is followed instead"
    )


def _unusable(record: Contribution, slot: str, place: Place, index: str) -> str | None:
    """Why a contribution cannot be averaged with mine; None if it can."""
    named = (record.slot, record.round, record.exchange)
    if named != (slot, place.round, place.exchange):
        return f"its record speaks for {named}"
    if record.base != place.base:
        return f"it builds on commit {record.base[:12]}, this round on {place.base[:12]}"
    if record.index != index:
        return f"its tensors or codec differ: index={record.index} mine={index}"
    return None
