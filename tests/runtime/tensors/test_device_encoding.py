"""Tensors that are encoded on their device: the same payload as when the encoder does it, and the same refusals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import exchange, manager_of, together
from tests.runtime.tensors.payloads import index_for

from skerry.runtime.errors import NotFinite
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.tensors.device_encoding import begin_encoding
from skerry.runtime.tensors.payload_encoder import Encoder, encode
from skerry.runtime.tensors.tensors_sent_together import TensorBatch

if TYPE_CHECKING:
    from skerry.runtime.log.records import Codec


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors go the way of a device's."""
    monkeypatch.setattr("skerry.runtime.tensors.tensors_sent_together.encodes_on", lambda _: True)


def batch_of(codec: Codec, *tensors: torch.Tensor, quantize: tuple[bool, ...] | None = None) -> TensorBatch:
    batch = TensorBatch(codec, 2)
    for number, tensor in enumerate(tensors):
        batch.add(tensor, "avg", quantize=quantize is not None and quantize[number])
    return batch


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("codec", ["int8", "int4", "int2"])
def test_payload_is_the_same_as_the_encoders_own(codec: Codec) -> None:
    tensors = [torch.randn(300_001), torch.randn(7), torch.randn(300, 500).t(), torch.randn(9000, dtype=torch.float64)]
    batch = batch_of(codec, *tensors)
    expected = encode(tensors, batch.index())
    encoded = Encoder().encode(batch.hosts(), batch.index(), batch.encoded())
    assert encoded.parts == expected.parts
    assert encoded.norm == pytest.approx(expected.norm, rel=1e-6)
    assert [ready is not None for ready in batch.encoded()] == [True, False, True, False]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_element_that_is_not_finite_is_named(value: float) -> None:
    tensors = [torch.zeros(10), torch.zeros(70_000)]
    tensors[1][66_000] = value
    index = index_for(tensors, "int8")
    with pytest.raises(NotFinite, match="tensor='t1' element=66000") as error:
        Encoder().encode(tensors, index, [None, begin_encoding(tensors[1], "int8x254")])
    assert (error.value.tensor, error.value.element) == (1, 66_000)


def test_norm_of_huge_elements_is_finite() -> None:
    tensors = [torch.full((5000,), 3e38)]
    encoded = Encoder().encode(tensors, index_for(tensors, "int8"), [begin_encoding(tensors[0], "int8x254")])
    assert encoded.norm == pytest.approx(3e38 * math.sqrt(5000), rel=1e-6)


@pytest.mark.usefixtures("on_device")
def test_encoded_tensor_is_sent_as_it_is_if_another_asks_for_that() -> None:
    tensors = [torch.randn(5000), torch.randn(5000)]
    batch = batch_of("none", *tensors, quantize=(True, False))
    assert batch.index().codec == "none"
    assert batch.encoded() == [None, None]
    assert all(map(torch.equal, batch.hosts(), tensors))


def test_replica_that_encodes_on_its_device_gets_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    devices = iter([True, False])
    managers = [manager_of(store, slot, codec="int8") for slot in "ab"]
    tensors = [torch.randn(20_000, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr("skerry.runtime.tensors.tensors_sent_together.encodes_on", lambda _: next(devices))
        assert all(together([lambda m=m, t=t: exchange(m, t) for m, t in zip(managers, tensors, strict=True)]))
    assert torch.equal(*tensors)
    assert next(devices, None) is None
