"""Runs `skerry`, or a script like it; the replicas that it starts are forks of this process, which has torch imported.

A fork gets what a new interpreter gets: parent, session, signals, descriptors, folder, environment, output and
arguments. Its exit code or signal is its own.

usage: python -m tests.support.forked_skerry [IMPORT,...] COMMAND|SCRIPT.py ...    IMPORT: what replicas import
"""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
from io import TextIOWrapper
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn

import torch

from skerry.infra.cli.app import main
from skerry.infra.local import leash, process_starts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_LEASH: Final = [sys.executable, "-I", "-S", leash.__file__]
_spawn: Final = os.posix_spawnp


class Leash:
    """A fork with the methods of `subprocess.Popen` that `process_starts` uses."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: int,
        cwd: Path,
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        assert (words[:4], stderr, start_new_session) == (_LEASH, subprocess.STDOUT, True)

        def run() -> None:
            os.setsid()
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(env)
            os.posix_spawnp = _spawn_python  # type: ignore[assignment]
            leash.main(list(words[4:]))

        self.pid = fork(run, [(0, stdin), (1, stdout.fileno()), (2, stdout.fileno())])

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _spawn_python(
    program: str,
    words: list[str],
    environment: Mapping[str, str],
    *,
    file_actions: Iterable[Any],
    setsigmask: Iterable[int],
    setsigdef: Iterable[int],
) -> int:
    """Fork instead of starting this interpreter. What Python resets at its start is not reset before it."""
    if program != sys.executable or words[1].startswith("-"):
        return _spawn(
            program, words, environment, file_actions=file_actions, setsigmask=setsigmask, setsigdef=setsigdef
        )
    ((_, number, path, flags, mode),) = file_actions

    def run() -> None:
        for caught in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(caught, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, setsigmask)
        run_script(words[1:])

    return fork(run, [(number, os.open(path, flags, mode)), (1, 1), (2, 2)])


def fork(run: Callable[[], None], files: Sequence[tuple[int, int]]) -> int:
    """Run a function in a fork with nothing open but these files, by number. Returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    gc.freeze()  # what is left of our objects is not to close descriptors of the fork
    for number, file in files:
        os.dup2(file, number)
    # The process that removes what multiprocessing leaves behind serves a fork, too.
    tracker = max(3, resource_tracker.getfd())
    os.closerange(3, tracker)
    os.closerange(tracker + 1, 1 << 20)
    return _end_as_python(run)


def _end_as_python(run: Callable[[], None]) -> NoReturn:
    code: object = 0
    sys.excepthook = sys.__excepthook__
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), _unbuffered(1), _unbuffered(2)  # noqa: SIM115
    atexit._clear()  # noqa: SLF001  as Python does it
    try:
        run()
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001  as an interpreter does it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # noqa: SLF001  same  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # noqa: SLF001  same
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    os._exit(code or 0)


def _unbuffered(descriptor: int) -> TextIOWrapper:
    return TextIOWrapper(open(descriptor, "wb", 0, closefd=False), write_through=True)


def run_script(words: list[str]) -> None:
    script = Path(words[0]).absolute()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    logging.getLogger("skerry").handlers.clear()
    sys.argv = words
    sys.path[:0] = [str(script.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.modules["__main__"] = program = ModuleType("__main__")
    program.__file__ = str(script)
    exec(compile(script.read_bytes(), script, "exec"), vars(program))  # noqa: S102


if __name__ == "__main__":
    for name in filter(None, sys.argv.pop(1).split(",")):
        importlib.import_module(name)
    process_starts.subprocess = SimpleNamespace(Popen=Leash, STDOUT=subprocess.STDOUT)  # type: ignore[assignment]
    if sys.argv[1].endswith(".py"):
        del sys.argv[0]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        main()
