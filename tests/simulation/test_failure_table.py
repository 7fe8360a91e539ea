"""The failure table of the round protocol, row by row: each fault at the call where it hurts, and what must follow.

All invariants are asserted after every event of each of these runs too: `checked` fails on the first violation.
"""
# Breaks the simulated replica from inside, once.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.simulation import poison
from tests.simulation.faults import CALL_FAULTS, Rates
from tests.simulation.run import Result, Simulation
from tests.simulation.scenario import Scenario, calm, with_settings
from tests.simulation.search import quiet

from skerry.runtime.checkpointing.garbage_collector import Retention
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import MAX_RECORD_BYTES
from skerry.runtime.log.records import Contribution
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.training.round_runner import RoundRunner

if TYPE_CHECKING:
    from tests.simulation.faults import Call, Script
    from tests.simulation.session import Mode
    from tests.simulation.world import Process

    from skerry.runtime.store.interface import Data

STALE_S = 8.0
GRACE_S = 2.0
TRAIN_S = 4.0
# Two polls, and a few calls of 20 ms.
POLLS_S = 3.0


def once(slot: str, verb: str, start: str, moment: str, what: str) -> Script:
    """The first time that a process of this slot makes such a call, this fault happens to it."""
    struck: list[str] = []

    def script(call: Call) -> str | None:
        if struck or (call.process.slot, call.verb, call.moment) != (slot, verb, moment):
            return None
        if not call.key.startswith(start):
            return None
        struck.append(call.key)
        return what

    return script


def simulated(scenario: Scenario, script: Script | None = None, *, skew_s: float = 7200.0) -> tuple[Simulation, Result]:
    with quiet():
        simulation = Simulation(scenario, script, skew_s=skew_s)
        return simulation, simulation.run()


def checked(scenario: Scenario, script: Script | None = None) -> tuple[Simulation, Result]:
    """Run it; no invariant may break, and it must come to its end."""
    simulation, result = simulated(scenario, script)
    assert not result.violations, result.report()
    return simulation, result


def time_of(result: Result, what: str, key: str) -> float:
    """The time at which a write took effect."""
    return next(
        event.at for event in result.trace if event.what == what and event.key == key and event.outcome == "True"
    )


def waited(result: Result, round_number: int) -> float:
    """Seconds from the last contribution that was in time to the decision."""
    decided = time_of(result, "create", keys.decision(round_number, 0))
    offered = [
        event.at
        for event in result.trace
        if event.what == "create"
        and event.key.startswith(keys.contributions_prefix(round_number, 0))
        and event.at < decided
    ]
    return decided - max(offered)


def statuses(simulation: Simulation) -> Counter[str]:
    return Counter(process.status for process in simulation.processes)


PAYLOAD, CONTRIBUTION = "payloads/00000001/", "contributions/00000001-0000/"


@pytest.mark.parametrize(
    ("start", "moment"), [(PAYLOAD, "before"), (PAYLOAD, "after"), (CONTRIBUTION, "before"), (CONTRIBUTION, "after")]
)
def test_others_decide_within_the_stale_time_after_a_kill_near_an_upload(start: str, moment: str) -> None:
    simulation, result = checked(calm(rounds=12), once("r-1", "create", start, moment, "crash"))
    assert result.faults["crash"] == 1
    assert waited(result, 1) <= STALE_S + GRACE_S + POLLS_S
    members = simulation.checker.members
    assert all({"r-0", "r-2"} <= set(members[n]) for n in range(12))
    assert any("r-1" in members[n] for n in range(2, 12))
    assert ("r-1" in members[1]) == ((start, moment) == (CONTRIBUTION, "after"))


def test_a_replica_that_never_comes_back_costs_its_stale_time_once() -> None:
    scenario = replace(calm(), lost=frozenset({"r-1"}))
    simulation, result = checked(scenario, once("r-1", "create", PAYLOAD, "before", "crash"))
    assert waited(result, 1) <= STALE_S + GRACE_S + POLLS_S
    assert all(waited(result, n) <= POLLS_S for n in (2, 3))
    assert simulation.checker.members[3] == ("r-0", "r-2")


