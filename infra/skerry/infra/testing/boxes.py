"""Containers in which jobs of the sandbox run, with the signals, limits and reasons of AWS Batch on EC2.

A stop is SIGTERM, half a minute, SIGKILL. Memory is a hard limit. What is written is handed on while it is written.
Every container carries the sandbox's label, and none outlives the sandbox.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from skerry.infra.engine import Bind, Engine, EngineFailed, Wanted
from skerry.infra.testing.retries import EXITED, TIMED_OUT, End
from skerry.runtime.errors import Retryable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LABEL: Final = "dev.skerry.sandbox"
"""On every container of a sandbox; its value is the sandbox's own."""
HOST: Final = "host.docker.internal"
"""What a container calls the machine on which the sandbox runs."""
NOT_STARTED: Final = "Task failed to start"
# Output that comes after a container's end is still in the engine's pipe; it is read in milliseconds.
_LAST_WORDS_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Box:
    """One attempt's container. image: as the engine can find it. memory_bytes, shm_bytes: None is no limit, 64 MB."""

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


class Boxes:
    """The containers of one sandbox. Thread-safe: an attempt waits in its own thread, stops come from others."""

    def __init__(self, engine: Engine, *, mark: str, network: str, grace_s: float) -> None:
        self._engine = engine
        self._mark = mark
        self._network = network
        self._grace_s = grace_s
        self._kills: dict[str, threading.Timer] = {}

    def run(
        self, box: Box, *, started: Callable[[str], None], line: Callable[[str], None], limit_s: float | None
    ) -> End:
        """Run a container to its end. started: told its id. line: told each line it writes, from another thread."""
        try:
            container = self._create(box)
        except (EngineFailed, Retryable) as error:
            return End(exit_code=None, reason=f"CannotPullContainerError: {error}", status_reason=NOT_STARTED)
        late = threading.Event()

        def out_of_time() -> None:
            late.set()
            self.stop(container)

        limit = None if limit_s is None else threading.Timer(limit_s, out_of_time)
        try:
            self._engine.containers.start(container)
            started(container)
            reader = threading.Thread(target=self._read, args=(container, line), daemon=True)
            reader.start()
            if limit is not None:
                limit.start()
            ended = self._engine.containers.wait(container)
            reader.join(_LAST_WORDS_S)
        except (EngineFailed, Retryable) as error:
            return End(exit_code=None, reason=f"CannotStartContainerError: {error}", status_reason=NOT_STARTED)
        finally:
            if limit is not None:
                limit.cancel()
            self._forget(container)
        reason = "OutOfMemoryError: Container killed due to memory usage" if ended.out_of_memory else ""
        status_reason = TIMED_OUT if late.is_set() else EXITED
        return End(exit_code=ended.exit_code, reason=reason, status_reason=status_reason, final=late.is_set())

    def stop(self, container: str) -> None:
        """SIGTERM now, SIGKILL when the grace is over. One that has ended is success."""
        if container not in self._kills:
            kill = threading.Timer(self._grace_s, self.kill, [container])
            kill.daemon = True
            self._kills[container] = kill
            kill.start()
            self._engine.containers.signal(container, "SIGTERM")

    def kill(self, container: str) -> None:
        """SIGKILL. One that has ended is success."""
        self._engine.containers.signal(container, "SIGKILL")

    def close(self) -> None:
        """Remove whatever is left, running or not."""
        for container in self._engine.containers.labelled({LABEL: self._mark}):
            self._forget(container)

    def _create(self, box: Box) -> str:
        if not self._engine.images.has(box.image):
            self._engine.images.pull(box.image, None, lambda _: None)
        container = self._engine.containers.create(
            Wanted(
                image=box.image,
                name=box.name,
                command=box.command,
                entrypoint=box.entrypoint,
                environment=box.environment,
                labels={LABEL: self._mark},
                binds=box.binds,
                network=self._network,
                hosts={HOST: "host-gateway"} if self._network == "bridge" else {},
                user=box.user,
                read_only=box.read_only,
                shm_bytes=box.shm_bytes,
            )
        )
        if box.memory_bytes is not None:
            _limit_memory(container, box.memory_bytes)
        return container

    def _read(self, container: str, line: Callable[[str], None]) -> None:
        rest = b""
        with contextlib.suppress(EngineFailed, Retryable):  # it was removed while it was read
            for piece in self._engine.containers.output(container, follow=True):
                *whole, rest = (rest + piece).split(b"\n")
                for one in whole:
                    line(one.decode(errors="replace"))
        if rest:
            line(rest.decode(errors="replace"))

    def _forget(self, container: str) -> None:
        kill = self._kills.pop(container, None)
        if kill is not None:
            kill.cancel()
        self._engine.containers.remove(container)


def _limit_memory(container: str, size_bytes: int) -> None:
    import docker  # noqa: PLC0415  as in engine: only those who use an engine pay for the SDK

    client = docker.APIClient(**docker.utils.kwargs_from_env())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType, reportAttributeAccessIssue, reportUnknownVariableType]
    with contextlib.closing(client):  # pyright: ignore[reportUnknownArgumentType]
        client.update_container(container, mem_limit=size_bytes, memswap_limit=size_bytes)  # pyright: ignore[reportUnknownMemberType]
