"""Workload identity federation: a pool for identities of AWS or of a cluster, with providers that admit them.

A provider admits the roles of one AWS account, or service accounts by the tokens of one OIDC issuer.

A deleted pool or provider keeps its id for 30 days: a create finds, restores and updates it. A pool grants no
permissions; those are bound to its members, see `bucket_bindings`.
Sources: the discovery document of iam v1 (limits of ids, mappings and conditions); IAM, "Configure Workload Identity
Federation with AWS" and "with Kubernetes".
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.google import owner_labels
from skerry.infra.clouds.google.generation_names import name_with_room
from skerry.infra.clouds.google.session import delete_if_present
from skerry.infra.clouds.handler_helpers import Absent, check_owner, differing, each, wait_visible
from skerry.infra.provision.graph import Resource, Text
from skerry.infra.provision.handler import Observed
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.graph import Json
    from skerry.infra.provision.handler import Desired, StateRecord

SUBJECT: Final = "assertion.arn"
"""The identity in logs: the ARN of the session."""
MOST_SUBJECT_BYTES: Final = 127
ROLE: Final = "assertion.arn.extract('assumed-role/{role}/')"
"""The name of the role, to which permissions are bound. The path of a user may contain anything, also "assumed-role/",
so the condition also tests the beginning of the ARN."""
MOST_CONDITION: Final = 4096

_LONGEST_ID: Final = 32
_TITLE: Final = 32
_DELETED: Final = "DELETED"
_REMEDY: Final = "delete it if it is not needed; its id stays taken for 30 days"
_PAGE: Final = "50"
_SESSIONS: Final = re.compile(r"assertion\.arn\.startsWith\('([^']*)'\) && ")
SUBJECT_CLAIM: Final = "assertion.sub"
"""The identity of a token, to which permissions are bound."""


@dataclass(frozen=True, kw_only=True)
class Pool(Resource):
    """A workload identity pool. Outputs: name, id, members.

    members: the beginning of a policy's member; the name of a role of AWS follows.
    """

    KIND: ClassVar[str] = "google_pool"
    SINGLE: ClassVar[bool] = True

    enabled: bool = True


@dataclass(frozen=True, kw_only=True)
class Provider(Resource):
    """Admits roles of an AWS account to a pool. name: POOL/ID. Outputs: name, audience.

    pool: the name of the pool. sessions: the beginning of the admitted ARNs. roles: their names. audience: for requests
    of tokens.
    """

    KIND: ClassVar[str] = "google_pool_provider"
    FIXED: ClassVar[frozenset[str]] = frozenset({"pool", "account"})

    pool: Text
    account: str
    sessions: str
    roles: tuple[Text, ...]
    subject: str = SUBJECT
    aws_role: str = ROLE
    enabled: bool = True

    @classmethod
    def rights(cls, name: str, settings: Mapping[str, Json], /) -> Mapping[str, Json]:
        """See Resource.rights."""
        admitted = {setting: settings[setting] for setting in ("account", "sessions", "roles") if setting in settings}
        return {f"pool {name.partition('/')[0]}: admitted roles of AWS": admitted}


@dataclass(frozen=True, kw_only=True)
class OidcProvider(Resource):
    """Admits subjects of an OIDC issuer to a pool. name: POOL/ID. Outputs: name, audience.

    pool: the name of the pool. issuer: of the tokens, with https://; Google reads its keys there. subjects: the
    beginnings of the admitted ones. audience: for requests of tokens; the tokens have the same, after `https:`.
    """

    KIND: ClassVar[str] = "google_pool_oidc_provider"
    FIXED: ClassVar[frozenset[str]] = frozenset({"pool"})

    pool: Text
    issuer: str
    subjects: tuple[str, ...]
    audiences: tuple[str, ...] = ()
    subject: str = SUBJECT_CLAIM
    enabled: bool = True

    @classmethod
    def rights(cls, name: str, settings: Mapping[str, Json], /) -> Mapping[str, Json]:
        """See Resource.rights."""
        admitted = {setting: settings[setting] for setting in ("issuer", "subjects") if setting in settings}
        return {f"pool {name.partition('/')[0]}: admitted accounts of a cluster": admitted}


def subjects_condition(starts: Sequence[str]) -> str:
    """The condition for tokens whose subject begins with one of these."""
    return " || ".join(f"{SUBJECT_CLAIM}.startsWith({start!r})" for start in sorted(starts))


def pool_id(stem: str) -> str:
    """The id of a run's pool: at most 32 characters. stem: of the run."""
    return name_with_room(stem, _LONGEST_ID)


