"""How far two states are apart, and whether rounding alone explains it. Pure on tensors, in CPU memory.

Unlike hardware may round an outer step differently in the last place (a fused multiply-add rounds once, two
instructions twice). The averages are the same bits everywhere, so such differences add up and never grow by themselves.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LAST_PLACE_ULP: Final = 8.0
"""What rounding may change in one round: an outer step (momentum, Nesterov, learning rate, update) rounds five times,
by half a unit each, on either side. Fused against plain float32: at most 4 after one round, 11 after 64."""
NEAR_ZERO: Final = 1 / 4
"""Elements below this share of their tensor's largest are measured in its units: they are what is left of larger
ones that were subtracted, and have their rounding."""

# A few MB of float64 at a time, whatever the size of a tensor.
_CHUNK: Final = 1 << 19


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far two states are apart at most. tensors: the paths of what differs, in the order of the state.

    max_ulp: in units in the last place of the larger of two elements (see NEAR_ZERO). Both are infinite where rounding
    cannot be the cause: integers, shapes, types, what is there on one side only, NaN or infinity on one side.
    """

    max_ulp: float
    max_abs: float
    tensors: tuple[str, ...]

    def is_rounding(self, rounds: int) -> bool:
        """Whether `rounds` outer steps that were rounded differently explain it."""
        return self.max_ulp <= LAST_PLACE_ULP * max(1, rounds)


def measure(mine: object, theirs: object) -> Drift:
    """How far two states (as of `checkpoint.snapshot` and `checkpoint.load`) are apart; dicts in any order."""
    found = list(_differences(mine, theirs, "state"))
    return Drift(
        max_ulp=max((ulp for _, ulp, _ in found), default=0.0),
        max_abs=max((distance for _, _, distance in found), default=0.0),
        tensors=tuple(path for path, _, _ in found),
    )


def _differences(mine: object, theirs: object, path: str) -> Iterator[tuple[str, float, float]]:
    """Path, units in the last place and distance of everything that differs."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
            yield path, *_apart(mine, theirs)
        return
    inside = _pairs(mine, theirs)
    if inside is not None:
        for name, ours, others in inside:
            yield from _differences(ours, others, f"{path}.{name}")
    elif type(mine) is not type(theirs) or not _same(mine, theirs):
        yield path, math.inf, math.inf


def _pairs(mine: object, theirs: object) -> list[tuple[object, object, object]] | None:
    """What two containers of one kind and size hold, side by side; None for anything else."""
    if type(mine) is not type(theirs):
        return None
    if isinstance(mine, (dict, OrderedDict)):
        ours, others = cast("dict[object, object]", mine), cast("dict[object, object]", theirs)
        if ours.keys() != others.keys():
            return None
        return [(key, ours[key], others[key]) for key in ours]
    if isinstance(mine, (list, tuple)):
        left, right = cast("Sequence[object]", mine), cast("Sequence[object]", theirs)
        if len(left) != len(right):
            return None
        return [(number, one, other) for number, (one, other) in enumerate(zip(left, right, strict=True))]
    return None


def _same(mine: object, theirs: object) -> bool:
    both_nan = isinstance(mine, float) and isinstance(theirs, float) and math.isnan(mine) and math.isnan(theirs)
    return both_nan or mine == theirs


def _apart(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """Units in the last place, and distance, of two tensors that are not equal."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype or not mine.is_floating_point():
        return math.inf, math.inf
    numbers = torch.finfo(mine.dtype)
    wide = torch.float64 if mine.dtype == torch.float64 else torch.float32
    a, b = mine.reshape(-1), theirs.reshape(-1)
    floor = max(_largest(a) * NEAR_ZERO, _largest(b) * NEAR_ZERO, numbers.smallest_normal)
    ulp = distance = 0.0
    for begin in range(0, a.numel(), _CHUNK):
        one, other = a[begin : begin + _CHUNK].to(wide), b[begin : begin + _CHUNK].to(wide)
        apart = (one - other).abs_()
        if not bool(apart.max().isfinite()):
            differ = (one != other) & ~(one.isnan() & other.isnan())
            one, other = one[differ], other[differ]
            apart = (one - other).abs_()
            if not bool(apart.isfinite().all()):
                return math.inf, math.inf
            if not apart.numel():
                continue
        distance = max(distance, float(apart.max()))
        scale = torch.maximum(one.abs(), other.abs()).clamp_(min=floor)
        ulp = max(ulp, float(apart.div_(_power_of_two(scale)).max()) / numbers.eps)
    return ulp, distance


def _power_of_two(values: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is not above each value, all positive: its exponent's bits alone."""
    if values.dtype == torch.float64:
        return (values.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)
    return (values.view(torch.int32) & 0x7F80_0000).view(torch.float32)


def _largest(values: torch.Tensor) -> float:
    """The largest finite magnitude."""
    largest = 0.0
    for begin in range(0, values.numel(), _CHUNK):
        chunk = values[begin : begin + _CHUNK].abs()
        top = float(chunk.max())
        if not math.isfinite(top):
            finite = chunk[chunk.isfinite()]
            top = float(finite.max()) if finite.numel() else 0.0
        largest = max(largest, top)
    return largest
