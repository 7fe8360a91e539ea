"""Values that every job container of a sandbox shares: endpoint, registry, variables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.testing.job_runner import StartRefused

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class JobDefaults:
    """mark: the sandbox's id in container names. endpoint: as a container reaches it. registry: plays the cloud's.

    variables: added to every container's environment, for example those that lead to the other cloud's sandbox.
    """

    mark: str
    endpoint: str
    registry: str | None
    variables: Mapping[str, str] = field(default_factory=dict[str, str])

    def local_image(self, image: str, cloud_registry: re.Pattern[str], error: str) -> str:
        """The reference under which the engine finds an image. cloud_registry: group 1 is the path in the registry.

        error: the cloud's prefix for a failed pull. Raises StartRefused if the image needs a registry that is absent.
        """
        match = cloud_registry.fullmatch(image)
        if match is None:
            return image
        if self.registry is None:
            raise StartRefused(f"{error}: {image} needs a registry; start the sandbox with registry=host:port")
        return f"{self.registry}{match[1]}"