def provider_name(pool: str, part: str) -> str:
    """The name of one of a pool's providers. part: its purpose in the run."""
    return f"{pool}/{name_with_room(f'aws-{part}', _LONGEST_ID)}"


def members_prefix(number: str, pool: str) -> str:
    """The beginning of a policy's member; the name of a role of AWS follows. number: of the project."""
    return f"principalSet://iam.googleapis.com/{_parent(number)}/{pool}/attribute.aws_role/"


def sessions(account: str, partition: str) -> str:
    """The beginning of the ARNs of all role sessions of an AWS account, and of no other ARN."""
    return f"arn:{partition}:sts::{account}:assumed-role/"


def condition(roles: Sequence[str], start: str) -> str:
    """The condition for sessions of these roles. start: as `sessions`. Raises Invalid for too many roles."""
    named = ", ".join(repr(role) for role in sorted(roles))
    expression = f"assertion.arn.startsWith({start!r}) && attribute.aws_role in [{named}]"
    if len(expression) > MOST_CONDITION:
        raise Invalid(
            f"{len(roles)} roles do not fit into the {MOST_CONDITION} characters of a condition; set `role: group`"
        )
    return expression


def pool_body(desired: Desired) -> dict[str, Any]:
    """The body of workloadIdentityPools.create, and of a patch."""
    return {**_about(desired), "disabled": not desired.settings["enabled"]}


def oidc_provider_body(desired: Desired) -> dict[str, Any]:
    """The body of providers.create, and of a patch."""
    settings = desired.settings
    return {
        **_about(desired),
        "disabled": not settings["enabled"],
        "oidc": {"issuerUri": settings["issuer"], "allowedAudiences": _texts(desired, "audiences")},
        "attributeMapping": {"google.subject": settings["subject"]},
        "attributeCondition": subjects_condition(_texts(desired, "subjects")),
    }


def provider_body(desired: Desired) -> dict[str, Any]:
    """The body of providers.create, and of a patch."""
    settings = desired.settings
    return {
        **_about(desired),
        "disabled": not settings["enabled"],
        "aws": {"accountId": settings["account"]},
        "attributeMapping": {"google.subject": settings["subject"], "attribute.aws_role": settings["aws_role"]},
        "attributeCondition": _condition(desired),
    }