@pytest.mark.parametrize("slots", [("r-1",), ("r-0", "r-1", "r-2")])
def test_a_kill_between_decision_and_apply_changes_no_bit(slots: tuple[str, ...]) -> None:
    undisturbed, _ = checked(calm())
    struck: set[str] = set()

    def script(call: Call) -> str | None:
        # Reading contributions after the decision is there: it is decided, and not yet applied.
        decided = 1 in simulation.checker.decisions
        if decided and (call.verb, call.moment) == ("read", "before") and call.process.slot in set(slots) - struck:
            struck.add(call.process.slot)
            return "crash"
        return None

    with quiet():
        simulation = Simulation(calm(), script)
        result = simulation.run()
    assert not result.violations, result.report()
    assert result.faults["crash"] == len(slots)
    assert simulation.checker.states[2] == undisturbed.checker.states[2]
    assert simulation.checker.head == 4


def test_of_two_different_proposals_one_wins_and_both_use_it() -> None:
    scenario = with_settings(calm(min_replicas=1, rounds=3), "r-2", train_s=TRAIN_S + 2.5)
    # r-0 proposes without the slow one, and its request stays on the way until the others propose with it.
    simulation, result = checked(scenario, once("r-0", "create", keys.decision(1, 0), "before", "delayed:10"))
    proposals = [event for event in result.trace if event.what == "create" and event.key == keys.decision(1, 0)]
    assert [proposal.outcome for proposal in proposals].count("True") == 1
    assert any(proposal.outcome == "False" and proposal.actor.startswith("r-0") for proposal in proposals)
    assert simulation.checker.head == 3


def creator_of(start: str) -> str:
    simulation, result = checked(calm(rounds=8))
    created = (event for event in result.trace if event.what == "create" and event.key.startswith(start))
    actor = next(event.actor for event in created if event.outcome == "True")
    return next(process.slot for process in simulation.processes if process.name == actor)


@pytest.mark.parametrize("start", [PAYLOAD, CONTRIBUTION, "exchanges/00000001", "commits/00000001"])
def test_old_incarnation_that_wakes_after_an_hour_is_fenced(start: str) -> None:
    slot = "r-1"
    if start.startswith(("exchanges", "commits")):  # one replica creates these: the one that does so undisturbed
        slot = creator_of(start)
    simulation, result = checked(calm(rounds=8), once(slot, "create", start, "before", "pause:3600"))
    assert result.seconds > 3600
    old = next(process for process in simulation.processes if process.slot == slot)
    assert old.status == "fenced"
    landed = [
        event.key
        for event in result.trace
        if event.actor == old.name and event.at > 3600 and event.what == "create" and event.outcome == "True"
    ]
    # What it had on the way lands, behind the record that could have listed it.
    own = {"payloads", "contributions", "receipts"}
    assert all(key.split("/")[0] in own or key.startswith(keys.CHECKPOINTS) for key in landed)
    # A checkpoint is that of the round which it was closing, and never of a later one. The checker compares its state.
    assert all(keys.round_of(key) <= 2 for key in landed if key.startswith(keys.CHECKPOINTS)), landed
    assert "r-1" not in simulation.checker.members[1] or start.startswith(("exchanges", "commits"))


def test_straggler_ends_its_round_early_and_is_in_most_records() -> None:
    terms = calm(rounds=10, sync_every=12, train_s=18.0, grace=Grace(floor_s=1.0, cap_s=20.0, share=0.5))
    simulation, result = checked(with_settings(terms, "r-2", train_s=54.0))
    simulation.checker.ledger.check_participation(terms.slots, 10)
    assert not simulation.checker.violations
    assert result.facts["rounds ended early"] >= 8


