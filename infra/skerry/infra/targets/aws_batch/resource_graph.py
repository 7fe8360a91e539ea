"""From options to resources: what each group, each region and the run as a whole need, and why. Pure.

Roles, the machines' profile and the execution role are the run's; log group and security group are a region's;
machines and queue are a group's; role and definition are a replica's own, unless the group shares one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws import home
from skerry.infra.clouds.aws.home import CLOUD, STORE
from skerry.infra.clouds.aws.identity import InstanceProfile, Role, ServiceLinkedRole
from skerry.infra.clouds.aws.logs import LogGroup
from skerry.infra.clouds.aws.network import SecurityGroup
from skerry.infra.clouds.aws.policies import Statement, replica_policy, trust_service
from skerry.infra.clouds.aws.registry import fetching
from skerry.infra.clouds.aws.storage import Bucket
from skerry.infra.clouds.crossing import Crossing, GoogleStore, Guest, aws_into_google, visitor_name
from skerry.infra.graph import Ref, short_name
from skerry.infra.placement import AwsBatchTarget
from skerry.infra.targets.aws_batch.machines import attempt_s, shape
from skerry.infra.targets.aws_batch.resources import ComputeEnvironment, Job, JobDefinition, LaunchTemplate, Queue
from skerry.runtime import contract
from skerry.runtime.contract import Contract

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Account
    from skerry.infra.graph import Resource, Text
    from skerry.infra.spec import Replicas, Seat
    from skerry.infra.target import Ground
    from skerry.infra.targets.aws_batch.survey import Terrain

_STORE: Final = f"{Bucket.KIND}.{STORE}"

LOG_DAYS: Final = 30
"""How long what replicas wrote is kept: longer than anybody asks why a run went wrong."""

# The name of a role may have 64 characters: 34 of the run, a replica's own part, and a generation.
_PART: Final = 16


def layout(
    ground: Ground,
    account: Account,
    groups: Sequence[Replicas],
    terrains: Sequence[Terrain],
    abroad: GoogleStore | None = None,
) -> tuple[Resource, ...]:
    """Everything that these groups need, besides the run's bucket.

    terrains: of each group. abroad: where the store is, if not in S3.
    """
    found: dict[str, Resource] = {}
    for group, terrain in zip(groups, terrains, strict=True):
        for resource in _Group(ground, account, group, terrain, abroad).resources():
            found[resource.address] = resource
    return tuple(found.values())


def part(text: str) -> str:
    """A short piece of a physical name for what people call `text`; two texts never have the same."""
    return short_name(text, _PART)


def target_of(group: Replicas) -> AwsBatchTarget:
    """The group's options. The core gives a target only groups of its own kind."""
    if not isinstance(group.target, AwsBatchTarget):
        raise TypeError(f"not a group of aws_batch: {group.name}")
    return group.target


def name_of(text: str) -> str:
    """The name in an ARN, or the name itself."""
    return text.rsplit("/", 1)[-1] if text.startswith("arn:") else text


@dataclass(frozen=True, kw_only=True)
class _Rights:
    """What a job definition takes its roles and its log group from."""

    execution: Role
    logs: LogGroup


