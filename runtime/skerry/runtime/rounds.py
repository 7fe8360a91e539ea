"""How one exchange reaches its one decision: a pure function of what was observed and of local, monotonic time.

`step(policy, waiting, observation, now) -> (waiting, action)`. Never reads a clock, a store or a random number; the
driver (`skerry.runtime.exchange`) does, and so does a simulator. Safety does not depend on this file: whatever is
proposed, only one decision is created. This file decides how long to wait and for whom (liveness).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from skerry.runtime.errors import RunFinished, SkerryError
from skerry.runtime.keys import slot_order
from skerry.runtime.records import Contribution, Heartbeat, Share

if TYPE_CHECKING:
    from collections.abc import Mapping


class Unreachable(SkerryError):  # noqa: N818  named for the next step
    """This round cannot be decided now: too few replicas can contribute. Retry it; what was contributed stays valid."""


@dataclass(frozen=True, kw_only=True)
class Grace:
    """How long a quorum waits for the rest: a share of recent round time between a floor and a cap.

    A floor of 1 s covers heartbeat lag on a fast loop; the cap bounds what one straggler costs everybody per round.
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
    """What is the same for every exchange of a run, as one replica sees it.

    expected: slots that round 0 waits for, at most start_window_s. stale_s: a heartbeat that has not changed for so
    long belongs to a dead replica. deadline_s: when to give an exchange up. propose_delay_s: what each place in the
    slot order waits longer before proposing (some stores take one write per second and key). spares: list only the
    first min_replicas slots (torchft's FIXED_WITH_SPARES).
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


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another slot's latest heartbeat, and when (on my clock) I saw it change.

    fresh: I saw it change at least once; else it may be of an earlier session.
    """

    heartbeat: Heartbeat
    changed_at: float
    fresh: bool = True


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A usable contribution and the digest of its record."""

    contribution: Contribution
    digest: str


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the driver saw of an undecided exchange in one look.

    offers: usable contributions by slot, my own included. refused: slots whose contribution exists and is unusable.
    peers: other slots by name, from at least one look made since this exchange began. steady_since: when my own last
    outage ended; a silence before it proves nothing.
    """

    offers: Mapping[str, Offer]
    refused: frozenset[str]
    peers: Mapping[str, Peer]
    steady_since: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """My state in one undecided exchange. Times are on my own monotonic clock."""

    round: int
    exchange: int
    me: str
    abstaining: bool
    since: float
    round_seconds: float | None
    quorum_at: float | None = None
    ready_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Propose:
    """Try to create the decision with these members, in slot order."""

    members: tuple[Share, ...]


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Look again, at the latest at `until`. waiting_for: whose contribution is missing."""

    until: float
    waiting_for: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """Stop waiting and report this."""

    error: SkerryError | TimeoutError


Action: TypeAlias = Propose | Wait | GiveUp

_AT_WORK = frozenset({"train", "sync"})
_GONE = frozenset({"finished", "left", "failed", "stopping"})
# A job that is started again needs this long to queue, pull and import; until then an old "finished" proves nothing.
_COMEBACK_S = 120.0


def step(policy: Policy, waiting: Waiting, seen: Observation, now: float) -> tuple[Waiting, Action]:
    """What to do next in an exchange that has no decision yet.

    Proposes when the contributions reach min_replicas and either cover every slot worth waiting for or the grace
    window is over. Gives up when a quorum has become impossible, or at the deadline.
    """
    offered = sorted(seen.offers, key=slot_order)
    awaited = _awaited(policy, waiting, seen, now)
    starting = _starting(policy, waiting, seen, now)
    if len(offered) < policy.min_replicas:
        waiting = replace(waiting, quorum_at=None, ready_at=None)
        return waiting, _short_of_quorum(policy, waiting, seen, awaited | starting, now)
    quorum_at = now if waiting.quorum_at is None else waiting.quorum_at
    grace_ends = quorum_at + policy.grace.window_s(waiting.round_seconds)
    waiting = replace(waiting, quorum_at=quorum_at)
    # At the deadline a quorum proposes, whoever is missing: giving up would throw its contributions away.
    if (starting or (awaited and now < grace_ends)) and now < _deadline(policy, waiting):
        return replace(waiting, ready_at=None), _wait(policy, waiting, seen, awaited | starting, [grace_ends], now)
    ready_at = now if waiting.ready_at is None else waiting.ready_at
    waiting = replace(waiting, ready_at=ready_at)
    my_turn = ready_at + _place(policy, waiting, seen, offered, now) * policy.propose_delay_s
    if now < my_turn:
        return waiting, Wait(until=min(my_turn, _deadline(policy, waiting)), waiting_for=())
    return waiting, Propose(members=members(policy, seen.offers))


def members(policy: Policy, offers: Mapping[str, Offer]) -> tuple[Share, ...]:
    """The decision's members in slot order with their weights.

    A weight is the contribution's share of a round's work, or its tokens if the run weighs by tokens and every listed
    contribution carries some; times its discount.
    """
    slots = sorted(offers, key=slot_order)
    if policy.spares:
        slots = slots[: policy.min_replicas]
    by_tokens = policy.weighting == "tokens" and all(offers[slot].contribution.tokens for slot in slots)

    def weight(one: Contribution) -> float:
        return (float(one.tokens) if by_tokens else one.share) * one.discount

    return tuple(
        Share(slot=slot, contribution=offers[slot].digest, weight=weight(offers[slot].contribution)) for slot in slots
    )


def may_bring_tensors(policy: Policy, waiting: Waiting, seen: Observation, now: float) -> frozenset[str]:
    """Slots that are at work on this round and do not wait in it yet: one that waits without an offer has none."""
    coming = _awaited(policy, waiting, seen, now) | _starting(policy, waiting, seen, now)
    return frozenset(slot for slot in coming if not _waits(seen.peers.get(slot), waiting.round))


def is_live(policy: Policy, peer: Peer, seen: Observation, now: float) -> bool:
    """The slot's heartbeat changes and says that it is at work."""
    heard = max(peer.changed_at, seen.steady_since)
    return peer.heartbeat.phase in _AT_WORK and now - heard < policy.stale_s


