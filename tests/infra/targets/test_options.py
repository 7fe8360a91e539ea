"""The checks of the options of all targets, and what they accept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.kit import problems_in
from tests.infra.targets.tables import read_cases
from tests.infra.targets.vertex.kit import context_of

from skerry.infra import targets
from skerry.infra.spec import model
from skerry.infra.spec.target_kinds import TargetKinds
from skerry.infra.spec_and_store_errors import SpecInvalid
from skerry.infra.targets.aws_batch.options import AwsBatchTarget
from skerry.infra.targets.vertex.accelerators_disk_time_and_quota import fitting
from skerry.infra.targets.vertex.options import VertexTarget
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.spec.target_kinds import TargetOptions

ECR: Final = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu"
SPEC: Final = """\
run: tiny
store: {store}
image: {image}
code: {{path: ., command: [python, train.py]}}
outer: {{rounds: 40}}
replicas:
  - {{name: a, count: 4, target: {{kind: {kind}, {options}}}}}
"""
SPECS: Final = {
    "aws_batch": SPEC.format(
        store="s3://acme/runs",
        image="acme/skerry:gpu",
        kind="aws_batch",
        options="region: us-east-1, instance_types: [g6e.xlarge], gpus: 1",
    ),
    "sagemaker": SPEC.format(
        store="s3://acme/runs",
        image=ECR,
        kind="sagemaker",
        options="region: us-east-1, instance: ml.g6e.xlarge, spot: true",
    ),
    "kubernetes": SPEC.format(
        store="s3://acme/runs",
        image="ghcr.io/acme/skerry:gpu",
        kind="kubernetes",
        options="namespace: train, secret: store-keys",
    ),
    "hf_jobs": SPEC.format(
        store="s3://acme/runs",
        image="ghcr.io/acme/skerry:gpu",
        kind="hf_jobs",
        options="namespace: acme, flavor: l4x1, max_runtime: 24h, "
        "secrets: {AWS_ACCESS_KEY_ID: KEY_ID, AWS_SECRET_ACCESS_KEY: SECRET_KEY}",
    ),
    "modal": SPEC.format(
        store="s3://acme/runs",
        image="ghcr.io/acme/skerry:gpu",
        kind="modal",
        options="gpu: H100, max_runtime: 24h, secrets: [store-keys]",
    ),
    "vertex": SPEC.format(
        store="gs://acme/runs",
        image="us-central1-docker.pkg.dev/acme-diloco/skerry/replica:gpu",
        kind="vertex",
        options="project: acme-diloco, region: us-central1, machine: g2-standard-8",
    ),
    "slurm": SPEC.format(
        store="file:///shared/runs",
        image="/shared/skerry.sif",
        kind="slurm",
        options="partition: gpu, time: 12h, gpus: 1",
    ),
}


def changed(target: str, old: str, new: str) -> str:
    """The target's spec with another text at `old`; without `old`, with `new` as its last line."""
    assert old in SPECS[target]
    new = new.replace("\\n", "\n")
    return SPECS[target].replace(old, new) if old else f"{SPECS[target]}{new}\n"


@pytest.mark.parametrize("case", read_cases("problems.txt"), ids=lambda case: case[0][:60])
def test_invalid_options_are_reported_with_their_field_and_a_correction(tmp_path: Path, case: list[str]) -> None:
    """A line of problems.txt is "target|old text|new text"; the problems follow."""
    change, *expected = case
    assert problems_in(tmp_path, changed(*change.split("|"))) == expected


