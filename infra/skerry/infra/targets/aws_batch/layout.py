"""From options to resources: what each group, each region and the run as a whole need, and why. Pure.

Roles, the machines' profile and the execution role are the run's; log group and security group are a region's;
machines and queue are a group's; role and definition are a replica's own, unless the group shares one.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.home import STORE
from skerry.infra.clouds.aws.identity import InstanceProfile, Role, ServiceLinkedRole
from skerry.infra.clouds.aws.logs import LogGroup
from skerry.infra.clouds.aws.network import SecurityGroup
from skerry.infra.clouds.aws.policies import Statement, replica_policy, trust_service
from skerry.infra.clouds.aws.registry import image_in_ecr
from skerry.infra.clouds.aws.storage import Bucket
from skerry.infra.graph import Ref
from skerry.infra.placement import AwsBatchTarget
from skerry.infra.targets.aws_batch.machines import attempt_s, shape
from skerry.infra.targets.aws_batch.resources import ComputeEnvironment, Job, JobDefinition, LaunchTemplate, Queue
from skerry.runtime import contract
from skerry.runtime.contract import Contract

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.graph import Resource, Text
    from skerry.infra.spec import Replicas, Seat
    from skerry.infra.target import Ground
    from skerry.infra.targets.aws_batch.survey import Terrain

_STORE: Final = f"{Bucket.KIND}.{STORE}"

LOG_DAYS: Final = 30
"""How long what replicas wrote is kept: longer than anybody asks why a run went wrong."""

# The name of a role may have 64 characters: 34 of the run, a replica's own part, and a generation.
_PART: Final = 16
_NOT_A_NAME: Final = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, kw_only=True)
class Account:
    """Whose resources these are."""

    number: str
    partition: str


def layout(
    ground: Ground, account: Account, groups: Sequence[Replicas], terrains: Sequence[Terrain]
) -> tuple[Resource, ...]:
    """Everything that these groups need, besides the run's bucket. terrains: of each group."""
    found: dict[str, Resource] = {}
    for group, terrain in zip(groups, terrains, strict=True):
        for resource in _Group(ground, account, group, terrain).resources():
            found[resource.address] = resource
    return tuple(found.values())


def part(text: str) -> str:
    """A short piece of a physical name for what people call `text`; two texts never have the same."""
    readable = _NOT_A_NAME.sub("-", text.lower()).strip("-")
    if readable == text and len(text) <= _PART:
        return text
    return f"{readable[: _PART - 7].strip('-')}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


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

    def __init__(self, ground: Ground, account: Account, group: Replicas, terrain: Terrain) -> None:
        self._ground = ground
        self._account = account
        self._group = group
        self._terrain = terrain
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
            why="your launch template" if own else "an encrypted disk, and a metadata service that wants a token",
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
        fetch = _fetching(self._ground.image, account.partition)
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
        seats = self._ground.seats_of(self._group)
        shared: JobDefinition | None = None
        if self._target.one_role:
            # Nothing of a single replica is called so: its names end in a number.
            name = f"{self._name}-all"
            role = self._role(seats, self._group.name, name)
            shared = self._definition(f"{self._group.name}-replicas", name, role, rights, {})
            yield from (role, shared)
        for number, seat in enumerate(seats):
            name = f"{self._name}-{number}"
            place = self._place(seat)
            definition = shared
            if definition is None:
                role = self._role((seat,), None, name)
                definition = self._definition(seat.slot, name, role, rights, place)
                yield from (role, definition)
            yield Job(
                key=seat.slot,
                name=name,
                region=self._region,
                why=f"replica {seat.index} of the run",
                definition=definition.ref("arn"),
                queue=queue.ref("arn"),
                log_group=rights.logs.ref("name"),
                environment={} if shared is None else place,
            )

    def _role(self, seats: Sequence[Seat], group: str | None, name: str) -> Role:
        if self._own.job_role is not None:
            return Role(
                key=f"{self._group.name}-replicas",
                name=name_of(self._own.job_role),
                region="",
                why="your role of the replicas",
                brought=True,
                trust=(),
            )
        prefix = self._ground.run_uri.removeprefix("s3://").partition("/")[2]
        slots = [seat.slot for seat in seats]
        policy = replica_policy(bucket_arn=Ref(address=_STORE, output="arn"), prefix=prefix, slots=slots, group=group)
        who = "all replicas of the group" if group is not None else slots[0]
        return Role(
            key=slots[0] if group is None else f"{group}-replicas",
            name=name,
            region="",
            why=f"what {who} may do: read the run, write their own, overwrite nothing that decides",
            trust=(trust_service("ecs-tasks.amazonaws.com", self._account.number),),
            policies={"run": policy},
        )

    def _definition(self, key: str, name: str, role: Role, rights: _Rights, place: Mapping[str, str]) -> JobDefinition:
        target, ground = self._target, self._ground
        region = Ref(address=_STORE, output="region")
        environment: dict[str, Text] = {
            contract.RUN_URI: ground.run_uri,
            contract.REPLICAS: str(len(ground.seats)),
            contract.CODE: ground.code,
            contract.COMMAND: json.dumps(ground.spec.code.command),
            contract.GROUP: self._group.name,
            contract.RANKS: str(max(1, target.gpus)),
            # The bucket's region, not the machine's: clients sign for it.
            "AWS_REGION": region,
            "AWS_DEFAULT_REGION": region,
            **place,
        }
        if ground.hours is not None:
            # A change here starts every replica anew: digits that nobody can see are no reason.
            environment[contract.MAX_HOURS] = f"{ground.hours:.6g}"
        return JobDefinition(
            key=key,
            name=name,
            region=self._region,
            why=f"how {key if place else 'a replica of ' + self._group.name} is started",
            image=ground.image,
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


def _fetching(image: str, partition: str) -> tuple[Statement, ...]:
    """The right to fetch the image, if its registry is Amazon's; others ask for no role."""
    found = image_in_ecr(image)
    if found is None:
        return ()
    place = f"{found.region}:{found.registry}"
    return (
        # ECR gives its logins for no resource in particular.
        Statement(sid="LogIn", actions=("ecr:GetAuthorizationToken",), resources=("*",)),
        Statement(
            sid="FetchImage",
            actions=("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"),
            resources=(f"arn:{partition}:ecr:{place}:repository/{found.repository}",),
        ),
    )
