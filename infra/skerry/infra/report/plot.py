"""Draws a chart: shapes as an SVG that is stretched to its place, labels as HTML at percentages of it. Pure.

Text keeps its size at every width, and no script measures anything. Lines are not stretched (`vector-effect`).
"""

from __future__ import annotations

import html
import math
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The width of the SVG's own coordinates.
_WIDTH: Final = 1000.0
_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)


def escaped(text: object, limit: int = 300) -> str:
    """A text as HTML, shortened; control characters, which a bucket may hold, are replaced."""
    words = "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(str(text).split()))
    return html.escape(words if len(words) <= limit else f"{words[:limit]}...", quote=True)


def sentence(text: str, limit: int = 500) -> str:
    """A sentence as HTML, as `escaped` does it, with what is between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escaped(text, limit))


def ticks(low: float, high: float, about: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers between two, about so many. whole: integers only."""
    raw = (high - low) / about
    if not raw > 0:
        return [low]
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(step * scale for step in _STEPS if step * scale >= raw * (1 - 1e-9))
    step = max(1.0, math.ceil(step)) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def number_label(value: float) -> str:
    """A tick of an axis: 0.002, 2.5, 1,000, 3e+06."""
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.10g}"


class Plot:
    """A chart with linear axes. height: in pixels. label_width: of the space for labels on the left, in pixels."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], height: float, label_width: int = 48) -> None:
        self._x, self._y = x, y
        self._height = height
        self._label_width = label_width
        self._shapes: list[str] = []
        self._labels: list[str] = []

    def axes(self, x_label: Callable[[float], str], *, whole: bool = False, y_ticks: bool = True) -> None:
        """Grid lines with their numbers. x_label: of a number on the x axis. whole: it has integers only."""
        for at in ticks(*self._x, whole=whole):
            self._shapes.append(f'<path class="grid" d="M{self._px(at):.1f} 0V{self._height:g}"/>')
            self._label("x", x_label(at), left=self._px(at) / _WIDTH)
        for at in self._y_ticks() if y_ticks else ():
            self._shapes.append(f'<path class="grid" d="M0 {self._py(at):.1f}H{_WIDTH:g}"/>')
            self._label("y", number_label(at), top=self._py(at) / self._height)

    def _y_ticks(self) -> list[float]:
        """Two at least: with one number an axis has no scale."""
        about = max(2, round(self._height / 50))
        few = ticks(*self._y, about=about)
        return few if len(few) > 1 else ticks(*self._y, about=4 * about)

    def row_labels(self, names: Sequence[str], row_height: float) -> None:
        """A name beside each row, the first at the top; of low rows every second, third and so on."""
        every = max(1, math.ceil(13 / row_height))
        for number in range(0, len(names), every):
            self._label("y", names[number], top=(number + 0.5) / len(names), title=names[number])

    def line(
        self,
        points: Sequence[tuple[float, float]],
        style: str,
        colour: str = "",
        gaps: Sequence[tuple[float, float]] = (),
    ) -> None:
        """A line through points. style: its CSS class. gaps: from x to x; no line goes over them."""
        pieces: list[list[tuple[float, float]]] = []
        for point in points:
            if not pieces or any(pieces[-1][-1][0] < begin and end < point[0] for begin, end in gaps):
                pieces.append([])
            pieces[-1].append(point)
        if pieces:
            self._shapes.append(f'<path class="{style}"{_stroke(colour)} d="{"".join(map(self._path, pieces))}"/>')

    def dots(self, points: Sequence[tuple[float, float]], colour: str = "") -> None:
        """A round dot at each point."""
        path = "".join(f"M{self._px(x):.1f} {self._py(y):.1f}h0" for x, y in points)
        if path:
            self._shapes.append(f'<path class="dots"{_stroke(colour)} d="{path}"/>')

    def band(self, lower: Sequence[tuple[float, float]], upper: Sequence[tuple[float, float]]) -> None:
        """The area between two lines."""
        if lower and upper:
            self._shapes.append(f'<path class="band" d="{self._path([*lower, *reversed(upper)])}Z"/>')

    def box(self, x: tuple[float, float], y: tuple[float, float], style: str, tip: str = "", data: str = "") -> None:
        """A rectangle. tip: shown under the pointer. data: attributes for programs."""
        left, right = self._px(x[0]), self._px(x[1])
        top, bottom = self._py(y[1]), self._py(y[0])
        title = f"<title>{escaped(tip)}</title>" if tip else ""
        self._shapes.append(
            f'<rect class="{style}"{data} x="{left:.2f}" y="{top:.2f}" width="{max(0.0, right - left):.2f}" '
            f'height="{max(0.0, bottom - top):.2f}">{title}</rect>'
        )

    def image(self, uri: str, alt: str) -> None:
        """A picture of the whole plot."""
        self._labels.insert(0, f'<img src="{uri}" alt="{escaped(alt)}">')

    def upright(self, x: float, style: str) -> None:
        """A line from the bottom to the top."""
        self._shapes.append(f'<path class="{style}" d="M{self._px(x):.1f} 0V{self._height:g}"/>')

    def note(self, x: float, y: float, text: str, style: str, tip: str = "") -> None:
        """A text at a point. Beyond the middle it ends at the point."""
        left, top = self._px(x) / _WIDTH, self._py(y) / self._height
        self._label(f"note {style}{' end' if left > 0.6 else ''}", text, left=left, top=top, title=tip)

    def html(self) -> str:
        """The chart without its title and legend."""
        return (
            f'<div class="plot" style="height:{self._height:g}px;margin-left:{self._label_width}px">'
            f'<svg viewBox="0 0 {_WIDTH:g} {self._height:g}" preserveAspectRatio="none" aria-hidden="true">'
            f"{''.join(self._shapes)}</svg>{''.join(self._labels)}</div>"
        )

    def _px(self, value: float) -> float:
        return (value - self._x[0]) / ((self._x[1] - self._x[0]) or 1.0) * _WIDTH

    def _py(self, value: float) -> float:
        return self._height * (1 - (value - self._y[0]) / ((self._y[1] - self._y[0]) or 1.0))

    def _path(self, points: Sequence[tuple[float, float]]) -> str:
        # Far outside of the plot a coordinate has too many digits, and shows nothing.
        limit = 20 * self._height
        return "M" + "L".join(f"{self._px(x):.1f} {min(limit, max(-limit, self._py(y))):.1f}" for x, y in points)

    def _label(
        self, style: str, text: str, *, left: float | None = None, top: float | None = None, title: str = ""
    ) -> None:
        places = [f"{name}:{100 * share:.2f}%" for name, share in (("left", left), ("top", top)) if share is not None]
        tip = f' title="{escaped(title)}"' if title else ""
        self._labels.append(f'<span class="{style}" style="{";".join(places)}"{tip}>{escaped(text, 80)}</span>')


def _stroke(colour: str) -> str:
    return f' style="stroke:{colour}"' if colour else ""
