from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.executors.clouds import IN_ECR, AwsStage, CloudSuite, check_requests
from tests.infra.executors.suite import LONG

from skerry.infra.executors import Ending, SageMakerExecutor
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.batchplace import Place

    from skerry.infra.executors import ReplicaHandle

ROLE = "arn:aws:iam::123456789012:role/trainer"


class SageMakerStage(AwsStage):
    CREATE = "sagemaker:CreateTrainingJob"
    RECLAIMED = "InternalServerError"

    @property
    def driver(self) -> Any:
        return self.sandbox.training

    def executor(self, **options: Any) -> SageMakerExecutor:
        own = {"image": IN_ECR, "region": "us-east-1", "role": ROLE, "instance": "ml.g5.xlarge"}
        return SageMakerExecutor(**self.with_defaults({**own, **options}))

    def variables_of(self, handle: ReplicaHandle) -> Mapping[str, str]:
        row = self.describe(handle)
        return {**row.get("HyperParameters", {}), **row["Environment"]}

    def describe(self, handle: ReplicaHandle) -> dict[str, Any]:
        return dict(self.sandbox.client("sagemaker").describe_training_job(TrainingJobName=handle.job))


@pytest.fixture
def stage(aws: Place) -> SageMakerStage:
    return SageMakerStage(aws)


class TestSageMaker(CloudSuite):
    pass


def test_interrupted_spot_job_has_not_ended(stage: SageMakerStage) -> None:
    with stage.executor(spot=True) as executor:
        handles = stage.launch(executor, 1)
        stage.sandbox.training.start(handles[0].job)
        stage.sandbox.training.interrupt(handles[0].job)
        assert executor.poll(handles[0]) is None
        assert stage.describe(handles[0])["StoppingCondition"] == {
            "MaxRuntimeInSeconds": 86400,
            "MaxWaitTimeInSeconds": 172800,
        }


def test_stopping_job_has_not_ended(stage: SageMakerStage) -> None:
    with stage.executor() as executor:
        handles = stage.launch(executor, 1)
        stage.sandbox.training.start(handles[0].job)
        stage.sandbox.settling = 2
        try:
            executor.cancel(handles[0])
            assert executor.poll(handles[0]) is None
            executor.cancel(handles[0])
        finally:
            stage.sandbox.settling = 0
        assert executor.collect(handles, LONG) == [Ending(signal=15)]


def test_stop_of_an_ended_job_succeeds(stage: SageMakerStage) -> None:
    with stage.executor() as executor:
        handles = stage.launch(executor, 1)
        stage.finish(handles[0], 0)
        executor.stop_job(handles[0])
        assert executor.poll(handles[0]) == Ending(exit_code=0)


def test_region_of_the_european_partition_is_accepted(stage: SageMakerStage) -> None:
    role = "arn:aws-eusc:iam::123456789012:role/team/trainer"
    assert stage.executor(region="eusc-de-east-1", role=role).region == "eusc-de-east-1"


def test_options_that_sagemaker_cannot_take_are_refused(stage: SageMakerStage) -> None:
    with pytest.raises(Invalid, match=r"SKERRY_COMMAND has .* characters, and SageMaker passes at most 2500"):
        stage.executor().launch_replicas(1, "python", ["-c", "#" * 2500])
    with pytest.raises(Invalid, match="not the ARN of a role: 'trainer'"):
        stage.executor(role="trainer")
    with pytest.raises(Invalid, match=r"max_wait=2:00:00 includes max_runtime=1 day, 0:00:00, and is shorter"):
        stage.executor(spot=True, max_wait=timedelta(hours=2))
    with pytest.raises(Invalid, match="no place to upload"):
        stage.executor(run="gs://acme/runs/tiny")


def test_sagemaker_requests_match_the_golden_file(stage: SageMakerStage) -> None:
    options = {"volume_gib": 50, "subnets": ["subnet-1"], "security_groups": ["sg-1"], "ranks": 2, "spot": True}
    with stage.executor(run="s3://acme/golden/tiny", **options) as executor:
        executor.launch_replicas(1, "python", ["train.py"])
        requests = [call.params for call in stage.sandbox.calls if call.name == stage.CREATE]
        check_requests("sagemaker", requests)
