"""The pure part of the protocol, as tables: when an exchange waits, proposes, gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.logs import policy

from skerry.runtime.errors import RunFinished
from skerry.runtime.records import GENESIS, Abstention, Contribution, Heartbeat
from skerry.runtime.rounds import (
    GiveUp,
    Grace,
    Observation,
    Offer,
    Peer,
    Policy,
    Propose,
    Unreachable,
    Wait,
    Waiting,
    may_bring_tensors,
    members,
    step,
)

RUN = "a" * 32
NOW = 100.0


def offer(slot: str, *, tokens: int = 0, round_number: int = 3) -> Offer:
    contribution = Contribution(
        run=RUN,
        round=round_number,
        exchange=0,
        slot=slot,
        incarnation=0,
        base=GENESIS,
        index="1" * 32,
        parts=(),
        tokens=tokens,
        inner_steps=4,
        nonce="b" * 32,
    )
    return Offer(contribution=contribution, digest=f"{abs(hash(slot)):064x}"[:64])


def peer(
    slot: str,
    *,
    phase: str = "train",
    at: int = 3,
    changed: float = NOW,
    abstains: int | None = None,
    fresh: bool = True,
) -> Peer:
    heartbeat = Heartbeat(
        run=RUN,
        slot=slot,
        incarnation=0,
        sequence=1,
        round=at,
        inner_step=0,
        phase=phase,  # type: ignore[arg-type]
        abstains=None if abstains is None else Abstention(round=abstains, reason="NaN"),
        loss=None,
        tokens=0,
        tokens_per_s=None,
        uploaded_bytes=0,
        downloaded_bytes=0,
        waiting_for=(),
        notice=None,
    )
    return Peer(heartbeat=heartbeat, changed_at=changed, fresh=fresh)


def look(offers: list[str], peers: list[Peer] | None = None, refused: list[str] | None = None) -> Observation:
    return Observation(
        offers={slot: offer(slot) for slot in offers},
        refused=frozenset(refused or []),
        peers={p.heartbeat.slot: p for p in peers or []},
    )


def waiting(**changes: object) -> Waiting:
    start = Waiting(round=3, exchange=0, me="a", abstaining=False, since=NOW, round_seconds=10.0)
    return replace(start, **changes)  # type: ignore[arg-type]


def test_proposes_at_once_when_every_live_slot_has_contributed() -> None:
    _, action = step(policy(), waiting(), look(["b", "a"], [peer("b")]), NOW)
    assert isinstance(action, Propose)
    assert [share.slot for share in action.members] == ["a", "b"]


def test_waits_for_a_live_slot_only_as_long_as_the_grace_window() -> None:
    seen = look(["a", "b"], [peer("b"), peer("c", changed=NOW + 4)])
    state, action = step(policy(), waiting(), seen, NOW)
    assert isinstance(action, Wait)
    assert action.waiting_for == ("c",)
    assert action.until == NOW + 5.0  # half of a round of 10 s
    state, action = step(policy(), state, seen, NOW + 4.9)
    assert isinstance(action, Wait)
    _, action = step(policy(), state, seen, NOW + 5.0)
    assert isinstance(action, Propose)


@pytest.mark.parametrize(
    "ignored",
    [
        pytest.param(peer("c", changed=NOW - 5.0), id="dead"),
        pytest.param(peer("c", phase="joining"), id="joining"),
        pytest.param(peer("c", phase="finished"), id="finished"),
        pytest.param(peer("c", phase="left"), id="left"),
        pytest.param(peer("c", phase="stopping"), id="stopping"),
        pytest.param(peer("c", at=1), id="two rounds behind"),
        pytest.param(peer("c", abstains=3), id="abstaining"),
    ],
)
def test_nobody_waits_for_a_slot_that_will_not_come(ignored: Peer) -> None:
    _, action = step(policy(), waiting(), look(["a", "b"], [peer("b"), ignored]), NOW)
    assert isinstance(action, Propose)


@pytest.mark.parametrize(
    "awaited",
    [
        pytest.param(peer("c", at=2), id="one round behind: its heartbeat lags"),
        pytest.param(peer("c", phase="sync"), id="uploading"),
        pytest.param(peer("c", abstains=2), id="abstained in an older round"),
        pytest.param(peer("c", changed=NOW - 4.9), id="last beat a moment ago"),
    ],
)
def test_a_slot_at_work_is_waited_for(awaited: Peer) -> None:
    _, action = step(policy(), waiting(), look(["a", "b"], [peer("b"), awaited]), NOW)
    assert isinstance(action, Wait)
    assert action.waiting_for == ("c",)


def test_a_silence_during_my_own_outage_proves_nothing() -> None:
    seen = replace(look(["a", "b"], [peer("b"), peer("c", changed=NOW - 300)]), steady_since=NOW - 1)
    _, action = step(policy(), waiting(), seen, NOW)
    assert isinstance(action, Wait)
    _, action = step(policy(), waiting(), replace(seen, steady_since=NOW - 5), NOW)
    assert isinstance(action, Propose)


def test_whoever_waits_without_an_offer_brings_no_tensors() -> None:
    peers = [peer("b", phase="sync"), peer("c", phase="sync", at=2), peer("d"), peer("e", abstains=3)]
    assert may_bring_tensors(policy(), waiting(), look([], peers), NOW) == {"c", "d"}


def test_a_refused_contribution_is_not_waited_for() -> None:
    _, action = step(policy(), waiting(), look(["a", "b"], [peer("b"), peer("c")], refused=["c"]), NOW)
    assert isinstance(action, Propose)


def test_never_proposes_below_the_quorum_even_after_the_grace_window() -> None:
    state = waiting(quorum_at=NOW)
    state, action = step(policy(), state, look(["a"], [peer("b", changed=NOW + 90)]), NOW + 90)
    assert isinstance(action, Wait)
    assert state.quorum_at is None


def test_gives_up_at_the_deadline_and_says_who_contributed() -> None:
    _, action = step(policy(), waiting(), look(["a"]), NOW + 100.0)
    assert isinstance(action, GiveUp)
    assert isinstance(action.error, TimeoutError)
    assert "contributed=a" in str(action.error)


@pytest.mark.parametrize("terms", [{"deadline_s": 2.0}, {"deadline_s": 2.0, "start_window_s": 500.0}])
def test_at_the_deadline_a_quorum_proposes_whoever_is_missing(terms: dict[str, float]) -> None:
    settings = policy(expected=frozenset("abc"), **terms)
    state, action = step(settings, waiting(round=0), look(["a", "b"], [peer("c", at=0, changed=NOW + 2)]), NOW + 1.9)
    assert isinstance(action, Wait)
    _, action = step(settings, state, look(["a", "b"], [peer("c", at=0, changed=NOW + 2)]), NOW + 2.0)
    assert isinstance(action, Propose)


def test_round_zero_waits_for_expected_slots_within_the_start_window() -> None:
    terms = policy(expected=frozenset("abc"), start_window_s=30.0)
    state = waiting(round=0)
    state, action = step(terms, state, look(["a", "b"]), NOW + 29.9)
    assert isinstance(action, Wait)
    assert action.waiting_for == ("c",)
    _, action = step(terms, state, look(["a", "b"]), NOW + 30.0)
    assert isinstance(action, Propose)


def test_later_rounds_do_not_wait_for_expected_slots() -> None:
    terms = policy(expected=frozenset("abc"), start_window_s=30.0)
    _, action = step(terms, waiting(round=1), look(["a", "b"], []), NOW)
    assert isinstance(action, Propose)


def test_an_abstainer_gives_up_at_once_when_the_others_are_too_few() -> None:
    _, action = step(policy(), waiting(abstaining=True), look([], [peer("b")]), NOW)
    assert isinstance(action, GiveUp)
    assert isinstance(action.error, Unreachable)


def test_an_abstainer_waits_for_others_who_can_decide_without_it() -> None:
    _, action = step(policy(), waiting(abstaining=True), look(["b"], [peer("b"), peer("c")]), NOW)
    assert isinstance(action, Wait)


@pytest.mark.parametrize("phase", ["joining", "sync"])
def test_an_abstainer_waits_for_others_who_are_on_their_way(phase: str) -> None:
    _, action = step(policy(), waiting(abstaining=True), look(["b"], [peer("b"), peer("c", phase=phase)]), NOW)
    assert isinstance(action, Wait)


def test_an_abstainer_waits_for_expected_slots_in_round_zero() -> None:
    terms = policy(expected=frozenset("abc"), start_window_s=30.0)
    _, action = step(terms, waiting(round=0, abstaining=True), look([], []), NOW)
    assert isinstance(action, Wait)


def test_ends_the_run_when_the_quorum_left_by_finishing() -> None:
    _, action = step(policy(), waiting(), look(["a"], [peer("b", phase="finished")]), NOW)
    assert isinstance(action, GiveUp)
    assert isinstance(action.error, RunFinished)
    assert "finished=b" in str(action.error)


def test_a_dead_slot_may_come_back_so_the_run_is_not_over() -> None:
    seen = look(["a"], [peer("b", phase="finished"), peer("c", changed=0.0)])
    _, action = step(policy(), waiting(), seen, NOW)
    assert isinstance(action, Wait)


def test_a_finished_heartbeat_of_an_earlier_session_does_not_end_the_run() -> None:
    seen = look(["a"], [peer("b", phase="finished", fresh=False)])
    _, action = step(policy(deadline_s=1000.0), waiting(), seen, NOW + 60)
    assert isinstance(action, Wait)
    _, action = step(policy(deadline_s=1000.0), waiting(), seen, NOW + 120)
    assert isinstance(action, GiveUp)


@pytest.mark.parametrize("phase", ["left", "failed", "stopping"])
def test_a_slot_that_left_may_come_back_so_the_run_is_not_over(phase: str) -> None:
    _, action = step(policy(), waiting(), look(["a"], [peer("b", phase="finished"), peer("c", phase=phase)]), NOW)
    assert isinstance(action, Wait)


def test_live_contributors_propose_one_after_the_other() -> None:
    terms = policy(propose_delay_s=0.5)
    seen = look(["a", "b", "c"], [peer("b"), peer("c")])
    _, first = step(terms, waiting(me="a"), seen, NOW)
    state, third = step(terms, waiting(me="c"), seen, NOW)
    assert isinstance(first, Propose)
    assert isinstance(third, Wait)
    _, third = step(terms, state, seen, NOW + 1.0)
    assert isinstance(third, Propose)


def test_a_dead_contributor_does_not_delay_the_proposal_of_the_next() -> None:
    terms = policy(propose_delay_s=0.5)
    _, action = step(terms, waiting(me="b"), look(["a", "b"], [peer("a", changed=0.0)]), NOW)
    assert isinstance(action, Propose)


def test_slots_are_ordered_by_number_not_by_letter() -> None:
    shares = members(policy(), {slot: offer(slot) for slot in ("b-10", "b-2", "a-3")})
    assert [share.slot for share in shares] == ["a-3", "b-2", "b-10"]


def test_spares_are_left_out_of_the_record() -> None:
    shares = members(policy(spares=True, min_replicas=2), {slot: offer(slot) for slot in "cba"})
    assert [share.slot for share in shares] == ["a", "b"]


@pytest.mark.parametrize(
    ("weighting", "tokens", "weights"),
    [
        ("uniform", (10, 30), [1.0, 1.0]),
        ("tokens", (10, 30), [10.0, 30.0]),
        ("tokens", (10, 0), [1.0, 1.0]),
    ],
)
def test_tokens_are_weights_only_if_asked_for_and_all_have_some(
    weighting: str, tokens: tuple[int, int], weights: list[float]
) -> None:
    terms: Policy = policy(weighting=weighting)
    offers = {slot: offer(slot, tokens=count) for slot, count in zip("ab", tokens, strict=True)}
    assert [share.weight for share in members(terms, offers)] == weights


@pytest.mark.parametrize(("seconds", "window"), [(None, 60.0), (1.0, 1.0), (40.0, 10.0), (1e4, 60.0)])
def test_the_grace_window_is_a_share_of_round_time_between_floor_and_cap(seconds: float | None, window: float) -> None:
    assert Grace(floor_s=1.0, cap_s=60.0, share=0.25).window_s(seconds) == window