def fails_after_an_early_end() -> tuple[Simulation, Result, list[int]]:
    """All are cut off when the straggler contributes its share of round 1, and it trains for that round again.

    Returns how many rounds had ended early by then, too.
    """
    terms = calm(sync_every=12, train_s=6.0, grace=Grace(floor_s=24.0, cap_s=24.0, share=0.5))
    early_ends: list[int] = []

    def script(call: Call) -> str | None:
        if not early_ends and (call.process.slot, call.verb, call.key) == ("r-2", "read", keys.decision(1, 0)):
            early_ends.append(simulation.world.facts["rounds ended early"])
            for process in simulation.processes:
                process.cut_off_until = simulation.world.now + 80.0
        return None

    with quiet():
        impatient = replace(terms.terms, deadline_s=20.0)
        simulation = Simulation(with_settings(terms, "r-2", train_s=36.0, terms=impatient), script)
        return simulation, simulation.run(), early_ends


def test_a_round_that_failed_after_an_early_end_gets_its_full_length_back() -> None:
    simulation, result, early_ends = fails_after_an_early_end()
    assert not result.violations, result.report()
    assert early_ends == [2], "in round 0 and in round 1"
    key = keys.contribution(1, 0, "r-2")
    offer = Contribution.parse(simulation.bucket.engine.read(key) or b"", key)
    assert (offer.inner_steps, offer.share) == (12, 1.0)
    assert "r-2" in simulation.checker.members[1]


def test_a_share_that_outlives_its_failed_round_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = RoundRunner._failed_round

    def sticky(self: RoundRunner) -> bool:
        share = self.round.share
        try:
            return failed(self)
        finally:
            self.round.share = share

    monkeypatch.setattr(RoundRunner, "_failed_round", sticky)
    _, result, _ = fails_after_an_early_end()
    assert result.violations[0].startswith("weight: ")


def test_straggler_with_too_long_inner_steps_costs_the_grace_window() -> None:
    simulation, result = checked(with_settings(calm(rounds=12), "r-2", train_s=3 * TRAIN_S))
    members = [simulation.checker.members[n] for n in range(12)]
    assert all({"r-0", "r-1"} <= set(slots) for slots in members)
    assert [n for n, slots in enumerate(members) if "r-2" in slots] == [0], "its work comes late and is dropped"
    assert all(waited(result, n) <= GRACE_S + POLLS_S for n in range(1, 12))


def test_a_straggler_sees_in_mid_round_that_the_others_have_closed_it() -> None:
    # One of its four inner steps takes longer than the others' round and grace window together.
    simulation, result = checked(with_settings(calm(rounds=8, sync_every=4), "r-2", train_s=10 * TRAIN_S))
    assert result.facts["rounds closed by others"] >= 2
    assert simulation.checker.head == 8


@pytest.mark.parametrize("kind", [*CALL_FAULTS, "delayed", "hidden"])
def test_a_store_that_fails_in_one_way_never_gives_a_wrong_average(kind: str) -> None:
    rates = Rates(
        calls={kind: 0.08},
        delayed=0.05 if kind == "delayed" else 0.0,
        hidden=0.05 if kind == "hidden" else 0.0,
        horizon_s=300.0,
    )
    _, result = checked(replace(calm(retention=Retention(last=2, age_s=0.0)), rates=rates))
    assert result.faults[kind]


def test_store_outage_of_minutes_pauses_training_and_loses_nothing() -> None:
    struck: set[str] = set()

    def script(call: Call) -> str | None:
        if call.process.slot in struck or call.key != keys.decision(1, 0):
            return None
        struck.add(call.process.slot)
        return "cut_off:180"

    simulation, result = checked(calm(deadline_s=600.0), script)
    assert len(struck) == 3
    assert result.seconds > 180
    assert statuses(simulation) == {"done": 3}
    assert result.facts["rounds failed"] == 0


def test_clocks_that_are_an_hour_off_change_nothing_at_all() -> None:
    def lines(skew_s: float) -> list[tuple[str, ...]]:
        _, result = simulated(calm(), skew_s=skew_s)
        assert not result.violations, result.report()
        return [
            (f"{event.at:.3f}", event.actor, event.what, event.key.split("/")[0], event.outcome)
            for event in result.trace
        ]

    exact, off = lines(0.0), lines(3600.0)
    # A record that tells the wall clock to people is a few bytes longer.
    assert [line[:4] for line in exact] == [line[:4] for line in off]


