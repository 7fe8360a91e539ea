"""Replicas as processes of this machine, each the leader of its own group, each with a log file per start.

Leaves nothing behind: when a replica ends, whatever it started is ended; when the executor is closed or its process
dies, however it dies, every replica is ended (see `leash`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.executor import Ending, ReplicaHandle
from skerry.infra.targets import leash
from skerry.infra.targets.starts import Start, Starts
from skerry.runtime.contract import Contract
from skerry.runtime.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from pathlib import Path

    from skerry.infra.spec import Seat
    from skerry.infra.workspace import Workspace

_PYTHON: Final = ("python", "python3")
_OURS: Final = "SKERRY_"


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """What every replica of a run is started with. environment: inherited, except for SKERRY_* variables."""

    run_uri: str
    seats: Sequence[Seat]
    folder: Path
    environment: Mapping[str, str]


@dataclass(kw_only=True)
class _Running(Start):
    """hold: our end of the pipe to its leash, -1 once it is closed; closing it kills the replica."""

    process: subprocess.Popen[bytes]
    hold: int


class LocalExecutor(Starts[_Running]):
    """A ServerlessExecutor on this machine.

    untracked: why processes.json could not be kept up to date, if it once could not; the replicas do not need it.
    """

    def __init__(self, job: LocalJob, workspace: Workspace, on_end: Callable[[ReplicaHandle, Ending], None]) -> None:
        super().__init__(job.seats, workspace, on_end)
        self._job = job
        self._command: tuple[str, ...] = ()
        self.untracked: str | None = None

    def launch_replicas(self, n_replicas: int, entrypoint: str, entrypoint_args: Sequence[str]) -> list[ReplicaHandle]:
        """Start the first `n_replicas` seats. `python` is the interpreter of this process."""
        self._check_count(n_replicas)
        self._command = (sys.executable if entrypoint in _PYTHON else entrypoint, *entrypoint_args)
        return self._start_first(n_replicas)

    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """SIGTERM to the whole group of this start; or an end of all that it started, by its leash."""
        with self._changed:
            one = self._all[handle]
            if kill:
                _let_go(one)
            # Under the lock that reaping takes: the id cannot have been given to anybody else.
            elif one.ending is None:
                _signal_group(one.process.pid, signal.SIGTERM)

    def _start(self, seat: Seat, attempt: int) -> ReplicaHandle:
        # Nothing is ever written: the kernel closes our end when we die, and the leash then ends what it started.
        leash_end, hold = os.pipe()
        try:
            process = self._spawn(seat, attempt, leash_end)
        except OSError:
            os.close(hold)
            raise
        finally:
            os.close(leash_end)
        handle = ReplicaHandle(slot=seat.slot, index=seat.index, attempt=attempt, job=str(process.pid))
        one = _Running(handle=handle, process=process, hold=hold)
        waiter = threading.Thread(target=self._wait, args=(one,), name=f"wait-{seat.slot}", daemon=True)
        with self._changed:
            self._all[handle] = one
            self._waiters.append(waiter)
        # Before the waiter reaps it: a process that is gone has no start time to note.
        with self._noting():
            self._workspace.started(seat.slot, attempt, process.pid)
        waiter.start()
        return handle

    def _spawn(self, seat: Seat, attempt: int, leash_end: int) -> subprocess.Popen[bytes]:
        with self._workspace.log_file(seat.slot, attempt).open("ab") as log:
            return subprocess.Popen(  # noqa: S603  the command is the user's own, from the spec
                # Isolated and without site: the leash needs neither, and the replica gets its environment untouched.
                [sys.executable, "-I", "-S", leash.__file__, *self._command],
                stdin=leash_end,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._job.folder,
                env=self._environment(seat),
                start_new_session=True,
            )

    @contextlib.contextmanager
    def _noting(self) -> Generator[None]:
        """Tell a failure to keep processes.json, and go on: the leashes see to a crash of this process as well."""
        try:
            yield
        except (OSError, Corrupt) as error:
            self.untracked = str(error)

    def _environment(self, seat: Seat) -> dict[str, str]:
        cores = len(os.sched_getaffinity(0))
        threads = seat.threads or max(1, cores // len(self._seats))
        contract = Contract(run_uri=self._job.run_uri, slot=seat.slot, index=seat.index, replicas=len(self._seats))
        inherited = {name: text for name, text in self._job.environment.items() if not name.startswith(_OURS)}
        # Replicas that each use every core are several times slower together than those that share.
        return {
            **inherited,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(threads),
            **contract.environment(),
        }

    def _wait(self, one: _Running) -> None:
        pid = one.process.pid
        # WNOWAIT leaves a zombie that keeps the id, so that the rest of the group can be ended without a race: the
        # leash has done so, unless it was killed itself.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with self._changed:
            _signal_group(pid, signal.SIGKILL)
            code = one.process.wait()
            one.ending = Ending(signal=-code) if code < 0 else Ending(exit_code=code)
            _let_go(one)
            self._changed.notify_all()
        try:
            with self._noting():
                self._workspace.ended(pid)
        finally:
            self._on_end(one.handle, one.ending)


def _let_go(one: _Running) -> None:
    """Close our end of the pipe, once. Call under the lock."""
    hold, one.hold = one.hold, -1
    if hold >= 0:
        os.close(hold)


def _signal_group(pid: int, number: signal.Signals) -> None:
    # PermissionError: the kernel's answer for a group of which only the zombie leader is left, on some systems.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
