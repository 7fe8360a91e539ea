from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.codec.payloads import FLOATS, filled, index_for

from skerry.runtime.codec.container import read_header
from skerry.runtime.codec.layout import BLOCK_BYTES, ITEM_BYTES, Index, TensorSpec
from skerry.runtime.codec.tensors import Encoder, byte_view, cast, dtype_name, encode, flat_view, is_finite, widen
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.runtime.codec.layout import Codec
    from skerry.runtime.codec.tensors import Encoded

SPECS = st.lists(
    st.tuples(
        st.sampled_from(sorted(ITEM_BYTES)),
        st.lists(st.sampled_from([0, 1, 2, 7, 64, 1000]), max_size=3).filter(lambda s: math.prod(s) <= 1_000_000),
    ),
    min_size=1,
    max_size=6,
)


def stored(encoded: Encoded, number: int = 0) -> bytes:
    return b"".join(bytes(memoryview(one).cast("B")) for one in encoded.data(number) if memoryview(one).nbytes)


@given(SPECS, st.sampled_from(["none", "bf16"]))
@settings(max_examples=40)
def test_what_is_stored_is_the_tensors_bytes_at_their_places_and_digests(
    specs: list[tuple[str, list[int]]], codec: Codec
) -> None:
    index = Index(tuple(TensorSpec(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(specs)), codec)
    tensors = [filled(spec, seed) for seed, spec in enumerate(index.tensors)]
    encoded = encode(tensors, index)
    for number, (part, layout) in enumerate(zip(encoded.parts, index.parts, strict=True)):
        data = stored(encoded, number)
        assert len(data) == part.total_bytes
        header = read_header(memoryview(data), part, "k", index=index, number=number)
        body = data[part.header_bytes :]
        blocks = [body[at : at + BLOCK_BYTES] for at in range(0, len(body), BLOCK_BYTES)]
        assert [xxhash.xxh3_128_hexdigest(block) for block in blocks] == list(header.blocks)
        for one in layout.slices:
            travels = tensors[one.tensor].to(getattr(torch, index.wire[one.tensor])).reshape(-1)
            expected = travels[one.first : one.first + one.count]
            assert body[one.begin : one.end] == bytes(byte_view(expected))


def test_uploads_read_the_tensors_own_memory() -> None:
    tensors = [torch.randn(300_000), torch.randn(7, 5), torch.randn(100, dtype=torch.float64).bfloat16()]
    encoded = encode(tensors, index_for(tensors))
    starts = {np.frombuffer(one, np.uint8).ctypes.data for one in encoded.data(0)[1:]}
    assert {tensor.data_ptr() for tensor in tensors} <= starts


def test_a_tensor_across_a_parts_end_is_read_from_its_own_memory_too() -> None:
    tensors = [torch.zeros(17 << 20)]
    encoded = encode(tensors, index_for(tensors))
    assert len(encoded.parts) == 2
    begin = np.frombuffer(encoded.data(1)[-1], np.uint8).ctypes.data
    assert begin == tensors[0].data_ptr() + (64 << 20)


def test_an_encoder_allocates_for_the_codec_once() -> None:
    tensors = [torch.randn(300_000), torch.randn(1000, 3).t()]
    index = index_for(tensors, "bf16")
    encoder = Encoder()
    first = [one.data_ptr() for one in encoder.encode(tensors, index).wire]
    assert [one.data_ptr() for one in encoder.encode(tensors, index).wire] == first


def test_equal_values_have_equal_names_and_other_values_others() -> None:
    tensors = [torch.randn(300_000), torch.randn(1000, 3)]
    index = index_for(tensors)
    first = encode(tensors, index).parts
    assert encode([tensor.clone() for tensor in tensors], index).parts == first
    tensors[1][999, 2] += 1
    assert encode(tensors, index).parts != first


def test_tensors_out_of_order_in_memory_are_encoded_by_their_values() -> None:
    base = torch.randn(6, 4, 5)
    views = [base.t() if base.dim() == 2 else base.transpose(0, 2), base[::2, 1:], base.expand(2, 6, 4, 5)]
    plain = [view.contiguous() for view in views]
    assert encode(views, index_for(views)).parts == encode(plain, index_for(plain)).parts


def test_parameters_that_need_gradients_are_encoded() -> None:
    parameter = torch.nn.Parameter(torch.randn(5))
    assert encode([parameter], index_for([parameter])).parts == encode([parameter.data], index_for([parameter])).parts


@pytest.mark.parametrize("codec", ["none", "bf16"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_element_anywhere_is_refused_naming_the_tensor(dtype: str, value: float, codec: Codec) -> None:
    tensors = [torch.zeros(10), torch.zeros(400_001, dtype=getattr(torch, dtype))]
    index = index_for(tensors, codec)
    encode(tensors, index)
    for position in (0, 262_143, 400_000):
        tensors[1][position] = value
        with pytest.raises(Invalid, match="not finite: tensor='t1'"):
            encode(tensors, index)
        tensors[1][position] = -1.0
    Encoder(finite=False).encode([torch.full((3,), value)], index_for([torch.zeros(3)]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_finite_values_are_finite_though_their_sum_is_not(dtype: str) -> None:
    kind = getattr(torch, dtype)
    for value in (torch.finfo(kind).max, torch.finfo(kind).min):
        tensor = torch.full((1000,), value, dtype=kind)
        (part,) = encode([tensor], index_for([tensor])).parts
        assert part.total_bytes - part.header_bytes == tensor.nbytes


def test_a_value_that_the_codec_cannot_hold_is_refused() -> None:
    tensors = [torch.full((10,), 3.4e38)]
    encode(tensors, index_for(tensors))
    with pytest.raises(Invalid, match="as=bfloat16"):
        encode(tensors, index_for(tensors, "bf16"))


@given(st.lists(st.integers(0, (1 << 16) - 1), min_size=1, max_size=20), st.sampled_from(["float16", "bfloat16"]))
def test_the_finite_check_on_bits_agrees_with_torch(bits: list[int], dtype: str) -> None:
    tensor = torch.tensor(bits, dtype=torch.int32).to(torch.uint16).view(getattr(torch, dtype))
    assert is_finite(byte_view(tensor), dtype) == bool(torch.isfinite(tensor).all())


def test_widening_is_exact_for_every_sixteen_bit_float() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    for dtype in ("float16", "bfloat16"):
        values = np.empty(1 << 16, np.float32)
        source = bits.view(getattr(torch, dtype))
        widen(byte_view(source), dtype, values)
        expected = source.float().numpy()
        kept = ~np.isnan(expected)
        assert np.array_equal(values[kept].view(np.uint32), expected[kept].view(np.uint32))
        assert np.isnan(values[~kept]).all()


def test_casting_in_small_calls_is_casting() -> None:
    source = torch.randn(100_003)
    target = torch.empty(100_003, dtype=torch.bfloat16)
    cast(source, target)
    assert torch.equal(target, source.bfloat16())


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ([], "wrong number of tensors: 0"),
        ([torch.zeros(3, dtype=torch.float64)], "wrong dtype: tensor='t0'"),
        ([torch.zeros(3, 1)], "wrong shape: tensor='t0'"),
        ([torch.zeros(3).to_sparse()], "not a dense CPU tensor: tensor='t0'"),
        ([torch.zeros(3, device="meta")], "not a dense CPU tensor: tensor='t0'"),
    ],
)
def test_tensors_that_are_not_the_indexs_are_refused_by_name_and_field(tensors: list[torch.Tensor], told: str) -> None:
    with pytest.raises(Invalid, match=told):
        encode(tensors, index_for([torch.zeros(3)]))


def test_complex_numbers_are_refused_in_words() -> None:
    with pytest.raises(Invalid, match="view_as_real"):
        dtype_name(torch.complex64)
    with pytest.raises(Invalid, match="'t0'"):
        index_for([torch.zeros(1, dtype=torch.complex64)])


def test_a_flat_view_is_the_same_memory() -> None:
    tensor = torch.zeros(3, 2)
    flat_view(tensor)[5] = 7
    assert tensor[2, 1] == 7