def damage(simulation: Simulation, start: str) -> None:
    """Flip a bit of the first object under `start`, as a disk would."""
    engine = simulation.bucket.engine
    key = engine.list(start)[0].key
    body = bytearray(bytes(engine.read(key) or b""))
    body[0] ^= 1
    engine.replace(key, bytes(body))


@pytest.mark.parametrize("min_replicas", [1, 2, 3])
@pytest.mark.parametrize("author", ["r-0", "r-1", "r-2"])
def test_author_of_a_rotten_payload_writes_a_checkpoint_for_the_others(min_replicas: int, author: str) -> None:
    rotten: list[str] = []

    def script(call: Call) -> str | None:
        if not rotten and (call.verb, call.key, call.moment) == ("create", keys.decision(1, 0), "after"):
            rotten.extend(entry.key for entry in simulation.bucket.engine.list(f"payloads/00000001/{author}/"))
            simulation.bucket.rot(rotten[0], "body at once")
        return None

    with quiet():
        simulation = Simulation(calm(min_replicas=min_replicas, checkpoint_every=4), script)
        result = simulation.run()
    assert rotten
    assert not result.violations, result.report()
    assert result.facts["rounds failed"] > 0
    assert result.facts["checkpoints out of turn"] == 1
    assert statuses(simulation) == {"done": 3}


def test_replica_follows_the_log_and_loads_no_replaced_checkpoint() -> None:
    """r-1 dies, and meets other states in the place of all checkpoints but the initial one."""
    forged: list[str] = []
    read: list[str] = []

    def script(call: Call) -> str | None:
        if (call.process.name, call.verb, call.key, call.moment) == ("r-1#1", "read", keys.commit(2), "before"):
            return "crash"
        if call.process.name != "r-1#2" or call.moment != "before":
            return None
        if call.verb == "list" and call.key == keys.CHECKPOINTS and not forged:
            entries = simulation.bucket.engine.list(keys.CHECKPOINTS, after=keys.checkpoint_manifest(0))
            forged.extend(entry.key for entry in entries if entry.key.endswith(keys.MANIFEST))
            for key in forged:
                simulation.bucket.forge(key)
        if call.verb == "read" and call.key.endswith(keys.MANIFEST):
            read.append(call.key)
        return None

    with quiet():
        simulation = Simulation(calm(compares=True), script)
        result = simulation.run()
    assert not result.violations, result.report()
    assert len(forged) >= 2
    assert read == [*reversed(forged), keys.checkpoint_manifest(0)]
    assert statuses(simulation)["done"] == 3


def test_only_survivor_writes_the_last_checkpoint_out_of_turn() -> None:
    """It is r-1's turn, which dies before it has read what rots then: only r-0 holds the last state."""

    def script(call: Call) -> str | None:
        if (call.process.slot, call.verb, call.key, call.moment) != ("r-1", "read", keys.decision(3, 0), "after"):
            return None
        if 3 not in simulation.checker.decisions:
            return None
        for entry in simulation.bucket.engine.list("payloads/00000003/r-0/"):
            simulation.bucket.rot(entry.key, "body at once")
        return "crash"

    with quiet():
        simulation = Simulation(replace(calm(2, checkpoint_every=4), lost=frozenset({"r-1"})), script)
        result = simulation.run()
    assert not result.violations, result.report()
    assert result.faults["crash"] == result.faults["rot"] == 1
    assert result.facts["checkpoints out of turn"] == 1
    assert simulation.checker.newest == 4
    written = time_of(result, "create", keys.checkpoint_manifest(4))
    assert STALE_S <= written - time_of(result, "create", keys.commit(3)) <= STALE_S + 2 * POLLS_S


@pytest.mark.parametrize("kind", poison.KINDS)
def test_poison_is_refused_before_a_proposal_and_the_round_goes_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "KINDS", {kind: poison.KINDS[kind]})
    simulation, result = checked(with_settings(calm(ends_early=False), "r-2", poisons=1.0))
    assert result.faults["poison"] == 4
    assert all(simulation.checker.members[n] == ("r-0", "r-1") for n in range(4))
    assert statuses(simulation) == {"done": 3}


