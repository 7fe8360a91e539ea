"""A replica that holds something else than the others: how far it is off, and that it heals, with real managers."""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from tests.runtime.test_alarm import receipt
from tests.support.clocks import FakeClock
from tests.support.logs import run_record
from tests.support.managers import Island, contributions, decisions, manager_of, receipts, together
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime import checkpoint, keys
from skerry.runtime.alarm import QUIET, WINDOW, Evidence
from skerry.runtime.drift import LAST_PLACE_ULP, Drift, measure
from skerry.runtime.errors import Corrupt
from skerry.runtime.garbage import Retention
from skerry.runtime.journal import Journal, open_run
from skerry.runtime.ranks import Alone
from skerry.runtime.records import GENESIS, CheckpointManifest
from skerry.runtime.selfcheck import SelfCheck
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.recording import Standing

INFINITE = (math.inf, math.inf)


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="skerry")
    return caplog


def told(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, object]]:
    return [record.fields for record in caplog.records if getattr(record, "event", "") == name]  # type: ignore[attr-defined]


# How far two states are apart.


def flipped(values: torch.Tensor, units: int = 1) -> torch.Tensor:
    """Every element a few units in the last place further from zero."""
    return (values.view(torch.int32) + units).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_flipped_last_bit_is_one_unit(dtype: torch.dtype) -> None:
    a = torch.tensor([1.0, -1.5, 1.75], dtype=dtype)
    eps = torch.finfo(dtype).eps
    b = torch.tensor([1.0, -1.5 - eps, 1.75], dtype=dtype)
    before = a.clone()
    assert measure({"x": a}, {"x": b}) == Drift(max_ulp=1.0, max_abs=eps, tensors=("state.x",))
    assert torch.equal(a, before)


def test_elements_near_zero_are_measured_in_the_units_of_large_ones() -> None:
    a = torch.tensor([1.0, 1e-6, 0.0])
    b = torch.tensor([1.0, 1e-6 + 1e-8, -1e-8])
    found = measure(a, b)
    assert 0 < found.max_ulp < 1
    assert measure(a[1:], b[1:]).max_ulp > 1000


