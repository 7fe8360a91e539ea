"""`skerry export`: files, refusals and their exit codes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from tests.infra.runs import write_spec
from tests.kit.divergence import HarmedIsland, scaled
from tests.kit.events import logged_events
from tests.kit.managers import Island, begin_run, train_all
from tests.kit.stores import damage
from tests.support.command_line import invoke

from skerry.runtime.export import load
from skerry.runtime.log import keys
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.runtime.store import Store


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return write_spec(tmp_path, count=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store" / "test-run").as_uri())


@pytest.fixture
def trained(store: Store) -> Island:
    """The only replica of a run of two rounds."""
    begin_run(store, ["a-0"], rounds=2)
    return Island(store, "a-0", minimum=1).train(2)


def test_model_is_written_by_spec_or_uri(spec: Path, store: Store, trained: Island) -> None:
    path = spec.parent / "model.safetensors"
    result = invoke("export", spec, "-o", path)
    assert (result.exit_code, result.output) == (0, f"{path}: test after 2 rounds, 2 tensors, 324 B\n")
    exported = load_file(path)
    assert all(torch.equal(exported[name], tensor) for name, tensor in trained.originals.items())
    again = invoke("export", store.uri, "--round", "1", "--output", spec.parent / "model.pt", "--json")
    written = json.loads(again.output)
    assert (written["round"], written["tensors"], written["by_fragment"]) == (1, 2, False)
    assert torch.load(written["path"]).keys() == exported.keys()


def test_state_that_two_replicas_dispute_is_exported_with_a_warning(
    spec: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    begin_run(store, ["a-0", "a-1"], rounds=6)
    islands = [HarmedIsland(store, slot, minimum=2) for slot in ("a-0", "a-1")]
    islands[0].harm, islands[0].harm_at = scaled(1.5), 5  # it writes the last checkpoint
    train_all(islands, 6)
    path = spec.parent / "model.safetensors"
    result = invoke("export", spec, "-o", path)
    assert result.exit_code == 0
    assert "the replicas reported different states after 6 rounds, and no majority says which is right" in result.output
    assert json.loads(invoke("export", spec, "-o", path, "--force", "--json").output)["disputed"]
    sound = invoke("export", spec, "-o", path, "--force", "--round", 5)
    assert (sound.exit_code, "warning" in sound.output) == (0, False)
    caplog.clear()
    load(store.uri, 5)
    assert not logged_events(caplog, "receipts_differ")
    load(store.uri)
    (event,) = logged_events(caplog, "receipts_differ")
    assert event["round"] == 5


def test_existing_file_is_replaced_with_force_only(spec: Path, trained: Island) -> None:
    assert trained.steps
    path = spec.parent / "model.pt"
    path.write_text("mine")
    refused = invoke("export", spec, "-o", path)
    assert (refused.exit_code, path.read_text()) == (2, "mine")
    assert "exists and was not changed; name another file, or replace it with --force" in refused.output
    assert invoke("export", spec, "-o", path, "--force").exit_code == 0
    assert torch.load(path)


def test_what_cannot_be_exported_is_named(spec: Path, store: Store) -> None:
    path = spec.parent / "model.safetensors"

    def refusal(*arguments: object) -> tuple[int, str]:
        result = invoke("export", *arguments)
        assert not path.exists()
        return result.exit_code, result.output

    assert refusal(spec, "-o", path)[0] == 2
    assert "no run at" in refusal(spec, "-o", path)[1]
    begin_run(store, ["a-0"], rounds=2)
    assert "no checkpoint at" in refusal(spec, "-o", path)[1]
    Island(store, "a-0", minimum=1).train(2)
    code, text = refusal(spec, "-o", spec.parent / "model.bin")
    assert (code, "name a file that ends with .safetensors or .pt" in text) == (2, True)
    code, text = refusal(spec, "-o", path, "--round", "7")
    assert (code, "there are: 2, 1, 0" in text) == (2, True)
    (part, *_) = [entry.key for entry in store.list(f"{keys.CHECKPOINTS}00000002/") if ".json" not in entry.key]
    damage(store, part)
    code, text = refusal(spec, "-o", path)
    assert (code, "other checkpoints: 1, 0" in text) == (1, True), text
    assert invoke("export", spec, "-o", path, "--round", "1").exit_code == 0


@pytest.mark.parametrize("package", ["torch", "safetensors.torch"])
def test_extra_is_named_without_torch(spec: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.delitem(sys.modules, "skerry.runtime.export", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    result = invoke("export", spec)
    assert (result.exit_code, "pip install 'skerry[export]'" in result.output) == (2, True), result.output
