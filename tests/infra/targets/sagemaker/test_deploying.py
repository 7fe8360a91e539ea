"""The life of a run on SageMaker, as the commands carry it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest
from tests.infra.deploy.account import Operator, write_run

from skerry.infra.deploy import running_jobs as working
from skerry.infra.deploy.read_clouds import run_checks
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.plan import Action
from skerry.infra.targets.sagemaker.target import SageMaker, quotas
from skerry.runtime.errors import Unauthorized
from skerry.runtime.store import open_store
from skerry.testing.both_clouds import Clouds
from skerry.testing.google.sandbox import GoogleSandbox

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.target import Check
    from skerry.testing.faults import How
    from skerry.testing.sandbox import Sandbox

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
    """Write the spec of a run with one group on SageMaker. more: other groups."""
    return write_run(folder, GROUP.format(count=count, options=options) + more)


@pytest.fixture
def operator(tmp_path: Path, sandbox: Sandbox) -> Operator:
    return Operator(write_spec(tmp_path), sandbox.environment)


def names(sandbox: Sandbox) -> tuple[str, ...]:
    return sandbox.inventory().get("training job", ())


def acting(operator: Operator) -> list[tuple[Action, str]]:
    return [(change.action, str(change.id)) for change in operator.plan().plan.changes if change.acts]


def test_apply_creates_once_and_destroy_leaves_nothing(operator: Operator, sandbox: Sandbox) -> None:
    planned = operator.plan()
    assert planned.plan.problems == ()
    assert sandbox.calls.writes == []
    assert operator.apply().ok
    assert {kind: len(members) for kind, members in sandbox.inventory().items()} == {
        "bucket": 1,
        "repository": 1,
        "role": 1,
        "training job": 2,
    }
    assert all(len(name) <= 63 for name in names(sandbox))
    assert operator.plan().plan.empty
    sandbox.calls.clear()
    assert operator.apply().ok
    assert sandbox.calls.writes == []
    assert operator.destroy().ok
    assert sandbox.inventory() == {}


def test_lost_job_gets_the_next_generation(operator: Operator, sandbox: Sandbox) -> None:
    assert operator.apply().ok
    lost, done = names(sandbox)
    sandbox.training.finish(lost, 10, reason="skerry: exit code 10: the store was away")
    sandbox.training.finish(done)
    assert acting(operator) == [(Action.REPLACE, "sagemaker_job.s-0#1"), (Action.DELETE, "sagemaker_job.s-0")]
    assert operator.apply().ok
    assert names(sandbox) == (f"{lost}-g1",)
    assert operator.plan().plan.empty
    # The failed job keeps its record with the reason; a succeeded record could pass for the end of the next run.
    assert sandbox.client("sagemaker").describe_training_job(TrainingJobName=lost)["FailureReason"].endswith("code: 10")
    assert operator.destroy().ok
    assert sandbox.inventory() == {}


@pytest.mark.slow
def test_destroyed_run_can_be_applied_again(operator: Operator, sandbox: Sandbox) -> None:
    assert operator.apply().ok
    lost, done = names(sandbox)
    sandbox.training.finish(lost, 20)
    sandbox.training.finish(done)
    assert operator.destroy().ok
    for _ in range(2):
        assert operator.apply().ok
        assert len(names(sandbox)) == 2
        assert operator.plan().plan.empty
        assert operator.destroy().ok
        assert sandbox.inventory() == {}


def test_changed_setting_replaces_the_job(operator: Operator, sandbox: Sandbox) -> None:
    assert operator.apply().ok
    before = names(sandbox)
    changes = operator.plan("limits.max_hours=12").plan.changes
    replaced = {change.address: change for change in changes if change.action is Action.REPLACE}
    assert sorted(replaced) == ["sagemaker_job.s-0", "sagemaker_job.s-1"]
    assert {difference.setting for difference in replaced["sagemaker_job.s-0"].differences} == {
        "environment",
        "max_runtime_s",
        "max_wait_s",
    }
    sandbox.settling = 2
    assert operator.apply("limits.max_hours=12").ok
    assert names(sandbox) == tuple(f"{name}-g1" for name in before)


def test_status_and_logs_continue_over_an_interruption(operator: Operator, sandbox: Sandbox) -> None:
    assert operator.apply().ok
    name = names(sandbox)[0]
    sandbox.training.write(name, "one")
    sandbox.training.interrupt(name)
    (_, view), _ = working.list_jobs(operator.deployment())
    assert (view.slot, view.state, view.attempt, view.condition) == ("s-0", "Interrupted", 1, Condition.READY)
    sandbox.training.write(name, "two")
    (record, view), _ = working.list_jobs(operator.deployment())
    assert (view.state, view.attempt, view.exit_code) == ("Training", 2, None)
    assert view.why == "its machine was reclaimed 1 time so far"
    lines = list(working.read_log(operator.deployment(), record, None))
    assert [line.text for line in lines] == ["one", "two"]
    assert [line.text for line in working.read_log(operator.deployment(), record, lines[0].cursor)] == ["two"]


@pytest.mark.slow
def test_lost_state_adopts_jobs_by_their_tags(operator: Operator, sandbox: Sandbox) -> None:
    assert operator.apply().ok
    before, s3 = names(sandbox), sandbox.client("s3")
    for row in s3.list_objects_v2(Bucket="acme-skerry", Prefix="runs/tiny/state/")["Contents"]:
        s3.delete_object(Bucket="acme-skerry", Key=row["Key"])
    assert {action for action, _ in acting(operator)} == {Action.ADOPT}
    assert operator.apply().ok
    assert names(sandbox) == before
    assert operator.destroy().ok
    assert sandbox.inventory() == {}


@pytest.mark.parametrize("how", ["lost_reply", "timeout"])
def test_job_with_a_lost_answer_is_created_once(operator: Operator, sandbox: Sandbox, how: How) -> None:
    sandbox.fail(how=how, on="sagemaker:CreateTrainingJob")
    outcome = operator.apply()
    assert outcome.ok is (how == "lost_reply")
    assert operator.apply().ok
    assert len(names(sandbox)) == 2
    assert operator.plan().plan.empty


@pytest.mark.slow
def test_run_may_have_groups_on_batch_and_sagemaker(tmp_path: Path, sandbox: Sandbox) -> None:
    deployer = Operator(write_spec(tmp_path, count=1, more=BATCH), sandbox.environment)
    assert deployer.apply().ok
    assert (len(names(sandbox)), len(sandbox.inventory()["job"])) == (1, 1)
    assert [view.slot for _, view in working.list_jobs(deployer.deployment())] == ["b-0", "s-0"]
    assert deployer.plan().plan.empty
    assert deployer.destroy().ok
    assert sandbox.inventory() == {}


VERTEX = f"""\
  - name: v
    count: 1
    image: us-central1-docker.pkg.dev/skerry-sandbox/skerry/replica@sha256:{"1" * 64}
    target: {{kind: vertex, project: skerry-sandbox, region: us-central1, machine: n2-standard-4}}
