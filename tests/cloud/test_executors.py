"""The promises of every executor, with jobs of a real service in what a spec's `apply` made there.

Each test starts jobs and waits for machines: about half an hour of one service's tests is work, the rest is waiting.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from tests.cloud.place import placed
from tests.cloud.settings import PATIENCE, Settings, until
from tests.cloud.stages import BatchStage, CloudStage, Ground, SageMakerStage, VertexStage, ground
from tests.infra.executors import suite
from tests.infra.executors.suite import ExecutorSuite

from skerry.infra.executors import Ending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from skerry.runtime.clock import Clock

    Staged = Callable[[type[CloudStage], Ground], CloudStage]


class InService(ExecutorSuite):
    # A container that gets SIGTERM in time ends with its own code; a service reports only that it was stopped.
    STOPPED = (Ending(exit_code=10), Ending(signal=15))
    KILLED = STOPPED

    def test_killed_replica_ends_by_sigkill(self, stage: CloudStage) -> None:
        """A process in a container cannot kill its first process, which reports that its script was killed."""
        with stage.executor() as executor:
            handles = stage.launch(executor, 1)
            stage.lose(handles[0])
            assert executor.collect(handles, PATIENCE) == [Ending(exit_code=10)]


class TestBatch(InService):
    @pytest.fixture
    def stage(self, in_batch: Ground, staged: Staged) -> CloudStage:
        return staged(BatchStage, in_batch)


class TestSageMaker(InService):
    @pytest.fixture
    def stage(self, in_sagemaker: Ground, staged: Staged) -> CloudStage:
        return staged(SageMakerStage, in_sagemaker)


class TestVertex(InService):
    @pytest.fixture
    def stage(self, in_vertex: Ground, staged: Staged) -> CloudStage:
        return staged(VertexStage, in_vertex)


@pytest.fixture(scope="module")
def in_batch(settings: Settings) -> Iterator[Ground]:
    with placed(settings, ["aws_batch"], 3) as place:
        yield ground(place, settings)


@pytest.fixture(scope="module")
def in_sagemaker(settings: Settings) -> Iterator[Ground]:
    with placed(settings, ["sagemaker"], 3) as place:
        yield ground(place, settings)


@pytest.fixture(scope="module")
def in_vertex(settings: Settings) -> Iterator[Ground]:
    with placed(settings, ["vertex"], 3) as place:
        yield ground(place, settings)


@pytest.fixture
def staged(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Staged]:
    """Makes a stage whose jobs end with the test."""

    def waited(look: Callable[[], bool]) -> None:
        until(clock, look)

    # The suite's own are those of a machine that starts a process in a second.
    monkeypatch.setattr(suite, "LONG", PATIENCE)
    monkeypatch.setattr(suite, "until", waited)
    with contextlib.ExitStack() as ends:
        yield lambda kind, where: ends.enter_context(contextlib.closing(kind(where, clock, monkeypatch)))
