"""Who from AWS may be somebody here: a pool of foreign identities, and its providers, each one account's roles.

A deleted pool or provider stays for 30 days and keeps its id: a create finds it, takes it back and makes it as it shall
be. Nobody has a right by being let in; rights are bound to a role's members, see `bindings`.
Sources: the discovery document of iam v1 (limits of ids, mappings and conditions); IAM, "Configure Workload Identity
Federation with AWS".
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.google import marks
from skerry.infra.clouds.google.handling import gone, name_with_room
from skerry.infra.clouds.google.session import Absent, waited
from skerry.infra.clouds.handling import VISIBLE_S, check_owner, differing, each
from skerry.infra.graph import Grant, Resource, Text
from skerry.infra.handler import Seen
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.graph import Json
    from skerry.infra.handler import Made, Wanted

SUBJECT: Final = "assertion.arn"
"""Who somebody is in logs: the ARN of his session."""
MOST_SUBJECT_BYTES: Final = 127
ROLE: Final = "assertion.arn.extract('assumed-role/{role}/')"
"""What rights are bound to: the name of his role, whoever holds it just now. Only a session of a role has a true one:
the path of a user may hold anything, "assumed-role/" too, which is why the condition looks at how the ARN begins."""
MOST_CONDITION: Final = 4096

_LONGEST_ID: Final = 32
_TITLE: Final = 32
_DELETED: Final = "DELETED"
_REMEDY: Final = "delete it if it is not needed; its id stays taken for 30 days"
_PAGE: Final = "50"
_SESSIONS: Final = re.compile(r"assertion\.arn\.startsWith\('([^']*)'\) && ")


@dataclass(frozen=True, kw_only=True)
class Pool(Resource):
    """Where foreign identities are let in. Outputs: name, id, members.

    members: what a policy's member begins with; the name of a role of AWS follows.
    """

    KIND: ClassVar[str] = "google_pool"

    enabled: bool = True


@dataclass(frozen=True, kw_only=True)
class Provider(Resource):
    """Lets roles of an account of AWS into a pool. name: POOL/ID, ids of both. Outputs: name, audience.

    pool: the name of the pool, by which it is known that it exists. sessions: what the ARNs begin with of those who are
    let in. roles: their names. audience: what a token is asked for with.
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

    def grants(self) -> tuple[Grant, ...]:
        """Who is let in."""
        where = f"pool {self.name.partition('/')[0]}"
        return tuple(Grant(who=f"role {role} of {self.account}", may="be known in", on=where) for role in self.roles)


def pool_id(stem: str) -> str:
    """The id of a run's pool: at most 32 characters. stem: of the run."""
    return name_with_room(stem, _LONGEST_ID)


def provider_name(pool: str, part: str) -> str:
    """The name of one of its providers. part: what it is for in the run."""
    return f"{pool}/{name_with_room(f'aws-{part}', _LONGEST_ID)}"


def members_prefix(number: str, pool: str) -> str:
    """What a policy's member begins with; the name of a role of AWS follows. number: of the project."""
    return f"principalSet://iam.googleapis.com/{_parent(number)}/{pool}/attribute.aws_role/"


def sessions(account: str, partition: str) -> str:
    """What the ARN of every session of a role of an account of AWS begins with, and no other ARN."""
    return f"arn:{partition}:sts::{account}:assumed-role/"


def condition(roles: Sequence[str], start: str) -> str:
    """That it is a session, of one of these roles. start: as `sessions` has it. Raises Invalid if they are too many."""
    named = ", ".join(repr(role) for role in sorted(roles))
    told = f"assertion.arn.startsWith({start!r}) && attribute.aws_role in [{named}]"
    if len(told) > MOST_CONDITION:
        raise Invalid(
            f"{len(roles)} roles have no room in the {MOST_CONDITION} characters of a condition; say `role: group`"
        )
    return told


def pool_body(wanted: Wanted) -> dict[str, Any]:
    """The body of workloadIdentityPools.create, and of a patch of all of it."""
    return {**_about(wanted), "disabled": not wanted.settings["enabled"]}


