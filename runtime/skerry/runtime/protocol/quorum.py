"""Decides when an exchange has a quorum: a pure function of one observation and of local, monotonic time.

`step(policy, state, observation, now) -> (state, action)`. Never reads a clock, a store or a random number; the
driver (`protocol.exchange`) does, and so does a simulator. Safety does not depend on this module: whatever is proposed,
only one decision is created. It controls liveness: how long a replica waits, and for which slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from skerry.runtime.errors import RunFinished, SkerryError
from skerry.runtime.log.keys import slot_order
from skerry.runtime.log.records import Contribution, Heartbeat, Share

if TYPE_CHECKING:
    from collections.abc import Mapping


class Undecided(SkerryError):  # noqa: N818  names the state of the round, not a fault
    """This replica cannot get a decision for this round now. Retry the round; contributions stay valid."""


@dataclass(frozen=True, kw_only=True)
class Grace:
    """The time a quorum waits for the other slots: a share of recent round time between a floor and a cap.

    A floor of 1 s covers heartbeat lag on a fast loop; the cap bounds what one straggler costs all replicas per round.
    """

    floor_s: float = 1.0
    cap_s: float = 60.0
    share: float = 0.25

    def window_s(self, round_seconds: float | None) -> float:
        """Seconds from quorum to decision; the cap while no round has been timed yet."""
        if round_seconds is None:
            return self.cap_s
        return min(self.cap_s, max(self.floor_s, self.share * round_seconds))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The settings that are the same for every exchange of a run, as one replica sees them.

    expected: slots that an opening round waits for, at most start_window_s. stale_s: a heartbeat that has not changed
    for this long belongs to a dead replica. deadline_s: when to abort an exchange. propose_delay_s: extra wait before
    proposing for each earlier slot in the slot order (some stores accept one write per second and key). spares: list
    only the first min_replicas slots (torchft's FIXED_WITH_SPARES). removed: slots that are waited for no longer; what
    they contribute counts.
    """

    min_replicas: int
    expected: frozenset[str]
    start_window_s: float
    grace: Grace
    stale_s: float
    deadline_s: float
    propose_delay_s: float
    spares: bool = False
    weighting: Literal["uniform", "tokens"] = "uniform"
    removed: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ObservedHeartbeat:
    """Another slot's latest heartbeat, and when it was seen to change, on the local clock.

    fresh: it was seen to change at least once; otherwise it may be from an earlier session.
    """

    heartbeat: Heartbeat
    changed_at: float
    fresh: bool = True