class _Group:
    """The resources of one group, and of what it shares with others."""

    def __init__(
        self, ground: Ground, account: Account, group: Replicas, terrain: Terrain, abroad: GoogleStore | None
    ) -> None:
        self._ground = ground
        self._account = account
        self._group = group
        self._terrain = terrain
        self._abroad = abroad
        self._target = target_of(group)
        self._own = self._target.byo
        self._region = self._target.region
        self._name = f"{ground.stem}-{part(group.name)}"
        self._shape = shape(self._target, group.count, terrain.machines)

    def resources(self) -> Iterator[Resource]:
        """In an order in which they can be made."""
        if self._own.queue is not None:
            queue = self._queue(name_of(self._own.queue), "your queue", brought=True)
        else:
            machines = tuple(self._machines())
            yield from machines
            queue = self._queue(self._name, f"where jobs of {self._group.name} wait for machines", machines[-1])
        yield queue
        rights = _Rights(execution=self._execution_role(), logs=self._log_group())
        yield from (rights.execution, rights.logs)
        yield from self._jobs(queue, rights)

    def _queue(self, name: str, why: str, environment: Resource | None = None, *, brought: bool = False) -> Queue:
        environments = () if environment is None else (environment.ref("arn"),)
        return Queue(
            key=self._group.name,
            name=name,
            region=self._region,
            why=why,
            brought=brought,
            compute_environments=environments,
        )

    def _machines(self) -> Iterator[Resource]:
        """What machines need; the compute environment comes last."""
        brought = self._own.compute_environment
        if brought is not None:
            yield self._environment(name_of(brought), "your machines", brought=True, after=(), needs=_Needs())
            return
        batch = _service_role("batch", "batch.amazonaws.com", "AWSServiceRoleForBatch", "Batch's own role")
        spot = _service_role("spot", "spot.amazonaws.com", "AWSServiceRoleForEC2Spot", "EC2's own role for spot")
        yield from (batch, spot) if self._target.spot else (batch,)
        profile_parts = tuple(self._profile())
        template = self._launch_template()
        yield from (*profile_parts, template)
        groups: tuple[Text, ...] = tuple(sorted(self._own.security_groups or ()))
        if not groups:
            group = self._security_group()
            yield group
            groups = (group.ref("id"),)
        yield self._environment(
            self._name,
            f"machines for {self._group.count} replicas of {self._group.name}; none while no job waits or runs",
            brought=False,
            after=(spot.address,) if self._target.spot else (),
            needs=_Needs(
                profile=profile_parts[-1].ref("arn"),
                template=template.ref("id"),
                groups=groups,
                service_role=batch.ref("arn"),
            ),
        )

    def _environment(
        self, name: str, why: str, *, brought: bool, after: tuple[str, ...], needs: _Needs
    ) -> ComputeEnvironment:
        target = self._target
        default = "spot_price_capacity_optimized" if target.spot else "best_fit_progressive"
        allocation = (target.allocation or default).upper()
        ordered = allocation.endswith("_ORDERED")
        return ComputeEnvironment(
            key=self._group.name,
            name=name,
            region=self._region,
            why=why,
            brought=brought,
            after=after,
            spot=target.spot,
            allocation=allocation,
            instance_types=target.instance_types if ordered else tuple(sorted(target.instance_types)),
            image_type="ECS_AL2023_NVIDIA" if target.gpus else "ECS_AL2023",
            max_vcpus=self._shape.max_vcpus,
            subnets=self._terrain.subnets,
            security_groups=needs.groups,
            instance_profile=needs.profile,
            launch_template=needs.template,
            service_role=needs.service_role,
        )

    def _profile(self) -> Iterator[Role | InstanceProfile]:
        """The machines' role and what gives it to them, which comes last."""
        if (own := self._own.instance_profile) is not None:
            yield InstanceProfile(
                key=f"{self._group.name}-machines",
                name=name_of(own),
                region="",
                why="your profile of the machines",
                brought=True,
                role="",
            )
            return
        managed = "service-role/AmazonEC2ContainerServiceforEC2Role"
        role = Role(
            key="machines",
            name=f"{self._ground.stem}-machines",
            region="",
            why="lets the machines join the cluster that Batch keeps; no replica gets it",
            trust=(trust_service("ec2.amazonaws.com", self._account.number),),
            managed=(f"arn:{self._account.partition}:iam::aws:policy/{managed}",),
        )
        yield role
        yield InstanceProfile(
            key="machines",
            name=f"{self._ground.stem}-machines",
            region="",
            why="gives the machines their role",
            role=role.ref("name"),
        )

    def _launch_template(self) -> LaunchTemplate:
        own = self._own.launch_template
        return LaunchTemplate(
            key=self._group.name,
            name=own or self._name,
            region=self._region,
            why="your launch template" if own else "an encrypted disk, and a metadata service for root alone",
            brought=own is not None,
            disk_gib=-(-self._target.disk // (1 << 30)),
        )

    def _security_group(self) -> SecurityGroup:
        vpc = self._terrain.vpc or ""
        # Subnets of the user's may lie in another network than the default one: each has a group of its own.
        return SecurityGroup(
            key=self._region if self._own.subnets is None else f"{self._region}-{vpc}",
            name=f"{self._ground.stem}-{vpc}",
            region=self._region,
            why="machines reach the bucket, and nobody reaches them",
            vpc=vpc,
        )

    def _execution_role(self) -> Role:
        own = self._own.execution_role
        if own is not None:
            return Role(
                key=f"{self._group.name}-execution",
                name=name_of(own),
                region="",
                why="your role that fetches the image and writes logs",
                brought=True,
                trust=(),
            )
        account = self._account
        # One role for the run: it writes to the log groups of all its groups, whoever made them.
        options = [one.target for one in self._ground.spec.replicas if isinstance(one.target, AwsBatchTarget)]
        names = sorted({f"{self._log_name}*" if one.byo.log_group is None else one.byo.log_group for one in options})
        start = f"arn:{account.partition}:logs:*:{account.number}:log-group:"
        groups = tuple(f"{start}{name}" if name.endswith("*") else f"{start}{name}:*" for name in names)
        fetch = fetching(self._ground.images_in(CLOUD).values(), account.partition)
        write = Statement(sid="WriteLogs", actions=("logs:CreateLogStream", "logs:PutLogEvents"), resources=groups)
        return Role(
            key="execution",
            name=f"{self._ground.stem}-execution",
            region="",
            why="fetches the image and writes the logs",
            trust=(trust_service("ecs-tasks.amazonaws.com", account.number),),
            policies={"start": (*fetch, write)},
        )

    @property
    def _log_name(self) -> str:
        return f"/skerry/{self._ground.stem}"

    def _log_group(self) -> LogGroup:
        own = self._own.log_group
        return LogGroup(
            key=self._region if own is None else f"{self._group.name}-logs",
            name=self._log_name if own is None else own,
            region=self._region,
            why="what the replicas write" if own is None else "your log group",
            brought=own is not None,
            retention_days=LOG_DAYS,
        )

    def _jobs(self, queue: Queue, rights: _Rights) -> Iterator[Resource]:
        """Roles, definitions, jobs: one of each for a replica, or one role and definition for all."""
        seats, one = self._ground.seats_of(self._group), self._target.one_role
        # Nothing of a single replica is called so: its names end in a number.
        names = [f"{self._name}-all"] if one else [f"{self._name}-{number}" for number in range(len(seats))]
        crews = [seats] if one else [(seat,) for seat in seats]
        roles = [self._role(crew, name) for crew, name in zip(crews, names, strict=True)]
        yield from roles
        crossing = _crossing(
            self._ground, self._group, self._account, self._abroad, list(zip(roles, crews, strict=True))
        )
        yield from crossing.resources
        definitions: list[JobDefinition] = []
        for role, crew, name in zip(roles, crews, names, strict=True):
            key, place = (f"{self._group.name}-replicas", {}) if one else (crew[0].slot, self._place(crew[0]))
            definitions.append(self._definition(key, name, role, rights, {**crossing.environment, **place}))
        yield from definitions
        for number, seat in enumerate(seats):
            role, definition = (roles[0], definitions[0]) if one else (roles[number], definitions[number])
            yield Job(
                key=seat.slot,
                name=f"{self._name}-{number}",
                region=self._region,
                why=f"replica {seat.index} of the run",
                # Its rights in another cloud come first.
                after=tuple(one.address for one in crossing.resources if one.key == role.key),
                definition=definition.ref("arn"),
                queue=queue.ref("arn"),
                log_group=rights.logs.ref("name"),
                environment=self._place(seat) if one else {},
            )

    def _role(self, seats: Sequence[Seat], name: str) -> Role:
        if self._own.job_role is not None:
            return Role(
                key=f"{self._group.name}-replicas",
                name=name_of(self._own.job_role),
                region="",
                why="your role of the replicas",
                brought=True,
                trust=(),
            )
        slots = [seat.slot for seat in seats]
        group = self._group.name if self._target.one_role else None
        policies: dict[str, tuple[Statement, ...]] = {}
        if self._abroad is None:
            store, (_, prefix) = Ref(address=_STORE, output="arn"), home.place(self._ground.run_uri)
            policies["run"] = replica_policy(bucket_arn=store, prefix=prefix, slots=slots, group=group)
        else:
            name = visitor_name(name, self._account.number, self._account.partition)
        who = "all replicas of the group" if group is not None else slots[0]
        return Role(
            key=slots[0] if group is None else f"{group}-replicas",
            name=name,
            region="",
            why=f"what {who} may do: read the run, write their own, overwrite nothing that decides",
            trust=(trust_service("ecs-tasks.amazonaws.com", self._account.number),),
            policies=policies,
        )

    def _definition(self, key: str, name: str, role: Role, rights: _Rights, told: Mapping[str, Text]) -> JobDefinition:
        target, ground = self._target, self._ground
        region = Ref(address=_STORE, output="region") if self._abroad is None else self._region
        environment: dict[str, Text] = {
            **ground.variables(self._group),
            contract.RANKS: str(max(1, target.gpus)),
            # The bucket's region, not the machine's: clients sign for it.
            "AWS_REGION": region,
            "AWS_DEFAULT_REGION": region,
            **told,
        }
        return JobDefinition(
            key=key,
            name=name,
            region=self._region,
            why=f"how {'a replica of ' + self._group.name if self._target.one_role else key} is started",
            image=ground.image_of(self._group),
            command=("run",),
            environment=environment,
            gpus=target.gpus,
            vcpus=self._shape.vcpus,
            memory_mib=self._shape.memory_mib,
            shared_memory_mib=self._shape.shared_memory_mib,
            job_role=role.ref("arn"),
            execution_role=rights.execution.ref("arn"),
            log_group=rights.logs.ref("name"),
            attempts=target.attempts,
            timeout_s=attempt_s(ground.hours, target),
        )

    def _place(self, seat: Seat) -> dict[str, str]:
        """What tells one replica from the others of its group."""
        place = Contract(
            run_uri=self._ground.run_uri, slot=seat.slot, index=seat.index, replicas=len(self._ground.seats)
        ).environment()
        return {name: place[name] for name in (contract.SLOT, contract.INDEX)}


@dataclass(frozen=True, kw_only=True)
class _Needs:
    """What machines are made with; all empty where they are the user's own."""

    profile: Text = ""
    template: Text = ""
    groups: tuple[Text, ...] = ()
    service_role: Text = ""


def _service_role(key: str, service: str, name: str, why: str) -> ServiceLinkedRole:
    return ServiceLinkedRole(key=key, name=name, region="", why=f"{why}; the whole account shares it", service=service)


def _crossing(
    ground: Ground,
    group: Replicas,
    account: Account,
    abroad: GoogleStore | None,
    crews: Sequence[tuple[Role, Sequence[Seat]]],
) -> Crossing:
    """What a store in another cloud needs to let these roles in; nothing where it is in S3."""
    if abroad is None:
        return Crossing(resources=(), environment={})
    shared = target_of(group).one_role
    visitors = [
        (
            role,
            Guest(
                key=role.key,
                part=f"{part(group.name)}-{'all' if shared else seats[0].slot.rpartition('-')[2]}",
                slots=tuple(seat.slot for seat in seats),
                group=group.name if shared else None,
            ),
        )
        for role, seats in crews
    ]
    return aws_into_google(
        ground,
        visitors,
        group=group.name,
        own="byo.job_role",
        account=account.number,
        partition=account.partition,
        number=abroad.number,
        bucket=abroad.bucket,
        prefix=abroad.prefix,
    )
