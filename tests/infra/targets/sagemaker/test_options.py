"""Checks of the options of SageMaker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.kit import problems_in
from tests.infra.targets.sagemaker.kit import IMAGE

if TYPE_CHECKING:
    from pathlib import Path

GOOD = f"""\
run: tiny
store: s3://acme/runs
image: {IMAGE}
code: {{path: ., command: [python, train.py]}}
outer: {{rounds: 40}}
replicas:
  - name: a
    count: 4
    target: {{kind: sagemaker, region: us-east-1, instance: ml.g6e.xlarge, spot: true}}
"""
TARGET = "replicas[0].target"


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


CASES = {
    "a type of EC2": (
        changed("ml.g6e.xlarge", "g6e.xlarge"),
        (
            f"{TARGET}.instance: must be a type of machine as SageMaker calls it, ml. first; got 'g6e.xlarge'; "
            "write e.g. instance: ml.g6e.xlarge"
        ),
    ),
    "no instance": (
        changed("instance: ml.g6e.xlarge, ", ""),
        f"{TARGET}.instance: missing; write e.g. instance: ml.g6e.xlarge",
    ),
    "an option of Batch": (
        changed("spot: true", "spot: true, attempts: 3"),
        (
            f"{TARGET}.attempts: unknown field; the fields here are kind, region, instance, gpus, spot, max_runtime, "
            "max_wait, max_pending, retries, volume, kms_key, output, role, byo"
        ),
    ),
    "too long a job": (
        changed("spot: true", "max_runtime: 29d"),
        f"{TARGET}.max_runtime: must be 1m to 28d; got '29d'; write e.g. max_runtime: 24h",
    ),
    "too short a job": (
        changed("spot: true", "max_runtime: 10s"),
        f"{TARGET}.max_runtime: must be 1m to 28d; got '10s'; write e.g. max_runtime: 24h",
    ),
    "too long a wait": (
        changed("spot: true", "spot: true, max_wait: 31d"),
        f"{TARGET}.max_wait: must be 1m to 30d; got '31d'; write e.g. max_wait: 48h",
    ),
    "too short a queue": (
        changed("spot: true", "max_pending: 10m"),
        f"{TARGET}.max_pending: must be 30m to 28d; got '10m'; write e.g. max_pending: 12h",
    ),
    "max_wait without spot": (
        changed("spot: true", "max_wait: 48h"),
        (f"{TARGET}.max_wait: is only for spot machines; remove it, or write spot: true"),
    ),
    "max_wait below max_runtime": (
        changed("spot: true", "spot: true, max_runtime: 24h, max_wait: 12h"),
        (f"{TARGET}.max_wait: includes the running time, and is less than max_runtime: 1d; write max_wait: 1d or more"),
    ),
    "max_pending without GPUs": (
        changed("ml.g6e.xlarge, spot: true", "ml.c7i.xlarge, max_pending: 12h"),
        (
            f"{TARGET}.max_pending: has no effect on ml.c7i.xlarge: SageMaker applies it to ml.g, ml.p and ml.trn "
            "only; remove it"
        ),
    ),
    "subnets without security groups": (
        changed("spot: true", "byo: {subnets: [subnet-0a]}"),
        (
            f"{TARGET}.byo.subnets: needs security_groups as well: a machine has both, or is in SageMaker's own "
            "network; add security_groups"
        ),
    ),
    "an image of another registry": (
        changed(IMAGE, "ghcr.io/acme/train:1"),
        (
            "image: SageMaker runs images of ECR only; push it there (scripts/image push), and write e.g. image: "
            "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu"
        ),
    ),
    "a store in a folder": (
        changed("s3://acme/runs", "file://store"),
        (
            f"{TARGET}: SageMaker needs a place in S3 for the files in /opt/ml/model, and the store is not in "
            "S3; write e.g. output: s3://my-bucket/artifacts"
        ),
    ),
    "artifacts with a store in Cloud Storage": (
        changed("s3://acme/runs", "gs://acme/runs"),
        (
            f"{TARGET}: SageMaker needs a place in S3 for the files in /opt/ml/model, and the store is not in "
            "S3; write e.g. output: s3://my-bucket/artifacts"
        ),
    ),
    "artifacts in a folder": (
        changed("spot: true", "output: file:///tmp"),
        (
            f"{TARGET}.output: must be a place in S3: s3://bucket/prefix; got 'file:///tmp'; write e.g. output: "
            "s3://my-bucket/artifacts"
        ),
    ),
    "artifacts in an invalid bucket": (
        changed("spot: true", "output: s3://a..b/x"),
        (f"{TARGET}.output: the bucket 'a..b' has two dots in a row; write e.g. output: s3://my-bucket/artifacts"),
    ),
    "too many roles": (
        changed("count: 4", "count: 201").replace("spot: true", "role: replica"),
        (
            f"{TARGET}.role: 201 replicas would need a role each, and IAM allows 1,000 in an account; above 200 write "
            "role: group"
        ),
    ),
    "a command that is too long": (
        changed("[python, train.py]", f"[python, {'x' * 2500}]"),
        ("code.command: is longer than the 2500 characters that SageMaker passes to a job; put it into a script"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_invalid_options_are_reported_with_their_field_and_a_correction(tmp_path: Path, case: str) -> None:
    text, expected = CASES[case]
    assert expected in problems_in(tmp_path, text)


VALID = {
    "the spec of this module": GOOD,
    "with a group on Batch": GOOD
    + "  - {name: b, count: 1, target: {kind: aws_batch, region: us-east-1, instance_types: [g5.xlarge]}}\n",
    "many replicas with one role": changed("count: 4", "count: 1024"),
    "a store in Cloud Storage": changed("s3://acme/runs", "gs://acme/runs").replace(
        "spot: true", "output: s3://acme/x"
    ),
    "max_wait equal to max_runtime": changed("spot: true", "spot: true, max_runtime: 24h, max_wait: 24h"),
    "subnets with security groups": changed("spot: true", "byo: {subnets: [subnet-0a], security_groups: [sg-0a]}"),
}


@pytest.mark.parametrize("case", VALID)
def test_valid_options_are_accepted(tmp_path: Path, case: str) -> None:
    assert problems_in(tmp_path, VALID[case]) == []
