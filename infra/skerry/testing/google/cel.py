"""The Common Expression Language, as much of it as conditions and mappings of this project use: pure functions.

Strings, lists, ==, !=, in, &&, ||, !, + and ?:, and the functions startsWith, endsWith, contains, matches, extract and
api.getAttribute. What is not known here raises Unsupported: a test must not pass because a condition was skipped.
Sources: "Attribute reference for IAM Conditions" (extract, getAttribute), "Workload Identity Federation" (mappings).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, cast

Value: TypeAlias = "str | bool | list[Value]"
Context: TypeAlias = Mapping[str, Value]
"""What names mean, by their full name: `resource.name`, `assertion.arn`; attributes of the API by `api:NAME`."""

_WORD: Final = re.compile(
    r"\s*(?:(?P<string>\"[^\"\\\n]*\"|'[^'\\\n]*')|(?P<name>[A-Za-z_]\w*)|(?P<sign>&&|\|\||==|!=|[!()\[\],.?:+]))"
)


class Unsupported(Exception):  # noqa: N818  named for what happened
    """An expression that this evaluator does not know, or that is none."""


class Absent(Exception):  # noqa: N818  named for what happened
    """A name that has no value here; CEL calls it an error, and a condition with an error does not hold."""


def holds(expression: str, context: Context) -> bool:
    """Whether a condition is true. Raises Unsupported."""
    try:
        value = evaluated(expression, context)
    except Absent:
        return False
    if not isinstance(value, bool):
        raise Unsupported(f"a condition that is no boolean: {expression}")
    return value


def evaluated(expression: str, context: Context) -> Value:
    """What it is worth. Raises Unsupported, and Absent where a name has no value."""
    reader = _Reader(expression, context)
    value = reader.choice()
    reader.end()
    return value()


_Later: TypeAlias = Callable[[], Value]


class _Reader:
    """Reads an expression into a function; what a && or a ?: does not reach is not evaluated."""

    def __init__(self, text: str, context: Context) -> None:
        self._text = text
        self._context = context
        self._words = self._read(text)
        self._at = 0

    def choice(self) -> _Later:
        condition = self._either()
        if not self._took("?"):
            return condition
        yes = self.choice()
        self._need(":")
        no = self.choice()
        return lambda: yes() if self._bool(condition()) else no()

    def end(self) -> None:
        if self._at < len(self._words):
            raise self._bad(f"unexpected {self._words[self._at]}")

    def _either(self) -> _Later:
        parts = [self._both()]
        while self._took("||"):
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else lambda: _any(parts, self._bool)

    def _both(self) -> _Later:
        parts = [self._compared()]
        while self._took("&&"):
            parts.append(self._compared())
        return parts[0] if len(parts) == 1 else lambda: all(self._bool(part()) for part in parts)

    def _compared(self) -> _Later:
        left = self._sum()
        if self._took("=="):
            right = self._sum()
            return lambda: left() == right()
        if self._took("!="):
            right = self._sum()
            return lambda: left() != right()
        if self._took("in"):
            right = self._sum()
            return lambda: left() in self._list(right())
        return left

    def _sum(self) -> _Later:
        parts = [self._unary()]
        while self._took("+"):
            parts.append(self._unary())
        return parts[0] if len(parts) == 1 else lambda: "".join(self._str(part()) for part in parts)

    def _unary(self) -> _Later:
        if self._took("!"):
            inner = self._unary()
            return lambda: not self._bool(inner())
        return self._called(self._primary())

    def _primary(self) -> _Later:
        if self._took("("):
            inner = self.choice()
            self._need(")")
            return inner
        if self._took("["):
            items = self._items("]")
            return lambda: [item() for item in items]
        word = self._next()
        if word[0] in "\"'":
            return lambda: word[1:-1]
        if word in {"true", "false"}:
            return lambda: word == "true"
        if not word.isidentifier():
            raise self._bad(f"unexpected {word}")
        return self._name(word)

    def _name(self, name: str) -> _Later:
        while self._peek() == "." and self._peek(2) != "(":
            self._next()
            name += "." + self._next()
        if name == "api" and self._peek() == "." and self._peek(1) == "getAttribute":
            self._at += 2
            self._need("(")
            asked, otherwise = self._items(")")
            return lambda: self._context.get(f"api:{self._str(asked())}", otherwise())
        if self._peek() == "(":
            raise self._bad(f"unknown function {name}")
        return lambda: self._value(name)

    def _value(self, name: str) -> Value:
        if name not in self._context:
            raise Absent(name)
        return self._context[name]

    def _called(self, value: _Later) -> _Later:
        while self._took("."):
            name = self._next()
            self._need("(")
            arguments = self._items(")")
            if name not in _FUNCTIONS or len(arguments) != 1:
                raise self._bad(f"unknown function {name}")
            value = self._bound(_FUNCTIONS[name], value, arguments[0])
        return value

    def _bound(self, function: Callable[[str, str], Value], on: _Later, argument: _Later) -> _Later:
        return lambda: function(self._str(on()), self._str(argument()))

    def _items(self, closing: str) -> list[_Later]:
        items: list[_Later] = []
        while not self._took(closing):
            if items:
                self._need(",")
            items.append(self.choice())
        return items

    def _read(self, text: str) -> list[str]:
        words: list[str] = []
        at = 0
        while at < len(text.rstrip()):
            found = _WORD.match(text, at)
            if found is None:
                raise self._bad(f"cannot read from {text[at : at + 20]!r}")
            words.append(found[0].strip())
            at = found.end()
        return words

    def _peek(self, ahead: int = 0) -> str:
        return self._words[self._at + ahead] if self._at + ahead < len(self._words) else ""

    def _next(self) -> str:
        if not (word := self._peek()):
            raise self._bad("it ends too early")
        self._at += 1
        return word

    def _took(self, word: str) -> bool:
        if self._peek() != word:
            return False
        self._at += 1
        return True

    def _need(self, word: str) -> None:
        if not self._took(word):
            raise self._bad(f"expected {word}, not {self._peek() or 'its end'}")

    def _bool(self, value: Value) -> bool:
        if not isinstance(value, bool):
            raise self._bad(f"{value!r} is no boolean")
        return value

    def _str(self, value: Value) -> str:
        if not isinstance(value, str):
            raise self._bad(f"{value!r} is no string")
        return value

    def _list(self, value: Value) -> list[Value]:
        if not isinstance(value, list):
            raise self._bad(f"{value!r} is no list")
        return value

    def _bad(self, why: str) -> Unsupported:
        return Unsupported(f"{why}, in the expression {self._text}")


def _any(parts: list[_Later], as_bool: Callable[[Value], bool]) -> bool:
    """CEL's ||: one side that is true wins over an error on another."""
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
    """What stands at the template's one {place}; empty if the rest of the template does not fit."""
    found = re.fullmatch(r"([^{}]*)\{\w+\}([^{}]*)", template)
    if found is None:
        raise Unsupported(f"a template of extract() without exactly one {{place}}: {template}")
    before, after = cast("tuple[str, str]", found.groups())
    start = text.find(before)
    if start < 0:
        return ""
    rest = text[start + len(before) :]
    if not after:
        return rest
    stop = rest.find(after)
    return "" if stop < 0 else rest[:stop]


def _matches(text: str, pattern: str) -> bool:
    if "(?" in pattern or re.search(r"\\[1-9]", pattern):
        raise Unsupported(f"a regular expression that RE2 and Python may read differently: {pattern}")
    return re.search(pattern, text) is not None


_FUNCTIONS: Final[Mapping[str, Callable[[str, str], Value]]] = {
    "startsWith": str.startswith,
    "endsWith": str.endswith,
    "contains": lambda text, part: part in text,
    "matches": _matches,
    "extract": _extract,
}
