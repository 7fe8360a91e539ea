"""A run on SageMaker from its spec to its end, by the command line: real containers with their role's rights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.e2e.conftest import DEADLINE_S
from tests.e2e.deployed import Deployed, check_nothing_was_lost, until_closed

from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.local.docker_engine import Engine
    from skerry.testing.sandbox import Sandbox

GROUPS: Final = """\
  - name: s
    count: 2
    target: {kind: sagemaker, region: us-east-1, instance: ml.c7i.2xlarge}
"""


def test_run_continues_after_a_lost_container_and_leaves_nothing(
    aws: Sandbox, image: str, engine: Engine, tmp_path: Path
) -> None:
    run = Deployed.write(
        tmp_path,
        store="s3://skerry-e2e/runs",
        image=aws.publish(image, "skerry"),
        groups=GROUPS,
        slots=("s-0", "s-1"),
        rounds=8,
    )
    run.plan()
    assert aws.calls.writes == []
    run.apply()
    store = open_store("s3://skerry-e2e/runs/tried")
    first = {slot: str(job["job"]) for slot, job in run.jobs().items()}
    until_closed(store, 1)
    engine.containers.signal(aws.training.container(first["s-1"]), "SIGKILL")
    assert aws.training.wait(first["s-1"], within_s=DEADLINE_S) == "FAILED"

    # SageMaker starts no job again for its exit code. The other waits meanwhile.
    lost = run.jobs()["s-1"]
    assert (lost["condition"], lost["state"], lost["exit_code"]) == ("lost", "Failed", 137)
    run.apply()
    jobs = {slot: str(job["job"]) for slot, job in run.jobs().items()}
    assert jobs == {**first, "s-1": f"{first['s-1']}-g1"}
    assert {aws.training.wait(job, within_s=DEADLINE_S) for job in jobs.values()} == {"SUCCEEDED"}
    check_nothing_was_lost(store, run, killed={"s-1"})

    # Finished jobs are as wanted: there is nothing to do, and nothing is done.
    aws.calls.clear()
    watched = run.watch()
    assert watched["ok"]
    assert {job["condition"] for job in watched["jobs"]} == {"done"}
    assert [call for call in aws.calls.writes if call.service != "s3"] == []
    assert run.speakers().keys() == set(run.slots)

    run.destroy()
    assert aws.inventory() == {}
