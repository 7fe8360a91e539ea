"""Whole commands against a project in memory: plan, apply, again, after a loss, with a lost state, and away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.targets.vertex.deploying import operator

from skerry.infra.deploy import running_jobs as working
from skerry.infra.deploy.read_clouds import read_state
from skerry.infra.provision.plan import Action
from skerry.infra.provision.state import Id
from skerry.infra.targets.vertex.jobs import listed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.infra.deploy.account import Operator

    from skerry.infra.clouds.google.session import Google
    from skerry.testing.google.sandbox import GoogleSandbox

JOBS = ("vertex_job.v-0", "vertex_job.v-1")
RUN = "gs://acme-skerry/runs/tiny"


def acting(deployer: Operator, *overrides: str) -> dict[str, Action]:
    return {str(change.id): change.action for change in deployer.plan(*overrides).plan.changes if change.acts}


def numbers(deployer: Operator) -> dict[str, str]:
    return {view.slot: view.job for _, view in working.list_jobs(deployer.deployment())}


def creations(sandbox: GoogleSandbox) -> int:
    return sum(call.name.endswith("customJobs.create") for call in sandbox.calls)


def on_record(google: Google, sandbox: GoogleSandbox) -> int:
    """Return the number of jobs of the run, ended ones included."""
    return len(list(listed(google, RUN, sandbox.project, "us-central1")))


@pytest.mark.parametrize("role", ["group", "replica"])
def test_apply_creates_once_and_destroy_leaves_nothing(
    tmp_path: Path, google: Google, sandbox: GoogleSandbox, role: str
) -> None:
    deployer = operator(tmp_path, sandbox, role=role)
    assert deployer.apply().ok
    assert {kind: len(names) for kind, names in sandbox.inventory().items()} == {
        "bucket": 1,
        "job": 2,
        "repository": 1,
        "service account": 1 if role == "group" else 2,
    }
    sandbox.calls.clear()
    assert acting(deployer) == {}
    assert deployer.apply().ok
    assert sandbox.calls.writes == []
    sandbox.jobs.start(numbers(deployer)["v-0"])
    sandbox.jobs.finish(numbers(deployer)["v-1"])
    removed = deployer.destroy()
    assert removed.ok, (removed.left, removed.outcome.failed)
    assert sandbox.inventory() == {}
    assert on_record(google, sandbox) == 0


@pytest.mark.parametrize("how", ["exit code 10", "preempted", "no capacity", "cancelled in the console"])
def test_next_apply_recreates_lost_jobs_only(tmp_path: Path, google: Google, sandbox: GoogleSandbox, how: str) -> None:
    deployer = operator(tmp_path, sandbox)
    assert deployer.apply().ok
    before = numbers(deployer)
    sandbox.jobs.finish(before["v-1"])
    match how:
        case "exit code 10":
            sandbox.jobs.finish(before["v-0"], 10)
        case "preempted":
            sandbox.jobs.fail(before["v-0"], 8, "STOCKOUT: the Spot VM was preempted")
        case "no capacity":
            sandbox.jobs.fail(before["v-0"], 8, "Resources are insufficient in region: us-central1.")
        case _:
            google.call(
                "aiplatform",
                "POST",
                f"v1/projects/{sandbox.project}/locations/us-central1/customJobs/{before['v-0']}:cancel",
            )
    assert acting(deployer) == {f"{JOBS[0]}#1": Action.REPLACE, JOBS[0]: Action.DELETE}
    sandbox.calls.clear()
    assert deployer.apply().ok
    assert creations(sandbox) == 1
    after = numbers(deployer)
    assert after["v-0"] != before["v-0"]
    assert after["v-1"] == before["v-1"]
    assert on_record(google, sandbox) == 2
    assert acting(deployer) == {}


def test_new_code_ends_a_job_before_it_is_replaced(tmp_path: Path, google: Google, sandbox: GoogleSandbox) -> None:
    deployer = operator(tmp_path, sandbox)
    assert deployer.apply().ok
    for job in numbers(deployer).values():
        sandbox.jobs.start(job)
    (tmp_path / "train" / "train.py").write_text("print('training, and better')\n")
    assert acting(deployer) == {
        **{f"{address}#1": Action.REPLACE for address in JOBS},
        **dict.fromkeys(JOBS, Action.DELETE),
    }
    sandbox.calls.clear()
    assert deployer.apply().ok
    verbs = [call.name.rpartition(".")[2] for call in sandbox.calls if "customJobs" in call.name and call.writes]
    assert sorted(verbs) == ["cancel", "cancel", "create", "create", "delete", "delete"]
    assert on_record(google, sandbox) == 2


def test_lost_state_adopts_running_jobs(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    deployer = operator(tmp_path, sandbox)
    assert deployer.apply().ok
    before = numbers(deployer)
    sandbox.jobs.finish(before["v-1"])
    _forget(deployer)
    changes = {change.id: change.action for change in deployer.plan().plan.changes}
    assert changes[Id(JOBS[0], 0)] is Action.ADOPT
    assert not {Action.CREATE, Action.REPLACE, Action.DELETE} & set(changes.values())
    sandbox.calls.clear()
    assert deployer.apply().ok
    assert creations(sandbox) == 0
    assert numbers(deployer) == before
    assert acting(deployer) == {}


def test_lost_state_with_a_changed_spec_ends_running_jobs(
    tmp_path: Path, google: Google, sandbox: GoogleSandbox
) -> None:
    deployer = operator(tmp_path, sandbox)
    assert deployer.apply().ok
    before = numbers(deployer)
    _forget(deployer)
    changed = "replicas[0].target.machine=n2-standard-8"
    assert deployer.apply(changed).ok
    assert not set(numbers(deployer).values()) & set(before.values())
    assert on_record(google, sandbox) == 2


def _forget(deployer: Operator) -> None:
    """Delete the state."""
    store = deployer.deployment().open_store()
    for entry in list(store.list("state/")):
        store.delete(entry.key)
    assert read_state(deployer.deployment()) is None
