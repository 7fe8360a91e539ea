"""Enables the Google services that a run needs. They stay enabled, because other users need them.

Source: Service Usage, "Enabling services", REST reference of services.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.handler_helpers import wait_for
from skerry.infra.provision.graph import Life, Resource
from skerry.infra.provision.handler import Observed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.handler import Desired, StateRecord

_DOMAIN: Final = ".googleapis.com"
_PAGE: Final = "200"
_ENABLED_S: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class Service(Resource):
    """An enabled service of the project. name: iam.googleapis.com. Outputs: name."""

    KIND: ClassVar[str] = "google_service"
    LIFE: ClassVar[Life] = Life.SHARED


def service(short: str, why: str) -> Service:
    """The service of this short name: iam."""
    text = f"{why}; stays enabled, because the whole project uses it"
    return Service(key=short, name=f"{short}{_DOMAIN}", region="", why=text)


def enable_request(desired: Desired) -> dict[str, Any]:
    """The body of services.batchEnable."""
    return {"serviceIds": [desired.name]}


class Services:
    """Enables services. They have no labels and no owner. See Handler."""

    def __init__(self, google: Google) -> None:
        self._google = google

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. One listing for all."""
        enabled = self.enabled()
        return [_seen(desired) if desired.name in enabled else None for desired in all_desired]

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create. Calls to the service may fail for minutes; they are repeated."""
        path = f"v1/projects/{self._google.project}/services:batchEnable"
        operation = self._google.call("serviceusage", "POST", path, body=enable_request(desired))
        self._google.finished("serviceusage", operation, f"{desired.name} is enabled", within_s=_ENABLED_S)
        self._google.enabled(desired.name.removesuffix(_DOMAIN))
        what, deadline = f"{desired.name} is enabled", self._google.clock.now() + _ENABLED_S
        wait_for(self._google.clock, what, deadline, lambda: True if desired.name in self.enabled() else None)
        return {"name": desired.name}

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. It has no settings that change."""
        del changed
        return {"name": desired.name}

    def delete(self, record: StateRecord) -> None:
        """Keeps it enabled: other users of the project need it."""

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Never a run's own."""
        del run, regions
        return ()

    def enabled(self) -> frozenset[str]:
        """The names of all enabled services."""
        path, query = f"v1/projects/{self._google.project}/services", {"filter": "state:ENABLED", "pageSize": _PAGE}
        listed = self._google.pages("serviceusage", path, "services", query=query)
        return frozenset(str(row["name"]).rpartition("/")[2] for row in listed)


def _seen(desired: Desired) -> Observed:
    return Observed(outputs={"name": desired.name}, settings={"region": ""}, owner=None)
