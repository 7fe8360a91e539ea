"""Adapts a grpclib server to a played cloud: every call goes to one function, and its connections can be closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def service_of(base: Any, handle: Callable[..., Any]) -> Any:
    """An implementation of a service of which every call goes to `handle`, with its name."""

    def method(name: str) -> Any:
        async def call(self: Any, stream: Any) -> None:
            del self
            await handle(name, stream)

        return call

    names = list(base.__abstractmethods__)
    return type("Played", (base,), {name: method(name) for name in names})()


def transports_of(server: Any) -> list[Any]:
    """The connections of a server, in a list that grows; grpclib closes none of them."""
    transports: list[Any] = []
    make: Callable[[], Any] = server._protocol_factory  # noqa: SLF001  see above

    def protocol_factory() -> Any:
        protocol = make()
        connected = protocol.connection_made

        def connection_made(transport: Any) -> None:
            transports.append(transport)
            connected(transport)

        protocol.connection_made = connection_made
        return protocol

    server._protocol_factory = protocol_factory  # noqa: SLF001
    return transports
