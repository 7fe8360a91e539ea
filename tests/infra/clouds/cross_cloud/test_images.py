"""Every image of a run in two clouds is checked once, in the registry of its own cloud."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.deploy.account import DIGEST, Operator

from skerry.infra.clouds.aws.session import Aws
from skerry.runtime.clock import SystemClock
from skerry.testing.plugin import skerry_clouds, skerry_google, skerry_sandbox

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.both_clouds import Clouds

__all__ = ["skerry_clouds", "skerry_google", "skerry_sandbox"]

INDEX: Final = "application/vnd.oci.image.index.v1+json"
ECR: Final = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry"
SPEC: Final = """
run: tiny
store: {store}
image: {ecr}@{digest}
code: {{path: train, command: [python, train.py]}}
outer: {{rounds: 4, sync_every: 2}}
replicas:
  - name: b
    count: 1
    target: {{kind: aws_batch, region: us-east-1, instance_types: [c7i.large], vcpus: 2, memory: 1GiB}}
  - name: s
    count: 1
    target: {{kind: sagemaker, region: us-east-1, instance: ml.m5.large, output: s3://acme-artifacts/x}}
  - name: again
    count: 1
    image: {ecr}@{digest}
    target: {{kind: sagemaker, region: us-east-1, instance: ml.m5.large, output: s3://acme-artifacts/x}}
  - name: v
    count: 1
    image: us-central1-docker.pkg.dev/{project}/skerry/replica{vertex}
    target: {{kind: vertex, project: {project}, region: us-central1, machine: n2-standard-4}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("store", ["s3://acme-skerry/runs", "gs://acme-skerry/runs"])
def test_every_image_is_checked_once(tmp_path: Path, skerry_clouds: Clouds, store: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "train.py").write_text("print('training')\n")
    path, project = tmp_path / "skerry.yaml", skerry_clouds.google.project
    digest = push(skerry_clouds)
    path.write_text(SPEC.format(ecr=ECR, store=store, digest=digest, vertex=f"@sha256:{DIGEST}", project=project))
    deployment = Operator(path, skerry_clouds.environment).deployment()
    checks = [*deployment.home.checks(deployment.context)]
    checks += [check for target, groups in deployment.groups() for check in target.checks(deployment.context, groups)]
    images = sorted((check.name, check.ok, check.stops_jobs) for check in checks if check.name.startswith("image"))
    assert images == [
        ("image", True, False),
        ("image-again", True, False),
        ("image-v", False, True),
    ]


def push(clouds: Clouds) -> str:
    """The digest of a new image in ECR."""
    aws = Aws(SystemClock(), clouds.environment)
    aws.call("ecr", "us-east-1", "create_repository", repositoryName="skerry")
    entry = {"digest": f"sha256:{DIGEST}", "platform": {"architecture": "amd64"}}
    text = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]})
    response = aws.call("ecr", "us-east-1", "put_image", repositoryName="skerry", imageManifest=text, imageTag="1")
    return str(response["image"]["imageId"]["imageDigest"])
