"""Runs replicas as batch jobs of a Slurm cluster, submitted on this machine or on a login node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from pydantic import ValidationError

from skerry.infra.executors.cloud_executor_base import CloudExecutor, JobCreator, JobState, NamedJob
from skerry.infra.provision.handler import StateRecord
from skerry.infra.targets.slurm import job_views, responses
from skerry.infra.targets.slurm.cluster import Cluster
from skerry.infra.targets.slurm.jobs import Jobs, cancel, described, listed
from skerry.infra.targets.slurm.options import SlurmTarget
from skerry.infra.targets.slurm.resource_graph import folder_of, job_of
from skerry.infra.targets.slurm.resource_types import Job
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta

    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.run.executor import ReplicaHandle
    from skerry.infra.spec.model import ReplicaSlot
    from skerry.runtime.log.records import Place

# The names of logs, which outlive what Slurm knows of ended jobs.
_LOGS: Final = 'ls -1 -- "$1" 2> /dev/null || :'


@dataclass(kw_only=True)
class SlurmExecutor(CloudExecutor):
    """Runs replicas as batch jobs of a Slurm cluster; the options are those of `kind: slurm` in a spec.

    login: a destination of ssh; None submits on this machine. max_runtime: of one start, after which the job is
    requeued and continues; None is the partition's. attempts: starts of a job in all; one handle covers all of them.
    Without `code` the command runs in the home folder. A store in a folder must be on a disk that all nodes mount.
    """

    IN_CLOUD: ClassVar[bool] = False
    # squeue is cheap, and small jobs end within seconds.
    POLLS: ClassVar[Backoff] = Backoff(first=0.2, cap=15.0)

    image: str = ""
    max_runtime: timedelta | None = None  # pyright: ignore[reportIncompatibleVariableOverride]  may be the partition's
    login: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus: int = 0
    gpu_type: str | None = None
    cpus: int = 1
    memory: str | None = None
    attempts: int = 1
    folder: str = ".skerry"
    python: str = "python3"
    setup: tuple[str, ...] = ()
    container: Literal["apptainer", "pyxis"] | None = None
    extra: tuple[str, ...] = ()
    _options: SlurmTarget = field(init=False, repr=False)
    _cluster: Cluster = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """See RunOptions. Raises Invalid for an option that a spec could not have."""
        super().__post_init__()
        names = SlurmTarget.model_fields.keys() - {"kind", "time"}
        values = {name: getattr(self, name) for name in names}
        time = None if self.max_runtime is None else f"{self.max_runtime.total_seconds():.0f}s"
        try:
            self._options = SlurmTarget.model_validate({"kind": "slurm", "time": time, **values})
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise Invalid(f"cannot run on Slurm: {problems}") from error
        if self.container is not None and not self.image:
            raise Invalid(f"{self.container} runs an image; write image=/shared/images/skerry.sif")
        self._cluster = Cluster(self.clock, self.environment, self.login)

    @property
    def place(self) -> Place:
        """See CloudExecutor."""
        return self._options.place

    def _creator(self, context: RunContext, variables: Mapping[str, str]) -> JobCreator:
        def job(replica: ReplicaSlot) -> Job:
            own = {**variables, **self.own_variables(replica)}
            return job_of(context, self._options, replica, own, image=self.image)

        return JobCreator(handler=Jobs(lambda _: self._cluster), resource=job, output="job", run=self.run)

    def _list_jobs(self, context: RunContext) -> Iterator[NamedJob]:
        for row in listed(self._cluster):
            yield NamedJob(name=row.full_name, over=not row.live)
        for name in self._cluster.call(_LOGS, [folder_of(self._options, context.run_uri)]).split():
            yield NamedJob(name=name.removesuffix(".log"), over=True)

    def read_jobs(self, jobs: Sequence[str]) -> Sequence[JobState | None]:
        """See CloudExecutor."""
        records = [self._record("", job) for job in jobs]
        states: list[JobState | None] = []
        for record, row in zip(records, described(self._cluster, records), strict=True):
            if row is None or row.full_name != record.name:
                states.append(None)
                continue
            why = job_views.view(record, row).why
            stopped = row.state == responses.CANCELLED
            states.append(JobState(over=not row.live, code=row.exit_code, stopped=stopped, why=why))
        return states

    def _read_log(self, handle: ReplicaHandle) -> Iterator[str]:
        for line in job_views.lines(self._cluster, self._record(handle.slot, handle.job), None):
            yield line.text

    def stop_job(self, handle: ReplicaHandle) -> None:
        """See CloudExecutor."""
        cancel(self._cluster, handle.job.rpartition("/")[2])

    def _record(self, slot: str, job: str) -> StateRecord:
        """Return a job in the form that its readers take. job: as handles have it."""
        name, _, number = job.rpartition("/")
        return StateRecord(
            address=f"{Job.KIND}.{slot}",
            kind=Job.KIND,
            name=name,
            generation=0,
            region=self._options.region,
            life=Job.LIFE,
            brought=False,
            settings={"folder": folder_of(self._options, self.run)},
            outputs={"id": number},
            needs=(),
        )
