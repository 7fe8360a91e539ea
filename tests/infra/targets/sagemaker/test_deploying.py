"""The particulars of a run on SageMaker, as the commands carry it out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.kit import failing

from skerry.infra.deploy import list_and_stop_jobs as working
from skerry.infra.deploy.read_clouds import run_checks
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.planned_changes import Action
from skerry.infra.targets.sagemaker.target import SageMaker, quotas
from skerry.runtime.errors import Unauthorized

if TYPE_CHECKING:
    from pathlib import Path

    from tests.infra.targets.runs import SageMakerRun

    from skerry.infra.provision.target_and_store_interfaces import Check

pytestmark = pytest.mark.usefixtures("quick")


def test_failed_job_keeps_its_record_and_the_next_one_is_a_generation(sagemaker_run: SageMakerRun) -> None:
    operator, sandbox = sagemaker_run.operator(options="spot: true"), sagemaker_run.sandbox
    assert operator.apply().ok
    (lost, _) = sandbox.inventory()["training job"]
    assert len(lost) <= 63
    sandbox.training.finish(lost, 10, reason="skerry: exit code 10: the store was away")
    assert operator.apply().ok
    assert f"{lost}-g1" in sandbox.inventory()["training job"]
    reason = sandbox.client("sagemaker").describe_training_job(TrainingJobName=lost)["FailureReason"]
    assert reason.endswith("code: 10")


def test_changed_limit_replaces_the_jobs(sagemaker_run: SageMakerRun) -> None:
    operator = sagemaker_run.operator(options="spot: true")
    assert operator.apply().ok
    changes = operator.plan("limits.max_hours=12").plan.changes
    replaced = {change.address: change for change in changes if change.action is Action.REPLACE}
    assert sorted(replaced) == ["sagemaker_job.a-0", "sagemaker_job.a-1"]
    settings = {difference.setting for difference in replaced["sagemaker_job.a-0"].differences}
    assert settings == {"environment", "max_runtime_s", "max_wait_s"}


def test_status_and_logs_continue_over_an_interruption(sagemaker_run: SageMakerRun) -> None:
    operator, training = sagemaker_run.operator(count=1, options="spot: true"), sagemaker_run.sandbox.training
    assert operator.apply().ok
    (name,) = sagemaker_run.jobs(operator).values()
    training.write(name, "one")
    training.interrupt(name)
    ((_, view),) = working.list_jobs(operator.deployment())
    assert (view.slot, view.state, view.attempt, view.condition) == ("a-0", "Interrupted", 1, Condition.READY)
    training.write(name, "two")
    ((record, view),) = working.list_jobs(operator.deployment())
    assert (view.state, view.attempt, view.exit_code) == ("Training", 2, None)
    assert view.why == "its machine was reclaimed 1 time so far"
    lines = list(working.read_log(operator.deployment(), record, None))
    assert [line.text for line in lines] == ["one", "two"]
    assert [line.text for line in working.read_log(operator.deployment(), record, lines[0].cursor)] == ["two"]


def test_doctor_checks_the_time_that_the_cost_limit_allows(
    sagemaker_run: SageMakerRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = sagemaker_run.operator(options="", more="limits: {max_cost_usd: 320}\n")
    own = tmp_path / "prices.json"
    own.write_text('{"format": 1, "cloud": "aws", "regions": {"us-east-1": {"machines": {"ml.g5.xlarge": 1.0}}}}')
    operator.environment = {**operator.environment, "SKERRY_PRICES": str(own)}
    known = {quotas.LONGEST: {"QuotaCode": "L-1", "Value": 432000.0}}
    monkeypatch.setattr(quotas, "known", lambda *_: known)

    def longest() -> Check:
        return next(check for check in run_checks(operator.deployment()) if check.name == "longest job in us-east-1")

    assert (longest().ok, longest().text) == (False, "576000 s are requested, 432000 allowed")
    # Another check reports that the prices cannot be read.
    monkeypatch.setattr(SageMaker, "rates", failing(Unauthorized("these credentials lack the permission")))
    assert longest().ok
