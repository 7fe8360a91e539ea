"""From options to resources: the role and the jobs of each group, and why. Pure.

A role is a group's, unless each replica shall have its own. There is nothing else: machines and their network are
SageMaker's, and all training jobs of an account write to one log group.
Sources: SageMaker developer guide, "CreateTrainingJob API: Execution Role Permissions"; API reference,
CreateTrainingJob.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.home import STORE, place
from skerry.infra.clouds.aws.identity import Role
from skerry.infra.clouds.aws.policies import Statement, replica_policy, trust_service
from skerry.infra.clouds.aws.registry import fetching, image_in_ecr
from skerry.infra.clouds.aws.storage import Bucket
from skerry.infra.clouds.crossing import Crossing, GoogleStore, Guest, aws_into_google, visitor_name
from skerry.infra.graph import Ref, short_name
from skerry.infra.placement import SageMakerTarget
from skerry.infra.targets.sagemaker.quotas import GIVEN
from skerry.infra.targets.sagemaker.resources import TrainingJob
from skerry.runtime import contract
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Account
    from skerry.infra.graph import Resource, Text
    from skerry.infra.spec import Limits, Replicas, Seat
    from skerry.infra.target import Ground
    from skerry.infra.targets.sagemaker.survey import Machine

SERVICE: Final = "sagemaker.amazonaws.com"
LOGS: Final = "/aws/sagemaker/TrainingJobs"
"""Where all training jobs of an account write. The first of them makes it; it is nobody's run's."""
OUTPUT: Final = "sagemaker"
"""Of a run in S3: the folder for what scripts leave in /opt/ml/model."""

_S3: Final = "s3://"
_STORE: Final = f"{Bucket.KIND}.{STORE}"
_MOST_RUNTIME: Final = timedelta(days=28)
_MOST_WAIT: Final = timedelta(days=30)
_GIB: Final = 1 << 30
_DISK_GIB: Final = 100
# A variable of a job holds so many characters, a hyperparameter more.
_VARIABLE: Final = 512
_HYPERPARAMETER: Final = 2500
# The name of a job may have 63 characters: 34 of the run, a group's part, a number of up to 4, the spec's digest and a
# generation ("-g999").
_PART: Final = 11


def layout(
    ground: Ground,
    account: Account,
    groups: Sequence[Replicas],
    machines: Sequence[Machine],
    abroad: GoogleStore | None = None,
) -> tuple[Resource, ...]:
    """Everything that these groups need, besides the run's bucket.

    machines: of each group. abroad: where the store is, if not in S3.
    """
    found: dict[str, Resource] = {}
    for group, machine in zip(groups, machines, strict=True):
        for resource in _Group(ground, account, group, machine, abroad).resources():
            found[resource.address] = resource
    return tuple(found.values())


def part(text: str) -> str:
    """A short piece of a physical name for what people call `text`; two texts never have the same."""
    return short_name(text, _PART)


def target_of(group: Replicas) -> SageMakerTarget:
    """The group's options. The core gives a target only groups of its own kind."""
    if not isinstance(group.target, SageMakerTarget):
        raise TypeError(f"not a group of sagemaker: {group.name}")
    return group.target


def runtime_s(hours: float | None, target: SageMakerTarget) -> int:
    """How long one job may run, in seconds. hours: how long the run may take.

    Where nobody says how long, it is what every account may have: more would be refused, after the rest was made.
    """
    asked = [target.max_runtime] if target.max_runtime is not None else []
    asked += [timedelta(hours=hours)] if hours is not None else []
    bounds = [_MOST_RUNTIME, *(asked or [GIVEN]), *([] if target.max_wait is None else [target.max_wait])]
    return max(1, int(min(bounds).total_seconds()))


def cap_s(limits: Limits, target: SageMakerTarget) -> int:
    """How long one job may run by the target's own options, before the run's limits are laid over them."""
    is_limited = limits.max_hours is not None or limits.max_cost_usd is not None
    return runtime_s(_MOST_RUNTIME / timedelta(hours=1) if is_limited else None, target)


