"""Replicas of a group start each other's lost jobs, and the operator's commands take these for their own."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.deploy.account import skerry
from tests.infra.kit import of_kind, record_of
from tests.infra.targets import revival
from tests.infra.targets.sagemaker.kit import context_of, graph_of
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.deploy import list_and_stop_jobs as working
from skerry.infra.deploy import removal as removing
from skerry.infra.deploy.plan_and_apply import apply_plan, make_plan
from skerry.infra.deploy.read_clouds import read_state
from skerry.infra.targets.sagemaker import job_views
from skerry.infra.targets.sagemaker.resource_types import Job
from skerry.runtime.container.sagemaker_peer_jobs import SageMakerPeerJobs, may_help
from skerry.runtime.errors import Conflict
from skerry.testing.aws.conditions import glob, holds, training_job_context

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.infra.targets.runs import SageMakerRun

    from skerry.runtime.container.choose_jobs_to_restart import PeerJob
    from skerry.testing.calls import Call

pytestmark = pytest.mark.usefixtures("quick")
OPTIONS: Final = "revive: peers"
ARN: Final = "arn:aws:sagemaker:us-east-1:123456789012:training-job/"


class Group(revival.Group):
    def __init__(self, run: SageMakerRun) -> None:
        self.training = run.sandbox.training
        super().__init__(run, OPTIONS)

    def peers(self, job: str | None = None) -> SageMakerPeerJobs:
        return SageMakerPeerJobs(ARN + (job or self.first["a-0"]), "a", self.run.environment, FakeClock())

    def newest(self) -> PeerJob:
        """The last one: records of a destroyed run may have higher numbers."""
        return max((job for job in self.peers().list() if job.slot == "a-1"), key=lambda job: job.created_s)


@pytest.fixture
def group(sagemaker_run: SageMakerRun) -> Group:
    return Group(sagemaker_run)


class TestRevival(revival.RevivalSuite):
    """On SageMaker."""


def described(group: Group, name: str) -> dict[str, Any]:
    """Return what the job was created with."""
    client = group.run.sandbox.client("sagemaker")
    row = client.describe_training_job(TrainingJobName=name)
    tags = client.list_tags(ResourceArn=row["TrainingJobArn"])["Tags"]
    states = ("Status", "Time", "Reason", "Transitions", "Artifacts", "Metadata", "Arn", "TrainingJobName")
    fixed = {key: value for key, value in row.items() if not key.endswith(states) or key == "RoleArn"}
    return {**fixed, "tags": {tag["Key"]: tag["Value"] for tag in tags}}


def test_revived_job_is_the_lost_one_with_the_next_number(group: Group) -> None:
    lost = group.first["a-1"]
    name = group.revive()
    assert name == f"{lost}-g1"
    before, after = described(group, lost), described(group, name)
    assert after.pop("tags") == {**before.pop("tags"), "skerry:generation": "1", "skerry:revived": lost}
    assert after == before
    assert {"RoleArn", "StoppingCondition", "Environment"} <= after.keys()


def test_later_apply_records_and_replaces_a_revived_job(group: Group) -> None:
    name = group.revive()
    operator = group.operator
    assert operator.apply("limits.max_hours=12").ok
    state = read_state(operator.deployment())
    assert state is not None
    jobs = {entry.record.name for entry in state.entries if entry.record.kind == "sagemaker_job"}
    assert jobs == {f"{group.first['a-0']}-g1", f"{group.first['a-1']}-g2"}
    assert name not in group.run.sandbox.inventory()["training job"]


def test_destroy_leaves_nothing_of_a_revived_job(group: Group) -> None:
    group.revive()
    assert group.operator.destroy().ok
    assert group.run.live() == 0
    assert set(group.run.sandbox.inventory()) <= {"training job"}


def test_records_of_a_destroyed_run_take_no_place(group: Group) -> None:
    group.revive()
    group.training.finish(group.newest().key, 10)
    assert group.operator.destroy().ok
    # The record of the second job remains, because it failed, and that of the first one is deleted by hand.
    group.run.sandbox.client("sagemaker").delete_training_job(TrainingJobName=group.first["a-1"])
    assert group.operator.apply().ok
    assert group.run.jobs(group.operator) == group.first
    assert group.operator.plan().plan.empty
    assert group.revive() == f"{group.first['a-1']}-g2"
    assert group.run.jobs(group.operator)["a-1"].endswith("-g2")


def test_destroy_ends_a_job_that_is_revived_meanwhile(group: Group) -> None:
    lost = group.lose()
    deployment = group.operator.deployment()
    removal = removing.plan_removal(deployment)
    group.peers().start_next(lost)
    assert group.run.live() == 2
    removed = removing.destroy(deployment, removal, data=True, on_step=lambda _: None, on_begin=lambda _: None)
    assert removed.ok, removed.left
    assert group.run.live() == 0


def test_cancelled_job_is_not_revived(group: Group) -> None:
    group.lose()
    deployment = group.operator.deployment()
    assert working.stop_jobs(deployment, working.jobs_to_stop(deployment, ["a-1"])) == {}
    assert group.peers().read_loss(group.newest()).is_cancelled
    # The other one ran, and its record is deleted with its end.
    assert working.stop_jobs(deployment, working.jobs_to_stop(deployment, ["a-0"])) == {}
    assert [job.slot for job in group.peers().list()] == ["a-1"]


def test_second_replica_and_operator_start_no_second_job(group: Group) -> None:
    lost = group.lose()
    group.peers().start_next(lost)
    with pytest.raises(Conflict, match="already exists"):
        group.peers().start_next(lost)
    planned = make_plan(group.operator.deployment())
    assert planned.plan.empty
    assert group.run.live() == 2


def test_apply_that_planned_before_a_revival_adopts_the_job(group: Group) -> None:
    lost = group.lose()
    deployment = group.operator.deployment()
    planned = make_plan(deployment)
    name = group.peers().start_next(lost)
    group.run.creations()
    assert apply_plan(deployment, planned, lambda _: None, lambda _: None).ok
    assert group.run.jobs(group.operator)["a-1"] == name
    assert group.run.live() == 2


def allowed(role: Role, call: Call) -> bool:
    """Evaluate a call, with the rights that it needs in addition to its own, by the policy of the group's role."""
    job = ARN + str(call.params.get("TrainingJobName", ""))
    needed = [(call.name, "*" if call.operation == "ListTrainingJobs" else call.params.get("ResourceArn", job))]
    if call.operation == "CreateTrainingJob":
        needed += [("sagemaker:AddTags", job), ("iam:PassRole", call.params["RoleArn"])]
    context = {**training_job_context(call.params), "iam:passedtoservice": "sagemaker.amazonaws.com"}
    return all(
        any(
            action in statement.actions
            and any(glob(str(pattern), on) for pattern in statement.resources)
            and holds(json.loads(json.dumps(statement.conditions)), context)
            for statement in role.policies["revive"]
        )
        for action, on in needed
    )


