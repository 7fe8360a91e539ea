"""The scripts that deploy a run, as dry runs, and the SDKs that a command loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.deploy.account import DIGEST, IMAGE
from tests.infra.targets.runs import BatchRun, HfJobsRun, KubernetesRun, ModalRun, SageMakerRun, TargetRun, VertexRun
from tests.support.scripts import ROOT, dry_run, loads
from tests.support.scripts import run as run_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
ECR: Final = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry"
# The image's repository is another project's, and so it is not created.
OF_ANOTHER_PROJECT: Final = "us-central1-docker.pkg.dev/team-images/skerry/replica"


@pytest.mark.parametrize(
    ("run", "script", "repository"),
    [
        (BatchRun, "scripts/deploy-batch", ECR),
        (VertexRun, "scripts/deploy-vertex", OF_ANOTHER_PROJECT),
        (HfJobsRun, "scripts/deploy-hf-jobs", "ghcr.io/acme/skerry"),
    ],
    indirect=["run"],
)
def test_dry_run_shows_all_steps_and_creates_nothing(run: TargetRun, script: str, repository: str) -> None:
    spec = run.write_spec(image=f"{repository}@sha256:{DIGEST}")
    steps, plan = dry_run(script, spec, run.environment)
    first = [f"+ skerry apply {spec} --target aws_repository.image"] if repository == ECR else []
    assert steps == [
        *first,
        "+ scripts/image build --variant cpu",
        f"+ scripts/image ship {spec} --variant cpu",
        f"+ skerry plan {spec} --set=image={repository}@sha256:... --out {spec}.plan",
        f"+ skerry apply {spec}.plan",
    ]
    assert f"{run.KIND}.a-{{0..1}}" in plan
    assert run.sandbox.calls.writes == []
    assert run.sandbox.inventory() == {}
    assert DIGEST in spec.read_text()


@pytest.mark.parametrize("target", ["batch", "hf-jobs", "kubernetes", "modal", "sagemaker", "slurm", "vertex"])
def test_scripts_of_all_targets_run_the_same_steps(target: str) -> None:
    script = f"scripts/deploy-{target}"
    interpreter, usage, *lines = (ROOT / script).read_text().splitlines()
    assert interpreter == "#!/usr/bin/env bash"
    assert usage.startswith(f"# {script} SPEC [options]    from this checkout to replicas that train on ")
    assert [line for line in lines if not line.startswith("#")] == ['source "$(dirname "$0")/_deploy"']


def test_repository_of_a_removed_group_is_not_created(batch_run: BatchRun) -> None:
    """A group used another image in another repository and now uses the run's."""
    second = batch_run.group(1, "role: replica").replace("name: a", "name: c")
    own = f"    image: {IMAGE.replace('/skerry@', '/other@')}\n"
    assert batch_run.operator(count=1, others=second + own).apply().ok
    spec = batch_run.write_spec(count=1, others=second)
    steps, plan = dry_run("scripts/deploy-batch", spec, batch_run.environment)
    assert "aws_repository.image-c" in plan
    assert steps[0] == f"+ skerry apply {spec} --target aws_repository.image"


def test_scripts_show_their_usage(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    ended = run_script(environment, ROOT / "scripts/deploy-sagemaker", "--help")
    assert ended.stdout.startswith("scripts/deploy-sagemaker SPEC [options]")
    assert "In the account: a bucket and an ECR repository" in ended.stdout
    assert "--dry-run        only say what would be done" in ended.stdout
    ended = run_script(environment, ROOT / "scripts/deploy-sagemaker", "nothing.yaml")
    assert (ended.returncode, ended.stderr.strip()) == (2, "which spec? scripts/deploy-sagemaker SPEC")


# The store of the last three is in S3.
@pytest.mark.parametrize(
    ("run", "sdks"),
    [
        (BatchRun, ["boto3"]),
        (VertexRun, ["google.auth"]),
        (KubernetesRun, ["boto3", "httpx2", "lightkube"]),
        (HfJobsRun, ["boto3", "httpx2", "huggingface_hub"]),
        (ModalRun, ["boto3", "modal"]),
    ],
    indirect=["run"],
)
def test_plan_loads_only_the_sdk_of_its_cloud(run: TargetRun, sdks: list[str]) -> None:
    assert loads(run.environment, ["plan", str(run.write_spec())]) == [[], sdks]


def test_all_commands_of_sagemaker_need_boto3_alone(sagemaker_run: SageMakerRun) -> None:
    path = str(sagemaker_run.write_spec())
    commands = ["plan", path], ["apply", path, "--auto-approve"], ["status", path]
    assert loads(sagemaker_run.environment, *commands) == [[], *[["boto3"]] * 3]
