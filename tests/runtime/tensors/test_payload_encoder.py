"""Encoding of tensors: stored bytes, digests, norms, and the values that are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.tensors.payloads import FLOATS, filled, index_for

from skerry.runtime.errors import Invalid, NotFinite
from skerry.runtime.tensors.byte_layout import BLOCK_BYTES, CODECS, ITEM_BYTES, Index, TensorSpec
from skerry.runtime.tensors.codecs.elements import cast, widen
from skerry.runtime.tensors.payload_encoder import Encoder, byte_view, dtype_name, encode, is_finite
from skerry.runtime.tensors.payload_format import read_header

if TYPE_CHECKING:
    from skerry.runtime.log.records import Part
    from skerry.runtime.tensors.byte_layout import Codec
    from skerry.runtime.tensors.payload_encoder import Encoded

SPECS = st.lists(
    st.tuples(
        st.sampled_from(sorted(ITEM_BYTES)),
        st.lists(st.sampled_from([0, 1, 2, 7, 64, 1000]), max_size=3).filter(lambda s: math.prod(s) <= 1_000_000),
    ),
    min_size=1,
    max_size=6,
)


def stored(encoded: Encoded, number: int = 0) -> bytes:
    return b"".join(bytes(memoryview(buffer).cast("B")) for buffer in encoded.data(number) if memoryview(buffer).nbytes)


@given(SPECS, st.sampled_from(["none", "bf16"]))
@settings(max_examples=40)
def test_stored_bytes_and_digests_match_tensors_and_layout(specs: list[tuple[str, list[int]]], codec: Codec) -> None:
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
        for piece in layout.slices:
            wire = index.wire[piece.tensor]
            expected = tensors[piece.tensor].reshape(-1)[index.elements(piece)].to(getattr(torch, wire))
            assert body[piece.begin : piece.end] == bytes(byte_view(expected))


def test_upload_reads_the_tensors_own_memory() -> None:
    tensors = [torch.randn(300_000), torch.randn(7, 5), torch.randn(100, dtype=torch.float64).bfloat16()]
    encoded = encode(tensors, index_for(tensors))
    starts = {np.frombuffer(buffer, np.uint8).ctypes.data for buffer in encoded.data(0)[1:]}
    assert {tensor.data_ptr() for tensor in tensors} <= starts


def test_tensor_across_two_parts_is_read_from_its_own_memory() -> None:
    tensors = [torch.zeros(17 << 20)]
    encoded = encode(tensors, index_for(tensors))
    assert len(encoded.parts) == 2
    begin = np.frombuffer(encoded.data(1)[-1], np.uint8).ctypes.data
    assert begin == tensors[0].data_ptr() + (64 << 20)


def test_encoder_reuses_its_buffer() -> None:
    tensors = [torch.randn(300_000), torch.randn(1000, 3).t()]
    index = index_for(tensors, "bf16")
    encoder = Encoder()
    first = [flat.data_ptr() for flat in encoder.encode(tensors, index).wire]
    assert [flat.data_ptr() for flat in encoder.encode(tensors, index).wire] == first


def test_payload_names_are_equal_for_equal_values_only() -> None:
    tensors = [torch.randn(300_000), torch.randn(1000, 3)]
    index = index_for(tensors)
    first = encode(tensors, index).parts
    assert encode([tensor.clone() for tensor in tensors], index).parts == first
    tensors[1][999, 2] += 1
    assert encode(tensors, index).parts != first


def test_views_and_parameters_are_encoded_by_value() -> None:
    base = torch.randn(6, 4, 5)
    views = [base.transpose(0, 2), base[::2, 1:], base.expand(2, 6, 4, 5), torch.nn.Parameter(torch.randn(5))]
    plain = [view.detach().contiguous() for view in views]
    assert encode(views, index_for(views)).parts == encode(plain, index_for(plain)).parts


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_element_is_refused_naming_the_tensor(dtype: str, value: float, codec: Codec) -> None:
    tensors = [torch.zeros(10), torch.zeros(400_001, dtype=getattr(torch, dtype))]
    index = index_for(tensors, codec)
    encode(tensors, index)
    for position in (0, 262_143, 400_000):
        tensors[1][position] = value
        with pytest.raises(Invalid, match="not finite: tensor='t1'"):
            encode(tensors, index)
        tensors[1][position] = -1.0
    Encoder(finite=False).encode([torch.full((3,), value)], index_for([torch.zeros(3)]))


def test_value_out_of_the_codecs_range_is_refused() -> None:
    tensors = [torch.full((10,), 3.4e38)]
    encode(tensors, index_for(tensors))
    with pytest.raises(Invalid, match="dtype=bfloat16"):
        encode(tensors, index_for(tensors, "bf16"))


@given(st.lists(st.integers(0, (1 << 16) - 1), min_size=1, max_size=20), st.sampled_from(["float16", "bfloat16"]))
def test_finite_check_on_bits_agrees_with_torch(bits: list[int], dtype: str) -> None:
    tensor = torch.tensor(bits, dtype=torch.int32).to(torch.uint16).view(getattr(torch, dtype))
    assert is_finite(byte_view(tensor), dtype) == bool(torch.isfinite(tensor).all())


def test_widening_is_exact_for_every_sixteen_bit_float() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    for dtype in ("float16", "bfloat16"):
        values = np.empty(1 << 16, np.float32)
        source = bits.view(getattr(torch, dtype))
        widen(byte_view(source), dtype, values)
        expected = source.float().numpy()
        numbers = ~np.isnan(expected)
        assert np.array_equal(values[numbers].view(np.uint32), expected[numbers].view(np.uint32))
        assert np.isnan(values[~numbers]).all()


def test_cast_in_small_calls_equals_a_single_cast() -> None:
    source = torch.randn(100_003)
    target = torch.empty(100_003, dtype=torch.bfloat16)
    cast(source, target)
    assert torch.equal(target, source.bfloat16())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "wrong number of tensors: 0"),
        ([torch.zeros(3, dtype=torch.float64)], "wrong dtype: tensor='t0'"),
        ([torch.zeros(3, 1)], "wrong shape: tensor='t0'"),
        ([torch.zeros(3).to_sparse()], "not a dense CPU tensor: tensor='t0'"),
        ([torch.zeros(3, device="meta")], "not a dense CPU tensor: tensor='t0'"),
    ],
)
def test_tensors_not_matching_the_index_are_refused(tensors: list[torch.Tensor], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        encode(tensors, index_for([torch.zeros(3)]))


def test_complex_dtype_is_refused_with_a_hint() -> None:
    with pytest.raises(Invalid, match="view_as_real"):
        dtype_name(torch.complex64)
    with pytest.raises(Invalid, match="'t0'"):
        index_for([torch.zeros(1, dtype=torch.complex64)])


def exact(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors if tensor.is_floating_point()))


@given(
    st.lists(
        st.tuples(st.sampled_from(FLOATS), st.sampled_from([0, 1, 7, 8191, 8192, 8193, 70_001, 300_000])),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(CODECS),
    st.sampled_from([1e-3, 1.0, 100.0]),
)
@settings(max_examples=40)
def test_norm_covers_all_elements_to_six_digits(kinds: list[tuple[str, int]], codec: Codec, scale: float) -> None:
    generator = torch.Generator().manual_seed(len(kinds))
    tensors = [(torch.randn(n, generator=generator) * scale).to(getattr(torch, dtype)) for dtype, n in kinds]
    assert encode(tensors, index_for(tensors, codec)).norm == pytest.approx(exact(tensors), rel=1e-6)


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param([torch.randn(17 << 20), torch.randn(300, 500).t()], id="split and non-contiguous"),
        pytest.param([torch.tensor([3.0, 4.0]), torch.tensor([100, 100])], id="integers do not count"),
    ],
)
def test_norm_counts_every_float_once(tensors: list[torch.Tensor]) -> None:
    assert encode(tensors, index_for(tensors)).norm == pytest.approx(exact(tensors), rel=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_norm_of_the_largest_finite_values_is_finite(dtype: str) -> None:
    kind = getattr(torch, dtype)
    tensors = [torch.full((1000,), limit, dtype=kind) for limit in (torch.finfo(kind).max, torch.finfo(kind).min)]
    norm = encode(tensors, index_for(tensors)).norm
    assert math.isfinite(norm)
    if dtype != "float64":  # the square of an element overflows: the norm is only known to be large
        assert norm == pytest.approx(exact(tensors), rel=1e-6)
    else:
        assert norm > 1e150


def test_norm_restarts_for_each_encoding_and_after_a_refusal() -> None:
    encoder, good, bad = Encoder(), [torch.tensor([3.0, 4.0])], [torch.tensor([1e9]), torch.tensor([math.nan])]
    with pytest.raises(Invalid, match="not finite: tensor='t1' elements=0 to 1 dtype=float32"):
        encoder.encode(bad, index_for(bad))
    assert [encoder.encode(good, index_for(good)).norm for _ in range(2)] == [5.0, 5.0]


def test_norm_of_a_checkpoint_is_not_computed() -> None:
    tensors = [torch.tensor([math.nan])]
    assert Encoder(finite=False).encode(tensors, index_for(tensors)).norm == 0.0


def test_each_part_is_sent_before_the_next_one_is_encoded() -> None:
    tensors = [torch.ones(600_000), torch.full((600_000,), math.nan)]
    index = replace(index_for(tensors), layout=2)
    sent: list[Part] = []
    with pytest.raises(NotFinite):
        Encoder().encode(tensors, index, send=lambda part, _: sent.append(part))
    assert 0 < len(sent) < len(index.parts), "those before the value that is not finite"


@pytest.mark.parametrize("codec", CODECS)
def test_sent_parts_are_those_of_the_result(codec: Codec) -> None:
    tensors = [torch.arange(900_000, dtype=torch.float32), torch.ones(5)]
    index = replace(index_for(tensors, codec), layout=2)
    sent: list[tuple[Part, bytes]] = []
    encoded = Encoder().encode(tensors, index, send=lambda part, data: sent.append((part, b"".join(data))))
    assert sent == [(part, b"".join(encoded.data(number))) for number, part in enumerate(encoded.parts)]
