"""IAM roles, the instance profiles that give them to machines, and the service-linked roles of AWS services.

IAM is the same in every region, and eventually consistent: a create waits until the new resource can be read. A role's
trust, inline policies and attached policies are one resource, because none is of use without the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import unquote

from skerry.infra.clouds.aws.policies import (
    INLINE_LIMIT,
    Statement,
    document,
    normal,
    statements_of,
    text_of,
)
from skerry.infra.clouds.aws.tags import PATH, owned_record, owner_of, tag_list, tags_in
from skerry.infra.clouds.handler_helpers import (
    Absent,
    check_owner,
    differing,
    each,
    of,
    text,
    wait_deleted,
    wait_visible,
)
from skerry.infra.provision.graph import Life, Resource, Text, as_json
from skerry.infra.provision.handler import Observed
from skerry.infra.provision.target_and_store_interfaces import is_named_by
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.graph import Json, Value
    from skerry.infra.provision.handler import Desired, StateRecord

# IAM takes only Latin-1 here, and 1,000 characters.
_DESCRIPTION: Final = "skerry: {}"
_PAGE: Final = 1000


@dataclass(frozen=True, kw_only=True)
class Role(Resource):
    """A role. trust: its principals. policies: inline, by name. managed: ARNs. Outputs: name, arn.

    boundary: the ARN of the policy that bounds its rights; "" sets none, and leaves one that others have set.
    """

    KIND: ClassVar[str] = "aws_role"
    FIXED: ClassVar[frozenset[str]] = frozenset({"path"})

    trust: tuple[Statement, ...]
    policies: Mapping[str, tuple[Statement, ...]] = field(default_factory=dict[str, tuple[Statement, ...]])
    managed: tuple[str, ...] = ()
    max_session_s: int = 3600
    boundary: str = ""
    path: str = PATH

    @classmethod
    def rights(cls, name: str, settings: Mapping[str, Json], /) -> Mapping[str, Json]:
        """See Resource.rights."""
        documents = {"trust policy": settings.get("trust"), **_prefixed(settings.get("policies"))}
        rights = {
            f"role {name}: {title}": as_json(document(_statements(statements)))
            for title, statements in documents.items()
            if statements
        }
        managed = as_json(settings.get("managed"))
        attached = {f"role {name}: attached policies": managed} if managed else {}
        bounded = {f"role {name}: permissions boundary": bound} if (bound := settings.get("boundary")) else {}
        return {**rights, **attached, **bounded}


@dataclass(frozen=True, kw_only=True)
class InstanceProfile(Resource):
    """Gives a role to machines. role: its name. Outputs: name, arn."""

    KIND: ClassVar[str] = "aws_instance_profile"

    role: Text


@dataclass(frozen=True, kw_only=True)
class ServiceLinkedRole(Resource):
    """The role of a service in the account, shared by all users. service: batch.amazonaws.com. Outputs: arn."""

    KIND: ClassVar[str] = "aws_service_linked_role"
    LIFE: ClassVar[Life] = Life.SHARED

    service: str


def role_request(desired: Desired) -> dict[str, Any]:
    """Parameters of CreateRole."""
    bound = desired.settings["boundary"]
    return {
        "RoleName": desired.name,
        "Path": desired.settings["path"],
        **({"PermissionsBoundary": bound} if bound else {}),
        "Description": _DESCRIPTION.format(desired.resource.why or desired.resource.address),
        "AssumeRolePolicyDocument": text_of(document(_statements(desired.settings["trust"]))),
        "MaxSessionDuration": desired.settings["max_session_s"],
        "Tags": tag_list(desired.tags),
    }


def policy_requests(desired: Desired) -> list[dict[str, Any]]:
    """Parameters of PutRolePolicy, one for each inline policy. Raises Invalid if IAM would refuse their length."""
    policies = {
        name: text_of(document(_statements(statements)))
        for name, statements in sorted(_mapping(desired.settings["policies"]).items())
    }
    length = sum(map(len, policies.values()))
    if length > INLINE_LIMIT:
        raise Invalid(f"the policies of {desired.resource.address} have {length} characters, IAM takes {INLINE_LIMIT}")
    return [
        {"RoleName": desired.name, "PolicyName": name, "PolicyDocument": policy} for name, policy in policies.items()
    ]


def profile_request(desired: Desired) -> dict[str, Any]:
    """Parameters of CreateInstanceProfile."""
    return {"InstanceProfileName": desired.name, "Path": PATH, "Tags": tag_list(desired.tags)}


class Roles:
    """Creates roles. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. Four calls for each role."""
        return each(self._read, all_desired)

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        try:
            self._call("create_role", **role_request(desired))
        except Conflict:
            seen = self._seen(desired)
            check_owner(seen, desired, "role", "use another by its ARN, or delete it")
            return self.update(desired, differing(desired, seen))
        self._seen(desired)
        return self.update(desired, {"policies", "managed"})

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. New policies are added before old ones are removed."""
        if "trust" in changed:
            trust = role_request(desired)["AssumeRolePolicyDocument"]
            self._call("update_assume_role_policy", RoleName=desired.name, PolicyDocument=trust)
        if "boundary" in changed and (bound := desired.settings["boundary"]):
            # Before the policies, so that no right is in effect without it.
            self._call("put_role_permissions_boundary", RoleName=desired.name, PermissionsBoundary=bound)
        if "max_session_s" in changed:
            self._call("update_role", RoleName=desired.name, MaxSessionDuration=desired.settings["max_session_s"])
        if "policies" in changed:
            self._write_policies(desired)
        if "managed" in changed:
            self._attach(desired)
        return dict(self._seen(desired).outputs)

    def delete(self, record: StateRecord) -> None:
        """See Handler.delete. Its policies first: IAM deletes no role that has any."""
        try:
            for arn in self._attached(record.name):
                self._call("detach_role_policy", RoleName=record.name, PolicyArn=arn)
            for name in self._inline(record.name):
                self._call("delete_role_policy", RoleName=record.name, PolicyName=name)
            self._call("delete_role", RoleName=record.name)
        except Absent:
            return
        wait_deleted(self._aws.clock, f"the role {record.name}", lambda: self._role(record.name))

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Roles have no region."""
        del regions
        # A company's path may be any, and others' roles there may not be read.
        roles = self._aws.pages("iam", "", "list_roles", "Roles", PaginationConfig={"PageSize": _PAGE})
        names = [str(role["RoleName"]) for role in roles if role["Path"] == PATH or is_named_by(run, role["RoleName"])]
        for role in each(self._role, names):
            tags = {} if role is None else tags_in(role.get("Tags", []))
            if role is not None and owner_of(tags) == run:
                yield owned_record(Role, name=role["RoleName"], region="", tags=tags, outputs=_outputs(role))

    def _role(self, name: str) -> dict[str, Any] | None:
        try:
            return self._call("get_role", RoleName=name)["Role"]
        except Absent:
            return None

    def _read(self, desired: Desired) -> Observed | None:
        try:
            role = self._call("get_role", RoleName=desired.name)["Role"]
            inline = {
                name: _policy(self._call("get_role_policy", RoleName=desired.name, PolicyName=name))
                for name in self._inline(desired.name)
            }
            attached = self._attached(desired.name)
        except Absent:
            return None
        return Observed(
            outputs=_outputs(role),
            settings={
                "region": "",
                "trust": _aligned(statements_of(_parsed(role["AssumeRolePolicyDocument"])), desired.settings["trust"]),
                "policies": {
                    name: _aligned(statements, _mapping(desired.settings["policies"]).get(name))
                    for name, statements in inline.items()
                },
                "managed": _aligned(attached, desired.settings["managed"]),
                "max_session_s": int(role.get("MaxSessionDuration", 3600)),
                "boundary": _bound(role) if desired.settings["boundary"] else "",
                "path": str(role["Path"]),
            },
            owner=owner_of(tags_in(role.get("Tags", []))),
            kept=() if desired.settings["boundary"] else _boundary(role),
        )

    def _seen(self, desired: Desired) -> Observed:
        return wait_visible(self._aws.clock, f"the role {desired.name}", lambda: self._read(desired))

    def _write_policies(self, desired: Desired) -> None:
        requests = policy_requests(desired)
        for request in requests:
            self._call("put_role_policy", **request)
        for name in set(self._inline(desired.name)) - {request["PolicyName"] for request in requests}:
            self._call("delete_role_policy", RoleName=desired.name, PolicyName=name)

    def _attach(self, desired: Desired) -> None:
        managed, attached = set(map(str, _sequence(desired.settings["managed"]))), set(self._attached(desired.name))
        for arn in sorted(managed - attached):
            self._call("attach_role_policy", RoleName=desired.name, PolicyArn=arn)
        for arn in sorted(attached - managed):
            self._call("detach_role_policy", RoleName=desired.name, PolicyArn=arn)

    def _inline(self, name: str) -> list[str]:
        # At most ten: one page.
        return [str(policy) for policy in self._call("list_role_policies", RoleName=name)["PolicyNames"]]

    def _attached(self, name: str) -> list[str]:
        pages = self._aws.pages("iam", "", "list_attached_role_policies", "AttachedPolicies", RoleName=name)
        return sorted(str(policy["PolicyArn"]) for policy in pages)

    def _call(self, operation: str, **parameters: object) -> dict[str, Any]:
        return self._aws.call("iam", "", operation, **parameters)


class InstanceProfiles:
    """Creates instance profiles. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read."""
        return each(self._read, all_desired)

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        try:
            self._call("create_instance_profile", **profile_request(desired))
        except Conflict:
            check_owner(self._seen(desired), desired, "instance profile", "use another, or delete it")
        return self.update(desired, {"role"})

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. A profile holds one role: the old one is removed first."""
        role = text(desired.settings["role"])
        seen = self._seen(desired)
        if "role" in changed and seen.settings["role"] != role:
            if former := seen.settings["role"]:
                self._call("remove_role_from_instance_profile", InstanceProfileName=desired.name, RoleName=former)
            self._call("add_role_to_instance_profile", InstanceProfileName=desired.name, RoleName=role)
        return dict(self._seen(desired).outputs)

    def delete(self, record: StateRecord) -> None:
        """See Handler.delete."""
        try:
            profile = self._profile(record.name)
            for role in profile["Roles"]:
                self._call(
                    "remove_role_from_instance_profile",
                    InstanceProfileName=record.name,
                    RoleName=role["RoleName"],
                )
            self._call("delete_instance_profile", InstanceProfileName=record.name)
        except Absent:
            return

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Profiles have no region."""
        del regions
        for profile in self._aws.pages("iam", "", "list_instance_profiles", "InstanceProfiles", PathPrefix=PATH):
            name = str(profile["InstanceProfileName"])
            try:
                tags = tags_in(self._profile(name).get("Tags", []))
            except Absent:
                continue
            if owner_of(tags) == run:
                outputs = {"name": name, "arn": str(profile["Arn"])}
                yield owned_record(InstanceProfile, name=name, region="", tags=tags, outputs=outputs)

    def _read(self, desired: Desired) -> Observed | None:
        try:
            profile = self._profile(desired.name)
        except Absent:
            return None
        roles = [str(role["RoleName"]) for role in profile["Roles"]]
        return Observed(
            outputs={"name": desired.name, "arn": str(profile["Arn"])},
            settings={"region": "", "role": roles[0] if roles else ""},
            owner=owner_of(tags_in(profile.get("Tags", []))),
        )

    def _seen(self, desired: Desired) -> Observed:
        return wait_visible(self._aws.clock, f"the instance profile {desired.name}", lambda: self._read(desired))

    def _profile(self, name: str) -> dict[str, Any]:
        return self._call("get_instance_profile", InstanceProfileName=name)["InstanceProfile"]

    def _call(self, operation: str, **parameters: object) -> dict[str, Any]:
        return self._aws.call("iam", "", operation, **parameters)


class ServiceLinkedRoles:
    """Creates missing roles of AWS services. They have no tags and no owner. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. By path, because only the service knows the spelling of the name."""
        return each(self._read, all_desired)

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        if (seen := self._read(desired)) is None:
            service = of(ServiceLinkedRole, desired).service
            try:
                self._aws.call("iam", "", "create_service_linked_role", AWSServiceName=service)
            except (Conflict, Invalid):
                # "has been taken": another process created it meanwhile.
                if self._read(desired) is None:
                    raise
            seen = wait_visible(self._aws.clock, f"the role of {service}", lambda: self._read(desired))
        return dict(seen.outputs)

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. It has no settings that change."""
        del changed
        return self.create(desired)

    def delete(self, record: StateRecord) -> None:
        """Keeps it: other users of the account need it."""

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Never a run's own."""
        del run, regions
        return ()

    def _read(self, desired: Desired) -> Observed | None:
        service = of(ServiceLinkedRole, desired).service
        path = f"/aws-service-role/{service}/"
        for role in self._aws.pages("iam", "", "list_roles", "Roles", PathPrefix=path):
            return Observed(outputs={"arn": str(role["Arn"])}, settings={"region": "", "service": service}, owner=None)
        return None


