"""Starts Python programs as processes that are forked from one that has torch imported.

Such a start takes milliseconds, an import of torch seconds. Otherwise the process is as `python PROGRAM` makes it: with
its own environment, output, session and signals.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CONTEXT: Final = multiprocessing.get_context("forkserver")
# The first optimizer imports torch._dynamo.
_CONTEXT.set_forkserver_preload(
    [
        "hypothesis",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.run",
        "torchft.ddp",
        "torchft.local_sgd",
        "skerry.runtime.replica",
        "skerry.infra.cli.app",
        "skerry.testing.sandbox",
        "skerry.testing.google",
    ]
)


class ForkedProcess:
    """One process with the methods of `subprocess.Popen`.

    words: of its command line after `python`: SCRIPT or -m MODULE, then arguments. output: a file or a named pipe.
    errors: a file for these. source: the standard input. fresh: replace the fork by a new interpreter, which imports
    everything as a user's does.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        *,
        errors: Path | None = None,
        source: Path = Path(os.devnull),
        fresh: bool = False,
    ) -> None:
        self.output, self.errors = output, errors or output
        paths = (str(source), str(self.output), str(self.errors))
        self._process = _CONTEXT.Process(target=_run, args=(list(words), dict(environment), paths, fresh))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout:g} s")
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill it with its session, and wait until it is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.poll() is None:
            self._process.kill()
        self._process.join()


def _run(words: list[str], environment: dict[str, str], files: tuple[str, ...], fresh: bool) -> None:  # noqa: FBT001
    os.setsid()
    for number, path in enumerate(files):
        mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
        file = os.open(path, mode | os.O_NOCTTY, 0o644)
        os.dup2(file, number)
        os.close(file)
    if fresh:
        os.execve(sys.executable, [sys.executable, *words], environment)  # noqa: S606
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  multiprocessing has closed it
    multiprocessing.set_start_method(None, force=True)  # the default, and not the one that has made this process
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
