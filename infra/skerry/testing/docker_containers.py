"""Runs a sandbox's jobs as Docker containers, with the signals, limits and reasons of AWS Batch on EC2.

A stop is SIGTERM, a grace period, SIGKILL. Memory is a hard limit. Output is passed on while the container runs.
Every container has the sandbox's label, and `close` removes all of them.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from skerry.infra.local.docker_engine import Bind, ContainerRequest, Engine, EngineFailed
from skerry.runtime.errors import Retryable
from skerry.testing.batch_retry_rules import EXITED, TIMED_OUT, AttemptEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LABEL: Final = "dev.skerry.sandbox"
"""Label of every container of a sandbox; its value is the sandbox's mark."""
HOST: Final = "host.docker.internal"
"""The name by which a container reaches the machine of the sandbox."""
NOT_STARTED: Final = "Task failed to start"
# After a container's end its last output is still in the engine's pipe; reading it takes milliseconds.
_LAST_OUTPUT_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class JobContainer:
    """One attempt's container. image: as the engine finds it. memory_bytes: None: no limit. shm_bytes: None: 64 MB.

    files: folders that the sandbox wrote for this container, mounted read only.
    """

    name: str
    image: str
    command: Sequence[str]
    environment: Mapping[str, str]
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    entrypoint: Sequence[str] | None = None
    user: str | None = None
    read_only: bool = False
    binds: Sequence[Bind] = field(default_factory=tuple[Bind, ...])
    files: Sequence[Bind] = field(default_factory=tuple[Bind, ...])


class JobContainers:
    """The containers of one sandbox. Thread-safe: each attempt waits in its own thread; others stop it."""

    def __init__(self, engine: Engine, *, mark: str, network: str, grace_s: float) -> None:
        self._engine = engine
        self._mark = mark
        self._network = network
        self._grace_s = grace_s
        self._kills: dict[str, threading.Timer] = {}

    def run(
        self,
        container: JobContainer,
        *,
        started: Callable[[str], None],
        line: Callable[[str], None],
        limit_s: float | None,
    ) -> AttemptEnd:
        """Run a container to its end. started: called with its id. line: called per output line, in another thread."""
        try:
            container_id = self._create(container)
        except (EngineFailed, Retryable) as error:
            return AttemptEnd(exit_code=None, reason=f"CannotPullContainerError: {error}", status_reason=NOT_STARTED)
        timed_out = threading.Event()

        def stop_late() -> None:
            timed_out.set()
            self.stop(container_id)

        limit = None if limit_s is None else threading.Timer(limit_s, stop_late)
        try:
            self._engine.containers.start(container_id)
            started(container_id)
            reader = threading.Thread(target=self._read, args=(container_id, line), daemon=True)
            reader.start()
            if limit is not None:
                limit.start()
            result = self._engine.containers.wait(container_id)
            reader.join(_LAST_OUTPUT_S)
        except (EngineFailed, Retryable) as error:
            return AttemptEnd(exit_code=None, reason=f"CannotStartContainerError: {error}", status_reason=NOT_STARTED)
        finally:
            if limit is not None:
                limit.cancel()
            self._forget(container_id)
        reason = "OutOfMemoryError: Container killed due to memory usage" if result.out_of_memory else ""
        status_reason = TIMED_OUT if timed_out.is_set() else EXITED
        return AttemptEnd(
            exit_code=result.exit_code, reason=reason, status_reason=status_reason, final=timed_out.is_set()
        )

    def stop(self, container_id: str) -> None:
        """Send SIGTERM now and SIGKILL after the grace period. Does nothing to a container that has ended."""
        if container_id not in self._kills:
            kill = threading.Timer(self._grace_s, self.kill, [container_id])
            kill.daemon = True
            self._kills[container_id] = kill
            kill.start()
            self._engine.containers.signal(container_id, "SIGTERM")

    def kill(self, container_id: str) -> None:
        """Send SIGKILL. Does nothing to a container that has ended."""
        self._engine.containers.signal(container_id, "SIGKILL")

    def close(self) -> None:
        """Remove all remaining containers, running or not."""
        for container_id in self._engine.containers.labelled({LABEL: self._mark}):
            self._forget(container_id)

    def _create(self, container: JobContainer) -> str:
        if not self._engine.images.has(container.image):
            self._engine.images.pull(container.image, None, lambda _: None)
        container_id = self._engine.containers.create(
            ContainerRequest(
                image=container.image,
                name=container.name,
                command=container.command,
                entrypoint=container.entrypoint,
                environment=container.environment,
                labels={LABEL: self._mark},
                binds=(*container.binds, *container.files),
                network=self._network,
                hosts={HOST: "host-gateway"} if self._network == "bridge" else {},
                user=container.user,
                read_only=container.read_only,
                shm_bytes=container.shm_bytes,
            )
        )
        if container.memory_bytes is not None:
            _limit_memory(container_id, container.memory_bytes)
        return container_id

    def _read(self, container_id: str, line: Callable[[str], None]) -> None:
        rest = b""
        with contextlib.suppress(EngineFailed, Retryable):  # removed during the read
            for piece in self._engine.containers.output(container_id, follow=True):
                *lines, rest = (rest + piece).split(b"\n")
                for text in lines:
                    line(text.decode(errors="replace"))
        if rest:
            line(rest.decode(errors="replace"))

    def _forget(self, container_id: str) -> None:
        kill = self._kills.pop(container_id, None)
        if kill is not None:
            kill.cancel()
        self._engine.containers.remove(container_id)


def _limit_memory(container_id: str, size_bytes: int) -> None:
    import docker  # noqa: PLC0415  as in docker_engine: loaded only with an engine

    client = docker.APIClient(**docker.utils.kwargs_from_env())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType, reportAttributeAccessIssue, reportUnknownVariableType]
    with contextlib.closing(client):  # pyright: ignore[reportUnknownArgumentType]
        client.update_container(container_id, mem_limit=size_bytes, memswap_limit=size_bytes)  # pyright: ignore[reportUnknownMemberType]
