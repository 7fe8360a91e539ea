"""The pure decisions of an exchange: when it waits, proposes or aborts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.kit.protocol import contribution, heartbeat, policy

from skerry.runtime.errors import RunFinished
from skerry.runtime.protocol.quorum import (
    Abort,
    Action,
    ExchangeState,
    Grace,
    Observation,
    ObservedContribution,
    ObservedHeartbeat,
    Policy,
    Propose,
    Undecided,
    Wait,
    may_still_contribute,
    members,
    step,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

NOW = 100.0
# A run of three planned slots, which are awaited for half a minute.
PLANNED = policy(expected=frozenset("abc"), start_window_s=30.0)


def contributions(slots: Iterable[str], **changes: object) -> dict[str, ObservedContribution]:
    return {
        slot: ObservedContribution(contribution=contribution(slot, **changes), digest=f"{number:064x}")
        for number, slot in enumerate(slots)
    }


def observed(slot: str, *, changed: float = NOW, fresh: bool = True, **changes: object) -> ObservedHeartbeat:
    beat = heartbeat(slot, **changes)  # type: ignore[arg-type]
    return ObservedHeartbeat(heartbeat=beat, changed_at=changed, fresh=fresh)


def observe(slots: str, *heartbeats: ObservedHeartbeat, refused: str = "", steady_since: float = 0.0) -> Observation:
    return Observation(
        contributions=contributions(slots),
        refused=frozenset(refused),
        heartbeats={beat.heartbeat.slot: beat for beat in heartbeats},
        steady_since=steady_since,
    )


def state(**changes: object) -> ExchangeState:
    start = ExchangeState(round=3, exchange=0, me="a", abstaining=False, since=NOW, round_seconds=10.0)
    return replace(start, **{"opening": changes.get("round") == 0, **changes})  # type: ignore[arg-type]


def action(observation: Observation, now: float = NOW, terms: Policy | None = None, **changes: object) -> Action:
    return step(terms or policy(), state(**changes), observation, now)[1]


def kinds(observation: Observation, *times: float, terms: Policy | None = None, **changes: object) -> list[str]:
    """The kind of the action at each time: Wait, Propose or Abort."""
    current, names = state(**changes), list[str]()
    for now in times:
        current, taken = step(terms or policy(), current, observation, now)
        names.append(type(taken).__name__)
    return names


def aborted(taken: Action) -> Exception:
    assert isinstance(taken, Abort)
    return taken.error


def test_exchange_is_proposed_once_every_live_slot_contributed() -> None:
    proposal = action(observe("ba", observed("b")))
    assert isinstance(proposal, Propose)
    assert [share.slot for share in proposal.members] == ["a", "b"]


def test_removed_slot_is_not_awaited_and_its_contribution_counts() -> None:
    removed = policy(removed=frozenset("c"))
    assert kinds(observe("ab", observed("b"), observed("c")), NOW, terms=removed) == ["Propose"]
    proposal = action(observe("abc", observed("b"), observed("c")), terms=removed)
    assert isinstance(proposal, Propose)
    assert [share.slot for share in proposal.members] == ["a", "b", "c"]
    opening = policy(expected=frozenset("ab"), removed=frozenset("c"), start_window_s=30.0)
    assert kinds(observe("ab", observed("b")), NOW, terms=opening, round=0) == ["Propose"]


def test_live_slot_is_awaited_for_the_grace_window() -> None:
    observation = observe("ab", observed("b"), observed("c", changed=NOW + 4))
    assert action(observation) == Wait(until=NOW + 5.0, waiting_for=("c",))  # half of a round of 10 s
    assert kinds(observation, NOW, NOW + 4.9, NOW + 5.0) == ["Wait", "Wait", "Propose"]


@pytest.mark.parametrize(
    "ignored",
    [
        pytest.param(observed("c", changed=NOW - 5.0), id="dead"),
        *(pytest.param(observed("c", phase=phase), id=phase) for phase in ("joining", "finished", "left", "stopping")),
        pytest.param(observed("c", round=1), id="two rounds behind"),
        pytest.param(observed("c", abstains=3), id="abstaining"),
    ],
)
def test_slot_that_will_not_contribute_is_not_awaited(ignored: ObservedHeartbeat) -> None:
    assert isinstance(action(observe("ab", observed("b"), ignored)), Propose)


@pytest.mark.parametrize(
    "expected",
    [
        pytest.param(observed("c", round=2), id="one round behind: its heartbeat lags"),
        pytest.param(observed("c", phase="sync"), id="uploading"),
        pytest.param(observed("c", abstains=2), id="abstained in an older round"),
        pytest.param(observed("c", changed=NOW - 4.9), id="heartbeat almost stale"),
    ],
)
def test_working_slot_is_awaited(expected: ObservedHeartbeat) -> None:
    waiting = action(observe("ab", observed("b"), expected))
    assert isinstance(waiting, Wait)
    assert waiting.waiting_for == ("c",)


@pytest.mark.parametrize(("steady_since", "kind"), [(NOW - 1, Wait), (NOW - 5, Propose)])
def test_silence_during_the_own_outage_is_no_death(steady_since: float, kind: type) -> None:
    silent = observed("c", changed=NOW - 300)
    assert isinstance(action(observe("ab", observed("b"), silent, steady_since=steady_since)), kind)


def test_waiting_slot_without_a_contribution_has_no_tensors() -> None:
    heartbeats = [observed("b", phase="sync"), observed("c", phase="sync", round=2), observed("d")]
    observation = observe("", *heartbeats, observed("e", abstains=3))
    assert may_still_contribute(policy(), state(), observation, NOW) == {"c", "d"}


def test_refused_slot_is_not_awaited() -> None:
    assert isinstance(action(observe("ab", observed("b"), observed("c"), refused="c")), Propose)


def test_grace_window_does_not_end_without_a_quorum() -> None:
    observation = observe("a", observed("b", changed=NOW + 90))
    current, waiting = step(policy(), state(quorum_at=NOW), observation, NOW + 90)
    assert isinstance(waiting, Wait)
    assert current.quorum_at is None


def test_deadline_without_a_quorum_aborts_and_names_the_contributors() -> None:
    error = aborted(action(observe("a"), NOW + 100.0))
    assert isinstance(error, TimeoutError)
    assert "contributed=a" in str(error)


@pytest.mark.parametrize("start_window_s", [0.0, 500.0])
def test_deadline_with_a_quorum_proposes_it(start_window_s: float) -> None:
    terms = replace(PLANNED, deadline_s=2.0, start_window_s=start_window_s)
    observation = observe("ab", observed("c", round=0, changed=NOW + 2))
    assert kinds(observation, NOW + 1.9, NOW + 2.0, terms=terms, round=0) == ["Wait", "Propose"]


def test_expected_slots_are_awaited_in_round_0_within_the_window() -> None:
    waiting = action(observe("ab"), terms=PLANNED, round=0)
    assert isinstance(waiting, Wait)
    assert waiting.waiting_for == ("c",)
    assert kinds(observe("ab"), NOW + 29.9, NOW + 30.0, terms=PLANNED, round=0) == ["Wait", "Propose"]
    assert kinds(observe("ab"), NOW, terms=PLANNED, round=1) == ["Propose"]


@pytest.mark.parametrize(
    ("last", "taken"),
    [
        (observed("c", phase="finished", fresh=False), ["Wait", "Propose"]),  # of the session before
        (observed("c", phase="joining"), ["Wait", "Propose"]),
        (observed("c", phase="failed"), ["Propose", "Propose"]),
    ],
)
def test_first_round_after_an_extension_waits_for_starts(last: ObservedHeartbeat, taken: list[str]) -> None:
    observation = observe("ab", last)
    assert kinds(observation, NOW + 29.9, NOW + 30.0, terms=PLANNED, opening=True) == taken
    assert kinds(observation, NOW + 29.9, terms=PLANNED) == ["Propose"]


def test_abstainer_aborts_when_the_others_are_too_few() -> None:
    assert isinstance(aborted(action(observe("", observed("b")), abstaining=True)), Undecided)


@pytest.mark.parametrize("phase", ["train", "joining", "sync"])
def test_abstainer_waits_while_the_others_may_decide(phase: str) -> None:
    assert isinstance(action(observe("b", observed("b"), observed("c", phase=phase)), abstaining=True), Wait)


def test_abstainer_waits_for_live_slot_of_an_earlier_round() -> None:
    """Its heartbeat lags, or it follows the log: it comes to this round."""
    behind = observed("c", round=1)
    assert isinstance(action(observe("b", observed("b"), behind), abstaining=True), Wait)
    for gone in (observed("c", round=1, changed=NOW - 5.0), observed("c", round=1, abstains=3)):
        assert isinstance(aborted(action(observe("b", observed("b"), gone), abstaining=True)), Undecided)


def test_abstainer_waits_for_expected_slots_in_round_0() -> None:
    assert isinstance(action(observe(""), terms=PLANNED, round=0, abstaining=True), Wait)


def test_run_ends_when_too_few_slots_are_unfinished() -> None:
    error = aborted(action(observe("a", observed("b", phase="finished"))))
    assert isinstance(error, RunFinished)
    assert "finished=b" in str(error)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(observed("c", changed=0.0), id="dead"),
        *(pytest.param(observed("c", phase=phase), id=phase) for phase in ("left", "failed", "stopping")),
    ],
)
def test_run_does_not_end_while_a_slot_may_come_back(other: ObservedHeartbeat) -> None:
    assert isinstance(action(observe("a", observed("b", phase="finished"), other)), Wait)


@pytest.mark.parametrize(("seconds", "kind"), [(60, Wait), (120, Abort)])
def test_old_finished_heartbeat_ends_the_run_only_after_a_while(seconds: float, kind: type) -> None:
    observation = observe("a", observed("b", phase="finished", fresh=False))
    assert isinstance(action(observation, NOW + seconds, policy(deadline_s=1000.0)), kind)


def test_contributors_propose_in_slot_order_whatever_their_heartbeats() -> None:
    terms = policy(propose_delay_s=0.5)
    observation = observe("abc", observed("b"), observed("c"))
    assert kinds(observation, NOW, terms=terms) == ["Propose"]
    assert kinds(observation, NOW, NOW + 1.0, terms=terms, me="c") == ["Wait", "Propose"]
    observation = observe("ab", observed("a", changed=0.0))
    assert kinds(observation, NOW, NOW + 0.5, terms=terms, me="b") == ["Wait", "Propose"]


def test_contributor_that_had_finished_before_still_counts() -> None:
    """It was started again. Its heartbeat is not read any more, once it has contributed."""
    terms = policy(min_replicas=3)
    observation = observe("ac", observed("b"), observed("c", phase="finished"))
    assert kinds(observation, NOW, terms=terms) == ["Wait"]
    assert isinstance(
        aborted(action(observe("a", observed("b"), observed("c", phase="finished")), terms=terms)), RunFinished
    )


def test_members_are_ordered_by_the_slots_number_without_spares() -> None:
    slots = contributions(("b-10", "b-2", "a-3"))
    assert [share.slot for share in members(policy(), slots)] == ["a-3", "b-2", "b-10"]
    assert [share.slot for share in members(policy(spares=True, min_replicas=2), slots)] == ["a-3", "b-2"]


@pytest.mark.parametrize(
    ("weighting", "tokens", "weights"),
    [
        ("uniform", (10, 30), [1.0, 1.0]),
        ("tokens", (10, 30), [10.0, 30.0]),
        ("tokens", (10, 0), [1.0, 1.0]),
    ],
)
def test_tokens_are_weights_if_configured_and_all_have_some(
    weighting: str, tokens: tuple[int, int], weights: list[float]
) -> None:
    both = contributions("a", tokens=tokens[0]) | contributions("b", tokens=tokens[1])
    assert [share.weight for share in members(policy(weighting=weighting), both)] == weights


@pytest.mark.parametrize(("seconds", "window"), [(None, 60.0), (1.0, 1.0), (40.0, 10.0), (1e4, 60.0)])
def test_grace_window_is_a_bounded_share_of_round_time(seconds: float | None, window: float) -> None:
    assert Grace(floor_s=1.0, cap_s=60.0, share=0.25).window_s(seconds) == window