def wait_s(runtime: int, target: SageMakerTarget) -> int | None:
    """How long a job of spare machines may wait and run together, in seconds."""
    if not target.spot:
        return None
    asked = min(2 * runtime, int(_MOST_WAIT.total_seconds()))
    return asked if target.max_wait is None else int(target.max_wait.total_seconds())


def handed_on(told: Mapping[str, Text]) -> tuple[Mapping[str, Text], Mapping[str, str]]:
    """What a job gets as variables, and what is too long for one and gets in as a hyperparameter.

    Raises Invalid for what is too long even for that.
    """
    long = {name: text for name, text in told.items() if isinstance(text, str) and len(text) > _VARIABLE}
    for name, text in long.items():
        if len(text) > _HYPERPARAMETER:
            raise Invalid(f"{name} has {len(text)} characters, and SageMaker hands on {_HYPERPARAMETER}: {text[:60]}")
    return {name: text for name, text in told.items() if name not in long}, long


def crews_of(ground: Ground, group: Replicas) -> list[tuple[Sequence[Seat], str]]:
    """Who shares a role, and how it is told from the group's others."""
    seats = ground.seats_of(group)
    # Nothing of a single replica is called as what all share: its names end in a number.
    return [(seats, "all")] if target_of(group).one_role else [((seat,), str(at)) for at, seat in enumerate(seats)]


def role_name(ground: Ground, account: Account, group: Replicas, crew: str) -> str:
    """What the role that is made for a crew is called."""
    name = f"{ground.stem}-{part(group.name)}-{crew}"
    return name if ground.run_uri.startswith(_S3) else visitor_name(name, account.number, account.partition)


