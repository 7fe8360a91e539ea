"""Starts of real, tiny processes. What LocalProcessExecutor promises on top of them is in tests/infra/executors."""

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

from skerry.infra.local import leash, workspace
from skerry.infra.local.options import LocalTarget
from skerry.infra.local.process_starts import ProcessOptions, ProcessStarts
from skerry.infra.local.workspace import Process, Workspace
from skerry.infra.run.executor import Ending, ReplicaHandle
from skerry.infra.spec.model import ReplicaSlot
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG = timedelta(seconds=30)
PAUSE = "import signal; print('up', flush=True); signal.pause()"


class Local:
    """Two replicas, a-0 and a-1, and the queue of their endings."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        replicas = [
            ReplicaSlot(slot=f"a-{n}", index=n, target=LocalTarget(kind="local", threads=n or None)) for n in range(2)
        ]
        self.ended: queue.SimpleQueue[tuple[ReplicaHandle, Ending]] = queue.SimpleQueue()
        self.workspace = Workspace(folder / "work")
        options = ProcessOptions(run_uri="file:///runs/r", replicas=replicas, folder=folder, environment=environment)
        self.starts = ProcessStarts(options, self.workspace, lambda handle, ending: self.ended.put((handle, ending)))

    def launch(self, script: str, count: int = 1) -> list[ReplicaHandle]:
        # -S: no site, which takes most of the interpreter's start.
        return self.starts.launch(count, ("python", "-S", "-c", script))

    def collect(self, *handles: ReplicaHandle) -> list[Ending | None]:
        return self.starts.wait(handles, LONG)

    def lines(self, handle: ReplicaHandle) -> list[str]:
        return self.starts.log_file(handle).read_text().splitlines()

    def wait_for_line(self, handle: ReplicaHandle) -> None:
        """Wait until the replica has written a line: its signal handlers are installed then."""
        while not self.lines(handle):
            assert self.starts.poll(handle) is None, self.lines(handle)
            os.sched_yield()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    local = Local(tmp_path, {"PATH": os.environ["PATH"], "HOME": "/h", "SKERRY_OLD": "1", "SKERRY_SLOT": "other"})
    with local.starts:
        yield local


def test_replica_gets_the_contract_its_folder_and_its_share_of_cores(local: Local, tmp_path: Path) -> None:
    script = "import json, os, sys; print(json.dumps([sys.executable, os.getcwd(), dict(os.environ)]))"
    handles = local.launch(script, count=2)
    local.collect(*handles)
    program, folder, environment = json.loads(local.lines(handles[1])[0])
    assert (program, folder) == (sys.executable, str(tmp_path))
    assert {name: text for name, text in environment.items() if name.startswith("SKERRY_")} == {
        "SKERRY_RUN": "file:///runs/r",
        "SKERRY_SLOT": "a-1",
        "SKERRY_INDEX": "1",
        "SKERRY_REPLICAS": "2",
        "SKERRY_PLACE": '{"cloud":"local"}',
    }
    assert (environment["HOME"], environment["PYTHONUNBUFFERED"], environment["OMP_NUM_THREADS"]) == ("/h", "1", "1")
    first = json.loads(local.lines(handles[0])[0])[-1]
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
def test_leash_ends_with_the_exit_code_or_signal_of_the_replica(local: Local, script: str, ending: Ending) -> None:
    [handle] = local.launch(script)
    assert local.collect(handle) == [ending]
    assert local.ended.get(timeout=300) == (handle, ending)
    assert local.workspace.processes() == []


def test_missing_program_ends_as_permanent_failure_with_a_log_line(local: Local) -> None:
    (handle,) = local.starts.launch(1, ["/no/such/program"])
    assert local.collect(handle) == [Ending(exit_code=20)]
    assert local.lines(handle) == ["skerry: cannot start '/no/such/program': No such file or directory"]


def test_cancel_signals_the_replica_and_not_the_leash(local: Local) -> None:
    blocked = "import signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, {15})\n"
    script = blocked + "print('up', flush=True)\nsignal.sigwait({15})\nsys.exit(10)"
    [handle] = local.launch(script)
    local.wait_for_line(handle)
    local.starts.cancel(handle)
    assert local.collect(handle) == [Ending(exit_code=10)]
    local.starts.cancel(handle, kill=True)  # succeeds although it has ended


def with_child(fifo: Path, *, own_session: bool) -> str:
    """A script that starts a child, which holds the writing end of `fifo` open as long as it lives."""
    os.mkfifo(fifo)
    child = f"import signal; end = open({str(fifo)!r}, 'w'); print('open', flush=True); signal.pause()"
    return (
        "import signal, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', {child!r}], stdout=subprocess.PIPE, "
        f"start_new_session={own_session})\n"
        "child.stdout.readline()\n"
    )


@pytest.mark.parametrize(("own_session", "killed"), [(False, False), (True, False), (True, True)])
def test_child_of_a_replica_ends_with_it(local: Local, tmp_path: Path, *, own_session: bool, killed: bool) -> None:
    fifo = tmp_path / "fifo"
    script = with_child(fifo, own_session=own_session)
    [handle] = local.launch(script + ("signal.pause()" if killed else ""))
    with fifo.open() as end:  # blocks until the child has opened it
        if killed:
            local.starts.cancel(handle, kill=True)
        assert local.collect(handle) == [Ending(signal=9) if killed else Ending(exit_code=0)]
        assert select.select([end], [], [], 30)[0], "the child outlived the replica"
        assert end.read() == ""  # closed by the child's death


def test_unwritable_process_list_loses_no_ending_and_no_process(tmp_path: Path) -> None:
    local = Local(tmp_path, dict(os.environ))
    (tmp_path / "work" / "processes.json").mkdir(parents=True)
    with local.starts:
        [handle] = local.launch("print('x')")
        assert local.ended.get(timeout=300) == (handle, Ending(exit_code=0))
        [other] = local.launch(PAUSE)
        assert "processes.json" in (local.starts.untracked or "")
    assert local.starts.poll(other) == Ending(signal=9)


def test_launch_refuses_more_replicas_than_the_run_has(local: Local) -> None:
    with pytest.raises(Invalid, match="cannot start 3 replicas: the run has 2"):
        local.launch("", count=3)


def test_later_supervisor_ends_only_processes_of_the_same_start_and_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The leash of a living supervisor does not end by itself.
    monkeypatch.setattr(workspace, "LEASH_TIMEOUT_S", 0.0)
    local = Local(tmp_path, dict(os.environ))

    def write(process: Process) -> None:
        record = json.dumps({"processes": [process.model_dump()]})
        (local.workspace.folder / "processes.json").write_text(record)

    with local.starts:
        [handle] = local.launch(PAUSE)
        local.wait_for_line(handle)
        [process] = local.workspace.processes()
        assert process.pid == int(handle.job)
        # As if the kernel had reused the process id.
        write(process.model_copy(update={"started": process.started + 1}))
        assert local.workspace.kill_leftovers() == []
        write(process.model_copy(update={"boot": "another"}))
        assert local.workspace.kill_leftovers() == []
        assert local.starts.poll(handle) is None
        write(process)
        assert local.workspace.kill_leftovers() == [process]
        assert local.collect(handle) == [Ending(signal=signal.SIGKILL)]


def test_signal_before_the_replica_is_in_the_group_reaches_it(
    local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The leash, with a signal of the group at the moment in which it starts the replica.
    (tmp_path / "leash.py").write_text(f"""\
import os, runpy, signal, sys
start = os.posix_spawnp
def signalled(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    return start(*arguments, **options)
os.posix_spawnp = signalled
runpy.run_path({leash.__file__!r}, run_name="__main__")
""")
    monkeypatch.setattr(leash, "__file__", str(tmp_path / "leash.py"))
    [handle] = local.launch(PAUSE)
    assert local.collect(handle) == [Ending(signal=signal.SIGTERM)]
