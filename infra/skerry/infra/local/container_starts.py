"""Starts replicas as containers of the Docker engine on this machine, each with a log file per start.

Leaves no container running: a container's standard input is a connection of this process, and the entry point ends
when it is closed, however this process dies. Containers that have ended are removed by the next start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from skerry.infra.local.docker_engine import Bind, ContainerRequest, Engine, EngineFailed, Leash
from skerry.infra.local.options import DockerTarget
from skerry.infra.local.replica_env_secrets_and_data import ReplicaInputs
from skerry.infra.local.replica_starts import ReplicaStart, ReplicaStarts
from skerry.infra.run.executor import Ending, ending_from_exit_code
from skerry.runtime import contract
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.infra.local.workspace import Workspace
    from skerry.infra.run.executor import ReplicaHandle
    from skerry.infra.spec.model import ReplicaSlot

_FILE: Final = "file://"
_LABEL: Final = "dev.skerry.run"
# Read by the store's clients: passed on from the operator's environment, because it is the operator's own machine.
_PASSED_ON: Final = (
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "CLOUDSDK_AUTH_ACCESS_TOKEN",
    "CLOUDSDK_API_ENDPOINT_OVERRIDES_",
    "STORAGE_EMULATOR_HOST",
    "SSL_CERT_FILE",
)
# Data loaders pass batches through shared memory; the engine's default of 64 MB is too small for images.
_SHM_BYTES: Final = 1 << 30
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, kw_only=True)
class ContainerOptions:
    """Options of every container of a run.

    code: digest of the packed code in the run's store; None runs what is in the image. environment: the operator's;
    its variables for clouds are passed on. variables: additional ones of every replica. inputs: by slot.
    """

    run_uri: str
    run: str
    replicas: Sequence[ReplicaSlot]
    image: str
    code: str | None
    environment: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    inputs: Mapping[str, ReplicaInputs] = field(default_factory=dict[str, "ReplicaInputs"])


@dataclass(kw_only=True)
class _ContainerStart(ReplicaStart):
    """leash: the writing end of the container's standard input; closing it ends every process in the container."""

    leash: Leash


class ContainerStarts(ReplicaStarts[_ContainerStart]):
    """Replicas as containers. Processes are not tracked here: the engine finds its containers by their labels."""

    def __init__(
        self,
        options: ContainerOptions,
        workspace: Workspace,
        on_end: Callable[[ReplicaHandle, Ending], None],
        engine: Engine,
    ) -> None:
        super().__init__(options.run_uri, options.replicas, workspace, on_end)
        self._options = options
        self._engine = engine

    def launch(self, n_replicas: int, command: Sequence[str]) -> list[ReplicaHandle]:
        """See ReplicaStarts. First removes the containers that an earlier start of this run left."""
        remove_containers(self._engine, self._run_uri)
        return super().launch(n_replicas, command)

    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """Send SIGTERM or SIGKILL to process 1 of this start's container."""
        if self.poll(handle) is None:
            self._engine.containers.signal(handle.job, "SIGKILL" if kill else "SIGTERM")

    def _start(self, replica: ReplicaSlot, attempt: int) -> ReplicaHandle:
        self._workspace.log_file(replica.slot, attempt).touch()
        container = self._engine.containers.create(self._request(replica, attempt))
        try:
            leash = self._engine.containers.attach(container)
            self._engine.containers.start(container)
        except SkerryError:
            self._engine.containers.remove(container)
            raise
        handle = self._handle(replica, attempt, container)
        self._follow(_ContainerStart(handle=handle, leash=leash)).start()
        return handle

    def _request(self, replica: ReplicaSlot, attempt: int) -> ContainerRequest:
        options = self._options
        passed_on = {name: text for name, text in options.environment.items() if name.startswith(_PASSED_ON)}
        variables = {
            **({} if options.code is None else {contract.CODE: options.code}),
            contract.COMMAND: json.dumps(self._command),
            "SKERRY_LEASH": "stdin",
            # Files in a folder of this machine must belong to the operator.
            "SKERRY_RUN_AS": f"{os.getuid()}:{os.getgid()}",
            **self._variables(replica),
        }
        own = options.inputs.get(replica.slot, ReplicaInputs())
        target = replica.target if isinstance(replica.target, DockerTarget) else None
        short_digest = hashlib.sha256(options.run_uri.encode()).hexdigest()[:6]
        return ContainerRequest(
            image=options.image,
            name=_NOT_IN_NAMES.sub("-", f"skerry-{options.run}-{replica.slot}-{attempt}-{short_digest}"),
            environment=passed_on | dict(options.variables) | variables | dict(own.variables),
            labels={_LABEL: options.run_uri, "dev.skerry.slot": replica.slot},
            binds=[*_store_bind(options.run_uri), *_named_files(passed_on), *_data_binds(own.folders)],
            network="bridge" if target is None else target.network,
            shm_bytes=_SHM_BYTES,
            gpus=target is not None and target.gpus,
            leash=True,
        )

    def _wait(self, start: _ContainerStart) -> None:
        """Copy the container's output to the log file until it has ended; record how it ended."""
        container, log_file = start.handle.job, self.log_file(start.handle)
        try:
            with log_file.open("ab", buffering=0) as log:
                for piece in self._engine.containers.output(container, follow=True):
                    log.write(piece)
            ending = ending_from_exit_code(self._engine.containers.wait(container).exit_code)
        except (SkerryError, OSError) as error:  # the engine stopped, or the container was removed
            with contextlib.suppress(OSError), log_file.open("a") as log:
                log.write(f"skerry: lost the connection to the container: {error}\n")
            ending = Ending(signal=9)
        with contextlib.suppress(SkerryError):
            self._engine.containers.remove(container)
        start.leash.close()
        with self._changed:
            start.ending = ending
            self._changed.notify_all()
        self._on_end(start.handle, ending)


def remove_containers(engine: Engine, run_uri: str) -> list[str]:
    """Kill and remove the containers with this run's label, running or not, and no other; their ids.

    Raises EngineFailed, naming them, if some still exist.
    """
    removed = engine.containers.labelled({_LABEL: run_uri})
    for container in removed:
        engine.containers.remove(container)
    if left := engine.containers.labelled({_LABEL: run_uri}):
        raise EngineFailed(
            f"the engine has not removed {', '.join(name[:12] for name in left)}; `docker rm --force` them"
        )
    return removed


def engine_for(image: str) -> Engine:
    """The engine of this machine, after pulling the image if it is missing. Raises Invalid if it cannot be pulled."""
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
    """A store that is a folder is mounted under its own path, so that its URI is the same inside."""
    if not run_uri.startswith(_FILE):
        return []
    folder = unquote(run_uri.removeprefix(_FILE))
    return [Bind(source=folder, target=folder)]


def _data_binds(folders: Sequence[Path]) -> list[Bind]:
    """Data of the spec, read only and under its own path, so that its path is the same inside."""
    return [Bind(source=str(folder), target=str(folder), writable=False) for folder in sorted(set(folders))]


def _named_files(environment: Mapping[str, str]) -> list[Bind]:
    """Files that a variable names (a key file, certificates), mounted under their own path."""
    paths = sorted({text for text in environment.values() if text.startswith("/") and Path(text).is_file()})
    return [Bind(source=str(Path(text).resolve()), target=text, writable=False) for text in paths]
