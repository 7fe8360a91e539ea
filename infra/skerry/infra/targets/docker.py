"""Replicas as containers of the Docker engine on this machine, each with a log file per start.

Leaves nothing running: a container's standard input is a connection of this process's, and the entry point ends with
it, however this process dies. What is left then are containers that have ended; the next start removes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from skerry.infra.engine import Bind, Engine, EngineFailed, Leash, Wanted
from skerry.infra.executor import Ending, ReplicaHandle, ending_of_code
from skerry.infra.targets.starts import Start, Starts
from skerry.runtime import contract
from skerry.runtime.contract import Contract
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.infra.spec import Seat
    from skerry.infra.workspace import Workspace

_FILE: Final = "file://"
_LABEL: Final = "dev.skerry.run"
# What a store's clients read: handed on from the operator's environment, since it is the operator's own machine.
_HANDED_ON: Final = (
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "CLOUDSDK_AUTH_ACCESS_TOKEN",
    "CLOUDSDK_API_ENDPOINT_OVERRIDES_",
    "STORAGE_EMULATOR_HOST",
    "SSL_CERT_FILE",
)
# Data loaders pass batches through it; the engine's own 64 MB are too few for images.
_SHM_BYTES: Final = 1 << 30
_NAMELESS: Final = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, kw_only=True)
class DockerJob:
    """What every replica of a run is started with.

    code: digest of the packed code in the run's store; None runs what is in the image. environment: of the operator,
    whose variables for clouds are handed on. variables: given to every replica besides.
    """

    run_uri: str
    run: str
    seats: Sequence[Seat]
    image: str
    code: str | None
    environment: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(kw_only=True)
class _Running(Start):
    """hold: the writing end of the container's standard input; closing it ends everything in it."""

    hold: Leash


