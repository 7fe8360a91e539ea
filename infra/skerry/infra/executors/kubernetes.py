"""Runs replicas as Jobs of a Kubernetes cluster, in an existing namespace, each in one pod that is started once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.executors.cloud_executor_base import CloudExecutor
from skerry.infra.targets.kubernetes.options import KubernetesTarget
from skerry.infra.targets.kubernetes.resource_graph import job_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import ReplicaSlot
    from skerry.infra.targets.kubernetes.resource_types import Job


@dataclass(kw_only=True)
class KubernetesExecutor(CloudExecutor):
    """Runs replicas as Jobs of a cluster.

    context: of the kubeconfig; None is the current one. secret: a Secret whose entries become variables of the
    replicas, such as the keys that open the store. service_account: of the pods; no token of it is mounted. cpu: as
    Kubernetes writes it. tolerations: as the API has them. grace_s: from SIGTERM to SIGKILL.
    """

    SDK: ClassVar[tuple[str, str] | None] = ("lightkube", "kubernetes")
    OUTPUT: ClassVar[str] = "name"
    NAMES: ClassVar[Mapping[str, str]] = {
        "memory": "memory_mib",
        "shared_memory": "shared_memory_mib",
        "grace": "grace_s",
    }

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

    def _as_target(self) -> KubernetesTarget:
        return self._options_of(
            KubernetesTarget,
            memory=f"{self.memory_mib}MiB",
            shared_memory=f"{self.shared_memory_mib}MiB",
            node_selector=dict(self.node_selector),
            tolerations=(),  # a spec has only some of their fields
            attempts=1,
            grace=f"{self.grace_s}s",
        )

    def _describe(self, context: RunContext, variables: Mapping[str, str]) -> Callable[[ReplicaSlot], Job]:
        (group,) = context.spec.replicas

        def describe(replica: ReplicaSlot) -> Job:
            job = job_of(context, group, replica, {**variables, **self.own_variables(replica)}, self.service_account)
            return replace(job, tolerations=tuple(self.tolerations))

        return describe
