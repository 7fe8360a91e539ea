"""The methods that the sandboxes of both clouds share: faults, recorded calls, pushed images, closing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from skerry.infra.local.docker_engine import Engine
from skerry.runtime.errors import Invalid
from skerry.testing.calls import Calls
from skerry.testing.faults import Fault, Faults, How

if TYPE_CHECKING:
    from typing import Self


class CloudSandbox(ABC):
    """A context manager; everything created in it is gone after `close`. registry: host:port, or None.

    any_image: every image is in the cloud's registry, for amd64, as if it had been pushed; the pushed ones only if
    False. True by default with containers, because Docker has their images.
    """

    def __init__(self, *, registry: str | None, settling: int, any_image: bool) -> None:
        self.registry: Final = registry
        self.any_image = any_image
        self.settling = settling
        self.calls: Final = Calls()
        self.variables: Final[dict[str, str]] = {}
        """Added to every container's environment, for example those that lead to the other cloud's sandbox."""
        self._faults: Final = Faults()
        self._pushed: set[str] = set()
        self._is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fail(self, *, how: How, after: int = 0, on: str | None = None, times: int | None = 1) -> Fault:
        """Let a call fail: the next, or the one after `after` more. times: how many in a row; None: all further ones.

        on: count the calls of this name, "batch:SubmitJob" or Google's method id, or of a pattern, "batch:*"; without
        it, count all calls that write.
        """
        fault = Fault(how=how, after=after, on=on, times=times)
        self._faults.add(fault)
        return fault

    def heal(self) -> None:
        """Remove all faults."""
        self._faults.heal()

    def close(self) -> None:
        """Stop the sandbox: no container, thread, server or patch is left. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self._stop()
        for reference in self._pushed:
            Engine().images.remove(reference)

    @abstractmethod
    def _stop(self) -> None:
        """End jobs and servers."""

    def _push(self, image: str, path: str) -> str:
        """Push a local image to PATH of the registry and return its digest. Raises Invalid without a registry."""
        if self.registry is None:
            raise Invalid("this sandbox has no registry; start it with registry=host:port")
        engine = Engine()
        name = f"{self.registry}/{path}:published"
        engine.images.tag(image, name)
        try:
            digest = engine.images.push(name, None, lambda _: None)
        finally:
            engine.images.remove(name)
        self._pushed.add(f"{self.registry}/{path}@{digest}")
        return digest
