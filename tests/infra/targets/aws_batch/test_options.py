"""Checks of the options of AWS Batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.kit import problems_in

if TYPE_CHECKING:
    from pathlib import Path

BATCH = """\
run: tiny
store: s3://acme/runs
image: acme/skerry:gpu
code: {path: ., command: [python, train.py]}
outer: {rounds: 40}
replicas:
  - name: a
    count: 4
    target: {kind: aws_batch, region: us-east-1, instance_types: [g6e.xlarge], gpus: 1}
"""


def batch(old: str, new: str) -> str:
    assert old in BATCH
    return BATCH.replace(old, new)


CASES = {
    "a family instead of a type": (
        batch("g6e.xlarge", "g6e"),
        ("replicas[0].target.instance_types[0]: must be a type of machine with its size, not a family; got 'g6e'"),
    ),
    "no region": (
        batch("region: us-east-1, ", ""),
        "replicas[0].target.region: missing; write e.g. region: us-east-1",
    ),
    "a time that is too short": (
        batch("region: us-east-1", "region: us-east-1, max_runtime: 10s"),
        "replicas[0].target.max_runtime: must be 1m to 365d; got '10s'; write e.g. max_runtime: 24h",
    ),
    "an invalid region": (
        batch("region: us-east-1", "region: virginia"),
        ("replicas[0].target.region: must be a region of AWS; got 'virginia'; write e.g. region: us-east-1"),
    ),
    "a store in a folder": (
        batch("s3://acme/runs", "file://store"),
        ("store: jobs on AWS reach a store in S3 or Cloud Storage; write e.g. store: s3://my-bucket/runs"),
    ),
    "an invalid bucket": (
        batch("s3://acme/runs", "s3://Acme_Runs/x"),
        (
            "store: the bucket 'Acme_Runs' may have lower-case letters, digits, '-' and '.', the first and "
            "last a letter or digit; write e.g. store: s3://my-bucket/runs"
        ),
    ),
    "a bucket like an IP address": (
        batch("s3://acme/runs", "s3://192.168.5.4/x"),
        "store: the bucket '192.168.5.4' must not look like an IP address; write e.g. store: s3://my-bucket/runs",
    ),
    "an invalid prefix": (
        batch("s3://acme/runs", "s3://acme/team a,b"),
        (
            "store: the run's URI is a tag of all resources: letters, digits, '.', '_', '-' and '/', 256 at most; "
            "write e.g. store: s3://my-bucket/runs"
        ),
    ),
    "a prefix that is too long": (
        batch("s3://acme/runs", f"s3://acme/{'x' * 250}"),
        (
            "store: the run's URI is a tag of all resources: letters, digits, '.', '_', '-' and '/', 256 at most; "
            "write e.g. store: s3://my-bucket/runs"
        ),
    ),
    "too many roles": (
        batch("count: 4", "count: 201"),
        (
            "replicas[0].target.role: 201 replicas would need a role each, and IAM allows 1,000 in an account; "
            "above 200 write role: group"
        ),
    ),
    "spot allocation without spot": (
        batch("gpus: 1", "allocation: spot_capacity_optimized"),
        (
            "replicas[0].target.allocation: spot_capacity_optimized is for spot machines, and these are not; "
            "write allocation: best_fit_progressive"
        ),
    ),
    "a zone of another region": (
        batch("gpus: 1", "zones: [us-west-2a]"),
        "replicas[0].target.zones[0]: us-west-2a is not in us-east-1; write e.g. us-east-1a",
    ),
    "byo machines and a byo queue": (
        batch("gpus: 1", "byo: {queue: q, subnets: [subnet-0a]}"),
        "replicas[0].target.byo.subnets: is not used beside queue, which has its own; take one of them out",
    ),
    "a limit below a minute": (
        BATCH + "limits: {max_hours: 0.01}\n",
        ("limits.max_hours: is 36 s, and 60 s are the least that a job may be limited to; write 0.017 or more"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_invalid_options_are_reported_with_their_field_and_a_correction(tmp_path: Path, case: str) -> None:
    text, expected = CASES[case]
    assert problems_in(tmp_path, text) == [expected]


def test_roles_of_all_groups_count_together_without_byo_roles(tmp_path: Path) -> None:
    more = (
        "  - {{name: b, count: 197, target: {{kind: aws_batch, region: us-east-1, instance_types: [g5.xlarge]{0}}}}}\n"
    )
    [problem] = problems_in(tmp_path, BATCH + more.format(""))
    assert problem.startswith("replicas[1].target.role: 201 replicas")
    assert problems_in(tmp_path, BATCH + more.format(", byo: {job_role: mine}")) == []


@pytest.mark.parametrize("name", ["my-bucket", "a.b.c", "x" * 63])
def test_valid_bucket_name_is_accepted(tmp_path: Path, name: str) -> None:
    assert problems_in(tmp_path, batch("acme/runs", f"{name}/runs")) == []


@pytest.mark.parametrize("name", ["ab", "x" * 64, "-ab", "a..b"])
def test_invalid_bucket_name_is_reported(tmp_path: Path, name: str) -> None:
    (problem,) = problems_in(tmp_path, batch("acme/runs", f"{name}/runs"))
    assert problem.startswith("store: the bucket")
