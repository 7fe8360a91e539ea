"""Builds the roles of a group's replicas and their access to the store, for the targets on AWS. Pure.

A group has one role, or each replica has its own. The store is in S3, where the role's policy grants access, or in
Cloud Storage, which trusts the role.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.policies import Statement, mirror_policy, replica_policy, trust_service
from skerry.infra.clouds.aws.run_bucket_and_image_repository import STORE, place
from skerry.infra.clouds.aws.s3 import Bucket
from skerry.infra.clouds.aws.secret_and_data_policies import input_policy
from skerry.infra.clouds.cross_cloud import CrossCloudAccess, ForeignReplica, aws_into_google, visitor_name
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.provision.graph import Ref

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Account
    from skerry.infra.clouds.cross_cloud import GoogleStore
    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import Replicas, ReplicaSlot

STORE_ADDRESS: Final = f"{Bucket.KIND}.{STORE}"
"""The address of a store in S3."""
GROUP_SUFFIX: Final = "all"
"""The suffix of the role of a whole group; that of a single replica is a number."""
_S3: Final = "s3://"
_GS: Final = "gs://"


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """The roles that a target needs for a group.

    service: of AWS, which starts jobs with the role. part: of the group, in names. one_role: for all replicas. own: the
    user's own role, by name or ARN. own_option: the option that names it.
    """

    service: str
    part: str
    one_role: bool
    own: str | None
    own_option: str


@dataclass(frozen=True, kw_only=True)
class ReplicaRole:
    """A role with its replicas. suffix: of its name. after: its permissions in another cloud, by address."""

    role: Role
    suffix: str
    replicas: Sequence[ReplicaSlot]
    after: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GroupRoles:
    """The roles of a group. resources: in an order in which they can be created. environment: of its jobs."""

    roles: tuple[ReplicaRole, ...]
    resources: tuple[Resource, ...]
    environment: Mapping[str, Text]

    def by_replica(self) -> Iterator[tuple[ReplicaSlot, ReplicaRole]]:
        """Return each replica with its role, in the order of the replicas."""
        for role in self.roles:
            for replica in role.replicas:
                yield replica, role


def is_in_s3(context: RunContext) -> bool:
    """Return whether the run's store is in S3."""
    return context.run_uri.startswith(_S3)


def is_in_google(context: RunContext) -> bool:
    """Return whether the run's store or a mirror is in Cloud Storage, which roles then visit."""
    return context.run_uri.startswith(_GS) or bool(context.mirrors("gs"))


def mirror_policies(context: RunContext) -> tuple[Statement, ...]:
    """Return the permissions of replicas on the run's mirrors in S3."""
    return tuple(
        statement
        for number, mirror in enumerate(context.mirrors("s3"))
        for statement in mirror_policy(
            bucket_arn=Ref(address=f"{Bucket.KIND}.{mirror.key}", output="arn"),
            prefix=mirror.prefix,
            number=number,
            goes_on=mirror.goes_on,
        )
    )


def name_of(text: str) -> str:
    """Return the name in an ARN, or the name itself."""
    return text.rsplit("/", 1)[-1] if text.startswith("arn:") else text


def replicas_by_suffix(context: RunContext, group: Replicas, *, one_role: bool) -> dict[str, Sequence[ReplicaSlot]]:
    """Return the replicas of each role, by the suffix of its name."""
    replicas = context.slots_of(group)
    return (
        {GROUP_SUFFIX: replicas} if one_role else {str(number): (replica,) for number, replica in enumerate(replicas)}
    )


def role_name(context: RunContext, account: Account, part: str, suffix: str) -> str:
    """Return the name of the role with this suffix."""
    name = f"{context.stem}-{part}-{suffix}"
    return visitor_name(name, account.number, account.partition) if is_in_google(context) else name


def replica_roles(
    context: RunContext,
    account: Account,
    group: Replicas,
    options: RoleOptions,
    google_store: GoogleStore | None,
    policies: Mapping[str, tuple[Statement, ...]] | None = None,
) -> GroupRoles:
    """Return the roles of a group.

    google_store: the store and the mirrors in Cloud Storage; None without any. policies: permissions in addition to
    those on the run, for roles that are not the user's own.
    """
    by_suffix = replicas_by_suffix(context, group, one_role=options.one_role)
    roles = {
        suffix: _own_role(group, options.own)
        if options.own is not None
        else _role(context, account, group, options, suffix, replicas, policies or {})
        for suffix, replicas in by_suffix.items()
    }
    access = CrossCloudAccess(resources=(), environment={})
    if google_store is not None:
        guests = [
            (
                role,
                ForeignReplica(
                    key=role.key,
                    part=f"{options.part}-{suffix}",
                    slots=tuple(replica.slot for replica in by_suffix[suffix]),
                    group=group.name if options.one_role else None,
                ),
            )
            for suffix, role in roles.items()
        ]
        access = aws_into_google(
            context,
            guests,
            group=group.name,
            own=options.own_option,
            account=account.number,
            partition=account.partition,
            store=google_store,
        )
    return GroupRoles(
        roles=tuple(
            ReplicaRole(
                role=role,
                suffix=suffix,
                replicas=by_suffix[suffix],
                after=tuple(
                    resource.address
                    for resource in access.resources
                    if isinstance(resource, BucketBinding) and role.address in resource.needs()
                ),
            )
            for suffix, role in roles.items()
        ),
        resources=(*roles.values(), *access.resources),
        environment=access.environment,
    )


def _own_role(group: Replicas, own: str) -> Role:
    return Role(
        key=f"{group.name}-replicas",
        name=name_of(own),
        region="",
        why="your role of the replicas",
        brought=True,
        trust=(),
    )


def _role(
    context: RunContext,
    account: Account,
    group: Replicas,
    options: RoleOptions,
    suffix: str,
    replicas: Sequence[ReplicaSlot],
    policies: Mapping[str, tuple[Statement, ...]],
) -> Role:
    slots = [replica.slot for replica in replicas]
    shared_by = group.name if options.one_role else None
    if is_in_s3(context):
        _, prefix = place(context.run_uri)
        store = Ref(address=STORE_ADDRESS, output="arn")
        run_policy = replica_policy(bucket_arn=store, prefix=prefix, slots=slots, group=shared_by)
        policies = {"run": run_policy, **policies}
    if kept := mirror_policies(context):
        policies = {**policies, "mirrors": kept}
    if read := input_policy(context.inputs(group), account.partition):
        policies = {**policies, "inputs": read}
    whom = slots[0] if shared_by is None else "all replicas of the group"
    return Role(
        key=slots[0] if shared_by is None else f"{shared_by}-replicas",
        name=role_name(context, account, options.part, suffix),
        region="",
        why=f"what {whom} may do: read the run, write own keys; cannot overwrite decisions, commits or receipts",
        trust=(trust_service(options.service, account.number),),
        policies=policies,
    )
