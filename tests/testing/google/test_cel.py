"""The part of CEL that conditions use, and that everything else of it is refused loudly."""

from __future__ import annotations

import pytest

from skerry.testing.google.cel import Absent, Unsupported, evaluate, holds

ARN = "arn:aws:sts::123456789012:assumed-role/skerry-replica/i-0123"
# What a provider of AWS without a mapping maps to attribute.aws_role.
DEFAULT = (
    "assertion.arn.contains('assumed-role') ? assertion.arn.extract('{a}assumed-role/') + 'assumed-role/' + "
    "assertion.arn.extract('assumed-role/{r}/') : assertion.arn"
)
CONTEXT = {
    "resource.name": "projects/_/buckets/b/objects/runs/a/x",
    "resource.type": "storage.googleapis.com/Object",
    "assertion.arn": ARN,
    "attribute.aws_role": "skerry-replica",
    "api:storage.googleapis.com/objectListPrefix": "runs/a/",
}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ('resource.name.startsWith("projects/_/buckets/b/objects/runs/a/")', True),
        ("resource.name.startsWith('projects/_/buckets/b/objects/runs/b/')", False),
        ("resource.name.endsWith('/x')", True),
        ("resource.name.contains('/runs/')", True),
        (r'resource.name.matches("objects/runs/[ab]/")', True),
        ("resource.type == 'storage.googleapis.com/Object'", True),
        ("resource.type != 'storage.googleapis.com/Object'", False),
        ("resource.type == 'x' || resource.name.endsWith('x')", True),
        ("resource.type == 'x' && resource.name.endsWith('x')", False),
        ("!(resource.type == 'x') && !resource.name.endsWith('y')", True),
        ("resource.type == 'x' || resource.type == 'y' && true", False),
        ("true || false && false", True),
        ("attribute.aws_role in ['a', 'skerry-replica']", True),
        ("attribute.aws_role in []", False),
        ('api.getAttribute("storage.googleapis.com/objectListPrefix", "").startsWith("runs/a/")', True),
        ('api.getAttribute("storage.googleapis.com/other", "none") == "none"', True),
        ("false && assertion.nothing == 'x'", False),
        ("true || assertion.nothing == 'x'", True),
        ("assertion.nothing == 'x' || true", True),
    ],
)
def test_condition_has_the_documented_value(expression: str, value: bool) -> None:  # noqa: FBT001
    assert holds(expression, CONTEXT) is value


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("assertion.arn.extract('assumed-role/{role}/')", "skerry-replica"),
        ("assertion.arn.extract('{before}assumed-role/')", "arn:aws:sts::123456789012:"),
        ("assertion.arn.extract('assumed-role/skerry-replica/{session}')", "i-0123"),
        ("assertion.arn.extract('user/{name}')", ""),
        ("assertion.arn.extract('assumed-role/{role}?')", ""),
        (
            DEFAULT,
            "arn:aws:sts::123456789012:assumed-role/skerry-replica",
        ),
        ("assertion.arn.contains('user') ? 'user' : 'role'", "role"),
    ],
)
def test_mapping_has_the_documented_value(expression: str, value: str) -> None:
    assert evaluate(expression, CONTEXT) == value


def test_absent_name_makes_condition_false_and_mapping_an_error() -> None:
    assert holds("assertion.nothing == 'x'", CONTEXT) is False
    assert holds("assertion.nothing == 'x' || false", CONTEXT) is False
    with pytest.raises(Absent):
        evaluate("assertion.nothing", CONTEXT)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "resource.name",
        "resource.name.startsWith(",
        "resource.name.startsWith('a', 'b')",
        "resource.name.size() > 3",
        "size(resource.name) == 3",
        "request.time < timestamp('2026-01-01T00:00:00Z')",
        "resource.name == 'a' resource.name == 'b'",
        'resource.name == "a\\"b"',
        "resource.name.matches('(?i)x')",
        r"resource.name.matches('(a)\1')",
        "assertion.arn.extract('no place')",
        "assertion.arn.extract('{two}{places}')",
        "'a' && true",
        "!'a'",
        "true + 'a'",
        "'a' in 'abc'",
        "resource.name[0] == 'p'",
        "[1, 2]",
        "true ? 'a'",
    ],
)
def test_unsupported_expression_is_refused(expression: str) -> None:
    with pytest.raises(Unsupported):
        holds(expression, CONTEXT)