def role_of(run: SageMakerRun, options: str) -> Role:
    context = replace(context_of(run.folder, options, name="a"), run_uri="s3://acme-skerry/runs/tiny", hours=24.0)
    (role,) = of_kind(graph_of(context), Role)
    return role


def test_rights_of_the_role_are_those_of_a_revival(sagemaker_run: SageMakerRun) -> None:
    role = role_of(sagemaker_run, OPTIONS)
    group = Group(sagemaker_run)
    group.run.sandbox.calls.clear()
    lost = group.lose()
    name = group.peers().start_next(lost)
    group.peers(name).superfluous()
    calls = [call for call in group.run.sandbox.calls if call.service == "sagemaker"]
    assert [call for call in calls if not allowed(role, call)] == []
    names = {action for statement in role.policies["revive"] for action in statement.actions}
    assert names == {call.name for call in calls} | {"sagemaker:AddTags", "iam:PassRole"}
    (create,) = [call for call in calls if call.operation == "CreateTrainingJob"]
    in_network = replace(create, params={**create.params, "VpcConfig": VPC})
    assert allowed(role_of(sagemaker_run, f"{OPTIONS}, {NETWORK}"), in_network)
    assert not allowed(role_of(sagemaker_run, f"{OPTIONS}, {NETWORK}"), create)
    for changed in others(create.params):
        assert not allowed(role, replace(create, params=changed)), changed


VPC: Final = {"Subnets": ["subnet-0a", "subnet-0b"], "SecurityGroupIds": ["sg-0a"]}
NETWORK: Final = "byo: {subnets: [subnet-0a, subnet-0b], security_groups: [sg-0a]}"


