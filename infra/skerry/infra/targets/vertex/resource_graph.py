"""From options to resources: what each group of replicas needs on Google Cloud, and why. Pure.

Services are the project's; a service account and its rights in the bucket are a group's, or a replica's own; jobs are
replicas'. Where the store is in S3, a role there takes the place of the rights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws import storage as aws_storage
from skerry.infra.clouds.crossing import Crossing, Guest, google_into_aws
from skerry.infra.clouds.google import storage as google_storage
from skerry.infra.clouds.google.bindings import BucketBinding
from skerry.infra.clouds.google.handling import name_with_room
from skerry.infra.clouds.google.home import STORE
from skerry.infra.clouds.google.identity import ServiceAccount, account_id
from skerry.infra.clouds.google.policies import replica_rules
from skerry.infra.clouds.google.services import Service, service
from skerry.infra.graph import Ref
from skerry.infra.placement import VertexTarget
from skerry.infra.targets.vertex import requests
from skerry.infra.targets.vertex.machines import fitting, timeout_s
from skerry.infra.targets.vertex.resources import Job
from skerry.runtime import contract
from skerry.runtime.contract import Contract

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.graph import Resource, Text
    from skerry.infra.spec import Replicas, Seat
    from skerry.infra.target import Ground

# A display name may have 128 characters, and people read it: 34 of the run, and a replica's own part.
_LONGEST_NAME: Final = 100
# Of a role of AWS.
_LONGEST_ROLE: Final = 64
_NAMING: Final = Service(
    key="accounts",
    name="iam.googleapis.com",
    region="",
    why="keeps the replicas' accounts; stays on, for the whole project uses it",
)


@dataclass(frozen=True, kw_only=True)
class Abroad:
    """A store in S3: whose account it is in, and in which region."""

    account: str
    region: str


def layout(ground: Ground, groups: Sequence[Replicas], abroad: Abroad | None = None) -> tuple[Resource, ...]:
    """Everything that these groups need, besides the run's bucket. abroad: None for a store in Cloud Storage."""
    found: dict[str, Resource] = {}
    for group in groups:
        for resource in _Group(ground, group, abroad).resources():
            found[resource.address] = resource
    return tuple(found.values())


def target_of(group: Replicas) -> VertexTarget:
    """The group's options. The core gives a target only groups of its own kind."""
    if not isinstance(group.target, VertexTarget):
        raise TypeError(f"not a group of vertex: {group.name}")
    return group.target


@dataclass(frozen=True, kw_only=True)
class _Rights:
    """What lets some replicas work. resources: in an order in which they can be made. environment: for their jobs."""

    account: ServiceAccount
    resources: tuple[Resource, ...]
    environment: Mapping[str, Text]


class _Group:
    """The resources of one group, and of what it shares with others."""

    def __init__(self, ground: Ground, group: Replicas, abroad: Abroad | None) -> None:
        self._ground = ground
        self._group = group
        self._abroad = abroad
        self._target = target_of(group)
        self._fitting = fitting(self._target)

    def resources(self) -> Iterator[Resource]:
        """In an order in which they can be made."""
        training = service("aiplatform", "runs the replicas")
        yield from (training, _NAMING)
        seats = self._ground.seats_of(self._group)
        shared: _Rights | None = None
        if self._target.one_account:
            shared = self._rights(seats, self._group.name)
            yield from shared.resources
        for seat in seats:
            rights = shared
            if rights is None:
                rights = self._rights((seat,), None)
                yield from rights.resources
            yield self._job(seat, rights, training)

    def _rights(self, seats: Sequence[Seat], group: str | None) -> _Rights:
        own = self._target.byo.service_account
        key = seats[0].slot if group is None else f"{self._group.name}-replicas"
        who = seats[0].slot if group is None else f"all replicas of {self._group.name}"
        # Nothing of a single replica is called so: its names end in a number.
        part = seats[0].slot if group is None else f"{self._group.name}-all"
        account = ServiceAccount(
            key=key,
            name=account_id(self._ground.stem, part) if own is None else own,
            region="",
            why=f"the account of {who}" if own is None else "your service account of the replicas",
            brought=own is not None,
            after=(_NAMING.address,) if own is None else (),
        )
        guest = Guest(key=key, part=part, slots=tuple(seat.slot for seat in seats), group=group)
        if self._abroad is not None:
            crossing = self._crossing(account, guest, self._abroad)
            return _Rights(account=account, resources=(account, *crossing.resources), environment=crossing.environment)
        # What is the user's own has its rights from whoever made it.
        given = () if own is not None else (self._binding(account, guest, who),)
        return _Rights(account=account, resources=(account, *given), environment={})

    def _binding(self, account: ServiceAccount, guest: Guest, who: str) -> BucketBinding:
        bucket, prefix = self._place()
        return BucketBinding(
            key=account.key,
            name=account.name,
            region="",
            why=f"{who} may read the run, write their own, overwrite nothing that decides",
            after=(f"{google_storage.Bucket.KIND}.{STORE}",),
            bucket=bucket,
            member=account.ref("email", before="serviceAccount:"),
            rules=replica_rules(prefix=prefix, slots=guest.slots, group=guest.group),
        )

    def _crossing(self, account: ServiceAccount, guest: Guest, abroad: Abroad) -> Crossing:
        _, prefix = self._place()
        room = _LONGEST_ROLE - len(self._ground.stem) - 1
        return google_into_aws(
            self._ground,
            replace(guest, part=name_with_room(guest.part, room)),
            account=abroad.account,
            bucket_arn=Ref(address=f"{aws_storage.Bucket.KIND}.{STORE}", output="arn"),
            prefix=prefix,
            region=abroad.region,
            email=account.ref("email"),
            unique_id=account.ref("unique_id"),
        )

    def _place(self) -> tuple[str, str]:
        """Bucket and prefix of the run."""
        bucket, _, prefix = self._ground.run_uri.partition("://")[2].partition("/")
        return bucket, prefix

    def _job(self, seat: Seat, rights: _Rights, training: Resource) -> Job:
        target, ground, has = self._target, self._ground, self._fitting
        return Job(
            key=seat.slot,
            name=name_with_room(f"{ground.stem}-{seat.slot}", _LONGEST_NAME),
            region=target.region,
            why=f"replica {seat.index} of the run",
            # Nothing of a job names what lets it work.
            after=(training.address, *(one.address for one in rights.resources[1:])),
            project=target.project,
            image=ground.image_of(self._group),
            args=("run",),
            environment={**self._environment(seat), **rights.environment},
            machine=target.machine,
            accelerator=has.accelerator,
            accelerators=has.accelerators,
            disk_gb=has.disk_gb,
            disk_type=target.disk_type,
            scheduling=target.scheduling,
            max_wait_s=None if target.max_wait is None else int(target.max_wait.total_seconds()),
            timeout_s=timeout_s(ground.hours, target),
            service_account=rights.account.ref("email"),
            network=target.byo.network,
            encryption_key=target.byo.key,
        )

    def _environment(self, seat: Seat) -> Mapping[str, Text]:
        ground = self._ground
        common = ground.variables(self._group)
        place = Contract(
            run_uri=ground.run_uri, slot=seat.slot, index=seat.index, replicas=len(ground.seats)
        ).environment()
        return {
            **common,
            **place,
            contract.COMMAND: requests.plain(common[contract.COMMAND]),
            contract.RANKS: str(self._fitting.ranks),
        }
