"""What all services of the sandbox share: the project, its time, who may do what, and a request as handlers see it."""

from __future__ import annotations

import datetime as dt
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from skerry.infra.testing.google.policies import Policies
from skerry.infra.testing.google.principals import NOBODY, Principal, Principals
from skerry.infra.testing.google.refusals import Refusal, denied

if TYPE_CHECKING:
    from skerry.infra.testing.google import cel
    from skerry.runtime.clock import Clock

# Enabled in a new project: "Services that are enabled by default" (Service Usage), with what whoever uses IAM and a
# project's number has enabled long ago.
USUAL: Final = frozenset(
    {
        "cloudresourcemanager.googleapis.com",
        "iam.googleapis.com",
        "logging.googleapis.com",
        "serviceusage.googleapis.com",
        "storage.googleapis.com",
    }
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that is good by its document. names: from its path. body: JSON, or empty."""

    method: str
    names: Mapping[str, str]
    query: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    principal: Principal = NOBODY

    def one(self, name: str) -> str | None:
        """A parameter's value; None if it is not given."""
        found = self.query.get(name)
        return found[0] if found else None

    def number(self, name: str) -> int | None:
        """A parameter that is a whole number."""
        found = self.one(name)
        return None if found is None else int(found)


Handler: TypeAlias = Callable[[Asked], Mapping[str, Any]]
"""Carries a request out, holding the project's lock, and returns the answer's body. Raises Refusal."""


class Project:
    """One project. Everything in it is read and changed under `lock`."""

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
        self.enabled: set[str] = set(USUAL)
        self.is_paid = True
        self._began = clock.now()
        self._epoch = dt.datetime.fromisoformat(clock.utc_text())
        self._numbers = itertools.count(1)

    @property
    def resource(self) -> str:
        """As policies name it."""
        return f"projects/{self.id}"

    def now(self) -> dt.datetime:
        """The project's time."""
        return self._epoch + dt.timedelta(seconds=self.clock.now() - self._began)

    def text(self, at: dt.datetime | None = None) -> str:
        """A time as the API tells it."""
        return (at or self.now()).astimezone(dt.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")

    def next_number(self) -> int:
        """1, 2, 3 and so on: never the same twice in this project."""
        return next(self._numbers)

    def is_mine(self, name: str) -> bool:
        """Whether a project is this one, by id or by number."""
        return name in {self.id, self.number, "-"}

    def may(
        self, principal: Principal, permission: str, resource: str | None = None, context: cel.Context | None = None
    ) -> bool:
        """Whether the project's policy or the resource's own allows it."""
        if principal.grants is None or permission in principal.grants:
            return True
        return any(
            self.policies.allows(principal, permission, one, context or {})
            for one in (self.resource, resource)
            if one is not None
        )

    def check(self, principal: Principal, permission: str, resource: str, context: cel.Context | None = None) -> None:
        """Raises Refusal (403; 401 for nobody) if it is not allowed."""
        if self.may(principal, permission, resource, context):
            return
        if principal == NOBODY:
            raise Refusal(
                401,
                f"Anonymous caller does not have {permission} access to {resource}.",
                reason="required",
                code_xml="AuthenticationRequired",
            )
        raise denied(permission, resource)


def paged(
    found: Sequence[Mapping[str, Any]], size: int | None, token: str | None, *, most: int = 100
) -> tuple[list[Mapping[str, Any]], str | None]:
    """One page, and the token of the next; a token is opaque to clients."""
    start = int(token.removeprefix("page-")) if token else 0
    stop = start + min(size or most, most)
    return list(found[start:stop]), f"page-{stop}" if stop < len(found) else None


def masked(value: dict[str, Any], change: Mapping[str, Any], mask: str) -> dict[str, Any]:
    """The value with the mask's fields taken from the change; a field that is not in the change is removed."""
    made = dict(value)
    for path in mask.split(","):
        first, _, rest = path.partition(".")
        name = _camel(first)
        if rest:
            made[name] = masked(made.get(name) or {}, change.get(name) or {}, rest)
        elif change.get(name) is None:
            made.pop(name, None)
        else:
            made[name] = change[name]
    return made


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
