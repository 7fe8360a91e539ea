"""Replicas of a group on Vertex AI start each other's lost jobs, and the operator's commands take these for theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.kit import record_of
from tests.infra.targets import revival
from tests.infra.targets.vertex.kit import trainer

from skerry.infra.deploy import list_and_stop_jobs as working
from skerry.infra.deploy import removal as removing
from skerry.infra.deploy.plan_and_apply import apply_plan, make_plan
from skerry.infra.targets.vertex import job_views
from skerry.infra.targets.vertex.resource_types import Job
from skerry.runtime.container.choose_jobs_to_restart import Leave, Start
from skerry.runtime.container.vertex_peer_jobs import VertexPeerJobs, may_help
from skerry.runtime.errors import Unauthorized

if TYPE_CHECKING:
    from tests.infra.targets.runs import VertexRun


pytestmark = pytest.mark.usefixtures("quick")


class Group(revival.Group):
    def __init__(self, run: VertexRun, *, may_start: bool = True) -> None:
        self.sandbox = run.sandbox
        self.email = trainer(run.sandbox, may_start=may_start)
        super().__init__(run, f"revive: peers, byo: {{service_account: {self.email}}}")

    def peers(self, job: str | None = None) -> VertexPeerJobs:
        environment = {
            **self.sandbox.acting_as(self.email),
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM": f"{self.sandbox.endpoint}/",
        }
        place = f"projects/{self.sandbox.number}/locations/us-central1"
        return VertexPeerJobs(place, job or self.first["a-0"], environment)

    def described(self, number: str) -> dict[str, Any]:
        path = f"/v1/projects/{self.sandbox.project}/locations/us-central1/customJobs/{number}"
        status, row = self.sandbox.call("GET", path)
        assert status == 200, row
        return row

    def create(self, row: dict[str, Any]) -> None:
        body = {key: row[key] for key in ("displayName", "jobSpec", "labels")}
        path = f"/v1/projects/{self.sandbox.project}/locations/us-central1/customJobs"
        status, answer = self.sandbox.call("POST", path, body)
        assert status == 200, answer


@pytest.fixture
def group(vertex_run: VertexRun) -> Group:
    return Group(vertex_run)


class TestRevival(revival.RevivalSuite):
    """On Vertex AI."""


def test_revived_job_is_the_lost_one_with_the_next_number(group: Group) -> None:
    group.sandbox.calls.clear()
    name = group.revive()
    used = {call.name.rpartition(".")[2] for call in group.sandbox.calls if call.caller.startswith("serviceAccount:")}
    assert used == {"create", "get", "list"}
    lost, revived = group.described(group.first["a-1"]), group.described(name)
    assert revived["jobSpec"] == lost["jobSpec"]
    assert revived["displayName"] == f"{lost['displayName']}-g1"
    assert revived["labels"] == {**lost["labels"], "skerry-generation": "1", "skerry-revived": group.first["a-1"]}


def test_destroy_leaves_no_job_of_a_revival(group: Group) -> None:
    group.revive()
    lost = group.lose()
    deployment = group.operator.deployment()
    removal = removing.plan_removal(deployment)
    group.peers().start_next(lost)
    removed = removing.destroy(deployment, removal, data=True, on_step=lambda _: None, on_begin=lambda _: None)
    assert removed.ok, removed.left
    assert group.sandbox.custom_jobs.names(over=True) == group.sandbox.custom_jobs.names(over=False) == []


def test_cancelled_job_is_not_revived(group: Group) -> None:
    group.lose()
    deployment = group.operator.deployment()
    assert working.stop_jobs(deployment, working.jobs_to_stop(deployment, ["a-1"])) == {}
    decision = group.decide()
    assert isinstance(decision, Leave)
    assert decision.reason == "its service has no record of a job"
    ((_, view),) = [pair for pair in working.list_jobs(group.operator.deployment()) if pair[1].slot == "a-1"]
    assert view.why == "stopped by `skerry cancel`; `skerry apply` starts it again"


def test_second_of_two_jobs_with_one_number_does_not_run(group: Group) -> None:
    lost = group.lose()
    name, second = group.peers().start_next(lost), group.peers().start_next(lost)
    assert group.peers(name).superfluous() is None
    assert group.peers(second).superfluous() == f"{name} was created before this job, for the same slot"
    group.sandbox.jobs.finish(second, 30)
    assert group.run.jobs(group.operator)["a-1"] == name
    assert group.operator.plan().plan.empty
    # The end of the second one does not count for the slot.
    group.sandbox.jobs.finish(name, 10)
    decision = group.decide()
    assert isinstance(decision, Start)
    assert (decision.job.key, decision.generation) == (name, 2)


def test_job_of_another_account_with_labels_of_the_run_does_not_count(group: Group) -> None:
    """Any account that may create jobs in the project can set the labels of a run."""
    lost = group.lose()
    foreign = group.described(lost.job.key)
    foreign["labels"] |= {"skerry-generation": "1", "skerry-revived": lost.job.key}
    del foreign["jobSpec"]["serviceAccount"]  # the service's own account, which any account may use
    group.create(foreign)
    group.create({**foreign, "labels": {**foreign["labels"], "skerry-generation": "x"}})
    name = group.peers().start_next(lost)
    assert group.peers(name).superfluous() is None
    assert group.newest().key == name
    assert group.run.jobs(group.operator)["a-1"] == name


def test_apply_that_planned_before_a_revival_takes_its_place(group: Group) -> None:
    lost = group.lose()
    deployment = group.operator.deployment()
    planned = make_plan(deployment)
    name = group.peers().start_next(lost)
    assert apply_plan(deployment, planned, lambda _: None, lambda _: None).ok
    current = group.run.jobs(group.operator)["a-1"]
    assert (current != name, group.run.live()) == (True, 2)
    assert group.peers(current).superfluous() is None


def test_account_without_the_right_to_act_as_itself_starts_nothing(vertex_run: VertexRun) -> None:
    group = Group(vertex_run, may_start=False)
    with pytest.raises(Unauthorized, match="status=403"):
        group.revive()
    assert group.run.live() == 1


MESSAGES: Final = (
    ("The replica workerpool0-0 exited with a non-zero status of 10.", 3),
    ("The replica workerpool0-0 exited with a non-zero status of 20. see https://x", 3),
    ("The replica workerpool0-0 exited with a non-zero status of 30.", 3),
    ("The replica workerpool0-0 ran out-of-memory and exited with a non-zero status of 137(SIGKILL).", 3),
    ("STOCKOUT: the Spot VM was preempted, and resources are insufficient to restart the job.", 8),
    ("The following quotas are exceeded: insufficient resources", 8),
    ("There are not have enough resources", 8),
    ("The job exceeded its timeout.", 4),
    ("Image pull failed: manifest unknown", 13),
    ("Permission denied", 7),
    ("Internal error encountered.", 13),
    ("", 14),
    ("", 8),
    ("something new", 3),
)


@pytest.mark.parametrize(("message", "code"), MESSAGES)
def test_replicas_and_status_judge_a_failure_alike(message: str, code: int) -> None:
    error = {"message": message, "code": code}
    row = {"name": "projects/1/locations/r/customJobs/2", "state": "JOB_STATE_FAILED", "error": error}
    assert may_help(error) == job_views.view(record_of(Job), row).again
