"""Long-running operations: what is begun is not yet done, and takes effect when it is.

Each look at one brings it on; `settling` says how many it takes. Nothing else may count on the effect before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skerry.infra.testing.google.refusals import absent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.testing.google.project import Asked, Project


@dataclass(kw_only=True)
class _Operation:
    name: str
    effect: Callable[[], Mapping[str, Any]]
    response_type: str
    metadata: Mapping[str, Any]
    left: int
    response: Mapping[str, Any] | None = None


class Operations:
    """All operations of a project, of whatever service."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._operations: dict[str, _Operation] = {}

    def begin(
        self,
        parent: str,
        effect: Callable[[], Mapping[str, Any]],
        *,
        response_type: str = "google.protobuf.Empty",
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Start one; it is done at once if nothing settles. parent: what its name begins with, or empty."""
        name = f"{parent}/operations/{self._project.next_number():016d}".lstrip("/")
        one = _Operation(
            name=name,
            effect=effect,
            response_type=response_type,
            metadata=metadata or {},
            left=self._project.settling(),
        )
        self._operations[name] = one
        if one.left == 0:
            one.response = one.effect()
        return self._told(one)

    def get(self, asked: Asked) -> dict[str, Any]:
        """Answer `operations.get` of any service."""
        one = self._operations.get(asked.names["name"])
        if one is None:
            raise absent(f"Operation {asked.names['name']} was not found.")
        if one.response is None:
            one.left -= 1
            if one.left <= 0:
                one.response = one.effect()
        return self._told(one)

    def clear(self) -> None:
        """Forget them all."""
        self._operations.clear()

    def _told(self, one: _Operation) -> dict[str, Any]:
        told: dict[str, Any] = {"name": one.name}
        if one.metadata:
            told["metadata"] = dict(one.metadata)
        if one.response is not None:
            told |= {
                "done": True,
                "response": {"@type": f"type.googleapis.com/{one.response_type}", **one.response},
            }
        return told
