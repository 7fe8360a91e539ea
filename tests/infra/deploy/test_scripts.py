"""The script that does it all, and what a command loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import DIGEST, write_spec

if TYPE_CHECKING:
    from skerry.infra.testing.sandbox import Sandbox

ROOT = Path(__file__).parents[3]
REPOSITORY = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry"


@pytest.mark.slow
def test_a_dry_run_of_the_deployment_shows_every_step_and_makes_nothing(
    tmp_path: Path, skerry_sandbox: Sandbox
) -> None:
    spec = write_spec(tmp_path)
    ended = subprocess.run(
        [ROOT / "scripts/deploy-batch", spec, "--variant", "cpu", "--dry-run"],
        env={**os.environ, **skerry_sandbox.environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = [line for line in ended.stderr.splitlines() if line.startswith("+ ")]
    assert steps == [
        f"+ skerry apply {spec} --target aws_repository.image",
        "+ scripts/image build --variant cpu",
        f"+ scripts/image ship {spec} --variant cpu",
        f"+ skerry plan {spec} --set=image={REPOSITORY}@sha256:... --out {spec}.plan",
        f"+ skerry apply {spec}.plan",
    ]
    assert "aws_batch_job.b-{0..1}" in ended.stdout
    assert skerry_sandbox.calls.writes == []
    assert skerry_sandbox.inventory() == {}
    assert DIGEST in spec.read_text()


@pytest.mark.slow
def test_planning_for_one_cloud_loads_no_other_clouds_sdk_and_the_command_line_loads_none(
    tmp_path: Path, skerry_sandbox: Sandbox
) -> None:
    script = (
        "import sys\n"
        "from skerry.infra import cli\n"
        "def loaded():\n"
        "    return sorted({'boto3', 'google.auth', 'sagemaker', 'docker', 'torch', 'moto'} & set(sys.modules))\n"
        "print(loaded())\n"
        "try:\n"
        "    cli.app(['plan', sys.argv[1]])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "print(loaded())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, write_spec(tmp_path)],
        env={**os.environ, **skerry_sandbox.environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    first, *_, last = ended.stdout.splitlines()
    assert (first, last) == ("[]", "['boto3']")
