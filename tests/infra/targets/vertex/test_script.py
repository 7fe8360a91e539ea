"""The script that does it all, and what a command for Vertex AI loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.targets.vertex.deploying import operator
from tests.support.scripts import dry_run, loads

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.google.sandbox import GoogleSandbox

pytestmark = pytest.mark.slow
REPOSITORY = "us-central1-docker.pkg.dev/team-images/skerry/replica"


def test_dry_run_shows_all_steps_and_creates_nothing(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    spec = operator(tmp_path, sandbox, images="team-images").path
    steps, plan = dry_run("scripts/deploy-vertex", spec, sandbox.environment)
    # The image's repository is another project's, and so not to be made.
    assert steps == [
        "+ scripts/image build --variant cpu",
        f"+ scripts/image ship {spec} --variant cpu",
        f"+ skerry plan {spec} --set=image={REPOSITORY}@sha256:... --out {spec}.plan",
        f"+ skerry apply {spec}.plan",
    ]
    assert "vertex_job.v-{0..1}" in plan
    assert sandbox.calls.writes == []
    assert sandbox.inventory() == {}


def test_plan_imports_no_sdk_for_jobs(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    spec = str(operator(tmp_path, sandbox).path)
    assert loads(sandbox.environment, ["plan", spec]) == [[], ["google.auth"]]
