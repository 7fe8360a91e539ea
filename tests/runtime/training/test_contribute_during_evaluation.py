"""Evaluations with real managers: the time, the contribution in mid-evaluation, and the shared parameters."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.events import logged_events
from tests.kit.fragments import originals_in
from tests.kit.managers import (
    Island,
    assert_same_parameters,
    begin_run,
    contributions,
    islands_of,
    members,
    together,
    wait_for,
    weights,
)
from tests.kit.stores import StoreView
from tests.runtime.test_replica import create_run, variables
from tests.support.clocks import StandingClock
from torch import nn
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo

from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import Outcome
from skerry.runtime.replica import Replica, connect
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.runtime.store import Data, Store

STEPS = 4


@pytest.mark.parametrize("fragments", [1, 2])
def test_steps_before_a_long_evaluation_are_contributed_while_it_runs(
    fragments: int, caplog: pytest.LogCaptureFixture
) -> None:
    """However busy the machine is: no time passes for the others, so that they wait for it, and they decide."""
    store = MemoryStore()

    def decide_last(store: Store, key: str, data: Data) -> bool:
        if key.startswith(keys.EXCHANGES):
            wait_for(lambda: store.read(key))
        return store.create(key, data)

    begin_run(store, ("a", "b", "c"), minimum=2)
    terms: dict[str, object] = {"sync_every": STEPS, "fragments": fragments, "lr": 0.01}
    first, second = islands_of(store, "ab", clock=StandingClock(), **terms)
    evaluating = Island(StoreView(store, decide_last), "c", seed=2, grace_s=1.0, **terms)  # type: ignore[arg-type]
    begun = threading.Event()

    def train(island: Island) -> None:
        assert begun.wait(300)
        island.train(2)

    def evaluate() -> None:
        evaluating.take(3)
        key = keys.contribution(0, 0, "c")
        with evaluating.manager.evaluating():
            begun.set()
            for parameter in evaluating.model.parameters():
                parameter.data.mul_(2.0)  # as if averaged parameters were evaluated
            wait_for(lambda: store.read(key))
            for parameter in evaluating.model.parameters():
                parameter.data.div_(2.0)
        evaluating.train(2)

    caplog.set_level("INFO")
    together([lambda: train(first), lambda: train(second), evaluate])
    assert weights(store)[0] == {"a": 1.0, "b": 1.0, "c": 3 / STEPS}
    assert members(store)[1] == ["a", "b", "c"]
    (early,) = [c for c in contributions(store) if (c.round, c.slot) == (0, "c")]
    assert (early.inner_steps, early.share) == (3, 3 / STEPS)
    assert early.telemetry is not None
    assert early.telemetry.evaluate_s > 0
    assert_same_parameters([first, second, evaluating])
    (warning,) = logged_events(caplog, "round_ended_early")
    assert "evaluate on less data or in fewer rounds" in warning["why"]
    assert evaluating.manager.lifecycle.rounds.upload_s > 0.0


def test_evaluation_that_fits_is_followed_by_the_rest_of_the_round() -> None:
    store = MemoryStore()
    begin_run(store, ("a", "b", "c"), minimum=2)
    islands = islands_of(store, ("a", "b", "c"), sync_every=STEPS, grace_s=20.0)

    def evaluate() -> None:
        islands[2].take(3)
        with islands[2].manager.evaluating(), islands[2].manager.evaluating():
            pass
        islands[2].train(1)

    together([lambda: islands[0].train(1), lambda: islands[1].train(1), evaluate])
    assert weights(store) == [{"a": 1.0, "b": 1.0, "c": 1.0}]


def test_inner_step_within_an_evaluation_is_refused() -> None:
    island = Island(MemoryStore(), "a", minimum=1)
    island.join()
    with island.diloco, island.manager.evaluating(), pytest.raises(Invalid, match="an inner step within"):
        island.step()
    assert island.take(1).manager.inner_steps == 1


def test_evaluation_that_raises_is_over() -> None:
    island = Island(MemoryStore(), "a", minimum=1)
    island.take(1)
    with pytest.raises(ZeroDivisionError), island.manager.evaluating():
        raise ZeroDivisionError
    assert island.take(1).manager.current_step() == 1


def train(replica: Replica, seen: list[tuple[int, bool, bool]]) -> None:
    """Two fragments: at a boundary, own and shared parameters of one of them differ."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model = nn.Sequential(*layers)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    outer = [torch.optim.SGD(layer.parameters(), lr=0.7) for layer in layers]
    manager = replica.manager()
    diloco = DiLoCo(manager, list(layers), inner, outer, sync_every=2 * STEPS)
    after = list[torch.Tensor]()

    def own() -> torch.Tensor:
        return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])

    def evaluate() -> dict[str, float]:
        shared = torch.cat([tensor.flatten() for part in originals_in(diloco) for tensor in part.values()])
        seen.append((manager.current_step(), torch.equal(own(), shared), torch.equal(own(), after[-1])))
        return {"val_loss": float(manager.current_step())}

    replica.evaluate(evaluate, every=2)
    before: torch.Tensor | None = None
    with diloco:
        for _ in replica.steps(inner):
            if before is not None and seen and manager.inner_steps == 0 and manager.current_step() == seen[-1][0]:
                assert torch.equal(own(), before), "its own parameters are restored bit for bit"
            inner.zero_grad()
            (model(torch.randn(8, 4)) ** 2).sum().backward()
            inner.step()
            before = own()
            after.append(before)


