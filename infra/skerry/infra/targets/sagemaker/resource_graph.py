"""Builds the roles and jobs of SageMaker from the options of the groups, each with its reason. Pure.

A group has one role, unless each replica has its own. There are no other resources: machines and their network are
SageMaker's, and all training jobs of an account write to one log group.
Sources: SageMaker developer guide, "CreateTrainingJob API: Execution Role Permissions"; API reference,
CreateTrainingJob.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.ecr import fetching, image_in_ecr
from skerry.infra.clouds.aws.home import STORE, place
from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.policies import Statement, replica_policy, trust_service
from skerry.infra.clouds.aws.s3 import Bucket
from skerry.infra.clouds.cross_cloud import visitor_name
from skerry.infra.provision.graph import Ref, short_name
from skerry.infra.targets.sagemaker.options import SageMakerTarget
from skerry.infra.targets.sagemaker.quotas import DEFAULT
from skerry.infra.targets.sagemaker.resources import Job
from skerry.infra.targets.shared.aws_into_google import google_access
from skerry.runtime import contract
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Account
    from skerry.infra.clouds.cross_cloud import GoogleStore
    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.provision.target import RunContext
    from skerry.infra.spec.model import Limits, Replicas, ReplicaSlot
    from skerry.infra.targets.sagemaker.machine_lookup import Machine

SERVICE: Final = "sagemaker.amazonaws.com"
LOGS: Final = "/aws/sagemaker/TrainingJobs"
"""The log group of all training jobs of an account. The first job creates it; it belongs to no run."""
OUTPUT: Final = "sagemaker"
"""The folder, in a run in S3, for the files that scripts leave in /opt/ml/model."""

_S3: Final = "s3://"
_STORE: Final = f"{Bucket.KIND}.{STORE}"
_MOST_RUNTIME: Final = timedelta(days=28)
_MOST_WAIT: Final = timedelta(days=30)
_GIB: Final = 1 << 30
_DISK_GIB: Final = 100
# The longest values of an environment variable and of a hyperparameter.
_VARIABLE: Final = 512
_HYPERPARAMETER: Final = 2500
# The name of a job may have 63 characters: 34 of the run, the part of the group, a number of up to 4, a digest of the
# spec, and a generation ("-g999").
_PART: Final = 11


def layout(
    ground: RunContext,
    account: Account,
    groups: Sequence[Replicas],
    machines: Sequence[Machine],
    google_store: GoogleStore | None = None,
) -> tuple[Resource, ...]:
    """Return all resources of these groups, without the run's bucket.

    machines: of each group. google_store: the store, if it is not in S3.
    """
    resources: dict[str, Resource] = {}
    for group, machine in zip(groups, machines, strict=True):
        for resource in _Group(ground, account, group, machine, google_store).resources():
            resources[resource.address] = resource
    return tuple(resources.values())


def part(text: str) -> str:
    """Return a short part of a resource name for `text`; different texts have different parts."""
    return short_name(text, _PART)


def target_of(group: Replicas) -> SageMakerTarget:
    """Return the group's options. The core gives a target only groups of its kind."""
    if not isinstance(group.target, SageMakerTarget):
        raise TypeError(f"not a group of sagemaker: {group.name}")
    return group.target


def runtime_s(hours: float | None, target: SageMakerTarget) -> int:
    """Return the time limit of one job in seconds. hours: the limit of the run.

    Without limits it is the default quota of an account, because a longer job would be refused after everything else
    was created.
    """
    requested = [target.max_runtime] if target.max_runtime is not None else []
    requested += [timedelta(hours=hours)] if hours is not None else []
    bounds = [_MOST_RUNTIME, *(requested or [DEFAULT]), *([] if target.max_wait is None else [target.max_wait])]
    return max(1, int(min(bounds).total_seconds()))


def cap_s(limits: Limits, target: SageMakerTarget) -> int:
    """Return the time limit of one job by the target's own options, without the limits of the run."""
    is_limited = limits.max_hours is not None or limits.max_cost_usd is not None
    return runtime_s(_MOST_RUNTIME / timedelta(hours=1) if is_limited else None, target)


def wait_s(runtime: int, target: SageMakerTarget) -> int | None:
    """Return how long a job on spot machines may wait and run in total, in seconds."""
    if not target.spot:
        return None
    default = min(2 * runtime, int(_MOST_WAIT.total_seconds()))
    return default if target.max_wait is None else int(target.max_wait.total_seconds())


