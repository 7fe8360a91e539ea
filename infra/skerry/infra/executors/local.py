"""Executors of this machine: replicas as processes (`LocalProcessExecutor`) or as containers (`DockerExecutor`).

Replicas end with the process that launched them, however it dies. Any other process of this machine can follow them by
their handles: the launcher writes how each start ended to a file next to its log file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from skerry.infra.executors.options import RunOptions
from skerry.infra.local.container_starts import ContainerOptions, ContainerStarts, engine_for
from skerry.infra.local.docker_engine import Engine, EngineFailed
from skerry.infra.local.leash import children, kill
from skerry.infra.local.options import DockerTarget, LocalTarget
from skerry.infra.local.process_starts import ProcessOptions, ProcessStarts
from skerry.infra.local.replica_env_secrets_and_data import ReplicaInputs
from skerry.infra.local.workspace import Workspace, boot_id, process_start
from skerry.infra.run.executor import Ending, ReplicaHandle, ending_from_exit_code, seconds_of
from skerry.infra.spec.model import WORK_FOLDER
from skerry.runtime.clock import Backoff, wait_until
from skerry.runtime.errors import Conflict, Corrupt, Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.executors.options import PreparedRun
    from skerry.infra.local.replica_starts import AnyStarts
    from skerry.infra.local.workspace import Process
    from skerry.infra.run.executor import EntrypointArguments
    from skerry.infra.spec.target_kinds import TargetOptions

# Polls of replicas that another process launched; a poll reads a few files.
_POLLS: Final = Backoff(first=0.05, cap=1.0)
_START_S: Final = 30.0
"""A leash starts its replica within milliseconds; on a machine that is this slow a kill fails instead of waiting."""
_LAUNCHER_DIED: Final = "it ended with the process that launched it"


@dataclass(kw_only=True)
class MachineExecutor(RunOptions):
    """A ServerlessExecutor of this machine; see also RunOptions.

    work: logs go below it, into a folder of the run. threads: CPU threads per replica; None shares the cores out.
    """

    PACKS_CODE: ClassVar[bool]
    """True if the code goes through the store."""

    work: Path = field(default_factory=lambda: Path(WORK_FOLDER))
    threads: int | None = None
    _guard: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)
    _launched: dict[ReplicaHandle, AnyStarts] = field(
        default_factory=dict[ReplicaHandle, "AnyStarts"], init=False, repr=False
    )
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False, repr=False)
    _open_workspace: Workspace | None = field(default=None, init=False, repr=False)

    def _set_run(self, uri: str) -> None:
        super()._set_run(uri)
        self._open_workspace = Workspace(self.work.absolute() / self.name)

    @property
    def _workspace(self) -> Workspace:
        if self._open_workspace is None:
            raise Invalid(f"no run yet: write {type(self).__name__}(run=...), or launch replicas first")
        return self._open_workspace

    def launch_replicas(
        self, n_replicas: int, entrypoint: str, entrypoint_args: EntrypointArguments = ()
    ) -> list[ReplicaHandle]:
        """See ServerlessExecutor. Also raises Conflict while another process of this machine runs its replicas."""
        command = self.read_entrypoint(entrypoint, entrypoint_args).command
        spec = self.spec_for(n_replicas, command, self._target())
        with self._guard:
            if running := [handle.slot for handle in self._launched if self.poll(handle) is None]:
                raise Conflict(f"still running: {', '.join(running)}; cancel or collect them")
            self.close()
            try:
                self._open.enter_context(self._workspace.locked())
                self._workspace.kill_leftovers()
                self._record_lost_starts()
                starts = self._open_starts(self.prepare(spec, self.environment, pack_code=self.PACKS_CODE))
                self._open.callback(starts.close)
                launched = starts.launch(n_replicas, command)
                handles = [replace(handle, backend=self.backend) for handle in launched]
            except BaseException:
                self._open.close()
                raise
            self._launched.update(dict.fromkeys(handles, starts))
            return handles

    def poll(self, handle: ReplicaHandle) -> Ending | None:
        """See ServerlessExecutor."""
        starts = self._launched.get(handle)
        if starts is not None:
            return starts.poll(handle)
        recorded = self._recorded_ending(handle)
        if recorded is not None:
            return recorded
        try:
            return self._poll_foreign(handle)
        except LookupError:
            # Its launcher is about to record the ending, or is gone.
            if self._workspace.lock_holder() is not None:
                return None
            return self._recorded_ending(handle) or Ending(signal=signal.SIGKILL, why=_LAUNCHER_DIED)

    def collect(self, handles: Sequence[ReplicaHandle], timeout: timedelta | float) -> list[Ending]:
        """See ServerlessExecutor."""
        timeout = timedelta(seconds=seconds_of(timeout))
        all_starts = {self._launched.get(handle) for handle in handles}
        if len(all_starts) == 1 and (starts := all_starts.pop()) is not None:
            endings = starts.wait(handles, timeout)
        else:
            endings = self._poll_until_ended(handles, timeout)
        if late := [handle.slot for handle, ending in zip(handles, endings, strict=True) if ending is None]:
            raise TimeoutError(f"still running after {timeout}: {', '.join(late)}")
        return [ending for ending in endings if ending is not None]

    def logs(self, handle: ReplicaHandle) -> Iterator[str]:
        """See ServerlessExecutor."""
        with self._log_file(handle).open(errors="replace") as log:
            for line in log:
                yield line.rstrip("\n")

    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """See ServerlessExecutor."""
        starts = self._launched.get(handle)
        if starts is not None:
            starts.cancel(handle, kill=kill)
        elif self.poll(handle) is None:
            self._cancel_foreign(handle, kill=kill)

    def close(self) -> None:
        """See ServerlessExecutor. Waits until no process of the replicas is left."""
        with self._guard:
            self._open.close()

    @abstractmethod
    def _target(self) -> TargetOptions:
        """The target that a spec would name."""

    @abstractmethod
    def _open_starts(self, prepared: PreparedRun) -> AnyStarts:
        """An object that starts the replicas of one launch."""

    @abstractmethod
    def _poll_foreign(self, handle: ReplicaHandle) -> Ending | None:
        """The result of a start of another process; None while it runs. Raises LookupError if it does not exist."""

    @abstractmethod
    def _cancel_foreign(self, handle: ReplicaHandle, *, kill: bool) -> None:
        """Stop a start that another process launched."""

    def _poll_until_ended(self, handles: Sequence[ReplicaHandle], timeout: timedelta) -> list[Ending | None]:
        endings: list[Ending | None] = []

        def all_ended() -> bool | None:
            endings[:] = [self.poll(handle) for handle in handles]
            return None if None in endings else True

        with contextlib.suppress(TimeoutError):
            wait_until(self.clock, all_ended, self.clock.now() + timeout.total_seconds(), _POLLS)
        return endings

    def _inputs(self, prepared: PreparedRun) -> Mapping[str, ReplicaInputs]:
        """The variables that a replica does not have in common with the others, by slot."""
        return {
            replica.slot: ReplicaInputs(variables=self.own_variables(replica))
            for replica in prepared.spec.replica_slots
        }

    def _on_end(self, handle: ReplicaHandle, ending: Ending) -> None:
        _write_ending(self._workspace.log_file(handle.slot, handle.attempt), handle.job, ending)

    def _record_lost_starts(self) -> None:
        """Record an ending for each start whose launcher died. Call with the run's lock: no such start still runs."""
        for log_files in self._workspace.logs().values():
            for log_file in log_files:
                if not _ending_file(log_file).exists():
                    _write_ending(log_file, None, Ending(signal=signal.SIGKILL, why=_LAUNCHER_DIED))

    def _recorded_ending(self, handle: ReplicaHandle) -> Ending | None:
        """The ending that the launcher recorded, if any. Raises Invalid if the handle belongs to no start."""
        path = _ending_file(self._log_file(handle))
        try:
            record = json.loads(path.read_bytes())
            if record["job"] not in {None, handle.job}:
                raise Invalid(f"no record of {handle.job} ({handle.slot}): that start was {record['job']}")
            return Ending(exit_code=record["exit_code"], signal=record["signal"], why=record["why"])
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise Corrupt(f"not an ending: {path}; remove the file") from error

    def _log_file(self, handle: ReplicaHandle) -> Path:
        path = self._workspace.log_file(handle.slot, handle.attempt)
        if not path.is_file():
            raise Invalid(f"no record of {handle.job} ({handle.slot}): {path} does not exist")
        return path


