"""Roles, the profiles that give them to machines, and the roles that AWS's services keep for themselves.

IAM is the same in every region, and eventually consistent: a create waits until what it made can be read. A role's
trust, its inline policies and what is attached to it are one resource, since none is of use without the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import unquote

from skerry.infra.clouds.aws.handling import PATH, found, owner_of, tag_list, tags_in
from skerry.infra.clouds.aws.policies import (
    INLINE_LIMIT,
    Statement,
    document,
    normal,
    statements_of,
    text_of,
    told,
)
from skerry.infra.clouds.handling import VISIBLE_S, Absent, check_owner, differing, each, of, text, waited
from skerry.infra.graph import Grant, Life, Resource, Text, as_json
from skerry.infra.handler import Seen
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.graph import Json, Value
    from skerry.infra.handler import Made, Wanted

# IAM takes only Latin-1 here, and 1,000 characters.
_DESCRIPTION: Final = "skerry: {}"


@dataclass(frozen=True, kw_only=True)
class Role(Resource):
    """Who may act as it, and what it may do. policies: inline, by name. managed: ARNs. Outputs: name, arn."""

    KIND: ClassVar[str] = "aws_role"

    trust: tuple[Statement, ...]
    policies: Mapping[str, tuple[Statement, ...]] = field(default_factory=dict[str, tuple[Statement, ...]])
    managed: tuple[str, ...] = ()
    max_session_s: int = 3600

    def grants(self) -> tuple[Grant, ...]:
        """Who may act as it, and all that it may do."""
        who = f"role {self.name}"
        trusted = [
            Grant(who=str(name), may="act as", on=who)
            for statement in self.trust
            for names in (statement.principal or {}).values()
            for name in names
        ]
        attached = [Grant(who=who, may="do all that the policy allows", on=arn) for arn in self.managed]
        inline = [grant for statements in self.policies.values() for grant in told(who, statements)]
        return (*trusted, *inline, *attached)


@dataclass(frozen=True, kw_only=True)
class InstanceProfile(Resource):
    """What gives a role to machines. role: its name. Outputs: name, arn."""

    KIND: ClassVar[str] = "aws_instance_profile"

    role: Text


@dataclass(frozen=True, kw_only=True)
class ServiceLinkedRole(Resource):
    """The role that a service keeps in the account for all who use it. service: batch.amazonaws.com. Outputs: arn."""

    KIND: ClassVar[str] = "aws_service_linked_role"
    LIFE: ClassVar[Life] = Life.SHARED

    service: str


def role_request(wanted: Wanted) -> dict[str, Any]:
    """Parameters of CreateRole."""
    return {
        "RoleName": wanted.name,
        "Path": PATH,
        "Description": _DESCRIPTION.format(wanted.resource.why or wanted.resource.address),
        "AssumeRolePolicyDocument": text_of(document(_statements(wanted.settings["trust"]))),
        "MaxSessionDuration": wanted.settings["max_session_s"],
        "Tags": tag_list(wanted.tags),
    }


def policy_requests(wanted: Wanted) -> list[dict[str, Any]]:
    """Parameters of PutRolePolicy, one for each inline policy. Raises Invalid if IAM would refuse their length."""
    policies = {
        name: text_of(document(_statements(statements)))
        for name, statements in sorted(_mapping(wanted.settings["policies"]).items())
    }
    length = sum(map(len, policies.values()))
    if length > INLINE_LIMIT:
        raise Invalid(f"the policies of {wanted.resource.address} have {length} characters, IAM takes {INLINE_LIMIT}")
    return [
        {"RoleName": wanted.name, "PolicyName": name, "PolicyDocument": policy} for name, policy in policies.items()
    ]


def profile_request(wanted: Wanted) -> dict[str, Any]:
    """Parameters of CreateInstanceProfile."""
    return {"InstanceProfileName": wanted.name, "Path": PATH, "Tags": tag_list(wanted.tags)}


class Roles:
    """Makes roles. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read. Four calls for each role."""
        return each(self._read, wanted)

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create."""
        try:
            self._call("create_role", **role_request(wanted))
        except Conflict:
            seen = self._seen(wanted)
            check_owner(seen, wanted, "role", "bring another by its ARN, or delete it")
            return self.update(wanted, differing(wanted, seen))
        self._seen(wanted)
        return self.update(wanted, {"policies", "managed"})

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. New rights are given before old ones are taken."""
        if "trust" in changed:
            trust = role_request(wanted)["AssumeRolePolicyDocument"]
            self._call("update_assume_role_policy", RoleName=wanted.name, PolicyDocument=trust)
        if "max_session_s" in changed:
            self._call("update_role", RoleName=wanted.name, MaxSessionDuration=wanted.settings["max_session_s"])
        if "policies" in changed:
            self._write_policies(wanted)
        if "managed" in changed:
            self._attach(wanted)
        return dict(self._seen(wanted).outputs)

    def delete(self, made: Made) -> None:
        """See Handler.delete. What hangs on it goes first: IAM deletes no role that still has policies."""
        try:
            for arn in self._attached(made.name):
                self._call("detach_role_policy", RoleName=made.name, PolicyArn=arn)
            for name in self._inline(made.name):
                self._call("delete_role_policy", RoleName=made.name, PolicyName=name)
            self._call("delete_role", RoleName=made.name)
        except Absent:
            return
        self._until_gone("get_role", RoleName=made.name)

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned. Roles have no region."""
        del regions
        roles = list(self._aws.pages("iam", "", "list_roles", "Roles", PathPrefix=PATH))
        found_here = each(self._made, [str(role["RoleName"]) for role in roles])
        return [made for owner, made in found_here if owner == run and made is not None]

    def _made(self, name: str) -> tuple[str | None, Made | None]:
        try:
            role = self._call("get_role", RoleName=name)["Role"]
        except Absent:
            return None, None
        tags = tags_in(role.get("Tags", []))
        return owner_of(tags), found(Role, name=name, region="", tags=tags, outputs=_outputs(role))

    def _read(self, wanted: Wanted) -> Seen | None:
        try:
            role = self._call("get_role", RoleName=wanted.name)["Role"]
            inline = {
                name: _policy(self._call("get_role_policy", RoleName=wanted.name, PolicyName=name))
                for name in self._inline(wanted.name)
            }
            attached = self._attached(wanted.name)
        except Absent:
            return None
        return Seen(
            outputs=_outputs(role),
            settings={
                "region": "",
                "trust": _as_wanted(statements_of(_parsed(role["AssumeRolePolicyDocument"])), wanted.settings["trust"]),
                "policies": {
                    name: _as_wanted(statements, _mapping(wanted.settings["policies"]).get(name))
                    for name, statements in inline.items()
                },
                "managed": _as_wanted(attached, wanted.settings["managed"]),
                "max_session_s": int(role.get("MaxSessionDuration", 3600)),
            },
            owner=owner_of(tags_in(role.get("Tags", []))),
        )

    def _seen(self, wanted: Wanted) -> Seen:
        deadline = self._aws.clock.now() + VISIBLE_S
        return waited(self._aws.clock, f"the role {wanted.name} can be read", deadline, lambda: self._read(wanted))

    def _write_policies(self, wanted: Wanted) -> None:
        requests = policy_requests(wanted)
        for request in requests:
            self._call("put_role_policy", **request)
        for name in set(self._inline(wanted.name)) - {request["PolicyName"] for request in requests}:
            self._call("delete_role_policy", RoleName=wanted.name, PolicyName=name)

    def _attach(self, wanted: Wanted) -> None:
        managed, there = set(map(str, _sequence(wanted.settings["managed"]))), set(self._attached(wanted.name))
        for arn in sorted(managed - there):
            self._call("attach_role_policy", RoleName=wanted.name, PolicyArn=arn)
        for arn in sorted(there - managed):
            self._call("detach_role_policy", RoleName=wanted.name, PolicyArn=arn)

    def _inline(self, name: str) -> list[str]:
        # A role has room for ten such policies at most: one page.
        return [str(policy) for policy in self._call("list_role_policies", RoleName=name)["PolicyNames"]]

    def _attached(self, name: str) -> list[str]:
        pages = self._aws.pages("iam", "", "list_attached_role_policies", "AttachedPolicies", RoleName=name)
        return sorted(str(policy["PolicyArn"]) for policy in pages)

    def _until_gone(self, operation: str, **named: str) -> None:
        def gone() -> bool | None:
            try:
                self._call(operation, **named)
            except Absent:
                return True
            return None

        name = next(iter(named.values()))
        waited(self._aws.clock, f"the role {name} is gone", self._aws.clock.now() + VISIBLE_S, gone)

    def _call(self, operation: str, **parameters: object) -> dict[str, Any]:
        return self._aws.call("iam", "", operation, **parameters)


