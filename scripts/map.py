"""Draws the rooms of skerry from the real imports: docs/map.svg, the picture in the README.

    scripts/map [--check]

One box is one folder or module directly below skerry.runtime or skerry.infra, with the first sentence of its docstring.
A layer of the contract in pyproject.toml is a line, or several of them. An arrow means "imports"; an arrow that follows
from two others is left out. All arrows point down.
--check exits with 1 if the committed picture is out of date.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import tomllib
from html import escape
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).parents[1]
PICTURE: Final = ROOT / "docs/map.svg"
SIDES: Final = (
    ("skerry.runtime", "runtime: inside a replica", "#e8f1fb", "#2f6fb0"),
    ("skerry.infra", "infra: on the operator's machine", "#fdf1e3", "#b5701f"),
)
# In pixels.
SIDE, BOX_WIDTH, BOX_HEIGHT, ROW, TOP, MARGIN = 600, 250, 58, 78, 60, 14
LINE_CHARACTERS, LINES = 44, 3
BOXES: Final = 2
"""In a line of a side; a layer with more of them takes several lines."""


def rooms_of(root: str) -> dict[str, set[str]]:
    """Each room directly below `root`, and the rooms that it imports without a detour."""
    graph = grimp.build_graph("skerry.runtime", "skerry.infra", cache_dir=None)
    rooms = sorted(graph.find_children(root))
    for room in rooms:
        if graph.find_children(room):
            graph.squash_module(room)
    imports = {room: graph.find_modules_directly_imported_by(room) & set(rooms) - {room} for room in rooms}

    def reached(room: str) -> set[str]:
        return imports[room].union(*(reached(below) for below in imports[room]))

    return {
        room: {below for below in imports[room] if not any(below in reached(other) for other in imports[room])}
        for room in rooms
    }


def rows_of(root: str) -> list[list[str]]:
    """The layers that `lint-imports` holds, from the top, as pyproject.toml lists them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers") == [root])
    return [[f"{root}.{name.strip(' ()')}" for name in re.split("[|:]", layer)] for layer in layers]


def lines_of(layers: list[list[str]]) -> list[list[str]]:
    """The layers in lines of `BOXES` rooms at most."""
    return [layer[start : start + BOXES] for layer in layers for start in range(0, len(layer), BOXES)]


def sentence_of(room: str) -> str:
    """The first sentence of a room's docstring."""
    root = "runtime" if room.startswith("skerry.runtime") else "infra"
    path = ROOT / root / room.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(source.read_text())) or ""
    return docstring.split("\n\n", maxsplit=1)[0].replace("\n", " ").split(". ")[0].rstrip(".").replace("`", "")


def picture() -> str:
    """The whole picture as SVG text."""
    parts: list[str] = []
    lowest = 0
    for side, (root, title, fill, ink) in enumerate(SIDES):
        imports = rooms_of(root)
        rows = lines_of(rows_of(root))
        boxes: dict[str, tuple[float, float]] = {}
        for row, rooms in enumerate(rows):
            for place, room in enumerate(rooms):
                middle = SIDE * side + SIDE / 2
                x = middle + (place - (len(rooms) - 1) / 2) * (BOX_WIDTH + MARGIN) - BOX_WIDTH / 2
                boxes[room] = (x, TOP + row * ROW)
        lowest = max(lowest, TOP + len(rows) * ROW)
        parts.append(f'<text class="title" x="{SIDE * side + SIDE / 2:g}" y="38" fill="{ink}">{escape(title)}</text>')
        parts += [
            f'<path d="{_arrow(boxes[room], boxes[below])}" stroke="{ink}"/>'
            for room, belows in imports.items()
            for below in sorted(belows)
        ]
        parts += [_box(room, x, y, fill, ink) for room, (x, y) in boxes.items()]
    return _DOCUMENT.format(width=SIDE * len(SIDES), height=lowest + MARGIN, body="\n".join(parts))


def _arrow(upper: tuple[float, float], lower: tuple[float, float]) -> str:
    """A curve from the lower edge of one box to the upper edge of another."""
    start_x, start_y = upper[0] + BOX_WIDTH / 2, upper[1] + BOX_HEIGHT
    end_x, end_y = lower[0] + BOX_WIDTH / 2, lower[1] - 4
    rows = round((lower[1] - upper[1]) / ROW)
    if rows == 1:
        half = (start_y + end_y) / 2
        return f"M{start_x:g},{start_y:g} C{start_x:g},{half:g} {end_x:g},{half:g} {end_x:g},{end_y:g}"
    middle = SIDE * (end_x // SIDE) + SIDE / 2
    side = 1 if (end_x - middle or start_x - middle or 1) > 0 else -1
    start_x, start_y = upper[0] + (BOX_WIDTH if side > 0 else 0), upper[1] + BOX_HEIGHT / 2
    end_x, end_y = lower[0] + (BOX_WIDTH + 4 if side > 0 else -4), lower[1] + BOX_HEIGHT / 2
    bend = side * (26 + 12 * rows)
    return f"M{start_x:g},{start_y:g} C{start_x + bend:g},{start_y:g} {end_x + bend:g},{end_y:g} {end_x:g},{end_y:g}"


def _box(room: str, x: float, y: float, fill: str, ink: str) -> str:
    lines = textwrap.wrap(sentence_of(room), LINE_CHARACTERS, max_lines=LINES, placeholder=" ...")
    name = room.rpartition(".")[2]
    texts = [f'<text class="name" x="{x + 10:g}" y="{y + 17:g}" fill="{ink}">{escape(name)}</text>']
    texts += [
        f'<text x="{x + 10:g}" y="{y + 31 + 12 * number:g}">{escape(line)}</text>' for number, line in enumerate(lines)
    ]
    frame = f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{fill}" stroke="{ink}"/>'
    return "\n".join([frame, *texts])


_DOCUMENT: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<style>
text {{ font: 10px sans-serif; fill: #333 }} .name {{ font: bold 13px sans-serif }}
.title {{ font: bold 17px sans-serif; text-anchor: middle }}
path {{ fill: none; stroke-width: 1.4; marker-end: url(#tip) }}
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0,0 L8,4 L0,8 z" style="fill: #666; stroke: none; marker-end: none"/></marker></defs>
<rect width="100%" height="100%" fill="white"/>
{body}
</svg>
"""


def main() -> int:
    """Writes the picture, or compares it."""
    text = picture()
    if "--check" in sys.argv[1:]:
        return 0 if PICTURE.read_text() == text else 1
    PICTURE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
