"""Runs one command as its whole family: forwards signals, reaps what is orphaned, and leaves nothing running.

Written to be process 1 of a container, and works as any other. One thread takes every signal by asking for it, so there
are no handlers and no races; all other threads inherit the mask. While something slow is being prepared (a store that
does not answer) a stop is heard at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.runtime.clock import Clock

T = TypeVar("T")
_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
_WAITED: Final = frozenset({*_STOPS, signal.SIGCHLD})
_PR_SET_CHILD_SUBREAPER: Final = 36  # <linux/prctl.h>
# How often a container's health check sees that this loop turns; it allows two minutes.
_ALIVE_S: Final = 15.0
# Between looks for descendants of which no SIGCHLD tells: those that are not children of this process.
_LOOK_S: Final = 0.2


class Unstarted(Exception):  # noqa: N818  named for what happened
    """The command cannot be started at all; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the command ended. stopped: a stop was asked for. killed: it was not done in time, and was killed."""

    exit_code: int | None = None
    signal: int | None = None
    stopped: bool = False
    killed: bool = False
    cut: bool = False
    """Whoever holds the leash let go."""
    expired: bool = False
    """Its time was up: it was stopped for that."""

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.exit_code}"
        return f"signal {signal.Signals(self.signal).name}"


class _Box(Generic[T]):
    """What a thread has found or raised."""

    def __init__(self) -> None:
        self.value: T | None = None
        self.error: BaseException | None = None
        self.done = False


class Family:
    """One command and all that comes of it. Make it first, in the main thread: it takes over the process's signals.

    alive: a file to touch while all is well. stop_s: from a stop to the end of what is left.
    """

    def __init__(self, clock: Clock, *, stop_s: float, alive: Path | None = None) -> None:
        self._clock = clock
        self._stop_s = stop_s
        self._alive = alive
        self._alive_due = clock.now()
        self._main = threading.get_ident()
        self._stop_at: float | None = None
        self._cut = False
        self._until: float | None = None
        self._expired = False
        self._group: int | None = None
        # Before any other thread is: each inherits this mask, so that only this one is asked.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
        # What a descendant orphans becomes a child of this process, as it does of process 1 anyway.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    @property
    def stopping(self) -> bool:
        """A stop was asked for."""
        return self._stop_at is not None

    def leash(self, descriptor: int) -> None:
        """End everything when this descriptor comes to its end: whoever held the other one is gone."""

        def hold() -> None:
            with contextlib.suppress(OSError):
                while os.read(descriptor, 1):
                    pass
            self._cut = True
            self._nudge()

        threading.Thread(target=hold, name="leash", daemon=True).start()

    def prepare(self, work: Callable[[], T]) -> T | None:
        """What `work` returns, or raises; None as soon as a stop is asked for, and `work` is left behind."""
        box: _Box[T] = _Box()

        def do() -> None:
            try:
                box.value = work()
            except BaseException as error:  # noqa: BLE001  a thread's entry: raised below, in the caller's thread
                box.error = error
            box.done = True
            self._nudge()

        threading.Thread(target=do, name="prepare", daemon=True).start()
        while not (box.done or self.stopping or self._cut):
            self._take_signal(self._until_alive())
        if box.error is not None:
            raise box.error
        return box.value

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, until: float | None = None
    ) -> Ended:
        """Run `command` in `folder`, in a session of its own, until it and all its descendants have ended.

        until: on the clock's own `now` scale; then it is stopped as by a signal. Raises Unstarted if there is no such
        program.
        """
        child = _spawn(command, environment, folder)
        self._group = child
        self._until = until
        status: int | None = None
        while status is None or (self.stopping and _children()):
            for pid, ended in _reaped():
                status = ended if pid == child else status
            if self._cut or (self._stop_at is not None and self._clock.now() >= self._stop_at):
                break
            self._look_at_the_time()
            if status is None or self.stopping:
                self._take_signal(_LOOK_S if status is not None else self._until_due())
        killed = self._end_descendants(child)
        late = killed.get(child)
        code = status if status is not None else late
        return Ended(
            exit_code=os.WEXITSTATUS(code) if code is not None and os.WIFEXITED(code) else None,
            signal=os.WTERMSIG(code) if code is not None and os.WIFSIGNALED(code) else None,
            stopped=self.stopping,
            killed=status is None,
            cut=self._cut,
            expired=self._expired,
        )

    def _take_signal(self, seconds: float) -> None:
        """Wait for one signal, and do what it asks."""
        taken = signal.sigtimedwait(_WAITED, max(0.0, seconds))
        self._touch()
        if taken is not None and taken.si_signo in _STOPS:
            self._stop(taken.si_signo)

    def _look_at_the_time(self) -> None:
        if self._until is not None and not self.stopping and self._clock.now() >= self._until:
            self._expired = True
            self._stop(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        """Pass it on; what has not ended in time is killed."""
        if self._stop_at is None:
            self._stop_at = self._clock.now() + self._stop_s
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, number)

    def _until_due(self) -> float:
        due = self._stop_at if self._stop_at is not None else self._until
        until = self._until_alive()
        return until if due is None else min(until, due - self._clock.now())

    def _until_alive(self) -> float:
        return max(0.0, self._alive_due - self._clock.now()) if self._alive is not None else _ALIVE_S

    def _touch(self) -> None:
        if self._alive is None or self._clock.now() < self._alive_due:
            return
        self._alive_due = self._clock.now() + _ALIVE_S
        with contextlib.suppress(OSError):  # a full disk must not end training
            self._alive.touch()

    def _nudge(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pthread_kill(self._main, signal.SIGCHLD)

    @staticmethod
    def _end_descendants(child: int) -> dict[int, int]:
        """Kill and reap until nobody is left; how each ended. A killed child's children become ours before that."""
        ended: dict[int, int] = dict(_reaped())
        while children := _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
            mine = [pid for pid in children if _kill(pid)]
            if not mine:  # of another user (sudo): it may outlive us
                break
            with contextlib.suppress(ChildProcessError):
                pid, status = os.wait()
                ended[pid] = status
        return ended


def _spawn(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> int:
    """Start it; its process id, which is its group's too."""
    # posix_spawn cannot change the folder; the shell of every base can, and becomes the command.
    words = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(folder), *command]
    if "/" in command[0]:
        program = folder / command[0]
        if not program.is_file():
            raise Unstarted(f"no such program: {command[0]}")
        if not os.access(program, os.X_OK):
            raise Unstarted(f"{command[0]} is not executable")
    elif not any(
        os.access(Path(part) / command[0], os.X_OK) for part in environment.get("PATH", "").split(":") if part
    ):
        raise Unstarted(f"no such program in this image: {command[0]}")
    sys.stdout.flush()
    sys.stderr.flush()
    return os.posix_spawn(
        words[0],
        words,
        environment,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores these two; a script may want them
    )


def _reaped() -> list[tuple[int, int]]:
    """Every child that has ended, orphans of others among them, with its status."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(one)
    return found


def _children() -> list[int]:
    me = str(os.getpid())
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name is in parentheses and may hold spaces and parentheses; the second field after it is the parent.
            if (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1] == me:
                found.append(int(folder.name))
    return found


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True
