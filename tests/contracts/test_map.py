"""The picture of the rooms in the README is the one that the imports draw."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
NEIGHBOURS = {"testing", "runtime", "infra", "serverless"}
SVG = "{http://www.w3.org/2000/svg}"


def test_committed_map_matches_the_imports() -> None:
    """Run `scripts/map` after a room, an import between rooms or a room's first sentence has changed."""
    compared = subprocess.run([sys.executable, "scripts/map.py", "--check"], cwd=ROOT, check=False)
    assert compared.returncode == 0


def test_readme_shows_the_map() -> None:
    assert "docs/map.svg" in (ROOT / "README.md").read_text()


def test_boxes_and_words_lie_inside_the_map_and_apart() -> None:
    picture = ET.fromstring((ROOT / "docs/map.svg").read_text())  # noqa: S314  our own file
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    boxes = [
        tuple(float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        for box in picture.iter(f"{SVG}rect")
        if "x" in box.attrib
    ]
    assert len(boxes) > 20
    for x, y, wide, high in boxes:
        assert 0 <= x <= x + wide <= width
        assert 0 <= y <= y + high <= height
    for (x, y, wide, high), (other_x, other_y, other_wide, other_high) in itertools.combinations(boxes, 2):
        beside = x + wide <= other_x or other_x + other_wide <= x
        above = y + high <= other_y or other_y + other_high <= y
        assert beside or above, ((x, y), (other_x, other_y))
    for text in picture.iter(f"{SVG}text"):
        assert 0 <= float(text.attrib["x"]) < width, text.text


@pytest.mark.parametrize("root", ["skerry.runtime", "skerry.infra"])
def test_docstring_of_a_package_names_each_room(root: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers") == [root])
    rooms = {name for layer in layers for name in re.findall(r"\w+", layer)}
    side = root.removeprefix("skerry.")
    docstring = ast.get_docstring(ast.parse((ROOT / side / "skerry" / side / "__init__.py").read_text())) or ""
    # "room    sentence; room: sentence" at the start of a line or after a semicolon.
    named = set(re.findall(r"(?:^ *|; )(\w+)(?:  |:)", docstring, re.MULTILINE))
    assert named == rooms


def modules_named_in(docstring: str) -> set[str]:
    """The words in backticks that look like a module: `reduce`, `codecs.int8`."""
    return set(re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)*)`", docstring))


def test_names_in_docstrings_of_packages_exist() -> None:
    unknown: list[str] = []
    for side in ("runtime", "infra"):
        for path in (ROOT / side / "skerry").rglob("__init__.py"):
            folder = path.parent
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            code = "\n".join(each.read_text() for each in folder.rglob("*.py")).replace(docstring, "")
            words = {*re.findall(r"\w+", code), *(each.stem for each in folder.rglob("*")), *NEIGHBOURS}
            unknown += [
                f"{path.parent.name}: {name}" for name in modules_named_in(docstring) if {*name.split(".")} - words
            ]
    assert unknown == []
