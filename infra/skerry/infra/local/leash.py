"""Runs one replica and ends every process that comes of it: when it has ended, and when its supervisor lets go.

Started by path, in its own session, with a pipe as standard input whose other end only the supervisor holds. That end
is closed to kill the replica, and by the kernel at any death of the supervisor, SIGKILL included. Unlike
PR_SET_PDEATHSIG this has no race at the start and does not depend on which thread started the replica. As a subreaper
the leash inherits whatever its descendants orphan, in sessions of their own too (torchrun's ranks), so nothing escapes
while it lives (decision 0002). Imports the standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_SUPERVISOR = 0  # standard input: the pipe
_CANNOT_START = 20  # contract.ExitCode.PERMANENT, which this file does not import
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


def main(command: list[str]) -> None:
    """Run `command`, end what it leaves behind, and end as it ended: with its exit code, or by its signal."""
    # A handler, not SIG_IGN: handlers are not inherited over exec. The replica gets these signals itself, as a
    # member of the group; the leash stays until the replica has ended.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave_to_the_replica)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        replica = os.posix_spawnp(
            command[0],
            command,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores these two; a replica may want them
        )
    except OSError as error:
        sys.stderr.write(f"skerry: cannot start {command[0]!r}: {error.strerror}\n")
        sys.exit(_CANNOT_START)
    threading.Thread(target=_end_with_supervisor, args=(os.pidfd_open(replica),), daemon=True).start()
    ended = status = 0
    while ended != replica:  # orphans are reaped on the way
        ended, status = os.wait()
    _end_descendants()
    if os.WIFSIGNALED(status):
        _die_of(os.WTERMSIG(status))
    # Not sys.exit: the thread holds standard input, and there is nothing to clean up.
    os._exit(os.WEXITSTATUS(status))


def _leave_to_the_replica(_number: int, _frame: FrameType | None) -> None:
    pass


def _end_with_supervisor(replica: int) -> None:
    """Kill the replica once the pipe is closed; the main thread sees it end and does the rest."""
    while os.read(_SUPERVISOR, 1):
        pass
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(replica, signal.SIGKILL)


def _end_descendants() -> None:
    """Kill and reap until nobody is left: what a killed child leaves is our child before its end is reported."""
    while any([_killed(child) for child in _children()]):  # noqa: C419  a list: each is killed before the first wait
        os.wait()


def _children() -> list[int]:
    me = str(os.getpid())
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name is in parentheses and may hold spaces and parentheses; the second field after it is the parent.
            if (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1] == me:
                found.append(int(folder.name))
    return found


def _killed(child: int) -> bool:
    """False for a child of another user (sudo), which may outlive us: waiting for it could take for ever."""
    try:
        os.kill(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _die_of(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the replica has left the core worth reading
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(sys.argv[1:])
