"""API calls of Google, named as in the discovery documents: `iam.projects.serviceAccounts.create`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.calls import Call

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Ends of method names that change nothing.
_READING: Final = (
    ".get",
    ".list",
    ".getBillingInfo",
    ".getIamPolicy",
    ".testIamPermissions",
    ".generateAccessToken",
    ".generateIdToken",
    "sts.token",
)


@dataclass(frozen=True, kw_only=True)
class GoogleCall(Call):
    """One call. operation: the method without its service. params: of the path. body: as sent."""

    query: Mapping[str, Sequence[str]] = field(default_factory=dict[str, "Sequence[str]"])
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """The method id."""
        return f"{self.service}.{self.operation}"

    @property
    def writes(self) -> bool:
        """True if such a call can change anything."""
        return not self.name.endswith(_READING)
