"""Service accounts: made, found by address or number, policies of their own, and short-lived credentials.

One that is made again under an old name has another number, and none of the bindings of the first. A new one is not
known everywhere at once. Source: IAM, "Create service accounts", "Delete and undelete service accounts".
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.testing.google.principals import TOKEN_S, Principal
from skerry.infra.testing.google.project import masked, paged
from skerry.infra.testing.google.refusals import Refusal, absent, denied, invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.testing.google.project import Asked, Handler, Project

_ID: Final = re.compile(r"[a-z]([-a-z0-9]{4,28}[a-z0-9])")
_QUOTA: Final = 100
_PREFIX: Final = "iam.projects.serviceAccounts"
_CREDENTIALS: Final = "iamcredentials.projects.serviceAccounts"


@dataclass(kw_only=True)
class Account:
    """One account. unseen: how many requests do not find it yet."""

    told: dict[str, Any]
    unseen: int

    @property
    def email(self) -> str:
        """Its address."""
        return self.told["email"]

    @property
    def number(self) -> str:
        """Its unique id, which no other account ever has."""
        return self.told["uniqueId"]


class Accounts:
    """The service accounts of a project."""

    def __init__(self, project: Project, identity_token: Callable[[Account, str, bool], str]) -> None:
        """identity_token: signs one for an account, an audience, with or without its address."""
        self._project = project
        self._identity_token = identity_token
        self._accounts: dict[str, Account] = {}
        self._deleted: dict[str, Account] = {}
        project.account_exists = lambda email: self.find(email) is not None

    def handlers(self) -> dict[str, Handler]:
        """By method."""
        return {
            f"{_PREFIX}.create": self._create,
            f"{_PREFIX}.get": lambda asked: self._seen(asked.names["name"]).told,
            f"{_PREFIX}.list": self._list,
            f"{_PREFIX}.patch": self._patch,
            f"{_PREFIX}.delete": self._delete,
            f"{_PREFIX}.undelete": self._undelete,
            f"{_PREFIX}.getIamPolicy": self._get_policy,
            f"{_PREFIX}.setIamPolicy": self._set_policy,
            f"{_PREFIX}.testIamPermissions": self._test,
            f"{_CREDENTIALS}.generateAccessToken": self._access_token,
            f"{_CREDENTIALS}.generateIdToken": self._id_token,
        }

    def find(self, name: str) -> Account | None:
        """By address or number; None if there is none, or if it is too new. Counts as a look."""
        account = self._accounts.get(name)
        if account is None:
            account = next((one for one in self._accounts.values() if one.number == name), None)
        if account is not None and account.unseen > 0:
            account.unseen -= 1
            return None
        return account

    def of_machine(self, email: str) -> Account | None:
        """The account of a machine, which knows it however new it is."""
        return self._accounts.get(email)

    def names(self) -> list[str]:
        """The addresses of all."""
        return list(self._accounts)

    def resource(self, name: str) -> str:
        """The full name of the account that `projects/P/serviceAccounts/X` means, as policies are kept under."""
        return f"projects/{self._project.id}/serviceAccounts/{self._seen(name).email}"

    def clear(self) -> None:
        """None at all."""
        self._accounts.clear()
        self._deleted.clear()

    def principal(self, account: Account) -> Principal:
        """As whom its tokens act."""
        return Principal(name=f"serviceAccount:{account.email}")

    def token(self, account: Account, lifetime_s: float = TOKEN_S) -> str:
        """A token of this very account; it ends with it."""
        return self._project.principals.token(
            self.principal(account), lifetime_s, lambda: self.of_machine(account.email) is account
        )

    def _create(self, asked: Asked) -> Mapping[str, Any]:
        body = asked.body
        wanted = str(body.get("accountId", ""))
        if _ID.fullmatch(wanted) is None:
            raise invalid(
                "The account ID must be 6 to 30 characters: lower-case letters, digits and hyphens.", "account_id"
            )
        email = f"{wanted}@{self._project.id}.iam.gserviceaccount.com"
        if email in self._accounts:
            raise Refusal(409, f"Service account {wanted} already exists within project projects/{self._project.id}.")
        if len(self._accounts) >= _QUOTA:
            raise Refusal(429, "Maximum number of service accounts on project reached.")
        about = body.get("serviceAccount", {})
        number = f"1{int(hashlib.sha256(str(self._project.next_number()).encode()).hexdigest()[:15], 16):020d}"[:21]
        told = {
            "name": f"projects/{self._project.id}/serviceAccounts/{email}",
            "projectId": self._project.id,
            "uniqueId": number,
            "email": email,
            "etag": "MDEwMjE5MjA=",
            "oauth2ClientId": number,
            **{name: about[name] for name in ("displayName", "description") if about.get(name)},
        }
        self._accounts[email] = Account(told=told, unseen=self._project.settling())
        return told

    def _list(self, asked: Asked) -> Mapping[str, Any]:
        every = [one.told for one in self._accounts.values()]
        found, token = paged(every, asked.number("pageSize") or 20, asked.one("pageToken"))
        return {**({"accounts": found} if found else {}), **({"nextPageToken": token} if token else {})}

    def _patch(self, asked: Asked) -> Mapping[str, Any]:
        account = self._seen(asked.names["name"])
        mask = asked.body.get("updateMask", "")
        if not mask or not set(re.split("[,]", mask)) <= {"displayName", "display_name", "description"}:
            raise invalid("only display_name and description of a service account can be changed", "update_mask")
        account.told = masked(account.told, asked.body.get("serviceAccount", {}), mask)
        return account.told

    def _delete(self, asked: Asked) -> Mapping[str, Any]:
        account = self._seen(asked.names["name"])
        del self._accounts[account.email]
        self._deleted[account.number] = account
        self._project.policies.forget(str(account.told["name"]))
        self._project.policies.orphan(account.email, account.number)
        return {}

    def _undelete(self, asked: Asked) -> Mapping[str, Any]:
        number = asked.names["name"].rpartition("/")[2]
        account = self._deleted.get(number)
        if account is None:
            raise absent(f"Unknown service account: {number}")
        if account.email in self._accounts:
            raise Refusal(400, "a service account of this name exists meanwhile", status="FAILED_PRECONDITION")
        self._accounts[account.email] = self._deleted.pop(number)
        return {"restoredAccount": account.told}

    def _get_policy(self, asked: Asked) -> Mapping[str, Any]:
        version = asked.number("options.requestedPolicyVersion")
        return self._project.policies.told(self.resource(asked.names["resource"]), version)

    def _set_policy(self, asked: Asked) -> Mapping[str, Any]:
        resource = self.resource(asked.names["resource"])
        self._project.policies.put(resource, asked.body.get("policy", {}))
        return self._project.policies.told(resource, 3)

    def _test(self, asked: Asked) -> Mapping[str, Any]:
        resource = self.resource(asked.names["resource"])
        may = self._project.may
        found = [one for one in asked.body.get("permissions", ()) if may(asked.principal, one, resource)]
        return {"permissions": found} if found else {}

    def _access_token(self, asked: Asked) -> Mapping[str, Any]:
        account = self._lent(asked.names["name"])
        self._project.check(asked.principal, "iam.serviceAccounts.getAccessToken", str(account.told["name"]))
        lifetime_s = float(str(asked.body.get("lifetime", "3600s")).rstrip("s"))
        if not 0 < lifetime_s <= 3600:
            raise invalid("The lifetime must be more than 0 and at most 3600 s.", "lifetime")
        until = self._project.now().timestamp() + lifetime_s
        # In whole seconds: google-auth reads nothing else.
        expires = dt.datetime.fromtimestamp(until, tz=dt.UTC)
        return {"accessToken": self.token(account, lifetime_s), "expireTime": f"{expires:%Y-%m-%dT%H:%M:%SZ}"}

    def _id_token(self, asked: Asked) -> Mapping[str, Any]:
        account = self._lent(asked.names["name"])
        self._project.check(asked.principal, "iam.serviceAccounts.getOpenIdToken", str(account.told["name"]))
        audience, with_email = str(asked.body["audience"]), bool(asked.body.get("includeEmail"))
        return {"token": self._identity_token(account, audience, with_email)}

    def _seen(self, name: str) -> Account:
        """By `projects/P/serviceAccounts/X`. For "-" what is not there is 403 (discovery document of iam v1)."""
        _, project, _, own = name.split("/")
        found = self.find(own) if self._project.is_mine(project) else None
        if found is None and project in {self._project.id, self._project.number}:
            raise absent(f"Unknown service account: {own}")
        if found is None:
            raise denied("iam.serviceAccounts.get", name)
        return found

    def _lent(self, name: str) -> Account:
        """As `_seen`, for who asks for its tokens: they name no project, and are told 404."""
        own = name.rpartition("/")[2]
        found = self.find(own)
        if found is None:
            raise absent(f"Not found; Gaia id not found for email {own}")
        return found