def others(request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield requests of a compromised replica: each differs in what its role bounds."""
    yield {**request, "TrainingJobName": "theirs-0-abcdef-g1"}
    yield {**request, "ResourceConfig": {**request["ResourceConfig"], "InstanceType": "ml.p5.48xlarge"}}
    yield {**request, "ResourceConfig": {}}
    yield {**request, "ResourceConfig": {**request["ResourceConfig"], "KeepAlivePeriodInSeconds": 3600}}
    yield {**request, "TrainingJobName": request["TrainingJobName"].replace("-1-", "-b-1-")}
    yield {**request, "VpcConfig": VPC}
    yield {**request, "StoppingCondition": {"MaxRuntimeInSeconds": 24 * 3600 + 1}}
    yield {**request, "RoleArn": "arn:aws:iam::123456789012:role/Administrator"}
    yield {**request, "RoleArn": request["RoleArn"].replace("-a-all", "-b-all")}
    yield {**request, "Tags": []}


def test_role_names_its_own_jobs_of_any_number_and_marks_no_other(sagemaker_run: SageMakerRun) -> None:
    context = context_of(sagemaker_run.folder, OPTIONS, name="a", count=12)
    (role,) = of_kind(graph_of(context), Role)
    statements = {statement.sid: statement for statement in role.policies["revive"]}
    start = f"{ARN}{context.stem}-a"
    for name in ("0-abcdef", "11-abcdef", "11-abcdef-g1", "0-abcdef-g10", "0-abcdef-g100"):
        assert any(glob(str(pattern), f"{start}-{name}") for pattern in statements["ReviveJobs"].resources), name
    for name in ("b-0-abcdef", "b-11-abcdef-g1", "b-0-0-abcdef"):
        assert not any(glob(str(pattern), f"{start}-{name}") for pattern in statements["ReviveJobs"].resources), name
    (own, *_) = statements["PassOwnRole"].resources
    assert any(glob(str(pattern), f"{own}-g10") for pattern in statements["PassOwnRole"].resources)
    tags = [{"Key": "skerry:run", "Value": context.run_uri}, {"Key": "skerry:cancelled", "Value": "true"}]
    mark = training_job_context({"ResourceArn": f"{start}-0-abcdef", "Tags": tags})
    assert not holds(json.loads(json.dumps(statements["TagRevivedJobs"].conditions)), mark)


def test_network_of_a_revival_is_that_of_the_group(sagemaker_run: SageMakerRun) -> None:
    role = role_of(sagemaker_run, f"{OPTIONS}, {NETWORK}")
    (create,) = [statement for statement in role.policies["revive"] if statement.sid == "ReviveJobs"]
    present = dict.fromkeys(create.conditions["ForAllValues:StringEquals"], ("false",))
    assert create.conditions["Null"] == {**present, "sagemaker:KeepAlivePeriod": ("true",)}
    assert create.conditions["ForAllValues:StringEquals"]["sagemaker:VpcSubnets"] == tuple(VPC["Subnets"])


def test_role_has_these_rights_only_with_the_option(sagemaker_run: SageMakerRun) -> None:
    assert "revive" not in role_of(sagemaker_run, "").policies
    review = skerry_plan(sagemaker_run, OPTIONS)
    assert "warning: a: revive: peers lets each replica start training jobs" in review
    assert "warning: a:" not in skerry_plan(sagemaker_run, "spot: false")


def skerry_plan(run: SageMakerRun, options: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, text in run.environment.items():
            patch.setenv(name, text)
        return skerry("plan", str(run.write_spec(options=options))).output


REASONS: Final = (
    "AlgorithmError: skerry: exit code 10: the store was away, exit code: 10",
    "AlgorithmError: , exit code: 137",
    "AlgorithmError: Please look at the stderr for more information., exit code: 20",
    "AlgorithmError: skerry: exit code 30: stopped, exit code: 30",
    "CapacityError: Unable to provision requested ML compute capacity",
    "InternalServerError: We encountered an internal error. Please try again.",
    "ClientError: Cannot pull image",
    "",
)


@pytest.mark.parametrize("reason", REASONS)
def test_replicas_and_status_judge_a_failure_alike(reason: str) -> None:
    row = {
        "TrainingJobName": "j",
        "TrainingJobArn": ARN + "j",
        "TrainingJobStatus": "Failed",
        "FailureReason": reason,
        "AlgorithmSpecification": {},
        "RoleArn": "r",
        "ResourceConfig": {},
        "StoppingCondition": {"MaxRuntimeInSeconds": 1},
        "OutputDataConfig": {"S3OutputPath": "s3://b"},
    }
    assert may_help(reason) == job_views.view(record_of(Job), row).again