@dataclass(frozen=True, kw_only=True)
class ObservedContribution:
    """A usable contribution and the digest of its record."""

    contribution: Contribution
    digest: str


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One look of the driver at an undecided exchange.

    contributions: usable ones by slot, this slot's included. refused: slots with an unusable contribution.
    heartbeats: those of the other slots; those without a contribution were read since this exchange began.
    steady_since: when this replica's last outage ended; a silence before that proves nothing.
    """

    contributions: Mapping[str, ObservedContribution]
    refused: frozenset[str]
    heartbeats: Mapping[str, ObservedHeartbeat]
    steady_since: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ExchangeState:
    """This replica's state in one undecided exchange. Times are on its own monotonic clock.

    me: its slot. opening: all replicas start in this round: it is round 0, or the first after the end of a run that was
    extended. quorum_at: since when there has been a quorum. ready_at: since when it could be proposed.
    """

    round: int
    exchange: int
    me: str
    abstaining: bool
    since: float
    round_seconds: float | None
    opening: bool = False
    quorum_at: float | None = None
    ready_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Propose:
    """Try to create the decision with these members, in slot order."""

    members: tuple[Share, ...]


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Look again, at the latest at `until`. waiting_for: slots without a contribution."""

    until: float
    waiting_for: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Stop waiting and raise this error."""

    error: SkerryError | TimeoutError


Action: TypeAlias = Propose | Wait | Abort

WORKING = frozenset({"train", "sync"})
_ENDED = frozenset({"finished", "left", "failed", "stopping"})
# A restarted job needs this long to queue, pull and import; until then an old "finished" proves nothing.
_RESTART_S = 120.0


def step(policy: Policy, state: ExchangeState, observation: Observation, now: float) -> tuple[ExchangeState, Action]:
    """Choose the next action in an exchange without a decision.

    Proposes when the contributions reach min_replicas and either cover every slot worth waiting for or the grace
    window is over. Aborts when a quorum has become impossible, or at the deadline.
    """
    contributed = sorted(observation.contributions, key=slot_order)
    expected = _expected(policy, state, observation, now)
    starting = _starting(policy, state, observation, now)
    if len(contributed) < policy.min_replicas:
        state = replace(state, quorum_at=None, ready_at=None)
        return state, _without_quorum(policy, state, observation, expected | starting, now)
    quorum_at = now if state.quorum_at is None else state.quorum_at
    grace_ends = quorum_at + policy.grace.window_s(state.round_seconds)
    state = replace(state, quorum_at=quorum_at)
    deadline = state.since + policy.deadline_s
    # At the deadline an existing quorum is proposed, whichever slots are missing: an abort would waste its work.
    if (starting or (expected and now < grace_ends)) and now < deadline:
        return replace(state, ready_at=None), _wait(policy, state, observation, expected | starting, [grace_ends], now)
    ready_at = now if state.ready_at is None else state.ready_at
    state = replace(state, ready_at=ready_at)
    # Contributors propose in slot order, dead ones are waited for; an abstaining replica comes last.
    position = contributed.index(state.me) if state.me in contributed else len(contributed)
    my_turn = ready_at + position * policy.propose_delay_s
    if now < my_turn:
        return state, Wait(until=min(my_turn, deadline), waiting_for=())
    return state, Propose(members=members(policy, observation.contributions))


def members(policy: Policy, contributions: Mapping[str, ObservedContribution]) -> tuple[Share, ...]:
    """The decision's members in slot order with their weights.

    A weight is the contribution's share of a round's work, or its tokens if the run weighs by tokens and every listed
    contribution has some; times its discount.
    """
    slots = sorted(contributions, key=slot_order)
    if policy.spares:
        slots = slots[: policy.min_replicas]
    by_tokens = policy.weighting == "tokens" and all(contributions[slot].contribution.tokens for slot in slots)

    def weight(contribution: Contribution) -> float:
        return (float(contribution.tokens) if by_tokens else contribution.share) * contribution.discount

    return tuple(
        Share(slot=slot, contribution=contributions[slot].digest, weight=weight(contributions[slot].contribution))
        for slot in slots
    )


def may_still_contribute(policy: Policy, state: ExchangeState, observation: Observation, now: float) -> frozenset[str]:
    """Slots that work on this round and do not wait in it yet; one that waits without a contribution has no tensors."""
    expected = _expected(policy, state, observation, now) | _starting(policy, state, observation, now)
    waiting = {
        slot
        for slot, observed in observation.heartbeats.items()
        if observed.heartbeat.phase == "sync" and observed.heartbeat.round == state.round
    }
    return frozenset(expected - waiting)


def is_live(policy: Policy, observed: ObservedHeartbeat, steady_since: float, now: float) -> bool:
    """The slot's heartbeat changes and reports a working phase. steady_since: see `Observation`."""
    changed_at = max(observed.changed_at, steady_since)
    return observed.heartbeat.phase in WORKING and now - changed_at < policy.stale_s


def _expected(policy: Policy, state: ExchangeState, observation: Observation, now: float) -> frozenset[str]:
    """Slots that should contribute soon: live, at most one round behind, not abstaining."""
    return frozenset(
        slot
        for slot, observed in observation.heartbeats.items()
        if slot not in observation.contributions
        and slot not in observation.refused
        and slot not in policy.removed
        and is_live(policy, observed, observation.steady_since, now)
        # A heartbeat lags behind, so a replica that has just closed the previous round may still report it.
        and observed.heartbeat.round >= state.round - 1
        and not _abstains(observed, state.round)
    )