def test_a_large_tensor_is_measured_piece_by_piece() -> None:
    a = torch.randn(2, 300_001, generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[1, 300_000] = 1.01 * b[1, 300_000] + 1
    assert measure(a, b).max_abs == (a - b).abs().max()
    assert 1 <= measure(a, flipped(a)).max_ulp < 1.01


def test_what_rounding_cannot_explain_is_infinitely_far() -> None:
    state = {"x": torch.ones(2), "n": torch.tensor([3]), "lr": 0.7, "k": 1, "l": [1.0]}
    changes: list[dict[str, object]] = [
        {"x": torch.ones(3)},
        {"x": torch.ones(2, dtype=torch.float64)},
        {"x": torch.tensor([1.0, math.nan])},
        {"x": torch.tensor([1.0, math.inf])},
        {"x": 1.0},
        {"n": torch.tensor([4])},
        {"lr": math.nextafter(0.7, 1)},
        {"k": 1.0},
        {"l": [1.0, 1.0]},
    ]
    for change in changes:
        found = measure(state, state | change)
        assert (found.max_ulp, found.max_abs) == INFINITE, change
        assert found.tensors == tuple(f"state.{key}" for key in change)
        assert not found.is_rounding(1000)
    assert measure(state, {"x": state["x"]}).max_ulp == math.inf


def test_the_same_nan_and_infinity_on_both_sides_are_equal() -> None:
    a = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert measure({"x": a, "f": math.nan}, {"f": math.nan, "x": a.clone()}).max_ulp == 0
    b = torch.tensor([math.nan, math.inf, -math.inf, 1.0 + 2 * torch.finfo(torch.float32).eps])
    assert measure(a, b).max_ulp == 2


def test_rounding_may_add_up_over_rounds() -> None:
    a = torch.tensor([1.0])
    found = measure(a, flipped(a, int(LAST_PLACE_ULP)))
    assert found.is_rounding(1)
    assert not measure(a, flipped(a, int(LAST_PLACE_ULP) + 1)).is_rounding(1)
    assert measure(a, flipped(a, int(LAST_PLACE_ULP) + 1)).is_rounding(2)


def test_an_outer_step_that_is_fused_is_rounding_and_a_scaled_one_is_not() -> None:
    generator = torch.Generator().manual_seed(1)
    plain, fused = torch.randn(20_000, generator=generator), torch.zeros(0)
    fused, plain_momentum, fused_momentum = plain.clone(), torch.zeros(20_000), torch.zeros(20_000)
    for rounds in range(1, 11):
        g = torch.randn(20_000, generator=generator) * 0.01
        plain_momentum = plain_momentum * 0.9 + g
        plain = plain - 0.7 * (g + 0.9 * plain_momentum)
        # float64 between the roundings is what a fused multiply-add does.
        fused_momentum = (fused_momentum.double() * 0.9 + g.double()).float()
        nesterov = (g.double() + fused_momentum.double() * 0.9).float()
        fused = (fused.double() - 0.7 * nesterov.double()).float()
        found = measure({"p": plain, "m": plain_momentum}, {"p": fused, "m": fused_momentum})
        assert found.tensors
        assert found.is_rounding(rounds), found
    assert not measure(plain, plain * 1.0001).is_rounding(10)


# Finding out about oneself.


class Checked:
    """The self-check of slot c among a, b and c, with receipts and checkpoints as they are told."""

    def __init__(self, *members: str) -> None:
        self.store = MemoryStore()
        self.members = members or ("a", "b", "c")
        self.journal = Journal(self.store, open_run(self.store, run_record(FakeClock())))
        self.check = SelfCheck(self.journal, "c", Alone())

    def round(self, number: int, states: dict[str, str]) -> None:
        for slot, state in states.items():
            one = receipt(slot, number, state=state, run=self.journal.run.nonce)
            self.store.create(keys.receipt(number, slot), one.to_bytes())
        self.check.look(receipt("c", number, state=states["c"], run=self.journal.run.nonce), self.members)

    def checkpoint(self, number: int, writer: str, state: object) -> CheckpointManifest:
        checkpoint.save(
            self.store,
            run=self.journal.run.nonce,
            round_number=number,
            commit=GENESIS,
            members=self.members,
            batches=0,
            writer=writer,
            nonce="1" * 32,
            state=state,
        )
        found = checkpoint.manifest(self.store, number)
        assert found is not None
        return found

    def suspect(self) -> None:
        """c differs in round 0, and finds out in round 1."""
        self.round(0, {"a": "b", "b": "b", "c": "d"})
        self.round(1, {"a": "b", "b": "b", "c": "d"})


SHARED = {"fragment": {"p": torch.tensor([1.0, 2.0])}}


def off_by(units: int) -> dict[str, object]:
    return {"fragment": {"p": flipped(torch.tensor([1.0, 2.0]), units)}}


def test_nothing_is_kept_while_all_agree() -> None:
    checked = Checked()
    for number in range(4):
        checked.round(number, {"a": "b", "b": "b", "c": "b"})
    assert not checked.check.wants("a")
    assert checked.check.diagnosis is None


def test_who_differs_keeps_the_state_of_a_round_that_one_of_the_right_ones_saves() -> None:
    checked = Checked()
    checked.suspect()
    assert [author for author in ("a", "b", "c", None) if checked.check.wants(author)] == ["a", "b"]
    checked.check.keep(3, SHARED)
    assert not checked.check.wants("a")


@pytest.mark.parametrize(("units", "rounding"), [(1, True), (1000, False)])
def test_the_kept_state_is_measured_against_the_checkpoint_of_its_round(units: int, *, rounding: bool) -> None:
    checked = Checked()
    checked.suspect()
    checked.check.keep(3, off_by(units))
    checked.round(2, {"a": "b", "b": "b", "c": "d"})
    assert checked.check.diagnosis is None
    checked.checkpoint(3, "a", {**SHARED, "model": torch.zeros(2)})
    checked.round(3, {"a": "b", "b": "b", "c": "d"})
    found = checked.check.diagnosis
    assert found is not None
    assert (found.round, found.agreed, found.right, found.is_rounding) == (3, -1, ("a", "b"), rounding)
    assert found.drift is not None
    assert (found.drift.max_ulp, found.drift.tensors) == (float(units), ("state.fragment.p",))
    assert "after 3 rounds" in str(found)


def test_a_checkpoint_by_somebody_else_or_one_that_never_comes_is_given_up() -> None:
    checked = Checked()
    checked.suspect()
    checked.check.keep(3, off_by(1))
    checked.checkpoint(3, "c", SHARED)
    checked.round(2, {"a": "b", "b": "b", "c": "d"})
    assert (checked.check.diagnosis, checked.check.wants("a")) == (None, True)
    checked.check.keep(4, off_by(1))
    for number in range(3, 3 + 2 * WINDOW):  # it may be on its way
        checked.round(number, {"a": "b", "b": "b", "c": "d"})
        assert not checked.check.wants("a")
    checked.checkpoint(8, "c", SHARED)
    checked.round(3 + 2 * WINDOW, {"a": "b", "b": "b", "c": "d"})
    assert not checked.check.wants("a")
    checked.checkpoint(9, "b", SHARED)
    checked.round(4 + 2 * WINDOW, {"a": "b", "b": "b", "c": "d"})
    assert (checked.check.diagnosis, checked.check.wants("a")) == (None, True)


def test_the_checkpoint_of_the_kept_round_may_take_long() -> None:
    checked = Checked()
    checked.suspect()
    checked.check.keep(3, off_by(1))
    for number in range(2, 2 + 3 * WINDOW):
        checked.round(number, {"a": "b", "b": "b", "c": "d"})
    checked.checkpoint(3, "a", SHARED)
    checked.round(2 + 3 * WINDOW, {"a": "b", "b": "b", "c": "d"})
    found = checked.check.diagnosis
    assert found is not None
    assert (found.round, found.is_rounding) == (3, True)


def test_a_state_that_is_missed_again_and_again_is_healed_without_a_measure() -> None:
    checked = Checked()
    checked.suspect()
    for turn in (5, 5 + 2 * WINDOW):
        assert checked.check.wants("a")
        checked.check.keep(turn, off_by(1))
        checked.checkpoint(turn + 1, "a", SHARED)
        checked.round(turn + WINDOW, {"a": "b", "b": "b", "c": "d"})
    found = checked.check.diagnosis
    assert found is not None
    assert (found.right, found.drift, found.is_rounding) == (("a", "b"), None, False)
    assert str(found).endswith("not measured")


def test_a_state_that_turns_out_to_be_equal_ends_the_suspicion() -> None:
    checked = Checked()
    checked.suspect()
    checked.check.keep(3, {"fragment": {"p": torch.tensor([1.0, 2.0])}})
    checked.checkpoint(3, "a", SHARED)
    checked.round(2, {"a": "b", "b": "b", "c": "d"})
    assert (checked.check.diagnosis, checked.check.wants("a")) == (None, False)


def test_a_wrong_average_needs_no_measure() -> None:
    checked = Checked()
    for number in range(2):
        for slot in ("a", "b"):
            one = receipt(slot, number, run=checked.journal.run.nonce)
            checked.store.create(keys.receipt(number, slot), one.to_bytes())
        mine = receipt("c", number, average="f", run=checked.journal.run.nonce)
        checked.check.look(mine, checked.members)
    found = checked.check.diagnosis
    assert found is not None
    assert (found.right, found.drift, found.is_rounding) == (("a", "b"), None, False)
    assert str(found) == "another average than a,b in round 0"


def test_after_healing_what_was_held_before_is_not_judged() -> None:
    checked = Checked()
    checked.suspect()
    checked.check.keep(3, off_by(1000))
    checked.checkpoint(3, "a", SHARED)
    checked.round(2, {"a": "b", "b": "b", "c": "d"})
    checked.check.healed(20)
    for number in range(3, 20):
        checked.round(number, {"a": "b", "b": "b", "c": "d"})
    assert not checked.check.wants("a")
    checked.round(20, {"a": "b", "b": "b", "c": "d"})
    checked.round(21, {"a": "b", "b": "b", "c": "d"})
    assert checked.check.wants("a")


def test_drift_that_comes_back_is_removed_again_and_not_told_again(events: pytest.LogCaptureFixture) -> None:
    checked = Checked()
    differ = {"a": "b", "b": "b", "c": "d"}
    checked.suspect()
    checked.check.keep(3, off_by(1))
    checked.checkpoint(3, "a", SHARED)
    checked.round(2, differ)
    assert checked.check.diagnosis is not None
    checked.check.healed(3)
    number = 3
    while not checked.check.wants("a"):
        checked.round(number, differ)
        number += 1
    assert number > QUIET
    checked.check.keep(number, off_by(1))
    checked.checkpoint(number, "b", SHARED)
    checked.round(number, differ)
    assert checked.check.diagnosis is not None
    assert len(told(events, "drifted")) == 1


def test_after_healing_what_was_written_meanwhile_is_not_trusted() -> None:
    checked = Checked()
    checked.suspect()
    checked.check.keep(3, off_by(1000))
    good, bad = checked.checkpoint(3, "a", SHARED), checked.checkpoint(4, "c", SHARED)
    assert None not in (checked.check.evidence(good), checked.check.evidence(bad))
    checked.round(2, {"a": "b", "b": "b", "c": "d"})
    checked.check.healed(5)
    assert checked.check.diagnosis is None
    assert checked.check.evidence(good) is not None
    assert checked.check.evidence(bad) is None
    later = checked.checkpoint(6, "c", SHARED)
    assert checked.check.evidence(later) is not None


def test_a_checkpoint_whose_writer_is_outvoted_is_not_trusted() -> None:
    checked = Checked()
    manifests = [checked.checkpoint(1, "c", SHARED), checked.checkpoint(2, "a", SHARED)]
    checked.suspect()
    assert [checked.check.evidence(manifest) is not None for manifest in manifests] == [False, True]
    assert checked.check.evidence(checked.checkpoint(0, "c", SHARED)) == Evidence()


# Real managers.


class Harmed(Island):
    """A replica whose shared parameters are changed once, between two rounds."""

    harm: Callable[[torch.Tensor], torch.Tensor] | None = None
    harm_at = 3

    def train(self, rounds: int, *, close: bool = True) -> Harmed:
        harmed = False
        with self.diloco:
            while self.manager.current_step() < rounds:
                self.manager.catch_up(self.inner)
                if self.harm is not None and not harmed and self.manager.current_step() >= self.harm_at:
                    for tensor in self.originals.values():
                        tensor.copy_(self.harm(tensor))
                    harmed = True
                if self.manager.current_step() < rounds:
                    self.step()
        if close:
            self.manager.shutdown()
        return self


ROUNDS = 24


def run_with(
    store: MemoryStore, harm: Callable[[torch.Tensor], torch.Tensor], *, replicas: int = 3, **more: object
) -> list[Harmed]:
    """Replicas r-0, r-1, ...; the last one is harmed."""
    islands = [Harmed(store, f"r-{i}", seed=i, minimum=replicas, **more) for i in range(replicas)]
    islands[-1].harm = harm
    return together([lambda island=island: island.train(ROUNDS) for island in islands])


def states(store: MemoryStore, number: int) -> set[str | None]:
    return {one.state for one in receipts(store, number).values()}


def assert_one_truth(islands: Sequence[Island]) -> None:
    for name, tensor in islands[0].originals.items():
        assert all(torch.equal(island.originals[name], tensor) for island in islands)


def test_healthy_replicas_tell_nothing(events: pytest.LogCaptureFixture) -> None:
    islands = run_with(MemoryStore(), torch.clone)
    assert_one_truth(islands)
    assert not any(told(events, name) for name in ("receipts_differ", "drifted", "diverged", "healed"))


def test_last_place_drift_is_told_once_and_removed(events: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    islands = run_with(store, flipped)
    assert_one_truth(islands)
    (drifted,) = told(events, "drifted")
    assert drifted["slot"] == "r-2"
    assert not told(events, "diverged")
    differ = told(events, "receipts_differ")
    assert {(one["what"], one["slots"], one["right"]) for one in differ} == {("state", "r-2", "r-0,r-1")}
    assert min(int(str(one["round"])) for one in differ) == 3
    assert len(states(store, 2)) == 1
    assert len(states(store, 3)) == 2
    assert len(states(store, ROUNDS - 1)) == 1
    assert not told(events, "receipt_failed")


def test_a_replica_that_really_differs_is_named_and_heals(events: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    islands = run_with(store, lambda tensor: 1.5 * tensor)
    assert_one_truth(islands)
    (diverged,) = told(events, "diverged")
    assert diverged["slot"] == "r-2"
    assert not told(events, "drifted")
    (healed,) = told(events, "healed")
    assert healed["slot"] == "r-2"
    after = range(int(str(healed["round"])), ROUNDS)
    assert all(len(states(store, number)) == 1 for number in after)
    last = decisions(store)[-1]
    assert [share.slot for share in last.members] == ["r-0", "r-1", "r-2"]


def test_of_two_replicas_one_follows_the_other(events: pytest.LogCaptureFixture) -> None:
    islands = run_with(MemoryStore(), lambda tensor: 1.5 * tensor, replicas=2)
    assert_one_truth(islands)
    assert len(told(events, "diverged")) == 1


def test_a_harmed_replica_heals_between_rare_checkpoints(events: pytest.LogCaptureFixture) -> None:
    islands = run_with(MemoryStore(), lambda tensor: 1.5 * tensor, checkpoint_every=4)
    assert_one_truth(islands)
    assert len(told(events, "healed")) == 1


class Fragmented(Harmed):
    """Two layers that are exchanged in turn, each some steps after its pseudo-gradient was taken."""

    def __init__(self, store: MemoryStore, slot: str, *, seed: int) -> None:
        super().__init__(store, slot, seed=seed, minimum=3)
        self.manager.shutdown()
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.manager = manager_of(
            store, slot, minimum=3, state_dict=self.model.state_dict, load_state_dict=self.model.load_state_dict
        )
        outer = [torch.optim.SGD(layer.parameters(), lr=0.7, momentum=0.9, nesterov=True) for layer in self.model]
        self.diloco = DiLoCo(self.manager, list(self.model), self.inner, outer, sync_every=4, fragment_sync_delay=1)


def test_fragments_heal_too(events: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    islands = [Fragmented(store, f"r-{i}", seed=i) for i in range(3)]
    islands[2].harm = lambda tensor: 1.5 * tensor
    together([lambda island=island: island.train(ROUNDS) for island in islands])
    assert_one_truth(islands)
    assert len(told(events, "healed")) == 1


def synchronous(
    store: MemoryStore, slot: str, harm: Callable[[torch.Tensor], torch.Tensor] | None, rounds: int = ROUNDS
) -> nn.Linear:
    """One replica that averages its gradients in every step, as DDP does; returns its model."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(found: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    manager = manager_of(store, slot, minimum=3, state_dict=state, load_state_dict=load)
    generator = torch.Generator().manual_seed(ord(slot))
    while manager.current_step() < rounds:
        manager.start_quorum()
        if harm is not None and manager.current_step() == 3:
            with torch.no_grad():
                model.weight.copy_(harm(model.weight))
            harm = None
        optimizer.zero_grad()
        (model(torch.randn(8, 4, generator=generator)) ** 2).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            manager.allreduce(parameter.grad).wait()
        if manager.should_commit():
            optimizer.step()
    manager.shutdown()
    return model


@pytest.mark.parametrize(("units", "name"), [(1, "drifted"), (1 << 20, "diverged")])
def test_replicas_that_average_gradients_heal_too(events: pytest.LogCaptureFixture, units: int, name: str) -> None:
    store = MemoryStore()

    def harm(tensor: torch.Tensor) -> torch.Tensor:
        return flipped(tensor, units)

    models = together([lambda slot=slot: synchronous(store, slot, harm if slot == "c" else None) for slot in "abc"])
    assert all(torch.equal(model.weight, models[0].weight) for model in models)
    assert [one["slot"] for one in told(events, name)] == ["c"]


def test_what_cannot_heal_yet_does_not_contribute(
    events: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    islands = [Harmed(store, f"r-{i}", seed=i, minimum=2) for i in range(3)]
    sick = islands[2].manager
    islands[2].harm = lambda tensor: 1.5 * tensor
    recorder, lost = sick._course._recorder, threading.Event()
    whole, first = recorder.load_newest, []

    def unreadable(beyond: int = -1, writers: Sequence[str] | None = None) -> object:
        if writers is not None and len(first) < 3:
            first.append(sick.current_step())
            lost.set()
            raise Corrupt("a damaged checkpoint")
        return whole(beyond, writers)

    monkeypatch.setattr(recorder, "load_newest", unreadable)
    together([lambda island=island: island.train(ROUNDS) for island in islands])
    assert_one_truth(islands)
    assert lost.is_set()
    offered = {one.round for one in contributions(store) if one.slot == "r-2"}
    assert offered.isdisjoint(first)
    assert ROUNDS - 1 in offered
    abstained = {one["round"] for one in told(events, "abstained")}
    assert set(first) <= abstained


@pytest.mark.parametrize("units", [1, 1 << 20])
def test_who_knows_that_it_differs_writes_no_checkpoint(monkeypatch: pytest.MonkeyPatch, units: int) -> None:
    """Neither before it can heal, nor at the boundary at which it does."""
    store = MemoryStore()
    islands = [Harmed(store, f"r-{i}", seed=i, minimum=2, retention=Retention(last=ROUNDS)) for i in range(3)]
    islands[2].harm = lambda tensor: flipped(tensor, units)
    recorder = islands[2].manager._course._recorder
    heal, known = recorder.heal, set[int]()

    def late() -> Standing | None:
        if not recorder.is_sound:
            known.add(islands[2].manager.current_step())
        return heal() if len(known) >= 6 or not known else None

    monkeypatch.setattr(recorder, "heal", late)
    together([lambda island=island: island.train(ROUNDS) for island in islands])
    assert_one_truth(islands)
    assert len(known) >= 6
    manifests = {number: checkpoint.manifest(store, number) for number in known}
    assert {one.writer for one in manifests.values() if one is not None} <= {"r-0", "r-1"}


def test_a_newcomer_does_not_begin_from_a_checkpoint_that_is_outvoted() -> None:
    store = MemoryStore()
    islands = [Harmed(store, f"r-{i}", seed=i, minimum=3) for i in range(3)]
    islands[2].harm, islands[2].harm_at = lambda tensor: 1.5 * tensor, 4
    together([lambda island=island: island.train(5) for island in islands])
    # Round 5's checkpoint: 5 % 3 = 2 is r-2's turn.
    manifest = checkpoint.manifest(store, 5)
    assert manifest is not None
    assert (manifest.writer, len(states(store, 4))) == ("r-2", 2)
    newcomer = Island(store, "r-9", minimum=1)
    with newcomer.diloco:
        newcomer.manager.catch_up(newcomer.inner)
    newcomer.manager.shutdown()
    assert newcomer.manager.current_step() == 5
    assert torch.equal(newcomer.originals["weight"], islands[0].originals["weight"])
    assert not torch.equal(newcomer.originals["weight"], islands[2].originals["weight"])


def test_nobody_heals_in_the_middle_of_a_round_that_is_followed() -> None:
    """What is left of it would be contributed, as a step of nothing, to the round that the checkpoint leads to."""
    store = MemoryStore()
    island = Island(store, "b", minimum=1).train(1, close=False)
    Island(store, "a", minimum=1, grace_s=0.0).train(4)
    course, asked = island.manager._course, list[bool]()
    heal = course._recorder.heal

    def ask() -> Standing | None:
        asked.append(course.following)
        return heal()

    course._recorder.heal = ask  # type: ignore[method-assign]
    island.train(5)
    assert asked
    assert not any(asked)


def test_who_heals_by_an_older_checkpoint_follows_to_the_head_again() -> None:
    store = MemoryStore()
    island = Island(store, "b", minimum=1).train(1, close=False)
    Island(store, "a", minimum=1, grace_s=0.0, checkpoint_every=3).train(4)
    course, found = island.manager._course, list[int]()

    def heal() -> Standing | None:
        if found or course.standing.round < 4:
            return None
        standing = course._recorder.load_newest()
        found.append(standing.round)
        return standing

    course._recorder.heal = heal  # type: ignore[method-assign]
    with island.diloco:
        assert island.manager.catch_up(island.inner) == 3
    assert found == [3]
    assert island.manager.current_step() == 4
    island.manager.shutdown()
