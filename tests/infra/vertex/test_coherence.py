"""What Vertex AI would refuse is refused beforehand, with the field and what may be written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.vertex.ground import TARGET, spec_of

from skerry.infra import accelerators, spec
from skerry.infra.errors import SpecInvalid
from skerry.infra.targets.vertex.machines import fitting

if TYPE_CHECKING:
    from pathlib import Path

PLACE = "replicas[0].target"
WRONG = {
    "another accelerator than is built in": (
        "machine: g2-standard-8, accelerator: nvidia-tesla-t4",
        f"{PLACE}.accelerator: g2-standard-8 has nvidia-l4; write accelerator: nvidia-l4, or leave it out",
    ),
    "another number than is built in": (
        "machine: a2-highgpu-4g, accelerator: nvidia-tesla-a100, accelerators: 2",
        f"{PLACE}.accelerators: a2-highgpu-4g has 4; write accelerators: 4, or leave it out",
    ),
    "a machine of a series that is not there": (
        "machine: g2-standard-6",
        f"{PLACE}.machine: there is no g2-standard-6; there are g2-standard-4, g2-standard-8, g2-standard-12,",
    ),
    "a series that is not there": ("machine: a9-highgpu-8g", f"{PLACE}.machine: there is no a9-highgpu-8g; there are"),
    "another processor": (
        "machine: a4x-highgpu-4g",
        f"{PLACE}.machine: a4x-highgpu-4g is an ARM machine, and the replica image is built for x86_64",
    ),
    "a machine that takes none": (
        "machine: n2-standard-8, accelerator: nvidia-tesla-t4",
        f"{PLACE}.accelerator: n2-standard-8 takes no accelerator; nvidia-tesla-t4 goes with n1 machines, e.g.",
    ),
    "one that is built into other machines": (
        "machine: n1-standard-8, accelerator: nvidia-l4",
        f"{PLACE}.accelerator: nvidia-l4 is built into g2-standard-4, g2-standard-8,",
    ),
    "too few for the machine": (
        "machine: n1-standard-32, accelerator: nvidia-tesla-t4",
        f"{PLACE}.accelerators: n1-standard-32 takes 2 or 4 of nvidia-tesla-t4; write accelerators: 2",
    ),
    "a number there is not": (
        "machine: n1-standard-8, accelerator: nvidia-tesla-v100, accelerators: 3",
        f"{PLACE}.accelerators: n1-standard-8 takes 1 or 2 or 4 or 8 of nvidia-tesla-v100; write accelerators: 1",
    ),
    "a machine too large for any": (
        "machine: n1-standard-96, accelerator: nvidia-tesla-p100, accelerators: 4",
        f"{PLACE}.accelerator: n1-standard-96 has more vCPUs than any number of nvidia-tesla-p100 goes with",
    ),
    "a number of nothing": (
        "machine: n1-standard-8, accelerators: 2",
        f"{PLACE}.accelerators: is a number of accelerators, and none is named; write e.g. accelerator:",
    ),
    "an accelerator there is not": (
        "machine: g2-standard-8, accelerator: nvidia-l40",
        f"{PLACE}.accelerator: must be 'nvidia-l4', 'nvidia-tesla-t4'",
    ),
    "to queue for what nobody queues for": (
        "machine: n1-standard-8, accelerator: nvidia-tesla-t4, scheduling: flex_start",
        f"{PLACE}.scheduling: nvidia-tesla-t4 cannot be queued for; flex_start is for nvidia-a100-80gb,",
    ),
    "to queue for a machine without": (
        "machine: n2-standard-8, scheduling: flex_start",
        f"{PLACE}.scheduling: machines without accelerators cannot be queued for; flex_start is for",
    ),
    "a machine that is never standard": (
        "machine: a3-highgpu-1g",
        f"{PLACE}.scheduling: a3-highgpu-1g is only to be had as spot or flex_start; write scheduling: spot",
    ),
    "to wait without a queue": (
        "machine: g2-standard-8, scheduling: spot, max_wait: 2h",
        f"{PLACE}.max_wait: is how long a flex_start may queue, and this is none; take it out, or write scheduling:",
    ),
    "a way to schedule there is not": (
        "machine: g2-standard-8, scheduling: cheap",
        f"{PLACE}.scheduling: must be 'standard', 'spot' or 'flex_start'; got 'cheap'",
    ),
    "a disk that the machine has not": (
        "machine: g2-standard-8, disk_type: hyperdisk-balanced",
        f"{PLACE}.disk_type: g2-standard-8 has no hyperdisk-balanced; write pd-ssd or pd-standard",
    ),
    "the other way round": (
        "machine: a3-ultragpu-8g, disk_type: pd-ssd",
        f"{PLACE}.disk_type: a3-ultragpu-8g has no pd-ssd; write hyperdisk-balanced",
    ),
    "too small a disk": ("machine: g2-standard-8, disk: 50GiB", f"{PLACE}.disk: must be at least"),
    "a key in another region": (
        "machine: g2-standard-8, byo: {key: projects/p/locations/us-east1/keyRings/r/cryptoKeys/k}",
        f"{PLACE}.byo.key: lies elsewhere than the machines; it must be projects/.../locations/us-central1/",
    ),
    "a network by its project's id": (
        "machine: g2-standard-8, byo: {network: projects/acme-diloco/global/networks/train}",
        f"{PLACE}.byo.network: must be projects/NUMBER/global/networks/NAME",
    ),
    "no account": (
        "machine: g2-standard-8, byo: {service_account: me@example.com}",
        f"{PLACE}.byo.service_account: must be the e-mail address of a service account",
    ),
}


def told(path: Path) -> list[str]:
    with pytest.raises(SpecInvalid) as error:
        spec.load(path)
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize("case", WRONG)
def test_options_that_cannot_be_are_told_by_field(tmp_path: Path, case: str) -> None:
    options, expected = WRONG[case]
    (problem,) = told(spec_of(tmp_path, options))
    assert expected in problem


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("region: us-central1", "region: us-east-1", "target.region: must be a region of Google Cloud"),
        ("project: skerry-sandbox", "project: '123456789012'", "target.project: must be the id of a project of Google"),
        ("store: gs://acme/runs", "store: az://acme/runs", "store: jobs of vertex reach gs:// and s3:// alone"),
        ("store: gs://acme/runs", "store: gs://acme.com/runs", "store: the bucket 'acme.com' may have small letters"),
        ("store: gs://acme/runs", "store: gs://my-google-data/runs", "store: the bucket 'my-google-data' looks like"),
        ("store: gs://acme/runs", "store: gs://ac/runs", "store: the bucket 'ac' has not 3 to 63 characters"),
        ("store: gs://acme/runs", "store: gs://acme/r*ns", "store: a condition of every right names the run's prefix"),
        (
            "count: 2, target: {",
            "count: 60, target: {role: replica, ",
            "target.role: 60 replicas would need a service account each, and a project has room for 100; above 50",
        ),
        ("image: ", "# ", "image: missing, and containers are made of one; write e.g. image: us-central1-docker"),
        (
            "image: us-central1-docker.pkg.dev/skerry-sandbox/skerry/replica",
            "image: 123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry",
            "image: Vertex AI runs images of Artifact Registry and Docker Hub alone; push it there (scripts/image",
        ),
        ("skerry/replica@", "@", "image: Vertex AI runs images of Artifact Registry and Docker Hub alone; push it"),
        ("us-central1-docker.pkg.dev", "ghcr.io", "image: Vertex AI runs images of Artifact Registry and Docker Hub"),
    ],
)
def test_what_its_jobs_need_of_the_rest_is_told(tmp_path: Path, before: str, after: str, expected: str) -> None:
    path = spec_of(tmp_path, TARGET)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    (problem,) = told(path)
    assert expected in problem


def test_a_run_has_one_project(tmp_path: Path) -> None:
    path = spec_of(tmp_path, TARGET)
    (group,) = [line for line in path.read_text().splitlines() if "name: vertex" in line]
    other = group.replace("name: vertex", "name: other").replace("project: skerry-sandbox", "project: acme-diloco")
    path.write_text(path.read_text() + other + "\n")
    (problem,) = told(path)
    text = "a run has one project so far, and another group is in skerry-sandbox; write project: skerry-sandbox"
    assert f"replicas[1].target.project: {text}" in problem


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("machine: g2-standard-8", ("nvidia-l4", 1)),
        ("machine: g2-standard-96, accelerator: nvidia-l4, accelerators: 8", ("nvidia-l4", 8)),
        ("machine: a2-megagpu-16g, scheduling: flex_start, max_wait: 48h", ("nvidia-tesla-a100", 16)),
        ("machine: a3-highgpu-2g, scheduling: spot", ("nvidia-h100-80gb", 2)),
        ("machine: a4-highgpu-8g, disk_type: hyperdisk-balanced", ("nvidia-b200", 8)),
        ("machine: n1-highmem-8, accelerator: nvidia-tesla-v100", ("nvidia-tesla-v100", 1)),
        ("machine: n1-standard-32, accelerator: nvidia-tesla-t4, accelerators: 4", ("nvidia-tesla-t4", 4)),
        ("machine: n2-standard-8, scheduling: spot, disk_type: pd-standard", (None, 0)),
        ("machine: c3-standard-8, disk_type: hyperdisk-balanced", (None, 0)),
    ],
)
def test_what_fits_is_taken_with_what_is_built_in(
    tmp_path: Path, options: str, expected: tuple[str | None, int]
) -> None:
    (group,) = spec.load(spec_of(tmp_path, options)).spec.replicas
    assert isinstance(group.target, spec.VertexTarget)
    found = fitting(group.target)
    assert (found.accelerator, found.accelerators) == expected
    assert found.ranks == max(1, expected[1])


def test_every_accelerator_of_the_spec_is_one_of_the_table() -> None:
    offered = spec.schema()
    assert all(f'"{name}"' in offered for name in accelerators.KNOWN)


@pytest.mark.parametrize(
    "image", ["acme/skerry:1", "python:3.11", "docker.io/acme/skerry@sha256:0", "eu.gcr.io/acme/skerry:1"]
)
def test_images_of_docker_hub_and_of_googles_older_name_are_taken(tmp_path: Path, image: str) -> None:
    path = spec_of(tmp_path, TARGET)
    start, _, rest = path.read_text().partition("image: ")
    path.write_text(f"{start}image: {image}\n{rest.partition(chr(10))[2]}")
    assert spec.load(path).deployed
