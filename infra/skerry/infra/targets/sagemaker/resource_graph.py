"""Builds the roles and jobs of SageMaker from the options of the groups, each with its reason. Pure.

A group has one role, unless each replica has its own. There are no other resources: machines and their network are
SageMaker's, and all training jobs of an account write to one log group.
Sources: SageMaker developer guide, "CreateTrainingJob API: Execution Role Permissions"; API reference,
CreateTrainingJob.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.ecr import fetching, image_in_ecr
from skerry.infra.clouds.aws.policies import Statement
from skerry.infra.clouds.aws.s3 import Bucket
from skerry.infra.provision.graph import Ref, short_name
from skerry.infra.targets.sagemaker.options import SageMakerTarget
from skerry.infra.targets.sagemaker.quotas import DEFAULT
from skerry.infra.targets.sagemaker.resource_types import Job
from skerry.infra.targets.sagemaker.revive_policy import revive_policy
from skerry.infra.targets.shared.aws_replica_roles import (
    GROUP_SUFFIX,
    STORE_ADDRESS,
    ReplicaRole,
    RoleOptions,
    is_in_s3,
    replica_roles,
    role_name,
)
from skerry.infra.targets.shared.revive_option import revival_text
from skerry.runtime import contract
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Account
    from skerry.infra.clouds.cross_cloud import GoogleStore
    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import Limits, Replicas, ReplicaSlot
    from skerry.infra.targets.sagemaker.machine_lookup import Machine

SERVICE: Final = "sagemaker.amazonaws.com"
LOGS: Final = "/aws/sagemaker/TrainingJobs"
"""The log group of all training jobs of an account. The first job creates it; it belongs to no run."""
OUTPUT: Final = "sagemaker"
"""The folder, in a run in S3, for the files that scripts leave in /opt/ml/model."""

_MOST_RUNTIME: Final = timedelta(days=28)
_MOST_WAIT: Final = timedelta(days=30)
_GIB: Final = 1 << 30
_DISK_GIB: Final = 100
# The longest values of an environment variable and of a hyperparameter.
_VARIABLE: Final = 512
_HYPERPARAMETER: Final = 2500
# The name of a job may have 63 characters: 34 of the run, the part of the group, a number of up to 4, a digest of the
# spec, and a generation ("-g999").
_LONGEST_PART: Final = 11


def build_resources(
    context: RunContext,
    account: Account,
    groups: Sequence[Replicas],
    machines: Sequence[Machine],
    google_store: GoogleStore | None = None,
) -> tuple[Resource, ...]:
    """Return all resources of these groups, without the run's bucket.

    machines: of each group. google_store: the store, if it is not in S3.
    """
    built = (
        resource
        for group, machine in zip(groups, machines, strict=True)
        for resource in _Group(context, account, group, machine, google_store).resources()
    )
    return tuple({resource.address: resource for resource in built}.values())


def name_part(group: Replicas) -> str:
    """Return the group's part of resource names."""
    return short_name(group.name, _LONGEST_PART)


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


