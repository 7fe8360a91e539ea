"""Our surface against the installed torchft, for the release and one pinned nightly: fails when either moves."""

from __future__ import annotations

import inspect
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torchft import ddp
from torchft.local_sgd import DiLoCo, _StreamingDiLoCoFragment
from torchft.manager import Manager

from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.work import ExchangeWork

# Wire-level steps of torchft's own process groups; no consumer calls them on a manager.
NOT_OURS: set[str] = {"set_rank_info", "get_reconfigure_handle"}
PUBLIC = sorted(name for name, value in vars(Manager).items() if callable(value) and not name.startswith("_"))


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in NOT_OURS])
def test_every_public_method_takes_what_torchft_takes(name: str) -> None:
    theirs = inspect.signature(getattr(Manager, name)).parameters
    ours = inspect.signature(getattr(ObjectStoreManager, name)).parameters
    assert list(ours) == list(theirs)
    for parameter, other in zip(ours.values(), theirs.values(), strict=True):
        assert parameter.kind == other.kind, parameter
        assert parameter.default == other.default, parameter


def test_the_list_of_public_methods_is_not_empty() -> None:
    assert {"start_quorum", "allreduce", "should_commit", "register_state_dict_fn"} <= set(PUBLIC)


def test_every_constructor_argument_of_torchft_is_accepted() -> None:
    theirs = inspect.signature(Manager.__init__).parameters
    ours = inspect.signature(ObjectStoreManager.__init__).parameters
    assert set(theirs) <= set(ours)


def test_the_private_name_that_consumers_read_is_still_the_only_one() -> None:
    source = inspect.getsource(DiLoCo)
    assert "manager._use_async_quorum" in source
    assert source.count("manager._") == source.count("manager._use_async_quorum")


def test_what_a_joining_replica_uses_of_torch_and_diloco_is_still_there() -> None:
    """After a load the parameters are set to the shared ones, by the fragments that the load functions close over."""
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = create_autospec(Manager, _use_async_quorum=False)
    with DiLoCo(manager, [model], inner, torch.optim.SGD(model.parameters(), lr=1.0), sync_every=2) as diloco:
        (registered,) = manager.register_state_dict_fn.call_args_list
        _, load, _ = registered.args
        owner = inspect.getclosurevars(load).nonlocals["self"]
        assert isinstance(owner, _StreamingDiLoCoFragment)
        with torch.no_grad():
            model.weight.add_(1.0)
        owner.restore_parameters()
        assert torch.equal(model.weight, diloco._fragments[0].original_parameters["weight"])


def test_torchfts_future_contract_is_the_one_our_work_keeps() -> None:
    """DDP reads `_fut` (0.2.0) or takes the future as it is (later): our future must be both."""
    hook = inspect.getsource(ddp.DistributedDataParallel._comm_hook)
    assert "get_future()" in hook
    assert "_fut" in hook or "_ManagedFuture" in hook
    tensor = torch.ones(2)
    errors: list[Exception] = []
    work = ExchangeWork(tensor, lambda: False, errors.append)
    assert not work.wait()
    future: Any = work.get_future()
    assert future.done()
    assert future._fut.done()
    assert future.value() is tensor
