"""The services of Google that a run needs, turned on where they are off, and left on: others use them, too.

Source: Service Usage, "Enabling services", REST reference of services.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.google.session import waited
from skerry.infra.graph import Life, Resource
from skerry.infra.handler import Seen

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.handler import Made, Wanted

_DOMAIN: Final = ".googleapis.com"
_PAGE: Final = "200"
_ENABLED_S: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class Service(Resource):
    """A service of Google that the project may use. name: iam.googleapis.com. Outputs: name."""

    KIND: ClassVar[str] = "google_service"
    LIFE: ClassVar[Life] = Life.SHARED


def service(short: str, why: str) -> Service:
    """The service of this short name: iam."""
    text = f"{why}; stays on, for the whole project uses it"
    return Service(key=short, name=f"{short}{_DOMAIN}", region="", why=text)


def enable_request(wanted: Wanted) -> dict[str, Any]:
    """The body of services.batchEnable."""
    return {"serviceIds": [wanted.name]}


class Services:
    """Turns services on. They carry no marks: nobody owns them. See Handler."""

    def __init__(self, google: Google) -> None:
        self._google = google

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read. One listing for all."""
        enabled = self.enabled()
        return [_seen(one) if one.name in enabled else None for one in wanted]

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create. It may take minutes until the service knows it: calls to it are then asked again."""
        path = f"v1/projects/{self._google.project}/services:batchEnable"
        told = self._google.call("serviceusage", "POST", path, body=enable_request(wanted))
        self._google.finished("serviceusage", told, f"{wanted.name} is enabled", within_s=_ENABLED_S)
        self._google.enabled(wanted.name.removesuffix(_DOMAIN))
        what, deadline = f"{wanted.name} is enabled", self._google.clock.now() + _ENABLED_S
        waited(self._google.clock, what, deadline, lambda: True if wanted.name in self.enabled() else None)
        return {"name": wanted.name}

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. There is nothing to change."""
        del changed
        return {"name": wanted.name}

    def delete(self, made: Made) -> None:
        """Leave it on: others in the project use it."""

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """Never a run's own."""
        del run, regions
        return ()

    def enabled(self) -> frozenset[str]:
        """The names of all that are on."""
        path, query = f"v1/projects/{self._google.project}/services", {"filter": "state:ENABLED", "pageSize": _PAGE}
        listed = self._google.pages("serviceusage", path, "services", query=query)
        return frozenset(str(one["name"]).rpartition("/")[2] for one in listed)


def _seen(wanted: Wanted) -> Seen:
    return Seen(outputs={"name": wanted.name}, settings={"region": ""}, owner=None)
