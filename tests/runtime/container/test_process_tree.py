"""The process tree of one command: signals, orphans, deadlines, and that no process is left. Real processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest
from tests.support.container import Signpost, clean_environment

from skerry.runtime.container.process_tree import ProcessResult

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# In a separate process: a ProcessTree takes over the signals of the process that creates it.
SCRIPT: Final = """
import dataclasses, json, os, sys
from pathlib import Path
from skerry.runtime.clock import SystemClock
from skerry.runtime.container.process_tree import NotStarted, ProcessTree
class Clock(SystemClock):
    def now(self):
        return super().now() + 86400.0 * Path("a day later").exists()
alive = os.environ.get("ALIVE")
tree = ProcessTree(Clock(), stop_s=float(sys.argv[1]), alive=Path(alive) if alive else None)
if os.environ.get("LEASH"):
    tree.leash(0)
if os.environ.get("INTERRUPT"):
    tree.interrupt()
if os.environ.get("PREPARE"):
    def forever():
        open(os.environ["REACHED"], "w").write("x")
        import threading
        threading.Event().wait()
    print(json.dumps(tree.prepare(forever)), flush=True)
    os._exit(0)
try:
    until = Clock().now() + 3600.0 if os.environ.get("LIMITED") else None
    ended = tree.run(sys.argv[2:], dict(os.environ), Path.cwd(), until)
    print("ENDED " + json.dumps(dataclasses.asdict(ended)), flush=True)
except NotStarted as error:
    print("UNSTARTED " + str(error), flush=True)
"""
READY: Final = 'open(os.environ["REACHED"], "w").write("x")\n'
# SIGTERM stays blocked until the script waits for it, so that it may arrive at any time.
BLOCK_SIGTERM: Final = "import os, signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
# Starts a child in a session of its own that pauses; both ignore SIGTERM if this says so.
START_CHILD: Final = """
import os, signal, subprocess, sys
ignore = "import signal; signal.signal(signal.SIGTERM, signal.{disposition});"
exec(ignore)
child = subprocess.Popen([sys.executable, "-c", ignore + "signal.pause()"], start_new_session=True)
open(os.environ["REACHED"], "w").write(str(child.pid))
"""
# Ends once the process that adopts its orphaned grandchild has reaped it.
WAIT_UNTIL_REAPED: Final = """
import os, pathlib
reader, writer = os.pipe()
if os.fork() == 0:
    if orphan := os.fork():
        os.write(writer, str(orphan).encode())
    os._exit(0)
os.wait()
orphan = pathlib.Path("/proc") / os.read(reader, 16).decode()
while orphan.exists():
    os.sched_yield()
"""
# Flushes once the tree has reaped the shell that started it and still forwards signals. Two, because it may take one
# between the end of the shell and a kill.
FLUSH_AFTER_THE_SHELL: Final = """
import pathlib
shell = pathlib.Path("/proc") / str(os.getppid())
open(os.environ["REACHED"], "w").write("x")
signal.sigwait([signal.SIGTERM])
while shell.exists():
    os.sched_yield()
for _ in range(2):
    os.kill(os.getppid(), signal.SIGTERM)
    signal.sigwait([signal.SIGTERM])
print("FLUSHED", flush=True)
"""


class Driver:
    """Starts the driver script. Kills all started processes when closed."""

    def __init__(self, folder: Path, signpost: Signpost) -> None:
        self.folder = folder
        self.signpost = signpost
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: str, stop_s: float = 30.0, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(stop_s), *command],
            env={**clean_environment(), "REACHED": str(self.signpost.path), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def start_python(self, script: str, *, stop_s: float = 30.0, **environment: str) -> subprocess.Popen[str]:
        return self.start(sys.executable, "-c", script, stop_s=stop_s, **environment)

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def driver(tmp_path: Path, signpost: Signpost) -> Iterator[Driver]:
    driver = Driver(tmp_path, signpost)
    yield driver
    driver.close()


def output_of(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=300)[0]


def result_in(output: str) -> ProcessResult:
    return ProcessResult(**json.loads(output.partition("ENDED ")[2]))


def ends(pid: int) -> bool:
    """Return whether this process ends within 30 s."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 30)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("pass", ProcessResult(exit_code=0)),
        ("raise SystemExit(7)", ProcessResult(exit_code=7)),
        ("import os; os.kill(os.getpid(), 9)", ProcessResult(signal=9)),
        pytest.param(WAIT_UNTIL_REAPED, ProcessResult(exit_code=0), id="orphans are reaped"),
    ],
)
def test_result_is_the_commands_exit_code_or_signal(driver: Driver, script: str, expected: ProcessResult) -> None:
    assert result_in(output_of(driver.start_python(script))) == expected


