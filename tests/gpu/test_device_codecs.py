"""Quantized tensors of a device have the same bytes as on the CPU. On a machine with a GPU: `pytest -m gpu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import xxhash
from tests.kit.devices import DEVICES
from tests.runtime.tensors.test_codecs import ENCODED, FORMATS, LARGEST, NAMES, encoded, fixed

from skerry.runtime.tensors.codecs import BLOCK_FORMATS

if TYPE_CHECKING:
    from skerry.runtime.tensors.codecs.blocks import BlockFormat


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ENCODED)
def test_bytes_encoded_on_a_device_are_those_of_the_cpu(name: str, device: str) -> None:
    data = BLOCK_FORMATS[name].write_on_device(fixed().to(device))
    assert data.device.type == device
    assert xxhash.xxh3_128_hexdigest(data.cpu().numpy()) == ENCODED[name]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1.2e-38, 1e-30, 1.0, LARGEST, -LARGEST])
@pytest.mark.parametrize("blocks", FORMATS, ids=NAMES)
def test_ends_of_the_range_are_encoded_as_on_the_cpu(blocks: BlockFormat, value: float, device: str) -> None:
    values = torch.full((5000,), value)
    assert torch.equal(blocks.write_on_device(values.to(device)).cpu(), encoded(blocks, values))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_floats_of_a_device_are_encoded_by_value(dtype: torch.dtype, device: str) -> None:
    values = torch.randn(70_000).to(dtype)
    assert torch.equal(FORMATS[0].write_on_device(values.to(device)).cpu(), encoded(FORMATS[0], values.float()))
