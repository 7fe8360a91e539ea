"""A replica whose state differs from the others': how the difference is measured, and that the replica heals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.divergence import (
    ROUNDS,
    flipped,
    harmed_islands,
    receipt,
    scaled,
    train_averaging_gradients,
    write_receipt,
)
from tests.kit.events import logged_events
from tests.kit.managers import (
    Island,
    assert_same_parameters,
    begin_run,
    contributions,
    members,
    states,
    together,
    train_all,
)
from tests.kit.protocol import run_record
from tests.support.clocks import FakeClock

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.divergence import DivergenceCheck
from skerry.runtime.checkpointing.garbage_collector import Retention
from skerry.runtime.checkpointing.receipt_comparison import QUIET, WINDOW, ReceiptEvidence
from skerry.runtime.errors import Corrupt
from skerry.runtime.log.log import RunLog, open_run
from skerry.runtime.log.records import GENESIS, CheckpointManifest
from skerry.runtime.ranks.interface import SingleRank
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.tensors.state_comparison import LAST_PLACE_ULP, StateDifference, compare_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kit.divergence import Harm

    from skerry.runtime.checkpointing.divergence import Diagnosis
    from skerry.runtime.checkpointing.receipt_and_checkpoint_writer import LogPosition

# The difference between two states.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_flipped_last_bit_measures_as_one_ulp(dtype: torch.dtype) -> None:
    a = torch.tensor([1.0, -1.5, 1.75], dtype=dtype)
    eps = torch.finfo(dtype).eps
    b = torch.tensor([1.0, -1.5 - eps, 1.75], dtype=dtype)
    before = a.clone()
    assert compare_states({"x": a}, {"x": b}) == StateDifference(max_ulp=1.0, max_abs=eps, tensors=("state.x",))
    assert torch.equal(a, before)


def test_elements_near_zero_are_measured_in_units_of_large_elements() -> None:
    a, b = torch.tensor([1.0, 1e-6, 0.0]), torch.tensor([1.0, 1e-6 + 1e-8, -1e-8])
    assert 0 < compare_states(a, b).max_ulp < 1
    assert compare_states(a[1:], b[1:]).max_ulp > 1000


def test_large_tensor_is_measured_in_pieces() -> None:
    a = torch.randn(2, 300_001, generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[1, 300_000] = 1.01 * b[1, 300_000] + 1
    assert compare_states(a, b).max_abs == (a - b).abs().max()
    assert 1 <= compare_states(a, flipped(a)).max_ulp < 1.01


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.ones(3)},
        {"x": torch.ones(2, dtype=torch.float64)},
        {"x": torch.tensor([1.0, math.nan])},
        {"x": torch.tensor([1.0, math.inf])},
        {"x": 1.0},
        {"n": torch.tensor([4])},
        {"lr": math.nextafter(0.7, 1)},
        {"k": 1.0},
        {"l": [1.0, 1.0]},
    ],
)
def test_difference_beyond_rounding_is_infinite(change: dict[str, object]) -> None:
    state = {"x": torch.ones(2), "n": torch.tensor([3]), "lr": 0.7, "k": 1, "l": [1.0]}
    difference = compare_states(state, state | change)
    assert (difference.max_ulp, difference.max_abs) == (math.inf, math.inf)
    assert difference.tensors == tuple(f"state.{key}" for key in change)
    assert not difference.is_rounding(1000)
    assert compare_states(state, {"x": state["x"]}).max_ulp == math.inf, "the others are missing"


def test_equal_nan_and_infinity_do_not_differ() -> None:
    a = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert compare_states({"x": a, "f": math.nan}, {"f": math.nan, "x": a.clone()}).max_ulp == 0
    b = torch.tensor([math.nan, math.inf, -math.inf, 1.0 + 2 * torch.finfo(torch.float32).eps])
    assert compare_states(a, b).max_ulp == 2


def test_allowed_rounding_grows_with_rounds() -> None:
    a = torch.tensor([1.0])
    at_limit, above = (compare_states(a, flipped(a, int(LAST_PLACE_ULP) + more)) for more in (0, 1))
    assert at_limit.is_rounding(1)
    assert [above.is_rounding(rounds) for rounds in (1, 2)] == [False, True]


def test_fused_outer_step_is_rounding_scaled_step_is_not() -> None:
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(20_000, generator=generator)
    fused, plain_momentum, fused_momentum = plain.clone(), torch.zeros(20_000), torch.zeros(20_000)
    for rounds in range(1, 11):
        g = torch.randn(20_000, generator=generator) * 0.01
        plain_momentum = plain_momentum * 0.9 + g
        plain = plain - 0.7 * (g + 0.9 * plain_momentum)
        # float64 between the roundings is what a fused multiply-add does.
        fused_momentum = (fused_momentum.double() * 0.9 + g.double()).float()
        nesterov = (g.double() + fused_momentum.double() * 0.9).float()
        fused = (fused.double() - 0.7 * nesterov.double()).float()
        difference = compare_states({"p": plain, "m": plain_momentum}, {"p": fused, "m": fused_momentum})
        assert difference.tensors
        assert difference.is_rounding(rounds), difference
    assert not compare_states(plain, plain * 1.0001).is_rounding(10)


# The check of one replica.


class CheckedReplica:
    """The divergence check of slot c among a, b and c, with receipts and checkpoints that the test writes."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.members = ("a", "b", "c")
        self.log = RunLog(self.store, open_run(self.store, run_record(FakeClock())))
        self.check = DivergenceCheck(self.log, "c", SingleRank())

    def round(self, number: int, state: str = "d", average: str = "a") -> None:
        """a and b report state "b" and average "a" of a round; c reports `state` and `average`, and looks."""
        for slot in ("a", "b"):
            write_receipt(self.store, receipt(slot, number, run=self.log.run.nonce))
        mine = receipt("c", number, state=state, average=average, run=self.log.run.nonce)
        write_receipt(self.store, mine)
        self.check.look(mine, self.members)

    def look_last(self, number: int) -> None:
        """c looks after the last round of the run."""
        self.check.look(receipt("c", number, state="d", run=self.log.run.nonce), self.members, last=True)

    def rounds(self, first: int, end: int) -> None:
        for number in range(first, end):
            self.round(number)

    def checkpoint(self, number: int, writer: str, state: object = None) -> CheckpointManifest:
        checkpoint.save(
            self.store,
            run=self.log.run.nonce,
            round_number=number,
            commit=GENESIS,
            members=self.members,
            batches=0,
            writer=writer,
            nonce="1" * 32,
            state=state or SHARED,
        )
        manifest = checkpoint.manifest(self.store, number)
        assert manifest is not None
        return manifest

    def diagnosis(self) -> Diagnosis:
        assert self.check.diagnosis is not None
        return self.check.diagnosis


