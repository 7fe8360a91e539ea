from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
from tests.infra.clouds.aws.account import ACCOUNT, REGION, RUN
from tests.infra.clouds.aws.handlers import AwsHandlerSuite
from tests.infra.targets.aws import IMAGE, Answers
from tests.infra.targets.sagemaker.kit import Scene, context_of
from tests.support.batchplace import make_role, trust

from skerry.infra.provision.graph import as_json
from skerry.infra.provision.handler import Condition, Desired
from skerry.infra.provision.target_and_store_interfaces import stem_of
from skerry.infra.targets.sagemaker import jobs, requests
from skerry.infra.targets.sagemaker.jobs import Jobs
from skerry.infra.targets.sagemaker.resource_types import Job
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.runtime.errors import Conflict, Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.clocks import FakeClock

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Observed
    from skerry.testing.sandbox import Sandbox

ROLE = f"arn:aws:iam::{ACCOUNT}:role/skerry"
SERVICE = "sagemaker.amazonaws.com"


class TestTrainingJobs(AwsHandlerSuite):
    REMEDY: ClassVar[str] = "rename the run, or delete that job"

    @pytest.fixture(autouse=True)
    def role(self, sandbox: Sandbox) -> None:
        make_role(sandbox, "skerry", SERVICE)

    def handler(self, aws: Aws) -> Jobs:
        return Jobs(aws)

    def resource(self, aws: Aws) -> Job:
        del aws
        return Job(
            key="sm-0",
            name=f"{stem_of(RUN)}-sm-0-3d4e5f",
            region=REGION,
            image=IMAGE,
            environment={"SKERRY_RUN": RUN},
            role=ROLE,
            instance="ml.g5.xlarge",
            max_runtime_s=3600,
            output="s3://acme/runs/tiny/sagemaker",
        )

    def changed(self, resource: Resource) -> None:
        """A job never changes."""

    def assert_as_desired(self, desired: Desired, observed: Observed) -> None:
        """Values that SageMaker may fill in are not compared: a difference would replace the job."""
        expected = {name: as_json(value) for name, value in desired.settings.items()}
        assert {name: expected[name] for name in observed.settings} == dict(observed.settings)
        assert {"image", "environment", "role", "instance", "spot", "max_runtime_s"} <= set(observed.settings)


@pytest.fixture
def scene(aws: Aws, tmp_path: Path) -> Scene:
    """Return a run without jobs: all its other resources exist."""
    built = Scene(aws, context_of(tmp_path))
    built.make(jobs=False)
    return built


@pytest.fixture
def clock(aws: Aws) -> Iterator[FakeClock]:
    clock = cast("FakeClock", aws.clock)
    clock.pauses.clear()
    yield clock
    clock.on_pause = lambda: None


def count_calls(sandbox: Sandbox, name: str) -> int:
    return sandbox.calls.names.count(f"sagemaker:{name}")


def test_ended_job_is_done_or_lost(aws: Aws, sandbox: Sandbox, tmp_path: Path) -> None:
    scene = Scene(aws, context_of(tmp_path, "spot: true", count=3))
    scene.make()
    done, failed, stopped = scene.wanted_jobs()

    def state(desired: Desired) -> tuple[object, ...]:
        seen = scene.seen_job(desired)
        assert seen.owner == desired.run
        return seen.condition, seen.detail

    assert state(done) == (Condition.READY, "Pending")
    sandbox.training.start(done.name)
    assert state(done) == (Condition.READY, "Training")
    sandbox.training.interrupt(done.name)
    assert state(done) == (Condition.READY, "Interrupted")
    sandbox.training.finish(done.name)
    assert state(done) == (Condition.DONE, "Completed")
    sandbox.training.finish(failed.name, 20, reason="loss is nan")
    assert state(failed) == (Condition.LOST, "AlgorithmError: loss is nan, exit code: 20")
    sandbox.training.stop(stopped.name, "by hand")
    assert state(stopped) == (Condition.LOST, "Stopped")


def test_recorded_job_is_read_in_one_call(scene: Scene, sandbox: Sandbox) -> None:
    scene.make()
    sandbox.calls.clear()
    wanted = scene.wanted_jobs()
    assert len(scene.jobs.read(wanted)) == 2
    assert (count_calls(sandbox, "DescribeTrainingJob"), count_calls(sandbox, "ListTags")) == (2, 0)
    forgotten = [replace(desired, outputs={}) for desired in wanted]
    assert [job and job.owner for job in scene.jobs.read(forgotten)] == [wanted[0].run] * 2
    assert (count_calls(sandbox, "DescribeTrainingJob"), count_calls(sandbox, "ListTags")) == (4, 2)


