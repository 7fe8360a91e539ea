"""Filters of lists, as much of their language as this project uses: pure functions.

NAME = VALUE and !=, <, <=, >, >=, with AND, OR, NOT, a leading minus and parentheses; two without a word between are
joined by AND, and OR binds closer than AND, as AIP-160 and Cloud Logging have it. `:` is "has". What is not known
here raises Refusal (400).
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, cast

from skerry.infra.testing.google.refusals import Refusal, invalid

Test: TypeAlias = Callable[[Mapping[str, Any]], bool]

_TOKEN: Final = re.compile(
    r"\s*(?:(\"(?:[^\"\\]|\\.)*\")|(!=|>=|<=|[=<>:()]|-(?=[A-Za-z(]))|((?:[^\s=<>:()!\"]|(?<=\.)\"[^\"]*\")+))"
)
_ORDERED: Final = ("<", "<=", ">", ">=")
SEVERITIES: Final = ("DEFAULT", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR", "CRITICAL", "ALERT", "EMERGENCY")


def parsed(text: str, known: Callable[[str], bool]) -> Test:
    """A test of what a filter lets through. known: whether a field may be asked for. Raises Refusal."""
    if not text.strip():
        return lambda _: True
    reader = _Reader(text, known)
    test = reader.every()
    if reader.word is not None:
        raise reader.bad(f"unexpected {reader.word}")
    return test


class _Reader:
    def __init__(self, text: str, known: Callable[[str], bool]) -> None:
        self._text = text
        self._known = known
        self._at = 0
        self.word: str | None = None
        self._next()

    def every(self) -> Test:
        parts = [self._any()]
        while self.word is not None and self.word != ")":
            if self.word == "AND":
                self._next()
            parts.append(self._any())
        return lambda value: all(part(value) for part in parts)

    def bad(self, why: str) -> Refusal:
        return invalid(f"Unparseable filter: {why}, in {self._text}", "filter")

    def _any(self) -> Test:
        parts = [self._one()]
        while self.word == "OR":
            self._next()
            parts.append(self._one())
        return lambda value: any(part(value) for part in parts)

    def _one(self) -> Test:
        if self.word in {"NOT", "-"}:
            self._next()
            inner = self._one()
            return lambda value: not inner(value)
        if self.word == "(":
            self._next()
            inner = self.every()
            self._need(")")
            return inner
        name = self._taken()
        if not self._known(name):
            raise self.bad(f"unknown field {name}")
        sign = self._taken()
        if sign not in {"=", "!=", ":", *_ORDERED}:
            raise self.bad(f"expected a comparison, not {sign}")
        return _compared(name, sign, _unquoted(self._taken()))

    def _taken(self) -> str:
        if (word := self.word) is None:
            raise self.bad("it ends too early")
        self._next()
        return word

    def _need(self, word: str) -> None:
        if self.word != word:
            raise self.bad(f"expected {word}")
        self._next()

    def _next(self) -> None:
        if not self._text[self._at :].strip():
            self.word = None
            return
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise self.bad(f"cannot read from {self._text[self._at : self._at + 20]!r}")
        self._at = found.end()
        self.word = found[0].strip()


def field_of(value: Mapping[str, Any], name: str) -> Any:
    """The field of a dotted name; a label's own name may hold dots if it is quoted. None if it is not there."""
    found: Any = value
    for part in re.findall(r'"[^"]*"|[^.]+', name):
        if not isinstance(found, Mapping):
            return None
        key, below = _unquoted(part), cast("Mapping[str, Any]", found)
        found = below.get(key, below.get(_camel(key)))
    return found


def _compared(name: str, sign: str, wanted: str) -> Test:
    def test(value: Mapping[str, Any]) -> bool:
        found = field_of(value, name)
        if sign == ":" and wanted == "*":
            return found is not None
        if found is None:
            return sign == "!="
        text = str(found)
        match sign:
            case "=":
                return _equal(text, wanted)
            case "!=":
                return not _equal(text, wanted)
            case ":":
                return wanted.lower() in text.lower()
            case _:
                return _ordered(sign, *_ranks(name, text, wanted))

    return test


def _equal(text: str, wanted: str) -> bool:
    """An asterisk at the end stands for anything, in lists of jobs; log entries never hold one where it matters."""
    return text.startswith(wanted[:-1]) if wanted.endswith("*") else text == wanted


def _ordered(sign: str, left: Any, right: Any) -> bool:
    return bool({"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[sign])


def _ranks(name: str, text: str, wanted: str) -> tuple[Any, Any]:
    if name == "severity":
        return SEVERITIES.index(text), SEVERITIES.index(wanted)
    if "ime" in name:
        return dt.datetime.fromisoformat(text), dt.datetime.fromisoformat(wanted)
    return text, wanted


def _unquoted(token: str) -> str:
    return re.sub(r"\\(.)", r"\1", token[1:-1]) if token.startswith('"') else token


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
