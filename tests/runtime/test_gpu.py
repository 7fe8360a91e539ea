"""The device path: tensors of a GPU travel through pinned host memory. Needs a GPU: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from tests.support.managers import manager_of, receipts, together
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.store.memory import MemoryStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here; run `pytest -m gpu` on a machine with one"),
]


def test_device_tensors_are_averaged_in_place() -> None:
    store = MemoryStore()

    def work(slot: str, value: float) -> torch.Tensor:
        manager = manager_of(store, slot)
        manager.start_quorum()
        tensor = torch.full((1000, 33), value, device="cuda")
        manager.allreduce(tensor).wait()
        assert manager.should_commit()
        manager.shutdown()
        return tensor

    for tensor in together([lambda: work("a", 1.0), lambda: work("b", 4.0)]):
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu(), torch.full((1000, 33), 2.5))


def test_diloco_on_a_gpu_ends_every_round_with_the_same_state() -> None:
    store = MemoryStore()

    def work(index: int) -> None:
        torch.manual_seed(index)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).cuda()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        manager = manager_of(store, f"r-{index}", state_dict=model.state_dict, load_state_dict=model.load_state_dict)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with DiLoCo(manager, [model], inner, [outer], sync_every=4, fragment_sync_delay=1):
            while manager.current_step() < 4:
                manager.catch_up(inner)
                inner.zero_grad()
                model(torch.randn(16, 64, device="cuda")).square().mean().backward()
                inner.step()
        manager.shutdown()

    together([lambda: work(0), lambda: work(1)])
    for r in range(3):
        found = receipts(store, r)
        assert len({(receipt.averages, receipt.state) for receipt in found.values()}) == 1
