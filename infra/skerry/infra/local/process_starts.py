"""Starts replicas as processes of this machine, each the leader of its own process group, with a log file per start.

No process outlives its replica: when a replica ends, its leash ends every process it started; when `ProcessStarts` is
closed or its process dies, however it dies, every replica is ended (see `leash`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from skerry.infra.local import leash
from skerry.infra.local.replica_env_secrets_and_data import ReplicaInputs
from skerry.infra.local.replica_starts import ReplicaStart, ReplicaStarts
from skerry.infra.run.executor import Ending
from skerry.runtime.contract import CODE
from skerry.runtime.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from pathlib import Path

    from skerry.infra.local.workspace import Workspace
    from skerry.infra.run.executor import ReplicaHandle
    from skerry.infra.spec.model import ReplicaSlot

_PYTHON: Final = ("python", "python3")
_SKERRY: Final = "SKERRY_"


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Options of every process of a run. environment: inherited, except for SKERRY_* variables. inputs: by slot.

    code: the digest of the packed code that `folder` holds; None for a folder that may change.
    """

    run_uri: str
    replicas: Sequence[ReplicaSlot]
    folder: Path
    environment: Mapping[str, str]
    code: str | None = None
    inputs: Mapping[str, ReplicaInputs] = field(default_factory=dict[str, "ReplicaInputs"])


@dataclass(kw_only=True)
class _ProcessStart(ReplicaStart):
    """leash_pipe: our end of the pipe to its leash, -1 once it is closed; closing it kills the replica."""

    process: subprocess.Popen[bytes]
    leash_pipe: int

    def close_pipe(self) -> None:
        """Close our end, once. Call with the lock held."""
        descriptor, self.leash_pipe = self.leash_pipe, -1
        if descriptor >= 0:
            os.close(descriptor)


class ProcessStarts(ReplicaStarts[_ProcessStart]):
    """Replicas as processes of this machine."""

    def __init__(
        self, options: ProcessOptions, workspace: Workspace, on_end: Callable[[ReplicaHandle, Ending], None]
    ) -> None:
        super().__init__(options.run_uri, options.replicas, workspace, on_end)
        self._options = options

    def launch(self, n_replicas: int, command: Sequence[str]) -> list[ReplicaHandle]:
        """See ReplicaStarts. `python` is the interpreter of this process."""
        program, *arguments = command
        return super().launch(n_replicas, (sys.executable if program in _PYTHON else program, *arguments))

    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """Send SIGTERM to the process group of this start, or end all its processes through its leash."""
        with self._changed:
            start = self._starts[handle]
            if kill:
                start.close_pipe()
            # Under the lock that reaping takes: the kernel cannot have reused the process id.
            elif start.ending is None:
                _signal_group(start.process.pid, signal.SIGTERM)

    def _start(self, replica: ReplicaSlot, attempt: int) -> ReplicaHandle:
        # No byte is ever written: the kernel closes our end when we die, and the leash then ends its processes.
        leash_end, our_end = os.pipe()
        try:
            process = self.spawn(replica, attempt, leash_end)
        except OSError:
            os.close(our_end)
            raise
        finally:
            os.close(leash_end)
        handle = self._handle(replica, attempt, str(process.pid))
        waiter = self._follow(_ProcessStart(handle=handle, process=process, leash_pipe=our_end))
        # Before the waiter reaps it: a reaped process has no start time to record.
        with self._recording():
            self._workspace.started(replica.slot, attempt, process.pid)
        waiter.start()
        return handle

    def spawn(self, replica: ReplicaSlot, attempt: int, leash_end: int) -> subprocess.Popen[bytes]:
        """Start the leash of a replica. Raises OSError if the machine cannot start a process."""
        own = self._options.inputs.get(replica.slot, ReplicaInputs()).variables
        code = {} if self._options.code is None else {CODE: self._options.code}
        inherited = {name: text for name, text in self._options.environment.items() if not name.startswith(_SKERRY)}
        with self._workspace.log_file(replica.slot, attempt).open("ab") as log:
            return subprocess.Popen(  # noqa: S603  the command is the user's own, from the spec
                # Isolated and without site: the leash needs neither, and the replica gets its environment untouched.
                [sys.executable, "-I", "-S", leash.__file__, *self._command],
                stdin=leash_end,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._options.folder,
                env={**inherited, "PYTHONUNBUFFERED": "1", **self._variables(replica), **code, **own},
                start_new_session=True,
            )

    @contextlib.contextmanager
    def _recording(self) -> Generator[None]:
        """Note a failure to update processes.json and continue: the leashes also handle a crash of this process."""
        try:
            yield
        except (OSError, Corrupt) as error:
            self.untracked = str(error)

    def _wait(self, start: _ProcessStart) -> None:
        pid = start.process.pid
        # WNOWAIT leaves a zombie that keeps the id, so that the rest of the group can be ended without a race: the
        # leash has done so, unless it was killed itself.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with self._changed:
            _signal_group(pid, signal.SIGKILL)
            code = start.process.wait()
            start.ending = ending = Ending(signal=-code) if code < 0 else Ending(exit_code=code)
            start.close_pipe()
            self._changed.notify_all()
        try:
            with self._recording():
                self._workspace.ended(pid)
        finally:
            self._on_end(start.handle, ending)


def _signal_group(pid: int, number: signal.Signals) -> None:
    # PermissionError: the kernel's answer, on some systems, for a group of which only the zombie leader is left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
