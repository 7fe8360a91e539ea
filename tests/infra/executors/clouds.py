"""Cloud jobs that a test drives, and the contract of executors in clouds alone."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import subprocess
from abc import abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra import kit
from tests.infra.executors.suite import LONG, OUTER, ExecutorSuite, Stage, lines_of
from tests.support.clocks import FakeClock

from skerry.infra.clouds.handler_helpers import Absent
from skerry.infra.executors import Ending
from skerry.infra.executors.cloud_executor_base import JobCreator
from skerry.runtime import contract
from skerry.runtime.errors import Invalid, Retryable, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.support.batchplace import Place

    from skerry.infra.executors import ReplicaHandle
    from skerry.infra.executors.cloud_executor_base import CloudExecutor
    from skerry.infra.provision.target_and_store_interfaces import JobView
    from skerry.infra.spec.model import ReplicaSlot

IN_ECR: Final = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry@sha256:{'1' * 64}"


GOLDEN: Final = Path(__file__).parent / "golden"
_NUMBERS = itertools.count()


def check_requests(name: str, value: Any) -> None:
    """Assert that the requests of an executor equal its golden file."""
    kit.check_golden(GOLDEN, name, value, sort_keys=True)


class CloudStage(Stage):
    """sandbox: of the cloud. CREATE: the call that creates a job, as the sandbox names it. RECLAIMED: see the suite."""

    CREATE: str
    RECLAIMED: str
    sandbox: Any

    @property
    @abstractmethod
    def driver(self) -> Any:
        """The part of the sandbox with which a test drives the jobs."""

    def __init__(self, store: str) -> None:
        self.clock = FakeClock()
        # Tests share an account; each has its own run.
        self.run = f"{store}/{next(_NUMBERS)}/tiny"

    def with_defaults(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """The options of every executor, and more."""
        environment = self.environment()
        return {"run": self.run, "outer": OUTER, "environment": environment, "clock": self.clock, **more}

    def write(self, handle: ReplicaHandle, text: str) -> None:
        self.driver.write(handle.job, text)

    def finish(self, handle: ReplicaHandle, code: int) -> None:
        self.driver.finish(handle.job, code)

    def lose(self, handle: ReplicaHandle) -> None:
        self.finish(handle, 137)

    def refuse_one(self) -> None:
        self.sandbox.fail(how="deny", after=1, on=self.CREATE)

    def live(self) -> int:
        mark = hashlib.sha256(self.run.encode()).hexdigest()[:6]
        return sum(f"-{mark}-" in name for name in self.sandbox.inventory().get("job", ()))


class AwsStage(CloudStage):
    """A run with its store in S3."""

    def __init__(self, place: Place) -> None:
        super().__init__("s3://acme")
        self.place = place
        self.sandbox = place.sandbox

    def environment(self) -> Mapping[str, str]:
        return {**self.sandbox.environment, "AWS_MAX_ATTEMPTS": "1"}


class CloudSuite(ExecutorSuite):
    # A cloud kills only half a minute after its request to stop; no test waits for that.
    KILLED = (Ending(signal=15),)

    def test_collect_backs_off_and_survives_an_outage(self, stage: CloudStage, monkeypatch: pytest.MonkeyPatch) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            read_jobs, calls = type(executor).read_jobs, itertools.count()

            def shaky(executor: CloudExecutor, jobs: Sequence[str]) -> Sequence[JobView | None]:
                if next(calls) < 2:
                    raise Retryable("busy")
                return read_jobs(executor, jobs)

            monkeypatch.setattr(type(executor), "read_jobs", shaky)

            def finish_later() -> None:
                if len(stage.clock.pauses) == 3:
                    for handle in handles:
                        stage.finish(handle, 0)

            stage.clock.pauses.clear()
            stage.clock.on_pause = finish_later
            assert executor.collect(handles, timedelta(hours=1)) == [Ending(exit_code=0)] * 2
            assert len(stage.clock.pauses) == 3
            assert 1 <= stage.clock.pauses[0] < stage.clock.pauses[2] <= 8

    def test_collect_timeout_names_a_lasting_outage(self, stage: CloudStage, monkeypatch: pytest.MonkeyPatch) -> None:
        executor = stage.executor()
        handles = stage.launch(executor, 1)

        def unreachable(_executor: CloudExecutor, _jobs: Sequence[str]) -> Sequence[JobView | None]:
            raise Retryable("busy")

        with monkeypatch.context() as broken:
            broken.setattr(type(executor), "read_jobs", unreachable)
            with pytest.raises(TimeoutError, match="not known to have ended after 0:00:30: replica-0; busy"):
                executor.collect(handles, LONG)
        executor.close()

    def test_executor_that_names_no_run_reads_and_cancels_by_handle(self, stage: CloudStage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            other = stage.executor(run="")
            assert [other.poll(handle) for handle in handles] == [None, None]
            stage.write(handles[0], "here")
            assert lines_of(other, handles[0]) == ["here"]
            stage.finish(handles[0], 10)
            other.cancel(handles[1])
            assert other.collect(handles, LONG) == [Ending(exit_code=10), Ending(signal=15)]

    def test_job_created_by_a_call_without_reply_is_deleted(
        self, stage: CloudStage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create = JobCreator.create

        def without_reply(creator: JobCreator, replica: ReplicaSlot, attempt: int) -> str:
            job = create(creator, replica, attempt)
            if replica.index == 1:
                raise Retryable("no answer")
            return job

        monkeypatch.setattr(JobCreator, "create", without_reply)
        with pytest.raises(Retryable, match="no answer"):
            stage.launch(stage.executor())
        assert stage.live() == 0

    def test_close_stops_jobs_that_no_listing_shows_yet(
        self, stage: CloudStage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        executor = stage.executor()

        def nothing(_executor: CloudExecutor, jobs: Sequence[str]) -> Sequence[JobView | None]:
            return [None] * len(jobs)

        stage.launch(executor)
        with monkeypatch.context() as lagging:
            lagging.setattr(type(executor), "read_jobs", nothing)
            executor.close()
            assert stage.live() == 0
            stage.refuse_one()
            with pytest.raises(Unauthorized) as raised:
                stage.launch(executor)
        assert stage.live() == 0
        assert not hasattr(raised.value, "__notes__")

    def test_close_retries_until_the_cloud_knows_the_job(
        self, stage: CloudStage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        executor = stage.executor()
        stage.launch(executor, 1)
        stop, tries, until = type(executor).stop_job, itertools.count(), 2.0

        def late(executor: CloudExecutor, handle: ReplicaHandle) -> None:
            if next(tries) < until:
                raise Absent("not there")
            stop(executor, handle)

        monkeypatch.setattr(type(executor), "stop_job", late)
        executor.close()
        assert stage.live() == 0
        # The job never becomes visible.
        until = math.inf
        stage.launch(executor, 1)
        stage.clock.pauses.clear()
        with pytest.raises(Invalid, match="was created but is not visible after 60 s"):
            executor.close()
        assert sum(stage.clock.pauses) == pytest.approx(60)
        monkeypatch.undo()

    def test_job_stopped_before_it_ran_ends_by_sigterm(self, stage: CloudStage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor, 1)
            executor.cancel(handles[0])
            (ending,) = executor.collect(handles, LONG)
            assert ending == Ending(signal=15)
            assert ending.why
            assert "skerry apply" not in ending.why  # the advice for a spec
            assert lines_of(executor, handles[0]) == []

    def test_lost_machine_ends_by_sigkill_with_the_reason(self, stage: CloudStage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor, 1)
            stage.driver.start(handles[0].job)
            stage.driver.interrupt(handles[0].job)
            (ending,) = executor.collect(handles, LONG)
            assert ending == Ending(signal=9)
            assert stage.RECLAIMED in ending.why

    def test_file_store_is_refused(self, stage: CloudStage) -> None:
        with pytest.raises(Invalid, match="jobs in a cloud cannot reach a folder of this machine"):
            stage.executor(run="file:///runs/tiny")

    def test_launch_without_reply_leaves_no_job(self, stage: CloudStage) -> None:
        executor = stage.executor()
        stage.sandbox.fail(how="timeout", after=1, on=stage.CREATE, times=20)
        with pytest.raises(Retryable):
            stage.launch(executor)
        stage.sandbox.heal()
        assert stage.live() == 0
        assert [handle.attempt for handle in stage.launch(executor, 1)] in ([0], [1])

    def test_code_is_uploaded_only_if_given(self, stage: CloudStage, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("print('training')\n")
        with stage.executor() as executor:
            assert contract.CODE not in stage.variables_of(stage.launch(executor, 1)[0])
        with stage.executor(code=tmp_path) as executor:
            digest = stage.variables_of(stage.launch(executor, 1)[0])[contract.CODE]
            assert open_store(stage.run, environment=stage.environment()).read(keys.code(digest)) is not None

    def test_files_that_git_does_not_track_are_logged(
        self, stage: CloudStage, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("train.py", "new.py"):
            (tmp_path / name).touch()
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        subprocess.run(["git", "add", "train.py"], cwd=tmp_path, check=True)
        with stage.executor(code=tmp_path) as executor:
            stage.launch(executor, 1)
        assert "not in the code, because git does not track them: new.py" in caplog.messages

    def test_command_reaches_the_replica_unchanged(self, stage: CloudStage) -> None:
        words = ["-c", "print('$(HOME) and $HOME')", 'a "word"']
        with stage.executor() as executor:
            (handle,) = executor.launch_replicas(1, "python", words)
            assert json.loads(stage.variables_of(handle)[contract.COMMAND]) == ["python", *words]
