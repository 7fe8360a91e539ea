"""Runs replicas as jobs of AWS Batch, in an existing queue, with existing roles.

The job definition is named after its content, so that the same launch uses it again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Final

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.executors.bucket_region import region_of_store
from skerry.infra.executors.cloud_executor_base import CloudExecutor, JobCreator, JobState, NamedJob, job_record
from skerry.infra.provision.graph import as_json
from skerry.infra.provision.handler import Desired
from skerry.infra.targets.aws_batch import job_views, parse_observed_settings
from skerry.infra.targets.aws_batch.handlers import JobDefinitions
from skerry.infra.targets.aws_batch.job_views import QueueContext
from skerry.infra.targets.aws_batch.jobs import Jobs, described
from skerry.infra.targets.aws_batch.resource_types import Job, JobDefinition
from skerry.runtime import contract
from skerry.runtime.errors import Invalid
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.run.executor import ReplicaHandle
    from skerry.infra.spec.model import ReplicaSlot

_STOPPED: Final = "skerry: stopped by its executor"
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
    _aws: Aws = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """See RunOptions."""
        super().__post_init__()
        for role in (self.job_role, self.execution_role):
            if not role.startswith("arn:"):
                raise Invalid(f"not the ARN of a role: {role!r}; write arn:aws:iam::123456789012:role/NAME")
        self._aws = Aws(self.clock, self.environment)

    @property
    def place(self) -> Place:
        """See CloudExecutor. The queue chooses the machine."""
        return Place(cloud="aws", region=self.region, accelerators=self.gpus)

    def _store_variables(self) -> Mapping[str, str]:
        return region_of_store(self._aws, self.run, self.region, self.variables)

    def _creator(self, context: RunContext, variables: Mapping[str, str]) -> JobCreator:
        definition = self._definition(context, variables)
        desired = Desired(resource=definition, generation=0, run=self.run, settings=definition.settings())
        arn = JobDefinitions(self._aws).create(desired)["arn"]

        def job(replica: ReplicaSlot) -> Job:
            return self._job(replica.slot, f"{context.stem}-{replica.slot}", arn, self.own_variables(replica))

        return JobCreator(handler=Jobs(self._aws), resource=job, output="id", run=self.run)

    def _definition(self, context: RunContext, variables: Mapping[str, str]) -> JobDefinition:
        seconds = int(self.max_runtime.total_seconds())
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
            timeout_s=seconds,
        )
        content = json.dumps({name: as_json(value) for name, value in resource.settings().items()}, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:_DIGITS]
        return replace(resource, name=f"{context.stem}-{self.slots}-{digest}")

    def _job(self, slot: str, name: str, definition: str, environment: Mapping[str, str]) -> Job:
        return Job(
            key=slot,
            name=name,
            region=self.region,
            definition=definition,
            queue=self.queue,
            log_group=self.log_group,
            environment=environment,
        )

    def _list_jobs(self, context: RunContext) -> Iterator[NamedJob]:
        names = [{"name": "JOB_NAME", "values": [f"{context.stem}-{self.slots}-*"]}]
        rows = self._aws.pages("batch", self.region, "list_jobs", "jobSummaryList", jobQueue=self.queue, filters=names)
        for row in rows:
            yield NamedJob(name=str(row["jobName"]), over=row["status"] not in parse_observed_settings.LIVE)

    def read_jobs(self, jobs: Sequence[str]) -> Sequence[JobState | None]:
        """See CloudExecutor."""
        rows = {str(row["jobId"]): row for row in described(self._aws, self.region, jobs)}
        states: list[JobState | None] = []
        for job in jobs:
            row = rows.get(job)
            if row is None:
                states.append(None)
                continue
            record = job_record(self._job("", str(row["jobName"]), "", {}), 0, {"id": job})
            reason = str(row.get("statusReason", ""))
            stopped = row.get("isTerminated") is True or row.get("isCancelled") is True or reason == _STOPPED
            code = job_views.view(record, row, QueueContext(queues={}, environments={})).exit_code
            container_reason = str(row.get("container", {}).get("reason", ""))
            why = "; ".join(filter(None, (reason, container_reason)))
            states.append(
                JobState(over=row["status"] not in parse_observed_settings.LIVE, code=code, stopped=stopped, why=why)
            )
        return states

    def _read_log(self, handle: ReplicaHandle) -> Iterator[str]:
        record = job_record(self._job(handle.slot, handle.slot, "", {}), handle.attempt, {"id": handle.job})
        for line in job_views.lines(self._aws, record, None):
            yield line.text

    def stop_job(self, handle: ReplicaHandle) -> None:
        """See CloudExecutor."""
        self._aws.call("batch", self.region, "terminate_job", jobId=handle.job, reason=_STOPPED)
