"""Training steps and exchanges with all tensors on one device. On a machine with a GPU: `pytest -m gpu`.

The same tests run on the CPU everywhere, so that what is proved on a GPU is a test that is known to work.
"""

from __future__ import annotations

from typing import Final

import pytest
import torch
from tests.kit.devices import DEVICES
from tests.kit.fragments import originals_in
from tests.kit.managers import manager_of, receipts, together
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.tensors.tensors_sent_together import TensorBatch

ROUNDS: Final = 3


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_replica_on_this_device_and_one_on_the_cpu_get_the_same_bits(device: str, codec: str) -> None:
    store = MemoryStore()

    def work(slot: str, seed: int, where: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        # Not a multiple of any block, and of magnitudes whose sum depends on its order.
        values = torch.randn(10_031, generator=generator) * 10.0 ** torch.randint(-6, 6, (10_031,), generator=generator)
        tensor = values.to(where)
        manager = manager_of(store, slot, minimum=3, codec=codec)
        manager.start_quorum()
        manager.allreduce(tensor).wait()
        assert manager.should_commit()
        manager.shutdown()
        assert tensor.device.type == where
        return tensor.cpu()

    first, *others = together([lambda: work("a", 1, device), lambda: work("b", 2, "cpu"), lambda: work("c", 3, device)])
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_replicas_on_this_device_have_equal_states_after_every_round(device: str, delay: int) -> None:
    store = MemoryStore()

    def work(index: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(device)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        manager = manager_of(store, f"r-{index}", state_dict=model.state_dict, load_state_dict=model.load_state_dict)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        generator = torch.Generator().manual_seed(index)
        with DiLoCo(manager, [model], inner, [outer], sync_every=4, fragment_sync_delay=delay) as diloco:
            while manager.current_step() < ROUNDS:
                manager.catch_up(inner)
                if manager.current_step() < ROUNDS:
                    inner.zero_grad()
                    model(torch.randn(16, 64, generator=generator).to(device)).square().mean().backward()
                    inner.step()
        manager.shutdown()
        assert {parameter.device.type for parameter in model.parameters()} == {device}
        return {name: value.cpu() for name, value in originals_in(diloco)[0].items()}

    ours, foreign = together([lambda: work(0), lambda: work(1)])
    assert all(torch.equal(ours[name], foreign[name]) for name in ours)
    for number in range(ROUNDS - 1):
        result = receipts(store, number).values()
        assert len({(receipt.averages, receipt.state) for receipt in result}) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here; run `pytest -m gpu` where one is")
def test_the_way_to_the_host_is_pinned_and_nothing_waits_for_it() -> None:
    """The copy goes with the stream on which the tensor was made, and the next inner steps are queued behind it."""
    tensor = torch.full((1 << 20,), 2.0, device="cuda")
    burst = TensorBatch("none", 2)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # noqa: SLF001  # type: ignore[no-untyped-call]  about a second of the device's clock
    tensor.mul_(3.0)
    burst.add(tensor, "avg")
    later = torch.ones(4, device="cuda") + 1.0
    queued = torch.cuda.current_stream().record_event()
    assert not queued.query(), "the caller has waited for the device"
    [host] = burst.hosts()
    assert host.is_pinned()
    assert host.device.type == "cpu"
    assert bool((host == 6.0).all())
    host.fill_(5.0)
    burst.land()
    assert bool((tensor == 5.0).all())
    assert later.tolist() == [2.0] * 4
