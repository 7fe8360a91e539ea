"""A Docker engine, as the rest of infra uses one: a few verbs over the docker SDK, with types and our errors.

The only file that imports the SDK, and only when an engine is asked for. Knows nothing of runs or of our image.
Thread-safe: every thread has a client of its own, as the SDK's are not.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# The docker SDK has no annotations; what it returns is checked where it is taken apart.

from __future__ import annotations

import contextlib
import importlib.util
import threading
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Final, cast

from skerry.runtime.errors import Invalid, Retryable, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from docker import APIClient

# A stop may take the contract's 25 s and the engine's own work; a commit of a layer of torch takes about as long.
_TIMEOUT_S: Final = 180
Line = str


class EngineFailed(SkerryError):  # noqa: N818  named for what happened, like the runtime's
    """The engine was asked for something and said no; the message is its own."""


@dataclass(frozen=True, kw_only=True)
class Bind:
    """A folder of this machine that a container sees under a path."""

    source: str
    target: str
    writable: bool = True


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A container to be made. user: None is the image's own. shm_bytes: of /dev/shm; None is the engine's 64 MB.

    leash: give it a standard input that ends when whoever holds the socket of `attach` lets go or dies.
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
class Ended:
    """How a container ended. out_of_memory: the kernel killed something in it for that."""

    exit_code: int
    out_of_memory: bool


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to build. context: a tar archive; network: "none" proves that the build needs none."""

    context: IO[bytes]
    tag: str
    arguments: Mapping[str, str]
    network: str | None = None
    target: str | None = None
    fresh: bool = False


class Engine:
    """One Docker engine: DOCKER_HOST's, or this machine's."""

    def __init__(self) -> None:
        """Raises Invalid without the docker SDK, Retryable if no engine answers."""
        if importlib.util.find_spec("docker") is None:
            raise Invalid("needs the docker SDK: pip install 'skerry[docker]'")
        connection = _Connection()
        self.version = str(connection.call(lambda client: client.version(), "version")["Version"])
        self.images = Images(connection)
        self.containers = Containers(connection)


class _Connection:
    """A client for each thread."""

    def __init__(self) -> None:
        self._clients = threading.local()

    def call(self, ask: Callable[[APIClient], Any], what: str) -> Any:
        """What the engine answers, or our error for what it said."""
        with _translated(what):
            held = getattr(self._clients, "held", None)
            if held is None:
                held = self._clients.held = _Held(_client())
            return ask(held.client)


class _Held:
    """A thread's client. Its connections end with the thread, or with the engine."""

    def __init__(self, client: APIClient) -> None:
        self.client: Final = client

    def __del__(self) -> None:
        self.client.close()


class Leash:
    """The writing end of a container's standard input. Closing it, or the end of this process, ends that input."""

    def __init__(self, taken: Any) -> None:
        # The SDK gives one of the objects that keep the connection open, and hangs the answer on it that owns them all.
        self._answer: Final = taken._response  # noqa: SLF001  there is no other way to it

    def close(self) -> None:
        """End the input."""
        self._answer.close()


class Images:
    """The images that an engine has, makes, fetches and ships."""

    def __init__(self, connection: _Connection) -> None:
        self._call = connection.call

    def build(self, recipe: Recipe, tell: Callable[[Line], None]) -> str:
        """The id of the image that was built. Raises EngineFailed with the last thing that the build said."""
        answer = self._call(
            lambda client: client.build(
                fileobj=recipe.context,
                custom_context=True,
                tag=recipe.tag,
                buildargs=dict(recipe.arguments),
                network_mode=recipe.network,
                target=recipe.target,
                nocache=recipe.fresh,
                rm=True,
                forcerm=True,
                decode=True,
                timeout=None,
            ),
            f"build {recipe.tag}",
        )
        _follow(answer, tell)
        return str(self.inspect(recipe.tag)["Id"])

    def push(self, reference: str, login: Mapping[str, str] | None, tell: Callable[[Line], None]) -> str:
        """The digest under which the registry has it. reference: repository:tag."""
        repository, _, tag = reference.rpartition(":")
        stream = self._call(
            lambda client: client.push(
                repository, tag=tag, stream=True, decode=True, auth_config=None if login is None else dict(login)
            ),
            f"push {reference}",
        )
        digest = ""
        for said in _follow_each(stream, tell):
            digest = str(said.get("aux", {}).get("Digest", "")) or digest
        if not digest:
            raise EngineFailed(f"{reference} was pushed and the registry told no digest")
        return digest

    def pull(self, reference: str, login: Mapping[str, str] | None, tell: Callable[[Line], None]) -> None:
        """Fetch an image, named by a tag or a digest."""
        stream = self._call(
            lambda client: client.pull(
                reference, stream=True, decode=True, auth_config=None if login is None else dict(login)
            ),
            f"pull {reference}",
        )
        _follow(stream, tell)

    def digest_in_registry(self, reference: str) -> str:
        """The digest that a registry has for a tag; nothing is pulled."""
        told = self._call(lambda client: client.inspect_distribution(reference), f"look up {reference}")
        return str(told["Descriptor"]["digest"])

    def inspect(self, reference: str) -> dict[str, Any]:
        """The engine's record of an image. Raises EngineFailed if it has none of that name."""
        return cast("dict[str, Any]", self._call(lambda client: client.inspect_image(reference), f"image {reference}"))

    def has(self, reference: str) -> bool:
        """Whether an image of that name or digest is here."""
        try:
            self.inspect(reference)
        except EngineFailed:
            return False
        return True

    def history(self, reference: str) -> list[dict[str, Any]]:
        """The steps that made an image, newest first."""
        return cast("list[dict[str, Any]]", self._call(lambda client: client.history(reference), f"image {reference}"))

    def load(self, archive: bytes) -> None:
        """Take an image from a `docker save` archive; layers that are here already may be missing in it."""
        _follow(self._call(lambda client: client.load_image(archive), "load an image"), lambda _: None)

    def tag(self, reference: str, new: str) -> None:
        """Give an image another name."""
        repository, _, tag = new.rpartition(":")
        self._call(lambda client: client.tag(reference, repository, tag), f"tag {new}")

    def remove(self, reference: str) -> None:
        """Take a name away, and the image with its last name. Absent is success."""
        with contextlib.suppress(EngineFailed):
            self._call(lambda client: client.remove_image(reference, noprune=True), f"remove {reference}")


