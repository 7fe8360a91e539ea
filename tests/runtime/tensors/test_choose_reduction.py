"""The choice between all-gather and reduce-scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from skerry.runtime.log.records import Link
from skerry.runtime.tensors.byte_layout import Index, TensorSpec
from skerry.runtime.tensors.choose_reduction import USUAL_LINK, ExchangeBytes, bytes_of, cheaper_reduction

if TYPE_CHECKING:
    from skerry.runtime.log.records import Codec

SLOW = Link(bytes_per_s=50e6 / 8, request_s=0.03)
FAST = Link(bytes_per_s=10e9 / 8, request_s=0.001)


def of(codec: Codec, megabytes: float = 40.0) -> ExchangeBytes:
    return bytes_of(Index((TensorSpec("t", "float32", (int(megabytes * 250_000),)),), codec, 2))


@pytest.mark.parametrize(
    ("codec", "expected"), [("int8", "reduce_scatter"), ("int4", "reduce_scatter"), ("int2", "all_gather")]
)
def test_slow_link_decides_by_the_bytes_of_both(codec: Codec, expected: str) -> None:
    """Virtual seconds of the shipped exchange (`bench scale`): 4.63 and 6.84, 3.44 and 3.58, 2.87 and 2.02."""
    assert cheaper_reduction(of(codec), [SLOW] * 4) == expected


def test_without_a_measure_it_takes_the_usual_link() -> None:
    assert cheaper_reduction(of("int8"), [None] * 4) == cheaper_reduction(of("int8"), [USUAL_LINK] * 4) == "all_gather"
    assert cheaper_reduction(of("none"), [None] * 4) == "reduce_scatter"


def test_exchange_ends_with_its_slowest_member() -> None:
    assert cheaper_reduction(of("int8"), [FAST] * 4) == "all_gather"
    assert cheaper_reduction(of("int8"), [FAST, FAST, SLOW, None]) == "reduce_scatter"


def test_two_members_gather() -> None:
    slowest = Link(bytes_per_s=1.0, request_s=0.0)
    assert [cheaper_reduction(of("none"), [slowest] * members) for members in (0, 1, 2, 3)] == [
        *["all_gather"] * 3,
        "reduce_scatter",
    ]


def test_one_unit_has_one_maker_that_reads_all() -> None:
    assert of("none", 1.0).units == 1
    assert cheaper_reduction(of("none", 1.0), [SLOW] * 64) == "all_gather"
    assert cheaper_reduction(of("none", 0.0), [SLOW] * 64) == "all_gather"


def test_average_of_blocks_is_published_in_eight_bits() -> None:
    assert (
        of("int4").average == of("int8").average == of("int8").contribution == pytest.approx(4e7 / 4 * 256 / 254, 1e-4)
    )
    assert of("bf16") == ExchangeBytes(2e7, 4e7, of("bf16").units)
    assert of("none").average == of("none").contribution == 4e7


def test_extreme_links_choose_without_an_error() -> None:
    for link in (Link(bytes_per_s=5e-324, request_s=3600.0), Link(bytes_per_s=1e15, request_s=0.0)):
        assert cheaper_reduction(of("none"), [link] * 4) in {"all_gather", "reduce_scatter"}


def test_record_of_a_link_has_three_digits_within_its_bounds() -> None:
    assert Link.measured(None) is None
    assert Link.measured((6_251_234.0, 0.030123)) == Link(bytes_per_s=6_250_000.0, request_s=0.0301)
    assert Link.measured((1e300, 1e6)) == Link(bytes_per_s=1e15, request_s=3600.0)