def provider_body(wanted: Wanted) -> dict[str, Any]:
    """The body of providers.create, and of a patch of all of it."""
    settings = wanted.settings
    return {
        **_about(wanted),
        "disabled": not settings["enabled"],
        "aws": {"accountId": settings["account"]},
        "attributeMapping": {"google.subject": settings["subject"], "attribute.aws_role": settings["aws_role"]},
        "attributeCondition": _condition(wanted),
    }


class _Federated(ABC):
    """Makes what is soft-deleted. See Handler."""

    NOUN: ClassVar[str]

    def __init__(self, google: Google) -> None:
        self._google = google

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read. What is deleted is not there."""
        return each(self._read, wanted)

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create. One that was deleted is taken back, if it was this run's."""
        there = self._told(wanted.name)
        if there is None:
            try:
                told = self._call("POST", self._collection(wanted.name), self._body(wanted), self._named(wanted.name))
                self._finish(told, f"the {self.NOUN} {wanted.name} is made")
            except Conflict:
                # Somebody was faster, or an attempt of ours that was cut short.
                pass
            there = self._visible(wanted.name)
        check_owner(self._as_seen(wanted, there), wanted, self.NOUN, _REMEDY)
        if there.get("state") == _DELETED:
            told = self._call("POST", f"{self._path(wanted.name)}:undelete", {})
            self._finish(told, f"the {self.NOUN} {wanted.name} is taken back")
        return self.update(wanted, differing(wanted, self._seen(wanted)))

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update."""
        if changed:
            body = self._body(wanted)
            mask = {"updateMask": ",".join(sorted(body))}
            told = self._call("PATCH", self._path(wanted.name), body, mask)
            self._finish(told, f"the {self.NOUN} {wanted.name} is changed")
        return dict(self._seen(wanted).outputs)

    def delete(self, made: Made) -> None:
        """See Handler.delete. It stays for 30 days as deleted, and lets nobody in."""
        there = self._told(made.name)
        if there is None or there.get("state") == _DELETED:
            return
        done = f"the {self.NOUN} {made.name} is deleted"
        gone(lambda: self._finish(self._call("DELETE", self._path(made.name)), done))

    @abstractmethod
    def _path(self, name: str) -> str: ...

    @abstractmethod
    def _named(self, name: str) -> Mapping[str, str]:
        """How a create is told the id."""

    @abstractmethod
    def _body(self, wanted: Wanted) -> dict[str, Any]: ...

    @abstractmethod
    def _outputs(self, name: str) -> dict[str, str]: ...

    @abstractmethod
    def _settings(self, wanted: Wanted, told: Mapping[str, Any]) -> dict[str, Json]: ...

    def _collection(self, name: str) -> str:
        return self._path(name).rpartition("/")[0]

    def _read(self, wanted: Wanted) -> Seen | None:
        told = self._told(wanted.name)
        return None if told is None or told.get("state") == _DELETED else self._as_seen(wanted, told)

    def _as_seen(self, wanted: Wanted, told: Mapping[str, Any]) -> Seen:
        mark = marks.of_description(str(told.get("description", "")))
        return Seen(
            outputs=self._outputs(wanted.name),
            settings={"region": "", "enabled": not told.get("disabled", False), **self._settings(wanted, told)},
            owner=None if mark is None else mark.owner(wanted.run),
        )

    def _seen(self, wanted: Wanted) -> Seen:
        what, deadline = f"the {self.NOUN} {wanted.name} can be read", self._google.clock.now() + VISIBLE_S
        return waited(self._google.clock, what, deadline, lambda: self._read(wanted))

    def _visible(self, name: str) -> dict[str, Any]:
        what, deadline = f"the {self.NOUN} {name} can be read", self._google.clock.now() + VISIBLE_S
        return waited(self._google.clock, what, deadline, lambda: self._told(name))

    def _told(self, name: str) -> dict[str, Any] | None:
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
    """Makes pools. See Handler."""

    NOUN = "workload identity pool"

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned. Pools have no region."""
        del regions
        for name, mark in self.marked(run):
            yield marks.found(Pool, mark, name=name, region="", outputs=self._outputs(name))

    def marked(self, run: str) -> Iterator[tuple[str, marks.Mark]]:
        """The ids of the run's pools, and their marks."""
        for told in self._list(f"v1/{_parent(self._google.project)}", "workloadIdentityPools"):
            mark = marks.of_description(str(told.get("description", "")))
            if mark is not None and mark.owner(run) == run and told.get("state") != _DELETED:
                yield str(told["name"]).rpartition("/")[2], mark

    def _path(self, name: str) -> str:
        return f"v1/{_parent(self._google.project)}/{name}"

    def _named(self, name: str) -> Mapping[str, str]:
        return {"workloadIdentityPoolId": name}

    def _body(self, wanted: Wanted) -> dict[str, Any]:
        return pool_body(wanted)

    def _outputs(self, name: str) -> dict[str, str]:
        number = self._google.identity().number
        members = members_prefix(number, name)
        return {"name": f"{_parent(number)}/{name}", "id": name, "members": members}

    def _settings(self, wanted: Wanted, told: Mapping[str, Any]) -> dict[str, Json]:
        del wanted, told
        return {}