def _waits(peer: Peer | None, round_number: int) -> bool:
    return peer is not None and peer.heartbeat.phase == "sync" and peer.heartbeat.round == round_number


def _awaited(policy: Policy, waiting: Waiting, seen: Observation, now: float) -> frozenset[str]:
    """Slots that are expected to contribute soon: live, at most one round behind, not abstaining."""
    return frozenset(
        slot
        for slot, peer in seen.peers.items()
        if slot not in seen.offers
        and slot not in seen.refused
        and is_live(policy, peer, seen, now)
        # A heartbeat lags an advance, so a peer that just closed the round before may still show it.
        and peer.heartbeat.round >= waiting.round - 1
        and not _abstains(peer, waiting.round)
    )


def _starting(policy: Policy, waiting: Waiting, seen: Observation, now: float) -> frozenset[str]:
    """In round 0, expected slots that are still on their way, within the start window."""
    if waiting.round > 0 or now - waiting.since >= policy.start_window_s:
        return frozenset()
    out = {slot for slot, peer in seen.peers.items() if peer.heartbeat.phase in _GONE or _abstains(peer, 0)}
    return policy.expected - seen.offers.keys() - seen.refused - out - {waiting.me}


def _short_of_quorum(
    policy: Policy, waiting: Waiting, seen: Observation, awaited: frozenset[str], now: float
) -> Wait | GiveUp:
    finished = sorted((slot for slot, peer in seen.peers.items() if _has_finished(peer, now)), key=slot_order)
    # Whoever has not finished may come, or come back: counting it only means waiting for the deadline.
    possible = (seen.peers.keys() | seen.offers.keys() | {waiting.me} | policy.expected) - set(finished)
    if finished and len(possible) < policy.min_replicas:
        return GiveUp(
            error=RunFinished(
                f"round {waiting.round} can never be decided: min_replica_size={policy.min_replicas}, "
                f"finished={','.join(finished)}, left={','.join(sorted(possible, key=slot_order))}"
            )
        )
    joining = {
        s for s, p in seen.peers.items() if p.heartbeat.phase == "joining" and now - p.changed_at < policy.stale_s
    }
    if waiting.abstaining and len(awaited | joining | seen.offers.keys()) < policy.min_replicas:
        return GiveUp(
            error=Unreachable(
                f"abstained in round {waiting.round}, and the others cannot decide it: "
                f"min_replica_size={policy.min_replicas} contributed={len(seen.offers)} live={len(awaited)}"
            )
        )
    return _wait(policy, waiting, seen, awaited, [], now)


def _wait(
    policy: Policy,
    waiting: Waiting,
    seen: Observation,
    awaited: frozenset[str],
    ends: list[float],
    now: float,
) -> Wait | GiveUp:
    deadline = _deadline(policy, waiting)
    if now >= deadline:
        error = TimeoutError(
            f"round {waiting.round} exchange {waiting.exchange} was not decided in {policy.deadline_s:g} s: "
            f"contributed={','.join(sorted(seen.offers, key=slot_order)) or 'none'} "
            f"min_replica_size={policy.min_replicas} live={','.join(sorted(awaited, key=slot_order)) or 'none'} "
            f"refused={','.join(sorted(seen.refused)) or 'none'}"
        )
        return GiveUp(error=error)
    heard = [max(seen.peers[slot].changed_at, seen.steady_since) for slot in awaited if slot in seen.peers]
    stale = [moment + policy.stale_s for moment in heard]
    start = [waiting.since + policy.start_window_s] if waiting.round == 0 else []
    later = [moment for moment in (*ends, *stale, *start) if moment > now]
    return Wait(until=min([deadline, *later]), waiting_for=tuple(sorted(awaited, key=slot_order)))


def _deadline(policy: Policy, waiting: Waiting) -> float:
    return waiting.since + policy.deadline_s


def _place(policy: Policy, waiting: Waiting, seen: Observation, offered: list[str], now: float) -> int:
    """My place among those who would propose: live contributors in slot order; an abstainer comes last."""
    proposers = [
        slot
        for slot in offered
        if slot == waiting.me or ((p := seen.peers.get(slot)) and is_live(policy, p, seen, now))
    ]
    return proposers.index(waiting.me) if waiting.me in proposers else len(proposers)


def _has_finished(peer: Peer, now: float) -> bool:
    return peer.heartbeat.phase == "finished" and (peer.fresh or now - peer.changed_at >= _COMEBACK_S)


def _abstains(peer: Peer, round_number: int) -> bool:
    return peer.heartbeat.abstains is not None and peer.heartbeat.abstains.round == round_number