def strangers() -> dict[str, bytes]:
    """Returns records that a broken or hostile replica could leave under its own slot in round 0."""
    other = (
        '{"run":"%s","round":0,"exchange":0,"slot":"x-1","incarnation":0,"base":"%s","index":"%s","parts":[],'
        '"tokens":0,"inner_steps":1,"nonce":"%s"}'
    )
    return {
        "x-0": b'{"run": 1',
        "x-1": (other % ("RUN", "0" * 64, "2" * 32, "3" * 32)).encode(),
        "x-2": b"x" * (MAX_RECORD_BYTES + 1),
    }


def test_round_closes_without_contributions_that_cannot_be_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    planted: list[str] = []

    def script(call: Call) -> str | None:
        if not planted and call.key.startswith("contributions/00000000-0000/"):
            run = bytes(simulation.bucket.engine.read(keys.RUN) or b"").split(b'"nonce":"')[1][:32]
            for slot, body in strangers().items():
                planted.append(slot)
                simulation.bucket.engine.create(keys.contribution(0, 0, slot), body.replace(b"RUN", run))
        return None

    simulation = Simulation(calm(), script)
    with caplog.at_level("WARNING", logger="skerry"):
        result = simulation.run()
    assert not result.violations, result.report()
    assert simulation.checker.members[0] == ("r-0", "r-1", "r-2")
    refused = " ".join(record.message for record in caplog.records if "contribution_refused" in record.message)
    assert all(slot in refused for slot in planted)
    assert "tensors or codec differ" in refused
    assert "record too large" in refused


def test_replica_without_finite_tensors_abstains_and_delays_no_round() -> None:
    simulation, result = checked(with_settings(calm(), "r-2", abstains=1.0))
    assert all(simulation.checker.members[n] == ("r-0", "r-1") for n in range(4))
    assert result.facts["abstentions"] >= 4
    assert all(waited(result, n) <= POLLS_S for n in range(1, 4))
    assert statuses(simulation) == {"done": 3}


def test_fewer_than_min_replicas_decide_nothing_and_end_after_retries() -> None:
    scenario = replace(calm(replicas=2), lost=frozenset({"r-1"}))
    simulation, result = simulated(scenario, once("r-1", "create", CONTRIBUTION, "before", "crash"))
    assert simulation.checker.head == 1
    assert all(violation.startswith("liveness") for violation in result.violations)
    assert statuses(simulation)["retry"] >= 1
    failed = result.facts["rounds failed"] / statuses(simulation)["retry"]
    assert failed >= scenario.settings[0].max_retries


def test_when_they_are_enough_again_the_run_goes_on_where_it_was() -> None:
    simulation, _ = checked(replace(calm(replicas=2), late=(0.0, 200.0)))
    assert simulation.checker.head == 4
    assert simulation.checker.members[0] == ("r-0", "r-1")


def test_run_makes_up_for_lost_work_in_more_rounds() -> None:
    """Three replicas and four rounds; one of them is gone for good after the first."""
    scenario = replace(calm(work=12.0), lost=frozenset({"r-1"}))
    simulation, result = checked(scenario, once("r-1", "create", PAYLOAD, "before", "crash"))
    assert [len(simulation.checker.members[n]) for n in range(6)] == [3, 2, 2, 2, 2, 2]
    assert (simulation.checker.head, simulation.checker.work) == (6, 13.0)
    assert statuses(simulation) == {"done": 2, "crashed": 1}
    assert result.facts["rounds that made up"] == 2


