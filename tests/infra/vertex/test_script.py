"""The script that does it all, and what a command for Vertex AI loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.infra.vertex.deploying import operator

if TYPE_CHECKING:
    from skerry.infra.testing.google.sandbox import GoogleSandbox

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
REPOSITORY = "us-central1-docker.pkg.dev/team-images/skerry/replica"


def test_a_dry_run_of_the_deployment_shows_every_step_and_makes_nothing(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    spec = operator(tmp_path, sandbox, images="team-images").path
    ended = subprocess.run(
        [ROOT / "scripts/deploy-vertex", spec, "--variant", "cpu", "--dry-run"],
        env={**os.environ, **sandbox.environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = [line for line in ended.stderr.splitlines() if line.startswith("+ ")]
    # The image's repository is another project's, and so not to be made.
    assert steps == [
        "+ scripts/image build --variant cpu",
        f"+ scripts/image ship {spec} --variant cpu",
        f"+ skerry plan {spec} --set=image={REPOSITORY}@sha256:... --out {spec}.plan",
        f"+ skerry apply {spec}.plan",
    ]
    assert "vertex_job.v-{0..1}" in ended.stdout
    assert sandbox.calls.writes == []
    assert sandbox.inventory() == {}


def test_a_plan_loads_neither_the_sdk_that_makes_jobs_nor_another_clouds(
    tmp_path: Path, sandbox: GoogleSandbox
) -> None:
    script = (
        "import sys\n"
        "from skerry.infra import cli\n"
        "known = {'boto3', 'google.auth', 'google.cloud.aiplatform', 'sagemaker', 'docker', 'torch', 'moto'}\n"
        "print(sorted(known & set(sys.modules)))\n"
        "try:\n"
        "    cli.app(['plan', sys.argv[1]])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "print(sorted(known & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, operator(tmp_path, sandbox).path],
        env={**os.environ, **sandbox.environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, *_, last = ended.stdout.splitlines()
    assert (first, last) == ("[]", "['google.auth']")
