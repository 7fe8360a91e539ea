"""Conditions of IAM policies, evaluated as AWS documents them: pure functions of a statement and a request's context.

What is not known here raises NotImplementedError: a test must not pass because a condition was skipped.
Source: IAM user guide, "IAM JSON policy elements: Condition operators" and "global condition context keys".
"""

from __future__ import annotations

import ipaddress
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

Context: TypeAlias = Mapping[str, str]
"""What is known of a request, by lower-case condition key."""

# Keys that a request of this sandbox never has: it knows no organisation, no VPC endpoint and no second factor.
_NEVER: Final = frozenset(
    {
        "aws:multifactorauthpresent",
        "aws:principalorgid",
        "aws:sourceaccount",
        "aws:sourcearn",
        "aws:sourcevpc",
        "aws:sourcevpce",
        "sts:externalid",
    }
)
_VARIABLE: Final = re.compile(r"\$\{([^}]+)\}")

_Test: TypeAlias = Callable[[str, str], bool]


def glob(pattern: str, text: str) -> bool:
    """Whether `text` is what a policy's pattern means: * is anything, ? one character."""
    parts = (".*" if part == "*" else "." if part == "?" else re.escape(part) for part in re.split(r"([*?])", pattern))
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None


def holds(condition: Mapping[str, Mapping[str, Any]], context: Context) -> bool:
    """Whether every operator of a Condition element is true of the context."""
    return all(_holds(name, key, wanted, context) for name, keys in condition.items() for key, wanted in keys.items())


def resolved(text: str, context: Context) -> str:
    """`text` with its policy variables replaced."""
    return _VARIABLE.sub(lambda found: _value(found[1], context) or "", text)


def _holds(name: str, key: str, wanted: Any, context: Context) -> bool:
    values = [resolved(_text(one), context) for one in _each(wanted)]
    name = name.rpartition(":")[2]  # ForAnyValue, ForAllValues: no key here has several values
    told = _value(key, context)
    if name == "Null":
        return (told is None) is (values[0].lower() == "true")
    is_optional = name.endswith("IfExists")
    name = name.removesuffix("IfExists")
    is_negated = "Not" in name
    test = _TESTS.get(name.replace("Not", ""))
    if test is None:
        raise NotImplementedError(f"the sandbox does not know the condition operator {name}")
    if told is None:
        return is_optional or is_negated
    return any(test(value, told) for value in values) is not is_negated


def _value(key: str, context: Context) -> str | None:
    key = key.lower()
    if key in context:
        return context[key] or None
    if key in _NEVER:
        return None
    raise NotImplementedError(f"the sandbox does not know the condition key {key}")


def _each(wanted: Any) -> Sequence[Any]:
    return wanted if isinstance(wanted, list) else [wanted]  # pyright: ignore[reportUnknownVariableType]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(compare: Callable[[float, float], bool]) -> _Test:
    return lambda wanted, told: compare(float(told), float(wanted))


def _in_network(wanted: str, told: str) -> bool:
    return ipaddress.ip_address(told) in ipaddress.ip_network(wanted, strict=False)


_TESTS: Final[dict[str, _Test]] = {
    "StringEquals": operator.eq,
    "StringEqualsIgnoreCase": lambda wanted, told: wanted.lower() == told.lower(),
    "StringLike": glob,
    "ArnEquals": glob,
    "ArnLike": glob,
    "Bool": lambda wanted, told: wanted.lower() == told.lower(),
    "NumericEquals": _number(operator.eq),
    "NumericLessThan": _number(operator.lt),
    "NumericLessThanEquals": _number(operator.le),
    "NumericGreaterThan": _number(operator.gt),
    "NumericGreaterThanEquals": _number(operator.ge),
    "IpAddress": _in_network,
}
