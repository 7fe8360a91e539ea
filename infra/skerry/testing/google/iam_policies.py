"""Stores IAM policies of resources and decides about permissions.

A stale etag is refused: 409 ABORTED, and 412 by Cloud Storage. A policy with conditions is returned and accepted only
as version 3. Members must exist; deleted members stay as `deleted:`. A change becomes visible after `settling` checks.
Sources: IAM, "Policy" (REST) and "IAM Conditions overview"; Cloud Storage, "Allow policies".
"""

from __future__ import annotations

import base64
import copy
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from skerry.testing.google import cel
from skerry.testing.google.predefined_roles import permissions_of
from skerry.testing.google.refusals import Refusal, invalid

if TYPE_CHECKING:
    from skerry.testing.google.access_tokens import Principal

Binding: TypeAlias = Mapping[str, Any]
_MEMBER: Final = re.compile(
    r"allUsers|allAuthenticatedUsers|(user|group|domain|serviceAccount|deleted:serviceAccount):\S+|"
    r"(projectOwner|projectEditor|projectViewer):\S+|(principal|principalSet)://iam\.googleapis\.com/\S+"
)
# "Limits" of IAM Conditions.
_OPERATORS: Final = 12
_FEDERATED: Final = re.compile(
    r"principalSet://iam\.googleapis\.com/projects/\d+/locations/global/workloadIdentityPools/[a-z0-9-]+/"
    r"(\*|group/\S+|attribute\.[a-z0-9_]+/\S+)|"
    r"principal://iam\.googleapis\.com/projects/\d+/locations/global/workloadIdentityPools/[a-z0-9-]+/subject/\S+"
)


class AccountDirectory(Protocol):
    """Finds the service accounts that members name."""

    @property
    def account_exists(self) -> Callable[[str], bool]:
        """A function that returns True if an account of this address is visible."""
        ...


@dataclass(kw_only=True)
class _Policy:
    """A policy. unseen: how many decisions still use the bindings before the change."""

    bindings: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    before: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    unseen: int = 0
    number: int = 0


class Policies:
    """The policies of all resources, by the resource's full name. Callers hold the project's lock."""

    def __init__(self, accounts: AccountDirectory, settling: Callable[[], int]) -> None:
        self._policies: dict[str, _Policy] = {}
        self._accounts = accounts
        self._settling = settling

    def read(self, resource: str, version_limit: int | None) -> dict[str, Any]:
        """Return a policy as getIamPolicy does; conditions only in version 3."""
        policy = self._policies.get(resource) or _Policy()
        conditional = any("condition" in binding for binding in policy.bindings)
        bindings = copy.deepcopy(policy.bindings)
        if conditional and (version_limit or 0) < 3:
            for binding in bindings:
                if (condition := binding.pop("condition", None)) is not None:
                    binding["role"] += f"_withcond_{hashlib.sha256(repr(condition).encode()).hexdigest()[:20]}"
        version = 3 if conditional and (version_limit or 0) >= 3 else 1
        return {"version": version, "etag": _etag(policy.number), **({"bindings": bindings} if bindings else {})}

    def write(self, resource: str, policy: Mapping[str, Any], *, stale: int = 409) -> None:
        """Replace a policy. stale: the HTTP status for a stale etag. Raises Refusal."""
        present = self._policies.get(resource) or _Policy()
        if (etag := policy.get("etag")) is not None and etag != _etag(present.number):
            message = "There were concurrent policy changes. Please retry the whole read-modify-write."
            raise Refusal(stale, message, status="ABORTED" if stale == 409 else None)
        bindings = [self._checked(binding, policy.get("version", 1)) for binding in policy.get("bindings", ())]
        if etag is None and any("condition" in binding for binding in (*bindings, *present.bindings)):
            # Google would silently drop the conditions of other writers.
            raise invalid("a policy with conditions is written only with the etag that was read", "policy.etag")
        self._policies[resource] = _Policy(
            bindings=_merged(bindings),
            before=present.before if present.unseen else present.bindings,
            unseen=self._settling(),
            number=present.number + 1,
        )

    def allows(self, principal: Principal, permission: str, resource: str, context: cel.Context) -> bool:
        """Return True if this resource's own policy allows it."""
        policy = self._policies.get(resource)
        if policy is None:
            return False
        bindings = policy.bindings
        if policy.unseen > 0:
            policy.unseen -= 1
            bindings = policy.before
        return any(
            permission in permissions_of(binding["role"])
            and not principal.members.isdisjoint(binding["members"])
            and ("condition" not in binding or cel.holds(binding["condition"]["expression"], context))
            for binding in bindings
        )

    def forget(self, resource: str) -> None:
        """Delete a resource's policy."""
        self._policies.pop(resource, None)

    def orphan(self, email: str, number: str) -> None:
        """Mark the bindings of a deleted service account; a new account of its name does not get them."""
        for policy in self._policies.values():
            for binding in policy.bindings:
                binding["members"] = [
                    f"deleted:serviceAccount:{email}?uid={number}" if member == f"serviceAccount:{email}" else member
                    for member in binding["members"]
                ]

    def clear(self) -> None:
        """Delete all policies."""
        self._policies.clear()

    def _checked(self, binding: Binding, version: int) -> dict[str, Any]:
        permissions_of(binding["role"])
        for member in binding.get("members", ()):
            self._check_member(member)
        if (condition := binding.get("condition")) is not None:
            if version != 3:
                raise invalid("IAM policy with conditions must have version 3", "policy.version")
            if not condition.get("title") or not condition.get("expression"):
                raise invalid("a condition has a title and an expression", "policy.bindings.condition")
            if len(re.findall(r"&&|\|\||!(?!=)", condition["expression"])) > _OPERATORS:
                message = f"a condition has at most {_OPERATORS} logical operators"
                raise invalid(message, "policy.bindings.condition.expression")
            try:
                cel.holds(condition["expression"], {})
            except cel.Unsupported as error:
                raise invalid(str(error), "policy.bindings.condition.expression") from error
        return copy.deepcopy(dict(binding))

    def _check_member(self, member: str) -> None:
        if _MEMBER.fullmatch(member) is None:
            raise invalid(f"The member {member} is of an unknown type. Please set a valid type prefix.", "policy")
        if member.startswith("principal") and _FEDERATED.fullmatch(member) is None:
            raise invalid(f"The principal {member} is not in a format of IAM.", "policy")
        kind, _, email = member.partition(":")
        if kind == "serviceAccount" and not self._accounts.account_exists(email):
            raise invalid(f"Service account {email} does not exist.", "policy")


def _merged(bindings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge bindings of the same role and condition and drop empty ones."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for binding in bindings:
        key = binding["role"], repr(sorted(binding.get("condition", {}).items()))
        target = merged.setdefault(key, {**binding, "members": []})
        target["members"] += [member for member in binding.get("members", ()) if member not in target["members"]]
    return [binding for binding in merged.values() if binding["members"]]


def _etag(number: int) -> str:
    # "ACAB" is Google's etag of a policy that was never set.
    return base64.b64encode(b"\x05\x06" + number.to_bytes(7, "big")).decode() if number else "ACAB"