def test_missing_program_is_not_started(driver: Driver) -> None:
    output = output_of(driver.start("no-such-program"))
    assert output.startswith("UNSTARTED no such program in this image: no-such-program")
    (driver.folder / "script").write_text("#!/bin/sh\n")
    assert output_of(driver.start("./script")) == "UNSTARTED ./script is not executable\n"


def test_command_that_ignores_a_stop_is_killed_with_descendants(driver: Driver) -> None:
    script = START_CHILD.format(disposition="SIG_IGN") + "signal.pause()\n"
    process = driver.start_python(script, stop_s=0.5)
    child = int(driver.signpost.wait())
    process.send_signal(signal.SIGTERM)
    assert result_in(output_of(process)) == ProcessResult(signal=9, stopped=True, killed=True)
    assert ends(child)


def test_descendants_are_killed_when_the_command_ends(driver: Driver) -> None:
    process = driver.start_python(START_CHILD.format(disposition="SIG_DFL"))
    child = int(driver.signpost.wait())
    assert result_in(output_of(process)) == ProcessResult(exit_code=0)
    assert ends(child)


def test_closed_leash_kills_the_command(driver: Driver) -> None:
    process = driver.start_python(START_CHILD.format(disposition="SIG_DFL") + "signal.pause()\n", LEASH="1")
    child = int(driver.signpost.wait())
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    result = result_in(output_of(process))
    assert (result.leash_closed, result.signal) == (True, 9)
    assert ends(child)


def test_deadline_stops_the_command_as_a_signal_does(driver: Driver) -> None:
    reach_deadline = 'open("a day later", "w")\nos.kill(os.getppid(), signal.SIGCHLD)\n'
    flush = 'signal.sigwait([signal.SIGTERM])\nprint("FLUSHED", flush=True)\nsys.exit(30)\n'
    output = output_of(driver.start_python(BLOCK_SIGTERM + reach_deadline + flush, LIMITED="1"))
    assert output.startswith("FLUSHED\n")
    assert result_in(output) == ProcessResult(exit_code=30, stopped=True, expired=True)


def test_stop_waits_for_the_child_of_a_shell_that_ended(driver: Driver) -> None:
    (driver.folder / "flush.py").write_text(BLOCK_SIGTERM + FLUSH_AFTER_THE_SHELL)
    process = driver.start("sh", "-c", f"{sys.executable} flush.py; true")
    driver.signpost.wait()
    process.send_signal(signal.SIGTERM)
    output = output_of(process)
    assert "FLUSHED" in output
    assert not result_in(output).killed


def test_stop_ends_a_preparation_that_never_finishes(driver: Driver) -> None:
    process = driver.start("unused", PREPARE="1")
    driver.signpost.wait()
    process.send_signal(signal.SIGTERM)
    assert output_of(process) == "null\n"


def test_health_check_file_exists_from_the_start(driver: Driver) -> None:
    alive = driver.folder / "alive"
    process = driver.start_python(f"import os\n{READY}", ALIVE=str(alive))
    driver.signpost.wait()
    assert result_in(output_of(process)).exit_code == 0
    assert alive.exists()


def test_interrupt_before_the_start_ends_the_command(driver: Driver) -> None:
    """A watch may see at once that the script must not run."""
    output = output_of(driver.start_python("import signal; signal.alarm(10); signal.pause()", INTERRUPT="1"))
    assert json.loads(output.partition("ENDED ")[2])["interrupted"]
