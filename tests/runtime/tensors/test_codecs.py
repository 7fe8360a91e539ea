"""The quantizing codecs: the same bits everywhere, small errors, no surprise at the ends of the range."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.runtime.tensors.byte_layout import ITEM_BYTES, WIRE_TYPES
from skerry.runtime.tensors.codecs import BLOCK_FORMATS, DEVICE_FORMATS

if TYPE_CHECKING:
    from skerry.runtime.tensors.codecs.blocks import BlockFormat, WireFormat

LARGEST = float(np.finfo(np.float32).max)
FORMATS = list(DEVICE_FORMATS.values())
NAMES = list(DEVICE_FORMATS)
SPARSE = BLOCK_FORMATS["sparse100x6400"]


def encoded(blocks: WireFormat, values: torch.Tensor) -> torch.Tensor:
    items = -(-values.numel() // blocks.wire.elements)
    target = torch.full((items * blocks.wire.item_bytes,), 0xAA, dtype=torch.uint8)
    blocks.write(values, target.numpy().data)
    return target


def decoded(blocks: WireFormat, data: torch.Tensor, factor: float | None = None) -> torch.Tensor:
    """All elements of all items, also those that fill the last one."""
    total = np.full(data.numel() // blocks.wire.item_bytes * blocks.wire.elements, np.nan, dtype=np.float32)
    blocks.add(data.numpy().data, total, factor, first=True)
    return torch.from_numpy(total)


def back(blocks: WireFormat, values: torch.Tensor) -> torch.Tensor:
    return decoded(blocks, encoded(blocks, values))[: values.numel()]


def fixed() -> torch.Tensor:
    """100,003 numbers of very different sizes, from integers alone: the same on every machine."""
    steps = np.arange(100_003, dtype=np.uint64)
    mixed = (steps * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    powers = ((steps // np.uint64(997)) % np.uint64(80)).astype(np.int32) - 40
    return torch.from_numpy(np.ldexp(mixed.astype(np.float32) - np.float32(1 << 23), powers).astype(np.float32))


def small_integers() -> torch.Tensor:
    """Numbers from -63 to 63."""
    steps = np.arange(100_003, dtype=np.uint64)
    mixed = (steps * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(57)
    return torch.from_numpy(mixed.astype(np.float32) - np.float32(64)).clamp_(-63, 63)


def any_bytes(blocks: WireFormat, items: int = 500) -> torch.Tensor:
    """Items of all kinds of codes and scales, from integers alone."""
    steps = np.arange(items * blocks.wire.item_bytes, dtype=np.uint64)
    data = ((steps * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(56)).astype(np.uint8)
    rows = data.reshape(items, -1)
    rows[:, 1] = 0x20 + np.arange(items) % 0x40  # positive scales, 1e-19 to 1e19
    if blocks is SPARSE:  # 100 high bits, in several patterns
        rows[:, 77:102] = np.array([0xF0, 0x3C, 0x55, 0x99], dtype=np.uint8)[
            np.add.outer(np.arange(items), range(25)) % 4
        ]
    return torch.from_numpy(data)


# What a replica adds to a sum must have the same bits on every processor; an encoder with a mean in it (int2) need not,
# but has them for small integers, whose sums are exact in any order.
ENCODED = {
    "int8x254": "f5e214d94f8aed7a859a9309cbb80621",
    "int4x252": "7e63ffab0ed5642d58dd9faf5b2764d0",
}
DECODED = {
    "int8x254": "823bc021d43a42dac666cd1b73cd34dd",
    "int4x252": "0068d1122735e06d6e3f8f05267552fe",
    "int2x248": "9145f76831e4ebdbada8194a1788b7f5",
    "sparse100x6400": "18d9c3be34ec7efccb964bbe16ec4dd7",
}


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_decoded_bits_are_the_same_everywhere(name: str) -> None:
    blocks = BLOCK_FORMATS[name]
    values = torch.cat([decoded(blocks, any_bytes(blocks)), decoded(blocks, any_bytes(blocks), 0.3)])
    assert xxhash.xxh3_128_hexdigest(values.numpy()) == DECODED[name]


@pytest.mark.parametrize("name", ENCODED)
def test_encoded_bits_are_the_same_everywhere(name: str) -> None:
    paths = [encoded(BLOCK_FORMATS[name], fixed()), DEVICE_FORMATS[name].write_on_device(fixed())]
    assert [xxhash.xxh3_128_hexdigest(data.numpy()) for data in paths] == [ENCODED[name]] * 2


def test_encoded_bits_of_small_integers_are_the_same_everywhere() -> None:
    name, values = "int2x248", small_integers()
    paths = [encoded(BLOCK_FORMATS[name], values), DEVICE_FORMATS[name].write_on_device(values)]
    assert [xxhash.xxh3_128_hexdigest(data.numpy()) for data in paths] == ["ef85cf2288a44b83deb70d9a805476d1"] * 2


@pytest.mark.parametrize("factor", [None, 0.3, 7.7e-3])
@pytest.mark.parametrize("blocks", FORMATS, ids=NAMES)
def test_every_product_is_exact_so_fusing_it_changes_no_bit(blocks: BlockFormat, factor: float | None) -> None:
    data = any_bytes(blocks)
    rows = data.numpy().reshape(-1, blocks.wire.item_bytes)
    codes = np.empty((len(rows), blocks.wire.elements), dtype=np.float32)
    blocks.decode(rows[:, 2:], codes)
    values = decoded(blocks, data, factor).numpy().reshape(codes.shape)
    position = np.abs(codes).argmax(1), np.arange(len(codes))
    scales = values[position[::-1]] / codes[position[::-1]]
    assert np.array_equal(values, codes.astype(np.float64) * scales.astype(np.float64)[:, np.newaxis])


@pytest.mark.parametrize(("name", "limit"), [("int8x254", 0.0085), ("int4x252", 0.14), ("int2x248", 0.36)])
def test_relative_error_of_normal_values_is_small(name: str, limit: float) -> None:
    values = torch.randn(254 * 1000, generator=torch.Generator().manual_seed(5)) * 1e-3
    error = (back(BLOCK_FORMATS[name], values) - values).norm() / values.norm()
    assert limit / 2 < error < limit


@given(
    st.sampled_from(["int8x254", "int4x252"]),
    st.integers(1, 1000),
    st.sampled_from([1e-37, 1e-20, 1.0, 1e20, 3e38]),
    st.integers(0, 99),
)
@settings(max_examples=150)
def test_error_of_an_element_is_half_a_step_of_its_block(name: str, count: int, size: float, seed: int) -> None:
    blocks = DEVICE_FORMATS[name]
    values = (torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * size
    error = (back(blocks, values) - values).abs()
    for begin in range(0, count, blocks.wire.elements):
        piece = slice(begin, begin + blocks.wire.elements)
        # The scale is rounded up to 8 bits, and has a smallest and a largest value.
        step = max(values[piece].abs().max().item() / blocks.largest * (1 + 2**-7), 1e-30)
        assert error[piece].max() <= step * 0.5001 or values[piece].abs().max() > LARGEST * 0.99


@pytest.mark.parametrize("blocks", FORMATS, ids=NAMES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1.2e-38, 1e-30, 1.0, LARGEST, -LARGEST])
def test_no_finite_value_becomes_anything_else(blocks: BlockFormat, value: float) -> None:
    values = torch.full((5000,), value)
    got = back(blocks, values)
    assert got.isfinite().all()
    assert (got - values).abs().max() <= max(abs(value) * (0.6 if blocks.largest == 10 else 0.01), 1e-29)


@pytest.mark.parametrize("blocks", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS)
def test_rest_of_the_last_item_is_filled_with_zeros(blocks: WireFormat) -> None:
    values = torch.full((blocks.wire.elements + 3,), 5.0)
    padded = torch.cat([values, torch.zeros(blocks.wire.elements - 3)])
    assert torch.equal(encoded(blocks, values), encoded(blocks, padded))


@pytest.mark.parametrize("blocks", FORMATS, ids=NAMES)
def test_bytes_do_not_depend_on_the_size_of_a_piece(blocks: BlockFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    values = fixed()
    expected = encoded(blocks, values)
    monkeypatch.setattr("skerry.runtime.tensors.codecs.blocks._ROWS", 1 << 16)
    assert torch.equal(encoded(blocks, values), expected)
    monkeypatch.setattr("skerry.runtime.tensors.codecs.blocks._DEVICE_ROWS", 100)
    assert torch.equal(blocks.write_on_device(values), expected)


@pytest.mark.parametrize("blocks", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_floats_are_encoded_by_value(blocks: WireFormat, dtype: torch.dtype) -> None:
    values = torch.randn(70_000).to(dtype)
    assert torch.equal(encoded(blocks, values), encoded(blocks, values.float()))


@pytest.mark.parametrize("blocks", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS)
def test_adding_is_the_sum_of_the_decoded(blocks: WireFormat) -> None:
    first, second = torch.randn(60_000), torch.randn(60_000)
    total = decoded(blocks, encoded(blocks, first)).numpy().copy()
    blocks.add(encoded(blocks, second).numpy().data, total, 3.0, first=False)
    expected = decoded(blocks, encoded(blocks, first)) + decoded(blocks, encoded(blocks, second), 3.0)
    assert np.array_equal(total, expected.numpy())


def test_sparse_sends_the_largest_elements_of_each_block() -> None:
    values = torch.randn(6400 * 3, generator=torch.Generator().manual_seed(5))
    got = back(SPARSE, values).view(3, 6400)
    largest = values.view(3, 6400).abs().topk(100).indices.sort().values
    assert torch.equal(got.nonzero()[:, 1].view(3, 100), largest)
    sent = values.view(3, 6400).gather(1, largest)
    assert (got.gather(1, largest) - sent).norm() < 0.1 * sent.norm()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-30, 1.0, LARGEST, -LARGEST])
def test_sparse_sends_the_first_of_equal_elements_and_no_zeros(value: float) -> None:
    got = back(SPARSE, torch.full((7000,), value))
    expected = torch.zeros(7000)
    expected[:100] = expected[6400:6500] = value
    assert torch.equal(got != 0, expected != 0)
    assert (got - expected).abs().max() <= max(abs(value) * 0.07, 1e-29)


def test_sparse_block_of_few_elements_has_only_those() -> None:
    values = torch.zeros(7000)
    values[5], values[6399], values[6400] = 3.0, -2.9, 1e-3
    assert back(SPARSE, values).nonzero().flatten().tolist() == [5, 6399, 6400]


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_sparse_reader_accepts_any_bytes(seed: int) -> None:
    data = torch.randint(0, 256, (128 * 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    rows = data.view(20, 128)
    rows[:, 1] = 0x3F
    rows[::2, 77:102] = torch.tensor([0xF0] * 25, dtype=torch.uint8)  # as many bits as a block must have
    rows[1::2, 77:90] = 0xFF  # more than that
    got = decoded(SPARSE, data).view(20, 6400)
    assert got.isfinite().all()
    assert not got[1::2].any()
    assert got[::2].any(dim=1).all()


def test_no_cut_of_a_body_splits_an_item() -> None:
    assert {1 << 20} == {(1 << 20) // wire.item_bytes * wire.item_bytes for wire in WIRE_TYPES.values()}
    assert set(ITEM_BYTES) | set(BLOCK_FORMATS) == set(WIRE_TYPES)
