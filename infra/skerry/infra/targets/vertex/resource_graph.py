"""Builds the resources on Google Cloud from the options of the groups, each with its reason. Pure.

The project has its services; a group, or each replica, has a service account with permissions on the bucket; each
replica has a job. For a store in S3, a role of AWS replaces the permissions on the bucket.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws import s3 as aws_storage
from skerry.infra.clouds.cross_cloud import CrossCloudAccess, ForeignReplica, google_into_aws
from skerry.infra.clouds.google import gcs as google_storage
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.clouds.google.generation_names import name_with_room
from skerry.infra.clouds.google.replica_rules import mirror_rules, replica_rules
from skerry.infra.clouds.google.run_bucket_and_image_repository import STORE
from skerry.infra.clouds.google.secret_and_data_bindings import Reader, input_bindings
from skerry.infra.clouds.google.service_accounts import ServiceAccount, account_id
from skerry.infra.clouds.google.services import Service, service
from skerry.infra.provision.graph import Ref
from skerry.infra.targets.shared.aws_replica_roles import is_in_s3, mirror_policies
from skerry.infra.targets.shared.revive_option import revival_text
from skerry.infra.targets.vertex import requests
from skerry.infra.targets.vertex.accelerators_disk_time_and_quota import fitting, timeout_s
from skerry.infra.targets.vertex.options import VertexTarget
from skerry.infra.targets.vertex.resource_types import Job
from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import Replicas, ReplicaSlot

_STORE: Final = f"{google_storage.Bucket.KIND}.{STORE}"
# A display name may have 128 characters, 34 of the run, and the part of the replica.
_LONGEST_NAME: Final = 100
# The name of a role of AWS.
_LONGEST_ROLE: Final = 64
_NAMING: Final = Service(
    key="accounts",
    name="iam.googleapis.com",
    region="",
    why="manages the replicas' accounts; stays enabled, because the whole project uses it",
)


@dataclass(frozen=True, kw_only=True)
class StoreInS3:
    """The account of a store or of mirrors in S3, and the region of the first of them."""

    account: str
    region: Text


def build_resources(
    context: RunContext, groups: Sequence[Replicas], s3_store: StoreInS3 | None = None
) -> tuple[Resource, ...]:
    """Return all resources of these groups, without the run's bucket. s3_store: None for a store in Cloud Storage."""
    built = (resource for group in groups for resource in _Group(context, group, s3_store).resources())
    return tuple({resource.address: resource for resource in built}.values())


@dataclass(frozen=True, kw_only=True)
class _Access:
    """The account of some replicas with its permissions. resources: in an order in which they can be created."""

    account: ServiceAccount
    resources: tuple[Resource, ...]
    environment: Mapping[str, Text]


