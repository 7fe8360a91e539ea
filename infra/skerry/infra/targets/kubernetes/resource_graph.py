"""Builds the resources in a Kubernetes cluster from the options of the groups. Pure.

Each replica has a service account and a Job, so that one of them can be started again without the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.s3 import Bucket
from skerry.infra.clouds.google.generation_names import name_with_room
from skerry.infra.targets.kubernetes.options import KubernetesTarget
from skerry.infra.targets.kubernetes.resource_types import Job, ServiceAccount
from skerry.infra.targets.kubernetes.store_identity import StoreIdentity
from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import Replicas, ReplicaSlot

    Trust: TypeAlias = Callable[[RunContext, Replicas, ServiceAccount], StoreIdentity]

# The name of a job becomes a label of its pods.
_LONGEST_NAME: Final = 63
_HOUR_S: Final = 3600


def build_resources(
    context: RunContext,
    groups: Sequence[Replicas],
    store_variables: Mapping[str, str],
    trust: Trust | None = None,
) -> tuple[Resource, ...]:
    """Return all resources of these groups.

    store_variables: to open the store with, without credentials. trust: gives a replica of a group without a Secret its
    access to the store.
    """
    return tuple(
        resource
        for group in groups
        for replica in context.slots_of(group)
        for resource in _of_replica(context, group, replica, store_variables, trust)
    )


def _of_replica(
    context: RunContext,
    group: Replicas,
    replica: ReplicaSlot,
    store_variables: Mapping[str, str],
    trust: Trust | None,
) -> Iterator[Resource]:
    target = KubernetesTarget.of(group)
    account = ServiceAccount(
        key=replica.slot,
        name=_name_of(context, replica),
        region=target.namespace,
        why=f"the account of {replica.slot}, without rights in the cluster",
    )
    yield account
    identity = StoreIdentity()
    if target.secret is None and trust is not None:
        identity = trust(context, group, account)
    yield from identity.resources
    variables = {
        **store_variables,
        **context.bucket_regions(Bucket.KIND),
        **(identity.environment or {}),
        **context.variables(group),
    }
    yield replace(
        job_of(context, group, replica, variables, account.name),
        # The settings of a job do not reference its permissions.
        after=(account.address, *(resource.address for resource in identity.resources)),
        token_audience=identity.audience,
        credentials=identity.credentials,
    )


def job_of(
    context: RunContext, group: Replicas, replica: ReplicaSlot, variables: Mapping[str, Text], account: str
) -> Job:
    """Return the job of a replica. variables: of every replica of its group. account: of the service, by name."""
    target = KubernetesTarget.of(group)
    return Job(
        key=replica.slot,
        name=_name_of(context, replica),
        region=target.namespace,
        why=f"replica {replica.index} of the run",
        image=context.image_of(group),
        args=("run",),
        environment={
            contract.RANKS: str(max(1, target.gpus)),
            **variables,
            contract.SLOT: replica.slot,
        },
        cpu=target.cpu,
        memory=target.memory,
        gpus=target.gpus,
        shared_memory=target.shared_memory,
        node_selector=target.node_selector,
        tolerations=tuple(toleration.model_dump(exclude_none=True) for toleration in target.tolerations),
        priority_class=target.priority_class,
        pull_secret=target.pull_secret,
        queue=target.queue,
        secret=target.secret,
        grace_s=int(target.grace.total_seconds()),
        service_account=account,
        attempts=target.attempts,
        deadline_s=deadline_s(context.hours, target),
        claim=None if target.claim is None else target.claim.model_dump(),
        secrets={
            variable: {"name": secret.name, "key": str(secret.key)}
            for variable, secret in context.inputs(group).secrets.items()
            if not secret.is_fetched
        },
    )


def _name_of(context: RunContext, replica: ReplicaSlot) -> str:
    return name_with_room(f"{context.stem}-{replica.slot}", _LONGEST_NAME)


def deadline_s(hours: float | None, target: KubernetesTarget) -> int | None:
    """The time limit of a job: the shorter one of the run's and of the option."""
    limits = [
        *([] if hours is None else [int(hours * _HOUR_S)]),
        *([] if target.max_runtime is None else [int(target.max_runtime.total_seconds())]),
    ]
    return max(1, min(limits)) if limits else None
