"""Runs the replicas of a sandbox as forks of a process that has torch imported: see `Processes` and `ForkedProcess`.

usage, in a fork: python -m tests.support.forked_replica FOLDER    FOLDER: SageMaker's
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import forked_skerry
from tests.support.forked import ForkedProcess

from skerry.runtime.clock import SystemClock
from skerry.runtime.container.run import run
from skerry.testing.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_spawn = os.posix_spawn


class ForkedReplicas(Processes):
    """As Processes, without an import of torch in each."""

    def start(self, folder: str, environment: Mapping[str, str], home: str) -> Any:
        return _Fork(folder, environment, Path(home))


class _Fork(ForkedProcess):
    """A fork whose output is read while it runs."""

    def __init__(self, folder: str, environment: Mapping[str, str], home: Path) -> None:
        pipe = home / "output"
        os.mkfifo(pipe)
        # Threads of two replicas would spin while they wait for each other.
        super().__init__(["-m", __name__, folder, str(home)], {**environment, "OMP_NUM_THREADS": "1"}, pipe)
        self.stdout = pipe.open()

    def wait(self, timeout: float = 300.0) -> int:
        self.stdout.close()
        return super().wait(timeout)


class _Script:
    """A fork that waits, and then is the training script. It is made first: obstore's threads survive no fork."""

    def __init__(self) -> None:
        read, self._write = os.pipe()
        self._pid = forked_skerry.fork(_become_script, [(0, read), (1, 1), (2, 2)])
        os.close(read)

    def spawn(self, program: str, words: Sequence[str], environment: Mapping[str, str], **more: Any) -> int:
        """As `os.posix_spawn`, which gets the command of a `ProcessTree` behind the folder."""
        with os.fdopen(self._write, "w") as pipe:  # closed without a word, the fork ends
            _shell, _option, _line, folder, *command = words
            if command[0] == sys.executable and not command[1].startswith("-"):
                pipe.write(json.dumps([command, dict(environment), folder]))
                return self._pid
        return _spawn(program, words, environment, **more)


def _become_script() -> None:
    os.setsid()
    text = Path("/dev/stdin").read_text()
    if not text:
        return
    command, environment, folder = json.loads(text)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    forked_skerry.run_script(command[1:])


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    os.chdir(sys.argv[2])
    os.posix_spawn = _Script().spawn  # type: ignore[assignment]
    sys.exit(int(run([], dict(os.environ), SystemClock(), Path(sys.argv[1]))))
