"""Drives the round protocol: contributes, waits for the decision, proposes it, and commits the round.

Runs on any Store and any Clock, without torch: a contribution is named parts of bytes. All waiting and all effects
are here; `skerry.runtime.protocol.quorum` decides the next action.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Corrupt, Diverged, SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.log import STRAY_REMEDY
from skerry.runtime.log.records import Commit, Contribution, Decision, Link, Part, makers_in
from skerry.runtime.log.setting_changes import RunSettings
from skerry.runtime.protocol.exchange_view import ExchangeView, difference
from skerry.runtime.protocol.quorum import Abort, ExchangeState, Propose, Undecided, Wait, may_still_contribute, step
from skerry.runtime.store.parallel import run_parallel
from skerry.runtime.store.retrying import speed_of
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.log.log import RunLog, Stored
    from skerry.runtime.log.records import Reduction, Share, Telemetry
    from skerry.runtime.protocol.exchange_view import ExchangeId, Inspect
    from skerry.runtime.protocol.quorum import Action, ObservedContribution, Policy
    from skerry.runtime.protocol.slot_claim_and_heartbeats import HeartbeatMonitor, Presence
    from skerry.runtime.store import Data

_LOOK_EVERY: Final = 3
"""All but the first proposer look for contributions only every so many polls, and else for the decision alone."""


class Interrupted(SkerryError):  # noqa: N818  named for the next step: the caller asked to stop waiting
    """A stop request ended the wait; the contribution stays valid."""


@dataclass(frozen=True, kw_only=True)
class ContributionDraft:
    """A contribution before it is uploaded.

    parts: its payload objects. data(i): the bytes of part i, requested when it is uploaded; None if they all are. norm:
    only logged.
    ranks: how many parts each rank of the replica has, and has uploaded; () for a replica of one rank. telemetry: of
    the round, only recorded.
    """

    index: str
    parts: Sequence[Part]
    data: Callable[[int], Data] | None
    tokens: int
    inner_steps: int
    share: float = 1.0
    norm: float | None = None
    ranks: tuple[int, ...] = ()
    telemetry: Telemetry | None = None


class Exchange:
    """Takes one replica through its exchanges. One call at a time; `stop` may be set from any thread.

    settings: those that were changed after the start; read before each proposal.
    """

    def __init__(
        self,
        *,
        log: RunLog,
        presence: Presence,
        monitor: HeartbeatMonitor,
        clock: Clock,
        policy: Policy,
        heartbeat_poll_s: float,
        stop: threading.Event,
        empty_index: str,
    ) -> None:
        """heartbeat_poll_s: how often to read heartbeats. empty_index: the index of an exchange without tensors."""
        self._empty_index = empty_index
        self._log = log
        self._presence = presence
        self._monitor = monitor
        self._clock = clock
        self._policy = policy
        self._heartbeat_poll_s = heartbeat_poll_s
        self._stop = stop
        self._seen: Mapping[str, ObservedContribution] = {}
        self._tried: tuple[int, int] | None = None
        self._mine: Stored[Contribution] | None = None
        self.settings = RunSettings(log)

    def contribute(self, exchange_id: ExchangeId, draft: ContributionDraft) -> Stored[Contribution]:
        """Upload the parts, then create the record.

        Returns the slot's contribution in the log, which may be that of an earlier incarnation or attempt.
        Raises Fenced if a newer incarnation owns the slot.
        """
        self._presence.raise_if_fenced(known_s=self._heartbeat_poll_s)
        slot = self._presence.slot
        # In most exchanges the creation of the record shows if a contribution exists; then the upload is not used.
        place, tried = (exchange_id.round, exchange_id.exchange), self._tried
        self._tried = place
        if tried is None or tried >= place or draft.index == self._empty_index:
            existing = self._log.read_contribution(exchange_id.round, exchange_id.exchange, slot)
            if existing is not None:
                return self._own(existing, draft)
        if draft.index == self._empty_index:
            self._wait_for_tensors(exchange_id)
        if (data := draft.data) is not None:
            for number, part in enumerate(draft.parts):
                self.put(exchange_id.round, part, data(number))
        record = Contribution(
            run=self._log.run.nonce,
            round=exchange_id.round,
            exchange=exchange_id.exchange,
            slot=slot,
            incarnation=self._presence.incarnation,
            base=exchange_id.base,
            index=draft.index,
            parts=tuple(draft.parts),
            tokens=draft.tokens,
            inner_steps=draft.inner_steps,
            share=draft.share,
            ranks=draft.ranks,
            telemetry=draft.telemetry,
            nonce=self._clock.nonce(),
            region=None if self._log.run.reduce_in is None else self._presence.region,
            link=_link_of(self._log),
        )
        stored = self._own(self._log.create(keys.contribution(*place, slot), record), draft)
        fields = {"round": exchange_id.round, "exchange": exchange_id.exchange, "slot": slot, "norm": draft.norm}
        emit("contributed", fields)
        return stored

    def _own(self, stored: Stored[Contribution], draft: ContributionDraft) -> Stored[Contribution]:
        """The slot's contribution in the log, kept for `decide`. Raises if it has other tensors than the draft."""
        record = stored.record
        if record.index == self._empty_index != draft.index:
            raise Undecided(
                f"{record.slot} has already contributed to round {record.round} without tensors; "
                "this replica follows the round"
            )
        if record.index != draft.index:
            raise Diverged(
                f"incarnation {record.incarnation} of {record.slot} has contributed other tensors to round "
                f"{record.round} than this one holds; check that both run the same script and model"
            )
        self._mine = stored
        return stored

    def has_contributed(self, exchange_id: ExchangeId, *, certain: bool) -> bool:
        """True if the log has a contribution of this slot, also of an earlier start. certain: look in any case."""
        if not certain and self._tried is not None and self._tried < exchange_id[:2]:
            return False
        return self._log.read_contribution(*exchange_id[:2], self._presence.slot) is not None

    def put(self, round_number: int, part: Part, data: Data) -> None:
        """Create a payload object. An existing one has the same bytes: its name is their digest."""
        self._log.store.create(keys.payload(round_number, self._presence.slot, part.digest), data)

    def decide(
        self,
        exchange_id: ExchangeId,
        index: str,
        *,
        abstaining: bool = False,
        round_seconds: float | None = None,
        inspect: Inspect | None = None,
        codecs: Mapping[str, str] | None = None,
        reduction: Callable[[Sequence[Link | None]], Reduction] = lambda _: "all_gather",
        taken: Callable[[Contribution], None] | None = None,
    ) -> Stored[Decision]:
        """Wait for the exchange's decision, and propose it when it is this replica's turn.

        round_seconds: how long recent rounds took, for the adaptive grace window; None if none was timed. inspect: a
        last check of each contribution before it is proposed. codecs: the digest of this replica's tensors with each
        codec, for messages. reduction: what to propose for members with these links. taken: gets each one seen.
        Raises TimeoutError, Undecided or RunFinished if there will be no decision, Interrupted on a stop request,
        Undecided if only the others have tensors, Diverged if the decision is about other tensors or another commit.
        """
        view, state = self._view(exchange_id, index, abstaining=abstaining, round_seconds=round_seconds)
        view.inspect, view.taken = inspect, taken
        view.codecs = codecs or {}
        self._choose_reduction: Callable[[Sequence[Link | None]], Reduction] = reduction
        self._seen = view.contributions
        decided = self._wait_for_decision(exchange_id, index, view, state)
        _check_usable(decided.record, exchange_id, self._log.run.min_replicas)
        decision = decided.record
        if decision.index != index and index == self._empty_index:
            raise _issued_no_tensors(exchange_id)
        if decision.index != index:
            raise Diverged(
                f"decision of round {exchange_id.round} exchange {exchange_id.exchange} averages other tensors: "
                f"{difference(decision.index, index, view.codecs)}; {STRAY_REMEDY}"
            )
        return decided

    def contributions(self, decision: Decision) -> list[Contribution]:
        """The members' contributions in order, each exactly the record that the decision names."""

        def read(number: int) -> Contribution:
            share = decision.members[number]
            seen = self._seen.get(share.slot)
            if seen is not None and seen.digest == share.contribution:  # it was read while waiting for the decision
                return seen.contribution
            key = keys.contribution(decision.round, decision.exchange, share.slot)
            stored = self._log.read_contribution(decision.round, decision.exchange, share.slot, exists=True)
            if stored is None:
                raise Corrupt(
                    f"contribution is missing: key={key}; a decision lists it, it must never be deleted; {STRAY_REMEDY}"
                )
            if stored.digest != share.contribution:
                digests = f"digest={stored.digest} decided={share.contribution}"
                raise Corrupt(f"contribution is not the decided one: key={key} {digests}; {STRAY_REMEDY}")
            return stored.record

        return run_parallel(self._log.store, len(decision.members), read, small=True)

    def close(
        self, exchange_id: ExchangeId, decisions: Sequence[Stored[Decision]], *, work: float, averages: Sequence[str]
    ) -> Stored[Commit]:
        """Commit a round of which this replica has applied every exchange. work: of all rounds, including this one.

        averages: the digest of each exchange's. If the commit names others, that is reported; receipts tell the right.
        Raises Diverged if the round was committed differently in anything else.
        """
        record = _commit_of(exchange_id, decisions, work, None if self._log.run.layout is None else tuple(averages))
        # The proposer is the first to hold the average; the others find its commit, at half the price of a creation.
        proposed = decisions[0].record.proposer == self._presence.slot
        stored = None if proposed else self._log.read_commit(exchange_id.round)
        stored = stored or self._log.create(keys.commit(exchange_id.round), record)
        # Commits of runs from before `work` existed have none.
        mine = record if stored.record.work else record.model_copy(update={"work": 0.0})
        mine = _with_averages_of(stored.record, mine, self._presence.slot)
        if stored.record != mine:
            raise Diverged(
                f"round {exchange_id.round} was committed differently: log={stored.record!r} mine={record!r}; "
                f"{STRAY_REMEDY}"
            )
        return stored

    def is_closed_by(self, exchange_id: ExchangeId, decisions: Sequence[Stored[Decision]]) -> bool:
        """Return whether the round is committed with exactly these decisions."""
        commit = self._log.read_commit(exchange_id.round)
        return commit is not None and commit.record.exchanges == tuple(decision.digest for decision in decisions)

    def _wait_for_tensors(self, exchange_id: ExchangeId) -> None:
        """Wait until no working replica may still contribute tensors: an empty contribution would exclude this slot.

        Raises Undecided as soon as a replica has contributed some, TimeoutError at the deadline, Interrupted on a stop.
        """
        view, state = self._view(exchange_id, self._empty_index, abstaining=False, round_seconds=None)
        self._presence.enter("sync", round_number=exchange_id.round)
        backoff, attempt = self._backoff(), 0
        while True:
            observation = view.observe(state)
            if view.others_differ:
                raise _issued_no_tensors(exchange_id)
            slots = may_still_contribute(
                _with_slots(self._policy, self.settings), state, observation, self._clock.now()
            )
            if not slots or self._log.read_decision(exchange_id.round, exchange_id.exchange) is not None:
                return
            if self._clock.now() - state.since >= self._policy.deadline_s:
                raise TimeoutError(
                    f"timed out after {self._policy.deadline_s:g} s: round {exchange_id.round}: "
                    f"neither contributed nor waiting={','.join(sorted(slots))}"
                )
            if self._stop.is_set():
                raise Interrupted(f"stopped while waiting for round {exchange_id.round}")
            self._clock.pause(backoff.delay(attempt, self._clock), self._stop)
            attempt += 1

    def _view(
        self, exchange_id: ExchangeId, index: str, *, abstaining: bool, round_seconds: float | None
    ) -> tuple[ExchangeView, ExchangeState]:
        policy = _with_slots(self._policy, self.settings)
        view = ExchangeView(self._log, self._monitor, self._clock, policy, exchange_id, index, self._heartbeat_poll_s)
        view.steady_since = lambda: self._presence.steady_since
        if self._mine is not None and (self._mine.record.round, self._mine.record.exchange) == exchange_id[:2]:
            view.add(self._mine)
        state = ExchangeState(
            round=exchange_id.round,
            exchange=exchange_id.exchange,
            me=self._presence.slot,
            abstaining=abstaining,
            since=self._clock.now(),
            round_seconds=round_seconds,
            opening=exchange_id.round == 0 or self.settings.reopens(exchange_id.round),
        )
        return view, state

    def _wait_for_decision(
        self, exchange_id: ExchangeId, index: str, view: ExchangeView, state: ExchangeState
    ) -> Stored[Decision]:
        backoff, attempt, until = self._backoff(), 0, self._clock.now()
        while (decided := self._log.read_decision(exchange_id.round, exchange_id.exchange)) is None:
            action: Action | None = None
            if attempt % _LOOK_EVERY == 0 or self._clock.now() >= until or view.leads(state.me):
                before = state
                state, action = self._look(exchange_id, index, view, before)
                if not isinstance(action, Wait) and not view.has_heartbeats:  # only waiting is right without them
                    state, action = self._look(exchange_id, index, view, before, needs_heartbeats=True)
            match action:
                case Abort(error=error):
                    raise _stray_commit(self._log, exchange_id) or error
                case Propose():
                    if view.confirm():
                        self._propose(exchange_id, index, action)
                case _:
                    if action is not None:
                        until = action.until
                        self._presence.enter("sync", round_number=exchange_id.round, waiting_for=action.waiting_for)
                    left = max(until - self._clock.now(), backoff.first)
                    self._clock.pause(min(left, backoff.delay(attempt, self._clock)), self._stop)
                    attempt += 1
            if self._stop.is_set():
                raise Interrupted(f"stopped while waiting for round {exchange_id.round}")
        return decided

    def _look(
        self,
        exchange_id: ExchangeId,
        index: str,
        view: ExchangeView,
        state: ExchangeState,
        *,
        needs_heartbeats: bool = False,
    ) -> tuple[ExchangeState, Action]:
        observation = view.observe(state, needs_heartbeats=needs_heartbeats)
        if index == self._empty_index and view.others_differ:
            raise _issued_no_tensors(exchange_id)
        return step(_with_slots(self._policy, self.settings), state, observation, self._clock.now())

    def _propose(self, exchange_id: ExchangeId, index: str, action: Propose) -> None:
        self.settings.read()
        reduction = self._choose_reduction([self._seen[share.slot].contribution.link for share in action.members])
        decision = Decision(
            run=self._log.run.nonce,
            round=exchange_id.round,
            exchange=exchange_id.exchange,
            base=exchange_id.base,
            index=index,
            reduction=reduction,
            members=action.members,
            proposer=self._presence.slot,
            nonce=self._clock.nonce(),
            settings=self.settings.of_round(exchange_id.round),
            makers=_makers_of(self._log.run.reduce_in, reduction, action.members, self._seen),
        )
        self._presence.raise_if_fenced()
        # Several replicas may propose; one wins. The next look reads the stored decision, and all replicas use that.
        stored = self._log.create(keys.decision(exchange_id.round, exchange_id.exchange), decision)
        members = ",".join(share.slot for share in stored.record.members)
        emit("decided", {"round": exchange_id.round, "exchange": exchange_id.exchange, "members": members})

    def _backoff(self) -> Backoff:
        """Each pause is a quarter longer, so that a poll is late by at most that share of the wait."""
        return Backoff(first=(profile := self._log.store.profile).poll_first, cap=profile.poll_cap, factor=1.25)


