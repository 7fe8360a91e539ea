"""A typed client of a Docker engine: images and containers, over the docker SDK, with skerry's errors.

The only file that imports the SDK, and only when an `Engine` is created. Independent of runs and of the replica image.
Thread-safe: every thread has its own client, because the SDK's clients are not.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# The docker SDK has no annotations.

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from skerry.runtime.errors import Invalid, Retryable, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from docker import APIClient

# A stop may take the contract's 25 s and the engine's own work; writing a layer with torch takes about as long.
_TIMEOUT_S: Final = 180
Line = str


class EngineFailed(SkerryError):  # noqa: N818  named for what happened, like the runtime's
    """The engine rejected a request; the message is its own."""


@dataclass(frozen=True, kw_only=True)
class Bind:
    """A folder of this machine mounted into a container."""

    source: str
    target: str
    writable: bool = True


@dataclass(frozen=True, kw_only=True)
class ContainerRequest:
    """A container to be created. user: None is the image's. shm_bytes: of /dev/shm; None is the engine's 64 MB.

    leash: open its standard input, which ends when the process with the socket of `attach` closes it or dies.
    """

    image: str
    name: str | None = None
    command: Sequence[str] = ()
    entrypoint: Sequence[str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    binds: Sequence[Bind] = ()
    tmpfs: Sequence[str] = ()
    network: str = "bridge"
    hosts: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str | None = None
    cap_drop: Sequence[str] = ()
    read_only: bool = False
    shm_bytes: int | None = None
    cpus: float | None = None
    gpus: bool = False
    leash: bool = False


@dataclass(frozen=True, kw_only=True)
class ContainerResult:
    """The end of a container. out_of_memory: the kernel killed a process in it for lack of memory."""

    exit_code: int
    out_of_memory: bool


class Engine:
    """One Docker engine: that of DOCKER_HOST, or this machine's."""

    def __init__(self) -> None:
        """Raises Invalid without the docker SDK, Retryable if no engine answers."""
        if importlib.util.find_spec("docker") is None:
            raise Invalid("needs the docker SDK: pip install 'skerry[docker]'")
        connection = _Connection()
        self.version = str(connection.call(lambda client: client.version(), "version")["Version"])
        self.images = Images(connection)
        self.containers = Containers(connection)


class _Connection:
    """One client per thread."""

    def __init__(self) -> None:
        self._clients = threading.local()

    def call(self, ask: Callable[[APIClient], Any], what: str) -> Any:
        """Call the engine; its errors are translated. what: the operation, for messages."""
        with _translated(what):
            client = getattr(self._clients, "client", None)
            if client is None:
                client = self._clients.client = _Client(_client())
            return ask(client.client)


class _Client:
    """A thread's client; closed with the thread, or with the engine."""

    def __init__(self, client: APIClient) -> None:
        self.client: Final = client

    def __del__(self) -> None:
        self.client.close()


class Leash:
    """The writing end of a container's standard input, which ends when this is closed or this process ends."""

    def __init__(self, socket: Any) -> None:
        # The SDK returns one of the objects that keep the connection open; the response on it owns all of them.
        self._response: Final = socket._response  # noqa: SLF001  there is no other way to it

    def close(self) -> None:
        """End the input."""
        self._response.close()


class Images:
    """The images of an engine: push, pull, inspect, tag, remove."""

    def __init__(self, connection: _Connection) -> None:
        self._call = connection.call

    def push(self, reference: str, login: Mapping[str, str] | None, on_line: Callable[[Line], None]) -> str:
        """Push an image and return its digest in the registry. reference: repository:tag."""
        repository, _, tag = reference.rpartition(":")
        stream = self._call(
            lambda client: client.push(
                repository, tag=tag, stream=True, decode=True, auth_config=None if login is None else dict(login)
            ),
            f"push {reference}",
        )
        digest = ""
        for message in _messages(stream, on_line):
            digest = str(message.get("aux", {}).get("Digest", "")) or digest
        if not digest:
            raise EngineFailed(f"{reference} was pushed but the registry returned no digest")
        return digest

    def pull(self, reference: str, login: Mapping[str, str] | None, on_line: Callable[[Line], None]) -> None:
        """Pull an image by tag or digest."""
        stream = self._call(
            lambda client: client.pull(
                reference, stream=True, decode=True, auth_config=None if login is None else dict(login)
            ),
            f"pull {reference}",
        )
        for _ in _messages(stream, on_line):
            pass

    def inspect(self, reference: str) -> dict[str, Any]:
        """The engine's record of an image. Raises EngineFailed if it does not have it."""
        return cast("dict[str, Any]", self._call(lambda client: client.inspect_image(reference), f"image {reference}"))

    def has(self, reference: str) -> bool:
        """True if the engine has an image of that name or digest."""
        try:
            self.inspect(reference)
        except EngineFailed:
            return False
        return True

    def tag(self, reference: str, new: str) -> None:
        """Add a name to an image."""
        repository, _, tag = new.rpartition(":")
        self._call(lambda client: client.tag(reference, repository, tag), f"tag {new}")

    def remove(self, reference: str) -> None:
        """Remove a name, and the image with its last name. Absent is success."""
        with contextlib.suppress(EngineFailed):
            self._call(lambda client: client.remove_image(reference, noprune=True), f"remove {reference}")


