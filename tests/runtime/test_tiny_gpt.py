"""The tiny_gpt example: its data, its model, and its three training modes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import begin_run, receipts
from tests.support.forked import ForkedProcess

from skerry.runtime.contract import Contract
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "runtime/examples/tiny_gpt/train.py"
SMALL = ("--width", "32", "--layers", "1", "--context", "32", "--batch", "8")
# The loss per byte of an untrained model is log(256) = 5.55.
UNTRAINED = 5.0


@pytest.fixture(scope="module")
def train() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_gpt_train", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(**changes: float) -> argparse.Namespace:
    return argparse.Namespace(**{"seed": 0, "batch": 4, "context": 16, "width": 32, "layers": 2, "lr": 2e-3, **changes})


def start(output: Path, *arguments: str, **environment: str) -> ForkedProcess:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("SKERRY_")}
    settings = {**kept, "OMP_NUM_THREADS": "1", **environment}
    return ForkedProcess([str(SCRIPT), *SMALL, *arguments], settings, output, errors=output.with_suffix(".err"))


def report_of(process: ForkedProcess) -> dict[str, object]:
    """The JSON in the last line of a process. Kills it after 240 s."""
    with process:
        assert process.wait(300) == 0, process.errors.read_text()
    last: dict[str, object] = json.loads(process.output.read_text().splitlines()[-1])
    return last


def test_held_out_files_are_in_no_shard(train: ModuleType) -> None:
    training, held_out = train.sources()
    assert len(training) > 4 * len(held_out) > 0
    assert not set(training) & set(held_out)


def test_batch_depends_only_on_seed_replica_and_step(train: ModuleType) -> None:
    text = torch.arange(100_000) % 251
    first = train.batch(text, 0, 7, options())
    assert first.shape == (4, 17)
    assert torch.equal(first, train.batch(text, 0, 7, options()))
    assert ((first.diff(dim=1) % 251) == 1).all(), "consecutive bytes of the text"
    for index, step, seed in [(1, 7, 0), (0, 8, 0), (0, 7, 1)]:
        assert not torch.equal(first, train.batch(text, index, step, options(seed=seed)))


def test_equal_seeds_build_equal_models(train: ModuleType) -> None:
    first, second, other = (train.build(options(seed=seed)) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_prediction_does_not_depend_on_later_bytes(train: ModuleType) -> None:
    model = train.build(options())
    before = torch.arange(16)[None]
    after = before.clone()
    after[0, 10] = 99
    with torch.no_grad():
        same, other = model(before), model(after)
    assert torch.equal(same[0, :10], other[0, :10])
    assert not torch.allclose(same[0, 10:], other[0, 10:])


@pytest.mark.slow
def test_same_seed_gives_the_same_falling_loss(tmp_path: Path) -> None:
    first, second, other = (
        report_of(start(tmp_path / name, "--steps", "20", *arguments))
        for name, *arguments in (
            ["first", "--lone"],
            ["second", "--synchronous", "1"],
            ["other", "--lone", "--seed", "1"],
        )
    )
    assert first == second
    assert first["held_out"] != other["held_out"]
    assert float(str(first["held_out"])) < UNTRAINED


@pytest.mark.slow
def test_synchronous_replicas_train_on_their_own_shards(tmp_path: Path) -> None:
    two = report_of(start(tmp_path / "two", "--steps", "5", "--synchronous", "2"))
    lone = report_of(start(tmp_path / "lone", "--steps", "5", "--lone"))
    assert two["held_out"] != lone["held_out"]


@pytest.mark.slow
def test_replicas_of_a_run_end_with_the_same_model(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    begin_run(store, ["r-0", "r-1"], rounds=5, minimum=2)
    contracts = [Contract(run_uri=tmp_path.as_uri(), slot=f"r-{index}", index=index, replicas=2) for index in range(2)]
    replicas = [start(tmp_path / contract.slot, **contract.environment()) for contract in contracts]
    reports = [report_of(replica) for replica in replicas]
    assert [report["rounds"] for report in reports] == [5, 5]
    assert reports[0]["held_out"] == reports[1]["held_out"]
    assert float(str(reports[0]["held_out"])) < UNTRAINED
    for number in range(5):
        written = receipts(store, number)
        assert len(written) == 2
        assert len({(receipt.averages, receipt.state) for receipt in written.values()}) == 1
