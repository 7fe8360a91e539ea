"""Computes the loss and other figures of a run over its rounds, and how the loss ends. Pure."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from itertools import pairwise
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.history import last_evaluations
from skerry.infra.report.facts import Convergence, Curve, Point

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from skerry.infra.observe.history import Start
    from skerry.infra.report.facts import Trend
    from skerry.runtime.log.records import Telemetry
    from skerry.runtime.log.summarize_round import RoundHistory

LEARNING_RATE: Final = "learning rate"
GRADIENT_NORM: Final = "gradient norm"
# Names that scripts give to figures of data that the model does not train on.
_HELD_OUT: Final = re.compile(
    r"(^|[^a-z])(val|valid|validation|eval|evaluation|test|dev|held_?out)([^a-z]|$)", re.IGNORECASE
)
# More rounds average out slow changes; of fewer than four there is no trend.
_WINDOW: Final = 20
_FEWEST: Final = 4
# A change of the loss within twice its standard error, or of so small a share, is none.
_ERRORS: Final = 2.0
_SMALLEST: Final = 0.0005
_EVEN: Final = 1e-9


def loss_curve(rounds: Iterable[RoundHistory]) -> Curve:
    """The mean losses of the replicas in each round."""
    points: list[Point] = []
    by_replica: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for item in rounds:
        losses = [(slot, telemetry.loss) for slot, telemetry in _telemetry(item) if telemetry.loss is not None]
        for slot, loss in losses:
            by_replica[slot].append((item.round, loss))
        if losses:
            points.append(_point(item.round, [loss for _, loss in losses]))
    return Curve(
        name="loss",
        points=tuple(points),
        by_replica={slot: tuple(values) for slot, values in by_replica.items()},
    )


def metric_curves(rounds: Sequence[RoundHistory], starts: Iterable[Start], most: int) -> tuple[tuple[Curve, ...], int]:
    """The figures that scripts log, held-out ones first, then those of most rounds; and how many are left out.

    Learning rate and gradient norm come last. starts: their ends have what was evaluated after the last round, under
    the number of the round that would follow. most: curves at most.
    """
    points: defaultdict[str, list[Point]] = defaultdict(list)
    for item in rounds:
        values: defaultdict[str, list[float]] = defaultdict(list)
        for _, telemetry in _telemetry(item):
            for name, value in _figures(telemetry):
                values[name].append(value)
        for name, of_round in values.items():
            points[name].append(_point(item.round, of_round))
    closed, ends = last_evaluations(rounds, starts)
    last = [end.outcome.metrics for end in ends if end.outcome is not None and end.outcome.metrics]
    for name in dict.fromkeys(name for metrics in last for name in metrics):
        points[name].append(_point(closed, [metrics[name] for metrics in last if name in metrics]))
    built_in = (LEARNING_RATE, GRADIENT_NORM)
    curves = [
        Curve(name=name, points=tuple(values), held_out=_HELD_OUT.search(name) is not None, by_replica={})
        for name, values in points.items()
    ]
    curves.sort(key=lambda curve: (curve.name in built_in, not curve.held_out, -len(curve.points), curve.name))
    return tuple(curves[:most]), max(0, len(curves) - most)


def convergence(points: Sequence[Point]) -> Convergence | None:
    """The begin, the end and the trend of a loss; None without any."""
    if not points:
        return None
    values = [point.mean for point in points]
    window = max(1, min(_WINDOW, len(values) // 4))
    last = fmean(values[-window:])
    lowest = min(points, key=lambda point: point.mean)
    change, trend = _change(values, window)
    return Convergence(
        first=values[0],
        last=last,
        window=window,
        lowest=(lowest.round, lowest.mean),
        change=change,
        trend=trend,
    )


def robust_range(values: Sequence[float]) -> tuple[float, float]:
    """The part of an axis that shows most values: the few largest are left out if they dwarf the rest."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    if len(ordered) >= _FEWEST:
        usual = ordered[int(0.9 * (len(ordered) - 1))]
        limit = low + 1.6 * (usual - low)
        high = min(high, limit) if limit > low else high
    # Means of equal numbers differ in their last digits.
    even = high - low <= _EVEN * max(abs(low), abs(high))
    margin = (0.05 * abs(high) or 1.0) if even else 0.05 * (high - low)
    return low - margin, high + margin


def thinned(points: Sequence[tuple[float, float]], parts: int) -> list[tuple[float, float]]:
    """The lowest and the highest point of each of so many parts, in order; all points of a short line."""
    if len(points) <= 2 * parts:
        return list(points)
    kept: list[tuple[float, float]] = [points[0]]
    for part in range(parts):
        of_part = points[part * len(points) // parts : (part + 1) * len(points) // parts]
        kept += sorted({min(of_part, key=_height), max(of_part, key=_height)})
    return [*kept, points[-1]]


def _height(point: tuple[float, float]) -> float:
    return point[1]


def _change(values: Sequence[float], window: int) -> tuple[float | None, Trend]:
    """The change from one window to the last, as a share, and whether it is more than noise between rounds."""
    if len(values) < _FEWEST:
        return None, "unknown"
    before, last = fmean(values[-2 * window : -window]), fmean(values[-window:])
    tail = values[-max(_FEWEST, 2 * window) :]
    noise = stdev(later - earlier for earlier, later in pairwise(tail)) / math.sqrt(2)
    difference = last - before
    level = max(_ERRORS * noise * math.sqrt(2 / window), _SMALLEST * abs(before))
    trend: Trend = "level" if abs(difference) <= level else "falling" if difference < 0 else "rising"
    return difference / abs(before) if before else None, trend


def _point(number: int, values: Sequence[float]) -> Point:
    return Point(round=number, mean=fmean(values), lowest=min(values), highest=max(values), replicas=len(values))


def _telemetry(item: RoundHistory) -> Iterator[tuple[str, Telemetry]]:
    for replica in item.replicas:
        if replica.telemetry is not None:
            yield replica.slot, replica.telemetry


def _figures(telemetry: Telemetry) -> Iterator[tuple[str, float]]:
    metrics: Mapping[str, float] = telemetry.metrics
    yield from metrics.items()
    if telemetry.learning_rate is not None:
        yield LEARNING_RATE, telemetry.learning_rate
    if telemetry.gradient_norm is not None:
        yield GRADIENT_NORM, telemetry.gradient_norm
