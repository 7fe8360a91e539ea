"""The family of one command: signals, orphans, deadlines, and that nothing stays behind. Real processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest
from tests.support.entry import Signpost, surroundings

from skerry.runtime.entry.processes import Ended

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# A process of its own: a family takes over the signals of the one that it is made in.
DRIVER: Final = """
import dataclasses, json, os, sys
from pathlib import Path
from skerry.runtime.clock import SystemClock
from skerry.runtime.entry.processes import Family, Unstarted
alive = os.environ.get("ALIVE")
family = Family(SystemClock(), stop_s=float(sys.argv[1]), alive=Path(alive) if alive else None)
if os.environ.get("LEASH"):
    family.leash(0)
if os.environ.get("PREPARE"):
    def forever():
        open(os.environ["REACHED"], "w").write("x")
        import threading
        threading.Event().wait()
    print(json.dumps(family.prepare(forever)), flush=True)
    os._exit(0)
try:
    until = os.environ.get("UNTIL_S")
    ended = family.run(
        sys.argv[2:], dict(os.environ), Path.cwd(), None if until is None else SystemClock().now() + float(until)
    )
    print("ENDED " + json.dumps(dataclasses.asdict(ended)), flush=True)
except Unstarted as error:
    print("UNSTARTED " + str(error), flush=True)
"""
# Held back until it is waited for, so that no moment is a wrong one for the signal.
READY: Final = 'open(os.environ["REACHED"], "w").write("x")\n'
# A flush takes its time: who does not wait for it kills it.
FLUSH: Final = "import time; time.sleep(0.3)\n"
WAIT: Final = "import os, signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"


class Driven:
    """Starts of the driver. On exit all that they have started is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.signpost = Signpost(folder)
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: str, stop_s: float = 30.0, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(stop_s), *command],
            env={**surroundings(), "REACHED": str(self.signpost.path), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.signpost.close()


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Driven]:
    one = Driven(tmp_path)
    yield one
    one.close()


def ended(process: subprocess.Popen[str]) -> Ended:
    said, _ = process.communicate(timeout=60)
    (line,) = [line for line in said.splitlines() if line.startswith("ENDED ")]
    return Ended(**json.loads(line.removeprefix("ENDED ")))


def gone(pid: int) -> bool:
    """Whether this process ends within the test's patience."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 30)[0])
    finally:
        os.close(descriptor)


def python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("pass", Ended(exit_code=0)),
        ("raise SystemExit(7)", Ended(exit_code=7)),
        ("import os; os.kill(os.getpid(), 9)", Ended(signal=9)),
    ],
)
def test_it_tells_how_the_command_ended(driven: Driven, script: str, expected: Ended) -> None:
    assert ended(driven.start(*python(script))) == expected


def test_a_program_that_is_not_there_is_told_apart(driven: Driven) -> None:
    said, _ = driven.start("no-such-program").communicate(timeout=60)
    assert said.startswith("UNSTARTED no such program in this image: no-such-program")
    (driven.folder / "script").write_text("#!/bin/sh\n")
    said, _ = driven.start("./script").communicate(timeout=60)
    assert said == "UNSTARTED ./script is not executable\n"


def test_who_does_not_stop_in_time_is_killed_with_all_that_it_started(driven: Driven) -> None:
    script = (
        "import os, signal, subprocess, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()'], start_new_session=True)\n"
        'open(os.environ["REACHED"], "w").write(str(child.pid))\nsignal.pause()\n'
    )
    process = driven.start(*python(script), stop_s=0.5)
    child = int(driven.signpost.wait())
    process.send_signal(signal.SIGTERM)
    assert ended(process) == Ended(signal=9, stopped=True, killed=True)
    assert gone(child)


def test_when_its_time_is_up_it_is_stopped_as_by_a_signal(driven: Driven) -> None:
    script = f'{WAIT}signal.sigwait([signal.SIGTERM])\nprint("FLUSHED", flush=True)\nsys.exit(30)\n'
    process = driven.start(*python(script), UNTIL_S="0.2")
    said, _ = process.communicate(timeout=60)
    assert said.startswith("FLUSHED\n")
    assert Ended(**json.loads(said.split("ENDED ")[1])) == Ended(exit_code=30, stopped=True, expired=True)


def test_after_a_stop_it_waits_for_who_is_left_of_a_shell_that_is_gone(driven: Driven) -> None:
    # The shell dies of SIGTERM at once; its child needs to be let finish.
    script = f'{WAIT}{READY}signal.sigwait([signal.SIGTERM])\n{FLUSH}print("FLUSHED", flush=True)\n'
    process = driven.start("sh", "-c", f"{sys.executable} -c '{script}'; true")
    driven.signpost.wait()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert "FLUSHED" in said
    assert '"killed": false' in said


def test_without_a_stop_nobody_outlives_the_command(driven: Driven) -> None:
    script = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], start_new_session=True)\n"
        'open(os.environ["REACHED"], "w").write(str(child.pid))\n'
    )
    process = driven.start(*python(script))
    child = int(driven.signpost.wait())
    assert ended(process) == Ended(exit_code=0)
    assert gone(child)


def test_orphans_are_reaped_while_the_command_runs(driven: Driven) -> None:
    script = f"""{WAIT}
import time, pathlib
if os.fork() == 0:
    if os.fork() == 0:
        os._exit(0)
    os._exit(0)
os.wait()
parent = os.getppid()
def zombies():
    states = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        states += [fields[0]] if fields[1] == str(parent) else []
    return states.count("Z")
while zombies():
    time.sleep(0.01)
"""
    assert ended(driven.start(*python(script))) == Ended(exit_code=0)


def test_a_stop_is_heard_while_something_is_prepared_that_never_comes(driven: Driven) -> None:
    process = driven.start("unused", PREPARE="1")
    driven.signpost.wait()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "null\n"


def test_when_the_leash_is_let_go_everything_ends(driven: Driven) -> None:
    script = 'import os, signal\nopen(os.environ["REACHED"], "w").write(str(os.getpid()))\nsignal.pause()\n'
    process = driven.start(*python(script), LEASH="1")
    child = int(driven.signpost.wait())
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    found = ended(process)
    assert (found.cut, found.signal) == (True, 9)
    assert gone(child)


def test_the_file_that_a_health_check_looks_at_is_there_from_the_beginning(driven: Driven) -> None:
    alive = driven.folder / "alive"
    process = driven.start(*python(f"{READY.replace('open', 'import os; open', 1)}"), ALIVE=str(alive))
    driven.signpost.wait()
    assert ended(process).exit_code == 0
    assert alive.exists()
