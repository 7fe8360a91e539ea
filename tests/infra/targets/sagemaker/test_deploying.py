"""The life of a run on SageMaker, as the commands carry it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest
from tests.infra.deploy.account import Operator, write_run

from skerry.infra.deploy import jobs as working
from skerry.infra.handler import Condition
from skerry.infra.plan import Action
from skerry.infra.targets.sagemaker import SageMaker, quotas
from skerry.infra.testing.google.crossing import Clouds
from skerry.infra.testing.google.sandbox import GoogleSandbox
from skerry.runtime.errors import Unauthorized
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.target import Check
    from skerry.infra.testing.faults import How
    from skerry.infra.testing.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("quick")
GROUP = """\
  - name: s
    count: {count}
    target: {{kind: sagemaker, region: us-east-1, instance: ml.g5.xlarge, {options}}}
"""
BATCH = """\
  - name: b
    count: 1
    target: {kind: aws_batch, region: us-east-1, instance_types: [c7i.large]}
"""


def write_spec(folder: Path, *, count: int = 2, options: str = "spot: true", more: str = "") -> Path:
    """more: other groups."""
    return write_run(folder, GROUP.format(count=count, options=options) + more)


@pytest.fixture
def one(tmp_path: Path, sandbox: Sandbox) -> Operator:
    return Operator(write_spec(tmp_path), sandbox.environment)


def names(sandbox: Sandbox) -> tuple[str, ...]:
    return sandbox.inventory().get("training job", ())


def acting(one: Operator) -> list[tuple[Action, str]]:
    return [(change.action, str(change.id)) for change in one.plan().plan.changes if change.acts]


def test_apply_makes_a_role_and_the_jobs_a_second_one_nothing_and_destroy_leaves_nothing(
    one: Operator, sandbox: Sandbox
) -> None:
    planned = one.plan()
    assert planned.plan.problems == ()
    assert sandbox.calls.writes == []
    assert one.apply().ok
    assert {kind: len(found) for kind, found in sandbox.inventory().items()} == {
        "bucket": 1,
        "repository": 1,
        "role": 1,
        "training job": 2,
    }
    assert all(len(name) <= 63 for name in names(sandbox))
    assert one.plan().plan.empty
    sandbox.calls.clear()
    assert one.apply().ok
    assert sandbox.calls.writes == []
    assert one.destroy().ok
    assert sandbox.inventory() == {}


def test_a_lost_job_is_made_again_under_the_next_number_and_a_finished_one_is_left(
    one: Operator, sandbox: Sandbox
) -> None:
    assert one.apply().ok
    lost, done = names(sandbox)
    sandbox.training.finish(lost, 10, reason="skerry: exit code 10: the store was away")
    sandbox.training.finish(done)
    assert acting(one) == [(Action.REPLACE, "sagemaker_job.s-0#1"), (Action.DELETE, "sagemaker_job.s-0")]
    assert one.apply().ok
    assert names(sandbox) == (f"{lost}-g1",)
    assert one.plan().plan.empty
    # Its record says why; what ended well would be mistaken for the end of the next run.
    assert sandbox.client("sagemaker").describe_training_job(TrainingJobName=lost)["FailureReason"].endswith("code: 10")
    assert one.destroy().ok
    assert sandbox.inventory() == {}


@pytest.mark.slow
def test_a_run_that_was_destroyed_begins_anew_whatever_became_of_its_jobs(one: Operator, sandbox: Sandbox) -> None:
    assert one.apply().ok
    lost, done = names(sandbox)
    sandbox.training.finish(lost, 20)
    sandbox.training.finish(done)
    assert one.destroy().ok
    for _ in range(2):
        assert one.apply().ok
        assert len(names(sandbox)) == 2
        assert one.plan().plan.empty
        assert one.destroy().ok
        assert sandbox.inventory() == {}


def test_what_changes_of_a_job_is_told_and_the_job_is_made_anew(one: Operator, sandbox: Sandbox) -> None:
    assert one.apply().ok
    before = names(sandbox)
    changes = one.plan("limits.max_hours=12").plan.changes
    found = {change.address: change for change in changes if change.action is Action.REPLACE}
    assert sorted(found) == ["sagemaker_job.s-0", "sagemaker_job.s-1"]
    assert {one.setting for one in found["sagemaker_job.s-0"].differences} == {
        "environment",
        "max_runtime_s",
        "max_wait_s",
    }
    sandbox.settling = 2
    assert one.apply("limits.max_hours=12").ok
    assert names(sandbox) == tuple(f"{name}-g1" for name in before)


def test_jobs_are_told_and_their_logs_followed_over_an_interruption(one: Operator, sandbox: Sandbox) -> None:
    assert one.apply().ok
    name = names(sandbox)[0]
    sandbox.training.write(name, "one")
    sandbox.training.interrupt(name)
    (_, view), _ = working.jobs(one.deployment())
    assert (view.slot, view.state, view.attempt, view.condition) == ("s-0", "Interrupted", 1, Condition.READY)
    sandbox.training.write(name, "two")
    (made, view), _ = working.jobs(one.deployment())
    assert (view.state, view.attempt, view.exit_code) == ("Training", 2, None)
    assert view.why == "its machine was taken back 1 time so far"
    lines = list(working.lines(one.deployment(), made, None))
    assert [line.text for line in lines] == ["one", "two"]
    assert [line.text for line in working.lines(one.deployment(), made, lines[0].cursor)] == ["two"]


@pytest.mark.slow
def test_a_lost_state_finds_its_jobs_again_by_their_tags(one: Operator, sandbox: Sandbox) -> None:
    assert one.apply().ok
    before, s3 = names(sandbox), sandbox.client("s3")
    for row in s3.list_objects_v2(Bucket="acme-skerry", Prefix="runs/tiny/state/")["Contents"]:
        s3.delete_object(Bucket="acme-skerry", Key=row["Key"])
    assert {action for action, _ in acting(one)} == {Action.ADOPT}
    assert one.apply().ok
    assert names(sandbox) == before
    assert one.destroy().ok
    assert sandbox.inventory() == {}


@pytest.mark.parametrize("how", ["lost_reply", "timeout"])
def test_a_job_whose_answer_was_lost_is_made_once(one: Operator, sandbox: Sandbox, how: How) -> None:
    sandbox.fail(how=how, on="sagemaker:CreateTrainingJob")
    outcome = one.apply()
    assert outcome.ok is (how == "lost_reply")
    assert one.apply().ok
    assert len(names(sandbox)) == 2
    assert one.plan().plan.empty


@pytest.mark.slow
def test_groups_of_batch_and_of_sagemaker_are_one_run(tmp_path: Path, sandbox: Sandbox) -> None:
    one = Operator(write_spec(tmp_path, count=1, more=BATCH), sandbox.environment)
    assert one.apply().ok
    assert (len(names(sandbox)), len(sandbox.inventory()["job"])) == (1, 1)
    assert [view.slot for _, view in working.jobs(one.deployment())] == ["b-0", "s-0"]
    assert one.plan().plan.empty
    assert one.destroy().ok
    assert sandbox.inventory() == {}


VERTEX = f"""\
  - name: v
    count: 1
    image: us-central1-docker.pkg.dev/skerry-sandbox/skerry/replica@sha256:{"1" * 64}
    target: {{kind: vertex, project: skerry-sandbox, region: us-central1, machine: n2-standard-4}}