def test_create_is_one_call(scene: Scene, sandbox: Sandbox) -> None:
    desired = scene.wanted_jobs()[0]
    sandbox.calls.clear()
    outputs = scene.jobs.create(desired)
    (call,) = sandbox.calls
    # The call sends exactly the request of the golden files.
    assert (call.name, call.params) == ("sagemaker:CreateTrainingJob", ready(requests.job(desired)))
    arn = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-job/{desired.name}"
    assert outputs == {"name": desired.name, "arn": arn}


def test_creation_with_a_lost_answer_is_found_or_retryable(scene: Scene, sandbox: Sandbox) -> None:
    desired, other = scene.wanted_jobs()
    sandbox.fail(how="lost_reply", on="sagemaker:CreateTrainingJob")
    assert scene.jobs.create(desired)["name"] == desired.name
    sandbox.fail(how="timeout", on="sagemaker:CreateTrainingJob")
    with pytest.raises(Retryable, match="no answer from AWS's sagemaker"):
        scene.jobs.create(other)
    assert sandbox.inventory()["training job"] == (desired.name,)
    # The record of a failed job is not taken for the new one.
    sandbox.training.finish(desired.name, 10)
    sandbox.fail(how="timeout", on="sagemaker:CreateTrainingJob")
    with pytest.raises(Retryable):
        scene.jobs.create(desired)


def test_other_or_failed_job_of_the_name_is_replaced(scene: Scene, sandbox: Sandbox) -> None:
    desired, other = scene.wanted_jobs()
    sandbox.settling = 2
    scene.jobs.create(replace(desired, settings={**desired.settings, "max_runtime_s": 60}))
    sandbox.training.start(desired.name)
    assert scene.jobs.create(desired)["name"] == desired.name
    assert scene.seen_job(desired).settings["max_runtime_s"] == desired.settings["max_runtime_s"]
    scene.jobs.create(other)
    sandbox.training.finish(other.name, 10)
    scene.jobs.create(other)
    assert scene.seen_job(other).condition is Condition.READY


def test_create_waits_for_a_new_role(scene: Scene, sandbox: Sandbox, clock: FakeClock) -> None:
    """SageMaker does not see a new role for some seconds."""
    desired = scene.wanted_jobs()[0]
    (name,) = sandbox.inventory()["role"]
    iam = sandbox.client("iam")
    known = iam.get_role(RoleName=name)["Role"]["AssumeRolePolicyDocument"]
    iam.update_assume_role_policy(RoleName=name, PolicyDocument=trust("ec2.amazonaws.com"))

    def pausing() -> None:
        if len(clock.pauses) == 3:
            iam.update_assume_role_policy(RoleName=name, PolicyDocument=json.dumps(known))

    clock.on_pause = pausing
    assert scene.jobs.create(desired)["name"] == desired.name
    assert len(clock.pauses) == 3


def test_unusable_role_is_reported_after_a_minute(scene: Scene, sandbox: Sandbox, clock: FakeClock) -> None:
    desired = scene.wanted_jobs()[0]
    (name,) = sandbox.inventory()["role"]
    sandbox.client("iam").update_assume_role_policy(RoleName=name, PolicyDocument=trust("ec2.amazonaws.com"))
    with pytest.raises(Invalid, match=r"cannot act as arn:.* after 60 s: does it trust sagemaker.amazonaws.com\?"):
        scene.jobs.create(desired)
    assert 60 <= sum(clock.pauses) < 75


