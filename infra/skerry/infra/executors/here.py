"""Replicas on this machine: processes, or containers of its Docker engine.

They hang on the process that launched them and end with it, however that dies. Any other process of this machine
follows them by their handles: beside each log file stands how that start ended, written by who launched it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypeAlias

from skerry.infra.engine import Engine, EngineFailed
from skerry.infra.executor import Ending, ReplicaHandle, ending_of_code
from skerry.infra.executors.options import RunOptions
from skerry.infra.placement import DockerTarget, LocalTarget
from skerry.infra.spec import WORK_FOLDER
from skerry.infra.targets import docker, local
from skerry.infra.workspace import Workspace, boot_id, started_at
from skerry.runtime.clock import Backoff, wait_until
from skerry.runtime.errors import Conflict, Corrupt, Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta

    from skerry.infra.executors.options import Founded
    from skerry.infra.placement import Target
    from skerry.infra.workspace import Process

Starts: TypeAlias = local.LocalExecutor | docker.DockerExecutor

# What others launched is looked at; it costs a few files.
_LOOKS: Final = Backoff(first=0.05, cap=1.0)
_ABANDONED: Final = "it ended with the process that launched it"


@dataclass(kw_only=True)
class HereExecutor(RunOptions):
    """See ServerlessExecutor; besides, of those on this machine.

    work: logs go below it, into a folder of the run's. threads: CPU threads per replica; None shares the cores out.
    """

    work: Path = field(default_factory=lambda: Path(WORK_FOLDER))
    threads: int | None = None
    _guard: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)
    _mine: dict[ReplicaHandle, Starts] = field(default_factory=dict[ReplicaHandle, "Starts"], init=False, repr=False)
    _held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False, repr=False)
    _workspace: Workspace = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """See RunOptions."""
        super().__post_init__()
        self._workspace = Workspace(self.work.absolute() / self.name)

    def launch_replicas(self, n_replicas: int, entrypoint: str, entrypoint_args: Sequence[str]) -> list[ReplicaHandle]:
        """See ServerlessExecutor. Raises Conflict, too, while another process of this machine runs replicas of it."""
        spec = self.described(n_replicas, (entrypoint, *entrypoint_args), self._target())
        with self._guard:
            if live := [one.slot for one in self._mine if self.poll(one) is None]:
                raise Conflict(f"still running: {', '.join(live)}; cancel or collect them")
            self.close()
            try:
                self._held.enter_context(self._workspace.alone())
                self._workspace.end_leftovers()
                self._settle_leftovers()
                starts = self._starts(self.founded(spec, self.environment, packs=self._PACKS))
                self._held.callback(starts.close)
                handles = starts.launch_replicas(n_replicas, entrypoint, entrypoint_args)
            except BaseException:
                self._held.close()
                raise
            self._mine.update(dict.fromkeys(handles, starts))
            return handles

    def poll(self, handle: ReplicaHandle) -> Ending | None:
        """See ServerlessExecutor."""
        starts = self._mine.get(handle)
        if starts is not None:
            return starts.poll(handle)
        known = self._ended(handle)
        if known is not None:
            return known
        try:
            return self._found(handle)
        except LookupError:
            # Who launched it is about to write it down, or is gone.
            if self._workspace.holder() is not None:
                return None
            return self._ended(handle) or Ending(signal=signal.SIGKILL, why=_ABANDONED)

    def collect(self, handles: Sequence[ReplicaHandle], timeout: timedelta) -> list[Ending]:
        """See ServerlessExecutor."""
        owners = {self._mine.get(one) for one in handles}
        if len(owners) == 1 and (starts := owners.pop()) is not None:
            return starts.collect(handles, timeout)

        def ask() -> list[Ending] | None:
            found = [ending for one in handles if (ending := self.poll(one)) is not None]
            return found if len(found) == len(handles) else None

        try:
            return wait_until(self.clock, ask, self.clock.now() + timeout.total_seconds(), _LOOKS)
        except TimeoutError:
            late = ", ".join(one.slot for one in handles if self.poll(one) is None)
            raise TimeoutError(f"still running after {timeout}: {late}") from None

    def logs(self, handle: ReplicaHandle) -> Iterator[str]:
        """See ServerlessExecutor."""
        with self._log_file(handle).open(errors="replace") as log:
            for line in log:
                yield line.rstrip("\n")

    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """See ServerlessExecutor."""
        starts = self._mine.get(handle)
        if starts is not None:
            starts.cancel(handle, kill=kill)
        elif self.poll(handle) is None:
            self._signal(handle, kill=kill)

    def close(self) -> None:
        """See ServerlessExecutor. Waits until nothing of them is left."""
        with self._guard:
            self._held.close()

    _PACKS: ClassVar[bool] = False
    """Whether the code goes through the store."""

    @abstractmethod
    def _target(self) -> Target:
        """As a spec would name it."""

    @abstractmethod
    def _starts(self, founded: Founded) -> Starts:
        """What starts them."""

    @abstractmethod
    def _found(self, handle: ReplicaHandle) -> Ending | None:
        """How a start ended that somebody else launched; None while it runs. Raises LookupError if it is gone."""

    @abstractmethod
    def _signal(self, handle: ReplicaHandle, *, kill: bool) -> None:
        """Stop a start that somebody else launched."""

    def _on_end(self, handle: ReplicaHandle, ending: Ending) -> None:
        self._write(self._workspace.log_file(handle.slot, handle.attempt), handle.job, ending)

    def _settle_leftovers(self) -> None:
        """Write down what nobody could: who launched these is gone, and none of them is left. Call with the lock."""
        for files in self._workspace.logs().values():
            for log_file in files:
                if not _ending_file(log_file).exists():
                    self._write(log_file, None, Ending(signal=signal.SIGKILL, why=_ABANDONED))

    def _write(self, log_file: Path, job: str | None, ending: Ending) -> None:
        path = _ending_file(log_file)
        half = path.with_suffix(f".{os.getpid()}.partial")
        told = {"job": job, "exit_code": ending.exit_code, "signal": ending.signal, "why": ending.why}
        half.write_text(json.dumps(told))
        half.replace(path)

    def _ended(self, handle: ReplicaHandle) -> Ending | None:
        """How a start ended, if that is written down. Raises Invalid for a handle of no start."""
        path = _ending_file(self._log_file(handle))
        try:
            told = json.loads(path.read_bytes())
            if told["job"] not in {None, handle.job}:
                raise Invalid(f"no record of {handle.job} ({handle.slot}): that start was {told['job']}")
            return Ending(exit_code=told["exit_code"], signal=told["signal"], why=told["why"])
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise Corrupt(f"not an ending: {path}; remove the file") from error

    def _log_file(self, handle: ReplicaHandle) -> Path:
        path = self._workspace.log_file(handle.slot, handle.attempt)
        if not path.is_file():
            raise Invalid(f"no record of {handle.job} ({handle.slot}): there is no {path}")
        return path


def _ending_file(log_file: Path) -> Path:
    return log_file.with_suffix(".ended")


@dataclass(kw_only=True)
class LocalExecutor(HereExecutor):
    """See ServerlessExecutor. Processes, run in the folder `code`; without it, in the current one."""

    def _target(self) -> Target:
        return LocalTarget(kind="local", threads=self.threads)

    def _starts(self, founded: Founded) -> Starts:
        job = local.LocalJob(
            run_uri=self.run,
            seats=founded.spec.seats,
            folder=(self.code or Path()).absolute(),
            environment={**self.environment, **self.variables},
        )
        return local.LocalExecutor(job, self._workspace, self._on_end)

    def _found(self, handle: ReplicaHandle) -> Ending | None:
        self._process(handle)
        return None

    def _signal(self, handle: ReplicaHandle, *, kill: bool) -> None:
        with contextlib.suppress(LookupError, ProcessLookupError):
            process = self._process(handle)
            if not kill:
                os.killpg(process.pid, signal.SIGTERM)
                return
            # Its leash must live: it ends what the replica has started.
            for child in _children(process.pid):
                os.kill(child, signal.SIGKILL)

    def _process(self, handle: ReplicaHandle) -> Process:
        """The process of a start, surely that one."""
        for one in self._workspace.processes():
            same = (one.slot, one.attempt, str(one.pid)) == (handle.slot, handle.attempt, handle.job)
            if same and one.boot == boot_id() and started_at(one.pid) == one.started:
                return one
        raise LookupError(handle.job)


def _children(parent: int) -> list[int]:
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name is in parentheses and may hold anything; the second field after it is the parent.
            if int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
    return found


@dataclass(kw_only=True)
class DockerExecutor(HereExecutor):
    """See ServerlessExecutor.

    image: a replica image, or one built on it; without `code` the command runs in its working folder. A store that is a
    folder is mounted under its own path. network: host reaches what listens on this machine's loopback.
    """

    image: str
    network: Literal["bridge", "host"] = "bridge"
    gpus: bool = False

    _PACKS: ClassVar[bool] = True

    def _target(self) -> Target:
        return DockerTarget(kind="docker", threads=self.threads, network=self.network, gpus=self.gpus)

    def _starts(self, founded: Founded) -> Starts:
        job = docker.DockerJob(
            run_uri=self.run,
            run=self.name,
            seats=founded.spec.seats,
            image=self.image,
            code=founded.code,
            environment=self.environment,
            variables=self.variables,
        )
        return docker.DockerExecutor(job, self._workspace, self._on_end, docker.engine_for(self.image))

    def _found(self, handle: ReplicaHandle) -> Ending | None:
        try:
            state = Engine().containers.inspect(handle.job)["State"]
        except EngineFailed as error:
            raise LookupError(handle.job) from error
        return ending_of_code(int(state["ExitCode"])) if state["Status"] in {"exited", "dead"} else None

    def _signal(self, handle: ReplicaHandle, *, kill: bool) -> None:
        Engine().containers.signal(handle.job, "SIGKILL" if kill else "SIGTERM")
