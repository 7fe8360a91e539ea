"""Checks of the options of Vertex AI."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.kit import problems_in
from tests.infra.targets.vertex.kit import TARGET, spec_of

from skerry.infra import targets
from skerry.infra.spec import model
from skerry.infra.targets.vertex.options import VertexTarget
from skerry.infra.targets.vertex.replica_sizing import fitting

if TYPE_CHECKING:
    from pathlib import Path

PLACE = "replicas[0].target"
WRONG = {
    "an ARM machine": (
        "machine: a4x-highgpu-4g",
        f"{PLACE}.machine: a4x-highgpu-4g is an ARM machine, and the replica image is built for x86_64",
    ),
    "accelerators without a name": (
        "machine: n1-standard-8, accelerators: 2",
        f"{PLACE}.accelerators: needs a name as well; write e.g. accelerator:",
    ),
    "an unknown accelerator": (
        "machine: g2-standard-8, accelerator: nvidia-l40",
        f"{PLACE}.accelerator: must be 'nvidia-l4', 'nvidia-tesla-t4'",
    ),
    "another accelerator than the built-in one": (
        "machine: g2-standard-8, accelerator: nvidia-tesla-t4",
        f"{PLACE}.accelerator: g2-standard-8 has 1 nvidia-l4 built in, and takes no others; write accelerator: nvidia",
    ),
    "another number than is built in": (
        "machine: a2-highgpu-4g, accelerators: 2",
        f"{PLACE}.accelerators: a2-highgpu-4g has 4 nvidia-tesla-a100 built in, and takes no others; write acc",
    ),
    "max_wait without flex_start": (
        "machine: g2-standard-8, scheduling: spot, max_wait: 2h",
        f"{PLACE}.max_wait: is only for flex_start; remove it, or write scheduling:",
    ),
    "an unknown scheduling": (
        "machine: g2-standard-8, scheduling: cheap",
        f"{PLACE}.scheduling: must be 'standard', 'spot' or 'flex_start'; got 'cheap'",
    ),
    "a small disk": ("machine: g2-standard-8, disk: 50GiB", f"{PLACE}.disk: must be at least"),
    "a key in another region": (
        "machine: g2-standard-8, byo: {key: projects/p/locations/us-east1/keyRings/r/cryptoKeys/k}",
        f"{PLACE}.byo.key: is in another region than the machines; it must be projects/.../locations/us-central1/",
    ),
    "a network with a project id": (
        "machine: g2-standard-8, byo: {network: projects/acme-diloco/global/networks/train}",
        f"{PLACE}.byo.network: must be projects/NUMBER/global/networks/NAME",
    ),
    "an address that is no service account": (
        "machine: g2-standard-8, byo: {service_account: me@example.com}",
        f"{PLACE}.byo.service_account: must be the e-mail address of a service account",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_options_are_reported_with_their_field_and_a_correction(tmp_path: Path, case: str) -> None:
    options, expected = WRONG[case]
    (problem,) = problems_in(tmp_path, spec_of(tmp_path, options).read_text())
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("region: us-central1", "region: us-east-1", "target.region: must be a region of Google Cloud"),
        ("project: skerry-sandbox", "project: '123456789012'", "target.project: must be the id of a project of Google"),
        (
            "store: gs://acme/runs",
            "store: az://acme/runs",
            "store: jobs on Vertex AI reach a store in Cloud Storage or S3",
        ),
        (
            "store: gs://acme/runs",
            "store: gs://acme.com/runs",
            "store: the bucket 'acme.com' may have lower-case letters",
        ),
        ("store: gs://acme/runs", "store: s3://192.168.5.4/runs", "store: the bucket '192.168.5.4' must not look like"),
        (
            "store: gs://acme/runs",
            "tags: {'aws:team': a}\nstore: s3://acme/runs",
            "tags: must not begin with aws:, which AWS reserves",
        ),
        ("store: gs://acme/runs", "store: gs://ac/runs", "store: the bucket 'ac' must have 3 to 63 characters"),
        (
            "store: gs://acme/runs",
            "store: gs://acme/r*ns",
            "store: a condition of every permission names the run's prefix",
        ),
        (
            "count: 2, target: {",
            "count: 60, target: {role: replica, ",
            "target.role: 60 replicas would need a service account each, and a project has room for 100; above 50",
        ),
        (
            "image: us-central1-docker.pkg.dev/skerry-sandbox/skerry/replica",
            "image: 123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry",
            "image: Vertex AI runs images of Artifact Registry and Docker Hub only; push it there (scripts/image",
        ),
        ("skerry/replica@", "@", "image: Vertex AI runs images of Artifact Registry and Docker Hub only; push it"),
        ("us-central1-docker.pkg.dev", "ghcr.io", "image: Vertex AI runs images of Artifact Registry and Docker Hub"),
    ],
)
def test_invalid_sections_for_jobs_are_reported(tmp_path: Path, before: str, after: str, expected: str) -> None:
    path = spec_of(tmp_path, TARGET)
    text = path.read_text()
    assert before in text
    (problem,) = problems_in(tmp_path, text.replace(before, after))
    assert expected in problem


def test_groups_of_several_projects_are_reported(tmp_path: Path) -> None:
    path = spec_of(tmp_path, TARGET)
    (group,) = [line for line in path.read_text().splitlines() if "name: vertex" in line]
    other = group.replace("name: vertex", "name: other").replace("project: skerry-sandbox", "project: acme-diloco")
    (problem,) = problems_in(tmp_path, path.read_text() + other + "\n")
    text = "a run has one project, and another group is in skerry-sandbox; write project: skerry-sandbox"
    assert problem == f"replicas[1].target.project: {text}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("machine: g2-standard-8", ("nvidia-l4", 1)),
        ("machine: g2-standard-96, accelerator: nvidia-l4, accelerators: 8", ("nvidia-l4", 8)),
        ("machine: a2-megagpu-16g, scheduling: flex_start, max_wait: 48h", ("nvidia-tesla-a100", 16)),
        ("machine: a3-highgpu-2g, scheduling: spot", ("nvidia-h100-80gb", 2)),
        ("machine: a4-highgpu-8g, disk_type: hyperdisk-balanced", ("nvidia-b200", 8)),
        ("machine: a9-ultragpu-8g, accelerator: nvidia-b200, accelerators: 8", ("nvidia-b200", 8)),
        ("machine: n1-highmem-8, accelerator: nvidia-tesla-v100", ("nvidia-tesla-v100", 1)),
        ("machine: n1-standard-32, accelerator: nvidia-tesla-t4, accelerators: 4", ("nvidia-tesla-t4", 4)),
        ("machine: n2-standard-8, scheduling: spot, disk_type: pd-standard", (None, 0)),
        ("machine: c3-standard-8, disk_type: hyperdisk-balanced", (None, 0)),
    ],
)
def test_accelerator_is_the_named_or_the_built_in_one(
    tmp_path: Path, options: str, expected: tuple[str | None, int]
) -> None:
    (group,) = model.load(spec_of(tmp_path, options), targets.kinds()).spec.replicas
    assert isinstance(group.target, VertexTarget)
    fitted = fitting(group.target)
    assert (fitted.accelerator, fitted.accelerators) == expected
    assert fitted.ranks == max(1, expected[1])


@pytest.mark.parametrize(
    "image", ["acme/skerry:1", "python:3.11", "docker.io/acme/skerry@sha256:0", "eu.gcr.io/acme/skerry:1"]
)
def test_images_of_docker_hub_and_gcr_are_accepted(tmp_path: Path, image: str) -> None:
    path = spec_of(tmp_path, TARGET)
    start, _, rest = path.read_text().partition("image: ")
    assert problems_in(tmp_path, f"{start}image: {image}\n{rest.partition(chr(10))[2]}") == []
