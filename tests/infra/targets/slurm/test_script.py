"""The script that deploys a run to a Slurm cluster, as a dry run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest
from tests.support.scripts import dry_run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
SLURM: Final = """\
run: tiny
store: {store}
image: /shared/skerry.sif
code: {{path: ., command: [python, train.py]}}
outer: {{rounds: 4}}
replicas: [{{name: a, count: 2, target: {{kind: slurm, container: apptainer}}}}]
"""


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
