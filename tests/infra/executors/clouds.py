"""Jobs of clouds that a test drives, and what only executors of clouds promise."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.executors.suite import LONG, OUTER, ExecutorSuite, Stage, lines_of
from tests.support.clocks import FakeClock

from skerry.infra.clouds.handling import Absent
from skerry.infra.executors import Ending
from skerry.infra.executors.cloud import Maker
from skerry.runtime import contract, keys
from skerry.runtime.errors import Invalid, Retryable, Unauthorized
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from skerry.infra.executors import ReplicaHandle
    from skerry.infra.executors.cloud import CloudExecutor, Seen
    from skerry.infra.spec import Seat

IN_ECR: Final = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry@sha256:{'1' * 64}"


_NUMBERS = itertools.count()


class CloudStage(Stage):
    """sandbox: of the cloud. CREATE: the call that makes a job, as the sandbox names it."""

    CREATE: str
    sandbox: Any

    def __init__(self, store: str) -> None:
        self.clock = FakeClock()
        # Tests share an account, and none a run.
        self.run = f"{store}/{next(_NUMBERS)}/tiny"

    def common(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """What all of them are told."""
        environment = self.environment()
        return {"run": self.run, "outer": OUTER, "environment": environment, "clock": self.clock, **more}

    def refuse_one(self) -> None:
        self.sandbox.fail(how="deny", after=1, on=self.CREATE)

    def live(self) -> int:
        mark = hashlib.sha256(self.run.encode()).hexdigest()[:6]
        return sum(f"-{mark}-" in name for name in self.sandbox.inventory().get("job", ()))


class CloudSuite(ExecutorSuite):
    # A cloud asks to stop, and kills what is left: its half minute is not what a test waits for.
    KILLED = (Ending(signal=15),)

    def test_collect_waits_with_growing_pauses_and_through_an_outage(
        self, stage: CloudStage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            look, looks = type(executor)._look, itertools.count()

            def shaky(executor: CloudExecutor, jobs: Sequence[str]) -> Sequence[Seen | None]:
                if next(looks) < 2:
                    raise Retryable("busy")
                return look(executor, jobs)

            monkeypatch.setattr(type(executor), "_look", shaky)

            def pass_by() -> None:
                if len(stage.clock.pauses) == 3:
                    for handle in handles:
                        stage.finish(handle, 0)

            stage.clock.pauses.clear()
            stage.clock.on_pause = pass_by
            assert executor.collect(handles, timedelta(hours=1)) == [Ending(exit_code=0)] * 2
            assert len(stage.clock.pauses) == 3
            assert 1 <= stage.clock.pauses[0] < stage.clock.pauses[2] <= 8

    def test_an_outage_that_does_not_end_is_told_when_the_time_is_over(
        self, stage: CloudStage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        executor = stage.executor()
        handles = stage.launch(executor, 1)

        def away(_executor: CloudExecutor, _jobs: Sequence[str]) -> Sequence[Seen | None]:
            raise Retryable("busy")

        with monkeypatch.context() as broken:
            broken.setattr(type(executor), "_look", away)
            with pytest.raises(TimeoutError, match="not known to have ended after 0:00:30: replica-0; busy"):
                executor.collect(handles, LONG)
        executor.close()

    def test_a_job_that_was_made_without_anybody_hearing_of_it_is_ended(
        self, stage: CloudStage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create = Maker.create

        def unheard(maker: Maker, seat: Seat, attempt: int) -> str:
            job = create(maker, seat, attempt)
            if seat.index == 1:
                raise Retryable("no answer")
            return job

        monkeypatch.setattr(Maker, "create", unheard)
        with pytest.raises(Retryable, match="no answer"):
            stage.launch(stage.executor())
        assert stage.live() == 0

    def test_what_was_begun_is_stopped_although_no_look_shows_it_yet(
        self, stage: CloudStage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It costs money whether it is shown or not."""
        executor = stage.executor()

        def nothing(_executor: CloudExecutor, jobs: Sequence[str]) -> Sequence[Seen | None]:
            return [None] * len(jobs)

        stage.launch(executor)
        with monkeypatch.context() as lagging:
            lagging.setattr(type(executor), "_look", nothing)
            executor.close()
            assert stage.live() == 0
            stage.refuse_one()
            with pytest.raises(Unauthorized) as raised:
                stage.launch(executor)
        assert stage.live() == 0
        assert not hasattr(raised.value, "__notes__")

    def test_a_job_that_its_cloud_does_not_know_yet_is_stopped_when_it_does(
        self, stage: CloudStage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        executor = stage.executor()
        stage.launch(executor, 1)
        stop, tries, until = type(executor)._stop, itertools.count(), 2.0

        def late(executor: CloudExecutor, handle: ReplicaHandle) -> None:
            if next(tries) < until:
                raise Absent("not there")
            stop(executor, handle)

        monkeypatch.setattr(type(executor), "_stop", late)
        executor.close()
        assert stage.live() == 0
        # Deleted with its record, or lost.
        until = math.inf
        stage.launch(executor, 1)
        stage.clock.pauses.clear()
        with pytest.raises(Invalid, match="was made, and after 60 s it is not there to be stopped"):
            executor.close()
        assert sum(stage.clock.pauses) == pytest.approx(60)
        monkeypatch.undo()

    def test_a_job_that_is_stopped_before_it_ran_was_asked_to_stop(self, stage: CloudStage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor, 1)
            executor.cancel(handles[0])
            (ending,) = executor.collect(handles, LONG)
            assert ending == Ending(signal=15)
            assert ending.why
            assert lines_of(executor, handles[0]) == []

    def test_a_folder_is_no_store_for_jobs(self, stage: CloudStage) -> None:
        with pytest.raises(Invalid, match="no job of a cloud reaches a folder of this machine"):
            stage.executor(run="file:///runs/tiny")

    def test_rights_that_are_missing_are_told_as_that(self, stage: CloudStage) -> None:
        stage.refuse_one()
        with pytest.raises(Unauthorized):
            stage.launch(stage.executor())

    def test_a_launch_that_gets_no_answer_leaves_nothing(self, stage: CloudStage) -> None:
        executor = stage.executor()
        stage.sandbox.fail(how="timeout", after=1, on=stage.CREATE, times=20)
        with pytest.raises(Retryable):
            stage.launch(executor)
        stage.sandbox.heal()
        assert stage.live() == 0
        assert [one.attempt for one in stage.launch(executor, 1)] in ([0], [1])

    def test_code_goes_through_the_store_and_without_it_is_the_images(self, stage: CloudStage, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("print('training')\n")
        with stage.executor() as executor:
            assert contract.CODE not in stage.told(stage.launch(executor, 1)[0])
        with stage.executor(code=tmp_path) as executor:
            digest = stage.told(stage.launch(executor, 1)[0])[contract.CODE]
            assert open_store(stage.run, environment=stage.environment()).read(keys.code(digest)) is not None

    def test_a_replica_is_told_what_to_run_word_for_word(self, stage: CloudStage) -> None:
        words = ["-c", "print('$(HOME) and $HOME')", 'a "word"']
        with stage.executor() as executor:
            (handle,) = executor.launch_replicas(1, "python", words)
            assert json.loads(stage.told(handle)[contract.COMMAND]) == ["python", *words]