SHARED = {"fragment": {"p": torch.tensor([1.0, 2.0])}}
PATHS = frozenset({("fragment",)})


def off_by(units: int) -> dict[str, object]:
    return {"fragment": {"p": flipped(torch.tensor([1.0, 2.0]), units)}}


@pytest.fixture
def suspect() -> CheckedReplica:
    """c differs in round 0, and notices it in round 1."""
    replica = CheckedReplica()
    replica.rounds(0, 2)
    return replica


def test_no_state_is_kept_while_receipts_agree() -> None:
    replica = CheckedReplica()
    for number in range(4):
        replica.round(number, state="b")
    assert not replica.check.wants("a")
    assert replica.check.diagnosis is None


def test_differing_replica_keeps_state_of_a_round_saved_by_a_right_one(suspect: CheckedReplica) -> None:
    assert [author for author in ("a", "b", "c", None) if suspect.check.wants(author)] == ["a", "b"]
    suspect.check.keep(3, SHARED, PATHS)
    assert not suspect.check.wants("a")


@pytest.mark.parametrize(("units", "rounding"), [(1, True), (1000, False)])
def test_kept_state_is_measured_against_its_rounds_checkpoint(
    suspect: CheckedReplica, units: int, *, rounding: bool
) -> None:
    suspect.check.keep(3, off_by(units), PATHS)
    suspect.round(2)
    assert suspect.check.diagnosis is None
    suspect.checkpoint(3, "a", {**SHARED, "model": torch.zeros(2)})
    suspect.round(3)
    diagnosis = suspect.diagnosis()
    assert (diagnosis.round, diagnosis.agreed, diagnosis.right, diagnosis.is_rounding) == (3, -1, ("a", "b"), rounding)
    assert diagnosis.drift is not None
    assert (diagnosis.drift.max_ulp, diagnosis.drift.tensors) == (float(units), ("state.fragment.p",))
    assert "after 3 rounds" in str(diagnosis)


