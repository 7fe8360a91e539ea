"""LocalProcessExecutor with real processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.executors.pipes import PipedStage
from tests.infra.executors.suite import LONG, SCRIPT, ExecutorSuite, through_json, until
from tests.support.clocks import FakeClock

from skerry.infra import targets
from skerry.infra.executors import Ending, LocalProcessExecutor, ReplicaHandle, local
from skerry.infra.local import leash
from skerry.infra.local.process_starts import ProcessStarts
from skerry.infra.run.run_record import create_or_load_run
from skerry.infra.spec import model
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator


def environment_of(process: Path) -> bytes:
    """Empty if it has ended, or is of another user."""
    with contextlib.suppress(OSError):
        return (process / "environ").read_bytes()
    return b""


class LocalStage(PipedStage):
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self._monkeypatch = monkeypatch

    def executor(self, **options: Any) -> LocalProcessExecutor:
        return LocalProcessExecutor(**self.options(options))

    def live(self) -> int:
        return sum(
            f"SKERRY_RUN={self.run}".encode() in environment_of(folder) for folder in Path("/proc").glob("[0-9]*")
        )

    def refuse_one(self) -> None:
        spawn, spawned = ProcessStarts.spawn, itertools.count(1)

        def refuse_second(starts: ProcessStarts, *replica: Any) -> Any:
            if next(spawned) == 2:
                raise OSError("no more processes")
            return spawn(starts, *replica)

        self._monkeypatch.setattr(ProcessStarts, "spawn", refuse_second)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStage]:
    with contextlib.closing(LocalStage(tmp_path, monkeypatch)) as stage:
        yield stage


class TestLocal(ExecutorSuite):
    pass


def test_replicas_run_in_the_code_folder_or_the_current_one(stage: LocalStage, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with stage.executor(code=tmp_path / "train") as executor:
        folder, environment = stage.folder_and_variables(stage.launch(executor, 1)[0])
    assert folder == str(tmp_path / "train")
    assert "SKERRY_CODE" not in environment
    with stage.executor() as executor:
        assert stage.folder_and_variables(stage.launch(executor, 1)[0])[0] == os.getcwd()  # noqa: PTH109  the documented default


def test_kill_by_another_process_waits_until_the_replica_has_started(
    stage: LocalStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, script = tmp_path / "gate", tmp_path / "leash.py"
    os.mkfifo(gate)
    script.write_text(
        f"import runpy\nopen({str(gate)!r}).close()\nrunpy.run_path({leash.__file__!r}, run_name='__main__')"
    )
    monkeypatch.setattr(leash, "__file__", str(script))
    opened: list[bool] = []

    class Waits(FakeClock):
        def pause(self, seconds: float, wake: threading.Event | None = None) -> None:
            del seconds, wake
            if not opened:
                gate.write_text("")  # blocks until the leash has it open, which then starts the replica
            opened.append(True)
            os.sched_yield()

    with stage.executor() as executor:
        [handle] = stage.launch(executor, 1)
        stage.executor(clock=Waits()).cancel(handle, kill=True)
        if not opened:
            gate.write_text("")
            pytest.fail("the kill did not wait for the start")
        assert executor.collect([handle], LONG) == [Ending(signal=signal.SIGKILL)]


def test_kill_by_another_process_passes_over_what_has_just_ended(
    stage: LocalStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leash has also the orphans of its replica, which end at any moment."""
    ended, listed = 1 << 23, local.children  # above the highest number of a process
    monkeypatch.setattr(local, "children", lambda pid: [ended, *listed(pid)])
    with stage.executor() as executor:
        [handle] = stage.launch(executor, 1)
        stage.executor().cancel(handle, kill=True)
        assert executor.collect([handle], timedelta(seconds=10)) == [Ending(signal=signal.SIGKILL)]


def test_relative_store_starts_in_the_current_folder(
    stage: LocalStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    with stage.executor(run="file://store/tiny", code=tmp_path / "train") as executor:
        assert executor.run == stage.run
        assert stage.variables_of(stage.launch(executor, 1)[0])["SKERRY_RUN"] == stage.run
    with pytest.raises(Invalid, match="memory://"):
        stage.executor(run="memory://store/tiny")


def test_importing_executors_loads_no_sdk() -> None:
    words = "import sys, skerry.infra.executors; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout.split()
    sdks = {"boto3", "botocore", "docker", "sagemaker", "requests", "lightkube", "httpx2", "huggingface_hub", "modal"}
    assert (sdks | {"torch"}).isdisjoint(loaded)
    assert "skerry" in loaded


SPEC = """\
run: tiny
store: {store}
code: {{path: ., command: [python, train.py]}}
outer: {{rounds: 3, sync_every: 2}}
replicas:
  - {{name: replica, count: 2, target: {{kind: local}}}}
"""


def test_spec_with_the_same_values_continues_the_run(stage: LocalStage, tmp_path: Path) -> None:
    with stage.executor() as executor:
        stage.launch(executor)
    path = tmp_path / "skerry.yaml"
    path.write_text(SPEC.format(store=stage.store.as_uri()))
    loaded = model.load(path, targets.kinds())
    assert loaded.digest() == stage.run_record().spec
    assert create_or_load_run(open_store(loaded.run_uri), loaded, FakeClock()) == (stage.run_record(), True)


LAUNCHER = """\
import json, sys
from dataclasses import asdict
from pathlib import Path
from skerry.infra.executors import LocalProcessExecutor, Outer

executor = LocalProcessExecutor(run=sys.argv[1], outer=Outer(rounds=3, sync_every=2), work=Path(sys.argv[2]))
(handle,) = executor.launch_replicas(1, "python", ["-S", "-c", sys.argv[3], sys.argv[4]])
print(json.dumps(asdict(handle)), flush=True)
sys.stdin.read()
"""


def test_replica_of_a_killed_launcher_ends_by_sigkill(stage: LocalStage) -> None:
    words = [sys.executable, "-c", LAUNCHER, stage.run, str(stage.root / "work"), SCRIPT, stage.folder]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        handle = ReplicaHandle(**json.loads(launcher.stdout.readline()))
        observer = stage.executor()
        assert observer.poll(handle) is None
        launcher.kill()
        launcher.wait()
    (ending,) = observer.collect([handle], LONG)
    assert (ending, ending.why) == (Ending(signal=9), "it ended with the process that launched it")
    until(lambda: stage.live() == 0)
    with stage.executor() as executor:
        (second,) = stage.launch(executor, 1)
        assert second.attempt == 1
        # The next launcher has recorded the ending, so it stays known while that one lives.
        assert stage.executor().poll(handle) == Ending(signal=9)


def test_handle_of_another_start_is_refused(stage: LocalStage) -> None:
    with stage.executor() as executor:
        (handle,) = stage.launch(executor, 1)
        stage.finish(handle, 0)
        executor.collect([handle], LONG)
    other = through_json(ReplicaHandle(slot=handle.slot, index=0, attempt=0, job="1"))
    with pytest.raises(ValueError, match="no record of 1"):
        stage.executor().poll(other)


def test_damaged_ending_file_raises_corrupt(stage: LocalStage) -> None:
    with stage.executor() as executor:
        (handle,) = stage.launch(executor, 1)
        stage.finish(handle, 0)
        executor.collect([handle], LONG)
    (stage.root / "work/tiny/logs/replica-0.0.ended").write_text("{}")
    with pytest.raises(Corrupt, match="not an ending"):
        stage.executor().poll(through_json(handle))
