"""Limits the size of files, classes and functions, of sources and of tests. Above a limit, split along the seams."""

from __future__ import annotations

import ast
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).parents[2]
# Classes above their budget, with their lines. An entry may only shrink or go.
OVER_CLASSES = {"Checker": 375}
# It has torchft's public methods and parameters.
TORCHFT_SURFACE = "ObjectStoreManager"

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Budgeted(NamedTuple):
    """The sizes of some folders' files, functions and classes, by name."""

    files: dict[str, int]
    functions: dict[str, int]
    classes: dict[str, ast.ClassDef]


def lines_of(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@functools.cache
def measure(*folders: str) -> Budgeted:
    measured = Budgeted({}, {}, {})
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        text, name = path.read_text(), path.relative_to(ROOT).as_posix()
        measured.files[name] = len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, Function):
                measured.functions[f"{name}:{node.lineno} {node.name}"] = lines_of(node)
            elif isinstance(node, ast.ClassDef) and node.name != TORCHFT_SURFACE:
                measured.classes[f"{name}:{node.lineno} {node.name}"] = node
    return measured


# Measured by the first test that asks, because every process of a run collects this file.
SOURCES: Final = ("runtime/skerry", "infra/skerry", "scripts")
TESTS: Final = ("tests",)
BOTH = pytest.mark.parametrize("folders", [SOURCES, TESTS], ids=["sources", "tests"])


def methods(node: ast.ClassDef) -> dict[str, Function]:
    return {part.name: part for part in node.body if isinstance(part, Function)}


def above(sizes: Mapping[str, int], limit: int) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > limit}


def p95(sizes: Iterable[int]) -> int:
    ordered = sorted(sizes)
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


@pytest.mark.parametrize(("sizes", "expected"), [([1], 1), (range(1, 101), 95), ([1] * 19 + [99], 1)])
def test_p95_leaves_out_one_value_in_twenty(sizes: Iterable[int], expected: int) -> None:
    assert p95(sizes) == expected


def test_budgets_find_sources_and_tests() -> None:
    expected = {"runtime/skerry/runtime/manager.py", "infra/skerry/infra/cli/app.py", "scripts/quickstart.py"}
    sources = measure(*SOURCES)
    assert expected <= sources.files.keys()
    assert len(sources.functions) > 300
    assert len(sources.classes) > 50
    assert "tests/contracts/test_budgets.py" in measure(*TESTS).files


@BOTH
def test_files_have_at_most_700_lines_and_most_450(folders: tuple[str, ...]) -> None:
    measured = measure(*folders)
    assert not above(measured.files, 700)
    assert p95(measured.files.values()) <= 450


@BOTH
def test_functions_have_at_most_100_lines_and_most_50(folders: tuple[str, ...]) -> None:
    measured = measure(*folders)
    assert not above(measured.functions, 100)
    assert p95(measured.functions.values()) <= 50


@BOTH
def test_classes_have_at_most_300_lines(folders: tuple[str, ...]) -> None:
    assert not {
        name: lines_of(node)
        for name, node in measure(*folders).classes.items()
        if lines_of(node) > OVER_CLASSES.get(node.name, 300)
    }


def test_classes_have_at_most_12_public_methods() -> None:
    public = {
        name: sum(not part.startswith("_") for part in methods(node))
        for name, node in measure(*SOURCES).classes.items()
    }
    assert not above(public, 12)


@BOTH
def test_constructors_have_at_most_8_parameters(folders: tuple[str, ...]) -> None:
    constructors = {name: methods(node).get("__init__") for name, node in measure(*folders).classes.items()}
    counts = {
        name: len(init.args.posonlyargs + init.args.args + init.args.kwonlyargs) - 1
        for name, init in constructors.items()
        if init is not None
    }
    assert not above(counts, 8)


def test_example_has_fewer_than_150_lines() -> None:
    assert len((ROOT / "runtime/examples/tiny_gpt/train.py").read_text().splitlines()) < 150