def test_only_the_planned_request_is_sent(scene: Scene, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    desired = scene.wanted_jobs()[0]
    answers = Answers(aws, monkeypatch, create_training_job={"TrainingJobArn": "arn:1"})
    assert scene.jobs.create(desired)["arn"] == "arn:1"
    assert answers.sent == [ready(requests.job(desired))]


@pytest.mark.parametrize(
    ("quota", "expected", "hidden"),
    [
        ("ml.g5.xlarge for training job usage", "^the account may not have another machine: ", "max_runtime"),
        ("Longest run time for a training job", "^no job may run so long: .* write a shorter max_runtime, or", "ml.g5"),
    ],
)
def test_used_up_quota_is_reported_with_the_request_command(
    scene: Scene, aws: Aws, monkeypatch: pytest.MonkeyPatch, quota: str, expected: str, hidden: str
) -> None:
    message = f"The account-level service limit '{quota}' is 0 Instances, with current utilization of 0 Instances."
    refusal: Any = Exception(message)
    refusal.response = {"Error": {"Code": "ResourceLimitExceeded", "Message": message}}
    error = Invalid(f"AWS refuses: {message}")
    error.__cause__ = refusal
    Answers(aws, monkeypatch, create_training_job=error)
    with pytest.raises(Invalid, match=expected) as caught:
        scene.jobs.create(scene.wanted_jobs()[0])
    assert message in str(caught.value)
    assert f"more of '{quota}' in the console of Service Quotas" in str(caught.value)
    assert "aws service-quotas list-service-quotas --region us-east-1 --service-code sagemaker" in str(caught.value)
    assert hidden not in str(caught.value)


def test_delete_stops_a_job_in_any_state_and_is_idempotent(scene: Scene, sandbox: Sandbox) -> None:
    scene.make()
    running, done = scene.record("sagemaker_job.sm-0"), scene.record("sagemaker_job.sm-1")
    sandbox.training.start(running.name)
    sandbox.training.finish(done.name)
    sandbox.settling = 3
    sandbox.calls.clear()
    for _ in range(2):
        scene.jobs.delete(running)
        scene.jobs.delete(done)
    assert (count_calls(sandbox, "StopTrainingJob"), count_calls(sandbox, "DeleteTrainingJob")) == (1, 2)
    assert records(sandbox) == {}


def test_record_remains_of_a_failed_job_or_without_the_permission(scene: Scene, sandbox: Sandbox) -> None:
    scene.make()
    failed, running = scene.record("sagemaker_job.sm-0"), scene.record("sagemaker_job.sm-1")
    sandbox.training.finish(failed.name, 20)
    scene.jobs.delete(failed)
    sandbox.fail(how="deny", on="sagemaker:DeleteTrainingJob")
    scene.jobs.delete(running)
    assert records(sandbox) == {failed.name: "Failed", running.name: "Stopped"}


def test_foreign_job_of_the_same_name_is_not_stopped(scene: Scene, sandbox: Sandbox) -> None:
    desired = scene.wanted_jobs()[0]
    scene.jobs.create(
        replace(desired, run="s3://others/run", resource=replace(desired.resource, key="foreign", name=desired.name))
    )
    scene.jobs.delete(desired.to_record({}))
    assert sandbox.inventory()["training job"] == (desired.name,)


def test_job_that_ends_while_it_is_stopped_counts_as_stopped(
    scene: Scene, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.make()
    record = scene.record("sagemaker_job.sm-0")
    real = jobs.described

    def late(aws: Aws, region: str, name: str) -> Any:
        row = real(aws, region, name)
        sandbox.training.finish(record.name)
        return row

    monkeypatch.setattr(jobs, "described", late)
    scene.jobs.delete(record)
    assert record.name not in records(sandbox)


def test_name_that_stays_taken_is_reported_with_the_reason(
    aws: Aws, scene: Scene, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    desired = scene.wanted_jobs()[0]
    scene.jobs.create(desired)
    sandbox.training.finish(desired.name, 10)
    taken = "has to be deleted first .*"
    for error, reason in (
        (Unauthorized("these credentials lack it"), "these credentials may not: these credentials lack it"),
        (Conflict("a warm pool"), "SageMaker does not let it go: a warm pool"),
    ):
        with monkeypatch.context() as patch:
            Answers(aws, patch, delete_training_job=error)
            with pytest.raises(Conflict, match=taken + reason):
                scene.jobs.create(desired)
    # The record is deleted, but the name is not free yet.
    Answers(aws, monkeypatch, create_training_job=Conflict("exists already: ResourceInUse"))
    with pytest.raises(Conflict, match=r"SageMaker still holds the name .* no record .* again .*ResourceInUse"):
        scene.jobs.create(desired)


def test_list_owned_returns_live_jobs_only(scene: Scene, sandbox: Sandbox) -> None:
    scene.make()
    running, done = scene.wanted_jobs()
    sandbox.training.finish(done.name)
    (owned,) = scene.jobs.list_owned(running.run, ["us-east-1", "us-west-2"])
    assert (owned.name, owned.address, owned.region) == (running.name, "sagemaker_job.sm-0", "us-east-1")


def test_list_owned_reads_no_tags_of_other_runs(scene: Scene, sandbox: Sandbox) -> None:
    """The credentials may cover the names of this run only; reading other tags would be denied."""
    scene.make()
    desired = scene.wanted_jobs()[0]
    other = replace(desired.resource, key="foreign", name="skerry-other-team-abc123-a-0-ffffff")
    scene.jobs.create(replace(desired, run="s3://others/other-team", resource=other))
    # A job of another run whose name contains the stem of this run.
    hidden = replace(desired.resource, key="hidden", name=f"skerry-{stem_of(desired.run)}-a")
    scene.jobs.create(replace(desired, run="s3://others/hidden", resource=hidden))
    sandbox.calls.clear()
    assert len(list(scene.jobs.list_owned(desired.run, ["us-east-1"]))) == 2
    assert count_calls(sandbox, "ListTags") == 2


def test_update_of_a_job_is_rejected(scene: Scene) -> None:
    with pytest.raises(Invalid, match=r"a job cannot change: sagemaker_job\.sm-0: image"):
        scene.jobs.update(scene.wanted_jobs()[0], {"image"})


def records(sandbox: Sandbox) -> dict[str, str]:
    """The status of every job that SageMaker has a record of."""
    rows = sandbox.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
    return {row["TrainingJobName"]: row["TrainingJobStatus"] for row in rows}
