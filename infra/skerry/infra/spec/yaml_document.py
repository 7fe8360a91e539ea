"""Reads a YAML file as plain values with their lines, and applies `--set` overrides.

The place of a value that a flag replaced is the flag. Mappings are dicts, sequences are tuples. Reads one file.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# The loader's attributes have no types; each is cast where it is read.

from __future__ import annotations

import itertools
import os
import re
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from skerry.infra.spec_and_store_errors import Place, Problem, SpecInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

Tree: TypeAlias = "dict[str, Tree] | tuple[Tree, ...] | str | int | float | bool | None"
Where: TypeAlias = tuple[str | int, ...]
"""A place in the document: ("replicas", 0, "count")."""

# A spec of a thousand replicas is about 100 KB; anything larger is another file.
MAX_SPEC_BYTES: Final = 1 << 20
# The deepest field of a spec is 7 levels down. The loader's time grows with the square of the depth.
MAX_DEPTH: Final = 32
# Aliases repeat values, and aliases of aliases multiply them. A spec of a thousand groups has some 20,000 values.
MAX_VALUES: Final = 50_000

_OVERRIDE = re.compile(r"([A-Za-z_][\w]*(?:\[\d+\])*(?:\.[A-Za-z_][\w]*(?:\[\d+\])*)*)=(.*)", re.DOTALL)
# A value where the reference of a secret belongs may be the secret itself.
_NEVER_SHOWN = re.compile(r"(?s)((?:\A|.*\.)(?:env|secrets)\b[^=]*)=.*")
_STEP = re.compile(r"([A-Za-z_]\w*)|\[(\d+)\]")


@dataclass(frozen=True, kw_only=True)
class Document:
    """The unchecked content of a spec, with its places. problems: overrides that could not be applied."""

    tree: Tree
    places: Mapping[Where, Place]
    keys: Mapping[Where, Place]
    problems: Sequence[Problem] = ()

    def value(self, where: Where) -> Tree:
        """Return the value at `where`; None if there is none."""
        node = self.tree
        for step in where:
            match node, step:
                case dict(), str() if step in node:
                    node = node[step]
                case tuple(), int() if step < len(node):
                    node = node[step]
                case _:
                    return None
        return node

    def integer(self, where: Where) -> int | None:
        """Return the whole number at `where`; None if there is none."""
        value = self.value(where)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def entries(self, where: Where) -> Sequence[Tree]:
        """Return the list at `where`; empty if there is none."""
        node = self.value(where)
        return node if isinstance(node, tuple) else ()

    def problem(self, where: Where, text: str, *, key: bool = False) -> Problem:
        """Return a problem with the place of `where`. key: the place of its name instead of its value."""
        return Problem(place=self.place(where, key=key), path=text_of(where), text=text)

    def place(self, where: Where, *, key: bool = False) -> Place:
        """Return where the value of `where` (or its name) was written, else the place of its nearest written parent."""
        if key and where in self.keys:
            return self.keys[where]
        for length in range(len(where), -1, -1):
            if where[:length] in self.places:
                return self.places[where[:length]]
        raise KeyError(where)  # a bug: the root always has a place


def text_of(where: Where) -> str:
    """Return a place as text: replicas[0].count."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where).removeprefix(".")


def read(path: Path, overrides: Sequence[str] = ()) -> Document:
    """Return the document in `path` with `overrides` ("outer.rounds=40") applied in order.

    Raises SpecInvalid if the file cannot be read or is not a YAML mapping.
    """
    start = Place(line=1, column=1, source=str(path))
    places: dict[Where, Place] = {}
    keys: dict[Where, Place] = {}
    root = _load(_text(path, start), start)
    if not isinstance(root, CommentedMap):
        raise SpecInvalid([_at(start, "must be a mapping of fields; `skerry init` writes a sample to start from")])
    tree = _tree(root, start, _Trace(source=str(path), places=places, keys=keys))
    places[()] = keys[()] = start
    problems: list[Problem] = []
    for override in overrides:
        shown = _NEVER_SHOWN.sub(r"\1=...", override)
        flag = Place(line=0, column=0, source=f"--set {shown}")
        try:
            where, value = _parse_override(override, flag)
            tree = _replaced(tree, (), where, value)
        except SpecInvalid as error:
            problems += error.problems
            continue
        except ValueError as error:
            problems.append(_at(flag, str(error)))
            continue
        for old in [key for key in places if key[: len(where)] == where]:
            del places[old]
            keys.pop(old, None)
        for length in range(1, len(where) + 1):
            places.setdefault(where[:length], flag)
            keys.setdefault(where[:length], flag)
    return Document(tree=tree, places=places, keys=keys, problems=problems)


class _Mark(Protocol):
    line: int
    column: int


def _text(path: Path, start: Place) -> str:
    try:
        # A pipe without a writer would block the open, and a device the read.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SpecInvalid([_at(start, "is not a file; write the path of a spec")])
            data = file.read(MAX_SPEC_BYTES + 1)
    except FileNotFoundError as error:
        raise SpecInvalid([_at(start, "no such file; `skerry init` writes a sample to start from")]) from error
    except OSError as error:
        raise SpecInvalid([_at(start, f"cannot be read: {error.strerror}")]) from error
    if len(data) > MAX_SPEC_BYTES:
        raise SpecInvalid([_at(start, f"is larger than {MAX_SPEC_BYTES} bytes; this is not a spec")])
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SpecInvalid([_at(start, f"is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}")]) from error


