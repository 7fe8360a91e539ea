"""The filters of lists: what they let through, and that what is not known is refused."""

from __future__ import annotations

import pytest

from skerry.testing.google.list_filters import parse_filter
from skerry.testing.google.refusals import Refusal

ENTRY = {
    "severity": "WARNING",
    "timestamp": "2026-01-01T00:00:05Z",
    "insertId": "b",
    "resource": {"type": "ml_job", "labels": {"job_id": "77"}},
    "labels": {"ml.googleapis.com/trial_id": "", "run": "tiny"},
    "displayName": 'a "quoted" name',
}


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("", True),
        ('resource.type="ml_job"', True),
        ("resource.type = ml_job", True),
        ('resource.type="k8s"', False),
        ('resource.type!="k8s"', True),
        ('resource.labels.job_id="77" AND resource.type="ml_job"', True),
        ('resource.labels.job_id="77" resource.type="k8s"', False),
        ('resource.type="k8s" OR resource.labels.job_id="77"', True),
        # OR binds closer than AND.
        ('resource.type="k8s" AND resource.type="x" OR resource.labels.job_id="77"', False),
        ('(resource.type="k8s" AND resource.type="x") OR resource.labels.job_id="77"', True),
        ('NOT resource.type="k8s"', True),
        ('-resource.type="ml_job"', False),
        ('timestamp>="2026-01-01T00:00:05Z"', True),
        ('timestamp>"2026-01-01T00:00:05Z"', False),
        ('timestamp>"2026-01-01T00:59:00+01:00"', True),
        ('timestamp<="2026-01-01T00:00:05.000Z"', True),
        ("severity>=INFO", True),
        ("severity>=ERROR", False),
        ("severity<ERROR", True),
        ("labels.run=tiny", True),
        ("labels.run:*", True),
        ("labels.other:*", False),
        ("labels.other!=x", True),
        ('labels."ml.googleapis.com/trial_id"=""', True),
        ("labels.run:TIN", True),
        ('labels.run="ti*"', True),
        ('display_name="a \\"quoted\\" name"', True),
        ('insertId>"a"', True),
    ],
)
def test_filter_selects_matching_entries(text: str, passes: bool) -> None:  # noqa: FBT001
    assert parse_filter(text, lambda _: True)(ENTRY) is passes


@pytest.mark.parametrize(
    "text",
    ["resource.type", "resource.type=", "=x", '("a"', "a=b)", "a=b OR", "NOT", "a ~ b", 'a="b', "a=b & c=d", "!a=b"],
)
def test_malformed_filter_is_refused(text: str) -> None:
    with pytest.raises(Refusal, match="Unparseable filter"):
        parse_filter(text, lambda _: True)({})


def test_unknown_field_is_refused() -> None:
    with pytest.raises(Refusal, match=r"unknown field resource\.typ"):
        parse_filter("resource.typ=x", lambda name: name == "resource.type")