class _Federated(ABC):
    """Creates resources that stay soft-deleted for 30 days. See Handler."""

    NOUN: ClassVar[str]

    def __init__(self, google: Google) -> None:
        self._google = google

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. Soft-deleted counts as absent."""
        return each(self._read, all_desired)

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create. Restores a soft-deleted one of this run."""
        name, row = desired.name, self._row(desired.name)
        if row is None:
            # A conflict: another process created it meanwhile, or an earlier attempt of this one.
            with suppress(Conflict):
                operation = self._call("POST", self._collection(name), self._body(desired), self._id_query(name))
                self._finish(operation, f"the {self.NOUN} {name} is created")
            row = wait_visible(self._google.clock, f"the {self.NOUN} {name}", lambda: self._row(name))
        check_owner(self._observed(desired, row), desired, self.NOUN, _REMEDY)
        if row.get("state") == _DELETED:
            operation = self._call("POST", f"{self._path(name)}:undelete", {})
            self._finish(operation, f"the {self.NOUN} {name} is restored")
        return self.update(desired, differing(desired, self._seen(desired)))

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update."""
        if changed:
            body = self._body(desired)
            mask = {"updateMask": ",".join(sorted(body))}
            operation = self._call("PATCH", self._path(desired.name), body, mask)
            self._finish(operation, f"the {self.NOUN} {desired.name} is changed")
        return dict(self._seen(desired).outputs)

    def delete(self, record: StateRecord) -> None:
        """See Handler.delete. It stays for 30 days, but admits no identities."""
        row = self._row(record.name)
        if row is None or row.get("state") == _DELETED:
            return
        done = f"the {self.NOUN} {record.name} is deleted"
        delete_if_present(lambda: self._finish(self._call("DELETE", self._path(record.name)), done))

    @abstractmethod
    def _path(self, name: str) -> str: ...

    @abstractmethod
    def _id_query(self, name: str) -> Mapping[str, str]:
        """The parameter of a create with the id."""

    @abstractmethod
    def _body(self, desired: Desired) -> dict[str, Any]: ...

    @abstractmethod
    def _outputs(self, name: str) -> dict[str, str]: ...

    @abstractmethod
    def _settings(self, desired: Desired, row: Mapping[str, Any]) -> dict[str, Json]: ...

    def _collection(self, name: str) -> str:
        return self._path(name).rpartition("/")[0]

    def _read(self, desired: Desired) -> Observed | None:
        row = self._row(desired.name)
        return None if row is None or row.get("state") == _DELETED else self._observed(desired, row)

    def _observed(self, desired: Desired, row: Mapping[str, Any]) -> Observed:
        mark = owner_labels.of_description(str(row.get("description", "")))
        return Observed(
            outputs=self._outputs(desired.name),
            settings={"region": "", "enabled": not row.get("disabled", False), **self._settings(desired, row)},
            owner=None if mark is None else mark.owner(desired.run),
        )

    def _seen(self, desired: Desired) -> Observed:
        return wait_visible(self._google.clock, f"the {self.NOUN} {desired.name}", lambda: self._read(desired))

    def _row(self, name: str) -> dict[str, Any] | None:
        try:
            return self._call("GET", self._path(name))
        except Absent:
            return None

    def _list(self, path: str, key: str) -> list[dict[str, Any]]:
        try:
            return list(self._google.pages("iam", path, key, query={"pageSize": _PAGE}))
        except Absent:
            return []

    def _finish(self, operation: Mapping[str, Any], what: str) -> None:
        self._google.finished("iam", operation, what)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Json] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        return self._google.call("iam", method, path, body=body, query=query)


class Pools(_Federated):
    """Creates pools. See Handler."""

    NOUN = "workload identity pool"

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Pools have no region."""
        del regions
        for name, mark in self.marked(run):
            yield owner_labels.owned_record(Pool, mark, name=name, region="", outputs=self._outputs(name))

    def marked(self, run: str) -> Iterator[tuple[str, owner_labels.OwnerLabel]]:
        """The ids of the run's pools, with their owners."""
        for row in self._list(f"v1/{_parent(self._google.project)}", "workloadIdentityPools"):
            mark = owner_labels.of_description(str(row.get("description", "")))
            if mark is not None and mark.owner(run) == run and row.get("state") != _DELETED:
                yield str(row["name"]).rpartition("/")[2], mark

    def _path(self, name: str) -> str:
        return f"v1/{_parent(self._google.project)}/{name}"

    def _id_query(self, name: str) -> Mapping[str, str]:
        return {"workloadIdentityPoolId": name}

    def _body(self, desired: Desired) -> dict[str, Any]:
        return pool_body(desired)

    def _outputs(self, name: str) -> dict[str, str]:
        number = self._google.identity().number
        members = members_prefix(number, name)
        return {"name": f"{_parent(number)}/{name}", "id": name, "members": members}

    def _settings(self, desired: Desired, row: Mapping[str, Any]) -> dict[str, Json]:
        del desired, row
        return {}


