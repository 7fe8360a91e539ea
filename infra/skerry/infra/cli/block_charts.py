"""Draws numbers with block characters. Pure."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_LEVELS: Final = "▁▂▃▄▅▆▇█"


def bar(share: float, width: int) -> str:
    """A horizontal bar: `share` of `width` cells, to an eighth of a cell; the rest is light."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    full, part = divmod(eighths, 8)
    drawn = "█" * full + (_EIGHTHS[part] if part else "")
    return drawn + "░" * (width - len(drawn))


def thinned(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values, each the mean of neighbours."""
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [fmean(values[start:stop]) for start, stop in pairwise(edges)]


def fitted(values: Sequence[float], width: int, repeat: int) -> list[float]:
    """At most `width` values: the mean of neighbours, or each value up to `repeat` times."""
    times = min(repeat, max(1, width // max(1, len(values))))
    return [value for value in thinned(values, width) for _ in range(times)]


def sparkline(values: Sequence[float], width: int) -> str:
    """One line of columns, at most `width`; the lowest value has the lowest column."""
    drawn = fitted(values, width, 3)
    low, high = min(drawn, default=0.0), max(drawn, default=0.0)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((value - low) * scale)] for value in drawn)


def chart(values: Sequence[float], width: int, height: int, *, zero: bool = False) -> list[tuple[float, str]]:
    """Columns of several lines, at most `width`: each line with the value at its top, the highest first.

    zero: the lowest line begins at 0, otherwise below the lowest value.
    """
    drawn = fitted(values, width, width)
    high = max(drawn, default=0.0)
    low = 0.0 if zero else min(drawn, default=0.0)
    # Without `zero` the lowest value has a column of one cell, because an empty place is a missing value.
    unit = (high - low) / (height if zero else height - 1) or 1.0
    floor = low if zero else low - unit
    lines: list[tuple[float, str]] = []
    for row in reversed(range(height)):
        cells = (min(8, max(0, math.ceil(8 * ((value - floor) / unit - row) - 1e-6))) for value in drawn)
        lines.append((floor + unit * (row + 1), "".join(" " if not cell else _LEVELS[cell - 1] for cell in cells)))
    return lines
