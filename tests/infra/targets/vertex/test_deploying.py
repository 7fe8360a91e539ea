"""Whole commands against a project in memory: plan, apply, again, after a loss, with a lost state, and away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.vertex.deploying import operator

from skerry.infra.deploy import jobs as working
from skerry.infra.handler import Condition
from skerry.infra.plan import Action
from skerry.infra.state import Id
from skerry.infra.targets.vertex.working import listed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.infra.deploy.account import Operator

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.testing.google.sandbox import GoogleSandbox

JOBS = ("vertex_job.v-0", "vertex_job.v-1")
RUN = "gs://acme-skerry/runs/tiny"


def acting(one: Operator, *overrides: str) -> dict[str, Action]:
    return {str(change.id): change.action for change in one.plan(*overrides).plan.changes if change.acts}


def numbers(one: Operator) -> dict[str, str]:
    return {view.slot: view.job for _, view in working.jobs(one.deployment())}


def creations(sandbox: GoogleSandbox) -> int:
    return sum(call.name.endswith("customJobs.create") for call in sandbox.calls)


def on_record(google: Google, sandbox: GoogleSandbox) -> int:
    """Jobs of the run, those that are over among them."""
    return len(list(listed(google, RUN, sandbox.project, "us-central1")))


@pytest.mark.parametrize("role", ["group", "replica"])
def test_a_run_is_made_once_and_taken_away_whole(
    tmp_path: Path, google: Google, sandbox: GoogleSandbox, role: str
) -> None:
    one = operator(tmp_path, sandbox, role=role)
    assert one.apply().ok
    assert {kind: len(names) for kind, names in sandbox.inventory().items()} == {
        "bucket": 1,
        "job": 2,
        "repository": 1,
        "service account": 1 if role == "group" else 2,
    }
    sandbox.calls.clear()
    assert acting(one) == {}
    assert one.apply().ok
    assert sandbox.calls.writes == []
    sandbox.jobs.start(numbers(one)["v-0"])
    sandbox.jobs.finish(numbers(one)["v-1"])
    removed = one.destroy()
    assert removed.ok, (removed.left, removed.outcome.failed)
    assert sandbox.inventory() == {}
    assert on_record(google, sandbox) == 0


@pytest.mark.parametrize("how", ["a code for again", "taken back", "no capacity", "stopped by somebody"])
def test_a_job_that_was_lost_is_made_again_by_the_next_apply_and_one_that_is_done_is_not(
    tmp_path: Path, google: Google, sandbox: GoogleSandbox, how: str
) -> None:
    one = operator(tmp_path, sandbox)
    assert one.apply().ok
    before = numbers(one)
    sandbox.jobs.finish(before["v-1"])
    match how:
        case "a code for again":
            sandbox.jobs.finish(before["v-0"], 10)
        case "taken back":
            sandbox.jobs.fail(before["v-0"], 8, "STOCKOUT: the Spot VM was preempted")
        case "no capacity":
            sandbox.jobs.fail(before["v-0"], 8, "Resources are insufficient in region: us-central1.")
        case _:
            google.call(
                "aiplatform",
                "POST",
                f"v1/projects/{sandbox.project}/locations/us-central1/customJobs/{before['v-0']}:cancel",
            )
    assert acting(one) == {f"{JOBS[0]}#1": Action.REPLACE, JOBS[0]: Action.DELETE}
    sandbox.calls.clear()
    assert one.apply().ok
    assert creations(sandbox) == 1
    after = numbers(one)
    assert after["v-0"] != before["v-0"]
    assert after["v-1"] == before["v-1"]
    assert on_record(google, sandbox) == 2
    assert acting(one) == {}


def test_stopped_jobs_are_started_again_by_the_next_apply(
    tmp_path: Path, google: Google, sandbox: GoogleSandbox
) -> None:
    one = operator(tmp_path, sandbox)
    assert one.apply().ok
    deployment = one.deployment()
    working.end(deployment, working.doomed(deployment, ["v-0"]))
    views = {view.slot: view for _, view in working.jobs(one.deployment())}
    assert (views["v-0"].condition, views["v-1"].condition) == (Condition.LOST, Condition.READY)
    assert on_record(google, sandbox) == 1
    assert one.apply().ok
    assert [view.condition for _, view in working.jobs(one.deployment())] == [Condition.READY, Condition.READY]


def test_new_code_ends_every_job_before_its_next_is_made(
    tmp_path: Path, google: Google, sandbox: GoogleSandbox
) -> None:
    one = operator(tmp_path, sandbox)
    assert one.apply().ok
    for job in numbers(one).values():
        sandbox.jobs.start(job)
    (tmp_path / "train" / "train.py").write_text("print('training, and better')\n")
    assert acting(one) == {
        **{f"{address}#1": Action.REPLACE for address in JOBS},
        **dict.fromkeys(JOBS, Action.DELETE),
    }
    sandbox.calls.clear()
    assert one.apply().ok
    verbs = [call.name.rpartition(".")[2] for call in sandbox.calls if "customJobs" in call.name and call.writes]
    assert sorted(verbs) == ["cancel", "cancel", "create", "create", "delete", "delete"]
    assert on_record(google, sandbox) == 2


def test_whoever_lost_the_state_finds_the_jobs_and_makes_none(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    one = operator(tmp_path, sandbox)
    assert one.apply().ok
    before = numbers(one)
    sandbox.jobs.finish(before["v-1"])
    _forget(one)
    changes = {change.id: change.action for change in one.plan().plan.changes}
    assert changes[Id(JOBS[0], 0)] is Action.ADOPT
    assert not {Action.CREATE, Action.REPLACE, Action.DELETE} & set(changes.values())
    sandbox.calls.clear()
    assert one.apply().ok
    assert creations(sandbox) == 0
    assert numbers(one) == before
    assert acting(one) == {}


def test_whoever_lost_the_state_and_changed_the_spec_ends_what_runs_as_before(
    tmp_path: Path, google: Google, sandbox: GoogleSandbox
) -> None:
    one = operator(tmp_path, sandbox)
    assert one.apply().ok
    before = numbers(one)
    _forget(one)
    changed = "replicas[0].target.machine=n2-standard-8"
    assert one.apply(changed).ok
    assert not set(numbers(one).values()) & set(before.values())
    assert on_record(google, sandbox) == 2


def _forget(one: Operator) -> None:
    """The state is gone."""
    store = one.deployment().store
    for entry in list(store.list("state/")):
        store.delete(entry.key)
    assert one.deployment().state() is None
