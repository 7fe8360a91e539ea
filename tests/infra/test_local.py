"""The local target with real, tiny processes."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from skerry.infra import workspace
from skerry.infra.executor import Ending, ReplicaHandle, ServerlessExecutor
from skerry.infra.spec import LocalTarget, Seat
from skerry.infra.targets.local import LocalExecutor, LocalJob
from skerry.infra.workspace import Workspace
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG = timedelta(seconds=30)
# -S: no site, which is most of the interpreter's start.
SLEEP = ("-S", "-c", "import time; print('up', flush=True); time.sleep(600)")


class Local:
    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        seats = [Seat(slot=f"a-{n}", index=n, target=LocalTarget(kind="local", threads=n or None)) for n in range(2)]
        self.ended: queue.SimpleQueue[tuple[ReplicaHandle, Ending]] = queue.SimpleQueue()
        self.workspace = Workspace(folder / "work")
        job = LocalJob(run_uri="file:///runs/r", seats=seats, folder=folder, environment=environment)
        self.executor = LocalExecutor(job, self.workspace, lambda handle, ending: self.ended.put((handle, ending)))

    def launch(self, *arguments: str, count: int = 1) -> list[ReplicaHandle]:
        return self.executor.launch_replicas(count, "python", arguments)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    local = Local(tmp_path, {"PATH": os.environ["PATH"], "HOME": "/h", "SKERRY_OLD": "1", "SKERRY_SLOT": "other"})
    with local.executor:
        yield local


def test_it_is_an_executor(local: Local) -> None:
    executor: ServerlessExecutor = local.executor
    handles = executor.launch_replicas(2, "python", ["-S", "-c", "print('one'); print('two')"])
    assert executor.collect(handles, LONG) == [Ending(exit_code=0), Ending(exit_code=0)]
    assert [handle.slot for handle in handles] == ["a-0", "a-1"]
    assert list(executor.logs(handles[0])) == ["one", "two"]
    assert executor.poll(handles[1]) == Ending(exit_code=0)


def test_a_replica_finds_its_contract_its_folder_and_its_share_of_the_cores(local: Local, tmp_path: Path) -> None:
    handles = local.launch("-S", "-c", "import os, json; print(json.dumps([os.getcwd(), dict(os.environ)]))", count=2)
    local.executor.collect(handles, LONG)
    folder, environment = json.loads(next(local.executor.logs(handles[1])))
    assert folder == str(tmp_path)
    assert {name: text for name, text in environment.items() if name.startswith("SKERRY_")} == {
        "SKERRY_RUN": "file:///runs/r",
        "SKERRY_SLOT": "a-1",
        "SKERRY_INDEX": "1",
        "SKERRY_REPLICAS": "2",
    }
    assert environment["HOME"] == "/h"
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["OMP_NUM_THREADS"] == "1"
    _, first = json.loads(next(local.executor.logs(handles[0])))
    assert first["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


@pytest.mark.parametrize(
    ("script", "ending"),
    [
        ("raise SystemExit(10)", Ending(exit_code=10)),
        ("import os; os._exit(255)", Ending(exit_code=255)),
        ("import os; os.kill(os.getpid(), 9)", Ending(signal=9)),
        ("import os; os.kill(os.getpid(), 11)", Ending(signal=11)),
    ],
)
def test_the_leash_ends_as_the_replica_does(local: Local, script: str, ending: Ending) -> None:
    handle = local.launch("-S", "-c", script)[0]
    assert local.executor.collect([handle], LONG) == [ending]
    assert local.ended.get(timeout=30) == (handle, ending)
    assert local.workspace.processes() == []


def test_a_program_that_is_not_there_is_a_permanent_failure_told_in_the_log(local: Local) -> None:
    handles = local.executor.launch_replicas(1, "/no/such/program", [])
    assert local.executor.collect(handles, LONG) == [Ending(exit_code=20)]
    assert list(local.executor.logs(handles[0])) == [
        "skerry: cannot start '/no/such/program': No such file or directory"
    ]


def test_cancel_reaches_the_replica_and_not_the_leash(local: Local) -> None:
    script = (
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(10))\nprint('up', flush=True)\ntime.sleep(600)"
    )
    handle = local.launch("-S", "-c", script)[0]
    wait_for_line(local, handle)
    local.executor.cancel(handle)
    assert local.executor.collect([handle], LONG) == [Ending(exit_code=10)]
    local.executor.cancel(handle, kill=True)  # ended is success


def test_collect_names_what_still_runs_when_the_time_is_over(local: Local) -> None:
    handles = local.launch(*SLEEP)
    with pytest.raises(TimeoutError, match="still running after 0:00:00: a-0"):
        local.executor.collect(handles, timedelta())


def test_closing_ends_every_group(tmp_path: Path) -> None:
    local = Local(tmp_path, dict(os.environ))
    with local.executor:
        handles = local.launch(*SLEEP, count=2)
        wait_for_line(local, handles[0])
    assert [local.executor.poll(handle) for handle in handles] == [Ending(signal=9)] * 2
    assert local.workspace.processes() == []


def test_what_a_replica_leaves_in_its_group_ends_with_it(local: Local) -> None:
    # The child holds the writing end of a pipe; when it is gone, the reading end says so.
    fifo = local.workspace.folder.parent / "fifo"
    os.mkfifo(fifo)
    child = f"import time; end = open({str(fifo)!r}, 'w'); print('open', flush=True); time.sleep(600)"
    script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
    )
    handle = local.launch("-S", "-c", script)[0]
    with fifo.open() as end:  # opens when the child has
        assert local.executor.collect([handle], LONG) == [Ending(exit_code=0)]
        assert select.select([end], [], [], 30)[0], "the child outlived the replica"
        assert end.read() == ""  # its end was closed, by its death


def escape(fifo: Path) -> str:
    """A script that starts a child in a session of its own, which holds the writing end of `fifo` while it lives."""
    child = f"import time; end = open({str(fifo)!r}, 'w'); print('open', flush=True); time.sleep(600)"
    return (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', {child!r}], stdout=subprocess.PIPE, "
        "start_new_session=True)\n"
        "child.stdout.readline()\n"
    )


@pytest.mark.parametrize("killed", [False, True])
def test_a_child_in_its_own_session_ends_with_the_replica(local: Local, *, killed: bool) -> None:
    fifo = local.workspace.folder.parent / "fifo"
    os.mkfifo(fifo)
    handle = local.launch("-S", "-c", escape(fifo) + ("time.sleep(600)" if killed else ""))[0]
    with fifo.open() as end:  # opens when the child has
        if killed:
            local.executor.cancel(handle, kill=True)
        assert local.executor.collect([handle], LONG) == [Ending(signal=9) if killed else Ending(exit_code=0)]
        assert select.select([end], [], [], 30)[0], "the child outlived the replica"
        assert end.read() == ""  # its end was closed, by its death


def test_a_list_of_processes_that_cannot_be_written_loses_no_ending_and_no_process(tmp_path: Path) -> None:
    local = Local(tmp_path, dict(os.environ))
    (tmp_path / "work" / "processes.json").mkdir(parents=True)
    with local.executor:
        handle = local.launch("-S", "-c", "print('x')")[0]
        assert local.ended.get(timeout=30) == (handle, Ending(exit_code=0))
        other = local.launch(*SLEEP)[0]
        assert "processes.json" in (local.executor.untracked or "")
    assert local.executor.poll(other) == Ending(signal=9)


def test_a_restart_has_its_own_attempt_and_log(local: Local) -> None:
    first = local.launch("-S", "-c", "print('x')")[0]
    local.executor.collect([first], LONG)
    second = local.executor.relaunch(first)
    local.executor.collect([second], LONG)
    assert (first.attempt, second.attempt) == (0, 1)
    assert [file.name for file in local.workspace.logs()["a-0"]] == ["a-0.0.log", "a-0.1.log"]


def test_it_starts_no_more_than_its_seats(local: Local) -> None:
    with pytest.raises(Invalid, match="cannot start 3 replicas: the run has 2 seats"):
        local.launch("-c", "", count=3)


def test_a_later_supervisor_ends_only_the_processes_that_are_really_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The leash of a supervisor that lives does not end by itself.
    monkeypatch.setattr(workspace, "_LEASH_TIMEOUT_S", 0.0)
    local = Local(tmp_path, dict(os.environ))
    with local.executor:
        handle = local.launch(*SLEEP)[0]
        wait_for_line(local, handle)
        [mine] = local.workspace.processes()
        assert mine.pid == int(handle.job)
        # As if the number had been given to somebody else: same id, another start.
        local.workspace._write([mine.model_copy(update={"started": mine.started + 1})])
        assert local.workspace.end_leftovers() == []
        local.workspace._write([mine.model_copy(update={"boot": "another"})])
        assert local.workspace.end_leftovers() == []
        assert local.executor.poll(handle) is None
        local.workspace._write([mine])
        assert local.workspace.end_leftovers() == [mine]
        assert local.executor.collect([handle], LONG) == [Ending(signal=signal.SIGKILL)]


def wait_for_line(local: Local, handle: ReplicaHandle) -> None:
    """Until the replica has written something: its handlers are in place then."""
    while not list(local.executor.logs(handle)):
        assert local.executor.poll(handle) is None, list(local.executor.logs(handle))
        os.sched_yield()


def test_python_is_the_interpreter_that_runs_us(local: Local) -> None:
    handle = local.launch("-S", "-c", "import sys; print(sys.executable)")[0]
    local.executor.collect([handle], LONG)
    assert list(local.executor.logs(handle)) == [sys.executable]
