"""Long-running operations of all services: they take effect when they are done, after `settling` lookups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skerry.testing.google.refusals import absent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.testing.google.shared_state import Project, SandboxRequest


@dataclass(kw_only=True)
class _Operation:
    name: str
    effect: Callable[[], Mapping[str, Any]]
    response_type: str
    metadata: Mapping[str, Any]
    remaining: int
    response: Mapping[str, Any] | None = None


class Operations:
    """All operations of a project, of any service."""

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
        """Start an operation; with settling=0 it is done at once. parent: beginning of its name, or empty."""
        name = f"{parent}/operations/{self._project.next_number():016d}".lstrip("/")
        operation = _Operation(
            name=name,
            effect=effect,
            response_type=response_type,
            metadata=metadata or {},
            remaining=self._project.settling(),
        )
        self._operations[name] = operation
        if operation.remaining == 0:
            operation.response = operation.effect()
        return self._description(operation)

    def get(self, request: SandboxRequest) -> dict[str, Any]:
        """Handle `operations.get` of any service."""
        operation = self._operations.get(request.names["name"])
        if operation is None:
            raise absent(f"Operation {request.names['name']} was not found.")
        if operation.response is None:
            operation.remaining -= 1
            if operation.remaining <= 0:
                operation.response = operation.effect()
        return self._description(operation)

    def clear(self) -> None:
        """Delete all operations."""
        self._operations.clear()

    def _description(self, operation: _Operation) -> dict[str, Any]:
        description: dict[str, Any] = {"name": operation.name}
        if operation.metadata:
            description["metadata"] = dict(operation.metadata)
        if operation.response is not None:
            description |= {
                "done": True,
                "response": {"@type": f"type.googleapis.com/{operation.response_type}", **operation.response},
            }
        return description