def _ending_file(log_file: Path) -> Path:
    return log_file.with_suffix(".ended")


def _write_ending(log_file: Path, job: str | None, ending: Ending) -> None:
    path = _ending_file(log_file)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    record = {"job": job, "exit_code": ending.exit_code, "signal": ending.signal, "why": ending.why}
    partial.write_text(json.dumps(record))
    partial.replace(path)


@dataclass(kw_only=True)
class LocalProcessExecutor(MachineExecutor):
    """Runs replicas as processes in the folder `code`, or in the current folder without it."""

    PACKS_CODE: ClassVar[bool] = False

    def _target(self) -> TargetOptions:
        return LocalTarget(kind="local", threads=self.threads)

    def _open_starts(self, prepared: PreparedRun) -> AnyStarts:
        options = ProcessOptions(
            run_uri=self.run,
            replicas=prepared.spec.replica_slots,
            folder=(self.code or Path()).absolute(),
            environment={**self.environment, **self.variables},
            inputs=self._inputs(prepared),
        )
        return ProcessStarts(options, self._workspace, self._on_end)

    def _poll_foreign(self, handle: ReplicaHandle) -> Ending | None:
        self._process(handle)
        return None

    def _cancel_foreign(self, handle: ReplicaHandle, *, kill: bool) -> None:
        with contextlib.suppress(LookupError, ProcessLookupError):
            process = self._process(handle)
            if not kill:
                os.killpg(process.pid, signal.SIGTERM)
                return
            wait_until(self.clock, lambda: self._kill_replica(handle), self.clock.now() + _START_S, _POLLS)

    def _kill_replica(self, handle: ReplicaHandle) -> bool | None:
        """Kill the replica; None if its leash is yet to start it. The leash then ends what the replica has started."""
        killed = [kill(child) for child in children(self._process(handle).pid)]
        return any(killed) or None

    def _process(self, handle: ReplicaHandle) -> Process:
        """The running process of this very start. Raises LookupError if it has ended."""
        for process in self._workspace.processes():
            same = (process.slot, process.attempt, str(process.pid)) == (handle.slot, handle.attempt, handle.job)
            if same and process.boot == boot_id() and process_start(process.pid) == process.started:
                return process
        raise LookupError(handle.job)


