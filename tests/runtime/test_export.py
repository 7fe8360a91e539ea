"""The exported model of real runs: bit by bit the shared parameters of all replicas, and usable without skerry."""

from __future__ import annotations

import tarfile
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.kit.divergence import train_averaging_gradients
from tests.kit.fragments import fragments_in, originals_in
from tests.kit.managers import Island, begin_run, islands_of, manager_of, together, train_all, train_and_save_each
from tests.kit.stores import View, damage
from tests.kit.tied_model import TiedModel
from torch import nn
from torchft.local_sgd import DiLoCo, LocalSGD

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.shared_state import SharedState
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.export import load, write
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog, read_run
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.runtime.manager import ObjectStoreManager
    from skerry.runtime.store import Span, Store

    Tensors = Mapping[str, torch.Tensor]

OLD_BUCKET = Path(__file__).parents[1] / "recorded/old_run.tar.gz"


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "run").as_uri()


@pytest.fixture
def store(uri: str) -> Store:
    return open_store(uri)


def assert_equal(exported: Tensors, expected: Tensors) -> None:
    assert sorted(exported) == sorted(expected)
    assert {name: tensor.dtype for name, tensor in exported.items()} == {n: t.dtype for n, t in expected.items()}
    assert [name for name, tensor in exported.items() if not torch.equal(tensor, expected[name])] == []


def trained(store: Store, rounds: int = 3, **settings: object) -> list[Island]:
    """Two replicas that have closed so many rounds, with all checkpoints written."""
    begin_run(store, ["a", "b"])
    islands = islands_of(store, ["a", "b"], **settings)
    train_and_save_each(islands, rounds)
    return islands


# The shared model.


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"wrapper": {"fragment_update_alpha": 0.5}},
        {"fragments": 3, "lr": 0.01},
        {"fragments": 2, "sync_every": 3, "wrapper": {"fragment_sync_delay": 1}, "lr": 0.01},
        {
            "fragments": 2,
            "sync_every": 3,
            "wrapper": {"fragment_sync_delay": 1, "fragment_update_alpha": 0.25},
            "lr": 0.01,
        },
    ],
    ids=str,
)
def test_exported_model_is_the_shared_model_of_all_replicas(
    uri: str, store: Store, settings: dict[str, object]
) -> None:
    islands = trained(store, 4, **settings)
    exported = load(uri)
    for island in islands:
        assert_equal(exported, island.originals)
        own = island.model.state_dict()
        # Between rounds of one fragment without alpha a replica's own model is the shared one.
        is_shared = all(torch.equal(own[name], tensor) for name, tensor in exported.items())
        assert is_shared is not bool({"wrapper", "fragments"} & settings.keys())


class Replica:
    """Trains a model as a script does: with alpha, so its own model never is the shared one."""

    def __init__(
        self,
        store: Store,
        slot: str,
        state_of: Callable[[TiedModel, torch.optim.Optimizer], dict[str, object]] | None = None,
        parts: Callable[[TiedModel], list[nn.Module]] = lambda model: [model],
    ) -> None:
        """state_of: the state that the script registers; None registers none. parts: the fragments."""
        self.model = TiedModel(ord(slot))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        fragments = parts(self.model)
        registered = (
            {}
            if state_of is None
            else {"state_dict": lambda: state_of(self.model, self.inner), "load_state_dict": lambda _: None}
        )
        self.manager = manager_of(store, slot, **registered)
        outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in fragments]
        self.diloco = DiLoCo(
            self.manager, fragments, self.inner, outer, sync_every=2 * len(fragments), fragment_update_alpha=0.5
        )
        self.random = torch.Generator().manual_seed(ord(slot))

    def train(self, rounds: int) -> None:
        with self.diloco:
            while self.manager.current_step() < rounds:
                self.manager.catch_up(self.inner)
                if self.manager.current_step() < rounds:
                    self.inner.zero_grad()
                    self.model(torch.randn(8, 4, generator=self.random)).square().sum().backward()
                    self.inner.step()
        self.manager.shutdown()

    def shared(self) -> dict[str, torch.Tensor]:
        """The state of the model with the shared parameters; afterwards its own ones are these."""
        for fragment in fragments_in(self.diloco):
            fragment.restore_parameters()
        return self.model.state_dict()


