"""Shards of all ranks are joined as torch divides a tensor over a mesh, or refused."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.tensors.dtensor import join_shards, shape_of, shard_of, with_values

if TYPE_CHECKING:
    from collections.abc import Sequence


def shards_of(tensor: torch.Tensor, mesh: Sequence[int], placements: Sequence[str]) -> list[torch.Tensor]:
    """The shard of each rank: one dimension of the mesh after the other divides it with `torch.chunk`."""
    shards: list[torch.Tensor] = []
    for place in product(*map(range, mesh)):
        part = tensor
        for coordinate, ranks, placement in zip(place, mesh, placements, strict=True):
            if placement != "replicate":
                dim = int(placement.removeprefix("shard "))
                pieces = list(torch.chunk(part, ranks, dim))
                pieces += [part.narrow(dim, 0, 0)] * (ranks - len(pieces))
                part = pieces[coordinate]
        shards.append(part.clone())
    return shards


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ([1], ["shard 0"]),
        ([2], ["shard 1"]),
        ([4], ["shard 0"]),  # 2, 2, 1 and 0 rows
        ([2, 2], ["replicate", "shard 0"]),
        ([2, 3], ["shard 0", "shard 1"]),
        ([2, 2], ["shard 0", "shard 0"]),
    ],
)
def test_joined_shards_are_the_whole_tensor(mesh: list[int], placements: list[str]) -> None:
    tensor = torch.arange(5 * 7.0).view(5, 7)
    layout = {"shape": [5, 7], "mesh": mesh, "placements": placements}
    shards = shards_of(tensor, mesh, placements)
    assert torch.equal(join_shards(layout, shards), tensor)
    for rank, shard in enumerate(shards):
        packed = {"skerry.sharded": torch.zeros_like(shard), **layout}
        again = with_values(packed, tensor, rank, len(shards))
        assert torch.equal(shard_of(again), shard)
        assert shape_of(again) == (5, 7)


def test_shards_that_do_not_fit_are_refused() -> None:
    layout = {"shape": [4], "mesh": [2], "placements": ["shard 0"]}
    with pytest.raises(Invalid, match=r"a mesh of \[2\]: 3 ranks saved it"):
        join_shards(layout, [torch.zeros(2)] * 3)
    with pytest.raises(Corrupt, match=r"shard of \(3,\) instead of \(2,\)"):
        join_shards(layout, [torch.zeros(2), torch.zeros(3)])