class _BoundedComposer(Composer):
    """Ends the read of a document that is nested too deep for the loader's recursion."""

    _level = 0

    def compose_node(self, parent: object, index: object) -> object:
        if self._level == MAX_DEPTH:
            mark = cast("object", self.parser.peek_event().start_mark)
            raise ComposerError(None, None, f"it has more than {MAX_DEPTH} levels; this is not a spec", mark)
        self._level += 1
        try:
            return cast("object", super().compose_node(parent, index))
        finally:
            self._level -= 1


def _load(text: str, start: Place) -> object:
    loader = YAML(typ="rt")
    loader.Composer = _BoundedComposer
    try:
        return cast("object", loader.load(text))
    except MarkedYAMLError as error:
        mark = cast("_Mark | None", error.problem_mark)
        place = Place(line=mark.line + 1, column=mark.column + 1, source=start.source) if mark else start
        raise SpecInvalid([_at(place, f"is not YAML: {error.problem or error.context}")]) from error
    except (YAMLError, ValueError) as error:
        raise SpecInvalid([_at(start, f"is not YAML: {str(error).splitlines()[0]}")]) from error


def _at(place: Place, text: str) -> Problem:
    return Problem(place=place, path="", text=text)


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """Collects the places of values while a loaded document is converted."""

    source: str
    places: dict[Where, Place]
    keys: dict[Where, Place]
    count: Iterator[int] = field(default_factory=itertools.count)

    def count_value(self, where: Where) -> None:
        """Raise SpecInvalid if there are too many values."""
        if next(self.count) >= MAX_VALUES:
            place = self.places.get(where, Place(line=1, column=1, source=self.source))
            raise SpecInvalid([_at(place, f"has more than {MAX_VALUES} values, aliases written out; remove aliases")])

    def note(self, where: Where, key: tuple[int, int], value: tuple[int, int] | None) -> None:
        # The mark of an empty value is that of the next token in the file; the place of its name is better.
        line, column = value or key
        self.keys[where] = Place(line=key[0] + 1, column=key[1] + 1, source=self.source)
        self.places[where] = Place(line=line + 1, column=column + 1, source=self.source)


def _tree(root: object, start: Place, trace: _Trace) -> Tree:
    try:
        return _plain(root, (), trace)
    except RecursionError as error:
        raise SpecInvalid([_at(start, "holds an anchor that contains itself; write the values out")]) from error


def _plain(node: object, where: Where, trace: _Trace) -> Tree:
    trace.count_value(where)
    tag = cast("str | None", getattr(getattr(node, "tag", None), "value", None))
    if tag is not None:
        place = trace.places.get(where, Place(line=1, column=1, source=trace.source))
        raise SpecInvalid([_at(place, f"has the tag {tag}, which is not supported; remove it")])
    if isinstance(node, CommentedMap):
        return dict(_plain_fields(node, where, trace))
    if isinstance(node, CommentedSeq):
        items = cast("list[object]", list(node))
        marks = cast("dict[int, list[int]] | None", node.lc.data) or {}
        for index in range(len(items)):
            if index in marks:
                line, column = marks[index][:2]
                trace.note((*where, index), (line, column), None)
        return tuple(_plain(item, (*where, index), trace) for index, item in enumerate(items))
    return _scalar(node)


def _plain_fields(node: CommentedMap, where: Where, trace: _Trace) -> Iterator[tuple[str, Tree]]:
    marks = cast("dict[object, list[int]] | None", node.lc.data) or {}
    for name, value in cast("dict[object, object]", node).items():
        inner = (*where, str(name))
        if name in marks:
            line, column, value_line, value_column = marks[name]
            trace.note(inner, (line, column), None if value is None else (value_line, value_column))
        yield str(name), _plain(value, inner, trace)


def _scalar(node: object) -> Tree:
    """Return a scalar as a builtin; the loader's own types also hold its quotes and signs."""
    match node:
        case None | bool():
            return node
        case int():
            return int(node)
        case float():
            return float(node)
        case _:
            return str(node)


def _parse_override(override: str, flag: Place) -> tuple[Where, Tree]:
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        raise SpecInvalid([_at(flag, "is not field=value; write e.g. --set outer.rounds=40")])
    if not match[2].strip():
        raise SpecInvalid([_at(flag, "has no value; write null to unset it")])
    where = tuple(name or int(index) for name, index in _STEP.findall(match[1]))
    unused: dict[Where, Place] = {}
    return where, _tree(_load(match[2], flag), flag, _Trace(source=flag.source, places=unused, keys=unused))


def _replaced(node: Tree, before: Where, where: Where, value: Tree) -> Tree:
    """Return `node`, which is at `before`, with `value` at `where` below it. Raises ValueError for no such place."""
    if not where:
        return value
    step, rest, path = where[0], where[1:], (*before, where[0])
    match node, step:
        case dict(), str():
            return {**node, step: _replaced(node.get(step), path, rest, value)}
        case None, str():  # a section that the file leaves out
            return {step: _replaced(None, path, rest, value)}
        case tuple(), int() if step < len(node):
            return (*node[:step], _replaced(node[step], path, rest, value), *node[step + 1 :])
        case tuple(), int():
            raise ValueError(f"there is no {text_of(path)}: {text_of(before)} has {len(node)}, counted from 0")
        case _:
            raise ValueError(f"the spec has no field at {text_of(path)}; see `skerry schema` for the fields")
