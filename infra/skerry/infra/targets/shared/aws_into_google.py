"""Gives the roles of replicas on AWS access to a store in Cloud Storage, for the targets on AWS. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.clouds.cross_cloud import CrossCloudAccess, ForeignReplica, aws_into_google

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.clouds.aws.iam import Role
    from skerry.infra.clouds.aws.session import Account
    from skerry.infra.clouds.cross_cloud import GoogleStore
    from skerry.infra.provision.target import RunContext
    from skerry.infra.spec.model import Replicas, ReplicaSlot


def google_access(
    ground: RunContext,
    account: Account,
    group: Replicas,
    store: GoogleStore | None,
    roles: Sequence[tuple[Role, str, Sequence[ReplicaSlot]]],
    *,
    byo: str,
    shared: bool,
) -> CrossCloudAccess:
    """Return the resources and variables with which these roles reach the store; nothing for a store in S3.

    roles: each with its part of resource names and its replicas. byo: the option with the user's own role. shared:
    the group has one role.
    """
    if store is None:
        return CrossCloudAccess(resources=(), environment={})
    replicas = [
        (
            role,
            ForeignReplica(
                key=role.key,
                part=part,
                slots=tuple(seat.slot for seat in seats),
                group=group.name if shared else None,
            ),
        )
        for role, part, seats in roles
    ]
    return aws_into_google(
        ground,
        replicas,
        group=group.name,
        own=byo,
        account=account.number,
        partition=account.partition,
        number=store.number,
        bucket=store.bucket,
        prefix=store.prefix,
    )
