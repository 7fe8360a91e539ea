"""One run on several targets, and with its store in another cloud than its replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.targets.runs import BatchRun, SageMakerRun, VertexRun, begin_deletions, delete_state

from skerry.testing.both_clouds import Clouds

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.google.sandbox import GoogleSandbox
    from skerry.testing.sandbox import Sandbox

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]
ARTIFACTS = "output: s3://mine/artifacts"


@pytest.fixture
def clouds(aws_sandbox: Sandbox, google_sandbox: GoogleSandbox) -> Clouds:
    return Clouds(aws=aws_sandbox, google=google_sandbox)


def test_run_may_have_groups_on_batch_and_sagemaker(sagemaker_run: SageMakerRun, tmp_path: Path) -> None:
    sandbox = sagemaker_run.sandbox
    batch = BatchRun(tmp_path, sandbox).group(1, "role: replica").replace("name: a", "name: b")
    operator = sagemaker_run.operator(count=1, others=batch)
    assert operator.apply().ok
    assert (len(sandbox.inventory()["training job"]), len(sandbox.inventory()["job"])) == (1, 1)
    assert list(sagemaker_run.jobs(operator)) == ["a-0", "b-0"]
    assert operator.plan().plan.empty
    assert operator.destroy().ok
    assert sandbox.inventory() == {}


def test_run_on_vertex_and_batch_with_its_store_in_s3(clouds: Clouds, tmp_path: Path) -> None:
    vertex, batch = VertexRun(tmp_path, clouds.google), BatchRun(tmp_path, clouds.aws)
    vertex.environment = {**clouds.aws.environment, **clouds.google.environment}
    others = batch.group(1, "role: replica").replace("name: a", "name: b")
    operator = vertex.operator(store="s3://acme-skerry/runs", others=others)
    outcome = operator.apply()
    assert outcome.ok, outcome.failed
    in_google = {kind: len(names) for kind, names in clouds.google.inventory().items()}
    assert in_google == {"job": 2, "repository": 1, "service account": 2}
    assert len([name for name in clouds.aws.inventory()["role"] if name.partition("-a-")[2]]) == 2
    for sandbox in (clouds.aws, clouds.google):
        sandbox.calls.clear()
    assert operator.plan().plan.empty
    assert operator.apply().ok
    assert (clouds.google.calls.writes, clouds.aws.calls.writes) == ([], [])
    removed = operator.destroy()
    assert removed.ok, (removed.left, removed.outcome.failed)
    assert (clouds.google.inventory(), clouds.aws.inventory()) == ({}, {})


def test_run_on_sagemaker_with_its_store_in_cloud_storage(clouds: Clouds, sagemaker_run: SageMakerRun) -> None:
    sagemaker_run.environment = {**clouds.environment, "CLOUDSDK_COMPUTE_REGION": "us-central1"}
    operator = sagemaker_run.operator(count=1, options=ARTIFACTS, store="gs://acme-skerry/runs")
    assert operator.plan().plan.problems == ()
    assert operator.apply().ok
    (name,) = clouds.aws.inventory()["training job"]
    assert len(clouds.aws.inventory()["role"]) == 1
    environment = clouds.aws.client("sagemaker").describe_training_job(TrainingJobName=name)["Environment"]
    assert environment["SKERRY_GOOGLE_AUDIENCE"].startswith("//iam.googleapis.com/projects/")
    assert operator.plan().plan.empty
    assert operator.destroy().ok
    assert (clouds.google.inventory(), clouds.aws.inventory()) == ({}, {})


def test_pool_of_a_destroy_that_was_killed_admits_jobs_again(clouds: Clouds, sagemaker_run: SageMakerRun) -> None:
    sagemaker_run.environment = {**clouds.environment, "CLOUDSDK_COMPUTE_REGION": "us-central1"}
    operator = sagemaker_run.operator(count=1, options=ARTIFACTS, store="gs://acme-skerry/runs")
    assert operator.apply().ok
    (pool,) = clouds.google.inventory()["identity pool"]
    begin_deletions(operator)
    outcome = operator.apply()
    assert outcome.ok, outcome.failed
    assert clouds.google.inventory()["identity pool"] == (pool,)
    assert all(name.startswith(f"{pool}/") for name in clouds.google.inventory()["identity provider"])
    assert operator.plan().plan.empty
    assert operator.destroy().ok
    assert (clouds.google.inventory(), clouds.aws.inventory()) == ({}, {})


def test_destroy_without_a_state_covers_both_clouds(clouds: Clouds, sagemaker_run: SageMakerRun) -> None:
    vertex = VertexRun(sagemaker_run.folder, clouds.google)
    own = vertex.group(1, "role: group").replace("name: a", f"name: v\n    image: {vertex.IMAGE}")
    sagemaker_run.environment = clouds.environment
    operator = sagemaker_run.operator(count=1, options=ARTIFACTS, others=own, store="gs://acme-skerry/runs")
    assert operator.apply().ok
    delete_state(operator)
    removed = operator.destroy()
    assert removed.ok, removed.left
    assert (clouds.google.inventory(), clouds.aws.inventory()) == ({}, {})
