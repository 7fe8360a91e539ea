"""Runs replicas as jobs of AWS Batch, in an existing queue, with existing roles.

The job definition is named after its content, so that the same launch uses it again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from skerry.infra.executors.cloud_executor_base import CloudExecutor
from skerry.infra.provision.graph import as_json
from skerry.infra.provision.handler import Desired
from skerry.infra.targets.aws_batch.options import AwsBatchTarget
from skerry.infra.targets.aws_batch.resource_types import Job, JobDefinition
from skerry.runtime import contract
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import ReplicaSlot

_DIGITS: Final = 12


@dataclass(kw_only=True)
class BatchExecutor(CloudExecutor):
    """Runs replicas as jobs of AWS Batch.

    queue: by name or ARN. job_role: of the replicas; must grant access to the run's prefix of the store.
    execution_role: pulls the image and writes logs; both by ARN. log_group: by name. vcpus, memory_mib, gpus: per
    replica; the queue's machines must have them. shared_memory_mib: for data loaders, part of the memory; None is half
    of it, at most 2048. attempts: how often Batch starts a job in all; one handle covers all attempts.
    """

    SDK: ClassVar[tuple[str, str] | None] = ("boto3", "aws")

    region: str
    queue: str
    job_role: str
    execution_role: str
    vcpus: int
    memory_mib: int
    gpus: int = 0
    shared_memory_mib: int | None = None
    attempts: int = 1
    log_group: str = "/aws/batch/job"

    def _as_target(self) -> AwsBatchTarget:
        for role in (self.job_role, self.execution_role):
            if not role.startswith("arn:"):
                raise Invalid(f"not the ARN of a role: {role!r}; write arn:aws:iam::123456789012:role/NAME")
        # Not validated: a spec names types of machines, and here the queue has them, of a kind that is not known.
        return AwsBatchTarget.model_construct(
            kind="aws_batch", region=self.region, instance_types=(), gpus=self.gpus, spot=None
        )

    def _describe(self, context: RunContext, variables: Mapping[str, str]) -> Callable[[ReplicaSlot], Job]:
        definition = self._definition(context, variables)
        desired = Desired(resource=definition, generation=0, run=self.run, settings=definition.settings())
        arn = self._target.handlers()[JobDefinition.KIND].create(desired)["arn"]
        return lambda replica: Job(
            key=replica.slot,
            name=f"{context.stem}-{replica.slot}",
            region=self.region,
            definition=arn,
            queue=self.queue,
            log_group=self.log_group,
            environment=self.own_variables(replica),
        )

    def _definition(self, context: RunContext, variables: Mapping[str, str]) -> JobDefinition:
        shared = min(2048, self.memory_mib // 2) if self.shared_memory_mib is None else self.shared_memory_mib
        resource = JobDefinition(
            key=self.slots,
            name="",
            region=self.region,
            image=self.image,
            command=("run",),
            environment={contract.RANKS: str(max(1, self.gpus)), **variables},
            gpus=self.gpus,
            vcpus=self.vcpus,
            memory_mib=self.memory_mib,
            shared_memory_mib=shared,
            job_role=self.job_role,
            execution_role=self.execution_role,
            log_group=self.log_group,
            attempts=self.attempts,
            timeout_s=int(self.max_runtime.total_seconds()),
        )
        content = json.dumps({name: as_json(value) for name, value in resource.settings().items()}, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:_DIGITS]
        return replace(resource, name=f"{context.stem}-{self.slots}-{digest}")

    def _record(self, job: str) -> StateRecord:
        return replace(super()._record(job), settings={"queue": self.queue})
