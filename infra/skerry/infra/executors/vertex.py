"""Runs replicas as custom jobs of Vertex AI, with an existing service account, each on its own machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from skerry.infra.clouds.google.session import Google
from skerry.infra.clouds.handler_helpers import each
from skerry.infra.executors.cloud_executor_base import CloudExecutor, JobCreator, JobState, NamedJob, job_record
from skerry.infra.targets.vertex import built_in_accelerators, job_views, parse_observed_settings, requests
from skerry.infra.targets.vertex.jobs import Jobs, cancel, described, listed
from skerry.infra.targets.vertex.resource_types import Job
from skerry.runtime import contract
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.run.executor import ReplicaHandle
    from skerry.infra.spec.model import ReplicaSlot
    from skerry.infra.targets.vertex.options import Accelerator

_STOPPED: Final = ("JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED")


@dataclass(kw_only=True)
class VertexExecutor(CloudExecutor):
    """Runs replicas as custom jobs of Vertex AI.

    project: its id. service_account: of the replicas, by e-mail address; must have access to the run's prefix of the
    store. machine, accelerator, accelerators: as in a spec; accelerators that a machine always has may be left out.
    """

    SDK: ClassVar[tuple[str, str] | None] = ("google.cloud.aiplatform", "vertex")

    project: str
    region: str
    service_account: str
    machine: str
    accelerator: Accelerator | None = None
    accelerators: int | None = None
    disk_gb: int = 100
    scheduling: Literal["standard", "spot", "flex_start"] = "standard"
    network: str | None = None
    _google: Google = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """See RunOptions."""
        super().__post_init__()
        self._google = Google(self.clock, self.environment, project=self.project)

    @property
    def _accelerators(self) -> tuple[str | None, int]:
        """The name and number of accelerators of a machine."""
        return built_in_accelerators.of_machine(self.machine, self.accelerator, self.accelerators) or (None, 0)

    @property
    def place(self) -> Place:
        """See CloudExecutor."""
        name, count = self._accelerators
        return Place(
            cloud="google",
            region=self.region,
            machine=self.machine,
            accelerator=name,
            accelerators=count,
            spot=self.scheduling == "spot",
        )

    def _creator(self, context: RunContext, variables: Mapping[str, str]) -> JobCreator:
        return JobCreator(
            handler=Jobs(self._google),
            resource=lambda replica: self._job(context, replica, variables),
            output="name",
            run=self.run,
        )

    def _job(self, context: RunContext, replica: ReplicaSlot, variables: Mapping[str, str]) -> Job:
        name, count = self._accelerators
        return Job(
            key=replica.slot,
            name=f"{context.stem}-{replica.slot}",
            region=self.region,
            project=self.project,
            image=self.image,
            args=("run",),
            environment={
                contract.RANKS: str(max(1, count)),
                **variables,
                **self.own_variables(replica),
                contract.COMMAND: requests.escaped(variables[contract.COMMAND]),
            },
            machine=self.machine,
            accelerator=name,
            accelerators=count,
            disk_gb=self.disk_gb,
            disk_type=None,
            scheduling=self.scheduling,
            max_wait_s=None,
            timeout_s=int(self.max_runtime.total_seconds()),
            service_account=self.service_account,
            network=self.network,
        )

    def _list_jobs(self, context: RunContext) -> Iterator[NamedJob]:
        del context  # jobs are listed by the run's label
        for row in listed(self._google, self.run, self.project, self.region):
            over = parse_observed_settings.state(row) not in parse_observed_settings.LIVE
            yield NamedJob(name=str(row.get("displayName", "")), over=over)

    def read_jobs(self, jobs: Sequence[str]) -> Sequence[JobState | None]:
        """See CloudExecutor."""
        return [self._job_state(row) for row in each(lambda job: described(self._google, job), jobs)]

    def _job_state(self, row: Mapping[str, Any] | None) -> JobState | None:
        if row is None:
            return None
        state = parse_observed_settings.state(row)
        return JobState(
            over=state not in parse_observed_settings.LIVE,
            code=job_views.view(self._record("", 0, str(row["name"])), row).exit_code,
            stopped=state in _STOPPED,
            why=str(parse_observed_settings.error(row).get("message") or state.removeprefix("JOB_STATE_").lower()),
        )

    def _read_log(self, handle: ReplicaHandle) -> Iterator[str]:
        for line in job_views.lines(self._google, self._record(handle.slot, handle.attempt, handle.job), None):
            yield line.text

    def _record(self, slot: str, attempt: int, job: str) -> StateRecord:
        """A job in the form that `job_views` takes. job: its full resource name."""
        resource = Job(
            key=slot,
            name=slot,
            region=self.region,
            project=self.project,
            image=self.image,
            args=(),
            environment={},
            machine=self.machine,
            accelerator=None,
            accelerators=0,
            disk_gb=self.disk_gb,
            disk_type=None,
            scheduling=self.scheduling,
            max_wait_s=None,
            timeout_s=None,
            service_account=self.service_account,
        )
        return job_record(resource, attempt, {"name": job, "id": job.rpartition("/")[2]})

    def stop_job(self, handle: ReplicaHandle) -> None:
        """See CloudExecutor."""
        cancel(self._google, handle.job)
