"""Runs one command with all its descendants: forwards signals, reaps orphans, and leaves no process running.

Written to be process 1 of a container, but works as any process. One thread waits for all signals (sigtimedwait), so
there are no handlers and no races; all other threads inherit the mask. A stop also takes effect at once during slow
preparation, such as a store that does not respond.
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
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_SIGNALS: Final = frozenset({*_STOP_SIGNALS, signal.SIGCHLD})
_PR_SET_CHILD_SUBREAPER: Final = 36  # <linux/prctl.h>
# How often the file for the container's health check is touched; the check allows two minutes.
_TOUCH_S: Final = 15.0
# Poll interval for descendants that cause no SIGCHLD because they are not children of this process.
_POLL_S: Final = 0.2


class NotStarted(Exception):  # noqa: N818  names what happened
    """The command cannot be started; the message contains the reason."""


@dataclass(frozen=True, kw_only=True)
class ProcessResult:
    """The way a command ended.

    stopped: a stop was requested. killed: it did not end in time after that. leash_closed: see `ProcessTree.leash`.
    expired: it was stopped because its time limit was reached. interrupted: see `ProcessTree.interrupt`.
    """

    exit_code: int | None = None
    signal: int | None = None
    stopped: bool = False
    killed: bool = False
    leash_closed: bool = False
    expired: bool = False
    interrupted: bool = False

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.exit_code}"
        return f"signal {signal.Signals(self.signal).name}"


class _ThreadResult(Generic[T]):
    """The value or error of a thread."""

    def __init__(self) -> None:
        self.value: T | None = None
        self.error: BaseException | None = None
        self.done = False


class ProcessTree:
    """One command and its descendants. Create it first, in the main thread: it takes over the process's signals.

    alive: a file to touch regularly, for a health check. stop_s: time from a stop request to the kill.
    """

    def __init__(self, clock: Clock, *, stop_s: float, alive: Path | None = None) -> None:
        self._clock = clock
        self._stop_s = stop_s
        self._alive = alive
        self._alive_due = clock.now()
        self._main = threading.get_ident()
        self._stop_at: float | None = None
        self._leash_closed = False
        self._deadline: float | None = None
        self._expired = False
        self._interrupted = False
        self._group: int | None = None
        # Before any other thread starts: each inherits this mask, so that only this thread receives the signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        # Orphaned descendants become children of this process, as they do of process 1 anyway.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    @property
    def stopping(self) -> bool:
        """A stop was requested."""
        return self._stop_at is not None

    def leash(self, descriptor: int) -> None:
        """End all processes when this pipe is closed at its other end: the process that held it has ended."""

        def watch() -> None:
            with contextlib.suppress(OSError):
                while os.read(descriptor, 1):
                    pass
            self._leash_closed = True
            self._wake_main_thread()

        threading.Thread(target=watch, name="leash", daemon=True).start()

    def interrupt(self) -> None:
        """From any thread: kill the command and its descendants, so that another one can be run."""
        self._interrupted = True
        self._wake_main_thread()

    def forget_interrupt(self) -> None:
        """Before another command is run, and before any thread may interrupt that one."""
        self._interrupted = False

    def prepare(self, work: Callable[[], T]) -> T | None:
        """Run `work` in a thread and return its result; None as soon as a stop is requested, without waiting for it."""
        result: _ThreadResult[T] = _ThreadResult()

        def run_work() -> None:
            try:
                result.value = work()
            except BaseException as error:  # noqa: BLE001  a thread's entry: raised below, in the caller's thread
                result.error = error
            result.done = True
            self._wake_main_thread()

        threading.Thread(target=run_work, name="prepare", daemon=True).start()
        while not (result.done or self.stopping or self._leash_closed):
            self._take_signal(self._until_alive())
        if result.error is not None:
            raise result.error
        return result.value

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, until: float | None = None
    ) -> ProcessResult:
        """Run `command` in `folder`, in a session of its own, until it and all its descendants have ended.

        until: on the clock's own `now` scale; it is then stopped as by a signal. Raises NotStarted if there is no such
        program. An interrupt that came before the start counts, because a thread may see its reason that early.
        """
        child = _spawn(command, environment, folder)
        self._group = child
        self._deadline = until
        status: int | None = None
        while status is None or (self.stopping and _children()):
            for pid, ended in _reaped():
                status = ended if pid == child else status
            if (
                self._leash_closed
                or self._interrupted
                or (self._stop_at is not None and self._clock.now() >= self._stop_at)
            ):
                break
            self._check_deadline()
            if status is None or self.stopping:
                self._take_signal(_POLL_S if status is not None else self._until_due())
        killed = self._end_descendants(child)
        late = killed.get(child)
        code = status if status is not None else late
        return ProcessResult(
            exit_code=os.WEXITSTATUS(code) if code is not None and os.WIFEXITED(code) else None,
            signal=os.WTERMSIG(code) if code is not None and os.WIFSIGNALED(code) else None,
            stopped=self.stopping,
            killed=status is None,
            leash_closed=self._leash_closed,
            expired=self._expired,
            interrupted=self._interrupted,
        )

    def _take_signal(self, seconds: float) -> None:
        """Wait for one signal; forward it if it is a stop."""
        taken = signal.sigtimedwait(_SIGNALS, max(0.0, seconds))
        self._touch()
        if taken is not None and taken.si_signo in _STOP_SIGNALS:
            self._stop(taken.si_signo)

    def _check_deadline(self) -> None:
        if self._deadline is not None and not self.stopping and self._clock.now() >= self._deadline:
            self._expired = True
            self._stop(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        """Forward the signal to the command; processes that have not ended in time are killed."""
        if self._stop_at is None:
            self._stop_at = self._clock.now() + self._stop_s
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, number)

    def _until_due(self) -> float:
        due = self._stop_at if self._stop_at is not None else self._deadline
        until = self._until_alive()
        return until if due is None else min(until, due - self._clock.now())

    def _until_alive(self) -> float:
        return max(0.0, self._alive_due - self._clock.now()) if self._alive is not None else _TOUCH_S

    def _touch(self) -> None:
        if self._alive is None or self._clock.now() < self._alive_due:
            return
        self._alive_due = self._clock.now() + _TOUCH_S
        with contextlib.suppress(OSError):  # a full disk must not end training
            self._alive.touch()

    def _wake_main_thread(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pthread_kill(self._main, signal.SIGCHLD)

    @staticmethod
    def _end_descendants(child: int) -> dict[int, int]:
        """Kill and reap all descendants; returns their statuses. Children of a killed child become ours first."""
        ended: dict[int, int] = dict(_reaped())
        while children := _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
            killed = [pid for pid in children if _kill(pid)]
            if not killed:  # processes of another user (sudo) may outlive this one
                break
            with contextlib.suppress(ChildProcessError):
                pid, status = os.wait()
                ended[pid] = status
        return ended


def _spawn(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> int:
    """Start the command in a session of its own. Returns its process id, which is also its group's."""
    # posix_spawn cannot change the folder; a shell can, and then becomes the command.
    words = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(folder), *command]
    if "/" in command[0]:
        program = folder / command[0]
        if not program.is_file():
            raise NotStarted(f"no such program: {command[0]}")
        if not os.access(program, os.X_OK):
            raise NotStarted(f"{command[0]} is not executable")
    elif not any(
        os.access(Path(part) / command[0], os.X_OK) for part in environment.get("PATH", "").split(":") if part
    ):
        raise NotStarted(f"no such program in this image: {command[0]}")
    sys.stdout.flush()
    sys.stderr.flush()
    return os.posix_spawn(
        words[0],
        words,
        environment,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores these two; a script may need them
    )


def _reaped() -> list[tuple[int, int]]:
    """Reap every child that has ended, adopted orphans included. Returns pairs of process id and status."""
    ended: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(child)
    return ended


def _children() -> list[int]:
    me = str(os.getpid())
    children: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name in parentheses may contain spaces and parentheses; the second field after it is the parent.
            if (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1] == me:
                children.append(int(folder.name))
    return children


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True
