"""API calls of the sandbox as a test wants to see them, and which of them fail on demand.

Methods are named as the discovery documents name them: `iam.projects.serviceAccounts.create`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.testing.calls import Call, Calls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The last words of methods that change nothing although they are a POST.
_READING: Final = (
    ".get",
    ".list",
    ".getIamPolicy",
    ".testIamPermissions",
    ".generateAccessToken",
    ".generateIdToken",
    "sts.token",
)
_CONTAINERS: Final = ("serviceAccount:", "principal:")


@dataclass(frozen=True, kw_only=True)
class GoogleCall(Call):
    """One call. operation: the method without its service. params: of the path and the query. body: as it was sent."""

    query: Mapping[str, Sequence[str]] = field(default_factory=dict[str, "Sequence[str]"])
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """The method's id."""
        return f"{self.service}.{self.operation}"

    @property
    def writes(self) -> bool:
        """Whether such a call can change anything."""
        return not self.name.endswith(_READING)


class GoogleCalls(Calls):
    """All calls since the start or the last reset, in the order in which they came. Thread-safe."""

    @property
    def writes(self) -> list[Call]:
        """Those that can have changed something; without those of jobs, which write all the time."""
        return [call for call in self if call.writes and not call.caller.startswith(_CONTAINERS)]
