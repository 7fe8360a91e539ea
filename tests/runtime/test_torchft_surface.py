"""Compares skerry's Manager with that of the installed torchft, for the release and a pinned nightly."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest
import torch
from tests.kit.fragments import fragments_in, originals_in
from torch import nn
from torchft import ddp
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager

from skerry.runtime.checkpointing.checkpoint import flatten, state_digest
from skerry.runtime.checkpointing.shared_state import SharedState
from skerry.runtime.errors import Invalid
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.training.allreduce_future import ExchangeWork
from skerry.runtime.training.torchft_fragments import fragments_of, parameters_behind, save_without_copies

if TYPE_CHECKING:
    from collections.abc import Iterator

# Internal steps of torchft's process groups; no consumer calls them on a manager.
NOT_SUPPORTED: set[str] = {"set_rank_info", "get_reconfigure_handle"}
PUBLIC = sorted(name for name, value in vars(Manager).items() if callable(value) and not name.startswith("_"))


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in NOT_SUPPORTED])
def test_public_method_has_torchfts_parameters(name: str) -> None:
    torchft_parameters = inspect.signature(getattr(Manager, name)).parameters
    own_parameters = inspect.signature(getattr(ObjectStoreManager, name)).parameters
    assert list(own_parameters) == list(torchft_parameters)
    for parameter, other in zip(own_parameters.values(), torchft_parameters.values(), strict=True):
        assert parameter.kind == other.kind, parameter
        assert parameter.default == other.default, parameter


def test_list_of_public_methods_is_not_empty() -> None:
    assert {"start_quorum", "allreduce", "should_commit", "register_state_dict_fn"} <= set(PUBLIC)


def test_constructor_accepts_every_argument_of_torchft() -> None:
    torchft_parameters = inspect.signature(Manager.__init__).parameters
    own_parameters = inspect.signature(ObjectStoreManager.__init__).parameters
    assert set(torchft_parameters) <= set(own_parameters)


def test_diloco_reads_only_the_known_private_name() -> None:
    source = inspect.getsource(DiLoCo)
    assert "manager._use_async_quorum" in source
    assert source.count("manager._") == source.count("manager._use_async_quorum")


@pytest.fixture
def diloco() -> Iterator[tuple[nn.Module, SharedState, DiLoCo]]:
    """A model, the state that torchft's own DiLoCo registers for it, and that DiLoCo."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = [torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.9) for layer in model]
    manager = create_autospec(Manager, _use_async_quorum=False)
    with DiLoCo(manager, list(model), inner, outer, sync_every=2) as wrapper:
        state = SharedState()
        for registered in manager.register_state_dict_fn.call_args_list:
            state.register(*registered.args)
        yield model, state, wrapper


def test_fragments_of_diloco_are_found_in_order(diloco: tuple[nn.Module, SharedState, DiLoCo]) -> None:
    model, state, wrapper = diloco
    fragments = fragments_of(state.fragment_loads)
    own = [parameter for fragment in fragments for _, parameter in fragment.parameters]
    assert [tensor.data_ptr() for tensor in own] == [parameter.data_ptr() for parameter in model.parameters()]
    shared = [tensor for fragment in fragments for tensor, _ in fragment.parameters]
    originals = [tensor for part in originals_in(wrapper) for tensor in part.values()]
    assert [tensor.data_ptr() for tensor in shared] == [tensor.data_ptr() for tensor in originals]


def test_load_functions_of_diloco_lead_to_the_parameters_of_the_model(
    diloco: tuple[nn.Module, SharedState, DiLoCo],
) -> None:
    model, state, _ = diloco
    behind = [parameter for load in state.fragment_loads for parameter in parameters_behind(load)]
    assert [id(parameter) for parameter in behind] == [id(parameter) for parameter in model.parameters()]


def test_state_of_a_fragment_without_copies_is_the_one_of_torchft(
    diloco: tuple[nn.Module, SharedState, DiLoCo],
) -> None:
    _, state, wrapper = diloco
    for fragment in fragments_in(wrapper):  # with gradients the outer optimizer has state
        for parameter in fragment._model_fragment.parameters():  # noqa: SLF001  of torchft
            parameter.grad = torch.ones_like(parameter)
        fragment._outer_optimizer.step()  # noqa: SLF001  of torchft
    for fragment, load, copied in zip(
        fragments_in(wrapper), state.fragment_loads, state.values().values(), strict=True
    ):
        live = save_without_copies(load, lambda: None)()
        assert flatten(live)[0] == flatten(copied)[0]
        assert state_digest(live) == state_digest(copied)
        shared = [id(tensor) for tensor in fragment.original_parameters.values()]
        assert [id(tensor) for tensor in live["original_parameters"].values()] == shared  # type: ignore[index]


def test_save_function_of_anything_else_is_used_as_it_is() -> None:
    model = nn.Linear(2, 2)
    save = model.state_dict
    assert save_without_copies(model.load_state_dict, save) is save
    assert save_without_copies(lambda _: None, save) is save


def test_function_may_be_registered_before_the_variables_that_it_uses() -> None:
    state = SharedState()

    def load(_: object) -> None:
        assert self is model

    state.register("model", load, save_without_copies(load, dict))
    self = model = nn.Linear(2, 2)
    state.restore({"model": {}})
    assert state.values() == {"model": {}}


def test_parameters_are_found_behind_methods_but_not_other_functions() -> None:
    model = nn.Linear(2, 2)

    def load(_: object) -> nn.Module:
        return model

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = [id(parameter) for parameter in model.parameters()]
    assert [id(tensor) for tensor in parameters_behind(model.load_state_dict)] == parameters
    assert [id(tensor) for tensor in parameters_behind(optimizer.load_state_dict)] == parameters
    assert parameters_behind(load) == []


def test_progress_is_taken_dropped_and_restored(diloco: tuple[nn.Module, SharedState, DiLoCo]) -> None:
    model, state, _ = diloco
    fragment, _ = fragments_of(state.fragment_loads)
    shared = next(model.parameters()).detach().clone()
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    before = next(model.parameters()).detach().clone()
    progress = fragment.progress()
    assert torch.equal(progress[0], shared - before)  # not -1: the sum of a random parameter and 1 is rounded
    assert progress[0].all()
    fragment.take_shared()
    assert not any(delta.any() for delta in fragment.progress())
    assert fragment.fits(progress) and not fragment.fits(progress[:1])  # noqa: PT018
    fragment.put_back(progress)
    assert torch.allclose(next(model.parameters()), before)


def test_changed_torchft_fragments_are_refused() -> None:
    def load(_: object) -> None:
        """Closes over nothing, as functions of another torchft would."""

    with pytest.raises(Invalid, match=r"this torchft's DiLoCo is unknown to skerry: NoneType lacks _model_fragment"):
        fragments_of([load])


def test_torchfts_future_contract_is_the_one_our_work_keeps() -> None:
    """DDP reads `_fut` (0.2.0) or takes the future as it is (later): our future must be both."""
    hook = inspect.getsource(ddp.DistributedDataParallel._comm_hook)  # noqa: SLF001  of torch
    assert "get_future()" in hook
    assert "_fut" in hook or "_ManagedFuture" in hook
    tensor = torch.ones(2)
    errors: list[Exception] = []
    work = ExchangeWork(tensor, lambda: False, errors.append)
    assert not work.wait()
    future: Any = work.get_future()
    assert future.done()
    assert future._fut.done()  # noqa: SLF001  torch's name
    assert future.value() is tensor
