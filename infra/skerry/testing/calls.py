"""Records API calls for tests: service, operation, parameters, caller and status."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Operations whose names begin so change nothing.
_READING: Final = (
    "AssumeRole",
    "BatchCheck",
    "BatchGet",
    "Describe",
    "Download",
    "Filter",
    "Get",
    "Head",
    "List",
    "Lookup",
    "Search",
    "Select",
    "Simulate",
    "Validate",
)
# Callers that are jobs: roles of AWS, service accounts and federated identities of Google.
_JOBS: Final = ("role/", "serviceAccount:", "principal:")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One API call. status: of the response; None until there is a response."""

    service: str
    operation: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    caller: str = "anonymous"
    status: int | None = None

    @property
    def name(self) -> str:
        """The name in faults and policies, such as batch:SubmitJob."""
        return f"{self.service}:{self.operation}"

    @property
    def writes(self) -> bool:
        """True if such a call can change anything."""
        return not self.operation.startswith(_READING)


class Calls:
    """All calls since the start or the last reset, in order of arrival. Thread-safe."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Call]:
        with self._lock:
            return iter(tuple(self._calls))

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def names(self) -> list[str]:
        """The names, such as batch:SubmitJob, in order."""
        return [call.name for call in self]

    @property
    def writes(self) -> list[Call]:
        """The calls that may have changed something, without those of jobs, which write continuously."""
        return [call for call in self if call.writes and not call.caller.startswith(_JOBS)]

    def clear(self) -> None:
        """Forget all calls; a test does so between its steps."""
        with self._lock:
            self._calls.clear()

    def add(self, call: Call) -> int:
        """Record a call before it is executed; the returned number is for `answered`."""
        with self._lock:
            self._calls.append(call)
            return len(self._calls) - 1

    def answered(self, number: int, call: Call, status: int) -> None:
        """Record the status of the response. Does nothing if the calls were cleared meanwhile."""
        with self._lock:
            if number < len(self._calls) and self._calls[number] is call:
                self._calls[number] = replace(call, status=status)