def _check_usable(decision: Decision, exchange_id: ExchangeId, min_replicas: int) -> None:
    """Raises Diverged for a decision that no sound replica of this log has proposed."""
    if decision.base != exchange_id.base:
        raise Diverged(
            f"decision of round {exchange_id.round} builds on another log: base={decision.base[:12]} "
            f"mine={exchange_id.base[:12]}; {STRAY_REMEDY}"
        )
    if not decision.has_quorum(min_replicas):
        members = ",".join(share.slot for share in decision.members)
        raise Diverged(
            f"decision of round {exchange_id.round} has too few members: members={members[:500]} "
            f"min_replicas={min_replicas} proposer={decision.proposer}; {STRAY_REMEDY}"
        )


def _stray_commit(log: RunLog, exchange_id: ExchangeId) -> Diverged | None:
    """The error for a round without a decision that is closed all the same; None if it is open."""
    if log.read_commit(exchange_id.round) is None:
        return None
    if log.read_decision(exchange_id.round, exchange_id.exchange) is not None:
        return None
    key = keys.commit(exchange_id.round)
    return Diverged(f"round {exchange_id.round} is not decided, but {key} exists: a stray record; {STRAY_REMEDY}")


def _with_slots(policy: Policy, settings: RunSettings) -> Policy:
    """The policy, with the expected slots by the newest settings that were read."""
    if settings.slots is None:
        return policy
    return replace(policy, expected=frozenset(settings.slots), removed=settings.removed)