class _Group:
    """Builds the resources of one group, and those that it shares with other groups."""

    def __init__(self, context: RunContext, group: Replicas, s3_store: StoreInS3 | None) -> None:
        self._context = context
        self._group = group
        self._s3_store = s3_store
        self._target = VertexTarget.of(group)

    def resources(self) -> Iterator[Resource]:
        """Return them in an order in which they can be created."""
        training = service("aiplatform", "runs the replicas")
        yield from (training, _NAMING)
        replicas = self._context.slots_of(self._group)
        shared: _Access | None = None
        if self._target.one_account:
            shared = self._access(replicas, self._group.name)
            yield from shared.resources
        for replica in replicas:
            access = shared
            if access is None:
                access = self._access((replica,), None)
                yield from access.resources
            yield self._job(replica, access, training)

    def _access(self, replicas: Sequence[ReplicaSlot], group: str | None) -> _Access:
        own = self._target.byo.service_account
        key = replicas[0].slot if group is None else f"{self._group.name}-replicas"
        principal = replicas[0].slot if group is None else f"all replicas of {self._group.name}"
        # The part of a single replica ends in a number, so `all` is free.
        part = replicas[0].slot if group is None else f"{self._group.name}-all"
        account = ServiceAccount(
            key=key,
            name=account_id(self._context.stem, part) if own is None else own,
            region="",
            why=f"the account of {principal}" if own is None else "your service account of the replicas",
            brought=own is not None,
            after=(_NAMING.address,) if own is None else (),
        )
        guest = ForeignReplica(key=key, part=part, slots=tuple(replica.slot for replica in replicas), group=group)
        # The user's own account has permissions already.
        read = () if own is not None else self._input_bindings(account, principal)
        given = () if own is not None else tuple(self._bindings(account, guest, principal))
        if self._s3_store is None:
            return _Access(account=account, resources=(account, *given, *read), environment={})
        aws_access = self._aws_access(account, guest, self._s3_store)
        return _Access(
            account=account,
            resources=(account, *given, *read, *aws_access.resources),
            environment={**aws_access.environment, **self._context.bucket_regions(aws_storage.Bucket.KIND)},
        )

    def _input_bindings(self, account: ServiceAccount, principal: str) -> tuple[Resource, ...]:
        store = None if self._is_in_s3 else (_STORE, self._place()[0])
        member = account.ref("email", before="serviceAccount:")
        reader = Reader(key=account.key, name=account.name, member=member, text=principal)
        return tuple(input_bindings(self._context.inputs(self._group), reader, store))

    def _bindings(self, account: ServiceAccount, guest: ForeignReplica, principal: str) -> Iterator[BucketBinding]:
        """Return the account's permissions in the store and in the mirrors, as far as they are in Cloud Storage."""
        bucket, prefix = self._place()
        member = account.ref("email", before="serviceAccount:")
        if not self._is_in_s3:
            yield BucketBinding(
                key=account.key,
                name=account.name,
                region="",
                why=f"{principal} may read the run, write own keys; cannot overwrite decisions, commits or receipts",
                after=(_STORE,),
                bucket=bucket,
                member=member,
                rules=replica_rules(prefix=prefix, slots=guest.slots, group=guest.group),
            )
        for mirror in self._context.mirrors("gs"):
            yield BucketBinding(
                key=f"{mirror.key}-{account.key}",
                name=account.name,
                region="",
                why=f"{principal} may keep the mirror in {mirror.bucket}; cannot overwrite its objects",
                after=(f"{google_storage.Bucket.KIND}.{mirror.key}",),
                bucket=mirror.bucket,
                member=member,
                rules=mirror_rules(mirror.prefix, goes_on=mirror.goes_on),
            )

    def _aws_access(self, account: ServiceAccount, guest: ForeignReplica, s3_store: StoreInS3) -> CrossCloudAccess:
        _, prefix = self._place()
        room = _LONGEST_ROLE - len(self._context.stem) - 1
        return google_into_aws(
            self._context,
            replace(guest, part=name_with_room(guest.part, room)),
            account=s3_store.account,
            bucket_arn=Ref(address=f"{aws_storage.Bucket.KIND}.{STORE}", output="arn") if self._is_in_s3 else None,
            prefix=prefix,
            mirrors=mirror_policies(self._context),
            region=s3_store.region,
            email=account.ref("email"),
            unique_id=account.ref("unique_id"),
        )

    @property
    def _is_in_s3(self) -> bool:
        """Return whether the store is in S3; mirrors may be there without it."""
        return is_in_s3(self._context)

    def _place(self) -> tuple[str, str]:
        """Return the bucket and prefix of the run."""
        bucket, _, prefix = self._context.run_uri.partition("://")[2].partition("/")
        return bucket, prefix

    def _job(self, replica: ReplicaSlot, access: _Access, training: Resource) -> Job:
        variables = {**self._context.variables(self._group), **access.environment}
        if self._target.revive is not None:
            restarts = self._context.spec.faults.restarts
            variables[contract.REVIVE] = revival_text(self._target.revive_after, restarts)
        return replace(
            job_of(self._context, self._group, replica, variables, access.account.ref("email")),
            # The settings of a job do not reference its permissions.
            after=(training.address, *(resource.address for resource in access.resources[1:])),
        )


def job_of(
    context: RunContext, group: Replicas, replica: ReplicaSlot, variables: Mapping[str, Text], account: Text
) -> Job:
    """Return the job of a replica. variables: of every replica of its group. account: of the service, by address."""
    target = VertexTarget.of(group)
    fitted = fitting(target)
    return Job(
        key=replica.slot,
        name=name_with_room(f"{context.stem}-{replica.slot}", _LONGEST_NAME),
        region=target.region,
        why=f"replica {replica.index} of the run",
        project=target.project,
        image=context.image_of(group),
        args=("run",),
        environment={
            contract.RANKS: str(fitted.ranks),
            **variables,
            contract.SLOT: replica.slot,
            contract.COMMAND: requests.escaped(json.dumps(context.spec.code.command)),
        },
        machine=target.machine,
        accelerator=fitted.accelerator,
        accelerators=fitted.accelerators,
        disk_gb=fitted.disk_gb,
        disk_type=target.disk_type,
        scheduling=target.scheduling,
        max_wait_s=None if target.max_wait is None else int(target.max_wait.total_seconds()),
        timeout_s=timeout_s(context.hours, target),
        service_account=account,
        network=target.byo.network,
        encryption_key=target.byo.key,
    )
