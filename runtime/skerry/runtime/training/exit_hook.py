"""Ends a replica together with its process, if the script does not: it raises, calls `sys.exit` or is interrupted.

The replica leaves its slot, and its last heartbeat contains how it ended. So the other replicas do not wait for it. A
script that calls `shutdown()` has left before, and nothing happens here. The script's own `sys.excepthook` and exit
functions run as well. A script that ends with RunFinished has not failed: its process exits with 0. A forked child is
another process: its end means nothing for the replica.
"""

from __future__ import annotations

import atexit
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Final

from skerry.runtime.contract import ExitCode
from skerry.runtime.daemon_executors import wait_for_jobs
from skerry.runtime.errors import RunFinished
from skerry.runtime.failure_text import shortened, text_of_failure

if TYPE_CHECKING:
    from types import TracebackType

    from skerry.runtime.log.records import Phase
    from skerry.runtime.training.lifecycle import Lifecycle

# A stop ends an exchange at once. A receipt or the rest of a checkpoint may take some seconds.
_JOBS_S: Final = 5.0
_LONGEST_TEXT: Final = 500

_processes: Final[dict[Lifecycle, int]] = {}
"""The process that each open lifecycle belongs to. Held here, because `sys.exit` drops what the script holds."""


def leave_at_process_end(lifecycle: Lifecycle) -> None:
    """Call `lifecycle.leave` when this process ends, or as soon as an exception ends its main thread."""
    _processes[lifecycle] = os.getpid()
    _install()


def forget(lifecycle: Lifecycle) -> None:
    """It has left. Idempotent."""
    _processes.pop(lifecycle, None)


@cache
def _install() -> None:
    """Install the hooks, once in a process."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, RunFinished) and os.getpid() in _processes.values():
            _leave("finished", str(error))
            sys.stderr.write(f"{error}\n")
            raise SystemExit(ExitCode.DONE)
        try:
            previous(kind, error, trace)
        finally:
            if not sys.flags.interactive and not hasattr(sys, "ps1"):  # there the process goes on
                text = shortened(text_of_failure(error), _LONGEST_TEXT)
                _leave("failed" if issubclass(kind, Exception) else "left", text)

    sys.excepthook = hook
    atexit.register(_end, os.getpid())


def _end(process: int) -> None:
    """Leave what is still open, and let jobs end: a daemon thread inside a torch operation would abort the process."""
    _leave("left", "the script ended without shutdown()")
    if os.getpid() == process:  # a forked child has none of the threads
        wait_for_jobs(_JOBS_S)


def _leave(phase: Phase, reason: str) -> None:
    for lifecycle in [lifecycle for lifecycle, process in _processes.items() if process == os.getpid()]:
        lifecycle.leave(phase, reason)