class DockerExecutor(Starts[_Running]):
    """A ServerlessExecutor on a Docker engine."""

    untracked: str | None = None
    """Nothing is tracked here: the engine knows its containers by their labels."""

    def __init__(
        self, job: DockerJob, workspace: Workspace, on_end: Callable[[ReplicaHandle, Ending], None], engine: Engine
    ) -> None:
        super().__init__(job.seats, workspace, on_end)
        self._job = job
        self._engine = engine
        self._command: tuple[str, ...] = ()

    def launch_replicas(self, n_replicas: int, entrypoint: str, entrypoint_args: Sequence[str]) -> list[ReplicaHandle]:
        """Start the first `n_replicas` seats, after removing what an earlier executor of this run left."""
        self._check_count(n_replicas)
        remove_containers(self._engine, self._job.run_uri)
        self._command = (entrypoint, *entrypoint_args)
        return self._start_first(n_replicas)

    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """SIGTERM, or SIGKILL, to process 1 of this start's container."""
        if self.poll(handle) is None:
            self._engine.containers.signal(handle.job, "SIGKILL" if kill else "SIGTERM")

    def _start(self, seat: Seat, attempt: int) -> ReplicaHandle:
        log_file = self._workspace.log_file(seat.slot, attempt)
        log_file.touch()
        container = self._engine.containers.create(self._wanted(seat, attempt))
        try:
            hold = self._engine.containers.attach(container)
            self._engine.containers.start(container)
        except SkerryError:
            self._engine.containers.remove(container)
            raise
        handle = ReplicaHandle(slot=seat.slot, index=seat.index, attempt=attempt, job=container)
        one = _Running(handle=handle, hold=hold)
        waiter = threading.Thread(target=self._wait, args=(one, log_file), name=f"wait-{seat.slot}", daemon=True)
        with self._changed:
            self._all[handle] = one
            self._waiters.append(waiter)
        waiter.start()
        return handle

    def _wanted(self, seat: Seat, attempt: int) -> Wanted:
        place = Contract(
            run_uri=self._job.run_uri, slot=seat.slot, index=seat.index, replicas=len(self._seats)
        ).environment()
        cores = len(os.sched_getaffinity(0))
        threads = seat.threads or max(1, cores // len(self._seats))
        handed = {name: text for name, text in self._job.environment.items() if name.startswith(_HANDED_ON)}
        told = {
            **({} if self._job.code is None else {contract.CODE: self._job.code}),
            contract.COMMAND: json.dumps(self._command),
            "SKERRY_LEASH": "stdin",
            # Files in a folder of this machine must stay the operator's.
            "SKERRY_RUN_AS": f"{os.getuid()}:{os.getgid()}",
            "OMP_NUM_THREADS": str(threads),
        }
        target = seat.target
        docker = target if target.kind == "docker" else None
        short = hashlib.sha256(self._job.run_uri.encode()).hexdigest()[:6]
        return Wanted(
            image=self._job.image,
            name=_NAMELESS.sub("-", f"skerry-{self._job.run}-{seat.slot}-{attempt}-{short}"),
            environment=handed | dict(self._job.variables) | told | place,
            labels={_LABEL: self._job.run_uri, "dev.skerry.slot": seat.slot},
            binds=[*_store_bind(self._job.run_uri), *_named_files(handed)],
            network="bridge" if docker is None else docker.network,
            shm_bytes=_SHM_BYTES,
            gpus=docker is not None and docker.gpus,
            leash=True,
        )

    def _wait(self, one: _Running, log_file: Path) -> None:
        """Write down what the container says until it has ended, and how it ended."""
        container = one.handle.job
        try:
            with log_file.open("ab", buffering=0) as log:
                for piece in self._engine.containers.output(container, follow=True):
                    log.write(piece)
            ended = self._engine.containers.wait(container)
            ending = ending_of_code(ended.exit_code)
        except (SkerryError, OSError) as error:  # the engine is gone, or somebody has removed the container
            with contextlib.suppress(OSError):
                log_file.open("a").write(f"skerry: lost sight of the container: {error}\n")
            ending = Ending(signal=9)
        with contextlib.suppress(SkerryError):
            self._engine.containers.remove(container)
        one.hold.close()
        with self._changed:
            one.ending = ending
            self._changed.notify_all()
        self._on_end(one.handle, ending)


def remove_containers(engine: Engine, run_uri: str) -> list[str]:
    """Kill and remove what there is of this run, running or not, by its label; their ids. Others' are not touched.

    Raises EngineFailed, naming them, if some are still there.
    """
    found = engine.containers.labelled({_LABEL: run_uri})
    for container in found:
        engine.containers.remove(container)
    if left := engine.containers.labelled({_LABEL: run_uri}):
        raise EngineFailed(
            f"the engine has not removed {', '.join(one[:12] for one in left)}; `docker rm --force` them"
        )
    return found


def engine_for(image: str) -> Engine:
    """The engine, once it is known to have the image. Raises Invalid, with what to do, if it has not."""
    engine = Engine()
    if engine.images.has(image):
        return engine
    try:
        engine.images.pull(image, None, lambda _: None)
    except EngineFailed as error:
        raise Invalid(
            f"no image {image} on this machine, and it cannot be pulled ({error}); "
            "build it with `scripts/image build --variant cpu`"
        ) from error
    return engine


def _store_bind(run_uri: str) -> list[Bind]:
    """A store that is a folder is seen under its own path, so that its URI is the same inside."""
    if not run_uri.startswith(_FILE):
        return []
    folder = unquote(run_uri.removeprefix(_FILE))
    return [Bind(source=folder, target=folder)]


def _named_files(environment: Mapping[str, str]) -> list[Bind]:
    """Files that a variable names (a key file, certificates), under their own path."""
    paths = sorted({text for text in environment.values() if text.startswith("/") and Path(text).is_file()})
    return [Bind(source=str(Path(text).resolve()), target=text, writable=False) for text in paths]
