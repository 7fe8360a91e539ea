"""ObjectStoreAllReduce: averages over a fixed set of ranks, one tensor per call."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import together

from skerry.runtime.allreduce import ObjectStoreAllReduce
from skerry.runtime.errors import Invalid
from skerry.runtime.protocol.quorum import Undecided

if TYPE_CHECKING:
    from pathlib import Path


def average(uri: str, values: list[list[torch.Tensor]], **more: object) -> list[list[torch.Tensor]]:
    def work(rank: int) -> list[torch.Tensor]:
        with ObjectStoreAllReduce(uri, rank, len(values), poll_interval_s=0.05, **more) as group:  # type: ignore[arg-type]
            return [group.allreduce(tensor, name=f"t{i}") for i, tensor in enumerate(values[rank])]

    return together([lambda rank=rank: work(rank) for rank in range(len(values))])


def test_each_call_averages_over_all_ranks_in_place_to_the_same_bits(tmp_path: Path) -> None:
    values = [[torch.randn(1000, generator=torch.Generator().manual_seed(i)), torch.tensor(10.0 * i)] for i in range(3)]
    reference = torch.stack([row[0].double() for row in values]).mean(dim=0)
    results = average(tmp_path.as_uri(), values)
    for row, (first, second) in zip(values, results, strict=True):
        assert first is row[0]
        assert torch.equal(first, results[0][0])
        assert second.item() == 10.0
    torch.testing.assert_close(results[0][0].double(), reference, rtol=1e-6, atol=1e-6)


def test_rounds_with_different_names_are_separate(tmp_path: Path) -> None:
    for round_id, value in (("7", 1.0), ("8", 5.0)):
        results = average(tmp_path.as_uri(), [[torch.tensor(value)], [torch.tensor(value)]], round_id=round_id)
        assert [result[0].item() for result in results] == [value, value]


def test_timeout_names_the_ranks_that_contributed(tmp_path: Path) -> None:
    with (
        ObjectStoreAllReduce(tmp_path.as_uri(), 0, 2, timeout_s=0.2, poll_interval_s=0.05) as group,
        pytest.raises(TimeoutError, match="contributed=rank-0"),
    ):
        group.allreduce(torch.ones(1))


def test_values_that_are_not_finite_fail_at_once(tmp_path: Path) -> None:
    with (
        ObjectStoreAllReduce(tmp_path.as_uri(), 0, 2, timeout_s=60, poll_interval_s=0.05) as group,
        pytest.raises(Undecided, match="abstained"),
    ):
        group.allreduce(torch.tensor([float("inf")]))


def test_failed_rank_may_restart_and_the_others_wait(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="power"), ObjectStoreAllReduce(tmp_path.as_uri(), 0, 2, poll_interval_s=0.05):
        raise OSError("power cut")
    results = average(tmp_path.as_uri(), [[torch.tensor(1.0)], [torch.tensor(3.0)]])
    assert [result[0].item() for result in results] == [2.0, 2.0]


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_world_is_invalid(tmp_path: Path, rank: int) -> None:
    with pytest.raises(Invalid, match="world_size=2"):
        ObjectStoreAllReduce(tmp_path.as_uri(), rank, 2)


@pytest.mark.slow
def test_import_does_not_load_torchft() -> None:
    """torchft has no wheel for some platforms."""
    code = "import sys, skerry.runtime.allreduce; sys.exit('torchft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
