"""The script that does it all, and what a command loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import DIGEST, GROUP, IMAGE, Operator, write_run, write_spec
from tests.support.scripts import dry_run, loads

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.testing.sandbox import Sandbox

REPOSITORY = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry"


@pytest.mark.slow
def test_a_dry_run_of_the_deployment_shows_every_step_and_makes_nothing(
    tmp_path: Path, skerry_sandbox: Sandbox
) -> None:
    spec = write_spec(tmp_path)
    steps, plan = dry_run("scripts/deploy-batch", spec, skerry_sandbox.environment)
    assert steps == [
        f"+ skerry apply {spec} --target aws_repository.image",
        "+ scripts/image build --variant cpu",
        f"+ scripts/image ship {spec} --variant cpu",
        f"+ skerry plan {spec} --set=image={REPOSITORY}@sha256:... --out {spec}.plan",
        f"+ skerry apply {spec}.plan",
    ]
    assert "aws_batch_job.b-{0..1}" in plan
    assert skerry_sandbox.calls.writes == []
    assert skerry_sandbox.inventory() == {}
    assert DIGEST in spec.read_text()


@pytest.mark.slow
def test_a_repository_that_is_only_to_be_forgotten_is_not_made(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    """A group had an image of its own, in a repository of its own, and has the run's now."""
    groups = GROUP.format(count=1, role="replica"), GROUP.format(count=1, role="replica").replace("name: b", "name: c")
    own = "    image: " + IMAGE.replace("/skerry@", "/other@") + "\n"
    spec = write_run(tmp_path, "".join((*groups, own)))
    assert Operator(spec, skerry_sandbox.environment).apply().ok
    write_run(tmp_path, "".join(groups))
    steps, plan = dry_run("scripts/deploy-batch", spec, skerry_sandbox.environment)
    assert "aws_repository.image-c" in plan
    assert steps[0] == f"+ skerry apply {spec} --target aws_repository.image"


@pytest.mark.slow
def test_planning_for_one_cloud_loads_no_other_clouds_sdk_and_the_command_line_loads_none(
    tmp_path: Path, skerry_sandbox: Sandbox
) -> None:
    spec = str(write_spec(tmp_path))
    assert loads(skerry_sandbox.environment, ["plan", spec]) == [[], ["boto3"]]
