"""Runs replicas as jobs of Hugging Face, each in one container that is started once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.executors.cloud_executor_base import CloudExecutor
from skerry.infra.targets.hf_jobs.options import HfJobsTarget
from skerry.infra.targets.hf_jobs.resource_graph import job_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import ReplicaSlot
    from skerry.infra.targets.hf_jobs.resource_types import Job


@dataclass(kw_only=True)
class HFJobsExecutor(CloudExecutor):
    """Runs replicas as jobs of Hugging Face.

    namespace: a user or an organization. flavor: the kind of machine. secrets: secret variables of the replicas, each
    with the name of the variable of `environment` that holds the value; a store in S3 needs its two keys.
    """

    SDK: ClassVar[tuple[str, str] | None] = ("huggingface_hub", "hf-jobs")

    namespace: str
    flavor: str = "cpu-basic"
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])

    def _as_target(self) -> HfJobsTarget:
        return self._options_of(HfJobsTarget, secrets=dict(self.secrets))

    def _describe(self, context: RunContext, variables: Mapping[str, str]) -> Callable[[ReplicaSlot], Job]:
        (group,) = context.spec.replicas
        return lambda replica: job_of(context, group, replica, {**variables, **self.own_variables(replica)})