@dataclass(kw_only=True)
class DockerExecutor(MachineExecutor):
    """Runs replicas as containers of this machine's Docker engine.

    image: a replica image, or one built on it; without `code` the command runs in its working folder. A store that is a
    folder is mounted under its own path. network: host reaches what listens on this machine's loopback.
    """

    PACKS_CODE: ClassVar[bool] = True
    SDK: ClassVar[tuple[str, str] | None] = ("docker", "docker")

    image: str
    network: Literal["bridge", "host"] = "bridge"
    gpus: bool = False

    @property
    def backend(self) -> str:
        """See RunOptions."""
        return "docker"

    def _target(self) -> TargetOptions:
        return DockerTarget(kind="docker", threads=self.threads, network=self.network, gpus=self.gpus)

    def _open_starts(self, prepared: PreparedRun) -> AnyStarts:
        options = ContainerOptions(
            run_uri=self.run,
            run=self.name,
            replicas=prepared.spec.replica_slots,
            image=self.image,
            code=prepared.code,
            environment=self.environment,
            variables=self.variables,
            inputs=self._inputs(prepared),
        )
        return ContainerStarts(options, self._workspace, self._on_end, engine_for(self.image))

    def _poll_foreign(self, handle: ReplicaHandle) -> Ending | None:
        try:
            state = Engine().containers.inspect(handle.job)["State"]
        except EngineFailed as error:
            raise LookupError(handle.job) from error
        return ending_from_exit_code(int(state["ExitCode"])) if state["Status"] in {"exited", "dead"} else None

    def _cancel_foreign(self, handle: ReplicaHandle, *, kill: bool) -> None:
        Engine().containers.signal(handle.job, "SIGKILL" if kill else "SIGTERM")
