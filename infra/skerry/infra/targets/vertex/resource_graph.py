"""Builds the resources on Google Cloud from the options of the groups, each with its reason. Pure.

The project has its services; a group, or each replica, has a service account with permissions on the bucket; each
replica has a job. For a store in S3, a role of AWS replaces the permissions on the bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws import s3 as aws_storage
from skerry.infra.clouds.cross_cloud import CrossCloudAccess, ForeignReplica, google_into_aws
from skerry.infra.clouds.google import gcs as google_storage
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.clouds.google.generation_names import name_with_room
from skerry.infra.clouds.google.home import STORE
from skerry.infra.clouds.google.replica_rules import replica_rules
from skerry.infra.clouds.google.service_accounts import ServiceAccount, account_id
from skerry.infra.clouds.google.services import Service, service
from skerry.infra.provision.graph import Ref
from skerry.infra.targets.vertex import requests
from skerry.infra.targets.vertex.options import VertexTarget
from skerry.infra.targets.vertex.replica_sizing import fitting, timeout_s
from skerry.infra.targets.vertex.resources import Job
from skerry.runtime import contract
from skerry.runtime.contract import Contract

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.provision.target import RunContext
    from skerry.infra.spec.model import Replicas, ReplicaSlot

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
    """The account and region of a store in S3."""

    account: str
    region: str


def layout(ground: RunContext, groups: Sequence[Replicas], s3_store: StoreInS3 | None = None) -> tuple[Resource, ...]:
    """Return all resources of these groups, without the run's bucket. s3_store: None for a store in Cloud Storage."""
    resources: dict[str, Resource] = {}
    for group in groups:
        for resource in _Group(ground, group, s3_store).resources():
            resources[resource.address] = resource
    return tuple(resources.values())


def target_of(group: Replicas) -> VertexTarget:
    """Return the group's options. The core gives a target only groups of its kind."""
    if not isinstance(group.target, VertexTarget):
        raise TypeError(f"not a group of vertex: {group.name}")
    return group.target


@dataclass(frozen=True, kw_only=True)
class _Access:
    """The account of some replicas with its permissions. resources: in an order in which they can be created."""

    account: ServiceAccount
    resources: tuple[Resource, ...]
    environment: Mapping[str, Text]


class _Group:
    """Builds the resources of one group, and those that it shares with other groups."""

    def __init__(self, ground: RunContext, group: Replicas, s3_store: StoreInS3 | None) -> None:
        self._ground = ground
        self._group = group
        self._s3_store = s3_store
        self._target = target_of(group)
        self._fitting = fitting(self._target)

    def resources(self) -> Iterator[Resource]:
        """Return them in an order in which they can be created."""
        training = service("aiplatform", "runs the replicas")
        yield from (training, _NAMING)
        seats = self._ground.seats_of(self._group)
        shared: _Access | None = None
        if self._target.one_account:
            shared = self._access(seats, self._group.name)
            yield from shared.resources
        for seat in seats:
            access = shared
            if access is None:
                access = self._access((seat,), None)
                yield from access.resources
            yield self._job(seat, access, training)

    def _access(self, seats: Sequence[ReplicaSlot], group: str | None) -> _Access:
        own = self._target.byo.service_account
        key = seats[0].slot if group is None else f"{self._group.name}-replicas"
        whom = seats[0].slot if group is None else f"all replicas of {self._group.name}"
        # The part of a single replica ends in a number, so `all` is free.
        part = seats[0].slot if group is None else f"{self._group.name}-all"
        account = ServiceAccount(
            key=key,
            name=account_id(self._ground.stem, part) if own is None else own,
            region="",
            why=f"the account of {whom}" if own is None else "your service account of the replicas",
            brought=own is not None,
            after=(_NAMING.address,) if own is None else (),
        )
        replica = ForeignReplica(key=key, part=part, slots=tuple(seat.slot for seat in seats), group=group)
        if self._s3_store is not None:
            aws_access = self._aws_access(account, replica, self._s3_store)
            return _Access(
                account=account, resources=(account, *aws_access.resources), environment=aws_access.environment
            )
        # The user's own account has permissions already.
        given = () if own is not None else (self._binding(account, replica, whom),)
        return _Access(account=account, resources=(account, *given), environment={})

    def _binding(self, account: ServiceAccount, replica: ForeignReplica, whom: str) -> BucketBinding:
        bucket, prefix = self._place()
        return BucketBinding(
            key=account.key,
            name=account.name,
            region="",
            why=f"{whom} may read the run, write own keys; cannot overwrite decisions, commits or receipts",
            after=(f"{google_storage.Bucket.KIND}.{STORE}",),
            bucket=bucket,
            member=account.ref("email", before="serviceAccount:"),
            rules=replica_rules(prefix=prefix, slots=replica.slots, group=replica.group),
        )

    def _aws_access(self, account: ServiceAccount, replica: ForeignReplica, s3_store: StoreInS3) -> CrossCloudAccess:
        _, prefix = self._place()
        room = _LONGEST_ROLE - len(self._ground.stem) - 1
        return google_into_aws(
            self._ground,
            replace(replica, part=name_with_room(replica.part, room)),
            account=s3_store.account,
            bucket_arn=Ref(address=f"{aws_storage.Bucket.KIND}.{STORE}", output="arn"),
            prefix=prefix,
            region=s3_store.region,
            email=account.ref("email"),
            unique_id=account.ref("unique_id"),
        )

    def _place(self) -> tuple[str, str]:
        """Return the bucket and prefix of the run."""
        bucket, _, prefix = self._ground.run_uri.partition("://")[2].partition("/")
        return bucket, prefix

    def _job(self, seat: ReplicaSlot, access: _Access, training: Resource) -> Job:
        target, ground, fitted = self._target, self._ground, self._fitting
        return Job(
            key=seat.slot,
            name=name_with_room(f"{ground.stem}-{seat.slot}", _LONGEST_NAME),
            region=target.region,
            why=f"replica {seat.index} of the run",
            # The settings of a job do not reference its permissions.
            after=(training.address, *(resource.address for resource in access.resources[1:])),
            project=target.project,
            image=ground.image_of(self._group),
            args=("run",),
            environment={**self._environment(seat), **access.environment},
            machine=target.machine,
            accelerator=fitted.accelerator,
            accelerators=fitted.accelerators,
            disk_gb=fitted.disk_gb,
            disk_type=target.disk_type,
            scheduling=target.scheduling,
            max_wait_s=None if target.max_wait is None else int(target.max_wait.total_seconds()),
            timeout_s=timeout_s(ground.hours, target),
            service_account=access.account.ref("email"),
            network=target.byo.network,
            encryption_key=target.byo.key,
        )

    def _environment(self, seat: ReplicaSlot) -> Mapping[str, Text]:
        ground = self._ground
        common = ground.variables(self._group)
        place = Contract(
            run_uri=ground.run_uri, slot=seat.slot, index=seat.index, replicas=len(ground.seats)
        ).environment()
        return {
            **common,
            **place,
            contract.COMMAND: requests.escaped(common[contract.COMMAND]),
            contract.RANKS: str(self._fitting.ranks),
        }