class Providers(_Federated):
    """Makes providers. See Handler."""

    NOUN = "workload identity provider"

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned. They are looked for in the run's own pools."""
        del regions
        for pool, _ in Pools(self._google).marked(run):
            path = f"v1/{_parent(self._google.project)}/{pool}/providers"
            for told in self._list(path, "workloadIdentityPoolProviders"):
                mark = marks.of_description(str(told.get("description", "")))
                if mark is not None and mark.owner(run) == run and told.get("state") != _DELETED:
                    name = f"{pool}/{str(told['name']).rpartition('/')[2]}"
                    yield marks.found(Provider, mark, name=name, region="", outputs=self._outputs(name))

    def _path(self, name: str) -> str:
        pool, _, provider = name.partition("/")
        return f"v1/{_parent(self._google.project)}/{pool}/providers/{provider}"

    def _named(self, name: str) -> Mapping[str, str]:
        return {"workloadIdentityPoolProviderId": name.partition("/")[2]}

    def _body(self, wanted: Wanted) -> dict[str, Any]:
        return provider_body(wanted)

    def _outputs(self, name: str) -> dict[str, str]:
        pool, _, provider = name.partition("/")
        where = f"{_parent(self._google.identity().number)}/{pool}/providers/{provider}"
        return {"name": where, "audience": f"//iam.googleapis.com/{where}"}

    def _settings(self, wanted: Wanted, told: Mapping[str, Any]) -> dict[str, Json]:
        mapping: Mapping[str, Any] = told.get("attributeMapping", {})
        let_in = str(told.get("attributeCondition", ""))
        start = _SESSIONS.match(let_in)
        further = sorted(set(mapping) - {"google.subject", "attribute.aws_role"})
        return {
            "pool": f"{_parent(self._google.identity().number)}/{wanted.name.partition('/')[0]}",
            "account": str(told.get("aws", {}).get("accountId", "")),
            "sessions": "" if start is None else start[1],
            "roles": _roles(wanted) if let_in == _condition(wanted) else [let_in],
            "subject": "; ".join([str(mapping.get("google.subject", "")), *further]),
            "aws_role": str(mapping.get("attribute.aws_role", "")),
        }


def _condition(wanted: Wanted) -> str:
    return condition(_roles(wanted), str(wanted.settings["sessions"]))


def _roles(wanted: Wanted) -> list[str]:
    roles = wanted.settings["roles"]
    return [str(role) for role in roles] if isinstance(roles, Sequence) and not isinstance(roles, str) else []


def _parent(project: str) -> str:
    return f"projects/{project}/locations/global/workloadIdentityPools"


def _about(wanted: Wanted) -> dict[str, Any]:
    title = (wanted.resource.why or wanted.resource.key)[:_TITLE].strip()
    return {"displayName": title, "description": marks.description(wanted)}
