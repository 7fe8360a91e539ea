"""Conditions as the IAM user guide words them."""

from __future__ import annotations

from typing import Any

import pytest

from skerry.testing.aws.conditions import glob, holds, resolved

CONTEXT = {
    "aws:securetransport": "true",
    "s3:tlsversion": "1.3",
    "s3:if-none-match": "",
    "s3:prefix": "runs/a/",
    "aws:username": "ann",
    "aws:sourceip": "10.1.2.3",
}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ({}, True),
        ({"Bool": {"aws:SecureTransport": "false"}}, False),
        ({"Bool": {"aws:SecureTransport": True}}, True),
        ({"NumericLessThan": {"s3:TlsVersion": 1.2}}, False),
        ({"NumericGreaterThanEquals": {"s3:TlsVersion": "1.3"}}, True),
        ({"Null": {"s3:if-none-match": "true"}}, True),
        ({"Null": {"s3:if-none-match": "false"}}, False),
        ({"Null": {"s3:prefix": "true"}}, False),
        ({"StringLike": {"s3:prefix": ["runs/b/*", "runs/a/*"]}}, True),
        ({"StringNotLike": {"s3:prefix": ["runs/b/*", "runs/a/*"]}}, False),
        ({"StringNotEquals": {"s3:prefix": "runs/b/"}}, True),
        ({"StringEquals": {"s3:if-none-match": "*"}}, False),
        ({"StringNotEquals": {"s3:if-none-match": "*"}}, True),
        ({"StringEqualsIfExists": {"aws:PrincipalOrgID": "o-1"}}, True),
        ({"StringEquals": {"aws:PrincipalOrgID": "o-1"}}, False),
        ({"ForAnyValue:StringEquals": {"aws:username": "ann"}}, True),
        ({"StringLike": {"s3:prefix": "runs/${aws:username}/*"}}, False),
        ({"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}}, True),
        ({"NotIpAddress": {"aws:SourceIp": "10.0.0.0/8"}}, False),
        ({"Bool": {"aws:SecureTransport": "true"}, "StringEquals": {"s3:prefix": "x"}}, False),
    ],
)
def test_a_condition_holds_as_documented(
    condition: dict[str, Any],
    expected: bool,  # noqa: FBT001  a column of the table
) -> None:
    assert holds(condition, CONTEXT) is expected


@pytest.mark.parametrize(
    "condition", [{"DateLessThan": {"aws:username": "2030"}}, {"StringEquals": {"aws:ResourceTag/x": "1"}}]
)
def test_unknown_operators_and_keys_raise_not_implemented(condition: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError):
        holds(condition, CONTEXT)


def test_patterns_escape_all_but_their_wildcards() -> None:
    assert glob("arn:aws:s3:::a.b/*", "arn:aws:s3:::a.b/c/d")
    assert not glob("arn:aws:s3:::a.b/*", "arn:aws:s3:::axb/c")
    assert glob("v?", "v1")
    assert not glob("v?", "v12")
    assert resolved("home/${aws:username}/*", CONTEXT) == "home/ann/*"
