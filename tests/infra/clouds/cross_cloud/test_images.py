"""Every image of a run in two clouds is checked once, in the registry of its own cloud."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.deploy.account import DIGEST, Operator

from skerry.infra import targets
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.errors import SpecInvalid
from skerry.infra.spec import model
from skerry.runtime.clock import SystemClock
from skerry.testing.plugin import skerry_clouds, skerry_google, skerry_sandbox

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.target import Check
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


def write_spec(folder: Path, **checks: str) -> Path:
    (folder / "train").mkdir()
    (folder / "train" / "train.py").write_text("print('training')\n")
    path = folder / "skerry.yaml"
    path.write_text(SPEC.format(ecr=ECR, **checks))
    return path


def images(folder: Path, clouds: Clouds, store: str, digest: str, vertex: str) -> list[Check]:
    path = write_spec(folder, store=store, digest=digest, vertex=vertex, project=clouds.google.project)
    deployment = Operator(path, clouds.environment).deployment()
    ground = deployment.context
    checks = [*deployment.home.checks(ground)]
    checks += [check for target, groups in deployment.groups() for check in target.checks(ground, groups)]
    return [check for check in checks if check.name.startswith("image")]


def push(clouds: Clouds, machine: str) -> str:
    """An image for such machines in ECR; its digest."""
    aws = Aws(SystemClock(), clouds.environment)
    aws.call("ecr", "us-east-1", "create_repository", repositoryName="skerry")
    entry = {"digest": f"sha256:{DIGEST}", "platform": {"architecture": machine}}
    text = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]})
    response = aws.call("ecr", "us-east-1", "put_image", repositoryName="skerry", imageManifest=text, imageTag=machine)
    return str(response["image"]["imageId"]["imageDigest"])


@pytest.mark.slow
@pytest.mark.parametrize("store", ["s3://acme-skerry/runs", "gs://acme-skerry/runs"])
def test_every_image_is_checked_once(tmp_path: Path, skerry_clouds: Clouds, store: str) -> None:
    checks = images(tmp_path, skerry_clouds, store, push(skerry_clouds, "amd64"), f"@sha256:{DIGEST}")
    assert sorted((check.name, check.ok) for check in checks) == [
        ("image", True),
        ("image-again", True),
        ("image-v", False),
    ]
    (absent,) = [check for check in checks if check.name == "image-v"]
    assert absent.advice == "push it: scripts/image push"


@pytest.mark.slow
def test_image_for_other_machines_is_reported(tmp_path: Path, skerry_clouds: Clouds) -> None:
    checks = images(tmp_path, skerry_clouds, "gs://acme-skerry/runs", push(skerry_clouds, "arm64"), ":1")
    assert {check.name: (check.ok, check.advice) for check in checks} == {
        "image": (False, "build it with --platform linux/amd64"),
        "image-again": (False, "build it with --platform linux/amd64"),
        "image-v": (False, "name it by its digest: repository@sha256:..."),
    }


def test_image_that_vertex_cannot_pull_is_a_spec_error(tmp_path: Path) -> None:
    path = write_spec(tmp_path, store="s3://acme/runs", digest=f"sha256:{DIGEST}", vertex=":1", project="acme-diloco")
    (own,) = [line for line in path.read_text().splitlines() if "docker.pkg.dev" in line]
    path.write_text(path.read_text().replace(own + "\n", ""))
    with pytest.raises(SpecInvalid) as caught:
        model.load(path, targets.kinds())
    (problem,) = caught.value.problems
    assert problem.path == "replicas[3].image"
    assert problem.text == (
        "Vertex AI runs images of Artifact Registry and Docker Hub only; push it there (scripts/image push), and "
        "write e.g. image: us-central1-docker.pkg.dev/acme-diloco/skerry/replica:gpu"
    )
