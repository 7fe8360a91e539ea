"""For rehearsals: what a sandbox takes for its containers, and is a process of this machine that does what they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Final

from skerry.testing.batch_retry_rules import TIMED_OUT, AttemptEnd
from skerry.testing.containers import JobContainers

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.testing.containers import JobContainer

# What the replica image starts, but that SageMaker's folder is where the sandbox has made it.
_REPLICA: Final = """\
import os, pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
from skerry.runtime.clock import SystemClock
from skerry.runtime.container.run import run
sys.exit(int(run([], dict(os.environ), SystemClock(), pathlib.Path(sys.argv[1]))))
"""


class Processes(JobContainers):
    """See Boxes: one that needs no engine. Memory, users and images are not held to."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[str]] = {}

    def run(
        self, box: JobContainer, *, started: Callable[[str], None], line: Callable[[str], None], limit_s: float | None
    ) -> AttemptEnd:
        folder = next((bind.source for bind in box.binds if bind.target == "/opt/ml"), "/nonexistent")
        with (
            tempfile.TemporaryDirectory() as home,
            subprocess.Popen(
                [sys.executable, "-c", _REPLICA, folder],
                env={"PATH": os.environ["PATH"], "HOME": home, **box.environment},
                cwd=home,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            ) as process,
        ):
            self._running[box.name] = process
            late = threading.Timer(limit_s or threading.TIMEOUT_MAX, self.stop, [box.name])
            late.start()
            started(box.name)
            assert process.stdout is not None
            for text in process.stdout:
                line(text.rstrip("\n"))
            code = process.wait()
            in_time = late.is_alive()
            late.cancel()
        code = code if code >= 0 else 128 - code
        return (
            AttemptEnd(exit_code=code) if in_time else AttemptEnd(exit_code=code, status_reason=TIMED_OUT, final=True)
        )

    def stop(self, container: str) -> None:
        self._running[container].send_signal(signal.SIGTERM)

    def kill(self, container: str) -> None:
        self._running[container].kill()

    def close(self) -> None:
        for process in self._running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
