"""Measures the difference between two states, and decides whether rounding alone explains it. Pure; CPU tensors.

Different hardware may round an outer step differently in the last place (a fused multiply-add rounds once, two
instructions round twice). The averages are identical on all replicas, so such differences only add up, round by round.
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
"""The largest effect of rounding in a round: an outer step (momentum, Nesterov, learning rate, update) rounds five
times, by half a unit each, on both sides. Measured, fused against plain: at most 4 after a round, 11 after 64."""
NEAR_ZERO: Final = 1 / 4
"""Elements below this share of their tensor's largest are measured in its units: they result from subtracting larger
numbers, and have the rounding errors of those."""

# A few MB of float64 at a time, whatever the size of a tensor.
_CHUNK: Final = 1 << 19


@dataclass(frozen=True, kw_only=True)
class StateDifference:
    """The largest difference between two states. tensors: the paths that differ, in the order of the state.

    max_ulp: in units in the last place of the larger of two elements (see NEAR_ZERO). Both are infinite if rounding
    cannot be the cause: integers, shapes, types, values missing on one side, NaN or infinity on one side.
    """

    max_ulp: float
    max_abs: float
    tensors: tuple[str, ...]

    def is_rounding(self, rounds: int) -> bool:
        """Return whether `rounds` outer steps with different rounding explain the difference."""
        return self.max_ulp <= LAST_PLACE_ULP * max(1, rounds)


def compare_states(mine: object, other: object) -> StateDifference:
    """Compare two states (from `checkpoint.snapshot` and `checkpoint.load`); the order of dicts does not matter."""
    differences = list(_differences(mine, other, "state"))
    return StateDifference(
        max_ulp=max((ulp for _, ulp, _ in differences), default=0.0),
        max_abs=max((distance for _, _, distance in differences), default=0.0),
        tensors=tuple(path for path, _, _ in differences),
    )


def _differences(mine: object, other: object, path: str) -> Iterator[tuple[str, float, float]]:
    """Path, units in the last place, and distance of every difference."""
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
        if mine.dtype != other.dtype or not torch.equal(mine, other):
            yield path, *_tensor_difference(mine, other)
        return
    inside = _pairs(mine, other)
    if inside is not None:
        for name, left, right in inside:
            yield from _differences(left, right, f"{path}.{name}")
    elif type(mine) is not type(other) or not _same(mine, other):
        yield path, math.inf, math.inf


def _pairs(mine: object, other: object) -> list[tuple[object, object, object]] | None:
    """The items of two containers of the same kind and size, in pairs; None for other values."""
    if type(mine) is not type(other):
        return None
    if isinstance(mine, (dict, OrderedDict)):
        own, others = cast("dict[object, object]", mine), cast("dict[object, object]", other)
        if own.keys() != others.keys():
            return None
        return [(key, own[key], others[key]) for key in own]
    if isinstance(mine, (list, tuple)):
        left, right = cast("Sequence[object]", mine), cast("Sequence[object]", other)
        if len(left) != len(right):
            return None
        return [(number, *pair) for number, pair in enumerate(zip(left, right, strict=True))]
    return None


def _same(mine: object, other: object) -> bool:
    both_nan = isinstance(mine, float) and isinstance(other, float) and math.isnan(mine) and math.isnan(other)
    return both_nan or mine == other


def _tensor_difference(mine: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Units in the last place, and distance, of two tensors that are not equal."""
    if mine.shape != other.shape or mine.dtype != other.dtype or not mine.is_floating_point():
        return math.inf, math.inf
    numbers = torch.finfo(mine.dtype)
    wide = torch.float64 if mine.dtype == torch.float64 else torch.float32
    a, b = mine.reshape(-1), other.reshape(-1)
    floor = max(_largest(a) * NEAR_ZERO, _largest(b) * NEAR_ZERO, numbers.smallest_normal)
    ulp = distance = 0.0
    for begin in range(0, a.numel(), _CHUNK):
        left, right = a[begin : begin + _CHUNK].to(wide), b[begin : begin + _CHUNK].to(wide)
        distances = (left - right).abs_()
        if not bool(distances.max().isfinite()):
            differ = (left != right) & ~(left.isnan() & right.isnan())
            left, right = left[differ], right[differ]
            distances = (left - right).abs_()
            if not bool(distances.isfinite().all()):
                return math.inf, math.inf
            if not distances.numel():
                continue
        distance = max(distance, float(distances.max()))
        scale = torch.maximum(left.abs(), right.abs()).clamp_(min=floor)
        ulp = max(ulp, float(distances.div_(_power_of_two(scale)).max()) / numbers.eps)
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
