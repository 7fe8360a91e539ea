"""Builds the resources of AWS Batch from the options of the groups, each with its reason. Pure.

The run has the machines' role and profile and the execution role; each region has a log group and a security group;
each group has machines and a queue; each replica has a role and a job definition, unless the group shares one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.ecr import fetching
from skerry.infra.clouds.aws.iam import InstanceProfile, Role, ServiceLinkedRole
from skerry.infra.clouds.aws.logs import LogGroup
from skerry.infra.clouds.aws.policies import Statement, service_principal, trust_service
from skerry.infra.clouds.aws.run_bucket_and_image_repository import CLOUD
from skerry.infra.clouds.aws.s3 import Bucket
from skerry.infra.clouds.aws.security_group_in_existing_vpc import SecurityGroup
from skerry.infra.provision.graph import Ref, short_name
from skerry.infra.targets.aws_batch.machine_sizing import attempt_s, shape
from skerry.infra.targets.aws_batch.options import AwsBatchTarget
from skerry.infra.targets.aws_batch.resource_types import ComputeEnvironment, Job, JobDefinition, LaunchTemplate, Queue
from skerry.infra.targets.shared.aws_replica_roles import (
    STORE_ADDRESS,
    ReplicaRole,
    RoleOptions,
    is_in_s3,
    name_of,
    replica_roles,
)
from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Account
    from skerry.infra.clouds.cross_cloud import GoogleStore
    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import Replicas, ReplicaSlot
    from skerry.infra.targets.aws_batch.region_offer import RegionOffer

LOG_DAYS: Final = 30
"""The retention of the replicas' logs."""

# The name of a role may have 64 characters: 34 of the run, the part of the replica, and a generation.
_LONGEST_PART: Final = 16


def build_resources(
    context: RunContext,
    account: Account,
    groups: Sequence[Replicas],
    offers: Sequence[RegionOffer],
    google_store: GoogleStore | None = None,
) -> tuple[Resource, ...]:
    """Return all resources of these groups, without the run's bucket.

    offers: of each group. google_store: the store, if it is not in S3.
    """
    built = (
        resource
        for group, offer in zip(groups, offers, strict=True)
        for resource in _Group(context, account, group, offer, google_store).resources()
    )
    return tuple({resource.address: resource for resource in built}.values())


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """The resources that all job definitions of a group use."""

    execution: Role
    logs: LogGroup


