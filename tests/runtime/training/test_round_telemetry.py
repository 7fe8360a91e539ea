"""Telemetry of a round in its records: losses, steps, seconds and the metrics of the script."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.fragments import fragments_in
from tests.kit.managers import Island, begin_run, contributions, manager_of, receipts, together
from tests.support.clocks import StandingClock

from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import MAX_FIGURE, MAX_METRIC_NAME, MAX_METRICS, Telemetry
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.training.round_telemetry import RoundTelemetry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store import Data

SYNC_EVERY, ROUNDS = 3, 2


class Reporting(Island):
    """A replica that reports a loss at each inner step, and a metric at every second one."""

    def __init__(self, store: MemoryStore, slot: str, **more: object) -> None:
        super().__init__(store, slot, sync_every=SYNC_EVERY, **more)  # type: ignore[arg-type]
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self) -> None:
        x = torch.randn(8, 4, generator=self.generator)
        self.inner.zero_grad()
        loss = (self.model(x) ** 2).sum()
        loss.backward()
        self.losses.append(loss.item())
        self.norms.append(
            math.sqrt(sum(float((p.grad**2).sum()) for p in self.model.parameters() if p.grad is not None))
        )
        self.manager.count_tokens(8)
        self.manager.report_metrics({"loss": self.losses[-1]} | ({"val_loss": 2.0} if self.steps % 2 else {}))
        self.inner.step()
        self.steps += 1


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    begin_run(store, ("a", "b"))
    return store


def mean_of(losses: Sequence[float], number: int) -> float:
    """Of the losses in one round."""
    return fmean(losses[number * SYNC_EVERY : (number + 1) * SYNC_EVERY])


def test_contribution_holds_the_telemetry_of_its_round(store: MemoryStore) -> None:
    replicas = [Reporting(store, slot, seed=seed) for seed, slot in enumerate("ab")]
    together([lambda replica=replica: replica.train(ROUNDS) for replica in replicas])
    recorded = {(c.slot, c.round): c.telemetry for c in contributions(store)}
    assert len(recorded) == 2 * ROUNDS
    for replica, slot in zip(replicas, "ab", strict=True):
        for number in range(ROUNDS):
            telemetry = recorded[slot, number]
            assert telemetry is not None
            assert telemetry.loss == pytest.approx(mean_of(replica.losses, number))
            assert telemetry.gradient_norm == pytest.approx(replica.norms[number * SYNC_EVERY], rel=1e-3)
            assert (telemetry.steps, telemetry.possible, telemetry.tokens) == (SYNC_EVERY, SYNC_EVERY, 8 * SYNC_EVERY)
            assert (telemetry.learning_rate, telemetry.metrics) == (0.1, {"val_loss": 2.0})
            assert telemetry.train_s > 0
    written = [receipt for number in range(ROUNDS) for receipt in receipts(store, number).values()]
    assert all(receipt.telemetry is None for receipt in written), "what a contribution says is not said twice"
    assert all(
        set(receipt.seconds) == {"encode", "upload", "wait", "download", "reduce", "exposed"} for receipt in written
    )


def test_receipt_holds_the_telemetry_of_a_replica_that_did_not_contribute(store: MemoryStore) -> None:
    class Diverging(Reporting):
        def step(self) -> None:
            super().step()
            with torch.no_grad():
                next(self.model.parameters()).fill_(math.nan)

    sound, diverging = Reporting(store, "a", minimum=1), Diverging(store, "b", minimum=1)
    together([lambda: sound.train(1), lambda: diverging.train(1)])
    assert [c.slot for c in contributions(store)] == ["a"]
    by_slot = {receipt.slot: receipt.telemetry for receipt in receipts(store, 0).values()}
    assert by_slot["a"] is None
    telemetry = by_slot["b"]
    assert telemetry is not None
    assert (telemetry.steps, telemetry.loss) == (SYNC_EVERY, pytest.approx(diverging.losses[0])), "NaN has no mean"


class SlowUploads(MemoryStore):
    """To upload a payload takes ten seconds."""

    def __init__(self, clock: StandingClock) -> None:
        super().__init__()
        self._clock = clock

    def create(self, key: str, data: Data) -> bool:
        if key.startswith(keys.PAYLOADS):
            self._clock.advance(10.0)
        return super().create(key, data)


@pytest.mark.parametrize(("trains_meanwhile", "exposed"), [(True, 0.0), (False, 10.0)])
def test_receipt_has_the_seconds_of_an_exchange_that_training_awaits(*, trains_meanwhile: bool, exposed: float) -> None:
    clock = StandingClock()
    store = SlowUploads(clock)
    manager = manager_of(store, "a", minimum=1, clock=clock)
    manager.start_quorum()
    work = manager.allreduce(torch.ones(10))
    if trains_meanwhile:
        manager.lifecycle.rounds.flush()  # as the next inner step does
        manager.lifecycle.rounds.wait()
    work.wait()
    assert manager.should_commit()
    manager.shutdown()
    (receipt,) = receipts(store, 0).values()
    assert (receipt.seconds["upload"], receipt.seconds["exposed"]) == (10.0, exposed)


def test_ranks_of_a_replica_are_one_record() -> None:
    ranks = [
        Telemetry(loss=1.0, steps=4, possible=4, tokens=10, train_s=2.0, learning_rate=0.1, metrics={"a": 1.0}),
        Telemetry(
            loss=None, steps=4, possible=4, tokens=20, train_s=4.0, gradient_norm=3.0, metrics={"a": 3.0, "b": 5.0}
        ),
    ]
    assert Telemetry.of_ranks(ranks) == Telemetry(
        loss=1.0,
        steps=4,
        possible=4,
        tokens=30,
        train_s=3.0,
        learning_rate=0.1,
        gradient_norm=3.0,
        metrics={"a": 2.0, "b": 5.0},
    )
    assert Telemetry.of_ranks([None, None]) is None


def test_ranks_with_different_metrics_have_one_bounded_record() -> None:
    huge = MAX_FIGURE
    ranks = [Telemetry(loss=huge, metrics={f"{rank}-{number}": huge for number in range(20)}) for rank in range(2)]
    telemetry = Telemetry.of_ranks(ranks)
    assert telemetry is not None
    assert (telemetry.loss, len(telemetry.metrics)) == (huge, MAX_METRICS)


def test_figure_that_no_record_can_have_is_left_out() -> None:
    telemetry = RoundTelemetry(learning_rate=-1.7e308)
    telemetry.report({"loss": 1.7e308, "a": -1.7e308, "b": 1.0})
    record = telemetry.record(steps=1, possible=1, tokens=0, seconds=1.0, evaluate_s=0.0)
    assert (record.loss, record.learning_rate, record.metrics) == (None, None, {"b": 1.0})


def test_loss_is_not_one_of_the_metrics_that_are_counted() -> None:
    telemetry, metrics = RoundTelemetry(), {f"metric {number}": 1.0 for number in range(MAX_METRICS)}
    telemetry.report(metrics)
    with pytest.raises(Invalid, match="at most 32 metrics"):
        telemetry.report({"another": 1.0})
    telemetry.report({"loss": 2.0})
    record = telemetry.record(steps=1, possible=1, tokens=0, seconds=1.0, evaluate_s=0.0)
    assert (record.loss, dict(record.metrics)) == (2.0, metrics)


@pytest.mark.parametrize("name", ["", "x" * (MAX_METRIC_NAME + 1), "not \ud800 text", "two\nlines"])
def test_metric_needs_a_short_name(name: str) -> None:
    with pytest.raises(Invalid, match="1 to 64 characters"):
        RoundTelemetry().report({name: 1.0})


def test_a_round_has_a_bounded_number_of_metrics() -> None:
    telemetry = RoundTelemetry()
    telemetry.report({"loss": 1.0} | {f"metric {number}": 1.0 for number in range(MAX_METRICS)})
    with pytest.raises(Invalid, match="at most 32 metrics"):
        telemetry.report({"another": 1.0})
    telemetry.report({"metric 0": 3.0})
    telemetry.gradient_norm = telemetry.learning_rate = math.nan
    record = telemetry.record(steps=1, possible=1, tokens=0, seconds=1.0, evaluate_s=0.25)
    assert (record.loss, record.metrics["metric 0"], len(record.metrics)) == (1.0, 2.0, MAX_METRICS)
    assert (record.gradient_norm, record.learning_rate) == (None, None), "NaN is for the exchange to find"
    assert len(record.to_bytes()) < 4000


class Poisoned(Island):
    """A replica whose gradient of one parameter has a NaN in the last inner step of each round."""

    def __init__(self, store: MemoryStore, slot: str, *, poisoned: str, **more: object) -> None:
        super().__init__(store, slot, sync_every=SYNC_EVERY, **more)  # type: ignore[arg-type]
        self.poisoned = poisoned

    def step(self) -> None:
        x = torch.randn(8, 4, generator=self.generator)
        self.inner.zero_grad()
        (self.model(x) ** 2).sum().backward()
        gradient = dict(self.model.named_parameters())[self.poisoned].grad
        assert gradient is not None
        if self.steps % SYNC_EVERY == SYNC_EVERY - 1:
            gradient.view(-1)[1] = math.nan
        self.inner.step()
        self.steps += 1


@pytest.mark.parametrize("tensors", ["one per parameter", "one bucket"])
@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_receipt_names_the_parameter_that_is_not_finite(store: MemoryStore, parameter: str, tensors: str) -> None:
    sound = Island(store, "a", sync_every=SYNC_EVERY, minimum=1)
    other = Poisoned(store, "b", poisoned=parameter, seed=1, minimum=1)
    for replica in (sound, other):
        (fragment,) = fragments_in(replica.diloco)
        fragment.use_bucketization = tensors == "one bucket"
        fragment.bucket_cap_mb = 1 << 20
    together([lambda: sound.train(1), lambda: other.train(1)])
    written = receipts(store, 0)
    assert written["a"].abstained is None
    reason = f"NaN or infinity in the pseudo-gradient of parameter {parameter!r} (element 1)"
    assert written["b"].abstained == reason
    assert not written["b"].contributed
