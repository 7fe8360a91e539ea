"""Amazon's own SDK, `sagemaker` version 3, and skerry's jobs: it reads, lists and stops them, and would send the same.

Its package for jobs is laid over the environment by `scripts/test --nightly`; it cannot be installed beside moto.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import boto3
import pytest
from tests.infra.targets.sagemaker.kit import Scene, context_of

from skerry.infra.provision.handler import Condition
from skerry.infra.targets.sagemaker import requests
from skerry.infra.targets.shared.resolve_refs import ready

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws
    from skerry.testing.sandbox import Sandbox

TrainingJob: Any = pytest.importorskip("sagemaker.core.resources", reason="Amazon's SDK is not here").TrainingJob


@pytest.fixture
def session(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> boto3.Session:
    """The session of a user of the SDK, in the account of the run."""
    for name, value in sandbox.environment.items():
        monkeypatch.setenv(name, value)
    return boto3.Session(region_name="us-east-1")


@pytest.fixture
def scene(aws: Aws, tmp_path: Path) -> Scene:
    built = Scene(aws, context_of(tmp_path))
    built.make()
    return built


def test_sdk_reads_lists_and_stops_the_jobs_of_a_run(scene: Scene, session: boto3.Session) -> None:
    first, second = scene.wanted_jobs()
    job = TrainingJob.get(training_job_name=first.name, session=session, region="us-east-1")
    planned: Any = ready(requests.job(first))
    assert job.algorithm_specification.training_image == planned["AlgorithmSpecification"]["TrainingImage"]
    assert job.environment == planned["Environment"]
    assert job.stopping_condition.max_runtime_in_seconds == planned["StoppingCondition"]["MaxRuntimeInSeconds"]
    listed = TrainingJob.get_all(name_contains="sm-", session=session, region="us-east-1")
    assert {listed_job.training_job_name for listed_job in listed} == {first.name, second.name}
    job.stop()
    seen = scene.seen_job(first)
    assert (seen.condition, seen.detail) == (Condition.LOST, "Stopped")


def test_sdk_would_send_the_planned_request(scene: Scene, session: boto3.Session) -> None:
    planned: Any = ready(requests.job(scene.wanted_jobs()[0]))
    sent = list[dict[str, Any]]()
    events: Any = session.events

    def record(params: dict[str, Any], **_: Any) -> None:
        sent.append(params)

    events.register("provide-client-params.sagemaker.CreateTrainingJob", record)
    with pytest.raises(Exception, match="ResourceInUse"):
        TrainingJob.create(**snake_case(planned), session=session, region="us-east-1")
    assert sent == [planned]


def snake_case(request: Any) -> Any:
    """The request in the SDK's words; names of variables are values, and remain."""
    match request:
        case list():
            return [snake_case(item) for item in cast("list[Any]", request)]
        case dict():
            items = cast("dict[str, Any]", request).items()
            return {_word(key): value if key == "Environment" else snake_case(value) for key, value in items}
        case _:
            return request


def _word(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
