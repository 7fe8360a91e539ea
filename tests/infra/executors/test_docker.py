"""DockerExecutor with real containers, which a test controls through pipes below the run."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import TYPE_CHECKING, Any

import pytest
from tests.e2e.conftest import engine, image
from tests.infra.executors.pipes import PipedStage
from tests.infra.executors.suite import ExecutorSuite

from skerry.infra.executors import DockerExecutor, Ending
from skerry.infra.local.docker_engine import ContainerRequest, Engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.infra.executors import ReplicaHandle

__all__ = ["engine", "image"]

pytestmark = [pytest.mark.docker, pytest.mark.slow]


class DockerStage(PipedStage):
    def __init__(self, folder: Path, machine: Engine, name: str) -> None:
        super().__init__(folder)
        self._engine = machine
        self._image = name
        self._blocking: list[str] = []

    def close(self) -> None:
        super().close()
        mine = self._engine.containers.labelled({"dev.skerry.run": self.run})
        for container in (*mine, *self._blocking):
            self._engine.containers.remove(container)

    def executor(self, **options: Any) -> DockerExecutor:
        return DockerExecutor(**self.options({"image": self._image, "threads": 1, **options}))

    def lose(self, handle: ReplicaHandle) -> None:
        self._engine.containers.signal(handle.job, "SIGKILL")

    def live(self) -> int:
        containers = self._engine.containers.labelled({"dev.skerry.run": self.run})
        return sum(self._engine.containers.inspect(container)["State"]["Running"] for container in containers)

    def refuse_one(self) -> None:
        """Take the container name of replica-1."""
        short = hashlib.sha256(self.run.encode()).hexdigest()[:6]
        self._blocking.append(
            self._engine.containers.create(ContainerRequest(image=self._image, name=f"skerry-tiny-replica-1-0-{short}"))
        )


@pytest.fixture
def stage(tmp_path: Path, engine: Engine, image: str) -> Iterator[DockerStage]:
    with contextlib.closing(DockerStage(tmp_path, engine, image)) as stage:
        yield stage


class TestDocker(ExecutorSuite):
    # The image's entry point handles the signal and ends with its own code.
    STOPPED = (Ending(exit_code=10),)

    @staticmethod
    def other_job(job: str) -> str:
        return job[::-1]


def test_command_runs_in_the_code_folder_or_the_one_of_the_image(stage: DockerStage, tmp_path: Path) -> None:
    with stage.executor() as executor:
        folder, environment = stage.folder_and_variables(stage.launch(executor, 1)[0])
        assert "SKERRY_CODE" not in environment
        assert not folder.endswith("/code")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "train.py").write_text("print('training')\n")
    with stage.executor(code=tmp_path / "train") as executor:
        folder, environment = stage.folder_and_variables(stage.launch(executor, 1)[0])
        assert len(environment["SKERRY_CODE"]) == 64
        assert folder.endswith("/code")


def test_only_variables_of_store_clients_are_passed_on(stage: DockerStage) -> None:
    mine = {"CLOUDSDK_AUTH_ACCESS_TOKEN": "lent", "GOOGLE_CLOUD_PROJECT": "acme", "CLOUDSDK_CONFIG": "/home/me/gcloud"}
    with stage.executor(environment={**os.environ, **mine}) as executor:
        _, environment = stage.folder_and_variables(stage.launch(executor, 1)[0])
    assert environment["CLOUDSDK_AUTH_ACCESS_TOKEN"] == "lent"  # noqa: S105  not a real token
    assert environment["GOOGLE_CLOUD_PROJECT"] == "acme"
    assert "CLOUDSDK_CONFIG" not in environment
