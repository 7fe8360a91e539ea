"""What SageMaker would refuse of a spec is refused before anybody is asked, with the field and what to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.sagemaker.ground import IMAGE

from skerry.infra import spec
from skerry.infra.errors import SpecInvalid

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
    "a machine of EC2": (
        changed("ml.g6e.xlarge", "g6e.xlarge"),
        (
            f"{TARGET}.instance: must be a type of machine as SageMaker calls it, ml. first; got 'g6e.xlarge'; "
            "write e.g. instance: ml.g6e.xlarge"
        ),
    ),
    "no machine": (
        changed("instance: ml.g6e.xlarge, ", ""),
        f"{TARGET}.instance: missing; write e.g. instance: ml.g6e.xlarge",
    ),
    "a field of Batch": (
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
    "a wait for machines that do not come and go": (
        changed("spot: true", "max_wait: 48h"),
        (
            f"{TARGET}.max_wait: is how long a job may wait for spare machines, and these are not; take it out, or "
            "write spot: true"
        ),
    ),
    "a wait that is less than the running": (
        changed("spot: true", "spot: true, max_runtime: 24h, max_wait: 12h"),
        (f"{TARGET}.max_wait: counts the running in, and is less than max_runtime: 1d; write max_wait: 1d or more"),
    ),
    "a queue for machines without GPUs": (
        changed("ml.g6e.xlarge, spot: true", "ml.c7i.xlarge, max_pending: 12h"),
        (
            f"{TARGET}.max_pending: has no effect on ml.c7i.xlarge: SageMaker keeps to it for ml.g, ml.p and ml.trn "
            "alone; take it out"
        ),
    ),
    "half a network": (
        changed("spot: true", "byo: {subnets: [subnet-0a]}"),
        (
            f"{TARGET}.byo.subnets: needs security_groups beside it: a machine is in both or in SageMaker's own "
            "network; add security_groups"
        ),
    ),
    "an image elsewhere": (
        changed(IMAGE, "ghcr.io/acme/train:1"),
        (
            "image: SageMaker runs images of ECR alone; push it there (scripts/image push), and write e.g. image: "
            "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu"
        ),
    ),
    "no image": (
        changed(f"image: {IMAGE}\n", ""),
        (
            "image: missing, and containers are made of one; write e.g. image: "
            "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu"
        ),
    ),
    "a folder": (
        changed("s3://acme/runs", "file://store"),
        (
            f"{TARGET}: SageMaker wants a place in S3 for what a script leaves in /opt/ml/model, and the store is not "
            "there; write e.g. output: s3://my-bucket/artifacts"
        ),
    ),
    "artifacts with a store in Cloud Storage": (
        changed("s3://acme/runs", "gs://acme/runs"),
        (
            f"{TARGET}: SageMaker wants a place in S3 for what a script leaves in /opt/ml/model, and the store is not "
            "there; write e.g. output: s3://my-bucket/artifacts"
        ),
    ),
    "artifacts in a folder": (
        changed("spot: true", "output: file:///tmp"),
        (
            f"{TARGET}.output: must be a place in S3: s3://bucket/prefix; got 'file:///tmp'; write e.g. output: "
            "s3://my-bucket/artifacts"
        ),
    ),
    "artifacts in a bucket that S3 refuses": (
        changed("spot: true", "output: s3://a..b/x"),
        (
            f"{TARGET}.output: the bucket 'a..b' must not look like a network address, nor hold two dots in a row; "
            "write e.g. output: s3://my-bucket/artifacts"
        ),
    ),
    "a role for each of many": (
        changed("count: 4", "count: 201").replace("spot: true", "role: replica"),
        (
            f"{TARGET}.role: 201 replicas would need a role each, and IAM allows 1,000 in an account; above 200 write "
            "role: group"
        ),
    ),
    "a command that no job can be told": (
        changed("[python, train.py]", f"[python, {'x' * 2500}]"),
        ("code.command: is longer than the 2500 characters that SageMaker hands to a job; put it into a script"),
    ),
    "jobs beside processes": (
        GOOD + "  - {name: b, count: 1, target: {kind: local}}\n",
        (
            "replicas[1].target.kind: cannot run beside replicas[0], which is sagemaker: one run has one kind of "
            "target so far; write kind: sagemaker"
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_contradiction_is_told_with_its_field_and_what_to_write(tmp_path: Path, case: str) -> None:
    text, expected = CASES[case]
    path = tmp_path / "skerry.yaml"
    path.write_text(text)
    with pytest.raises(SpecInvalid) as caught:
        spec.load(path)
    assert expected in [str(problem).split(": ", 1)[1] for problem in caught.value.problems]


FINE = {
    "as it is": GOOD,
    "beside Batch": GOOD
    + "  - {name: b, count: 1, target: {kind: aws_batch, region: us-east-1, instance_types: [g5.xlarge]}}\n",
    "many that share a role": changed("count: 4", "count: 1024"),
    "a store in Cloud Storage": changed("s3://acme/runs", "gs://acme/runs").replace(
        "spot: true", "output: s3://acme/x"
    ),
    "a wait as long as the running": changed("spot: true", "spot: true, max_runtime: 24h, max_wait: 24h"),
    "a whole network": changed("spot: true", "byo: {subnets: [subnet-0a], security_groups: [sg-0a]}"),
}


@pytest.mark.parametrize("case", FINE)
def test_what_fits_together_is_taken(tmp_path: Path, case: str) -> None:
    path = tmp_path / "skerry.yaml"
    path.write_text(FINE[case])
    assert spec.load(path).deployed
