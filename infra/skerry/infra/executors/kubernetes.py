"""Runs replicas as Jobs of a Kubernetes cluster, in an existing namespace, each in one pod that is started once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.handler_helpers import Absent, each
from skerry.infra.executors.bucket_region import region_of_store
from skerry.infra.executors.cloud_executor_base import CloudExecutor, JobCreator, JobState, NamedJob, job_record
from skerry.infra.targets.kubernetes import job_views, manifests, parse_observed_settings
from skerry.infra.targets.kubernetes.cluster import Cluster, jobs_path
from skerry.infra.targets.kubernetes.jobs import Jobs, stop
from skerry.infra.targets.kubernetes.resource_types import Job
from skerry.runtime import contract
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.run.executor import ReplicaHandle
    from skerry.infra.spec.model import ReplicaSlot

_MIB = 1 << 20
# Where no region is named: an endpoint of AWS that answers for every bucket.
_ANY_REGION = "us-east-1"


@dataclass(kw_only=True)
class KubernetesExecutor(CloudExecutor):
    """Runs replicas as Jobs of a cluster.

    context: of the kubeconfig; None is the current one. secret: a Secret whose entries become variables of the
    replicas, such as the keys that open the store. service_account: of the pods; no token of it is mounted. cpu: as
    Kubernetes writes it. tolerations: as the API has them. grace_s: from SIGTERM to SIGKILL.
    """

    SDK: ClassVar[tuple[str, str] | None] = ("lightkube", "kubernetes")

    namespace: str
    context: str | None = None
    secret: str | None = None
    service_account: str = "default"
    cpu: str = "1"
    memory_mib: int = 4096
    gpus: int = 0
    shared_memory_mib: int = 1024
    node_selector: Mapping[str, str] = field(default_factory=dict[str, str])
    tolerations: tuple[Mapping[str, str], ...] = ()
    queue: str | None = None
    grace_s: int = 60
    _cluster: Cluster = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """See RunOptions."""
        super().__post_init__()
        self._cluster = Cluster(self.clock, self.environment, self.context)

    @property
    def place(self) -> Place:
        """See CloudExecutor."""
        return Place(cloud="kubernetes", accelerators=self.gpus)

    def _store_variables(self) -> Mapping[str, str]:
        aws = Aws(self.clock, self.environment)
        return region_of_store(aws, self.run, self.environment.get("AWS_REGION", _ANY_REGION), self.variables)

    def _creator(self, context: RunContext, variables: Mapping[str, str]) -> JobCreator:
        return JobCreator(
            handler=_NamedJobs(self._cluster),
            resource=lambda replica: self._job(f"{context.stem}-{replica.slot}", replica, variables),
            output="name",
            run=self.run,
        )

    def _job(self, name: str, replica: ReplicaSlot, variables: Mapping[str, str]) -> Job:
        return self._resource(
            replica.slot,
            name,
            {
                contract.RANKS: str(max(1, self.gpus)),
                **variables,
                **self.own_variables(replica),
            },
        )

    def _resource(self, slot: str, name: str, environment: Mapping[str, str]) -> Job:
        return Job(
            key=slot,
            name=name,
            region=self.namespace,
            image=self.image,
            args=("run",),
            environment=environment,
            cpu=self.cpu,
            memory=self.memory_mib * _MIB,
            gpus=self.gpus,
            shared_memory=self.shared_memory_mib * _MIB,
            node_selector=self.node_selector,
            tolerations=self.tolerations,
            priority_class=None,
            pull_secret=None,
            queue=self.queue,
            secret=self.secret,
            grace_s=self.grace_s,
            service_account=self.service_account,
            attempts=1,
            deadline_s=int(self.max_runtime.total_seconds()),
        )

    def _list_jobs(self, context: RunContext) -> Iterator[NamedJob]:
        del context  # jobs are listed by the run's label
        query = {"labelSelector": manifests.selector(self.run)}
        for row in self._cluster.items(jobs_path(self.namespace), query):
            yield NamedJob(name=str(row["metadata"]["name"]), over=parse_observed_settings.pods_over(row))

    def read_jobs(self, jobs: Sequence[str]) -> Sequence[JobState | None]:
        """See CloudExecutor."""
        rows = each(self._described, jobs)
        views = job_views.views(self._cluster, [self._record("", 0, job) for job in jobs])
        return [None if row is None else _state(row, view) for row, view in zip(rows, views, strict=True)]

    def _described(self, job: str) -> dict[str, Any] | None:
        try:
            return self._cluster.get(jobs_path(self.namespace, job))
        except Absent:
            return None

    def _read_log(self, handle: ReplicaHandle) -> Iterator[str]:
        for line in job_views.lines(self._cluster, self._record(handle.slot, 0, handle.job), None):
            yield line.text

    def _record(self, slot: str, attempt: int, job: str) -> StateRecord:
        """A job in the form that `job_views` takes. job: its name."""
        return job_record(self._resource(slot, job, {contract.RUN_URI: self.run}), attempt, {})

    def stop_job(self, handle: ReplicaHandle) -> None:
        """See CloudExecutor."""
        stop(self._cluster, self.namespace, handle.job)


class _NamedJobs(Jobs):
    """Jobs whose output is also their name, which a handle holds."""

    def create(self, desired: Any) -> Mapping[str, str]:
        """See Handler.create."""
        return {**super().create(desired), "name": desired.name}


def _state(row: Mapping[str, Any], view: Any) -> JobState:
    return JobState(
        over=parse_observed_settings.pods_over(row),
        code=view.exit_code,
        stopped=parse_observed_settings.state(row)
        in {parse_observed_settings.STOPPED, parse_observed_settings.TERMINATING},
        why=view.why,
    )