def test_kept_state_is_dropped_without_a_checkpoint_of_a_right_replica(suspect: CheckedReplica) -> None:
    suspect.check.keep(3, off_by(1), PATHS)
    suspect.checkpoint(3, "c")
    suspect.round(2)
    assert (suspect.check.diagnosis, suspect.check.wants("a")) == (None, True)
    suspect.check.keep(4, off_by(1), PATHS)
    for number in range(3, 3 + 2 * WINDOW):  # the checkpoint may still be uploaded
        suspect.round(number)
        assert not suspect.check.wants("a")
    suspect.checkpoint(8, "c")
    suspect.round(3 + 2 * WINDOW)
    assert not suspect.check.wants("a")
    suspect.checkpoint(9, "b")
    suspect.round(4 + 2 * WINDOW)
    assert (suspect.check.diagnosis, suspect.check.wants("a")) == (None, True)


def test_kept_state_waits_for_a_slow_checkpoint(suspect: CheckedReplica) -> None:
    suspect.check.keep(3, off_by(1), PATHS)
    suspect.rounds(2, 2 + 3 * WINDOW)
    suspect.checkpoint(3, "a")
    suspect.round(2 + 3 * WINDOW)
    assert (suspect.diagnosis().round, suspect.diagnosis().is_rounding) == (3, True)


def test_repeatedly_missed_state_heals_without_a_measurement(suspect: CheckedReplica) -> None:
    for number in (5, 5 + 2 * WINDOW):
        assert suspect.check.wants("a")
        suspect.check.keep(number, off_by(1), PATHS)
        suspect.checkpoint(number + 1, "a")
        suspect.round(number + WINDOW)
    diagnosis = suspect.diagnosis()
    assert (diagnosis.right, diagnosis.drift, diagnosis.is_rounding) == (("a", "b"), None, False)
    assert str(diagnosis).endswith("not measured")


def test_state_that_cannot_be_measured_is_kept_again_after_the_last_round(suspect: CheckedReplica) -> None:
    suspect.check.keep(2, off_by(1000), PATHS)
    suspect.round(2)
    suspect.look_last(2)
    assert (suspect.check.diagnosis, suspect.check.suspects) == (None, True)
    suspect.check.keep(3, off_by(1), PATHS)
    suspect.checkpoint(3, "a")
    suspect.look_last(2)
    assert (suspect.diagnosis().round, suspect.diagnosis().is_rounding) == (3, True)


def test_equal_state_ends_the_suspicion(suspect: CheckedReplica) -> None:
    suspect.check.keep(3, {"fragment": {"p": torch.tensor([1.0, 2.0])}}, PATHS)
    suspect.checkpoint(3, "a")
    suspect.round(2)
    assert (suspect.check.diagnosis, suspect.check.wants("a")) == (None, False)


def test_wrong_average_is_diagnosed_without_a_measurement() -> None:
    replica = CheckedReplica()
    for number in range(2):
        replica.round(number, state="b", average="f")
    diagnosis = replica.diagnosis()
    assert (diagnosis.right, diagnosis.drift, diagnosis.is_rounding) == (("a", "b"), None, False)
    assert str(diagnosis) == "average differs from a,b in round 0"


class DisputedReplica(CheckedReplica):
    """c and a are the only members, and their states differ in round 1."""

    def __init__(self) -> None:
        super().__init__()
        self.members = ("a", "c")
        for number, state in enumerate("bddd"):
            self.round(number, state=state)


def test_without_a_majority_the_last_equal_state_is_named() -> None:
    replica = DisputedReplica()
    assert (replica.check.undisputed, replica.check.settled, replica.check.diagnosis) == (1, 1, None)
    assert not replica.check.wants("a")
    replica.check.recomputing(4)
    assert replica.check.undisputed is None


@pytest.mark.parametrize(("state", "diverged"), [("d", []), ("b", ["c"])])
def test_replica_that_recomputes_a_different_state_is_named(
    events: pytest.LogCaptureFixture, state: str, diverged: list[str]
) -> None:
    replica = DisputedReplica()
    replica.check.recomputing(4)
    replica.check.recomputed(0, ("a" * 32,), "e" * 32)  # a round before the dispute
    replica.check.recomputed(1, ("a" * 32,), state * 32)
    replica.check.recomputed(2, ("a" * 32,), "e" * 32)  # the dispute is over
    assert [event["slot"] for event in logged_events(events, "diverged")] == diverged
    for number in range(4, 8):
        replica.round(number, state="b")
    assert [event["slot"] for event in logged_events(events, "healed")] == diverged


