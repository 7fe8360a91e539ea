from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.executors.clouds import IN_ECR, AwsStage, CloudSuite, check_requests
from tests.infra.executors.suite import LONG

from skerry.infra.executors import BatchExecutor, Ending
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.batchplace import Place

    from skerry.infra.executors import ReplicaHandle


def role_of(name: str) -> str:
    return f"arn:aws:iam::123456789012:role/{name}"


class BatchStage(AwsStage):
    CREATE = "batch:SubmitJob"
    RECLAIMED = "Host EC2"

    @property
    def driver(self) -> Any:
        return self.sandbox.batch

    def executor(self, **options: Any) -> BatchExecutor:
        own = {
            "image": IN_ECR,
            "region": "us-east-1",
            "queue": "queue",
            "job_role": role_of("replica"),
            "execution_role": role_of("execution"),
            "vcpus": 2,
            "memory_mib": 1024,
        }
        return BatchExecutor(**self.with_defaults({**own, **options}))

    def variables_of(self, handle: ReplicaHandle) -> Mapping[str, str]:
        return {
            variable["name"]: variable["value"] for variable in self.place.job(handle.job)["container"]["environment"]
        }


@pytest.fixture
def stage(aws: Place) -> BatchStage:
    return BatchStage(aws)


class TestBatch(CloudSuite):
    pass


def test_attempts_option_limits_the_tries_of_batch(stage: BatchStage) -> None:
    with stage.executor() as executor:
        handles = stage.launch(executor, 1)
        assert stage.sandbox.batch.finish(handles[0].job, 10) == "FAILED"
    with stage.executor(attempts=2) as executor:
        handles = stage.launch(executor, 1)
        assert stage.sandbox.batch.finish(handles[0].job, 10) == "RUNNABLE"
        assert executor.poll(handles[0]) is None
        assert stage.sandbox.batch.finish(handles[0].job, 0) == "SUCCEEDED"
        assert executor.poll(handles[0]) == Ending(exit_code=0)


def test_equal_launch_reuses_the_job_definition(stage: BatchStage) -> None:
    def launch(**options: Any) -> None:
        with stage.executor(**options) as executor:
            stage.launch(executor)

    launch()
    stage.sandbox.calls.clear()
    launch()
    assert "batch:RegisterJobDefinition" not in stage.sandbox.calls.names
    launch(gpus=1)
    assert "batch:RegisterJobDefinition" in stage.sandbox.calls.names


def test_replicas_get_the_region_of_the_bucket(stage: BatchStage) -> None:
    s3 = stage.sandbox.client("s3")
    s3.create_bucket(Bucket="acme-west", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    with stage.executor(run="s3://acme-west/tiny") as executor:
        assert stage.variables_of(stage.launch(executor, 1)[0])["AWS_REGION"] == "us-west-2"
    with stage.executor(variables={"AWS_REGION": "us-east-1"}) as executor:
        assert stage.variables_of(stage.launch(executor, 1)[0])["AWS_REGION"] == "us-east-1"


def test_role_without_arn_is_refused(stage: BatchStage) -> None:
    with pytest.raises(Invalid, match="not the ARN of a role: 'replica'"):
        stage.executor(job_role="replica")


def test_jobs_are_described_in_batches_of_100(stage: BatchStage) -> None:
    with stage.executor() as executor:
        handles = stage.launch(executor, 101)
        stage.sandbox.calls.clear()
        with pytest.raises(TimeoutError):
            executor.collect(handles, LONG * 0)
        assert stage.sandbox.calls.names.count("batch:DescribeJobs") == 2


def test_batch_requests_match_the_golden_file(stage: BatchStage) -> None:
    with stage.executor(run="s3://acme/golden/tiny", gpus=1, log_group="/skerry") as executor:
        executor.launch_replicas(1, "python", ["train.py"])
        requests = {
            call.operation: call.params for call in stage.sandbox.calls if call.service == "batch" and call.writes
        }
        check_requests("batch", {name: requests[name] for name in ("RegisterJobDefinition", "SubmitJob")})
