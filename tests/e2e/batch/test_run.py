"""A run on AWS Batch from its spec to its end, by the command line: real containers, each with its role's rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tests.e2e.conftest import lacking

from skerry.infra.testing.sandbox import Sandbox
from skerry.runtime import keys
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.records import Outcome
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from skerry.infra.engine import Engine
    from skerry.runtime.store import Store

ROOT: Final = Path(__file__).parents[3]
# Of a run of a few rounds: two cores import torch in four seconds for each replica.
DEADLINE_S: Final = 240.0
SPEC: Final = """
run: tried
store: s3://skerry-e2e/runs
image: {image}
code: {{path: {root}/runtime/examples/tiny_gpt, command: [python, train.py, --width, "32", --layers, "1"]}}
outer: {{rounds: {rounds}, sync_every: 4}}
faults: {{min_replicas: 2, grace: 10s, start_window: 60s}}
limits: {{max_hours: 3}}
replicas:
  - name: c
    count: 4
    target:
      kind: aws_batch
      region: us-east-1
      instance_types: [c7i.2xlarge]
      memory: 3GiB
      shared_memory: 256MiB
"""


@pytest.fixture
def sandbox(skerry_registry: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """With every right checked: what the plan grants must be enough, and the bucket's own policy holds."""
    if skerry_registry is None:
        lacking("no docker-registry; as root: apt-get install --no-install-recommends docker-registry")
    with Sandbox(containers=True, enforce_iam=True, registry=skerry_registry) as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def reference(sandbox: Sandbox, image: str) -> str:
    """The replica image as a spec pins it."""
    return sandbox.publish(image, "skerry")


def skerry(*words: str) -> str:
    """What the command printed; it must succeed."""
    ended = subprocess.run(
        [sys.executable, "-c", "from skerry.infra.cli import main; main()", *words],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


def until(condition: Callable[[], object]) -> None:
    clock = SystemClock()
    wait_until(clock, lambda: condition() or None, clock.now() + DEADLINE_S, Backoff(first=0.1, cap=0.5))


def jobs_of(sandbox: Sandbox, status: str) -> dict[str, str]:
    """Ids by name, of every queue."""
    batch = sandbox.client("batch")
    return {
        one["jobName"]: one["jobId"]
        for queue in batch.describe_job_queues()["jobQueues"]
        for one in batch.list_jobs(jobQueue=queue["jobQueueName"], jobStatus=status)["jobSummaryList"]
    }


def outcomes(store: Store) -> list[tuple[str, str]]:
    found = (Outcome.parse(store.read(entry.key) or b"", entry.key) for entry in store.list(keys.OUTCOMES))
    return sorted((one.slot, one.status) for one in found)


def test_a_run_loses_a_container_ends_equal_everywhere_and_leaves_nothing(
    sandbox: Sandbox, reference: str, engine: Engine, tmp_path: Path
) -> None:
    spec = tmp_path / "skerry.yaml"
    spec.write_text(SPEC.format(image=reference, root=ROOT, rounds=6))
    skerry("plan", str(spec))
    assert sandbox.calls.writes == []

    skerry("apply", str(spec), "--auto-approve")
    store = open_store("s3://skerry-e2e/runs/tried")
    jobs = jobs_of(sandbox, "RUNNABLE") | jobs_of(sandbox, "STARTING") | jobs_of(sandbox, "RUNNING")
    assert len(jobs) == 4
    killed = jobs[max(jobs)]
    until(lambda: store.list(keys.COMMITS))
    told = json.loads(skerry("status", str(spec), "--json"))
    assert [job["slot"] for job in told["jobs"]] == ["c-0", "c-1", "c-2", "c-3"]
    assert told["run"]["closed"] >= 1
    engine.containers.signal(sandbox.batch.container(killed), "SIGKILL")

    assert {sandbox.batch.wait(job, within_s=DEADLINE_S) for job in jobs.values()} == {"SUCCEEDED"}
    attempts = sandbox.client("batch").describe_jobs(jobs=[killed])["jobs"][0]["attempts"]
    assert [one["container"]["exitCode"] for one in attempts] == [137, 0]
    assert {slot for slot, status in outcomes(store) if status == "done"} == {"c-0", "c-1", "c-2", "c-3"}

    # Finished jobs are as wanted: there is nothing to do, and nothing is done.
    sandbox.calls.clear()
    watched = json.loads(skerry("up", str(spec), "--auto-approve", "--json").splitlines()[-1])
    assert watched["ok"]
    assert {job["condition"] for job in watched["jobs"]} == {"done"}
    assert watched["run"]["agreement"]["average"]
    assert watched["run"]["agreement"]["state"]
    assert [call for call in sandbox.calls.writes if call.service != "s3"] == []
    assert json.loads(skerry("doctor", str(spec), "--deep", "--json").splitlines()[-1])["ok"]
    lines = skerry("logs", str(spec)).splitlines()
    assert {line.split("]")[0] for line in lines} == {"[c-0", "[c-1", "[c-2", "[c-3"}
    only = skerry("logs", str(spec), "--replica", "c-3").splitlines()
    # Both of its attempts.
    assert sum("4 ranks" in line or "c-3 of 4" in line for line in only) == 2

    skerry("destroy", str(spec), "--yes", "--data")
    assert sandbox.inventory() == {}