def replicas_of(store: Store, rounds: int = 3, **settings: object) -> list[Replica]:
    begin_run(store, ["a", "b"])
    replicas = [Replica(store, slot, **settings) for slot in "ab"]  # type: ignore[arg-type]
    together([lambda replica=replica: replica.train(rounds) for replica in replicas])
    return replicas


def model_alone(model: TiedModel, _: torch.optim.Optimizer) -> dict[str, object]:
    return dict(model.state_dict())


def model_and_optimizer(model: TiedModel, inner: torch.optim.Optimizer) -> dict[str, object]:
    return {"model": model.state_dict(), "optimizer": inner.state_dict(), "epoch": 3}


def copies(model: TiedModel, _: torch.optim.Optimizer) -> dict[str, object]:
    """Copies, and values that are made from parameters but are none."""
    copied = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    halves = {name: parameter.detach() / 2 for name, parameter in model.named_parameters()}
    return {"model": deepcopy(copied), "halves": halves, "bias": [model.inlet.bias.detach().norm()]}


def through_numpy(model: TiedModel, _: torch.optim.Optimizer) -> dict[str, object]:
    """Copies whose origin cannot be followed."""
    return {name: torch.from_numpy(tensor.numpy().copy()) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("state_of", [model_alone, model_and_optimizer, through_numpy])
def test_tied_weights_and_buffers_are_exported_with_the_model(uri: str, store: Store, state_of: object) -> None:
    replicas = replicas_of(store, state_of=state_of)
    exported = load(uri)
    assert not torch.equal(exported["middle.weight"], replicas[0].model.middle.weight)
    assert exported["calls"] == 6  # of the writer's: three rounds of two steps
    for replica in replicas:
        expected = replica.shared()
        assert torch.equal(exported["outlet.weight"], exported["inlet.weight"])
        assert exported["outlet.weight"].data_ptr() != exported["inlet.weight"].data_ptr()
        assert_equal(exported, expected)


def test_copies_are_replaced_and_values_made_from_parameters_are_not(uri: str, store: Store) -> None:
    replicas = replicas_of(store, state_of=copies)
    exported, own = load(uri), replicas[0].model.inlet.bias.detach().clone()
    assert exported["bias.0"].shape == ()
    expected = replicas[0].shared()
    assert_equal({name: exported[f"model.{name}"] for name in expected}, expected)
    assert torch.equal(exported["halves.inlet.bias"], own / 2) or torch.equal(
        exported["halves.inlet.bias"], replicas[1].model.inlet.bias.detach() / 2
    )


def test_parameter_of_two_fragments_has_the_value_of_the_last(uri: str, store: Store) -> None:
    replicas = replicas_of(
        store, 4, state_of=model_alone, parts=lambda model: [nn.ModuleList([model.inlet, model.middle]), model.outlet]
    )
    exported = load(uri)
    _, last = originals_in(replicas[0].diloco)
    assert torch.equal(exported["inlet.weight"], last["weight"])
    for replica in replicas:
        assert_equal(exported, replica.shared())


def test_several_models_keep_their_names_and_optimizers_are_left_out(uri: str, store: Store, tmp_path: Path) -> None:
    def two(model: TiedModel, inner: torch.optim.Optimizer) -> dict[str, object]:
        return {"first": model.inlet.state_dict(), "others": [model.middle.state_dict()], "inner": inner.state_dict()}

    replicas = replicas_of(store, state_of=two, parts=lambda model: [nn.ModuleList([model.inlet, model.middle])])
    file = write(store, tmp_path / "all.pt")
    state = torch.load(file.path)
    shared = replicas[0].shared()
    expected = {f"first.{name}": shared[f"inlet.{name}"] for name in ("weight", "bias")}
    assert_equal(load(uri), expected | {f"others.0.{name}": shared[f"middle.{name}"] for name in ("weight", "bias")})
    assert torch.equal(state["others"][0]["bias"], shared["middle.bias"])
    TiedModel(7).inlet.load_state_dict(state["first"])
    torch.optim.AdamW(TiedModel(7).parameters()).load_state_dict(state["inner"])


def test_parameters_are_named_by_fragments_without_a_registered_model(uri: str, store: Store, tmp_path: Path) -> None:
    (replica, _) = replicas_of(store)
    shared = replica.shared()
    del shared["calls"], shared["outlet.weight"]  # a buffer, and a second name
    assert_equal(load(uri), shared)
    assert write(store, tmp_path / "a.safetensors").by_fragment
    with pytest.raises(Invalid, match="did not register its whole model"):
        write(store, tmp_path / "a.pt")


def test_partly_registered_model_is_exported_whole(uri: str, store: Store) -> None:
    (replica, _) = replicas_of(
        store,
        state_of=lambda model, _: dict(model.middle.state_dict()),
        parts=lambda model: [model.inlet, model.middle],
    )
    parts = enumerate(originals_in(replica.diloco))
    assert_equal(load(uri), {f"{n}.{name}": tensor for n, part in parts for name, tensor in part.items()})


def test_averaged_parameters_of_local_sgd_are_exported(uri: str, store: Store) -> None:
    begin_run(store, ["a", "b"])

    def replica(slot: str) -> nn.Linear:
        torch.manual_seed(ord(slot))
        model = nn.Linear(4, 3)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        manager = manager_of(store, slot, state_dict=model.state_dict, load_state_dict=model.load_state_dict)
        with LocalSGD(manager, model, inner, sync_every=2):
            train_steps(manager, model, inner, 3)
        manager.shutdown()
        return model

    models = together([lambda slot=slot: replica(slot) for slot in "ab"])
    for model in models:
        assert_equal(load(uri), model.state_dict())


def train_steps(manager: ObjectStoreManager, model: nn.Module, inner: torch.optim.Optimizer, rounds: int) -> None:
    while manager.current_step() < rounds:
        manager.catch_up(inner)
        if manager.current_step() < rounds:
            inner.zero_grad()
            model(torch.randn(8, 4)).square().sum().backward()
            inner.step()


def test_model_of_averaged_gradients_is_exported(uri: str, store: Store) -> None:
    begin_run(store, "abc")
    models = together([lambda slot=slot: train_averaging_gradients(store, slot, rounds=3) for slot in "abc"])
    for model in models:
        assert_equal(load(uri), model.state_dict())


# Older checkpoints.


def test_checkpoint_without_places_is_matched_by_names(uri: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedState, "for_checkpoint", SharedState.capture)
    replicas = replicas_of(store, state_of=model_and_optimizer)
    exported = load(uri)
    for replica in replicas:
        assert_equal(exported, replica.shared())


def test_old_bucket_is_exported(tmp_path: Path) -> None:
    """Its fragments have the same names and shapes, so their places in the model are not known."""
    with tarfile.open(OLD_BUCKET) as archive:
        archive.extractall(tmp_path, filter="data")
    store = open_store(tmp_path.as_uri())
    file = write(store, tmp_path / "old.safetensors")
    assert file.by_fragment
    state = checkpoint.load(store, checkpoint.manifest(store, file.round) or pytest.fail("no manifest"))
    assert isinstance(state, dict)
    fragments = [state[f"StreamingDiLoCoFragment_{number}"]["original_parameters"] for number in range(2)]
    expected = {f"{number}.{name}": tensor for number, part in enumerate(fragments) for name, tensor in part.items()}
    assert_equal(load_file(file.path), expected)


# Files.


def test_exported_file_loads_in_plain_torch_with_the_same_loss(store: Store, tmp_path: Path) -> None:
    (replica, other) = replicas_of(store, state_of=model_and_optimizer)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))

    def loss(model: TiedModel) -> float:
        return model(x).square().mean().item()

    own = loss(replica.model)
    file = write(store, tmp_path / "model.safetensors")
    fresh = TiedModel(99)
    fresh.load_state_dict(load_file(file.path))
    replica.shared(), other.shared()
    assert loss(fresh) == loss(replica.model) == loss(other.model) != own
    with safe_open(file.path, "pt") as opened:
        assert opened.metadata() == {
            "format": "pt",
            "run": "test",
            "round": "3",
            "commit": RunLog(store, read_run(store)).read_previous_digest(3),
        }
    assert (file.round, file.tensors, file.size_bytes) == (3, 7, Path(file.path).stat().st_size)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.safetensors"]
    (tmp_path / "other").touch()
    assert Path(file.path).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_other_rounds_can_be_exported_as_long_as_they_exist(uri: str, store: Store) -> None:
    islands = trained(store, 2, wrapper={"fragment_update_alpha": 0.5})
    earlier = {name: tensor.clone() for name, tensor in islands[0].originals.items()}
    again = islands_of(store, ["a", "b"], wrapper={"fragment_update_alpha": 0.5})
    train_all(again, 4)
    assert_equal(load(uri, round=2), earlier)
    assert_equal(load(uri), again[0].originals)
    with pytest.raises(Invalid, match=r"no checkpoint of 9 rounds; there are: 4, 3, 2, "):
        load(uri, round=9)


