"""Runs one replica and ends its whole process group when the supervisor is gone, however it went.

Started by path, in its own session, with a pipe as standard input whose other end only the supervisor holds: the
kernel closes that end at any death, SIGKILL included, and the end of the pipe is the leash's signal. Unlike
PR_SET_PDEATHSIG this reaches the replica's own children, has no race at the start, and does not depend on which
thread of the supervisor started the replica. Imports the standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_SUPERVISOR = 0  # standard input: the pipe
_CANNOT_START = 20  # contract.ExitCode.PERMANENT, which this file does not import


def main(command: list[str]) -> None:
    """Run `command` and end as it ends: with its exit code, or by its signal."""
    # A handler, not SIG_IGN: handlers are not inherited over exec. The replica gets these signals itself, as a
    # member of the group; the leash stays until the replica has ended.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave_to_the_replica)
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
    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    _, status = os.waitpid(replica, 0)
    if os.WIFSIGNALED(status):
        _die_of(os.WTERMSIG(status))
    # Not sys.exit: the thread holds standard input, and there is nothing to clean up.
    os._exit(os.WEXITSTATUS(status))


def _leave_to_the_replica(_number: int, _frame: FrameType | None) -> None:
    pass


def _end_with_supervisor() -> None:
    while os.read(_SUPERVISOR, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _die_of(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the replica has left the core worth reading
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(sys.argv[1:])