class _Group:
    """Builds the resources of one group, and those that it shares with other groups."""

    def __init__(
        self,
        context: RunContext,
        account: Account,
        group: Replicas,
        offer: RegionOffer,
        google_store: GoogleStore | None,
    ) -> None:
        self._context = context
        self._account = account
        self._group = group
        self._offer = offer
        self._google_store = google_store
        self._target = AwsBatchTarget.of(group)
        self._byo = self._target.byo
        self._region = self._target.region
        self._part = short_name(group.name, _LONGEST_PART)
        self._name = f"{context.stem}-{self._part}"
        self._shape = shape(self._target, group.count, offer.machines)

    def resources(self) -> Iterator[Resource]:
        """Return them in an order in which they can be created."""
        if self._byo.queue is not None:
            queue = self._queue(name_of(self._byo.queue), "your queue", brought=True)
        else:
            machines = tuple(self._machines())
            yield from machines
            queue = self._queue(self._name, f"queue of the jobs of {self._group.name}", machines[-1])
        yield queue
        shared = _Shared(execution=self._execution_role(), logs=self._log_group())
        yield from (shared.execution, shared.logs)
        yield from self._jobs(queue, shared)

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
        """Return the machines' resources; the compute environment is the last."""
        brought = self._byo.compute_environment
        if brought is not None:
            yield self._environment(
                name_of(brought), "your machines", brought=True, after=(), settings=_MachineSettings()
            )
            return
        batch = _service_role("batch", "batch.amazonaws.com", "AWSServiceRoleForBatch", "Batch's own role")
        spot = _service_role("spot", "spot.amazonaws.com", "AWSServiceRoleForEC2Spot", "EC2's own role for spot")
        yield from (batch, spot) if self._target.spot else (batch,)
        profile_parts = tuple(self._profile())
        template = self._launch_template()
        yield from (*profile_parts, template)
        groups: tuple[Text, ...] = tuple(sorted(self._byo.security_groups or ()))
        if not groups:
            group = self._security_group()
            yield group
            groups = (group.ref("id"),)
        yield self._environment(
            self._name,
            f"machines for {self._group.count} replicas of {self._group.name}; none exist while no job waits or runs",
            brought=False,
            after=(spot.address,) if self._target.spot else (),
            settings=_MachineSettings(
                profile=profile_parts[-1].ref("arn"),
                template=template.ref("id"),
                groups=groups,
                service_role=batch.ref("arn"),
            ),
        )

    def _environment(
        self, name: str, why: str, *, brought: bool, after: tuple[str, ...], settings: _MachineSettings
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
            subnets=self._offer.subnets,
            security_groups=settings.groups,
            instance_profile=settings.profile,
            launch_template=settings.template,
            service_role=settings.service_role,
        )

    def _profile(self) -> Iterator[Role | InstanceProfile]:
        """Return the machines' role and their instance profile; the profile is the last."""
        if (byo := self._byo.instance_profile) is not None:
            yield InstanceProfile(
                key=f"{self._group.name}-machines",
                name=name_of(byo),
                region="",
                why="your instance profile of the machines",
                brought=True,
                role="",
            )
            return
        managed = "service-role/AmazonEC2ContainerServiceforEC2Role"
        role = Role(
            key="machines",
            name=f"{self._context.stem}-machines",
            region="",
            why="lets the machines join the cluster of Batch; replicas cannot use it",
            trust=(trust_service(service_principal("ec2", self._account.partition), self._account.number),),
            managed=(f"arn:{self._account.partition}:iam::aws:policy/{managed}",),
        )
        yield role
        yield InstanceProfile(
            key="machines",
            name=f"{self._context.stem}-machines",
            region="",
            why="gives the machines their role",
            role=role.ref("name"),
        )

    def _launch_template(self) -> LaunchTemplate:
        byo = self._byo.launch_template
        return LaunchTemplate(
            key=self._group.name,
            name=byo or self._name,
            region=self._region,
            why="your launch template" if byo else "an encrypted disk, and a metadata service for root only",
            brought=byo is not None,
            disk_gib=-(-self._target.disk // (1 << 30)),
        )

    def _security_group(self) -> SecurityGroup:
        vpc = self._offer.vpc or ""
        # The user's subnets may be in another network than the default one, which then has its own security group.
        return SecurityGroup(
            key=self._region if self._byo.subnets is None else f"{self._region}-{vpc}",
            name=f"{self._context.stem}-{vpc}",
            region=self._region,
            why="machines may open connections and accept none",
            vpc=vpc,
        )

    def _execution_role(self) -> Role:
        byo = self._byo.execution_role
        if byo is not None:
            return Role(
                key=f"{self._group.name}-execution",
                name=name_of(byo),
                region="",
                why="your role that pulls the image and writes logs",
                brought=True,
                trust=(),
            )
        account = self._account
        # The run has one execution role, which writes to the log groups of all its groups.
        options = [
            replica.target for replica in self._context.spec.replicas if isinstance(replica.target, AwsBatchTarget)
        ]
        names = sorted(
            {f"{self._log_name}*" if option.byo.log_group is None else option.byo.log_group for option in options}
        )
        start = f"arn:{account.partition}:logs:*:{account.number}:log-group:"
        groups = tuple(f"{start}{name}" if name.endswith("*") else f"{start}{name}:*" for name in names)
        fetch = fetching(self._context.images_in(CLOUD).values(), account.partition)
        write = Statement(sid="WriteLogs", actions=("logs:CreateLogStream", "logs:PutLogEvents"), resources=groups)
        return Role(
            key="execution",
            name=f"{self._context.stem}-execution",
            region="",
            why="pulls the image and writes the logs",
            trust=(trust_service("ecs-tasks.amazonaws.com", account.number),),
            policies={"start": (*fetch, write)},
        )

    @property
    def _log_name(self) -> str:
        return f"/skerry/{self._context.stem}"

    def _log_group(self) -> LogGroup:
        byo = self._byo.log_group
        return LogGroup(
            key=self._region if byo is None else f"{self._group.name}-logs",
            name=self._log_name if byo is None else byo,
            region=self._region,
            why="logs of the replicas" if byo is None else "your log group",
            brought=byo is not None,
            retention_days=LOG_DAYS,
        )

    def _jobs(self, queue: Queue, shared: _Shared) -> Iterator[Resource]:
        """Return roles, definitions and jobs: one of each for a replica, or one role and definition for all."""
        options = RoleOptions(
            service="ecs-tasks.amazonaws.com",
            part=self._part,
            one_role=self._target.one_role,
            own=self._byo.job_role,
            own_option="byo.job_role",
        )
        group_roles = replica_roles(self._context, self._account, self._group, options, self._google_store)
        yield from group_roles.resources
        definitions = {
            role.suffix: self._definition(role, shared, group_roles.environment) for role in group_roles.roles
        }
        yield from definitions.values()
        for number, (replica, role) in enumerate(group_roles.by_replica()):
            yield Job(
                key=replica.slot,
                name=f"{self._name}-{number}",
                region=self._region,
                why=f"replica {replica.index} of the run",
                after=role.after,
                definition=definitions[role.suffix].ref("arn"),
                queue=queue.ref("arn"),
                log_group=shared.logs.ref("name"),
                environment=_slot_variables(replica) if self._target.one_role else {},
            )

    def _definition(self, role: ReplicaRole, shared: _Shared, variables: Mapping[str, Text]) -> JobDefinition:
        target, context, first = self._target, self._context, role.replicas[0]
        region = Ref(address=STORE_ADDRESS, output="region") if is_in_s3(context) else self._region
        environment: dict[str, Text] = {
            **context.variables(self._group),
            contract.RANKS: str(max(1, target.gpus)),
            # The bucket's region, not the machine's, because clients sign requests for it.
            "AWS_REGION": region,
            "AWS_DEFAULT_REGION": region,
            **context.bucket_regions(Bucket.KIND),
            **variables,
            **({} if target.one_role else _slot_variables(first)),
        }
        return JobDefinition(
            key=f"{self._group.name}-replicas" if target.one_role else first.slot,
            name=f"{self._name}-{role.suffix}",
            region=self._region,
            why=f"how {f'a replica of {self._group.name}' if target.one_role else first.slot} starts",
            image=context.image_of(self._group),
            command=("run",),
            environment=environment,
            gpus=target.gpus,
            vcpus=self._shape.vcpus,
            memory_mib=self._shape.memory_mib,
            shared_memory_mib=self._shape.shared_memory_mib,
            job_role=role.role.ref("arn"),
            execution_role=shared.execution.ref("arn"),
            log_group=shared.logs.ref("name"),
            attempts=target.attempts,
            timeout_s=attempt_s(context.hours, target),
        )


@dataclass(frozen=True, kw_only=True)
class _MachineSettings:
    """The settings of a compute environment; empty for the user's own machines."""

    profile: Text = ""
    template: Text = ""
    groups: tuple[Text, ...] = ()
    service_role: Text = ""


def _service_role(key: str, service: str, name: str, why: str) -> ServiceLinkedRole:
    return ServiceLinkedRole(key=key, name=name, region="", why=f"{why}; shared by the whole account", service=service)


def _slot_variables(replica: ReplicaSlot) -> dict[str, str]:
    """Return the variables in which a replica differs from the others of its group."""
    return {contract.SLOT: replica.slot}
