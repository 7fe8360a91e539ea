"""SlurmExecutor on a real Slurm cluster."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from tests.infra.executors.pipes import PipedStage
from tests.infra.executors.suite import ExecutorSuite
from tests.support.slurmsite import SlurmSite, slurm_site

from skerry.infra.executors import Ending, SlurmExecutor
from skerry.infra.executors.cloud_executor_base import JobCreator
from skerry.infra.provision.target_and_store_interfaces import stem_of
from skerry.runtime.errors import Invalid, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.infra.executors import ReplicaHandle
    from skerry.infra.spec.model import ReplicaSlot

pytestmark = pytest.mark.slow


class SlurmStage(PipedStage):
    def __init__(self, site: SlurmSite, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self.site = site
        self._monkeypatch = monkeypatch

    def executor(self, **options: Any) -> SlurmExecutor:
        own = {"environment": self.site.environment, "folder": str(self.root / "work"), "python": sys.executable}
        values = {**self.options({}), **own, **options}
        del values["work"]
        return SlurmExecutor(**values)

    def live(self) -> int:
        listed = self.site.call("squeue", "--noheader", "--states=pending,running", "--format=%j")
        return sum(name.startswith(stem_of(self.run)) for name in listed.split())

    def lose(self, handle: ReplicaHandle) -> None:
        self.site.kill(handle.job.rpartition("/")[2])

    def refuse_one(self) -> None:
        create = JobCreator.create

        def refuse_second(creator: JobCreator, replica: ReplicaSlot, attempt: int) -> str:
            if replica.index == 1:
                raise Unauthorized("no more jobs")
            return create(creator, replica, attempt)

        self._monkeypatch.setattr(JobCreator, "create", refuse_second)

    def _log(self, handle: ReplicaHandle) -> str:
        path = self.root / "work" / stem_of(self.run) / f"{handle.job.rpartition('/')[0]}.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmSite]:
    with slurm_site() as site:
        yield site


@pytest.fixture
def stage(site: SlurmSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmStage]:
    with contextlib.closing(SlurmStage(site, tmp_path, monkeypatch)) as stage:
        yield stage


class TestSlurm(ExecutorSuite):
    STOPPED: ClassVar[tuple[Ending, ...]] = (Ending(signal=15),)
    # Slurm asks first, and kills after KillWait.
    KILLED: ClassVar[tuple[Ending, ...]] = (Ending(signal=15),)


def test_number_of_another_job_is_no_record(stage: SlurmStage) -> None:
    with stage.executor() as executor:
        (handle,) = stage.launch(executor, 1)
        name, _, number = handle.job.rpartition("/")
        with pytest.raises(Invalid, match="no record of"):
            executor.poll(replace(handle, job=f"{name}-g7/{number}"))


def test_options_of_a_spec_are_checked_at_once(tmp_path: Path) -> None:
    run = f"{tmp_path.as_uri()}/tiny"
    with pytest.raises(Invalid, match=r"SlurmExecutor cannot take this: extra.0: .*must not be --signal"):
        SlurmExecutor(run=run, extra=("--signal=TERM",))
    with pytest.raises(Invalid, match="apptainer runs an image"):
        SlurmExecutor(run=run, container="apptainer")