def test_first_member_counts_as_right_if_nothing_can_be_recomputed() -> None:
    replica = DisputedReplica()
    replica.check.cannot_recompute()
    assert (replica.check.undisputed, replica.check.wants("a"), replica.check.wants("c")) == (None, True, False)


def test_difference_after_a_recomputation_is_of_the_hardware() -> None:
    replica = DisputedReplica()
    replica.check.recomputing(4)
    replica.check.recomputed(1, ("a" * 32,), "d" * 32)
    for number in range(4, 4 + QUIET):
        replica.round(number)
        assert not replica.check.wants("a"), "the other may still recompute its state"
    for number in range(4 + QUIET, 7 + QUIET):
        replica.round(number)
    assert (replica.check.undisputed, replica.check.wants("a"), replica.check.settled) == (None, True, None)


def test_rounds_before_healing_get_no_verdict(suspect: CheckedReplica) -> None:
    suspect.check.keep(3, off_by(1000), PATHS)
    suspect.checkpoint(3, "a")
    suspect.round(2)
    suspect.check.healed(20)
    suspect.rounds(3, 20)
    assert not suspect.check.wants("a")
    suspect.rounds(20, 22)
    assert suspect.check.wants("a")


def test_returning_drift_is_removed_again_and_reported_once(
    suspect: CheckedReplica, events: pytest.LogCaptureFixture
) -> None:
    suspect.check.keep(3, off_by(1), PATHS)
    suspect.checkpoint(3, "a")
    suspect.round(2)
    assert suspect.check.diagnosis is not None
    suspect.check.healed(3)
    number = 3
    while not suspect.check.wants("a"):
        suspect.round(number)
        number += 1
    assert number > QUIET
    suspect.check.keep(number, off_by(1), PATHS)
    suspect.checkpoint(number, "b")
    suspect.round(number)
    assert suspect.check.diagnosis is not None
    assert len(logged_events(events, "rounding_drift")) == 1


def test_checkpoints_written_while_diverged_are_not_trusted(suspect: CheckedReplica) -> None:
    suspect.check.keep(3, off_by(1000), PATHS)
    good, bad = suspect.checkpoint(3, "a"), suspect.checkpoint(4, "c")
    assert None not in (suspect.check.evidence(good), suspect.check.evidence(bad))
    suspect.round(2)
    suspect.check.healed(5)
    assert suspect.check.diagnosis is None
    later = suspect.checkpoint(6, "c")
    trusted = [suspect.check.evidence(manifest) is not None for manifest in (good, bad, later)]
    assert trusted == [True, False, True]


def test_checkpoint_of_an_outvoted_writer_is_not_trusted() -> None:
    replica = CheckedReplica()
    manifests = [replica.checkpoint(1, "c"), replica.checkpoint(2, "a")]
    replica.rounds(0, 2)
    assert [replica.check.evidence(manifest) is not None for manifest in manifests] == [False, True]
    assert replica.check.evidence(replica.checkpoint(0, "c")) == ReceiptEvidence()


# Real managers.


def test_equal_replicas_report_no_difference(events: pytest.LogCaptureFixture) -> None:
    islands = harmed_islands(MemoryStore(), [None] * 3)
    train_all(islands, ROUNDS)
    assert_same_parameters(islands)
    names = ("receipts_differ", "rounding_drift", "diverged", "healed")
    assert not any(logged_events(events, name) for name in names)


def test_last_place_drift_is_reported_once_and_removed(events: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    islands = harmed_islands(store, [None, None, flipped])
    train_all(islands, ROUNDS)
    assert_same_parameters(islands)
    (drift,) = logged_events(events, "rounding_drift")
    assert drift["slot"] == "r-2"
    differences = logged_events(events, "receipts_differ")
    assert {(event["what"], event["slots"], event["right"]) for event in differences} == {("state", "r-2", "r-0,r-1")}
    assert min(event["round"] for event in differences) == 3
    assert [len(states(store, number)) for number in (2, 3, ROUNDS - 1)] == [1, 2, 1]
    assert not logged_events(events, "diverged")
    assert not logged_events(events, "receipt_failed")


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoint_every": 1},
        {"checkpoint_every": 4},
        {"fragments": 2, "wrapper": {"fragment_sync_delay": 1}, "lr": 0.01},
    ],
)
def test_diverged_replica_is_named_and_heals(events: pytest.LogCaptureFixture, settings: dict[str, object]) -> None:
    store = MemoryStore()
    islands = harmed_islands(store, [None, None, scaled(1.5)], **settings)
    train_all(islands, ROUNDS)
    assert_same_parameters(islands)
    assert [event["slot"] for event in logged_events(events, "diverged")] == ["r-2"]
    assert not logged_events(events, "rounding_drift")
    (healed,) = logged_events(events, "healed")
    assert healed["slot"] == "r-2"
    assert all(len(states(store, number)) == 1 for number in range(healed["round"], ROUNDS))
    assert members(store)[-1] == ["r-0", "r-1", "r-2"]


