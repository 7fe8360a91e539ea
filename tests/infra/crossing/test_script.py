"""One script brings a checkout to replicas in two clouds: every repository, every push, every digest."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from skerry.infra.testing.plugin import skerry_clouds, skerry_google, skerry_sandbox

if TYPE_CHECKING:
    from skerry.infra.testing.google.crossing import Clouds

__all__ = ["skerry_clouds", "skerry_google", "skerry_sandbox"]
pytestmark = pytest.mark.slow
ROOT: Final = Path(__file__).parents[3]
ECR: Final = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry"


def test_a_dry_run_of_the_mixed_example_shows_every_step_and_makes_nothing(
    tmp_path: Path, skerry_clouds: Clouds
) -> None:
    project = skerry_clouds.google.project
    spec = tmp_path / "mixed.yaml"
    text = (ROOT / "infra/examples/mixed.yaml").read_text().replace("acme-diloco", project)
    spec.write_text(text.replace("../../runtime/examples/tiny_gpt", "."))
    (tmp_path / "train.py").write_text("print('training')\n")
    ended = subprocess.run(
        [ROOT / "scripts/deploy-batch", spec, "--variant", "cpu", "--dry-run"],
        env={**os.environ, **skerry_clouds.environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    google = f"us-central1-docker.pkg.dev/{project}/skerry/replica"
    pins = f"--set=image={ECR}@sha256:... --set=replicas[2].image={google}@sha256:..."
    assert [line for line in ended.stderr.splitlines() if line.startswith("+ ")] == [
        f"+ skerry apply {spec} --target aws_repository.image --target google_repository.image-vertex",
        "+ scripts/image build --variant cpu",
        f"+ scripts/image ship {spec} --variant cpu",
        f"+ skerry plan {spec} {pins} --out {spec}.plan",
        f"+ skerry apply {spec}.plan",
    ]
    assert "vertex_job.vertex-{0..1}" in ended.stdout
    assert skerry_clouds.aws.calls.writes == []
    assert skerry_clouds.google.calls.writes == []
