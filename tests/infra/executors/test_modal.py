from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.executors.clouds import CloudStage, CloudSuite

from skerry.infra.executors import ModalExecutor
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.batchplace import Place

    from skerry.infra.executors import ReplicaHandle
    from skerry.testing.modal_cloud import ModalSandbox


class ModalStage(CloudStage):
    """A run with its store in S3."""

    CREATE = "modal:SandboxCreate*"
    RECLAIMED = "terminated, preempted or killed"

    @property
    def driver(self) -> Any:
        return self.sandbox.jobs

    def __init__(self, sandbox: ModalSandbox, place: Place) -> None:
        super().__init__("s3://acme")
        self.sandbox = sandbox
        self._store = place.sandbox.environment

    def executor(self, **options: Any) -> ModalExecutor:
        own = {"image": "ghcr.io/acme/skerry:cpu", "secrets": ("store-keys",)}
        return ModalExecutor(**self.with_defaults({**own, **options}))

    def environment(self) -> Mapping[str, str]:
        return {**self._store, **self.sandbox.environment, "AWS_MAX_ATTEMPTS": "1"}

    def variables_of(self, handle: ReplicaHandle) -> Mapping[str, str]:
        return self.sandbox.variables_of(handle.job)


@pytest.fixture
def stage(modal: ModalSandbox, aws: Place) -> ModalStage:
    return ModalStage(modal, aws)


class TestModal(CloudSuite):
    pass


def test_sandbox_with_gpus_is_of_the_first_backend(stage: ModalStage) -> None:
    with stage.executor(gpu="H100", gpus=2) as executor:
        (handle,) = stage.launch(executor, 1)
        assert [call.operation for call in stage.sandbox.calls if call.operation.startswith("SandboxCreate")] == [
            "SandboxCreate"
        ]
        gpu = stage.sandbox.definition_of(handle.job).resources.gpu_config
        assert (gpu.gpu_type, gpu.count, stage.variables_of(handle)["SKERRY_RANKS"]) == ("H100", 2, "2")
        stage.write(handle, "up")
        assert list(executor.logs(handle)) == ["up"]


def test_longer_time_than_modal_gives_is_refused(stage: ModalStage) -> None:
    with pytest.raises(Invalid, match=r"ModalExecutor cannot take this: max_runtime: .*must be 1m to 1d"):
        stage.executor(max_runtime=timedelta(hours=25))


def test_gpu_that_modal_must_not_replace_is_accepted(stage: ModalStage) -> None:
    with stage.executor(gpu="H100!", gpus=2) as executor:
        (handle,) = stage.launch(executor, 1)
        assert stage.sandbox.definition_of(handle.job).resources.gpu_config.gpu_type == "H100!"
