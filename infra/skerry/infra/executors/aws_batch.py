"""Replicas as jobs of AWS Batch, in a queue and with roles that exist.

What a job runs is registered as a definition whose name says its content, so the same launch uses it again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.executors.aws import region_of_store
from skerry.infra.executors.cloud import CloudExecutor, Maker, Named, Seen, made_of
from skerry.infra.graph import as_json
from skerry.infra.handler import Wanted
from skerry.infra.targets.aws_batch import reading, watching
from skerry.infra.targets.aws_batch.handlers import JobDefinitions
from skerry.infra.targets.aws_batch.resources import Job, JobDefinition
from skerry.infra.targets.aws_batch.watching import Around
from skerry.infra.targets.aws_batch.working import Jobs, described
from skerry.runtime import contract
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.executor import ReplicaHandle
    from skerry.infra.spec import Seat
    from skerry.infra.target import Ground

_STOPPED: Final = "skerry: stopped by its executor"
_DIGITS: Final = 12


@dataclass(kw_only=True)
class BatchExecutor(CloudExecutor):
    """See ServerlessExecutor.

    queue: by name or ARN. job_role: the replicas'; it must let them use the run's prefix of the store. execution_role:
    fetches the image and writes logs; both by ARN. log_group: by name. vcpus, memory_mib, gpus: of one replica; the
    queue's machines must have them. shared_memory_mib: for data loaders, counted as memory; None is half, at most 2048.
    attempts: how often Batch starts a replica in all; a handle is all of these.
    """

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

    def _of_store(self) -> Mapping[str, str]:
        return region_of_store(self._aws, self.run, self.region, self.variables)

    def _prepared(self, ground: Ground, told: Mapping[str, str]) -> Maker:
        definition = self._definition(ground, told)
        wanted = Wanted(resource=definition, generation=0, run=self.run, settings=definition.settings())
        arn = JobDefinitions(self._aws).create(wanted)["arn"]

        def job(seat: Seat) -> Job:
            environment = {contract.SLOT: seat.slot, contract.INDEX: str(seat.index)}
            return self._job(seat.slot, f"{ground.stem}-{seat.slot}", arn, environment)

        return Maker(handler=Jobs(self._aws), resource=job, output="id", run=self.run)

    def _definition(self, ground: Ground, told: Mapping[str, str]) -> JobDefinition:
        seconds = int(self.max_runtime.total_seconds())
        shared = min(2048, self.memory_mib // 2) if self.shared_memory_mib is None else self.shared_memory_mib
        resource = JobDefinition(
            key=self.slots,
            name="",
            region=self.region,
            image=self.image,
            command=("run",),
            environment={contract.RANKS: str(max(1, self.gpus)), **told},
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
        return replace(resource, name=f"{ground.stem}-{self.slots}-{digest}")

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

    def _listed(self, ground: Ground) -> Iterator[Named]:
        names = [{"name": "JOB_NAME", "values": [f"{ground.stem}-{self.slots}-*"]}]
        rows = self._aws.pages("batch", self.region, "list_jobs", "jobSummaryList", jobQueue=self.queue, filters=names)
        for row in rows:
            yield Named(name=str(row["jobName"]), over=row["status"] not in reading.LIVE)

    def _look(self, jobs: Sequence[str]) -> Sequence[Seen | None]:
        rows = {str(row["jobId"]): row for row in described(self._aws, self.region, jobs)}
        found: list[Seen | None] = []
        for job in jobs:
            row = rows.get(job)
            if row is None:
                found.append(None)
                continue
            made = made_of(self._job("", str(row["jobName"]), "", {}), 0, {"id": job})
            reason = str(row.get("statusReason", ""))
            stopped = row.get("isTerminated") is True or row.get("isCancelled") is True or reason == _STOPPED
            code = watching.view(made, row, Around(queues={}, environments={})).exit_code
            said = str(row.get("container", {}).get("reason", ""))
            why = "; ".join(filter(None, (reason, said)))
            found.append(Seen(over=row["status"] not in reading.LIVE, code=code, stopped=stopped, why=why))
        return found

    def _lines(self, handle: ReplicaHandle) -> Iterator[str]:
        made = made_of(self._job(handle.slot, handle.slot, "", {}), handle.attempt, {"id": handle.job})
        for line in watching.lines(self._aws, made, None):
            yield line.text

    def _stop(self, handle: ReplicaHandle) -> None:
        self._aws.call("batch", self.region, "terminate_job", jobId=handle.job, reason=_STOPPED)
