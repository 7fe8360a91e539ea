"""Runs replicas as training jobs of SageMaker, with an existing role, each on its own machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.handler_helpers import Absent, each
from skerry.infra.executors.bucket_region import region_of_store
from skerry.infra.executors.cloud_executor_base import CloudExecutor, JobCreator, JobState, NamedJob, job_record
from skerry.infra.targets.sagemaker import job_views, parse_observed_settings
from skerry.infra.targets.sagemaker.jobs import Jobs, described
from skerry.infra.targets.sagemaker.resource_graph import OUTPUT, split_variables
from skerry.infra.targets.sagemaker.resource_types import Job
from skerry.runtime.errors import Invalid
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta

    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.run.executor import ReplicaHandle
    from skerry.infra.spec.model import ReplicaSlot

# A name may have 63 characters; an attempt takes up to five of them.
_MAX_NAME: Final = 58
_MODEL: Final = "a run in S3 stores /opt/ml/model with the run; for another store write output='s3://bucket/artifacts'"


@dataclass(kw_only=True)
class SageMakerExecutor(CloudExecutor):
    """Runs replicas as training jobs of SageMaker.

    role: of the replicas, by ARN; SageMaker acts as it too. It must grant access to the run's prefix of the store.
    instance: SageMaker's name, ml.g6e.xlarge. spot: spare machines; max_wait: how long a job waits for them and runs,
    max_runtime included; None is twice max_runtime. volume_gib: None for machines with their own disks. output: where
    SageMaker uploads /opt/ml/model; None is with the run.
    """

    SDK: ClassVar[tuple[str, str] | None] = ("boto3", "sagemaker")

    region: str
    role: str
    instance: str
    spot: bool = False
    max_wait: timedelta | None = None
    volume_gib: int | None = None
    output: str | None = None
    subnets: Sequence[str] = ()
    security_groups: Sequence[str] = ()
    _aws: Aws = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """See RunOptions."""
        super().__post_init__()
        if not self.role.startswith("arn:"):
            raise Invalid(f"not the ARN of a role: {self.role!r}; write arn:aws:iam::123456789012:role/NAME")
        self._aws = Aws(self.clock, self.environment)

    def _set_run(self, uri: str) -> None:
        super()._set_run(uri)
        if self.output is None and not self.run.startswith("s3://"):
            raise Invalid(f"no place to upload /opt/ml/model to: {_MODEL}")

    @property
    def place(self) -> Place:
        """See CloudExecutor."""
        return Place(cloud="aws", region=self.region, machine=self.instance, spot=self.spot)

    def _store_variables(self) -> Mapping[str, str]:
        return region_of_store(self._aws, self.run, self.region, self.variables)

    def _creator(self, context: RunContext, variables: Mapping[str, str]) -> JobCreator:
        name = f"{context.stem}-{context.replica_slots[-1].slot}"
        if len(name) > _MAX_NAME:
            raise Invalid(f"too long for a job of SageMaker: {name}; shorten slots")
        return JobCreator(
            handler=Jobs(self._aws),
            resource=lambda replica: self._job(context, replica, variables),
            output="name",
            run=self.run,
        )

    def _job(self, context: RunContext, replica: ReplicaSlot, variables: Mapping[str, str]) -> Job:
        environment, hyperparameters = split_variables({**variables, **self.own_variables(replica)})
        seconds = int(self.max_runtime.total_seconds())
        wait = None if self.max_wait is None else int(self.max_wait.total_seconds())
        return Job(
            key=replica.slot,
            name=f"{context.stem}-{replica.slot}",
            region=self.region,
            image=self.image,
            environment=environment,
            hyperparameters=hyperparameters,
            role=self.role,
            instance=self.instance,
            spot=self.spot,
            max_runtime_s=seconds,
            max_wait_s=(wait or 2 * seconds) if self.spot else None,
            volume_gib=self.volume_gib,
            output=self.output or f"{self.run}/{OUTPUT}",
            subnets=tuple(sorted(self.subnets)),
            security_groups=tuple(sorted(self.security_groups)),
        )

    def _list_jobs(self, context: RunContext) -> Iterator[NamedJob]:
        names = f"{context.stem}-{self.slots}-"
        rows = self._aws.pages(
            "sagemaker", self.region, "list_training_jobs", "TrainingJobSummaries", NameContains=names
        )
        for row in rows:
            over = row["TrainingJobStatus"] not in parse_observed_settings.LIVE
            yield NamedJob(name=str(row["TrainingJobName"]), over=over)

    def read_jobs(self, jobs: Sequence[str]) -> Sequence[JobState | None]:
        """See CloudExecutor."""
        return [_job_state(row) for row in each(lambda job: described(self._aws, self.region, job), jobs)]

    def _read_log(self, handle: ReplicaHandle) -> Iterator[str]:
        empty = Job(
            key=handle.slot,
            name=handle.job,
            region=self.region,
            image="",
            environment={},
            role="",
            instance="",
            max_runtime_s=0,
            output="",
        )
        for line in job_views.lines(self._aws, job_record(empty, handle.attempt, {"name": handle.job}), None):
            yield line.text

    def stop_job(self, handle: ReplicaHandle) -> None:
        """See CloudExecutor."""
        try:
            self._aws.call("sagemaker", self.region, "stop_training_job", TrainingJobName=handle.job)
        except Invalid as error:
            # SageMaker rejects the call if the job has ended.
            (state,) = self.read_jobs([handle.job])
            if state is None:
                raise Absent(str(error)) from error
            if not state.over:
                raise


def _job_state(row: Mapping[str, Any] | None) -> JobState | None:
    if row is None:
        return None
    status = str(row["TrainingJobStatus"])
    return JobState(
        over=status not in parse_observed_settings.LIVE,
        code=parse_observed_settings.exit_code(row),
        stopped=status == "Stopped",
        why=str(row.get("FailureReason") or parse_observed_settings.secondary(row)),
    )
