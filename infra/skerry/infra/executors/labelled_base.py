"""Base of the executors of services that number and label jobs: reads, lists and stops them by id."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.handler_helpers import each
from skerry.infra.executors.bucket_region import region_of_store
from skerry.infra.executors.cloud_executor_base import CloudExecutor, JobCreator, JobState, NamedJob
from skerry.infra.targets.shared import labelled_jobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.run.executor import ReplicaHandle
    from skerry.infra.spec.model import ReplicaSlot
    from skerry.infra.targets.shared.labelled_jobs import JobService, LabelledJob

# Where no region is named: an endpoint of AWS that answers for every bucket.
_ANY_REGION: Final = "us-east-1"


@dataclass(kw_only=True)
class LabelledExecutor(CloudExecutor):
    """Runs replicas as jobs of such a service. A handle's `job` is the id."""

    KIND: ClassVar[type[Resource]]

    @property
    @abstractmethod
    def service(self) -> JobService:
        """The service."""

    @property
    @abstractmethod
    def region(self) -> str:
        """The region of its jobs."""

    @abstractmethod
    def _job(self, name: str, replica: ReplicaSlot, variables: Mapping[str, str]) -> Resource:
        """The job of a replica. variables: of every replica."""

    def _store_variables(self) -> Mapping[str, str]:
        aws = Aws(self.clock, self.environment)
        return region_of_store(aws, self.run, self.environment.get("AWS_REGION", _ANY_REGION), self.variables)

    def _creator(self, context: RunContext, variables: Mapping[str, str]) -> JobCreator:
        return JobCreator(
            handler=labelled_jobs.LabelledJobs(self.service, self.KIND),
            resource=lambda replica: self._job(f"{context.stem}-{replica.slot}", replica, variables),
            output="id",
            run=self.run,
        )

    def _list_jobs(self, context: RunContext) -> Iterator[NamedJob]:
        del context  # jobs are listed by the run's label
        for job in self.service.listed(self.region, self.run):
            yield NamedJob(name=job.name, over=not job.live)

    def read_jobs(self, jobs: Sequence[str]) -> Sequence[JobState | None]:
        """See CloudExecutor."""
        rows = each(lambda job: self.service.described(self.region, job), jobs)
        return [None if row is None else _state(row) for row in rows]

    def _read_log(self, handle: ReplicaHandle) -> Iterator[str]:
        for event in self.service.events(self.region, handle.job):
            yield event.text

    def stop_job(self, handle: ReplicaHandle) -> None:
        """See CloudExecutor."""
        self.service.stop(self.region, handle.job)


def _state(job: LabelledJob) -> JobState:
    view = labelled_jobs.view_of("", 0, job)
    return JobState(over=not job.live, code=view.exit_code, stopped=job.stopped, why=view.why)