def _outputs(role: Mapping[str, Any]) -> dict[str, str]:
    return {"name": str(role["RoleName"]), "arn": str(role["Arn"])}


def _bound(role: Mapping[str, Any]) -> str:
    return str(role.get("PermissionsBoundary", {}).get("PermissionsBoundaryArn", ""))


def _boundary(role: Mapping[str, Any]) -> tuple[str, ...]:
    """A note for a permissions boundary: a rule of the account, without which the role would have more rights."""
    if not (arn := _bound(role)):
        return ()
    text = f"the role {role['RoleName']} has the permissions boundary {arn}, which the spec does not name; this stays"
    return (
        f"{text}, because without it the role would have more rights; rights that it denies are missing to the jobs",
    )


def _policy(response: Mapping[str, Any]) -> list[dict[str, Json]]:
    return statements_of(_parsed(response["PolicyDocument"]))


def _parsed(policy: Json) -> Json:
    # boto3 decodes URL encoding and JSON; other clients of the API do not.
    return json.loads(unquote(policy)) if isinstance(policy, str) else policy


def _aligned(jsons: Sequence[Json], value: Value) -> Json:
    """The observed value; the desired one's own spelling if both mean the same."""
    return as_json(value) if normal(jsons) == normal(as_json(value)) else list(jsons)


def _prefixed(policies: Json) -> dict[str, Json]:
    return {f"policy {name}": policy for name, policy in policies.items()} if isinstance(policies, Mapping) else {}


def _statements(value: Value) -> list[Mapping[str, Value]]:
    return [statement for statement in _sequence(value) if isinstance(statement, Mapping)]


def _sequence(value: Value) -> Sequence[Value]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _mapping(value: Value) -> Mapping[str, Value]:
    return value if isinstance(value, Mapping) else {}
