"""One run in two clouds and three services: AWS Batch, SageMaker and Vertex AI, with one bucket between them.

Replicas on AWS have their roles' keys. Those on Vertex AI have no key at all: they earn a role of AWS with the identity
of their service account.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.e2e.conftest import DEADLINE_S
from tests.e2e.deployed import Deployed, check_nothing_was_lost, until_closed

from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.local.docker_engine import Engine
    from skerry.testing.both_clouds import Clouds

GROUPS: Final = """\
  - name: b
    count: 2
    target:
      kind: aws_batch
      region: us-east-1
      instance_types: [c7i.2xlarge]
      memory: 3GiB
      shared_memory: 256MiB
  - name: s
    count: 2
    target: {{kind: sagemaker, region: us-east-1, instance: ml.c7i.2xlarge}}
  - name: v
    count: 2
    image: {image}
    target: {{kind: vertex, project: {project}, region: us-central1, machine: n2-standard-4}}
"""
# One in each service.
KILLED: Final = ("b-1", "s-1", "v-1")


def test_run_in_three_services_survives_a_lost_container_in_each(
    clouds: Clouds, image: str, engine: Engine, tmp_path: Path
) -> None:
    aws, google = clouds.aws, clouds.google
    driven = {"b": aws.batch, "s": aws.training, "v": google.jobs}
    run = Deployed.write(
        tmp_path,
        store="s3://skerry-e2e/runs",
        image=aws.publish(image, "skerry"),
        groups=GROUPS.format(image=google.publish(image, "skerry/replica"), project=google.project),
        slots=[f"{group}-{number}" for group in driven for number in range(2)],
        rounds=4,
    )
    run.plan()
    assert aws.calls.writes == google.calls.writes == []
    run.apply()
    store = open_store("s3://skerry-e2e/runs/tried")
    first = {slot: str(job["job"]) for slot, job in run.jobs().items()}
    until_closed(store, 1)
    for slot in KILLED:
        engine.containers.signal(driven[slot[0]].container(first[slot]), "SIGKILL")
    assert aws.training.wait(first["s-1"], within_s=DEADLINE_S) == "FAILED"
    assert google.jobs.wait(first["v-1"], within_s=DEADLINE_S) == "JOB_STATE_FAILED"

    # Batch restarts its own job; the next apply restarts the other two. The other replicas wait meanwhile.
    response = run.jobs()
    assert {slot: job["exit_code"] for slot, job in response.items() if job["condition"] == "lost"} == {
        "s-1": 137,
        "v-1": 137,
    }
    run.apply()
    jobs = {slot: str(job["job"]) for slot, job in run.jobs().items()}
    assert {slot for slot in jobs if jobs[slot] != first[slot]} == {"s-1", "v-1"}
    ends = {driven[slot[0]].wait(job, within_s=DEADLINE_S) for slot, job in jobs.items()}
    assert ends == {"SUCCEEDED", "JOB_STATE_SUCCEEDED"}
    attempts = aws.client("batch").describe_jobs(jobs=[jobs["b-1"]])["jobs"][0]["attempts"]
    assert [attempt["container"]["exitCode"] for attempt in attempts] == [137, 0]
    check_nothing_was_lost(store, run, killed=KILLED)
    assert any(call.name == "sts:AssumeRoleWithWebIdentity" for call in aws.calls)

    # Finished jobs are as wanted: there is nothing to do, and nothing is done, in no cloud.
    aws.calls.clear()
    google.calls.clear()
    watched = run.watch()
    assert watched["ok"]
    assert {job["condition"] for job in watched["jobs"]} == {"done"}
    assert [call for call in aws.calls.writes if call.service != "s3"] == []
    assert google.calls.writes == []
    assert run.speakers().keys() == set(run.slots)
    assert run.doctor()["ok"]

    run.destroy()
    assert (aws.inventory(), google.inventory()) == ({}, {})
