"""Service accounts, as which jobs run.

IAM is eventually consistent: a create waits until the account can be read, which may not be everywhere yet. An account
that is created again under its old name has another number; bindings of the old account do not apply to it.
Sources: the discovery document of iam v1; IAM, "Create service accounts", "Delete and undelete service accounts".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.google import owner_labels
from skerry.infra.clouds.google.generation_names import name_with_room
from skerry.infra.clouds.google.session import delete_if_present
from skerry.infra.clouds.handler_helpers import Absent, check_owner, differing, each, wait_visible
from skerry.infra.provision.graph import Resource
from skerry.infra.provision.handler import Observed
from skerry.runtime.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.graph import Json
    from skerry.infra.provision.handler import Desired, StateRecord

ANY: Final = "-"
"""Instead of an account's project. A missing account is then 403, not 404 (discovery document of iam v1)."""

_LONGEST_ID: Final = 30
_TITLE_BYTES: Final = 100
_PAGE: Final = "100"
# The addresses of a project's accounts: those created in it, and those that Google creates.
_ADDRESSES: Final = (
    re.compile(r"[^@]+@([^@.]+)\.iam\.gserviceaccount\.com"),
    re.compile(r"([0-9]+)-compute@developer\.gserviceaccount\.com"),
    re.compile(r"([^@.]+)@appspot\.gserviceaccount\.com"),
)


@dataclass(frozen=True, kw_only=True)
class ServiceAccount(Resource):
    """A service account. name: its id; the address of a user's own one. Outputs: email, unique_id."""

    KIND: ClassVar[str] = "google_service_account"

    enabled: bool = True


def account_id(stem: str, part: str) -> str:
    """The id of a run's account: at most 30 characters. stem: of the run. part: its purpose in the run."""
    return name_with_room(f"{stem}-{part}", _LONGEST_ID)


def email_of(name: str, project: str) -> str:
    """The address of an account with this id or address."""
    return name if "@" in name else f"{name}@{project}.iam.gserviceaccount.com"


def project_of(email: str) -> str:
    """The id or number of an account's project; "-" if its address has none."""
    return next((match[1] for pattern in _ADDRESSES if (match := pattern.fullmatch(email))), ANY)


def path_of(name: str, project: str) -> str:
    """The path of an account of `project` by number or id, or of any account by its address."""
    email = email_of(name, project)
    where, whole = (project, name) if name.isdigit() else (project_of(email), email)
    return f"v1/projects/{where}/serviceAccounts/{whole}"


def create_request(desired: Desired) -> dict[str, Any]:
    """The body of serviceAccounts.create."""
    title = f"skerry: {desired.resource.why or desired.resource.address}".encode()[:_TITLE_BYTES].decode(
        errors="ignore"
    )
    return {
        "accountId": desired.name,
        "serviceAccount": {"displayName": title, "description": owner_labels.description(desired)},
    }


class ServiceAccounts:
    """Creates service accounts. See Handler."""

    def __init__(self, google: Google) -> None:
        self._google = google

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read."""
        return each(self._read, all_desired)

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        try:
            self._call("POST", f"v1/projects/{self._google.project}/serviceAccounts", create_request(desired))
        except Conflict:
            seen = self._seen(desired)
            check_owner(seen, desired, "service account", "use another by its address, or delete it")
            return self.update(desired, differing(desired, seen))
        return self.update(desired, differing(desired, self._seen(desired)))

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update."""
        if "enabled" in changed:
            verb = "enable" if desired.settings["enabled"] else "disable"
            self._call("POST", f"{self._path(desired.name)}:{verb}", {})
        return dict(self._seen(desired).outputs)

    def delete(self, record: StateRecord) -> None:
        """See Handler.delete. By number, so that another account of the same name is kept."""
        name = record.outputs.get("unique_id") or email_of(record.name, self._google.project)
        delete_if_present(lambda: self._call("DELETE", self._path(name)))

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Accounts have no region."""
        del regions
        path, query = f"v1/projects/{self._google.project}/serviceAccounts", {"pageSize": _PAGE}
        try:
            accounts = list(self._google.pages("iam", path, "accounts", query=query))
        except Absent:
            return
        for account in accounts:
            mark = owner_labels.of_description(account.get("description", ""))
            if mark is not None and mark.owner(run) == run:
                name = str(account["email"]).partition("@")[0]
                yield owner_labels.owned_record(ServiceAccount, mark, name=name, region="", outputs=_outputs(account))

    def _read(self, desired: Desired) -> Observed | None:
        try:
            account = self._call("GET", self._path(desired.name))
        except Absent:
            return None
        mark = owner_labels.of_description(account.get("description", ""))
        return Observed(
            outputs=_outputs(account),
            settings={"region": "", "enabled": not account.get("disabled", False)},
            owner=None if mark is None else mark.owner(desired.run),
        )

    def _seen(self, desired: Desired) -> Observed:
        return wait_visible(self._google.clock, f"the service account {desired.name}", lambda: self._read(desired))

    def _path(self, name: str) -> str:
        return path_of(name, self._google.project)

    def _call(self, method: str, path: str, body: Mapping[str, Json] | None = None) -> dict[str, Any]:
        return self._google.call("iam", method, path, body=body)


def _outputs(account: Mapping[str, Any]) -> dict[str, str]:
    return {"email": str(account["email"]), "unique_id": str(account["uniqueId"])}