def split_variables(variables: Mapping[str, Text]) -> tuple[Mapping[str, Text], Mapping[str, str]]:
    """Return the environment variables of a job, and those that are too long and become hyperparameters.

    Raises Invalid for a value that is too long for a hyperparameter.
    """
    long = {name: text for name, text in variables.items() if isinstance(text, str) and len(text) > _VARIABLE}
    for name, text in long.items():
        if len(text) > _HYPERPARAMETER:
            raise Invalid(
                f"{name} has {len(text)} characters, and SageMaker passes at most {_HYPERPARAMETER}: {text[:60]}"
            )
    return {name: text for name, text in variables.items() if name not in long}, long


def crews_of(ground: RunContext, group: Replicas) -> list[tuple[Sequence[ReplicaSlot], str]]:
    """Return the replicas of each role, with the suffix of its name."""
    seats = ground.seats_of(group)
    # The suffix of a single replica is a number, so `all` is free.
    return [(seats, "all")] if target_of(group).one_role else [((seat,), str(at)) for at, seat in enumerate(seats)]


def role_name(ground: RunContext, account: Account, group: Replicas, suffix: str) -> str:
    """Return the name of the role with this suffix."""
    name = f"{ground.stem}-{part(group.name)}-{suffix}"
    return name if ground.run_uri.startswith(_S3) else visitor_name(name, account.number, account.partition)


