"""`replica.total_steps`, and a schedule that `replica.steps` sets to the run's step after a restart or a late join."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import begin_run
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from torchft.local_sgd import DiLoCo

from skerry.runtime.contract import Contract
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS
from skerry.runtime.log.run_record import Settings
from skerry.runtime.replica import Replica, connect
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store

PEAK, SYNC_EVERY = 0.1, 4


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "run").as_uri()


def begin(uri: str, **changes: object) -> tuple[Store, Run]:
    store = open_store(uri)
    settings: dict[str, object] = {"rounds": 6, "sync_every": SYNC_EVERY, "start_window_s": 0.0}
    return store, begin_run(store, ["r-0"], **(settings | changes))


def extend(store: Store, run: Run, rounds: int) -> None:
    record = Settings(
        run=run.nonce,
        number=1,
        previous=GENESIS,
        from_round=0,
        rounds=rounds,
        work=None,
        outer_lr=run.outer_lr,
        outer_momentum=run.outer_momentum,
        by="operator",
        created="",
    )
    assert store.create(keys.settings(1), record.to_bytes())


def connected(uri: str, index: int = 0) -> Replica:
    return connect(Contract(run_uri=uri, slot=f"r-{index}", index=index, replicas=2).environment())


def train(
    uri: str,
    schedule_of: Callable[[torch.optim.Optimizer], LRScheduler],
    *,
    index: int = 0,
    stop_after: int | None = None,
    keep: bool = False,
    totals: list[int | None] | None = None,
) -> dict[int, float]:
    """Train to the end of the run or after a step. Returns the learning rate of each step."""
    rates: dict[int, float] = {}
    try:
        with connected(uri, index) as replica:
            model = nn.Linear(4, 4)
            inner = torch.optim.AdamW(model.parameters(), lr=PEAK)
            outer = torch.optim.SGD(model.parameters(), lr=0.7)
            schedule = schedule_of(inner)
            manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
            if keep:
                replica.keep(inner=inner, schedule=schedule)
            with DiLoCo(manager, [model], inner, [outer], sync_every=SYNC_EVERY):
                for step in replica.steps(inner, schedule):
                    rates[step] = inner.param_groups[0]["lr"]
                    if totals is not None:
                        totals.append(replica.total_steps)
                    inner.zero_grad()
                    model(torch.ones(1, 4)).square().sum().backward()
                    inner.step()
                    if step == stop_after:
                        replica.request_stop("enough")
    except SystemExit:
        assert stop_after is not None
    return rates


def cosine(step: int, total: int = 6 * SYNC_EVERY) -> float:
    return PEAK * (1 + math.cos(math.pi * step / total)) / 2


def closed_form(inner: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(inner, lambda step: cosine(step) / PEAK)


def chainable(inner: torch.optim.Optimizer) -> LRScheduler:
    """Computes each rate from the one before it."""
    return CosineAnnealingLR(inner, 6 * SYNC_EVERY)


SCHEDULES = pytest.mark.parametrize("schedule_of", [closed_form, chainable])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rounds": 6}, 24),
        ({"rounds": 6, "fragments": 2}, 12),
        ({"rounds": 6, "work": 30.0}, 24),  # rounds that make_up adds are not known, and not counted
        ({"rounds": None}, None),
    ],
)
def test_total_steps_are_those_of_all_rounds(uri: str, changes: dict[str, object], expected: int | None) -> None:
    begin(uri, **changes)
    assert connected(uri).total_steps == expected


def test_total_steps_of_a_new_start_include_an_extension(uri: str) -> None:
    store, run = begin(uri, rounds=2)
    before = connected(uri)
    extend(store, run, rounds=5)
    assert (before.total_steps, connected(uri).total_steps) == (8, 20)


def test_total_steps_of_a_running_replica_grow_after_its_next_round(uri: str) -> None:
    store, run = begin(uri, rounds=2)
    replica_totals: list[int | None] = []

    def schedule_of(inner: torch.optim.Optimizer) -> LRScheduler:
        extend(store, run, rounds=3)  # after it has connected
        return closed_form(inner)

    train(uri, schedule_of, totals=replica_totals)
    assert replica_totals == [8] * 4 + [12] * 8


@SCHEDULES
def test_schedule_has_the_rate_of_each_step(uri: str, schedule_of: Callable[..., LRScheduler]) -> None:
    begin(uri)
    rates = train(uri, schedule_of)
    assert rates == pytest.approx({step: cosine(step) for step in range(24)})


@SCHEDULES
def test_late_replica_has_the_rate_of_the_run(uri: str, schedule_of: Callable[..., LRScheduler]) -> None:
    begin(uri)
    train(uri, schedule_of, stop_after=11)
    rates = train(uri, schedule_of, index=1)
    assert rates == pytest.approx({step: cosine(step) for step in range(12, 24)})


@SCHEDULES
@pytest.mark.parametrize("keep", [False, True])
def test_restarted_replica_has_the_rate_of_the_run(
    uri: str, schedule_of: Callable[..., LRScheduler], *, keep: bool
) -> None:
    begin(uri, checkpoint_every=2)
    train(uri, schedule_of, stop_after=9, keep=keep)  # saved at step 8
    train(uri, schedule_of, index=1, stop_after=15)
    rates = train(uri, schedule_of, keep=keep)
    assert rates == pytest.approx({step: cosine(step) for step in range(16, 24)})


@SCHEDULES
def test_schedule_stays_at_its_end_in_rounds_that_make_up(uri: str, schedule_of: Callable[..., LRScheduler]) -> None:
    begin(uri, work=8.0)
    rates = train(uri, schedule_of)
    assert len(rates) == 32
    assert [rates[step] for step in range(24, 32)] == pytest.approx([0.0] * 8)
