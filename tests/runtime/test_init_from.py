"""A run that starts from another one: its replicas begin with the exported model of that run, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.events import logged_events
from tests.kit.fragments import originals_in, outer_optimizers_in
from tests.kit.managers import Island, assert_same_parameters, begin_run, islands_of, manager_of, train_all
from tests.kit.stores import damage
from tests.kit.tied_model import TiedModel
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.infra.run.source_checkpoint import find_source
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.export import load
from skerry.runtime.log import keys
from skerry.runtime.log.log import read_run
from skerry.runtime.mirrors.mirror import Mirror
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.mirrors.run_from_copy import fork as restore
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store


@pytest.fixture
def source(tmp_path: Path) -> Store:
    return open_store((tmp_path / "source").as_uri())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "fork").as_uri())


def train_source(source: Store, rounds: int = 3, **settings: object) -> list[Island]:
    begin_run(source, ["a", "b"], rounds=rounds)
    islands = islands_of(source, ["a", "b"], **settings)
    train_all(islands, rounds)
    return islands


def fork(source: Store, store: Store, slots: Sequence[str] = ("a", "b"), wanted: int | None = None) -> Run:
    """Create a run as the operator does."""
    chosen = find_source(source, source.uri, wanted)
    chosen.copy_to(store)
    return begin_run(store, slots, init_from=chosen.initial)


def assert_equal(model: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(model) == sorted(expected)
    assert [name for name, tensor in model.items() if not torch.equal(tensor, expected[name])] == []


def delete_all(store: Store) -> None:
    for entry in store.list(""):
        store.delete(entry.key)


def momentum_of(island: Island) -> list[object]:
    return [state for outer in outer_optimizers_in(island.diloco) for state in outer.state.values()]


@pytest.mark.parametrize("wanted", [None, 2])
def test_fork_starts_with_the_exported_model_of_the_source(
    source: Store, store: Store, wanted: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    train_source(source)
    expected = load(source.uri, wanted)
    run = fork(source, store, wanted=wanted)
    delete_all(source)
    islands = islands_of(store, ["a", "b"])
    for island in islands:
        island.join()
        assert_equal(island.originals, expected)
        assert_equal(dict(island.model.state_dict()), expected)
        assert momentum_of(island) == [], "the outer optimizer starts anew"
        assert island.manager.current_step() == 0
    assert_equal(load(store.uri), expected)
    train_all(islands, rounds=2, close=False)
    late = Island(store, "late", seed=9, minimum=1)
    late.join()
    assert_same_parameters([*islands, late])
    (event,) = logged_events(caplog, "initial_model_loaded")
    assert (event["slot"], event["round"], event["uri"]) == ("a", wanted or 3, source.uri)
    assert run.init_from is not None
    assert run.init_from.states, "the receipts of the source are recorded"


def test_script_without_registered_state_cannot_start_from_another_run(source: Store, store: Store) -> None:
    train_source(source)
    fork(source, store)
    manager = manager_of(store, "a", minimum=1)
    with pytest.raises(Invalid, match=r"init_from.*registered no state.*give the manager state_dict"):
        manager.start_quorum()


def test_restarted_replica_does_not_start_from_the_source_again(source: Store, store: Store) -> None:
    train_source(source)
    fork(source, store)
    train_all(islands_of(store, ["a", "b"]), rounds=2)
    for entry in store.list(keys.INITIAL):
        store.delete(entry.key)
    again = Island(store, "a", seed=7, minimum=1)
    again.join()
    assert again.manager.current_step() == 2
    assert_equal(again.originals, load(store.uri))


class TiedReplica:
    """Trains `TiedModel` in one or two fragments, and registers it as a script says."""

    def __init__(self, store: Store, slot: str, *, fragments: int = 1, named: bool = True, alpha: float = 0.0) -> None:
        self.model = TiedModel(ord(slot))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)

        def state() -> dict[str, object]:
            model = self.model.state_dict()
            return {"model": model, "inner": self.inner.state_dict()} if named else dict(model)

        def take(state: dict[str, object]) -> None:
            self.model.load_state_dict(state["model"] if named else state)  # type: ignore[arg-type]
            if named:
                self.inner.load_state_dict(state["inner"])  # type: ignore[arg-type]

        self.manager = manager_of(store, slot, minimum=1, state_dict=state, load_state_dict=take)
        parts: list[nn.Module] = [self.model]
        if fragments == 2:
            parts = [nn.ModuleList([self.model.inlet, self.model.middle]), self.model.outlet]
        outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
        self.diloco = DiLoCo(
            self.manager, parts, self.inner, outer, sync_every=2 * fragments, fragment_update_alpha=alpha
        )

    def train(self, rounds: int) -> None:
        with self.diloco:
            while self.manager.current_step() < rounds:
                self.manager.catch_up(self.inner)
                if self.manager.current_step() < rounds:
                    self.inner.zero_grad()
                    self.model(torch.ones(2, 4)).square().sum().backward()
                    self.inner.step()
        self.manager.shutdown()

    def join(self) -> dict[str, torch.Tensor]:
        with self.diloco:
            self.manager.catch_up(self.inner)
        return dict(self.model.state_dict())


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_fragments_and_registered_state_may_differ(source: Store, store: Store, before: int, after: int) -> None:
    begin_run(source, ["a"], rounds=4)
    TiedReplica(source, "a", fragments=before, alpha=0.5).train(4)
    expected = load(source.uri)
    assert expected["calls"] > 0
    fork(source, store, ["b"])
    replica = TiedReplica(store, "b", fragments=after, named=False)
    assert_equal(replica.join(), expected)
    # The tied weight is in both fragments, and has one value in them.
    weights = [
        tensor for part in originals_in(replica.diloco) for name, tensor in part.items() if tensor.shape == (4, 4)
    ]
    assert sum(torch.equal(weight, expected["outlet.weight"]) for weight in weights) == after
    assert replica.inner.state_dict()["state"] == {}


def test_model_without_registered_state_is_matched_by_fragment_names(source: Store, store: Store) -> None:
    begin_run(source, ["a"], rounds=2)
    nothing = {"state_dict": None, "load_state_dict": None}
    Island(source, "a", minimum=1, fragments=2, lr=0.01, **nothing).train(2)
    expected = load(source.uri)
    fork(source, store, ["b"])
    island = Island(store, "b", seed=5, minimum=1, fragments=2, lr=0.01, **nothing)
    island.join()
    assert_equal(island.originals, expected)
    assert_equal(dict(island.model.state_dict()), expected)


def test_other_models_are_refused_with_the_names_of_their_parameters(source: Store, store: Store) -> None:
    train_source(source)
    fork(source, store)
    with pytest.raises(Invalid) as refusal:
        Island(store, "a", fragments=2).join()
    text = str(refusal.value)
    assert text.startswith(f"this script has another model than {source.uri}, from which the run starts (init_from): ")
    assert "only in this script's model: 0.weight, 0.bias, 1.weight, 1.bias" in text
    assert "only in the model of that run: weight, bias" in text
    assert not store.list(keys.CHECKPOINTS), "nothing was written"


def test_other_shapes_and_types_are_refused_with_both(source: Store, store: Store) -> None:
    begin_run(source, ["a"], rounds=2)
    TiedReplica(source, "a").train(2)
    fork(source, store, ["b"])
    replica = TiedReplica(store, "b")
    replica.model.register_buffer("calls", torch.zeros(2, dtype=torch.int32))
    with pytest.raises(Invalid, match=r"of another shape or type: calls: float32 \(\) -> int32 \(2,\)$"):
        replica.join()


@pytest.mark.parametrize("what", ["manifest", "part", "missing", "replaced"])
def test_damaged_copy_is_never_loaded(source: Store, store: Store, what: str) -> None:
    train_source(source)
    run = fork(source, store)
    manifest = keys.checkpoint_manifest(3, keys.INITIAL)
    (part,) = [entry.key for entry in store.list(keys.INITIAL) if entry.key != manifest]
    expected = {
        "manifest": r"the model to start from is damaged: digest=",
        "part": r"payload is damaged: key=initial/",
        "missing": r"the model to start from is missing: .*/initial/00000003/manifest.json",
        "replaced": r"contradicts the receipts of .*/source: it was replaced there",
    }[what]
    match what:
        case "manifest":
            damage(store, manifest)
        case "part":
            damage(store, part)
        case "missing":
            store.delete(manifest)
        case _:
            assert run.init_from is not None
            other = run.init_from.model_copy(update={"states": ("0" * 32,)})
            store.delete(keys.RUN)
            store.create(keys.RUN, run.model_copy(update={"init_from": other}).to_bytes())
    with pytest.raises(Corrupt, match=expected):
        Island(store, "a").join()
    assert not store.list(keys.CHECKPOINTS)


def test_copies_of_the_run_verify_the_model_it_starts_from(source: Store, store: Store, tmp_path: Path) -> None:
    train_source(source)
    fork(source, store)
    train_all(islands_of(store, ["a", "b"]), rounds=1)
    mirror, other, target = (open_store((tmp_path / name).as_uri()) for name in ("mirror", "other", "target"))
    charges: list[int] = []
    Mirror(store, mirror, SystemClock(), charge=charges.append).catch_up()
    (part,) = [entry for entry in mirror.list(keys.INITIAL) if not entry.key.endswith(keys.MANIFEST)]
    assert charges[0] == part.size
    whole = bytes(store.read(part.key) or b"")
    damage(store, part.key)
    with pytest.raises(Corrupt, match=part.key):
        Mirror(store, other, SystemClock()).catch_up()
    assert (read_run(other), other.list(keys.COMMITS) == []) == (
        None,
        False,
    )  # rounds are copied, and no run is claimed
    store.replace(part.key, whole)
    Mirror(store, other, SystemClock()).catch_up()
    assert find_cut(other).round == 1
    damage(mirror, part.key)
    with pytest.raises(Corrupt, match=part.key):
        restore(mirror, find_cut(mirror), target, "2026-01-01")
    for copy in (store, mirror):
        copy.delete(keys.checkpoint_manifest(3, keys.INITIAL))
    with pytest.raises(Corrupt, match=keys.INITIAL):
        restore(mirror, find_cut(mirror), target, "2026-01-01")
    with pytest.raises(Corrupt, match=keys.INITIAL):
        Mirror(store, mirror, SystemClock()).catch_up()
    assert read_run(target) is None


def test_run_without_a_source_has_the_same_bytes_as_before(store: Store) -> None:
    begin_run(store, ["a"])
    data = bytes(store.read(keys.RUN) or b"")
    assert b"init_from" not in data
    run = read_run(store)
    assert run is not None
    assert (run.init_from, run.to_bytes()) == (None, data)
