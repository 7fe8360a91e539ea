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
from typing import TYPE_CHECKING, Final, Self

from skerry.infra.executor import Ending, ReplicaHandle
from skerry.infra.targets import leash
from skerry.runtime.contract import Contract
from skerry.runtime.errors import Corrupt, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from datetime import timedelta
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
class _Running:
    """hold: our end of the pipe to its leash, -1 once it is closed; closing it kills the replica."""

    handle: ReplicaHandle
    process: subprocess.Popen[bytes]
    hold: int
    ending: Ending | None = None


class LocalExecutor:
    """A ServerlessExecutor on this machine. Thread-safe. Close it, or use it as a context manager.

    on_end: called once for every start that ended, from a thread of its own, after its group is gone.
    untracked: why processes.json could not be kept up to date, if it once could not; the replicas do not need it.
    """

    def __init__(self, job: LocalJob, workspace: Workspace, on_end: Callable[[ReplicaHandle, Ending], None]) -> None:
        self._job = job
        self._workspace = workspace
        self._on_end = on_end
        self._changed = threading.Condition()
        self._all: dict[ReplicaHandle, _Running] = {}
        self._waiters: list[threading.Thread] = []
        self._command: tuple[str, ...] = ()
        self.untracked: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def launch_replicas(self, n_replicas: int, entrypoint: str, entrypoint_args: Sequence[str]) -> list[ReplicaHandle]:
        """Start the first `n_replicas` seats. `python` is the interpreter of this process."""
        if not 1 <= n_replicas <= len(self._job.seats):
            raise Invalid(f"cannot start {n_replicas} replicas: the run has {len(self._job.seats)} seats")
        self._command = (sys.executable if entrypoint in _PYTHON else entrypoint, *entrypoint_args)
        handles: list[ReplicaHandle] = []
        try:
            for seat in self._job.seats[:n_replicas]:
                handles.append(self._start(seat, self._workspace.next_attempt(seat.slot)))  # noqa: PERF401  the except needs those made so far
        except OSError:
            for handle in handles:
                self.cancel(handle, kill=True)
            raise
        return handles

    def relaunch(self, handle: ReplicaHandle) -> ReplicaHandle:
        """Start the seat of `handle`, which has ended, once more. Raises OSError if the machine cannot."""
        return self._start(self._job.seats[handle.index], handle.attempt + 1)

    def poll(self, handle: ReplicaHandle) -> Ending | None:
        """How this start ended; None while any process of its group may run."""
        with self._changed:
            return self._all[handle].ending

    def collect(self, handles: Sequence[ReplicaHandle], timeout: timedelta) -> list[Ending]:
        """How each ended, in the order given. Raises TimeoutError naming those that still run."""
        mine = [self._all[handle] for handle in handles]
        with self._changed:
            self._changed.wait_for(lambda: all(one.ending for one in mine), timeout.total_seconds())
            late = [one.handle.slot for one in mine if one.ending is None]
            if late:
                raise TimeoutError(f"still running after {timeout}: {', '.join(late)}")
            return [one.ending for one in mine if one.ending is not None]

    def logs(self, handle: ReplicaHandle) -> Iterator[str]:
        """The lines of this start's log file so far."""
        with self.log_file(handle).open(errors="replace") as log:
            for line in log:
                yield line.rstrip("\n")

    def log_file(self, handle: ReplicaHandle) -> Path:
        """Where this start writes."""
        return self._workspace.log_file(handle.slot, handle.attempt)

    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """SIGTERM to the whole group of this start; or an end of all that it started, by its leash."""
        with self._changed:
            one = self._all[handle]
            if kill:
                _let_go(one)
            # Under the lock that reaping takes: the id cannot have been given to anybody else.
            elif one.ending is None:
                _signal_group(one.process.pid, signal.SIGTERM)

    def close(self) -> None:
        """End every replica that is left and wait until all is reaped and `on_end` was called. May be repeated."""
        for one in list(self._all.values()):
            self.cancel(one.handle, kill=True)
        for waiter in self._waiters:
            waiter.join()

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
        threads = seat.target.threads or max(1, cores // len(self._job.seats))
        contract = Contract(run_uri=self._job.run_uri, slot=seat.slot, index=seat.index, replicas=len(self._job.seats))
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