BATCH: Final = "  - {name: b, count: 197, target: {kind: aws_batch, region: us-east-1, instance_types: [g5.xlarge]%s}}"
VALID: Final = [
    *(("aws_batch", "acme/runs", f"{name}/runs") for name in ("my-bucket", "a.b.c", "x" * 63)),
    ("aws_batch", "", BATCH % ", byo: {job_role: mine}"),
    ("sagemaker", "spot", "spot"),
    ("sagemaker", "", BATCH % ""),
    ("sagemaker", "count: 4", "count: 1024"),
    ("sagemaker", "spot: true", "spot: true, max_runtime: 24h, max_wait: 24h"),
    ("sagemaker", "spot: true", "byo: {subnets: [subnet-0a], security_groups: [sg-0a]}"),
    *(("slurm", "file:///shared/runs", store) for store in ("s3://acme/runs", "gs://acme/runs")),
    ("slurm", "gpus: 1", "gpus: 1, login: ada@login.acme.org, container: apptainer, extra: ['--constraint=a100|h100']"),
    ("hf_jobs", "outer: {rounds: 40}", "outer: {rounds: 40}\nlimits: {max_hours: 24}"),
    ("hf_jobs", "", "data: {corpus: 's3://acme-data/corpus'}"),
    ("modal", "outer: {rounds: 40}", "outer: {rounds: 40}\nlimits: {max_hours: 72}"),
    ("modal", "secrets: [store-keys]", "workspace: ac-1a2b, gpus: 2"),
    ("kubernetes", "", "data: {corpus: 's3://acme-data/corpus', old: 'gs://acme-data/x'}"),
    ("slurm", "", "data: {corpus: /shared/corpus, old: 's3://acme-data/x'}"),
    ("slurm", "", "secrets: {HF_TOKEN: {google_secret: projects/acme/secrets/hf/versions/1}}"),
    *(
        ("vertex", "us-central1-docker.pkg.dev/acme-diloco/skerry/replica:gpu", image)
        for image in ("acme/skerry:1", "python:3.11", "docker.io/acme/skerry@sha256:0", "eu.gcr.io/acme/skerry:1")
    ),
]


@pytest.mark.parametrize(("target", "old", "new"), VALID)
def test_valid_options_are_accepted(tmp_path: Path, target: str, old: str, new: str) -> None:
    assert problems_in(tmp_path, changed(target, old, new)) == []


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
    (group,) = context_of(tmp_path, options).spec.replicas
    fitted = fitting(VertexTarget.of(group))
    assert (fitted.accelerator, fitted.accelerators, fitted.ranks) == (*expected, max(1, expected[1]))
    assert (group.target.place.accelerator, group.target.place.accelerators) == expected


@pytest.mark.parametrize("options", targets.kinds().options, ids=lambda options: options.name())
def test_reserved_variables_of_a_target_are_refused_by_its_options(
    tmp_path: Path, options: type[TargetOptions]
) -> None:
    reserved = [pattern.replace("*", "X") for pattern in options.RESERVED]
    assert bool(reserved) is (options.name() in {"hf_jobs", "kubernetes", "modal", "sagemaker", "slurm", "vertex"})
    others = TargetKinds(tuple(kind for kind in targets.kinds().options if kind is not options))
    # Replicas on this machine: a group may move to any kind later.
    local = next(kind for kind in targets.kinds().names if kind not in targets.kinds().deployed)
    run = "run: r\nstore: file://store\ncode: {path: ., command: [x]}\nouter: {rounds: 1}\n"
    for name in reserved:
        group = f"replicas:\n  - {{name: a, count: 1, target: {{kind: {local}}}}}\n"
        (tmp_path / "skerry.yaml").write_text(f"{run}{group}env: {{{name}: a}}\n")
        with pytest.raises(SpecInvalid, match=f"{name} cannot be set here: the cloud sets it for its jobs"):
            model.load(tmp_path / "skerry.yaml", targets.kinds())
        assert model.load(tmp_path / "skerry.yaml", others).spec.env == {name: "a"}


def test_machine_of_batch_is_known_if_there_is_one_type() -> None:
    options = {"kind": "aws_batch", "region": "us-east-1", "instance_types": ("g6e.xlarge",), "gpus": 1, "spot": True}
    place = AwsBatchTarget.model_validate(options).place
    assert place == Place(cloud="aws", region="us-east-1", machine="g6e.xlarge", accelerators=1, spot=True)
    several = AwsBatchTarget.model_validate(options | {"instance_types": ("g6e.xlarge", "g5.xlarge")}).place
    assert several == place.model_copy(update={"machine": None})
