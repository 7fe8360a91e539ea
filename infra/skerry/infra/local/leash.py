"""Runs one replica and kills all its descendants when the replica ends, or when the supervisor closes the pipe or dies.

Started by path, in its own session, with a pipe as standard input whose other end only the supervisor holds. The
supervisor closes that end to kill the replica, and the kernel closes it if the supervisor dies, SIGKILL included.
Unlike PR_SET_PDEATHSIG this has no race at the start and does not depend on the thread that started the replica. As a
subreaper the leash adopts all orphans of its descendants, in sessions of their own too (torchrun's ranks), so no
process escapes while it lives (decision 0002). Imports the standard library only, so that it starts in milliseconds:
therefore it has its own look for child processes, as `skerry.runtime.container.process_tree` has.
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
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(command: list[str]) -> None:
    """Run `command`, kill its remaining descendants, and end as it ended: with its exit code, or by its signal."""
    # A handler, not SIG_IGN, because handlers are not inherited over exec. The replica receives these signals itself,
    # as a member of the group; the leash waits until the replica has ended.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    for number in _STOPS:
        signal.signal(number, _leave_to_the_replica)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        replica = os.posix_spawnp(
            command[0],
            command,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setsigmask=before,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores these two, replicas must not
        )
    except OSError as error:
        sys.stderr.write(f"skerry: cannot start {command[0]!r}: {error.strerror}\n")
        sys.exit(_CANNOT_START)
    # A signal to the group before the replica was in it reached only this process.
    for number in signal.sigpending() & {*_STOPS}:
        os.kill(replica, number)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    threading.Thread(target=_end_with_supervisor, args=(os.pidfd_open(replica),), daemon=True).start()
    ended = status = 0
    while ended != replica:  # also reaps orphans
        ended, status = os.wait()
    _end_descendants()
    if os.WIFSIGNALED(status):
        _die_of(os.WTERMSIG(status))
    # Not sys.exit: the thread holds standard input, and there is nothing to clean up.
    os._exit(os.WEXITSTATUS(status))


def _leave_to_the_replica(_number: int, _frame: FrameType | None) -> None:
    pass


def _end_with_supervisor(replica: int) -> None:
    """Kill the replica once the pipe is closed; the main thread waits for its end."""
    while os.read(_SUPERVISOR, 1):
        pass
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(replica, signal.SIGKILL)


def _end_descendants() -> None:
    """Kill and reap until none is left: orphans of a killed child become our children before its end is reported."""
    while any([kill(child) for child in children(os.getpid())]):  # noqa: C419  a list: each is killed before the first wait
        os.wait()


def children(parent: int) -> list[int]:
    """The ids of the child processes of `parent`."""
    ids: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(PermissionError):
            fields = stat_fields(int(folder.name))
            if fields is not None and fields[1] == str(parent):
                ids.append(int(folder.name))
    return ids


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name, state first; None if the process does not exist.

    The name is in parentheses and may contain spaces and parentheses.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def kill(child: int) -> bool:
    """Kill a child; False if it has ended, or is of another user (sudo): it is not waited for, as it may outlive us."""
    try:
        os.kill(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _die_of(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the replica has written the useful core file
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(sys.argv[1:])
