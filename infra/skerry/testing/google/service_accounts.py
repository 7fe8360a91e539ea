"""IAM's service accounts and their short-lived credentials.

An account created again under an old name has another number and none of the old bindings. A new account becomes
visible after `settling` lookups. Source: IAM, "Create service accounts", "Delete and undelete service accounts".
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.google.access_tokens import TOKEN_S, Principal
from skerry.testing.google.refusals import Refusal, absent, denied, invalid
from skerry.testing.google.shared_state import masked, page_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.testing.google.shared_state import Handler, Project, SandboxRequest

_ID: Final = re.compile(r"[a-z]([-a-z0-9]{4,28}[a-z0-9])")
_QUOTA: Final = 100
_PREFIX: Final = "iam.projects.serviceAccounts"
_CREDENTIALS: Final = "iamcredentials.projects.serviceAccounts"


@dataclass(kw_only=True)
class Account:
    """One account. resource: as the API returns it. unseen: how many lookups do not find it yet."""

    resource: dict[str, Any]
    unseen: int

    @property
    def email(self) -> str:
        """The address of the account."""
        return self.resource["email"]

    @property
    def number(self) -> str:
        """The unique id, which is never reused."""
        return self.resource["uniqueId"]


class Accounts:
    """The service accounts of a project."""

    def __init__(self, project: Project, identity_token: Callable[[Account, str, bool], str]) -> None:
        """identity_token: creates one for an account and an audience, with or without its address."""
        self._project = project
        self._identity_token = identity_token
        self._accounts: dict[str, Account] = {}
        self._deleted: dict[str, Account] = {}
        self._owners: set[str] = set()
        project.account_exists = lambda email: self.find(email) is not None

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by method id."""
        return {
            f"{_PREFIX}.create": self._create,
            f"{_PREFIX}.get": lambda request: self._existing(request.names["name"]).resource,
            f"{_PREFIX}.list": self._list,
            f"{_PREFIX}.patch": self._patch,
            f"{_PREFIX}.delete": self._delete,
            f"{_PREFIX}.undelete": self._undelete,
            f"{_PREFIX}.getIamPolicy": self._get_policy,
            f"{_PREFIX}.setIamPolicy": self._set_policy,
            f"{_PREFIX}.testIamPermissions": self._test_permissions,
            f"{_CREDENTIALS}.generateAccessToken": self._access_token,
            f"{_CREDENTIALS}.generateIdToken": self._id_token,
        }

    def find(self, name: str) -> Account | None:
        """Find an account by address or number; None if absent or too new. Counts as a lookup."""
        account = self._accounts.get(name)
        if account is None:
            account = next((account for account in self._accounts.values() if account.number == name), None)
        if account is not None and account.unseen > 0:
            account.unseen -= 1
            return None
        return account

    def of_machine(self, email: str) -> Account | None:
        """Find the account of a machine, which sees it immediately."""
        return self._accounts.get(email)

    def names(self) -> list[str]:
        """Return all addresses."""
        return list(self._accounts)

    def resource_name(self, name: str) -> str:
        """Return the full name of `projects/P/serviceAccounts/X`, under which policies are stored."""
        return f"projects/{self._project.id}/serviceAccounts/{self._existing(name).email}"

    def make_owner(self, email: str) -> None:
        """Give the account every permission, as an owner of the project has."""
        self._owners.add(email)

    def clear(self) -> None:
        """Delete all accounts."""
        self._owners.clear()
        self._accounts.clear()
        self._deleted.clear()

    def principal(self, account: Account) -> Principal:
        """Return the principal of the account's tokens."""
        grants = None if account.email in self._owners else frozenset[str]()
        return Principal(name=f"serviceAccount:{account.email}", grants=grants)

    def token(self, account: Account, lifetime_s: float = TOKEN_S) -> str:
        """Issue an access token, which ends with the account."""
        return self._project.principals.token(
            self.principal(account), lifetime_s, lambda: self.of_machine(account.email) is account
        )

    def _create(self, request: SandboxRequest) -> Mapping[str, Any]:
        body = request.body
        account_id = str(body.get("accountId", ""))
        if _ID.fullmatch(account_id) is None:
            raise invalid(
                "The account ID must be 6 to 30 characters: lower-case letters, digits and hyphens.", "account_id"
            )
        email = f"{account_id}@{self._project.id}.iam.gserviceaccount.com"
        if email in self._accounts:
            raise Refusal(
                409, f"Service account {account_id} already exists within project projects/{self._project.id}."
            )
        if len(self._accounts) >= _QUOTA:
            raise Refusal(429, "Maximum number of service accounts on project reached.")
        description = body.get("serviceAccount", {})
        number = f"1{int(hashlib.sha256(str(self._project.next_number()).encode()).hexdigest()[:15], 16):020d}"[:21]
        resource = {
            "name": f"projects/{self._project.id}/serviceAccounts/{email}",
            "projectId": self._project.id,
            "uniqueId": number,
            "email": email,
            "etag": "MDEwMjE5MjA=",
            "oauth2ClientId": number,
            **{name: description[name] for name in ("displayName", "description") if description.get(name)},
        }
        self._accounts[email] = Account(resource=resource, unseen=self._project.settling())
        return resource

    def _list(self, request: SandboxRequest) -> Mapping[str, Any]:
        every = [account.resource for account in self._accounts.values()]
        return page_of(request, "accounts", every, default=20)

    def _patch(self, request: SandboxRequest) -> Mapping[str, Any]:
        account = self._existing(request.names["name"])
        mask = request.body.get("updateMask", "")
        if not mask or not set(re.split("[,]", mask)) <= {"displayName", "display_name", "description"}:
            raise invalid("only display_name and description of a service account can be changed", "update_mask")
        account.resource = masked(account.resource, request.body.get("serviceAccount", {}), mask)
        return account.resource

    def _delete(self, request: SandboxRequest) -> Mapping[str, Any]:
        account = self._existing(request.names["name"])
        del self._accounts[account.email]
        self._deleted[account.number] = account
        self._project.policies.forget(str(account.resource["name"]))
        self._project.policies.orphan(account.email, account.number)
        return {}

    def _undelete(self, request: SandboxRequest) -> Mapping[str, Any]:
        number = request.names["name"].rpartition("/")[2]
        account = self._deleted.get(number)
        if account is None:
            raise absent(f"Unknown service account: {number}")
        if account.email in self._accounts:
            raise Refusal(400, "another service account of this name exists", status="FAILED_PRECONDITION")
        self._accounts[account.email] = self._deleted.pop(number)
        return {"restoredAccount": account.resource}

    def _get_policy(self, request: SandboxRequest) -> Mapping[str, Any]:
        version = request.int_parameter("options.requestedPolicyVersion")
        return self._project.policies.read(self.resource_name(request.names["resource"]), version)

    def _set_policy(self, request: SandboxRequest) -> Mapping[str, Any]:
        resource_name = self.resource_name(request.names["resource"])
        self._project.policies.write(resource_name, request.body.get("policy", {}))
        return self._project.policies.read(resource_name, 3)

    def _test_permissions(self, request: SandboxRequest) -> Mapping[str, Any]:
        return self._project.permitted(request, self.resource_name(request.names["resource"]))

    def _access_token(self, request: SandboxRequest) -> Mapping[str, Any]:
        account = self._token_account(request.names["name"])
        self._project.check(request.principal, "iam.serviceAccounts.getAccessToken", str(account.resource["name"]))
        lifetime_s = float(str(request.body.get("lifetime", "3600s")).rstrip("s"))
        if not 0 < lifetime_s <= 3600:
            raise invalid("The lifetime must be more than 0 and at most 3600 s.", "lifetime")
        until = self._project.now().timestamp() + lifetime_s
        # In whole seconds: google-auth parses no fractions.
        expires = dt.datetime.fromtimestamp(until, tz=dt.UTC)
        return {"accessToken": self.token(account, lifetime_s), "expireTime": f"{expires:%Y-%m-%dT%H:%M:%SZ}"}

    def _id_token(self, request: SandboxRequest) -> Mapping[str, Any]:
        account = self._token_account(request.names["name"])
        self._project.check(request.principal, "iam.serviceAccounts.getOpenIdToken", str(account.resource["name"]))
        audience, with_email = str(request.body["audience"]), bool(request.body.get("includeEmail"))
        return {"token": self._identity_token(account, audience, with_email)}

    def _existing(self, name: str) -> Account:
        """Find by `projects/P/serviceAccounts/X`. With "-" an absent account is 403 (discovery document of iam v1)."""
        _, project, _, account_name = name.split("/")
        account = self.find(account_name) if self._project.is_mine(project) else None
        if account is None and project in {self._project.id, self._project.number}:
            raise absent(f"Unknown service account: {account_name}")
        if account is None:
            raise denied("iam.serviceAccounts.get", name)
        return account

    def _token_account(self, name: str) -> Account:
        """Find the account of a token request; these have no project, and an absent account is 404."""
        account_name = name.rpartition("/")[2]
        account = self.find(account_name)
        if account is None:
            raise absent(f"Not found; Gaia id not found for email {account_name}")
        return account
