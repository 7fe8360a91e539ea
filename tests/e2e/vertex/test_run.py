"""A run on Vertex AI from its spec to its end, by the command line: real containers, each as its service account."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.e2e.conftest import DEADLINE_S, until
from tests.e2e.deployed import Deployed, check_nothing_was_lost, until_closed

from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.local.docker_engine import Engine
    from skerry.testing.google import GoogleSandbox

GROUPS: Final = """\
  - name: v
    count: 2
    target: {{kind: vertex, project: {project}, region: us-central1, machine: n2-standard-4}}
"""


def test_run_continues_after_a_lost_container_and_leaves_nothing(
    google: GoogleSandbox, image: str, engine: Engine, tmp_path: Path
) -> None:
    run = Deployed.write(
        tmp_path,
        store="gs://skerry-e2e/runs",
        image=google.publish(image, "skerry/replica"),
        groups=GROUPS.format(project=google.project),
        slots=("v-0", "v-1"),
        rounds=24,
    )
    run.plan()
    assert google.calls.writes == []
    store = open_store("gs://skerry-e2e/runs/tried")
    with run.watched() as response:
        until(lambda: "v-1: running" in response())
        until_closed(store, 1)
        first = {slot: str(job["job"]) for slot, job in run.jobs().items()}
        # Vertex AI is told to start no job again. The other waits meanwhile.
        engine.containers.signal(google.jobs.container(first["v-1"]), "SIGKILL")
    assert "v-1: failed: exit code 137: killed" in response()
    assert "v-1: restarted (restart 1)" in response()
    jobs = {slot: str(job["job"]) for slot, job in run.jobs().items()}
    assert jobs["v-0"] == first["v-0"]
    assert jobs["v-1"] != first["v-1"]
    assert {google.jobs.wait(job, within_s=DEADLINE_S) for job in jobs.values()} == {"JOB_STATE_SUCCEEDED"}
    check_nothing_was_lost(store, run, killed={"v-1"})

    # Finished jobs are as wanted: there is nothing to do, and nothing is done.
    google.calls.clear()
    watched = run.watch()
    assert watched["ok"]
    assert {job["condition"] for job in watched["jobs"]} == {"done"}
    assert [call for call in google.calls.writes if call.service != "storage"] == []
    assert run.speakers().keys() == set(run.slots)

    run.destroy()
    assert google.inventory() == {}
