"""Training jobs without containers, driven by the test: the same course and the same words as with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.support.batchplace import make_role
from tests.testing.aws.test_shims import TRAINING

from skerry.testing.aws.training_container_setup import LOGS, TrainingJobHost
from skerry.testing.container_environment import JobDefaults
from skerry.testing.job_runner import StartRefused

if TYPE_CHECKING:
    from skerry.testing.sandbox import Sandbox

SPOT: dict[str, Any] = {
    "EnableManagedSpotTraining": True,
    "StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 120},
}
ECR = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry@sha256:12"


@pytest.fixture
def role(skerry_sandbox: Sandbox) -> str:
    return make_role(skerry_sandbox, "trainer", "sagemaker.amazonaws.com")


def make(sandbox: Sandbox, role: str, **settings: Any) -> str:
    sandbox.client("sagemaker").create_training_job(**{**TRAINING, **settings, "RoleArn": role})
    return str(TRAINING["TrainingJobName"])


def described(sandbox: Sandbox, job: str = "one") -> dict[str, Any]:
    return dict(sandbox.client("sagemaker").describe_training_job(TrainingJobName=job))


def words(sandbox: Sandbox) -> list[str]:
    return [item["Status"] for item in described(sandbox)["SecondaryStatusTransitions"]]


def status(sandbox: Sandbox) -> tuple[str, str]:
    response = described(sandbox)
    return response["TrainingJobStatus"], response["SecondaryStatus"]


def test_training_job_waits_for_its_start_and_trains_to_its_end(skerry_sandbox: Sandbox, role: str) -> None:
    job, training = make(skerry_sandbox, role), skerry_sandbox.training
    assert status(skerry_sandbox) == ("InProgress", "Pending")
    assert "TrainingStartTime" not in described(skerry_sandbox)
    training.start(job)
    assert status(skerry_sandbox) == ("InProgress", "Training")
    training.finish(job)
    result = described(skerry_sandbox)
    assert status(skerry_sandbox) == ("Completed", "Completed")
    assert result["CreationTime"] <= result["TrainingStartTime"] <= result["TrainingEndTime"]
    assert words(skerry_sandbox) == ["Starting", "Downloading", "Training", "Completed"]
    for request in ("AlgorithmSpecification", "ResourceConfig", "StoppingCondition", "Environment", "OutputDataConfig"):
        assert result[request] == TRAINING[request]


@pytest.mark.parametrize(("reason", "end"), [("the store was away", ", exit code: 10"), ("x" * 2000, "x")])
def test_exit_code_is_never_retried_and_is_reported(skerry_sandbox: Sandbox, role: str, reason: str, end: str) -> None:
    job = make(skerry_sandbox, role, **SPOT, RetryStrategy={"MaximumRetryAttempts": 3})
    skerry_sandbox.training.finish(job, 10, reason=reason)
    assert status(skerry_sandbox) == ("Failed", "Failed")
    text = described(skerry_sandbox)["FailureReason"]
    assert text.startswith(f"AlgorithmError: {reason[:100]}")
    assert text.endswith(end)
    assert len(text) <= 1024, "SageMaker cuts it there"


def test_interrupted_spot_machine_is_replaced(skerry_sandbox: Sandbox, role: str) -> None:
    job, training = make(skerry_sandbox, role, **SPOT), skerry_sandbox.training
    training.start(job)
    training.interrupt(job)
    assert status(skerry_sandbox) == ("InProgress", "Interrupted")
    training.start(job)
    assert status(skerry_sandbox) == ("InProgress", "Training")
    begun = ["Starting", "Downloading", "Training", "Interrupted", "Downloading", "Training"]
    assert words(skerry_sandbox) == begun


@pytest.mark.parametrize("retries", [0, 2])
def test_lost_machine_is_replaced_up_to_the_retry_limit(skerry_sandbox: Sandbox, role: str, retries: int) -> None:
    more = {"RetryStrategy": {"MaximumRetryAttempts": retries}} if retries else {}
    job, training = make(skerry_sandbox, role, **more), skerry_sandbox.training
    for _ in range(retries):
        training.start(job)
        training.interrupt(job)
        assert status(skerry_sandbox)[0] == "InProgress"
    training.start(job)
    training.interrupt(job)
    assert described(skerry_sandbox)["FailureReason"].startswith("InternalServerError: ")


def test_stop_reports_stopping_for_the_settling_time(skerry_sandbox: Sandbox, role: str) -> None:
    job = make(skerry_sandbox, role)
    skerry_sandbox.training.start(job)
    skerry_sandbox.settling = 2
    sagemaker = skerry_sandbox.client("sagemaker")
    for _ in range(2):
        sagemaker.stop_training_job(TrainingJobName=job)
    listed = sagemaker.list_training_jobs(StatusEquals="Stopping")["TrainingJobSummaries"]
    assert [item["TrainingJobName"] for item in listed] == [job]
    looks = [status(skerry_sandbox) for _ in range(3)]
    assert looks == [("Stopping", "Stopping"), ("Stopping", "Stopping"), ("Stopped", "Stopped")]


def test_each_start_writes_its_own_log_stream(skerry_sandbox: Sandbox, role: str) -> None:
    job, training = make(skerry_sandbox, role, **SPOT), skerry_sandbox.training
    for text in ("first", "second"):
        training.write(job, text)
        training.interrupt(job)
    logs = skerry_sandbox.client("logs")
    streams = logs.describe_log_streams(logGroupName=LOGS, logStreamNamePrefix=f"{job}/")["logStreams"]
    names = [stream["logStreamName"] for stream in streams]
    assert [name.startswith("one/algo-1-") for name in names] == [True, True]
    events = [logs.get_log_events(logGroupName=LOGS, logStreamName=name)["events"] for name in sorted(names)]
    assert [item["message"] for subset in events for item in subset] == ["first", "second"]
    assert "log group" not in skerry_sandbox.inventory()


def test_container_has_the_files_and_variables_of_sagemaker(role: str) -> None:
    request = {**TRAINING, "RoleArn": role, "HyperParameters": {"SKERRY_COMMAND": "[]"}}
    request["AlgorithmSpecification"] = {"TrainingImage": ECR, "TrainingInputMode": "File"}
    around = JobDefaults(mark="m", endpoint="http://host:1", registry="127.0.0.1:5000")
    host = TrainingJobHost(request, "arn:1", "us-east-1", around)
    box = host.container_for(1)
    assert (box.image, list(box.command)) == ("127.0.0.1:5000/skerry@sha256:12", ["train"])
    given = dict(box.environment)
    assert given["AWS_ACCESS_KEY_ID"].startswith("ASIA")
    assert (given["A"], given["TRAINING_JOB_NAME"], given["TRAINING_JOB_ARN"]) == ("1", "one", "arn:1")
    (bind,) = box.binds
    ml = host.folder
    assert (bind.source, bind.target, bind.writable) == (str(ml), "/opt/ml", True)
    assert ml is not None
    assert (ml / "input/config/hyperparameters.json").read_text() == '{"SKERRY_COMMAND": "[]"}'
    assert '"current_host": "algo-1"' in (ml / "input/config/resourceconfig.json").read_text()
    assert host.failure() == ""
    (ml / "output/failure").write_text("loss is nan\n")
    assert host.failure() == "loss is nan"
    assert host.container_for(2).binds != box.binds
    algorithm = {**request["AlgorithmSpecification"], "ContainerEntrypoint": ["sh", "-c"]}
    for arguments, command in (({}, []), ({"ContainerArguments": ["exit 3"]}, ["exit 3"])):
        changed = {**request, "AlgorithmSpecification": {**algorithm, **arguments}}
        box = TrainingJobHost(changed, "arn:1", "us-east-1", around).container_for(1)
        assert (box.entrypoint, box.command) == (["sh", "-c"], command)
    nowhere = JobDefaults(mark="m", endpoint="", registry=None)
    with pytest.raises(StartRefused, match="needs a registry"):
        TrainingJobHost(request, "arn:1", "us-east-1", nowhere).container_for(1)
