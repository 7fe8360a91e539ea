"""The script that does it all, and what a command loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.sagemaker.test_deploying import write_spec

if TYPE_CHECKING:
    from skerry.infra.testing.sandbox import Sandbox

pytestmark = pytest.mark.slow
ROOT: Final = Path(__file__).parents[3]
REPOSITORY: Final = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry"
# Each command in turn, and which of the large libraries are there after it.
SCRIPT: Final = """
import sys
from skerry.infra import cli
def loaded():
    return sorted({'boto3', 'google.auth', 'sagemaker', 'docker', 'torch', 'moto', 'pandas'} & set(sys.modules))
print(loaded())
for words in (['plan', sys.argv[1]], ['apply', sys.argv[1], '--auto-approve'], ['status', sys.argv[1]]):
    try:
        cli.app(words)
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
    print(loaded())
"""


def run(sandbox: Sandbox, *words: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **sandbox.environment}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=180)


def test_a_dry_run_of_the_deployment_shows_every_step_and_makes_nothing(tmp_path: Path, sandbox: Sandbox) -> None:
    spec = write_spec(tmp_path)
    ended = run(sandbox, ROOT / "scripts/deploy-sagemaker", spec, "--variant", "cpu", "--dry-run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [line for line in ended.stderr.splitlines() if line.startswith("+ ")] == [
        f"+ skerry apply {spec} --target aws_repository.image",
        "+ scripts/image build --variant cpu",
        f"+ scripts/image ship {spec} --variant cpu",
        f"+ skerry plan {spec} --set=image={REPOSITORY}@sha256:... --out {spec}.plan",
        f"+ skerry apply {spec}.plan",
    ]
    assert "sagemaker_job.s-{0..1}" in ended.stdout
    assert sandbox.calls.writes == []
    assert sandbox.inventory() == {}


def test_the_scripts_tell_how_they_are_used(sandbox: Sandbox) -> None:
    ended = run(sandbox, ROOT / "scripts/deploy-sagemaker", "--help")
    assert ended.stdout.startswith("scripts/deploy-sagemaker SPEC [--variant cpu] [--yes] [--dry-run]")
    assert "--dry-run        only say what would be done" in ended.stdout
    ended = run(sandbox, ROOT / "scripts/deploy-sagemaker", "nothing.yaml")
    assert (ended.returncode, ended.stderr.strip()) == (2, "which spec? scripts/deploy-sagemaker SPEC")


def test_sagemakers_sdk_is_loaded_when_a_job_is_made_and_not_before(tmp_path: Path, sandbox: Sandbox) -> None:
    spec = write_spec(tmp_path)
    ended = run(sandbox, sys.executable, "-c", SCRIPT, spec)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    assert told[:2] == ["[]", "['boto3']"]
    assert "'sagemaker'" in told[2]
    ended = run(sandbox, sys.executable, "-c", SCRIPT, spec)
    told = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    assert told[1:] == ["['boto3']"] * 3, "reading, and finding nothing to do, need no SDK"
