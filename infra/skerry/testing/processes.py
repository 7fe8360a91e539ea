"""Runs the replicas of a sandbox as processes of this machine, where no Docker engine answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skerry.testing.batch_retry_rules import TIMED_OUT, AttemptEnd
from skerry.testing.docker_containers import JobContainers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.testing.docker_containers import JobContainer

# As the entrypoint of the replica image, with the folder of SageMaker where the sandbox has created it.
_REPLICA: Final = """\
import os, pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
from skerry.runtime.clock import SystemClock
from skerry.runtime.container.run import run
sys.exit(int(run([], dict(os.environ), SystemClock(), pathlib.Path(sys.argv[1]))))
"""


class Processes(JobContainers):
    """See JobContainers. Needs no engine; memory, user, image and command of a container are ignored.

    A process has no mounts: variables, and the container's `files`, name the folders of this machine instead.
    """

    def __init__(self) -> None:
        """Start nothing."""
        self._running: dict[str, subprocess.Popen[str]] = {}

    def run(
        self,
        container: JobContainer,
        *,
        started: Callable[[str], None],
        line: Callable[[str], None],
        limit_s: float | None,
    ) -> AttemptEnd:
        """See JobContainers."""
        folder = next((bind.source for bind in container.binds if bind.target == "/opt/ml"), "/nonexistent")
        with (
            tempfile.TemporaryDirectory() as home,
            self.start(folder, {"PATH": os.environ["PATH"], "HOME": home, **_unmounted(container)}, home) as process,
        ):
            self._running[container.name] = process
            late = threading.Timer(limit_s or threading.TIMEOUT_MAX, self.stop, [container.name])
            late.start()
            started(container.name)
            for text in process.stdout or ():
                line(text.rstrip("\n"))
            code = process.wait()
            in_time = late.is_alive()
            late.cancel()
        code = code if code >= 0 else 128 - code
        return (
            AttemptEnd(exit_code=code) if in_time else AttemptEnd(exit_code=code, status_reason=TIMED_OUT, final=True)
        )

    def start(self, folder: str, environment: Mapping[str, str], home: str) -> subprocess.Popen[str]:
        """Start a replica in the folder `home`. folder: SageMaker's, which may not exist."""
        return subprocess.Popen(  # noqa: S603  this interpreter, with a program of ours
            [sys.executable, "-c", _REPLICA, folder],
            env=environment,
            cwd=home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def stop(self, container_id: str) -> None:
        """See JobContainers. No SIGKILL follows."""
        self._running[container_id].send_signal(signal.SIGTERM)

    def kill(self, container_id: str) -> None:
        """See JobContainers."""
        self._running[container_id].kill()

    def close(self) -> None:
        """See JobContainers."""
        for process in self._running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _unmounted(container: JobContainer) -> dict[str, str]:
    """The environment, with the paths of mounted files on this machine, in variables and in the files themselves."""

    def outside(text: str) -> str:
        for bind in container.files:
            text = text.replace(f"{bind.target}/", f"{bind.source}/")
        return text

    for bind in container.files:
        for path in Path(bind.source).iterdir():
            path.write_text(outside(path.read_text()))
    return {name: outside(text) for name, text in container.environment.items()}
