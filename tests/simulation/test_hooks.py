"""The toy trainer makes the calls of torchft's wrappers: both are recorded at the shipped lifecycle and compared.

In each mode replica r-1 joins after two rounds that r-0 has closed, follows them, and trains two more. In DiLoCo it
ends the last one early.
"""
# Records at private parts, and hands torchft another manager than its own.
# pyright: reportPrivateUsage=false, reportArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.kit.managers import begin_run, manager_of
from tests.simulation.ledger import Ledger
from tests.simulation.run import Simulation
from tests.simulation.scenario import MODES, calm
from tests.simulation.search import quiet
from torch import nn
from torchft.ddp import DistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.optim import OptimizerWrapper

from skerry.runtime.errors import RunFinished
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.training.early_round_end_check import EarlyEnd, StragglerMonitor
from skerry.runtime.training.lifecycle import Lifecycle
from skerry.runtime.training.round_runner import RoundRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.simulation.faults import Call
    from tests.simulation.session import Mode

    from skerry.runtime.manager import ObjectStoreManager
    from skerry.runtime.store import Store

ROUNDS, FOLLOWED, STEPS = 4, 2, 2
RECORDED = [
    *((Lifecycle, name) for name in ("catch_up", "before_step", "begin_round", "add", "close_round")),
    (RoundRunner, "finish"),
]
EXCHANGE = ["add", "finish"]


def record(patch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls of r-1's trainer from now on; those that the lifecycle makes itself are left out."""
    calls: list[str] = []

    def recording(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def recorded(self: Lifecycle | RoundRunner, *args: Any, **named: Any) -> Any:
            if self._session.presence.slot == "r-1" and "close_round" not in calls[-1:]:
                calls.append(name)
            result = call(self, *args, **named)
            if self._session.presence.slot == "r-1" and name in {"catch_up", "close_round"}:
                calls.append(f"end of {name}")
            return result

        return recorded

    for owner, name in RECORDED:
        patch.setattr(owner, name, recording(getattr(owner, name), name))
    patch.setattr(StragglerMonitor, "check", ends_last_round_early)
    return calls


def ends_last_round_early(monitor: StragglerMonitor, position: Any, current: Any, *_: object) -> EarlyEnd:
    last = monitor._session.presence.slot == "r-1" and position.round == ROUNDS - 1
    return EarlyEnd(share=0.5) if last and current.inner_steps == 1 else EarlyEnd()


def simplified(calls: Sequence[str]) -> list[str]:
    """Several tensors of an exchange count as one, and several exchanges in a row, too."""
    result: list[str] = []
    for call in calls:
        if call in EXCHANGE and result[-1:] == [call]:
            continue
        result.append(call)
        if result[-4:] == EXCHANGE * 2:
            del result[-2:]
    return result


def train(mode: Mode, manager: ObjectStoreManager, rounds: int) -> None:
    """The loop of a training script, with torchft's wrappers."""
    model = nn.Linear(4, 3)
    manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    if mode == "ddp":
        module, optimizer = DistributedDataParallel(manager, model), OptimizerWrapper(manager, inner)
        with suppress(RunFinished):
            while rounds == ROUNDS or manager.current_step() < rounds:  # the end of the run shows in an exchange
                optimizer.zero_grad()
                module(torch.ones(8, 4)).sum().backward()
                optimizer.step()
        return
    is_diloco = mode == "diloco"
    with (
        DiLoCo(manager, [model], inner, [outer], sync_every=STEPS)
        if is_diloco
        else LocalSGD(manager, model, inner, sync_every=STEPS)
    ):
        while True:
            manager.catch_up(inner)
            if manager.current_step() == rounds:
                return
            inner.zero_grad()
            model(torch.ones(8, 4)).sum().backward()
            inner.step()


def calls_of_torchft(mode: Mode, store: Store) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        calls = record(patch)
        begin_run(store, ["r-0", "r-1"], rounds=ROUNDS, start_window_s=0.0)
        for slot, rounds in (("r-0", FOLLOWED), ("r-1", ROUNDS)):
            manager = manager_of(store, slot, minimum=1, grace_s=0.1, checkpoint_every=100)
            train(mode, manager, rounds)
            manager.shutdown()
    return simplified(calls)


def calls_of_the_toy(mode: Mode) -> list[str]:
    settings: dict[str, Any] = {"start_window_s": 0.0, "checkpoint_every": 100, "mode": mode, "jitter": 0.0}
    steps = 1 if mode == "ddp" else STEPS
    scenario = calm(2, rounds=ROUNDS, min_replicas=1, sync_every=steps, **settings)
    scenario = replace(scenario, late=(0.0, 600.0), lost=frozenset({"r-0"}))

    def leave(call: Call) -> str | None:
        closes = call.process.slot == "r-0" and call.key.startswith(f"payloads/{FOLLOWED:08d}/")
        return "crash" if closes else None

    with pytest.MonkeyPatch.context() as patch, quiet():
        calls = record(patch)
        patch.setattr(Ledger, "end_early", lambda self, by, number, _, share: self.allow(by, number, share))
        result = Simulation(scenario, leave).run()
    assert not result.violations, result.report()
    return simplified(calls)


@pytest.mark.parametrize("mode", MODES)
def test_toy_trainer_makes_the_calls_of_torchfts_wrapper(mode: Mode) -> None:
    expected = calls_of_torchft(mode, MemoryStore())
    assert expected.count("end of close_round") == ROUNDS
    assert calls_of_the_toy(mode) == expected