"""


@pytest.mark.slow
def test_destroy_without_a_state_covers_both_clouds(tmp_path: Path, sandbox: Sandbox) -> None:
    path = write_spec(tmp_path, count=1, options="output: s3://mine/artifacts", more=VERTEX)
    path.write_text(path.read_text().replace("s3://acme-skerry/runs", "gs://acme-skerry/runs"))
    with GoogleSandbox() as google:
        environment = Clouds(aws=sandbox, google=google).environment
        deployer = Operator(path, environment)
        assert deployer.apply().ok
        store = open_store("gs://acme-skerry/runs/tiny", environment=environment)
        for entry in store.list("state/"):
            store.delete(entry.key)
        removed = deployer.destroy()
        assert removed.ok, removed.left
        assert sandbox.inventory() == {}
        assert google.inventory() == {}


def test_doctor_checks_the_time_that_the_cost_limit_allows(
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
        return next(check for check in run_checks(deployment) if check.name == "longest job in us-east-1")

    assert (longest().ok, longest().text) == (False, "576000 s are requested, 432000 allowed")
    # Another check reports that the prices cannot be read.
    monkeypatch.setattr(SageMaker, "rates", refuse_rates)
    assert longest().ok


def refuse_rates(*_: object) -> NoReturn:
    raise Unauthorized("these credentials lack the permission")


@pytest.mark.slow
def test_run_in_cloud_storage_is_created_and_destroyed(tmp_path: Path, sandbox: Sandbox) -> None:
    options = "output: s3://mine/artifacts"
    path = write_spec(tmp_path, count=1, options=options)
    text = path.read_text().replace("s3://acme-skerry/runs", "gs://acme-skerry/runs")
    path.write_text(text)
    with GoogleSandbox() as google:
        clouds = Clouds(aws=sandbox, google=google)
        deployer = Operator(path, {**clouds.environment, "CLOUDSDK_COMPUTE_REGION": "us-central1"})
        planned = deployer.plan()
        assert planned.plan.problems == ()
        assert deployer.apply().ok
        assert (len(names(sandbox)), len(sandbox.inventory()["role"])) == (1, 1)
        environment = sandbox.client("sagemaker").describe_training_job(TrainingJobName=names(sandbox)[0])[
            "Environment"
        ]
        assert environment["SKERRY_GOOGLE_AUDIENCE"].startswith("//iam.googleapis.com/projects/")
        assert deployer.plan().plan.empty
        assert deployer.destroy().ok
        assert sandbox.inventory() == {}
        assert google.inventory() == {}