def _starting(policy: Policy, state: ExchangeState, observation: Observation, now: float) -> frozenset[str]:
    """In an opening round and within the start window, expected slots that have not joined yet."""
    if not state.opening or now - state.since >= policy.start_window_s:
        return frozenset()
    absent = {
        slot
        for slot, observed in observation.heartbeats.items()
        # Before an extended run goes on, every slot's last heartbeat says that it has ended.
        if (observed.heartbeat.phase in _ENDED and (state.round == 0 or observed.fresh))
        or _abstains(observed, state.round)
    }
    return policy.expected - observation.contributions.keys() - observation.refused - absent - {state.me}


def _without_quorum(
    policy: Policy, state: ExchangeState, observation: Observation, expected: frozenset[str], now: float
) -> Wait | Abort:
    heartbeats, contributed = observation.heartbeats, observation.contributions.keys()
    # What is remembered of a contributor's heartbeat may be of its last incarnation.
    silent = heartbeats.keys() - contributed
    finished = sorted((slot for slot in silent if _has_finished(heartbeats[slot], now)), key=slot_order)
    # A slot that has not finished may still come back: counting it only means waiting for the deadline.
    possible = (heartbeats.keys() - policy.removed | contributed | {state.me} | policy.expected) - set(finished)
    if finished and len(possible) < policy.min_replicas:
        return Abort(
            error=RunFinished(
                f"round {state.round} can never be decided: min_replica_size={policy.min_replicas} "
                f"finished={','.join(finished)} left={','.join(sorted(possible, key=slot_order))}"
            )
        )
    # Also one that joins, or whose last heartbeat is of an earlier round: it comes to this round.
    coming = {
        slot
        for slot, observed in heartbeats.items()
        if observed.heartbeat.phase in WORKING | {"joining"}
        and now - max(observed.changed_at, observation.steady_since) < policy.stale_s
        and slot not in observation.refused | policy.removed
        and not _abstains(observed, state.round)
    }
    if state.abstaining and len(expected | coming | contributed) < policy.min_replicas:
        return Abort(
            error=Undecided(
                f"abstained in round {state.round}, and the other replicas cannot decide it: "
                f"min_replica_size={policy.min_replicas} contributed={len(contributed)} live={len(expected)}"
            )
        )
    return _wait(policy, state, observation, expected, [], now)


def _wait(
    policy: Policy,
    state: ExchangeState,
    observation: Observation,
    expected: frozenset[str],
    ends: list[float],
    now: float,
) -> Wait | Abort:
    """Wait until the next moment at which time alone may change the answer; abort at the deadline."""
    deadline = state.since + policy.deadline_s
    waiting_for = tuple(sorted(expected, key=slot_order))
    if now >= deadline:
        error = TimeoutError(
            f"round {state.round} exchange {state.exchange} was not decided in {policy.deadline_s:g} s: "
            f"contributed={','.join(sorted(observation.contributions, key=slot_order)) or 'none'} "
            f"min_replica_size={policy.min_replicas} live={','.join(waiting_for) or 'none'} "
            f"refused={','.join(sorted(observation.refused)) or 'none'}"
        )
        return Abort(error=error)
    heartbeats = [observation.heartbeats[slot] for slot in expected if slot in observation.heartbeats]
    stale = [max(observed.changed_at, observation.steady_since) + policy.stale_s for observed in heartbeats]
    start = [state.since + policy.start_window_s] if state.opening else []
    later = [moment for moment in (*ends, *stale, *start) if moment > now]
    return Wait(until=min([deadline, *later]), waiting_for=waiting_for)


def _has_finished(observed: ObservedHeartbeat, now: float) -> bool:
    return observed.heartbeat.phase == "finished" and (observed.fresh or now - observed.changed_at >= _RESTART_S)


def _abstains(observed: ObservedHeartbeat, round_number: int) -> bool:
    return observed.heartbeat.abstains is not None and observed.heartbeat.abstains.round == round_number
