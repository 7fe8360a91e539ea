"""Secret bindings: the right of one principal to read one secret, in the secret's own IAM policy.

The secret is the user's: it is never created, changed or deleted, and the bindings of others in its policy stay. Ours
have a condition that limits them to the secret's versions; its title and description name the run.
Sources: Secret Manager, "Access control with IAM" and "IAM Conditions"; REST reference of projects.secrets.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.google import owner_labels
from skerry.infra.clouds.google.bucket_bindings import (
    Change,
    changed_policy,
    mark_of,
    members_of,
    name_of,
    rewrite_policy,
)
from skerry.infra.clouds.google.session import delete_if_present
from skerry.infra.clouds.handler_helpers import Absent, check_owner, of, text
from skerry.infra.provision.graph import Resource, Text
from skerry.infra.provision.handler import Observed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.graph import Json
    from skerry.infra.provision.handler import Desired, StateRecord

ACCESSOR: Final = "roles/secretmanager.secretAccessor"
"""Reads the values of a secret's versions, and nothing else."""
_SERVICE: Final = "secretmanager"
_VERSION: Final = 3
_TITLE: Final = ": read the secret"
_VERSIONS_ONLY: Final = 'resource.type == "secretmanager.googleapis.com/SecretVersion"'


@dataclass(frozen=True, kw_only=True)
class SecretBinding(Resource):
    """The right of a principal to read a secret. secret: projects/P/secrets/S. Outputs: name, secret."""

    KIND: ClassVar[str] = "google_secret_binding"
    FIXED: ClassVar[frozenset[str]] = frozenset({"secret"})

    secret: str
    member: Text

    @classmethod
    def rights(cls, name: str, settings: Mapping[str, Json], /) -> Mapping[str, Json]:
        """See Resource.rights."""
        del name
        binding: Json = {"role": ACCESSOR, "condition": _VERSIONS_ONLY}
        return {f"secret {settings.get('secret')}: {settings.get('member')}": [binding]}


def binding_of(desired: Desired) -> dict[str, Any]:
    """The binding of the resource in the policy."""
    return {
        "role": ACCESSOR,
        "members": [text(desired.settings["member"])],
        "condition": {
            "title": f"{desired.name}{_TITLE}",
            "description": owner_labels.description(desired),
            "expression": _VERSIONS_ONLY,
        },
    }


class SecretBindings:
    """Writes bindings into the policies of secrets. See Handler."""

    def __init__(self, google: Google) -> None:
        self._google = google
        # One at a time: of concurrent writes the etag admits one.
        self._writing = threading.Lock()

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. One call for each secret."""
        secrets = {of(SecretBinding, desired).secret for desired in all_desired}
        policies = {secret: self._policy(secret) for secret in secrets}
        return [_seen(desired, policies[of(SecretBinding, desired).secret]) for desired in all_desired]

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        secret, ours = of(SecretBinding, desired).secret, binding_of(desired)

        def change(policy: Mapping[str, Any]) -> dict[str, Any]:
            if (seen := _seen(desired, policy)) is not None:
                check_owner(seen, desired, "binding", "delete it if it is not needed")
            return changed_policy(policy, desired.name, (ours,))

        self._rewrite(secret, change)
        return _outputs(desired.name, secret)

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update."""
        del changed
        return self.create(desired)

    def delete(self, record: StateRecord) -> None:
        """See Handler.delete."""
        secret = record.outputs.get("secret") or str(record.settings.get("secret", ""))
        delete_if_present(lambda: self._rewrite(secret, lambda policy: changed_policy(policy, record.name, ())))

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Lists none: the secrets are the user's, in any project, and only a spec names them.

        A binding that remains without a state names a deleted account, which nothing can use.
        """
        del run, regions
        return ()

    def _rewrite(self, secret: str, change: Change) -> None:
        with self._writing:
            rewrite_policy(self._google.clock, secret, partial(self._call, secret), change)

    def _policy(self, secret: str) -> dict[str, Any] | None:
        try:
            return self._call(secret)
        except Absent:
            return None

    def _call(self, secret: str, changed: Mapping[str, Json] | None = None) -> dict[str, Any]:
        if changed is None:
            query = {"options.requestedPolicyVersion": str(_VERSION)}
            return self._google.call(_SERVICE, "GET", f"v1/{secret}:getIamPolicy", query=query)
        return self._google.call(_SERVICE, "POST", f"v1/{secret}:setIamPolicy", body={"policy": changed})


def _seen(desired: Desired, policy: Mapping[str, Any] | None) -> Observed | None:
    ours = [binding for binding in (policy or {}).get("bindings", ()) if name_of(binding) == desired.name]
    if not ours:
        return None
    mark, resource, members = mark_of(ours[0]), of(SecretBinding, desired), members_of(ours)
    rights = {(str(binding["role"]), str(binding["condition"]["expression"])) for binding in ours}
    if others := sorted(rights - {(ACCESSOR, _VERSIONS_ONLY)}):  # changed outside of skerry
        members += "".join(f" with {role} where {condition}" for role, condition in others)
    return Observed(
        outputs=_outputs(desired.name, resource.secret),
        settings={"region": resource.region, "secret": resource.secret, "member": members},
        owner=None if mark is None else mark.owner(desired.run),
    )


def _outputs(name: str, secret: str) -> dict[str, str]:
    return {"name": name, "secret": secret}
