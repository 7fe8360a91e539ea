"""The example of a run in two clouds: the plan in the tutorial, and the script that deploys a checkout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from tests.support.command_line import invoke
from tests.support.page_examples import assert_shows, shown
from tests.support.scripts import ROOT, dry_run

from skerry.testing.plugin import skerry_clouds, skerry_google, skerry_sandbox

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.both_clouds import Clouds

__all__ = ["skerry_clouds", "skerry_google", "skerry_sandbox"]

pytestmark = pytest.mark.slow
EXAMPLE: Final = "infra/examples/mixed.yaml"
PROJECT: Final = "acme-diloco"
ECR: Final = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry"


def test_plan_in_the_tutorial_equals_the_plan_of_the_example(tmp_path: Path, skerry_clouds: Clouds) -> None:
    here = skerry_clouds.google.project
    spec = (ROOT / EXAMPLE).read_text().replace(PROJECT, here)
    (tmp_path / "mixed.yaml").write_text(spec.replace(f"s3://{here}", f"s3://{PROJECT}").replace("../..", str(ROOT)))
    result = invoke("plan", str(tmp_path / "mixed.yaml"))
    assert result.exit_code == 0, result.output
    expected = shown((ROOT / "docs/tutorial-three-clouds.md").read_text(), f"skerry plan {EXAMPLE}")
    assert_shows(result.output.replace(here, PROJECT), expected)


def test_dry_run_of_the_mixed_example_shows_every_step(tmp_path: Path, skerry_clouds: Clouds) -> None:
    project = skerry_clouds.google.project
    spec = tmp_path / "mixed.yaml"
    text = (ROOT / EXAMPLE).read_text().replace(PROJECT, project)
    spec.write_text(text.replace("../../runtime/examples/tiny_gpt", "."))
    (tmp_path / "train.py").write_text("print('training')\n")
    steps, plan = dry_run("scripts/deploy-batch", spec, skerry_clouds.environment)
    google = f"us-central1-docker.pkg.dev/{project}/skerry/replica"
    pins = f"--set=image={ECR}@sha256:... --set=replicas[2].image={google}@sha256:..."
    assert steps == [
        f"+ skerry apply {spec} --target aws_repository.image --target google_repository.image-vertex",
        "+ scripts/image build --variant cpu",
        f"+ scripts/image ship {spec} --variant cpu",
        f"+ skerry plan {spec} {pins} --out {spec}.plan",
        f"+ skerry apply {spec}.plan",
    ]
    assert "vertex_job.vertex-{0..1}" in plan
    assert skerry_clouds.aws.calls.writes == []
    assert skerry_clouds.google.calls.writes == []
