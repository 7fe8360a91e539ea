"""Evaluates the part of the Common Expression Language that IAM conditions and mappings use: pure functions.

Strings, lists, ==, !=, in, &&, ||, !, + and ?:, and the functions startsWith, endsWith, contains, matches, extract and
api.getAttribute. Anything else raises Unsupported: a test must not pass because a condition was skipped.
Sources: "Attribute reference for IAM Conditions" (extract, getAttribute), "Workload Identity Federation" (mappings).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, cast

Value: TypeAlias = "str | bool | list[Value]"
Context: TypeAlias = Mapping[str, Value]
"""Values by full name: `resource.name`, `assertion.arn`; attributes of the API as `api:NAME`."""

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<string>\"[^\"\\\n]*\"|'[^'\\\n]*')|(?P<name>[A-Za-z_]\w*)|(?P<sign>&&|\|\||==|!=|[!()\[\],.?:+]))"
)


class Unsupported(Exception):  # noqa: N818  named for what happened
    """An expression that is invalid or not supported here."""


class Absent(Exception):  # noqa: N818  named for what happened
    """A name without a value; an error in CEL, and a condition with an error is false."""


def holds(expression: str, context: Context) -> bool:
    """Return True if a condition is true. Raises Unsupported."""
    try:
        value = evaluate(expression, context)
    except Absent:
        return False
    if not isinstance(value, bool):
        raise Unsupported(f"condition is not a boolean: {expression}")
    return value


def evaluate(expression: str, context: Context) -> Value:
    """Return the value. Raises Unsupported, and Absent if a name has no value."""
    reader = _Parser(expression, context)
    value = reader.parse()
    reader.expect_end()
    return value()


_Thunk: TypeAlias = Callable[[], Value]


class _Parser:
    """Parses an expression into a function; operands that && and ?: skip are not evaluated."""

    def __init__(self, text: str, context: Context) -> None:
        self._text = text
        self._context = context
        self._tokens = self._tokenize(text)
        self._position = 0

    def parse(self) -> _Thunk:
        condition = self._parse_or()
        if not self._accept("?"):
            return condition
        yes = self.parse()
        self._expect(":")
        no = self.parse()
        return lambda: yes() if self._bool(condition()) else no()

    def expect_end(self) -> None:
        if self._position < len(self._tokens):
            raise self._error(f"unexpected {self._tokens[self._position]}")

    def _parse_or(self) -> _Thunk:
        parts = [self._parse_and()]
        while self._accept("||"):
            parts.append(self._parse_and())
        return parts[0] if len(parts) == 1 else lambda: _evaluate_or(parts, self._bool)

    def _parse_and(self) -> _Thunk:
        parts = [self._parse_comparison()]
        while self._accept("&&"):
            parts.append(self._parse_comparison())
        return parts[0] if len(parts) == 1 else lambda: all(self._bool(part()) for part in parts)

    def _parse_comparison(self) -> _Thunk:
        left = self._parse_sum()
        if self._accept("=="):
            right = self._parse_sum()
            return lambda: left() == right()
        if self._accept("!="):
            right = self._parse_sum()
            return lambda: left() != right()
        if self._accept("in"):
            right = self._parse_sum()
            return lambda: left() in self._list(right())
        return left

    def _parse_sum(self) -> _Thunk:
        parts = [self._parse_unary()]
        while self._accept("+"):
            parts.append(self._parse_unary())
        return parts[0] if len(parts) == 1 else lambda: "".join(self._str(part()) for part in parts)

    def _parse_unary(self) -> _Thunk:
        if self._accept("!"):
            inner = self._parse_unary()
            return lambda: not self._bool(inner())
        return self._parse_calls(self._parse_primary())

    def _parse_primary(self) -> _Thunk:
        if self._accept("("):
            inner = self.parse()
            self._expect(")")
            return inner
        if self._accept("["):
            items = self._parse_items("]")
            return lambda: [item() for item in items]
        word = self._next()
        if word[0] in "\"'":
            return lambda: word[1:-1]
        if word in {"true", "false"}:
            return lambda: word == "true"
        if not word.isidentifier():
            raise self._error(f"unexpected {word}")
        return self._parse_name(word)

    def _parse_name(self, name: str) -> _Thunk:
        while self._peek() == "." and self._peek(2) != "(":
            self._next()
            name += "." + self._next()
        if name == "api" and self._peek() == "." and self._peek(1) == "getAttribute":
            self._position += 2
            self._expect("(")
            attribute, default = self._parse_items(")")
            return lambda: self._context.get(f"api:{self._str(attribute())}", default())
        if self._peek() == "(":
            raise self._error(f"unknown function {name}")
        return lambda: self._value(name)

    def _value(self, name: str) -> Value:
        if name not in self._context:
            raise Absent(name)
        return self._context[name]

    def _parse_calls(self, value: _Thunk) -> _Thunk:
        while self._accept("."):
            name = self._next()
            self._expect("(")
            arguments = self._parse_items(")")
            if name not in _FUNCTIONS or len(arguments) != 1:
                raise self._error(f"unknown function {name}")
            value = self._bound(_FUNCTIONS[name], value, arguments[0])
        return value

    def _bound(self, function: Callable[[str, str], Value], on: _Thunk, argument: _Thunk) -> _Thunk:
        return lambda: function(self._str(on()), self._str(argument()))

    def _parse_items(self, closing: str) -> list[_Thunk]:
        items: list[_Thunk] = []
        while not self._accept(closing):
            if items:
                self._expect(",")
            items.append(self.parse())
        return items

    def _tokenize(self, text: str) -> list[str]:
        tokens: list[str] = []
        position = 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._error(f"cannot read from {text[position : position + 20]!r}")
            tokens.append(match[0].strip())
            position = match.end()
        return tokens

    def _peek(self, ahead: int = 0) -> str:
        return self._tokens[self._position + ahead] if self._position + ahead < len(self._tokens) else ""

    def _next(self) -> str:
        if not (word := self._peek()):
            raise self._error("unexpected end")
        self._position += 1
        return word

    def _accept(self, word: str) -> bool:
        if self._peek() != word:
            return False
        self._position += 1
        return True

    def _expect(self, word: str) -> None:
        if not self._accept(word):
            raise self._error(f"expected {word}, not {self._peek() or 'its end'}")

    def _bool(self, value: Value) -> bool:
        if not isinstance(value, bool):
            raise self._error(f"{value!r} is not a boolean")
        return value

    def _str(self, value: Value) -> str:
        if not isinstance(value, str):
            raise self._error(f"{value!r} is not a string")
        return value

    def _list(self, value: Value) -> list[Value]:
        if not isinstance(value, list):
            raise self._error(f"{value!r} is not a list")
        return value

    def _error(self, why: str) -> Unsupported:
        return Unsupported(f"{why}, in the expression {self._text}")


def _evaluate_or(parts: list[_Thunk], as_bool: Callable[[Value], bool]) -> bool:
    """Evaluate CEL's ||: a true operand wins over an error in another."""
    missing: Absent | None = None
    for part in parts:
        try:
            if as_bool(part()):
                return True
        except Absent as error:
            missing = error
    if missing is not None:
        raise missing
    return False


def _extract(text: str, template: str) -> str:
    """Return the text at the template's single {place}; empty if the rest of the template does not match."""
    match = re.fullmatch(r"([^{}]*)\{\w+\}([^{}]*)", template)
    if match is None:
        raise Unsupported(f"template of extract() without exactly one {{place}}: {template}")
    before, after = cast("tuple[str, str]", match.groups())
    start = text.find(before)
    if start < 0:
        return ""
    remainder = text[start + len(before) :]
    if not after:
        return remainder
    end = remainder.find(after)
    return "" if end < 0 else remainder[:end]


def _matches(text: str, pattern: str) -> bool:
    if "(?" in pattern or re.search(r"\\[1-9]", pattern):
        raise Unsupported(f"regular expression that RE2 and Python may interpret differently: {pattern}")
    return re.search(pattern, text) is not None


_FUNCTIONS: Final[Mapping[str, Callable[[str, str], Value]]] = {
    "startsWith": str.startswith,
    "endsWith": str.endswith,
    "contains": lambda text, part: part in text,
    "matches": _matches,
    "extract": _extract,
}