class Containers:
    """The containers of an engine."""

    def __init__(self, connection: _Connection) -> None:
        self._call = connection.call

    def create(self, request: ContainerRequest) -> str:
        """Create a container without starting it; return its id."""

        def ask(client: APIClient) -> dict[str, str]:
            gpus = [{"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}] if request.gpus else None
            host = client.create_host_config(
                binds={
                    bind.source: {"bind": bind.target, "mode": "rw" if bind.writable else "ro"}
                    for bind in request.binds
                },
                tmpfs=dict.fromkeys(request.tmpfs, ""),
                network_mode=request.network,
                extra_hosts=dict(request.hosts),
                cap_drop=list(request.cap_drop),
                read_only=request.read_only,
                shm_size=request.shm_bytes,
                nano_cpus=None if request.cpus is None else int(request.cpus * 1e9),
                device_requests=gpus,
            )
            return client.create_container(
                request.image,
                command=list(request.command) or None,
                entrypoint=None if request.entrypoint is None else list(request.entrypoint),
                name=request.name,
                environment=dict(request.environment),
                labels=dict(request.labels),
                user=request.user,
                stdin_open=request.leash,
                host_config=host,
            )

        return self._call(ask, f"create a container of {request.image}")["Id"]

    def start(self, container: str) -> None:
        """Start it."""
        self._call(lambda client: client.start(container), f"start {container[:12]}")

    def attach(self, container: str) -> Leash:
        """Open its standard input, before it is started."""
        socket = self._call(
            lambda client: client.attach_socket(container, {"stdin": 1, "stream": 1}), f"attach to {container[:12]}"
        )
        return Leash(socket)

    def signal(self, container: str, name: str) -> None:
        """Send a signal to its process 1. Ended or absent is success."""
        with contextlib.suppress(EngineFailed):
            self._call(lambda client: client.kill(container, signal=name), f"signal {container[:12]}")

    def wait(self, container: str) -> ContainerResult:
        """Wait until it has ended."""
        code = int(self._call(lambda client: client.wait(container, timeout=None), "wait")["StatusCode"])
        state = self.inspect(container)["State"]
        return ContainerResult(exit_code=code, out_of_memory=bool(state.get("OOMKilled")))

    def inspect(self, container: str) -> dict[str, Any]:
        """The engine's record of a container."""
        return cast("dict[str, Any]", self._call(lambda client: client.inspect_container(container), container[:12]))

    def output(self, container: str, *, follow: bool = False) -> Iterator[bytes]:
        """Its stdout and stderr, in pieces; with `follow` until it ends."""
        stream = self._call(
            lambda client: client.logs(container, stream=True, follow=follow), f"logs of {container[:12]}"
        )
        # The SDK's own stream stops before the end of the response, and then nothing closes the connection.
        with contextlib.closing(stream._response):  # noqa: SLF001  there is no other way to it
            yield from stream

    def labelled(self, labels: Mapping[str, str]) -> list[str]:
        """Ids of the containers, running or not, that have all these labels."""
        filters = [f"{name}={text}" for name, text in labels.items()]
        containers = self._call(
            lambda client: client.containers(all=True, filters={"label": filters}), "list containers"
        )
        return [str(container["Id"]) for container in containers]

    def remove(self, container: str) -> None:
        """Remove it with its log, killing it if it runs. Absent is success."""
        with contextlib.suppress(EngineFailed):
            self._call(lambda client: client.remove_container(container, force=True, v=True), "remove")

    def run(self, request: ContainerRequest) -> tuple[int, str]:
        """Run a container until it ends and remove it; its exit code and output."""
        container = self.create(request)
        try:
            self.start(container)
            ended = self.wait(container)
            return ended.exit_code, b"".join(self.output(container)).decode(errors="replace")
        finally:
            self.remove(container)


def _messages(stream: Iterator[dict[str, Any]], on_line: Callable[[Line], None]) -> Iterator[dict[str, Any]]:
    """The messages of a long operation, also passed to `on_line`. Raises EngineFailed for an error message."""
    for message in stream:
        if "error" in message:
            raise EngineFailed(f"{str(message['error']).strip()}")
        if text := str(message.get("stream") or message.get("status") or "").strip():
            on_line(f"{message['id']}: {text}" if message.get("id") else text)
        yield message


def _client() -> APIClient:
    from docker import APIClient, constants, utils  # noqa: PLC0415  the import costs 0.2 s
    from docker.errors import DockerException  # noqa: PLC0415  as above

    settings = utils.kwargs_from_env()
    _, is_local, path = str(settings.get("base_url", constants.DEFAULT_UNIX_SOCKET)).partition("unix://")
    if is_local:
        # The SDK does not close a socket that it cannot connect.
        with socket.socket(socket.AF_UNIX) as attempt:
            try:
                attempt.connect(path)
            except OSError as error:
                raise DockerException(f"{path}: {error.strerror}") from error
    return APIClient(version="auto", timeout=_TIMEOUT_S, **settings)


@contextlib.contextmanager
def _translated(what: str) -> Generator[None]:
    from docker.errors import APIError, DockerException  # noqa: PLC0415  as in _client
    from requests.exceptions import RequestException  # noqa: PLC0415  the SDK lets them through

    try:
        yield
    except APIError as error:
        raise EngineFailed(f"{what}: {error.explanation or error}") from error
    except (DockerException, RequestException) as error:
        raise Retryable(
            f"no Docker engine responds ({what}): {str(error).partition('(')[0].strip()}; "
            "start one, or as root run scripts/image engine"
        ) from error
