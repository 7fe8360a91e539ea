"""The script that does it all, and what a command loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.targets.sagemaker.test_deploying import write_spec
from tests.support.scripts import ROOT, dry_run, loads, run

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox

pytestmark = pytest.mark.slow
REPOSITORY: Final = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry"


def test_dry_run_shows_all_steps_and_creates_nothing(tmp_path: Path, sandbox: Sandbox) -> None:
    spec = write_spec(tmp_path)
    steps, plan = dry_run("scripts/deploy-sagemaker", spec, sandbox.environment)
    assert steps == [
        f"+ skerry apply {spec} --target aws_repository.image",
        "+ scripts/image build --variant cpu",
        f"+ scripts/image ship {spec} --variant cpu",
        f"+ skerry plan {spec} --set=image={REPOSITORY}@sha256:... --out {spec}.plan",
        f"+ skerry apply {spec}.plan",
    ]
    assert "sagemaker_job.s-{0..1}" in plan
    assert sandbox.calls.writes == []
    assert sandbox.inventory() == {}


def test_scripts_show_their_usage(sandbox: Sandbox) -> None:
    ended = run(sandbox.environment, ROOT / "scripts/deploy-sagemaker", "--help")
    assert ended.stdout.startswith("scripts/deploy-sagemaker SPEC [--variant cpu] [--yes] [--dry-run]")
    assert "--dry-run        only say what would be done" in ended.stdout
    ended = run(sandbox.environment, ROOT / "scripts/deploy-sagemaker", "nothing.yaml")
    assert (ended.returncode, ended.stderr.strip()) == (2, "which spec? scripts/deploy-sagemaker SPEC")


def test_sdk_is_imported_at_the_first_creation(tmp_path: Path, sandbox: Sandbox) -> None:
    spec = write_spec(tmp_path)
    path = str(spec)
    commands = ["plan", path], ["apply", path, "--auto-approve"], ["status", path]
    before, planned, applied, _ = loads(sandbox.environment, *commands)
    assert (before, planned) == ([], ["boto3"])
    assert "sagemaker" in applied
    again = loads(sandbox.environment, *commands)
    assert again[1:] == [["boto3"]] * 3, "reading, and finding nothing to do, need no SDK"
