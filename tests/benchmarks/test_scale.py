"""Tests that the benchmark of scale runs the shipped exchange, and takes no less than its link does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from scale import Case, measure

if TYPE_CHECKING:
    from skerry.runtime.log.records import Codec, Reduction


@pytest.mark.parametrize(
    ("codec", "reduction"), [("none", "reduce_scatter"), ("none", "all_gather"), ("sparse", "all_gather")]
)
def test_virtual_exchange_has_the_bytes_and_the_time_of_its_schedule(codec: Codec, reduction: Reduction) -> None:
    case = Case(replicas=3, codec=codec, reduction=reduction, megabytes=6, mbit=100, rtt_s=0.03)
    result = measure(case)
    size = 6.0 if codec == "none" else 6.0 * 128 / 25_600
    own, others = size / 3, size * 2 / 3
    up, down = (size + own, 2 * others) if reduction == "reduce_scatter" else (size, 2 * size)
    assert up <= result.uploaded_mb < up * 1.05 + 0.02
    assert down <= result.downloaded_mb < down * 1.05 + 0.2
    assert result.ideal_s <= result.seconds < result.ideal_s + 1.0
    assert measure(case).seconds == result.seconds


@pytest.mark.parametrize(("codec", "chosen", "seconds"), [("int8", "reduce_scatter", 4.7), ("int2", "all_gather", 2.1)])
def test_choice_by_the_measured_link_is_the_faster_one(codec: Codec, chosen: str, seconds: float) -> None:
    """The other one takes 6.84 s for int8 and 2.87 s for int2."""
    result = measure(Case(replicas=4, codec=codec, reduction="auto", megabytes=40, mbit=50, rtt_s=0.03))
    assert (result.reduction, result.seconds < seconds) == (chosen, True), result


@pytest.mark.parametrize("replicas", [4, 8])
def test_memory_counts_the_answers_that_a_replica_holds_and_is_flat(replicas: int) -> None:
    """Buffers alone were counted: 6 MB. The aim is 128 MiB at any number of replicas."""
    result = measure(
        Case(replicas=replicas, codec="int8", reduction="reduce_scatter", megabytes=40, mbit=50, rtt_s=0.03)
    )
    assert 10 < result.memory_mb < 30
