"""Builds the jobs of Hugging Face from the options of the groups. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.s3 import Bucket
from skerry.infra.targets.hf_jobs.options import HfJobsTarget, gpus_of
from skerry.infra.targets.hf_jobs.resource_types import Job
from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.provision.graph import Text
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import Replicas, ReplicaSlot

COMMAND: Final = ("skerry-replica", "run")
"""The command of a job, which replaces the image's entrypoint."""
_HOUR_S: Final = 3600
# A spec without any limit is refused; a run without a limit of its own that is passed here gets the longest.
_LONGEST_S: Final = 365 * 24 * _HOUR_S


def build_resources(
    context: RunContext, groups: Sequence[Replicas], store_variables: Mapping[str, str]
) -> tuple[Job, ...]:
    """Return the jobs of these groups. store_variables: to open the store with, without credentials."""
    return tuple(
        job_of(
            context,
            group,
            replica,
            {**store_variables, **context.bucket_regions(Bucket.KIND), **context.variables(group)},
        )
        for group in groups
        for replica in context.slots_of(group)
    )


def job_of(context: RunContext, group: Replicas, replica: ReplicaSlot, variables: Mapping[str, Text]) -> Job:
    """Return the job of a replica. variables: of every replica of its group."""
    target = HfJobsTarget.of(group)
    return Job(
        key=replica.slot,
        name=f"{context.stem}-{replica.slot}",
        region=target.namespace,
        why=f"replica {replica.index} of the run",
        image=context.image_of(group),
        command=COMMAND,
        environment={
            contract.RANKS: str(max(1, gpus_of(target.flavor))),
            **variables,
            contract.SLOT: replica.slot,
        },
        flavor=target.flavor,
        timeout_s=timeout_s(context.hours, target),
        secrets=target.secrets,
    )


def timeout_s(hours: float | None, target: HfJobsTarget) -> int:
    """The time limit of a job: the shorter one of the run's and of the option."""
    limits = [
        *([] if hours is None else [int(hours * _HOUR_S)]),
        *([] if target.max_runtime is None else [int(target.max_runtime.total_seconds())]),
    ]
    return max(1, min(limits, default=_LONGEST_S))