def _link_of(log: RunLog) -> Link | None:
    """The link that this replica records; None in a run whose replicas may be older than the field."""
    return Link.measured(speed_of(log.store)) if log.run.links else None


def _makers_of(
    region: str | None, reduction: Reduction, members: Sequence[Share], seen: Mapping[str, ObservedContribution]
) -> tuple[str, ...] | None:
    if reduction != "reduce_scatter" or region is None:
        return None
    return makers_in(region, {share.slot: seen[share.slot].contribution.region for share in members})


def _commit_of(
    exchange_id: ExchangeId, decisions: Sequence[Stored[Decision]], work: float, averages: tuple[str, ...] | None
) -> Commit:
    return Commit(
        run=decisions[0].record.run,
        round=exchange_id.round,
        exchanges=tuple(decision.digest for decision in decisions),
        participants=min(len(decision.record.members) for decision in decisions),
        work=work,
        previous=exchange_id.base,
        averages=averages,
    )


def _with_averages_of(stored: Commit, mine: Commit, slot: str) -> Commit:
    """My commit with the averages that the log's names; a difference is reported."""
    if stored.averages != mine.averages:
        named, held = (",".join(commit.averages or ()) for commit in (stored, mine))
        fields = {"round": mine.round, "slot": slot, "commit": named, "mine": held}
        emit("averages_differ", fields, level=logging.ERROR)
    return mine.model_copy(update={"averages": stored.averages})


def _issued_no_tensors(exchange_id: ExchangeId) -> Undecided:
    return Undecided(
        f"round {exchange_id.round} exchange {exchange_id.exchange} averages tensors and this replica issued none: "
        "it called should_commit without the other replicas' allreduce calls; it follows the round instead"
    )