class Containers:
    """The containers of an engine."""

    def __init__(self, connection: _Connection) -> None:
        self._call = connection.call

    def create(self, wanted: Wanted) -> str:
        """Make a container, not started; its id."""

        def ask(client: APIClient) -> dict[str, str]:
            gpus = [{"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}] if wanted.gpus else None
            host = client.create_host_config(
                binds={
                    one.source: {"bind": one.target, "mode": "rw" if one.writable else "ro"} for one in wanted.binds
                },
                tmpfs=dict.fromkeys(wanted.tmpfs, ""),
                network_mode=wanted.network,
                extra_hosts=dict(wanted.hosts),
                cap_drop=list(wanted.cap_drop),
                read_only=wanted.read_only,
                shm_size=wanted.shm_bytes,
                nano_cpus=None if wanted.cpus is None else int(wanted.cpus * 1e9),
                device_requests=gpus,
            )
            return client.create_container(
                wanted.image,
                command=list(wanted.command) or None,
                entrypoint=None if wanted.entrypoint is None else list(wanted.entrypoint),
                name=wanted.name,
                environment=dict(wanted.environment),
                labels=dict(wanted.labels),
                user=wanted.user,
                stdin_open=wanted.leash,
                host_config=host,
            )

        return self._call(ask, f"create a container of {wanted.image}")["Id"]

    def start(self, container: str) -> None:
        """Start it."""
        self._call(lambda client: client.start(container), f"start {container[:12]}")

    def attach(self, container: str) -> Leash:
        """Its standard input, before it is started."""
        taken = self._call(
            lambda client: client.attach_socket(container, {"stdin": 1, "stream": 1}), f"attach to {container[:12]}"
        )
        return Leash(taken)

    def signal(self, container: str, name: str) -> None:
        """Send a signal to its process 1. One that has ended, or is gone, is success."""
        with contextlib.suppress(EngineFailed):
            self._call(lambda client: client.kill(container, signal=name), f"signal {container[:12]}")

    def wait(self, container: str) -> Ended:
        """Stay until it has ended."""
        code = int(self._call(lambda client: client.wait(container, timeout=None), "wait")["StatusCode"])
        state = self.inspect(container)["State"]
        return Ended(exit_code=code, out_of_memory=bool(state.get("OOMKilled")))

    def inspect(self, container: str) -> dict[str, Any]:
        """The engine's record of a container."""
        return cast("dict[str, Any]", self._call(lambda client: client.inspect_container(container), container[:12]))

    def output(self, container: str, *, follow: bool = False) -> Iterator[bytes]:
        """What it writes to stdout and stderr, in pieces; with follow until it ends."""
        return cast(
            "Iterator[bytes]",
            self._call(lambda client: client.logs(container, stream=True, follow=follow), f"logs of {container[:12]}"),
        )

    def labelled(self, labels: Mapping[str, str]) -> list[str]:
        """Ids of the containers, running or not, that have all these labels."""
        wanted = [f"{name}={text}" for name, text in labels.items()]
        found = self._call(lambda client: client.containers(all=True, filters={"label": wanted}), "list containers")
        return [str(one["Id"]) for one in found]

    def remove(self, container: str) -> None:
        """Kill it if it runs, and remove it with its log. Absent is success."""
        with contextlib.suppress(EngineFailed):
            self._call(lambda client: client.remove_container(container, force=True, v=True), "remove")

    def run(self, wanted: Wanted) -> tuple[int, str]:
        """Run a container to its end and remove it: its exit code, and all that it wrote."""
        container = self.create(wanted)
        try:
            self.start(container)
            ended = self.wait(container)
            return ended.exit_code, b"".join(self.output(container)).decode(errors="replace")
        finally:
            self.remove(container)


def _follow(stream: Iterator[dict[str, Any]], tell: Callable[[Line], None]) -> None:
    for _ in _follow_each(stream, tell):
        pass


def _follow_each(stream: Iterator[dict[str, Any]], tell: Callable[[Line], None]) -> Iterator[dict[str, Any]]:
    """Each message of a long verb, told as lines. Raises EngineFailed for the one that is an error."""
    for said in stream:
        if "error" in said:
            raise EngineFailed(f"{str(said['error']).strip()}")
        if text := str(said.get("stream") or said.get("status") or "").strip():
            tell(f"{said['id']}: {text}" if said.get("id") else text)
        yield said


def _client() -> APIClient:
    from docker import APIClient, utils  # noqa: PLC0415  the SDK costs 0.2 s, and only those who use an engine pay

    return APIClient(version="auto", timeout=_TIMEOUT_S, **utils.kwargs_from_env())


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
            f"no Docker engine answers ({what}): {str(error).partition('(')[0].strip()}; "
            "start one, or as root run scripts/image engine"
        ) from error
