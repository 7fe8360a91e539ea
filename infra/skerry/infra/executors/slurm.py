"""Runs replicas as batch jobs of a Slurm cluster, submitted on this machine or on a login node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from skerry.infra.executors.cloud_executor_base import CloudExecutor
from skerry.infra.targets.slurm.options import SlurmTarget
from skerry.infra.targets.slurm.resource_graph import folder_of, job_of
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import ReplicaSlot
    from skerry.infra.targets.slurm.resource_types import Job


@dataclass(kw_only=True)
class SlurmExecutor(CloudExecutor):
    """Runs replicas as batch jobs of a Slurm cluster; the options are those of `kind: slurm` in a spec.

    login: a destination of ssh; None submits on this machine. max_runtime: of one start, after which the job is
    requeued and continues; None is the partition's. attempts: starts of a job in all; one handle covers all of them.
    Without `code` the command runs in the home folder. A store in a folder must be on a disk that all nodes mount.
    """

    IN_CLOUD: ClassVar[bool] = False
    TELLS_REGION: ClassVar[bool] = False
    OUTPUT: ClassVar[str] = "job"
    NAMES: ClassVar[Mapping[str, str]] = {"time": "max_runtime"}
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

    def _as_target(self) -> SlurmTarget:
        if self.container is not None and not self.image:
            raise Invalid(f"{self.container} runs an image; write image=/shared/images/skerry.sif")
        return self._options_of(SlurmTarget, time=self.max_runtime)

    def _describe(self, context: RunContext, variables: Mapping[str, str]) -> Callable[[ReplicaSlot], Job]:
        (group,) = context.spec.replicas
        return lambda replica: job_of(context, group, replica, {**variables, **self.own_variables(replica)})

    def _record(self, job: str) -> StateRecord:
        name, _, number = job.rpartition("/")
        folder = folder_of(self._as_target(), self.run)
        return replace(super()._record(job), name=name, outputs={"id": number}, settings={"folder": folder})
