"""Parses filters of list requests into tests of resources, as far as this project uses them: pure functions.

NAME = VALUE and !=, <, <=, >, >=, with AND, OR, NOT, a leading minus and parentheses; adjacent terms are joined by AND,
and OR binds closer than AND, as in AIP-160 and Cloud Logging. `:` is "has". Anything else raises Refusal (400).
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, cast

from skerry.testing.google.protobuf_enums import camel
from skerry.testing.google.refusals import Refusal, invalid

Test: TypeAlias = Callable[[Mapping[str, Any]], bool]

_TOKEN: Final = re.compile(
    r"\s*(?:(\"(?:[^\"\\]|\\.)*\")|(!=|>=|<=|[=<>:()]|-(?=[A-Za-z(]))|((?:[^\s=<>:()!\"]|(?<=\.)\"[^\"]*\")+))"
)
_ORDERED: Final = ("<", "<=", ">", ">=")
SEVERITIES: Final = ("DEFAULT", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR", "CRITICAL", "ALERT", "EMERGENCY")


def parse_filter(text: str, is_field: Callable[[str], bool]) -> Test:
    """A test of what a filter lets through. known: whether a field may be asked for. Raises Refusal."""
    if not text.strip():
        return lambda _: True
    reader = _Parser(text, is_field)
    test = reader.parse()
    if reader.word is not None:
        raise reader.error(f"unexpected {reader.word}")
    return test


class _Parser:
    def __init__(self, text: str, is_field: Callable[[str], bool]) -> None:
        self._text = text
        self._known = is_field
        self._position = 0
        self.word: str | None = None
        self._next()

    def parse(self) -> Test:
        parts = [self._parse_or()]
        while self.word is not None and self.word != ")":
            if self.word == "AND":
                self._next()
            parts.append(self._parse_or())
        return lambda value: all(part(value) for part in parts)

    def error(self, why: str) -> Refusal:
        return invalid(f"Unparseable filter: {why}, in {self._text}", "filter")

    def _parse_or(self) -> Test:
        parts = [self._parse_term()]
        while self.word == "OR":
            self._next()
            parts.append(self._parse_term())
        return lambda value: any(part(value) for part in parts)

    def _parse_term(self) -> Test:
        if self.word in {"NOT", "-"}:
            self._next()
            inner = self._parse_term()
            return lambda value: not inner(value)
        if self.word == "(":
            self._next()
            inner = self.parse()
            self._expect(")")
            return inner
        name = self._take()
        if not self._known(name):
            raise self.error(f"unknown field {name}")
        sign = self._take()
        if sign not in {"=", "!=", ":", *_ORDERED}:
            raise self.error(f"expected a comparison, not {sign}")
        return _comparison(name, sign, _unquoted(self._take()))

    def _take(self) -> str:
        if (word := self.word) is None:
            raise self.error("unexpected end")
        self._next()
        return word

    def _expect(self, word: str) -> None:
        if self.word != word:
            raise self.error(f"expected {word}")
        self._next()

    def _next(self) -> None:
        if not self._text[self._position :].strip():
            self.word = None
            return
        match = _TOKEN.match(self._text, self._position)
        if match is None:
            raise self.error(f"cannot read from {self._text[self._position : self._position + 20]!r}")
        self._position = match.end()
        self.word = match[0].strip()


def field_of(value: Mapping[str, Any], name: str) -> Any:
    """Return the field with a dotted name; a quoted label name may contain dots. None if absent."""
    field: Any = value
    for part in re.findall(r'"[^"]*"|[^.]+', name):
        if not isinstance(field, Mapping):
            return None
        key, below = _unquoted(part), cast("Mapping[str, Any]", field)
        field = below.get(key, below.get(camel(key)))
    return field


def _comparison(name: str, sign: str, expected: str) -> Test:
    def test(value: Mapping[str, Any]) -> bool:
        actual = field_of(value, name)
        if sign == ":" and expected == "*":
            return actual is not None
        if actual is None:
            return sign == "!="
        text = str(actual)
        match sign:
            case "=":
                return _equal(text, expected)
            case "!=":
                return not _equal(text, expected)
            case ":":
                return expected.lower() in text.lower()
            case _:
                return _ordered(sign, *_ranks(name, text, expected))

    return test


def _equal(text: str, expected: str) -> bool:
    """Compare with a value; a trailing asterisk matches any text, as in lists of jobs."""
    return text.startswith(expected[:-1]) if expected.endswith("*") else text == expected


def _ordered(sign: str, left: Any, right: Any) -> bool:
    return bool({"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[sign])


def _ranks(name: str, text: str, expected: str) -> tuple[Any, Any]:
    if name == "severity":
        return SEVERITIES.index(text), SEVERITIES.index(expected)
    if "ime" in name:
        return dt.datetime.fromisoformat(text), dt.datetime.fromisoformat(expected)
    return text, expected


def _unquoted(word: str) -> str:
    return re.sub(r"\\(.)", r"\1", word[1:-1]) if word.startswith('"') else word
