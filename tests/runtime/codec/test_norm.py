"""The norm that comes with every contribution, measured in the pass that digests it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.codec.payloads import FLOATS, index_for

from skerry.runtime.codec.tensors import Encoder, encode
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.runtime.codec.layout import Codec


def exact(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors if one.is_floating_point()))


@given(
    st.lists(
        st.tuples(st.sampled_from(FLOATS), st.sampled_from([0, 1, 7, 8191, 8192, 8193, 70_001, 300_000])),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["none", "bf16"]),
    st.sampled_from([1e-3, 1.0, 100.0]),
)
@settings(max_examples=40)
def test_the_norm_is_that_of_all_elements_to_six_digits(
    kinds: list[tuple[str, int]], codec: Codec, scale: float
) -> None:
    generator = torch.Generator().manual_seed(len(kinds))
    tensors = [(torch.randn(n, generator=generator) * scale).to(getattr(torch, dtype)) for dtype, n in kinds]
    assert encode(tensors, index_for(tensors, codec)).norm == pytest.approx(exact(tensors), rel=1e-6)


def test_a_tensor_across_parts_and_one_out_of_order_count_once() -> None:
    tensors = [torch.randn(17 << 20), torch.randn(300, 500).t()]
    assert encode(tensors, index_for(tensors)).norm == pytest.approx(exact(tensors), rel=1e-6)


def test_integers_do_not_count() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([100, 100])]
    assert encode(tensors, index_for(tensors)).norm == 5.0


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_finite_values_have_a_norm(dtype: str) -> None:
    kind = getattr(torch, dtype)
    tensors = [
        torch.full((1000,), torch.finfo(kind).max, dtype=kind),
        torch.full((10,), torch.finfo(kind).min, dtype=kind),
    ]
    norm = encode(tensors, index_for(tensors)).norm
    assert math.isfinite(norm)
    if dtype != "float64":  # where the squares of one element overflow, only that it is enormous
        assert norm == pytest.approx(exact(tensors), rel=1e-6)
    else:
        assert norm > 1e150


def test_an_encoder_begins_anew_each_time_also_after_a_refusal() -> None:
    encoder, good, bad = Encoder(), [torch.tensor([3.0, 4.0])], [torch.tensor([1e9]), torch.tensor([math.nan])]
    with pytest.raises(Invalid, match="not finite: tensor='t1' elements=0 to 1 as=float32"):
        encoder.encode(bad, index_for(bad))
    assert [encoder.encode(good, index_for(good)).norm for _ in range(2)] == [5.0, 5.0]


def test_a_checkpoint_is_not_measured() -> None:
    tensors = [torch.tensor([math.nan])]
    assert Encoder(finite=False).encode(tensors, index_for(tensors)).norm == 0.0
