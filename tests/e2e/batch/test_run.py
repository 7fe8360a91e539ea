"""A run on AWS Batch from its spec to its end, by the command line: real containers, each with its role's rights."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

import pytest
from tests.e2e.conftest import DEADLINE_S
from tests.e2e.deployed import Deployed, check_all_are_done, skerry, until_closed

from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.local.docker_engine import Engine
    from skerry.testing.sandbox import Sandbox

GROUPS: Final = """\
  - name: c
    count: 4
    target:
      kind: aws_batch
      region: us-east-1
      instance_types: [c7i.2xlarge]
      memory: 3GiB
      shared_memory: 256MiB
"""


@pytest.mark.usefixtures("image")
def test_a_deployed_run_loses_a_container_ends_equal_and_leaves_nothing(
    aws: Sandbox, registry: str, engine: Engine, tmp_path: Path
) -> None:
    run = Deployed.write(
        tmp_path,
        store="s3://skerry-e2e/runs",
        image=f"{registry}/skerry:replaced",
        groups=GROUPS,
        slots=("c-0", "c-1", "c-2", "c-3"),
        rounds=6,
        needed=2,
    )
    run.plan()
    assert aws.calls.writes == []
    printed = run.deploy("deploy-batch")
    pinned = re.findall(r"^  image: (.*@sha256:[0-9a-f]{64})$", printed, re.MULTILINE)
    assert f"remove: skerry destroy {run.spec}" in printed
    run.spec.write_text(run.spec.read_text().replace(f"{registry}/skerry:replaced", *pinned))
    store = open_store("s3://skerry-e2e/runs/tried")
    jobs = {slot: str(job["job"]) for slot, job in run.jobs().items()}
    until_closed(store, 1)
    response = json.loads(skerry("status", str(run.spec), "--json"))
    assert [job["slot"] for job in response["jobs"]] == list(run.slots)
    assert response["run"]["closed"] >= 1
    engine.containers.signal(aws.batch.container(jobs["c-3"]), "SIGKILL")

    # Batch starts it again; the others need not wait.
    assert {aws.batch.wait(job, within_s=DEADLINE_S) for job in jobs.values()} == {"SUCCEEDED"}
    attempts = aws.client("batch").describe_jobs(jobs=[jobs["c-3"]])["jobs"][0]["attempts"]
    assert [attempt["container"]["exitCode"] for attempt in attempts] == [137, 0]
    check_all_are_done(store, run)

    # Finished jobs are as wanted: there is nothing to do, and nothing is done.
    aws.calls.clear()
    watched = run.watch()
    assert watched["ok"]
    assert {job["condition"] for job in watched["jobs"]} == {"done"}
    assert watched["run"]["agreement"]["average"]
    assert watched["run"]["agreement"]["state"]
    assert [call for call in aws.calls.writes if call.service != "s3"] == []
    assert run.doctor()["ok"]
    assert run.speakers().keys() == set(run.slots)
    only = skerry("logs", str(run.spec), "--replica", "c-3").splitlines()
    # Both of its attempts.
    assert sum("4 ranks" in line or "c-3 of 4" in line for line in only) == 2

    run.destroy()
    assert aws.inventory() == {}