class _Group:
    """Builds the resources of one group."""

    def __init__(
        self, context: RunContext, account: Account, group: Replicas, machine: Machine, google_store: GoogleStore | None
    ) -> None:
        self._context = context
        self._account = account
        self._group = group
        self._machine = machine
        self._google_store = google_store
        self._target = SageMakerTarget.of(group)
        self._byo = self._target.byo
        self._name = f"{context.stem}-{name_part(group)}"
        # A run at the same URI with other rounds gets other names of jobs, because records of finished jobs remain.
        # Only what the spec says counts: an option that a later version of skerry adds renames no job of a live run.
        fixed = context.spec.outer.model_dump_json(exclude_unset=True).encode()
        self._digest = hashlib.sha256(fixed).hexdigest()[:6]

    def resources(self) -> Iterator[Resource]:
        """Return them in an order in which they can be created."""
        options = RoleOptions(
            service=SERVICE,
            part=name_part(self._group),
            one_role=self._target.one_role,
            own=self._byo.role,
            own_option="byo.role",
        )
        # The user's own role has its permissions already.
        policies = {} if self._byo.role is not None else {"job": tuple(self._job_policy())}
        if self._target.revive is not None:
            policies["revive"] = tuple(self._revive_policy(options))
        group_roles = replica_roles(self._context, self._account, self._group, options, self._google_store, policies)
        yield from group_roles.resources
        for number, (replica, role) in enumerate(group_roles.by_replica()):
            yield self._job(replica, role, f"{self._name}-{number}-{self._digest}", group_roles.environment)

    def _job_policy(self) -> Iterator[Statement]:
        """Return the permissions that SageMaker uses for a job with its role."""
        partition, account, region = self._account.partition, self._account.number, self._target.region
        output = _output(self._context, self._group)
        image = self._context.image_of(self._group)
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
            resources=(f"arn:{partition}:s3:::{output.removeprefix('s3://').rstrip('/')}/*",),
        )
        if self._byo.subnets is not None:
            yield from _network_policy(partition, account, region)
        if self._target.kms_key is not None:
            key = self._target.kms_key
            known = key if key.startswith("arn:") else f"arn:{partition}:kms:{region}:{account}:key/{key}"
            yield Statement(sid="UseKey", actions=("kms:CreateGrant", "kms:DescribeKey"), resources=(known,))

    def _revive_policy(self, options: RoleOptions) -> Iterator[Statement]:
        role = role_name(self._context, self._account, options.part, GROUP_SUFFIX)
        return revive_policy(
            self._target,
            self._account,
            self._context.run_uri,
            jobs=self._name,
            count=self._group.count,
            role=self._context.spec.aws.role_path + role,
            runtime_s=runtime_s(self._context.hours, self._target),
        )

    def _job(self, replica: ReplicaSlot, role: ReplicaRole, name: str, google_variables: Mapping[str, Text]) -> Job:
        job = job_of(self._context, self._group, replica, self._variables(google_variables), role.role.ref("arn"))
        volume = self._target.volume
        return replace(
            job,
            name=name,
            after=role.after,
            volume_gib=None if self._machine.own_disk else _DISK_GIB if volume is None else -(-volume // _GIB),
        )

    def _variables(self, google_variables: Mapping[str, Text]) -> Mapping[str, Text]:
        context = self._context
        variables: dict[str, Text] = {
            **context.variables(self._group),
            **context.bucket_regions(Bucket.KIND),
            **google_variables,
        }
        if self._target.revive is not None:
            variables[contract.REVIVE] = revival_text(self._target.revive_after, context.spec.faults.restarts)
        if is_in_s3(context):
            region = Ref(address=STORE_ADDRESS, output="region")
            # The bucket's region, not the machine's, because clients sign requests for it.
            variables |= {"AWS_REGION": region, "AWS_DEFAULT_REGION": region}
        return variables


def job_of(
    context: RunContext, group: Replicas, replica: ReplicaSlot, variables: Mapping[str, Text], role: Text
) -> Job:
    """Return the job of a replica on a machine with its own disk. variables: of every replica of its group.

    role: its ARN. Raises Invalid for a variable that is too long.
    """
    target = SageMakerTarget.of(group)
    runtime = runtime_s(context.hours, target)
    ranks = {} if target.gpus is None else {contract.RANKS: str(max(1, target.gpus))}
    environment, hyperparameters = split_variables({**ranks, **variables, contract.SLOT: replica.slot})
    return Job(
        key=replica.slot,
        name=f"{context.stem}-{replica.slot}",
        region=target.region,
        why=f"replica {replica.index} of the run",
        image=context.image_of(group),
        environment=environment,
        hyperparameters=hyperparameters,
        role=role,
        instance=target.instance,
        spot=target.spot,
        max_runtime_s=runtime,
        max_wait_s=wait_s(runtime, target),
        max_pending_s=None if target.max_pending is None else int(target.max_pending.total_seconds()),
        retries=target.retries,
        kms_key=target.kms_key,
        output=_output(context, group),
        subnets=tuple(sorted(target.byo.subnets or ())),
        security_groups=tuple(sorted(target.byo.security_groups or ())),
    )


def _output(context: RunContext, group: Replicas) -> str:
    target = SageMakerTarget.of(group)
    if target.output is not None:
        return target.output
    if not is_in_s3(context):
        raise Invalid(f"the store of {group.name} is not in S3: write output: s3://my-bucket/artifacts")
    return f"{context.run_uri}/{OUTPUT}"


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