class _PoolProviders(_Federated):
    """Creates providers of one type. KIND: of the resource. TYPE: its field in an answer. See Handler."""

    NOUN = "workload identity provider"
    RESOURCE: ClassVar[type[Resource]]
    TYPE: ClassVar[str]

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Those in the run's own pools."""
        del regions
        for pool, _ in Pools(self._google).marked(run):
            path = f"v1/{_parent(self._google.project)}/{pool}/providers"
            for row in self._list(path, "workloadIdentityPoolProviders"):
                mark = owner_labels.of_description(str(row.get("description", "")))
                owned = mark is not None and mark.owner(run) == run and row.get("state") != _DELETED
                if mark is not None and owned and self.TYPE in row:
                    name = f"{pool}/{str(row['name']).rpartition('/')[2]}"
                    outputs = self._outputs(name)
                    yield owner_labels.owned_record(self.RESOURCE, mark, name=name, region="", outputs=outputs)

    def _path(self, name: str) -> str:
        pool, _, provider = name.partition("/")
        return f"v1/{_parent(self._google.project)}/{pool}/providers/{provider}"

    def _id_query(self, name: str) -> Mapping[str, str]:
        return {"workloadIdentityPoolProviderId": name.partition("/")[2]}

    def _outputs(self, name: str) -> dict[str, str]:
        pool, _, provider = name.partition("/")
        where = f"{_parent(self._google.identity().number)}/{pool}/providers/{provider}"
        return {"name": where, "audience": f"//iam.googleapis.com/{where}"}

    def _pool(self, desired: Desired) -> str:
        return f"{_parent(self._google.identity().number)}/{desired.name.partition('/')[0]}"


class Providers(_PoolProviders):
    """Creates providers for roles of AWS. See Handler."""

    RESOURCE = Provider
    TYPE = "aws"

    def _body(self, desired: Desired) -> dict[str, Any]:
        return provider_body(desired)

    def _settings(self, desired: Desired, row: Mapping[str, Any]) -> dict[str, Json]:
        mapping: Mapping[str, Any] = row.get("attributeMapping", {})
        admits = str(row.get("attributeCondition", ""))
        start = _SESSIONS.match(admits)
        further = sorted(set(mapping) - {"google.subject", "attribute.aws_role"})
        return {
            "pool": self._pool(desired),
            "account": str(row.get("aws", {}).get("accountId", "")),
            "sessions": "" if start is None else start[1],
            "roles": _texts(desired, "roles") if admits == _condition(desired) else [admits],
            "subject": "; ".join([str(mapping.get("google.subject", "")), *further]),
            "aws_role": str(mapping.get("attribute.aws_role", "")),
        }


class OidcProviders(_PoolProviders):
    """Creates providers for an OIDC issuer. See Handler."""

    RESOURCE = OidcProvider
    TYPE = "oidc"

    def _body(self, desired: Desired) -> dict[str, Any]:
        return oidc_provider_body(desired)

    def _settings(self, desired: Desired, row: Mapping[str, Any]) -> dict[str, Json]:
        mapping: Mapping[str, Any] = row.get("attributeMapping", {})
        admits, subjects = str(row.get("attributeCondition", "")), _texts(desired, "subjects")
        further = sorted(set(mapping) - {"google.subject"})
        oidc: Mapping[str, Any] = row.get("oidc", {})
        own_keys = " by other keys than it publishes" if oidc.get("jwksJson") else ""
        return {
            "pool": self._pool(desired),
            "issuer": f"{oidc.get('issuerUri', '')}{own_keys}",
            "subjects": subjects if admits == subjects_condition(subjects) else [admits],
            "audiences": list(oidc.get("allowedAudiences", ())),
            "subject": "; ".join([str(mapping.get("google.subject", "")), *further]),
        }


def _condition(desired: Desired) -> str:
    return condition(_texts(desired, "roles"), str(desired.settings["sessions"]))


def _texts(desired: Desired, setting: str) -> list[str]:
    texts = desired.settings[setting]
    return [str(text) for text in texts] if isinstance(texts, Sequence) and not isinstance(texts, str) else []


def _parent(project: str) -> str:
    return f"projects/{project}/locations/global/workloadIdentityPools"


def _about(desired: Desired) -> dict[str, Any]:
    title = (desired.resource.why or desired.resource.key)[:_TITLE].strip()
    return {"displayName": title, "description": owner_labels.description(desired)}