def test_unusable_paths_and_runs_are_refused(uri: str, store: Store, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no run at"):
        load(uri)
    begin_run(store, ["a"])
    with pytest.raises(Invalid, match="no checkpoint at"):
        load(uri)
    with pytest.raises(Invalid, match=r"ends with \.safetensors or \.pt"):
        write(store, tmp_path / "model.bin")
    with pytest.raises(Invalid, match="no such folder"):
        write(store, tmp_path / "no" / "model.pt")
    (tmp_path / "mine.pt").write_text("mine")
    with pytest.raises(Invalid, match="exists and was not changed"):
        write(store, tmp_path / "mine.pt")
    with pytest.raises(Invalid, match="no checkpoint at"):
        write(store, tmp_path / "mine.pt", force=True)
    assert (tmp_path / "mine.pt").read_text() == "mine"


# Damage.


def part_of(store: Store, round_number: int) -> str:
    manifest = checkpoint.manifest(store, round_number)
    assert manifest is not None
    return keys.checkpoint_part(round_number, manifest.parts[0].digest)


def test_damaged_checkpoint_is_never_exported(uri: str, store: Store, tmp_path: Path) -> None:
    islands = trained(store)
    damage(store, part_of(store, 3))
    with pytest.raises(Corrupt, match=r"other checkpoints: 2, 1"):
        load(uri)
    with pytest.raises(Corrupt):
        write(store, tmp_path / "model.pt")
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []
    assert load(uri, round=2).keys() == islands[0].originals.keys()


def test_checkpoint_that_receipts_contradict_is_never_exported(uri: str, store: Store) -> None:
    trained(store)
    replaced = checkpoint.manifest(store, 3)
    older = checkpoint.manifest(store, 2)
    assert replaced is not None
    assert older is not None
    for part in older.parts:
        data = store.read(keys.checkpoint_part(2, part.digest))
        store.create(keys.checkpoint_part(3, part.digest), data or b"")
    forged = replaced.model_copy(update={"parts": older.parts, "index": older.index, "tree": older.tree})
    store.replace(keys.checkpoint_manifest(3), forged.sealed().to_bytes())
    with pytest.raises(Corrupt, match="contradicts the receipts"):
        load(uri)
    other_log = replaced.model_copy(update={"commit": "0" * 64})
    store.replace(keys.checkpoint_manifest(3), other_log.sealed().to_bytes())
    with pytest.raises(Corrupt, match="belongs to another log"):
        load(uri)


class Collecting(View):
    """Deletes a checkpoint when its first part is read, as a live run does."""

    def __init__(self, store: Store, round_number: int) -> None:
        super().__init__(store)
        self.round = round_number

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        exists = self.store.read(keys.checkpoint_manifest(self.round)) is not None
        if exists and key == part_of(self.store, self.round):
            self.store.delete(keys.checkpoint_manifest(self.round))
            self.store.delete(key)
        return self.store.read(key, span, into)


def test_checkpoint_that_is_deleted_meanwhile_is_replaced_by_the_next(store: Store, tmp_path: Path) -> None:
    trained(store)
    assert write(Collecting(store, 3), tmp_path / "model.pt").round == 2  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="no checkpoint of 2 rounds; there are: 1, 0"):
        write(Collecting(store, 2), tmp_path / "other.pt", 2)  # type: ignore[arg-type]
