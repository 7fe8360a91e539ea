"""Runs replicas as jobs of Hugging Face, each in one container that is started once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.executors.labelled_base import LabelledExecutor
from skerry.infra.targets.hf_jobs.hub import Hub
from skerry.infra.targets.hf_jobs.labelled_jobs_service import HfJobs
from skerry.infra.targets.hf_jobs.options import gpus_of
from skerry.infra.targets.hf_jobs.resource_graph import COMMAND
from skerry.infra.targets.hf_jobs.resource_types import Job
from skerry.runtime import contract
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.spec.model import ReplicaSlot
    from skerry.infra.targets.shared.labelled_jobs import JobService


@dataclass(kw_only=True)
class HFJobsExecutor(LabelledExecutor):
    """Runs replicas as jobs of Hugging Face.

    namespace: a user or an organization. flavor: the kind of machine. secrets: secret variables of the replicas, each
    with the name of the variable of `environment` that holds the value; a store in S3 needs its two keys.
    """

    SDK: ClassVar[tuple[str, str] | None] = ("huggingface_hub", "hf-jobs")
    KIND: ClassVar = Job

    namespace: str
    flavor: str = "cpu-basic"
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])
    _service: HfJobs = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """See RunOptions."""
        super().__post_init__()
        self._service = HfJobs(Hub(self.clock, self.environment), self.environment)

    @property
    def place(self) -> Place:
        """See CloudExecutor."""
        return Place(cloud="huggingface", machine=self.flavor, accelerators=gpus_of(self.flavor))

    @property
    def service(self) -> JobService:
        """See LabelledExecutor."""
        return self._service

    @property
    def region(self) -> str:
        """See LabelledExecutor."""
        return self.namespace

    def _job(self, name: str, replica: ReplicaSlot, variables: Mapping[str, str]) -> Job:
        return Job(
            key=replica.slot,
            name=name,
            region=self.namespace,
            image=self.image,
            command=COMMAND,
            environment={
                contract.RANKS: str(max(1, gpus_of(self.flavor))),
                **variables,
                **self.own_variables(replica),
            },
            flavor=self.flavor,
            timeout_s=int(self.max_runtime.total_seconds()),
            secrets=self.secrets,
        )
