"""The scripts that deploy a run to a cluster of the user's own, as dry runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.deploy.account import DIGEST
from tests.infra.targets.runs import KubernetesRun
from tests.support.scripts import dry_run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.infra.targets.runs import ClusterAndAccount

pytestmark = pytest.mark.slow
SLURM: Final = """\
run: tiny
store: {store}
image: /shared/skerry.sif
code: {{path: ., command: [python, train.py]}}
outer: {{rounds: 4}}
replicas: [{{name: a, count: 2, target: {{kind: slurm, container: apptainer}}}}]
"""


def test_dry_run_for_kubernetes_pushes_the_image_and_creates_nothing(
    kubernetes_place: ClusterAndAccount, tmp_path: Path
) -> None:
    run = KubernetesRun(tmp_path, kubernetes_place)
    spec = run.write_spec()
    steps, plan = dry_run("scripts/deploy-kubernetes", spec, run.environment)
    assert steps == [
        "+ scripts/image build --variant cpu",
        f"+ scripts/image ship {spec} --variant cpu",
        f"+ skerry plan {spec} --set=image=ghcr.io/acme/skerry@sha256:... --out {spec}.plan",
        f"+ skerry apply {spec}.plan",
    ]
    assert "kubernetes_job.a-{0..1}" in plan
    assert run.sandbox.calls.writes == []
    assert run.sandbox.inventory() == {}
    assert DIGEST in spec.read_text()


def test_dry_run_for_slurm_builds_no_image(tmp_path: Path) -> None:
    spec = tmp_path / "skerry.yaml"
    spec.write_text(SLURM.format(store=(tmp_path / "store").as_uri()))
    (tmp_path / "train.py").touch()
    partition = "PartitionName=gpu Default=YES MaxTime=UNLIMITED State=UP"
    for program, text in {"sinfo": "slurm 22.05.8", "scontrol": partition, "squeue": ""}.items():
        (tmp_path / program).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / program).chmod(0o755)
    steps, plan = dry_run("scripts/deploy-slurm", spec, {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert steps == [f"+ skerry plan {spec} --out {spec}.plan", f"+ skerry apply {spec}.plan"]
    assert "slurm_job.a-{0..1}" in plan
    assert not (tmp_path / "store").exists()
