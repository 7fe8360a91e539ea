"""Service accounts: what jobs act as.

IAM is eventually consistent: a create waits until the account can be read, which is not yet everywhere. One that is
made again under its old name is another one, with another number; what was bound to the first stays bound to nobody.
Sources: the discovery document of iam v1; IAM, "Create service accounts", "Delete and undelete service accounts".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.google import marks
from skerry.infra.clouds.google.handling import gone, name_with_room
from skerry.infra.clouds.google.session import Absent, waited
from skerry.infra.clouds.handling import VISIBLE_S, check_owner, differing, each
from skerry.infra.graph import Resource
from skerry.infra.handler import Seen
from skerry.runtime.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.graph import Json
    from skerry.infra.handler import Made, Wanted

ANY: Final = "-"
"""In the place of an account's project. What is not there is then 403, not 404 (discovery document of iam v1)."""

_LONGEST_ID: Final = 30
_TITLE_BYTES: Final = 100
_PAGE: Final = "100"
# What a project's accounts are called: those that were made in it, and those that Google makes.
_ADDRESSES: Final = (
    re.compile(r"[^@]+@([^@.]+)\.iam\.gserviceaccount\.com"),
    re.compile(r"([0-9]+)-compute@developer\.gserviceaccount\.com"),
    re.compile(r"([^@.]+)@appspot\.gserviceaccount\.com"),
)


@dataclass(frozen=True, kw_only=True)
class ServiceAccount(Resource):
    """An account that jobs act as. name: its id, or its address if it is the user's. Outputs: email, unique_id."""

    KIND: ClassVar[str] = "google_service_account"

    enabled: bool = True


def account_id(stem: str, part: str) -> str:
    """The id of a run's account: at most 30 characters. stem: of the run. part: what it is for in the run."""
    return name_with_room(f"{stem}-{part}", _LONGEST_ID)


def email_of(name: str, project: str) -> str:
    """The address of an account, which follows from its id."""
    return name if "@" in name else f"{name}@{project}.iam.gserviceaccount.com"


def project_of(email: str) -> str:
    """The project that an account is in, by its id or number; "-" if its address does not say."""
    return next((match[1] for pattern in _ADDRESSES if (match := pattern.fullmatch(email))), ANY)


def path_of(name: str, project: str) -> str:
    """Where an account is found: by its number or id, which are `project`'s, or by its address, which says whose."""
    email = email_of(name, project)
    where, whole = (project, name) if name.isdigit() else (project_of(email), email)
    return f"v1/projects/{where}/serviceAccounts/{whole}"


def create_request(wanted: Wanted) -> dict[str, Any]:
    """The body of serviceAccounts.create."""
    title = f"skerry: {wanted.resource.why or wanted.resource.address}".encode()[:_TITLE_BYTES].decode(errors="ignore")
    return {
        "accountId": wanted.name,
        "serviceAccount": {"displayName": title, "description": marks.description(wanted)},
    }


class ServiceAccounts:
    """Makes service accounts. See Handler."""

    def __init__(self, google: Google) -> None:
        self._google = google

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read."""
        return each(self._read, wanted)

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create."""
        try:
            self._call("POST", f"v1/projects/{self._google.project}/serviceAccounts", create_request(wanted))
        except Conflict:
            seen = self._seen(wanted)
            check_owner(seen, wanted, "service account", "bring another by its address, or delete it")
            return self.update(wanted, differing(wanted, seen))
        return self.update(wanted, differing(wanted, self._seen(wanted)))

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update."""
        if "enabled" in changed:
            verb = "enable" if wanted.settings["enabled"] else "disable"
            self._call("POST", f"{self._path(wanted.name)}:{verb}", {})
        return dict(self._seen(wanted).outputs)

    def delete(self, made: Made) -> None:
        """See Handler.delete. By number, so that another of its name is left."""
        name = made.outputs.get("unique_id") or email_of(made.name, self._google.project)
        gone(lambda: self._call("DELETE", self._path(name)))

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned. Accounts have no region."""
        del regions
        path, query = f"v1/projects/{self._google.project}/serviceAccounts", {"pageSize": _PAGE}
        try:
            accounts = list(self._google.pages("iam", path, "accounts", query=query))
        except Absent:
            return
        for told in accounts:
            mark = marks.of_description(told.get("description", ""))
            if mark is not None and mark.owner(run) == run:
                name = str(told["email"]).partition("@")[0]
                yield marks.found(ServiceAccount, mark, name=name, region="", outputs=_outputs(told))

    def _read(self, wanted: Wanted) -> Seen | None:
        try:
            told = self._call("GET", self._path(wanted.name))
        except Absent:
            return None
        mark = marks.of_description(told.get("description", ""))
        return Seen(
            outputs=_outputs(told),
            settings={"region": "", "enabled": not told.get("disabled", False)},
            owner=None if mark is None else mark.owner(wanted.run),
        )

    def _seen(self, wanted: Wanted) -> Seen:
        deadline = self._google.clock.now() + VISIBLE_S
        what = f"the service account {wanted.name} can be read"
        return waited(self._google.clock, what, deadline, lambda: self._read(wanted))

    def _path(self, name: str) -> str:
        return path_of(name, self._google.project)

    def _call(self, method: str, path: str, body: Mapping[str, Json] | None = None) -> dict[str, Any]:
        return self._google.call("iam", method, path, body=body)


def _outputs(told: Mapping[str, Any]) -> dict[str, str]:
    return {"email": str(told["email"]), "unique_id": str(told["uniqueId"])}