class _Group:
    """The resources of one group."""

    def __init__(
        self, ground: Ground, account: Account, group: Replicas, machine: Machine, abroad: GoogleStore | None
    ) -> None:
        self._ground = ground
        self._account = account
        self._group = group
        self._machine = machine
        self._abroad = abroad
        self._target = target_of(group)
        self._own = self._target.byo
        self._name = f"{ground.stem}-{part(group.name)}"
        # Jobs of another run in the same place, with other rounds, have other names: those of its finished ones stay.
        fixed = ground.spec.outer.model_dump_json().encode()
        self._digest = hashlib.sha256(fixed).hexdigest()[:6]

    def resources(self) -> Iterator[Resource]:
        """In an order in which they can be made."""
        seats = self._ground.seats_of(self._group)
        crews = crews_of(self._ground, self._group)
        roles = [self._role(crew, part_) for crew, part_ in crews]
        yield from roles
        crossing = self._crossing(list(zip(roles, crews, strict=True)))
        yield from crossing.resources
        for number, seat in enumerate(seats):
            role = roles[0] if self._target.one_role else roles[number]
            # Its rights in another cloud come first.
            after = tuple(one.address for one in crossing.resources if one.key == role.key)
            yield self._job(seat, role, f"{self._name}-{number}-{self._digest}", crossing.environment, after)

    def _crossing(self, crews: Sequence[tuple[Role, tuple[Sequence[Seat], str]]]) -> Crossing:
        """What a store in another cloud needs to let these roles in; nothing where it is in S3."""
        if self._abroad is None:
            return Crossing(resources=(), environment={})
        group = self._group.name if self._target.one_role else None
        visitors = [
            (
                role,
                Guest(
                    key=role.key,
                    part=f"{part(self._group.name)}-{part_}",
                    slots=tuple(seat.slot for seat in seats),
                    group=group,
                ),
            )
            for role, (seats, part_) in crews
        ]
        return aws_into_google(
            self._ground,
            visitors,
            group=self._group.name,
            own="byo.role",
            account=self._account.number,
            partition=self._account.partition,
            number=self._abroad.number,
            bucket=self._abroad.bucket,
            prefix=self._abroad.prefix,
        )

    def _role(self, seats: Sequence[Seat], part_: str) -> Role:
        if self._own.role is not None:
            return Role(
                key=f"{self._group.name}-replicas",
                name=self._own.role.rsplit("/", 1)[-1],
                region="",
                why="your role of the replicas",
                brought=True,
                trust=(),
            )
        slots = [seat.slot for seat in seats]
        group = self._group.name if self._target.one_role else None
        who = "all replicas of the group" if group is not None else slots[0]
        return Role(
            key=slots[0] if group is None else f"{group}-replicas",
            name=role_name(self._ground, self._account, self._group, part_),
            region="",
            why=f"what {who} may do: read the run, write their own, overwrite nothing that decides",
            trust=(trust_service(SERVICE, self._account.number),),
            policies={**self._of_run(slots, group), "job": tuple(self._of_job())},
        )

    def _of_run(self, slots: Sequence[str], group: str | None) -> dict[str, tuple[Statement, ...]]:
        """The right to take part in the run; one that lies in another cloud gives it there."""
        if not self._in_s3:
            return {}
        _, prefix = place(self._ground.run_uri)
        return {
            "run": replica_policy(bucket_arn=Ref(address=_STORE, output="arn"), prefix=prefix, slots=slots, group=group)
        }

    def _of_job(self) -> Iterator[Statement]:
        """What SageMaker does for a job, and does as its role."""
        partition, account, region = self._account.partition, self._account.number, self._target.region
        image = self._ground.image_of(self._group)
        if image_in_ecr(image) is None:
            raise Invalid(f"{image} is not in ECR, and SageMaker runs no other; push it there: scripts/image push")
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
        if self._own.subnets is not None:
            yield from _joining(partition, account, region)
        if self._target.kms_key is not None:
            key = self._target.kms_key
            known = key if key.startswith("arn:") else f"arn:{partition}:kms:{region}:{account}:key/{key}"
            yield Statement(sid="UseKey", actions=("kms:CreateGrant", "kms:DescribeKey"), resources=(known,))

    def _job(
        self, seat: Seat, role: Role, name: str, visiting: Mapping[str, Text], after: tuple[str, ...]
    ) -> TrainingJob:
        target, runtime = self._target, runtime_s(self._ground.hours, self._target)
        pending = None if target.max_pending is None else int(target.max_pending.total_seconds())
        volume = None if self._machine.own_disk else _DISK_GIB if target.volume is None else -(-target.volume // _GIB)
        environment, hyperparameters = self._told(seat, visiting)
        return TrainingJob(
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
            subnets=tuple(sorted(self._own.subnets or ())),
            security_groups=tuple(sorted(self._own.security_groups or ())),
        )

    def _told(self, seat: Seat, visiting: Mapping[str, Text]) -> tuple[Mapping[str, Text], Mapping[str, str]]:
        """What the container finds as variables, and what is too long for one."""
        ground, target = self._ground, self._target
        told: dict[str, Text] = {
            **ground.variables(self._group),
            contract.SLOT: seat.slot,
            contract.INDEX: str(seat.index),
            **visiting,
        }
        if target.gpus is not None:
            told[contract.RANKS] = str(max(1, target.gpus))
        if self._in_s3:
            region = Ref(address=_STORE, output="region")
            # The bucket's region, not the machine's: clients sign for it.
            told |= {"AWS_REGION": region, "AWS_DEFAULT_REGION": region}
        return handed_on(told)

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


def _joining(partition: str, account: str, region: str) -> tuple[Statement, ...]:
    """The right to put machines into a network. EC2's descriptions know no resources."""
    looks = ("DhcpOptions", "NetworkInterfaces", "SecurityGroups", "Subnets", "Vpcs")
    return (
        Statement(sid="LookAtNetwork", actions=tuple(f"ec2:Describe{one}" for one in looks), resources=("*",)),
        Statement(
            sid="JoinNetwork",
            actions=(
                "ec2:CreateNetworkInterface",
                "ec2:CreateNetworkInterfacePermission",
                "ec2:DeleteNetworkInterface",
                "ec2:DeleteNetworkInterfacePermission",
            ),
            resources=tuple(
                f"arn:{partition}:ec2:{region}:{account}:{one}/*"
                for one in ("network-interface", "security-group", "subnet")
            ),
        ),
    )
