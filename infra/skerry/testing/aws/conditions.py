"""Evaluates conditions of IAM policies as AWS documents them: pure functions of a statement and a request's context.

Unknown operators and keys raise NotImplementedError: a test must not pass because a condition was skipped.
Source: IAM user guide, "IAM JSON policy elements: Condition operators" and "global condition context keys".
"""

from __future__ import annotations

import ipaddress
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

Context: TypeAlias = Mapping[str, str]
"""Facts about a request, by lower-case condition key."""

# Keys that no request to this sandbox has: it has no organisation, no VPC endpoint and no second factor.
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
_REQUEST_TAG: Final = "aws:requesttag/"
_VARIABLE: Final = re.compile(r"\$\{([^}]+)\}")

_Test: TypeAlias = Callable[[str, str], bool]


def glob(pattern: str, text: str) -> bool:
    """Return True if `text` matches a policy's pattern: * is any text, ? one character."""
    parts = (".*" if part == "*" else "." if part == "?" else re.escape(part) for part in re.split(r"([*?])", pattern))
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None


def holds(condition: Mapping[str, Mapping[str, Any]], context: Context) -> bool:
    """Return True if every operator of a Condition element is true in the context."""
    return all(
        _holds(name, key, expected, context) for name, keys in condition.items() for key, expected in keys.items()
    )


def training_job_context(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the condition keys of a request to SageMaker: CreateTrainingJob, AddTags. Several values have commas."""
    network: Mapping[str, Any] = request.get("VpcConfig", {})
    return {
        "sagemaker:instancetypes": str(request.get("ResourceConfig", {}).get("InstanceType", "")),
        "sagemaker:keepaliveperiod": str(request.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds", "")),
        "sagemaker:taggingaction": "CreateTrainingJob" if "TrainingJobName" in request else "",
        "sagemaker:maxruntimeinseconds": str(request.get("StoppingCondition", {}).get("MaxRuntimeInSeconds", "")),
        "sagemaker:vpcsubnets": ",".join(network.get("Subnets", [])),
        "sagemaker:vpcsecuritygroupids": ",".join(network.get("SecurityGroupIds", [])),
        **{f"{_REQUEST_TAG}{tag['Key'].lower()}": str(tag["Value"]) for tag in request.get("Tags", [])},
    }


def resolved(text: str, context: Context) -> str:
    """Return `text` with its policy variables replaced."""
    return _VARIABLE.sub(lambda match: _value(match[1], context) or "", text)


def _holds(name: str, key: str, expected: Any, context: Context) -> bool:
    values = [resolved(_text(value), context) for value in as_list(expected)]
    quantifier, _, name = name.rpartition(":")
    actual = _value(key, context)
    if quantifier == "ForAllValues":  # also true without any value; elsewhere no key here has several
        parts = [] if actual is None else actual.split(",")
        return all(any(_TESTS[name](value, part) for value in values) for part in parts)
    if name == "Null":
        return (actual is None) is (values[0].lower() == "true")
    is_optional = name.endswith("IfExists")
    name = name.removesuffix("IfExists")
    is_negated = "Not" in name
    test = _TESTS.get(name.replace("Not", ""))
    if test is None:
        raise NotImplementedError(f"condition operator not supported by the sandbox: {name}")
    if actual is None:
        return is_optional or is_negated
    return any(test(value, actual) for value in values) is not is_negated


def _value(key: str, context: Context) -> str | None:
    key = key.lower()
    if key in context:
        return context[key] or None
    if key in _NEVER or key.startswith(_REQUEST_TAG):
        return None
    raise NotImplementedError(f"condition key not supported by the sandbox: {key}")


def as_list(value: Any) -> Sequence[Any]:
    """Return a policy's value, which may be a single element, as a list."""
    return value if isinstance(value, list) else [value]  # pyright: ignore[reportUnknownVariableType]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(compare: Callable[[float, float], bool]) -> _Test:
    return lambda expected, actual: compare(float(actual), float(expected))


def _in_network(expected: str, actual: str) -> bool:
    return ipaddress.ip_address(actual) in ipaddress.ip_network(expected, strict=False)


_TESTS: Final[dict[str, _Test]] = {
    "StringEquals": operator.eq,
    "StringEqualsIgnoreCase": lambda expected, actual: expected.lower() == actual.lower(),
    "StringLike": glob,
    "ArnEquals": glob,
    "ArnLike": glob,
    "Bool": lambda expected, actual: expected.lower() == actual.lower(),
    "NumericEquals": _number(operator.eq),
    "NumericLessThan": _number(operator.lt),
    "NumericLessThanEquals": _number(operator.le),
    "NumericGreaterThan": _number(operator.gt),
    "NumericGreaterThanEquals": _number(operator.ge),
    "IpAddress": _in_network,
}
