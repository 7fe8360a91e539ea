"""The size of things, so that a file stays a page to read. Above a budget: split along the seams, or say why not."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for folder in ("runtime/skerry", "infra/skerry", "scripts") for path in (ROOT / folder).rglob("*.py")
)
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in SOURCES}
# Its surface is torchft's own, to the last argument.
TORCHFT_SURFACE = "ObjectStoreManager"

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def lines_of(node: ast.AST) -> int:
    assert isinstance(node, Function | ast.ClassDef)
    return (node.end_lineno or node.lineno) - node.lineno + 1


def p95(sizes: Sequence[int]) -> int:
    return sorted(sizes)[math.ceil(0.95 * len(sizes)) - 1]


def functions() -> Iterator[tuple[str, Function]]:
    for name, tree in TREES.items():
        yield from (
            (f"{name}:{node.lineno} {node.name}", node) for node in ast.walk(tree) if isinstance(node, Function)
        )


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name != TORCHFT_SURFACE:
                yield f"{name}:{node.lineno} {node.name}", node


def methods(node: ast.ClassDef) -> dict[str, Function]:
    return {part.name: part for part in node.body if isinstance(part, Function)}


def above(sizes: dict[str, int], limit: int) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > limit}


def test_what_is_measured_is_there() -> None:
    assert {"runtime/skerry/runtime/manager.py", "infra/skerry/infra/cli.py", "scripts/quickstart.py"} <= TREES.keys()
    assert len(list(functions())) > 300
    assert len(list(classes())) > 50


def test_no_file_is_longer_than_700_lines() -> None:
    assert not above({name: len((ROOT / name).read_text().splitlines()) for name in TREES}, 700)


def test_95_in_100_files_are_at_most_500_lines() -> None:
    assert p95([len((ROOT / name).read_text().splitlines()) for name in TREES]) <= 500


def test_95_in_100_functions_are_at_most_50_lines() -> None:
    assert p95([lines_of(node) for _, node in functions()]) <= 50


def test_no_function_is_longer_than_100_lines() -> None:
    assert not above({name: lines_of(node) for name, node in functions()}, 100)


def test_no_class_is_longer_than_300_lines() -> None:
    assert not above({name: lines_of(node) for name, node in classes()}, 300)


def test_no_class_has_more_than_12_public_methods() -> None:
    public = {name: sum(not part.startswith("_") for part in methods(node)) for name, node in classes()}
    assert not above(public, 12)


def test_no_constructor_takes_more_than_8_arguments() -> None:
    taken: dict[str, int] = {}
    for name, node in classes():
        if constructor := methods(node).get("__init__"):
            arguments = constructor.args
            taken[name] = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1
    assert not above(taken, 8)


@pytest.mark.parametrize(("sizes", "expected"), [([1], 1), (list(range(1, 101)), 95), ([1] * 19 + [99], 1)])
def test_the_percentile_leaves_out_one_in_twenty(sizes: list[int], expected: int) -> None:
    assert p95(sizes) == expected


def test_the_example_is_short_enough_to_copy() -> None:
    assert len((ROOT / "runtime/examples/tiny_gpt/train.py").read_text().splitlines()) < 150
