"""Runs replicas as custom jobs of Vertex AI, with an existing service account, each on its own machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from skerry.infra.executors.cloud_executor_base import CloudExecutor
from skerry.infra.targets.vertex.options import VertexTarget
from skerry.infra.targets.vertex.resource_graph import job_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import ReplicaSlot
    from skerry.infra.targets.vertex.options import Accelerator
    from skerry.infra.targets.vertex.resource_types import Job


@dataclass(kw_only=True)
class VertexExecutor(CloudExecutor):
    """Runs replicas as custom jobs of Vertex AI.

    project: its id. service_account: of the replicas, by e-mail address; must have access to the run's prefix of the
    store. machine, accelerator, accelerators: as in a spec; accelerators that a machine always has may be left out.
    """

    SDK: ClassVar[tuple[str, str] | None] = ("google.cloud.aiplatform_v1", "vertex")
    TELLS_REGION: ClassVar[bool] = False
    OUTPUT: ClassVar[str] = "name"
    NAMES: ClassVar[Mapping[str, str]] = {
        "disk": "disk_gb",
        "byo.service_account": "service_account",
        "byo.network": "network",
    }

    project: str
    region: str
    service_account: str
    machine: str
    accelerator: Accelerator | None = None
    accelerators: int | None = None
    disk_gb: int = 100
    scheduling: Literal["standard", "spot", "flex_start"] = "standard"
    network: str | None = None

    def _as_target(self) -> VertexTarget:
        byo = {"service_account": self.service_account, "network": self.network}
        return self._options_of(VertexTarget, disk=f"{self.disk_gb}GiB", byo=byo)

    def _describe(self, context: RunContext, variables: Mapping[str, str]) -> Callable[[ReplicaSlot], Job]:
        (group,) = context.spec.replicas
        return lambda replica: job_of(
            context, group, replica, {**variables, **self.own_variables(replica)}, self.service_account
        )

    def _record(self, job: str) -> StateRecord:
        record = super()._record(job)
        outputs = {**record.outputs, "id": job.rpartition("/")[2]}
        return replace(record, settings={**record.settings, "project": self.project}, outputs=outputs)