def test_two_runs_on_one_prefix_stop_the_replica_that_meets_the_other() -> None:
    def script(call: Call) -> str | None:
        if (call.verb, call.key, call.moment) == ("read", keys.decision(1, 0), "before"):
            engine = simulation.bucket.engine
            foreign = bytes(engine.read(keys.decision(0, 0)) or b"")
            run = foreign.split(b'"run":"')[1][:32]
            engine.create(call.key, foreign.replace(run, b"f" * 32))
        return None

    with quiet():
        simulation = Simulation(calm(), script)
        result = simulation.run()
    assert "two runs share this prefix" in result.violations[0]
    assert simulation.checker.head == 1


def test_store_that_ignores_conditions_is_refused_before_any_write() -> None:
    simulation = Simulation(calm())

    def create(by: Process, began: int, key: str, data: Data) -> bool:
        del by, began
        simulation.bucket.engine.replace(key, data)
        return True

    simulation.bucket.create = create  # type: ignore[method-assign]
    with quiet():
        result = simulation.run()
    assert "ignores If-None-Match" in result.violations[0]
    assert {entry.key.split("/")[0] for entry in simulation.bucket.engine.list("")} <= {"probe"}


@pytest.mark.parametrize("fragments", [1, 2])
def test_killed_replica_contributes_the_steps_that_it_saved(fragments: int) -> None:
    terms = calm(sync_every=4, fragments=fragments, unfinished_every_s=0.0)
    saved = once("r-1", "create", keys.unfinished_prefix("r-1") + "00000003/manifest.json", "after", "crash")
    simulation, result = checked(terms, saved)
    assert result.faults["crash"] == 1
    assert result.facts["fragments resumed"] == fragments
    key = keys.contribution(0, 0, "r-1")
    contribution = Contribution.parse(simulation.bucket.engine.read(key) or b"", key)
    assert (contribution.incarnation, contribution.inner_steps) == (1, 3), "the others wait: it contributes at once"


@pytest.mark.parametrize("own_roles", [False, True])
def test_a_run_of_many_rounds_keeps_no_more_payloads_than_a_short_one(own_roles: bool) -> None:  # noqa: FBT001
    def most(rounds: int) -> int:
        """The largest number of payload objects that there ever were."""
        scenario = replace(calm(rounds=rounds, retention=Retention(last=2, age_s=0.0)), own_roles=own_roles)
        counts: list[int] = []

        def count(call: Call) -> str | None:
            if call.verb == "create" and call.key.endswith("/manifest.json"):
                counts.append(len(simulation.bucket.engine.list(keys.PAYLOADS)))
            return None

        with quiet():
            simulation = Simulation(scenario, count)
            result = simulation.run()
        assert not result.violations, result.report()
        assert not result.facts["deletions refused"]
        return max(counts)

    assert most(24) <= most(8)


def test_refusal_to_collect_for_a_lost_slot_is_no_outage() -> None:
    calm_run = calm(rounds=12, deadline_s=600.0, retention=Retention(last=1, age_s=0.0))
    scenario = replace(calm_run, own_roles=True, lost=frozenset({"r-2"}))
    simulation, result = checked(scenario, once("r-2", "create", keys.receipt(3, "r-2"), "after", "crash"))
    assert statuses(simulation) == {"done": 2, "crashed": 1}
    payloads = Counter(keys.slot_of(entry.key) for entry in simulation.bucket.engine.list(keys.PAYLOADS))
    assert payloads["r-2"] <= 2
    assert 0 < result.facts["deletions refused"] <= 2 * payloads["r-2"], "each of the others tries each once"
    assert result.facts["rounds failed"] == 0


def test_a_decision_that_rots_is_noticed_from_the_store_alone() -> None:
    simulation, _ = checked(calm(rounds=2, checkpoint_every=2))
    simulation.bucket.engine.delete(keys.checkpoint_manifest(2))
    damage(simulation, keys.decision(1, 0))
    simulation.checker.rebuild("after the damage")
    assert "decision of round 1" in simulation.checker.violations[0]


def test_each_round_changes_the_shared_state_of_one_fragment_in_turn() -> None:
    simulation, _ = checked(calm(rounds=6, fragments=3))
    states = simulation.checker.states
    changed = [[n for n in range(3) if states[r][n] != states[r + 1][n]] for r in range(6)]
    assert changed == [[0], [1], [2], [0], [1], [2]]


