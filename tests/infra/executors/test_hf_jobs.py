from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.executors.clouds import CloudStage, CloudSuite, check_requests

from skerry.infra.executors import HFJobsExecutor
from skerry.runtime.errors import Invalid
from skerry.testing.huggingface import LOST

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.batchplace import Place

    from skerry.infra.executors import ReplicaHandle
    from skerry.testing.huggingface import HuggingFaceSandbox

KEYS = {"AWS_ACCESS_KEY_ID": "REPLICA_KEY_ID", "AWS_SECRET_ACCESS_KEY": "REPLICA_SECRET_KEY"}


class HubStage(CloudStage):
    """A run with its store in S3."""

    CREATE = "huggingface:RunJob"
    RECLAIMED = LOST

    @property
    def driver(self) -> Any:
        return self.sandbox.jobs

    def __init__(self, sandbox: HuggingFaceSandbox, place: Place) -> None:
        super().__init__("s3://acme")
        self.sandbox = sandbox
        self._store = place.sandbox.environment

    def executor(self, **options: Any) -> HFJobsExecutor:
        own = {"image": "ghcr.io/acme/skerry:cpu", "namespace": "acme", "secrets": KEYS}
        return HFJobsExecutor(**self.with_defaults({**own, **options}))

    def environment(self) -> Mapping[str, str]:
        keys = {variable: self._store[name] for name, variable in KEYS.items()}
        return {**self._store, **self.sandbox.environment, **keys, "AWS_MAX_ATTEMPTS": "1"}

    def variables_of(self, handle: ReplicaHandle) -> Mapping[str, str]:
        return self.sandbox.variables_of(handle.job)


@pytest.fixture
def stage(huggingface: HuggingFaceSandbox, aws: Place) -> HubStage:
    return HubStage(huggingface, aws)


class TestHfJobs(CloudSuite):
    pass


def test_replica_gets_the_values_that_its_secrets_name(stage: HubStage) -> None:
    with stage.executor() as executor:
        (handle,) = stage.launch(executor, 1)
        variables = stage.variables_of(handle)
        assert variables["AWS_SECRET_ACCESS_KEY"] == stage.environment()["REPLICA_SECRET_KEY"]


def test_names_of_users_may_have_dots_and_underscores(stage: HubStage) -> None:
    assert stage.executor(namespace="ada.l_2").namespace == "ada.l_2"
    with pytest.raises(Invalid, match="namespace: must be a user or an organization of Hugging Face"):
        stage.executor(namespace="ada/tiny")


def test_secret_missing_in_the_environment_is_refused(stage: HubStage) -> None:
    executor = stage.executor(secrets={**KEYS, "TOKEN": "MY_TOKEN"})
    with pytest.raises(Invalid, match="secrets of jobs are not in your environment: MY_TOKEN; set them"):
        stage.launch(executor, 1)
    assert stage.live() == 0


def test_hf_jobs_requests_match_the_golden_file(stage: HubStage) -> None:
    with stage.executor(run="s3://acme/golden/tiny", flavor="a10g-largex2") as executor:
        executor.launch_replicas(1, "python", ["train.py"])
        bodies = [call.params["body"] for call in stage.sandbox.calls if call.name == stage.CREATE]
        for body in bodies:
            body["secrets"] = sorted(body["secrets"])
        check_requests("hf_jobs", bodies)