class InstanceProfiles:
    """Makes instance profiles. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read."""
        return each(self._read, wanted)

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create."""
        try:
            self._call("create_instance_profile", **profile_request(wanted))
        except Conflict:
            check_owner(self._seen(wanted), wanted, "instance profile", "bring another, or delete it")
        return self.update(wanted, {"role"})

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. A profile holds one role: the old one leaves first."""
        role = text(wanted.settings["role"])
        seen = self._seen(wanted)
        if "role" in changed and seen.settings["role"] != role:
            if there := seen.settings["role"]:
                self._call("remove_role_from_instance_profile", InstanceProfileName=wanted.name, RoleName=there)
            self._call("add_role_to_instance_profile", InstanceProfileName=wanted.name, RoleName=role)
        return dict(self._seen(wanted).outputs)

    def delete(self, made: Made) -> None:
        """See Handler.delete."""
        try:
            profile = self._profile(made.name)
            for role in profile["Roles"]:
                self._call(
                    "remove_role_from_instance_profile", InstanceProfileName=made.name, RoleName=role["RoleName"]
                )
            self._call("delete_instance_profile", InstanceProfileName=made.name)
        except Absent:
            return

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned. Profiles have no region."""
        del regions
        for profile in self._aws.pages("iam", "", "list_instance_profiles", "InstanceProfiles", PathPrefix=PATH):
            name = str(profile["InstanceProfileName"])
            try:
                tags = tags_in(self._profile(name).get("Tags", []))
            except Absent:
                continue
            if owner_of(tags) == run:
                outputs = {"name": name, "arn": str(profile["Arn"])}
                yield found(InstanceProfile, name=name, region="", tags=tags, outputs=outputs)

    def _read(self, wanted: Wanted) -> Seen | None:
        try:
            profile = self._profile(wanted.name)
        except Absent:
            return None
        roles = [str(role["RoleName"]) for role in profile["Roles"]]
        return Seen(
            outputs={"name": wanted.name, "arn": str(profile["Arn"])},
            settings={"region": "", "role": roles[0] if roles else ""},
            owner=owner_of(tags_in(profile.get("Tags", []))),
        )

    def _seen(self, wanted: Wanted) -> Seen:
        deadline = self._aws.clock.now() + VISIBLE_S
        what = f"the instance profile {wanted.name} can be read"
        return waited(self._aws.clock, what, deadline, lambda: self._read(wanted))

    def _profile(self, name: str) -> dict[str, Any]:
        return self._call("get_instance_profile", InstanceProfileName=name)["InstanceProfile"]

    def _call(self, operation: str, **parameters: object) -> dict[str, Any]:
        return self._aws.call("iam", "", operation, **parameters)


class ServiceLinkedRoles:
    """Makes the roles of AWS's services where they are missing. They have no tags: nobody owns them. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read. By path, because only the service knows how it spells the name."""
        return each(self._read, wanted)

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create."""
        if (seen := self._read(wanted)) is None:
            try:
                self._aws.call(
                    "iam", "", "create_service_linked_role", AWSServiceName=of(ServiceLinkedRole, wanted).service
                )
            except (Conflict, Invalid):
                # "has been taken": somebody was faster.
                if self._read(wanted) is None:
                    raise
            deadline = self._aws.clock.now() + VISIBLE_S
            what = f"the role of {of(ServiceLinkedRole, wanted).service} can be read"
            seen = waited(self._aws.clock, what, deadline, lambda: self._read(wanted))
        return dict(seen.outputs)

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. There is nothing to change."""
        del changed
        return self.create(wanted)

    def delete(self, made: Made) -> None:
        """Leave it: others in the account use it."""

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """Never a run's own."""
        del run, regions
        return ()

    def _read(self, wanted: Wanted) -> Seen | None:
        service = of(ServiceLinkedRole, wanted).service
        path = f"/aws-service-role/{service}/"
        for role in self._aws.pages("iam", "", "list_roles", "Roles", PathPrefix=path):
            return Seen(outputs={"arn": str(role["Arn"])}, settings={"region": "", "service": service}, owner=None)
        return None


def _outputs(role: Mapping[str, Any]) -> dict[str, str]:
    return {"name": str(role["RoleName"]), "arn": str(role["Arn"])}


def _policy(told: Mapping[str, Any]) -> list[dict[str, Json]]:
    return statements_of(_parsed(told["PolicyDocument"]))


def _parsed(policy: Json) -> Json:
    # boto3 has taken off the URL encoding and the JSON; other clients of the same API leave both.
    return json.loads(unquote(policy)) if isinstance(policy, str) else policy


def _as_wanted(seen: Sequence[Json], wanted: Value) -> Json:
    """What was seen, in the words of what was wanted if it says the same."""
    return as_json(wanted) if normal(seen) == normal(as_json(wanted)) else list(seen)


def _statements(value: Value) -> list[Mapping[str, Value]]:
    return [statement for statement in _sequence(value) if isinstance(statement, Mapping)]


def _sequence(value: Value) -> Sequence[Value]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _mapping(value: Value) -> Mapping[str, Value]:
    return value if isinstance(value, Mapping) else {}