"""


@pytest.mark.slow
def test_a_lost_state_beside_jobs_at_google_s_leaves_nothing_either(tmp_path: Path, sandbox: Sandbox) -> None:
    path = write_spec(tmp_path, count=1, options="output: s3://mine/artifacts", more=VERTEX)
    path.write_text(path.read_text().replace("s3://acme-skerry/runs", "gs://acme-skerry/runs"))
    with GoogleSandbox() as google:
        environment = Clouds(aws=sandbox, google=google).environment
        one = Operator(path, environment)
        assert one.apply().ok
        store = open_store("gs://acme-skerry/runs/tiny", environment=environment)
        for entry in store.list("state/"):
            store.delete(entry.key)
        removed = one.destroy()
        assert removed.ok, removed.left
        assert sandbox.inventory() == {}
        assert google.inventory() == {}


def test_doctor_looks_at_the_time_that_the_money_lasts(
    tmp_path: Path, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_spec(tmp_path, options="")
    path.write_text(path.read_text().replace("max_hours: 24", "max_cost_usd: 320"))
    own = tmp_path / "prices.json"
    own.write_text('{"format": 1, "cloud": "aws", "regions": {"us-east-1": {"machines": {"ml.g5.xlarge": 1.0}}}}')
    known = {quotas.LONGEST: {"QuotaCode": "L-1", "Value": 432000.0}}
    monkeypatch.setattr(quotas, "known", lambda *_: known)

    def longest() -> Check:
        deployment = Operator(path, {**sandbox.environment, "SKERRY_PRICES": str(own)}).deployment()
        return next(check for check in deployment.checks() if check.name == "longest job in us-east-1")

    assert (longest().ok, longest().text) == (False, "576000 s are asked for, 432000 allowed")
    # Where prices cannot be asked for, that is told by others.
    monkeypatch.setattr(SageMaker, "rates", refuse_rates)
    assert longest().ok


def refuse_rates(*_: object) -> NoReturn:
    raise Unauthorized("these credentials lack the right")


@pytest.mark.slow
def test_a_run_in_cloud_storage_is_made_and_taken_away_on_both_sides(tmp_path: Path, sandbox: Sandbox) -> None:
    options = "output: s3://mine/artifacts"
    path = write_spec(tmp_path, count=1, options=options)
    text = path.read_text().replace("s3://acme-skerry/runs", "gs://acme-skerry/runs")
    path.write_text(text)
    with GoogleSandbox() as google:
        clouds = Clouds(aws=sandbox, google=google)
        one = Operator(path, {**clouds.environment, "CLOUDSDK_COMPUTE_REGION": "us-central1"})
        planned = one.plan()
        assert planned.plan.problems == ()
        assert one.apply().ok
        assert (len(names(sandbox)), len(sandbox.inventory()["role"])) == (1, 1)
        told = sandbox.client("sagemaker").describe_training_job(TrainingJobName=names(sandbox)[0])["Environment"]
        assert told["SKERRY_GOOGLE_AUDIENCE"].startswith("//iam.googleapis.com/projects/")
        assert one.plan().plan.empty
        assert one.destroy().ok
        assert sandbox.inventory() == {}
        assert google.inventory() == {}