@pytest.mark.parametrize(("units", "name"), [(1, "rounding_drift"), (1 << 20, "diverged")])
def test_diverged_ddp_replica_heals(events: pytest.LogCaptureFixture, units: int, name: str) -> None:
    store = MemoryStore()
    harms = {"a": None, "b": None, "c": lambda tensor: flipped(tensor, units)}
    models = together([lambda slot=slot: train_averaging_gradients(store, slot, harms[slot]) for slot in harms])
    assert all(torch.equal(model.weight, models[0].weight) for model in models)
    assert [event["slot"] for event in logged_events(events, name)] == ["c"]


@pytest.mark.parametrize(("harm", "contributes"), [(flipped, True), (scaled(1.5), False)])
def test_diverged_replica_writes_no_checkpoint_before_it_heals(
    events: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, harm: Harm, *, contributes: bool
) -> None:
    """Not before it can heal, and no checkpoint at the boundary at which it heals."""
    store = MemoryStore()
    begin_run(store, ["r-0", "r-1", "r-2"], minimum=2)  # the others wait for it in round 0
    islands = harmed_islands(store, [None, None, harm], minimum=2, retention=Retention(last=ROUNDS))
    manager = islands[2].manager
    recorder = manager.lifecycle.log_follower.recorder
    load_newest, diverged_rounds = recorder.load_newest, list[int]()

    def fail_six_times(beyond: int = -1, writers: Sequence[str] | None = None, **more: int | None) -> LogPosition:
        if writers is not None and len(diverged_rounds) < 6:
            diverged_rounds.append(manager.current_step())
            raise Corrupt("a damaged checkpoint")
        return load_newest(beyond, writers, **more)

    monkeypatch.setattr(recorder, "load_newest", fail_six_times)
    train_all(islands, ROUNDS)
    assert_same_parameters(islands)
    assert len(diverged_rounds) == 6
    manifests = [checkpoint.manifest(store, number) for number in diverged_rounds]
    assert {manifest.writer for manifest in manifests if manifest is not None} <= {"r-0", "r-1"}
    contributed = {contribution.round for contribution in contributions(store) if contribution.slot == "r-2"}
    abstained = {event["round"] for event in logged_events(events, "abstained")}
    # On a busy machine its heartbeats lag, and the others do not wait for it: it may be late in one of these rounds.
    assert bool(contributed & set(diverged_rounds)) == contributes
    assert bool(abstained) != contributes
    assert contributed.isdisjoint(abstained)
    assert ROUNDS - 1 in contributed


def behind(store: MemoryStore, **settings: object) -> Island:
    """A replica that has closed one of the four rounds that are closed."""
    island = Island(store, "b", minimum=1).train(1, close=False)
    Island(store, "a", minimum=1, grace_s=0.0, **settings).train(4)  # type: ignore[arg-type]
    return island


def test_replica_does_not_heal_while_it_follows_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would contribute the rest of that round, a step of zero, to the checkpoint's round."""
    island = behind(MemoryStore())
    log_follower, follows = island.manager.lifecycle.log_follower, list[bool]()
    heal = log_follower.recorder.heal
    monkeypatch.setattr(
        log_follower.recorder, "heal", lambda *at: (follows.append(log_follower.following), heal(*at))[1]
    )
    island.train(5)
    assert follows
    assert not any(follows)


def test_replica_healed_by_an_older_checkpoint_follows_to_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    island = behind(MemoryStore(), checkpoint_every=3)
    log_follower, loaded_rounds = island.manager.lifecycle.log_follower, list[int]()

    def heal_once(*_: object) -> LogPosition | None:
        if loaded_rounds or log_follower.position.round < 4:
            return None
        position = log_follower.recorder.load_newest()
        loaded_rounds.append(position.round)
        return position

    monkeypatch.setattr(log_follower.recorder, "heal", heal_once)
    assert island.join() == 3
    assert loaded_rounds == [3]
    assert island.manager.current_step() == 4
