"""scripts/deploy-batch as a dry run, and the SDKs that a command loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import DIGEST, GROUP, IMAGE, Operator, write_run, write_spec
from tests.support.scripts import dry_run, loads

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox

REPOSITORY = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry"


@pytest.mark.slow
def test_dry_run_shows_every_step_and_creates_nothing(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
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
def test_repository_of_a_removed_group_is_not_created(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    """A group used another image in another repository and now uses the run's."""
    groups = GROUP.format(count=1, role="replica"), GROUP.format(count=1, role="replica").replace("name: b", "name: c")
    own = "    image: " + IMAGE.replace("/skerry@", "/other@") + "\n"
    spec = write_run(tmp_path, "".join((*groups, own)))
    assert Operator(spec, skerry_sandbox.environment).apply().ok
    write_run(tmp_path, "".join(groups))
    steps, plan = dry_run("scripts/deploy-batch", spec, skerry_sandbox.environment)
    assert "aws_repository.image-c" in plan
    assert steps[0] == f"+ skerry apply {spec} --target aws_repository.image"


@pytest.mark.slow
def test_plan_loads_only_the_sdk_of_its_cloud(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    spec = str(write_spec(tmp_path))
    assert loads(skerry_sandbox.environment, ["plan", spec]) == [[], ["boto3"]]