class _Group:
    """Builds the resources of one group."""

    def __init__(
        self, ground: RunContext, account: Account, group: Replicas, machine: Machine, google_store: GoogleStore | None
    ) -> None:
        self._ground = ground
        self._account = account
        self._group = group
        self._machine = machine
        self._google_store = google_store
        self._target = target_of(group)
        self._byo = self._target.byo
        self._name = f"{ground.stem}-{part(group.name)}"
        # A run at the same URI with other rounds gets other names of jobs, because records of finished jobs remain.
        fixed = ground.spec.outer.model_dump_json().encode()
        self._digest = hashlib.sha256(fixed).hexdigest()[:6]

    def resources(self) -> Iterator[Resource]:
        """Return them in an order in which they can be created."""
        seats = self._ground.seats_of(self._group)
        crews = crews_of(self._ground, self._group)
        roles = [self._role(crew, suffix) for crew, suffix in crews]
        yield from roles
        access = google_access(
            self._ground,
            self._account,
            self._group,
            self._google_store,
            [
                (role, f"{part(self._group.name)}-{suffix}", crew)
                for role, (crew, suffix) in zip(roles, crews, strict=True)
            ],
            byo="byo.role",
            shared=self._target.one_role,
        )
        yield from access.resources
        for number, seat in enumerate(seats):
            role = roles[0] if self._target.one_role else roles[number]
            # Its permissions in another cloud are created before it.
            after = tuple(resource.address for resource in access.resources if resource.key == role.key)
            yield self._job(seat, role, f"{self._name}-{number}-{self._digest}", access.environment, after)

    def _role(self, seats: Sequence[ReplicaSlot], suffix: str) -> Role:
        if self._byo.role is not None:
            return Role(
                key=f"{self._group.name}-replicas",
                name=self._byo.role.rsplit("/", 1)[-1],
                region="",
                why="your role of the replicas",
                brought=True,
                trust=(),
            )
        slots = [seat.slot for seat in seats]
        group = self._group.name if self._target.one_role else None
        whom = "all replicas of the group" if group is not None else slots[0]
        return Role(
            key=slots[0] if group is None else f"{group}-replicas",
            name=role_name(self._ground, self._account, self._group, suffix),
            region="",
            why=f"what {whom} may do: read the run, write own keys; cannot overwrite decisions, commits or receipts",
            trust=(trust_service(SERVICE, self._account.number),),
            policies={**self._run_policy(slots, group), "job": tuple(self._job_policy())},
        )

    def _run_policy(self, slots: Sequence[str], group: str | None) -> dict[str, tuple[Statement, ...]]:
        """Return the permissions on the run; empty if the store is in another cloud, which grants them."""
        if not self._in_s3:
            return {}
        _, prefix = place(self._ground.run_uri)
        return {
            "run": replica_policy(bucket_arn=Ref(address=_STORE, output="arn"), prefix=prefix, slots=slots, group=group)
        }

    def _job_policy(self) -> Iterator[Statement]:
        """Return the permissions that SageMaker uses for a job with its role."""
        partition, account, region = self._account.partition, self._account.number, self._target.region
        image = self._ground.image_of(self._group)
        if image_in_ecr(image) is None:
            raise Invalid(f"{image} is not in ECR, and SageMaker runs no others; push it there: scripts/image push")
        yield from fetching([image], partition)
        logs = f"arn:{partition}:logs:{region}:{account}:log-group:{LOGS}"
        yield Statement(
            sid="WriteLogs",
            actions=("logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"),
            resources=(logs, f"{logs}:*"),
        )
        yield Statement(
            sid="TellMetrics",
            actions=("cloudwatch:PutMetricData",),
            resources=("*",),
            conditions={"StringEquals": {"cloudwatch:namespace": (LOGS,)}},
        )
        yield Statement(
            sid="LeaveArtifacts",
            actions=("s3:AbortMultipartUpload", "s3:PutObject"),
            resources=(f"arn:{partition}:s3:::{self._output.removeprefix('s3://').rstrip('/')}/*",),
        )
        if self._byo.subnets is not None:
            yield from _network_policy(partition, account, region)
        if self._target.kms_key is not None:
            key = self._target.kms_key
            known = key if key.startswith("arn:") else f"arn:{partition}:kms:{region}:{account}:key/{key}"
            yield Statement(sid="UseKey", actions=("kms:CreateGrant", "kms:DescribeKey"), resources=(known,))

    def _job(
        self, seat: ReplicaSlot, role: Role, name: str, google_variables: Mapping[str, Text], after: tuple[str, ...]
    ) -> Job:
        target, runtime = self._target, runtime_s(self._ground.hours, self._target)
        pending = None if target.max_pending is None else int(target.max_pending.total_seconds())
        volume = None if self._machine.own_disk else _DISK_GIB if target.volume is None else -(-target.volume // _GIB)
        environment, hyperparameters = self._variables(seat, google_variables)
        return Job(
            key=seat.slot,
            name=name,
            region=target.region,
            why=f"replica {seat.index} of the run",
            after=after,
            image=self._ground.image_of(self._group),
            environment=environment,
            hyperparameters=hyperparameters,
            role=role.ref("arn"),
            instance=target.instance,
            spot=target.spot,
            max_runtime_s=runtime,
            max_wait_s=wait_s(runtime, target),
            max_pending_s=pending,
            retries=target.retries,
            volume_gib=volume,
            kms_key=target.kms_key,
            output=self._output,
            subnets=tuple(sorted(self._byo.subnets or ())),
            security_groups=tuple(sorted(self._byo.security_groups or ())),
        )

    def _variables(
        self, seat: ReplicaSlot, google_variables: Mapping[str, Text]
    ) -> tuple[Mapping[str, Text], Mapping[str, str]]:
        """Return the variables of the container, and those that are too long."""
        ground, target = self._ground, self._target
        variables: dict[str, Text] = {
            **ground.variables(self._group),
            contract.SLOT: seat.slot,
            contract.INDEX: str(seat.index),
            **google_variables,
        }
        if target.gpus is not None:
            variables[contract.RANKS] = str(max(1, target.gpus))
        if self._in_s3:
            region = Ref(address=_STORE, output="region")
            # The bucket's region, not the machine's, because clients sign requests for it.
            variables |= {"AWS_REGION": region, "AWS_DEFAULT_REGION": region}
        return split_variables(variables)

    @property
    def _in_s3(self) -> bool:
        return self._ground.run_uri.startswith(_S3)

    @property
    def _output(self) -> str:
        if self._target.output is not None:
            return self._target.output
        if not self._in_s3:
            raise Invalid(f"the store of {self._group.name} is not in S3: write output: s3://my-bucket/artifacts")
        return f"{self._ground.run_uri}/{OUTPUT}"


def _network_policy(partition: str, account: str, region: str) -> tuple[Statement, ...]:
    """Return the permissions to put machines into a network. EC2's Describe actions apply to all resources."""
    looks = ("DhcpOptions", "NetworkInterfaces", "SecurityGroups", "Subnets", "Vpcs")
    return (
        Statement(sid="LookAtNetwork", actions=tuple(f"ec2:Describe{look}" for look in looks), resources=("*",)),
        Statement(
            sid="JoinNetwork",
            actions=(
                "ec2:CreateNetworkInterface",
                "ec2:CreateNetworkInterfacePermission",
                "ec2:DeleteNetworkInterface",
                "ec2:DeleteNetworkInterfacePermission",
            ),
            resources=tuple(
                f"arn:{partition}:ec2:{region}:{account}:{kind}/*"
                for kind in ("network-interface", "security-group", "subnet")
            ),
        ),
    )