@pytest.mark.parametrize("rounds", [5, 6])
def test_function_is_called_on_shared_parameters_after_every_second_round(tmp_path: Path, rounds: int) -> None:
    """Also after the last round, whether it is a second one or not: that is the model which a user exports."""
    uri = (tmp_path / "run").as_uri()
    store, seen = create_run(uri, rounds=rounds, fragments=2, sync_every=2 * STEPS), list[tuple[int, bool, bool]]()
    with connect(variables(uri)) as replica:
        train(replica, seen)
    assert seen == [(2, True, False), (4, True, False), (rounds, True, False)]
    end = Outcome.parse(store.read(key := keys.outcome("r-0", 0)) or b"", key)
    assert (end.status, end.metrics) == ("done", {"val_loss": float(rounds)})
    recorded = {c.round: c.telemetry.metrics for c in contributions(store) if c.telemetry is not None}
    assert {number: metrics for number, metrics in recorded.items() if metrics} == {
        2: {"val_loss": 2.0},
        4: {"val_loss": 4.0},
    }
    assert all((c.telemetry.evaluate_s > 0) == (c.round in {2, 4}) for c in contributions(store) if c.telemetry)


def test_all_ranks_evaluate_what_is_recorded_with_the_end(tmp_path: Path) -> None:
    """As in a round: each rank may have a part of the data."""
    uri = (tmp_path / "run").as_uri()
    store, server = create_run(uri, rounds=2, sync_every=STEPS), TCPStore("localhost", 0, is_master=True)
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port)}

    def run(rank: int) -> None:
        with connect({**variables(uri), **address, "RANK": str(rank)}) as replica:
            model = nn.Linear(2, 1)
            inner, outer = torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())
            replica.evaluate(lambda: {"val_loss": float(rank), f"of_rank_{rank}": 7.0})
            with DiLoCo(replica.manager(), [model], inner, outer, sync_every=STEPS):
                for _ in replica.steps(inner):
                    inner.zero_grad()
                    model(torch.ones(1, 2)).sum().backward()
                    inner.step()

    together([lambda: run(0), lambda: run(1)])
    end = Outcome.parse(store.read(key := keys.outcome("r-0", 0)) or b"", key)
    (before,) = [c.telemetry.metrics for c in contributions(store) if c.round == 1 and c.telemetry is not None]
    assert (end.status, end.metrics) == ("done", before)
    assert before == {"val_loss": 0.5, "of_rank_0": 7.0, "of_rank_1": 7.0}


@pytest.mark.parametrize("every", [0, -1])
def test_evaluation_needs_a_number_of_rounds(tmp_path: Path, every: int) -> None:
    uri = (tmp_path / "run").as_uri()
    create_run(uri)
    with connect(variables(uri)) as replica, pytest.raises(Invalid, match="at least 1"):
        replica.evaluate(lambda: None, every=every)
