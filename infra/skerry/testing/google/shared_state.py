"""State that all services of the sandbox share: the project, its clock, permissions, and the parsed request."""

from __future__ import annotations

import datetime as dt
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from skerry.testing.google.access_tokens import ANONYMOUS, Principal, Principals
from skerry.testing.google.iam_policies import Policies
from skerry.testing.google.protobuf_enums import camel
from skerry.testing.google.refusals import Refusal, denied

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock
    from skerry.testing.google import cel

# Enabled in a new project: "Services that are enabled by default" (Service Usage), plus IAM and Resource Manager.
DEFAULT_SERVICES: Final = frozenset(
    {
        "cloudresourcemanager.googleapis.com",
        "iam.googleapis.com",
        "logging.googleapis.com",
        "serviceusage.googleapis.com",
        "storage.googleapis.com",
    }
)


@dataclass(frozen=True, kw_only=True)
class SandboxRequest:
    """A request that passed the checks of its document. names: from its path. body: JSON, or empty."""

    method: str
    names: Mapping[str, str]
    query: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    principal: Principal = ANONYMOUS

    def parameter(self, name: str) -> str | None:
        """Return a query parameter; None if it is not given."""
        values = self.query.get(name)
        return values[0] if values else None

    def int_parameter(self, name: str) -> int | None:
        """Return a query parameter that is a whole number."""
        text = self.parameter(name)
        return None if text is None else int(text)


Handler: TypeAlias = Callable[[SandboxRequest], Mapping[str, Any]]
"""Handles a request while the project's lock is held and returns the response body. Raises Refusal."""


class Project:
    """One project. All access is under `lock`."""

    def __init__(self, project: str, number: str, clock: Clock, settling: Callable[[], int]) -> None:
        self.id: Final = project
        self.number: Final = number
        self.clock: Final = clock
        self.lock: Final = threading.RLock()
        self.changed: Final = threading.Condition(self.lock)
        self.settling: Final = settling
        self.principals: Final = Principals(clock)
        self.account_exists: Callable[[str], bool] = lambda _: False
        self.policies: Final = Policies(self, settling)
        self.enabled: set[str] = set(DEFAULT_SERVICES)
        self.is_paid = True
        self._started = clock.now()
        self._epoch = dt.datetime.fromisoformat(clock.utc_text())
        self._numbers = itertools.count(1)

    @property
    def resource(self) -> str:
        """The project's name in policies."""
        return f"projects/{self.id}"

    def now(self) -> dt.datetime:
        """Return the project's time."""
        return self._epoch + dt.timedelta(seconds=self.clock.now() - self._started)

    def text(self, at: dt.datetime | None = None) -> str:
        """Format a time as the API does; None is now."""
        return (at or self.now()).astimezone(dt.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")

    def next_number(self) -> int:
        """Return 1, 2, 3 and so on."""
        return next(self._numbers)

    def is_mine(self, name: str) -> bool:
        """Return True if a project id or number is this project's."""
        return name in {self.id, self.number, "-"}

    def may(
        self, principal: Principal, permission: str, resource: str | None = None, context: cel.Context | None = None
    ) -> bool:
        """Return True if the project's policy or the resource's own allows it."""
        if principal.grants is None or permission in principal.grants:
            return True
        return any(
            self.policies.allows(principal, permission, name, context or {})
            for name in (self.resource, resource)
            if name is not None
        )

    def permitted(self, request: SandboxRequest, resource: str | None = None) -> dict[str, Any]:
        """Answer testIamPermissions: those permissions of the request that its principal has."""
        allowed = [
            permission
            for permission in request.body.get("permissions", ())
            if self.may(request.principal, permission, resource)
        ]
        return {"permissions": allowed} if allowed else {}

    def check(self, principal: Principal, permission: str, resource: str, context: cel.Context | None = None) -> None:
        """Raise Refusal (403; 401 without a token) if it is not allowed."""
        if self.may(principal, permission, resource, context):
            return
        if principal == ANONYMOUS:
            raise Refusal(
                401,
                f"Anonymous caller does not have {permission} access to {resource}.",
                reason="required",
                code_xml="AuthenticationRequired",
            )
        raise denied(permission, resource)


def page_of(
    request: SandboxRequest,
    field: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    default: int | None = None,
    most: int = 100,
    size_parameter: str = "pageSize",
) -> dict[str, Any]:
    """Return one page of a list response: `field`, and nextPageToken, each only if not empty.

    default: rows per page if the request has no size; None is `most`.
    """
    token = request.parameter("pageToken")
    start = int(token.removeprefix("page-")) if token else 0
    stop = start + min(request.int_parameter(size_parameter) or default or most, most)
    page = list(rows[start:stop])
    return {**({field: page} if page else {}), **({"nextPageToken": f"page-{stop}"} if stop < len(rows) else {})}


def masked(value: dict[str, Any], change: Mapping[str, Any], mask: str) -> dict[str, Any]:
    """Return the value with the mask's fields from the change; fields absent from the change are removed."""
    result = dict(value)
    for path in mask.split(","):
        first, _, rest = path.partition(".")
        name = camel(first)
        if rest:
            result[name] = masked(result.get(name) or {}, change.get(name) or {}, rest)
        elif change.get(name) is None:
            result.pop(name, None)
        else:
            result[name] = change[name]
    return result