@pytest.mark.parametrize("flips_after", [1, 2, 3])
def test_replica_heals_after_a_bit_flip_in_any_of_three_fragments(flips_after: int) -> None:
    terms = calm(4, rounds=10, min_replicas=3, fragments=3, compares=True)
    simulation, result = checked(with_settings(terms, "r-1", flips_after=flips_after))
    assert result.faults["bit_flip"] == 1
    assert result.facts["replicas healed"] == 1
    assert not simulation.checker.flipped


@pytest.mark.parametrize("mode", ["diloco", "ddp"])
@pytest.mark.parametrize("slot", ["r-0", "r-1"])
def test_one_of_two_replicas_heals_after_a_bit_flip(mode: Mode, slot: str) -> None:
    terms = calm(2, rounds=10, min_replicas=2, mode=mode, compares=True)
    simulation, result = checked(with_settings(terms, slot, flips_after=3))
    assert result.faults["bit_flip"] == 1
    assert result.facts["rounds recomputed"] > 0
    assert not simulation.checker.flipped
    assert all(len(members) == 2 for members in simulation.checker.members.values())


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("flips_after", [7, 8, 9])
@pytest.mark.parametrize(("replicas", "mode"), [(4, "diloco"), (2, "diloco"), (2, "ddp")])
def test_replica_heals_after_a_bit_flip_in_the_last_rounds(
    replicas: int, mode: Mode, flips_after: int, *, background: bool
) -> None:
    """No round is left in which the difference could be measured, so it is measured before the replica ends."""
    terms = calm(replicas, rounds=10, min_replicas=replicas, mode=mode, compares=True, background=background)
    simulation, result = checked(with_settings(terms, "r-1", flips_after=flips_after))
    assert result.faults["bit_flip"] == 1
    assert not simulation.checker.flipped
    assert statuses(simulation) == {"finished" if mode == "ddp" else "done": replicas}


@pytest.mark.parametrize("flips_after", [8, 9])
@pytest.mark.parametrize(
    ("author", "replicas", "mode"), [("r-2", 4, "diloco"), ("r-0", 2, "diloco"), ("r-0", 2, "ddp")]
)
def test_last_checkpoint_of_a_wrong_state_is_replaced(author: str, replicas: int, mode: Mode, flips_after: int) -> None:
    terms = calm(replicas, rounds=10, min_replicas=replicas, mode=mode, compares=True)
    simulation, result = checked(with_settings(terms, author, flips_after=flips_after))
    assert result.faults["bit_flip"] == 1
    assert simulation.checker.newest == 10


@pytest.mark.parametrize(("verb", "moment"), [("create", "before"), ("create", "after"), ("delete", "after")])
@pytest.mark.parametrize(
    ("author", "replicas", "mode"), [("r-2", 4, "diloco"), ("r-0", 2, "diloco"), ("r-0", 2, "ddp")]
)
def test_successor_replaces_the_wrong_last_checkpoint_of_a_killed_author(
    author: str, replicas: int, mode: Mode, verb: str, moment: str
) -> None:
    """It starts from an older one: of two replicas nothing says which of their states is right."""
    terms = calm(replicas, rounds=10, min_replicas=replicas, mode=mode, compares=True)
    script = once(author, verb, keys.checkpoint_manifest(10), moment, "crash")
    simulation, result = checked(with_settings(terms, author, flips_after=9), script)
    assert (result.faults["bit_flip"], result.faults["crash"]) == (1, 1)
    assert simulation.checker.newest == 10


@pytest.mark.parametrize("round_number", [2, 3, 4])
def test_restarted_replica_trains_on_with_every_fragment(round_number: int) -> None:
    script = once("r-1", "create", f"payloads/{round_number:08d}/", "before", "crash")
    simulation, result = checked(calm(rounds=12, fragments=3, sync_every=2), script)
    assert result.faults["crash"] == 1
    # The launcher waits up to 20 seconds: four rounds.
    assert all("r-1" in simulation.checker.members[n] for n in range(9, 12))
