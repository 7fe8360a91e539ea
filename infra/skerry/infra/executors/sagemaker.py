"""Runs replicas as training jobs of SageMaker, with an existing role, each on its own machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from skerry.infra.executors.cloud_executor_base import CloudExecutor
from skerry.infra.targets.sagemaker.options import SageMakerTarget
from skerry.infra.targets.sagemaker.resource_graph import job_of
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import ReplicaSlot
    from skerry.infra.targets.sagemaker.resource_types import Job

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
    OUTPUT: ClassVar[str] = "name"
    NAMES: ClassVar[Mapping[str, str]] = {
        "byo.role": "role",
        "byo.subnets": "subnets",
        "byo.security_groups": "security_groups",
    }

    region: str
    role: str
    instance: str
    spot: bool = False
    max_wait: timedelta | None = None
    volume_gib: int | None = None
    output: str | None = None
    subnets: Sequence[str] = ()
    security_groups: Sequence[str] = ()

    def _set_run(self, uri: str) -> None:
        super()._set_run(uri)
        if self.output is None and not self.run.startswith("s3://"):
            raise Invalid(f"no place to upload /opt/ml/model to: {_MODEL}")

    def _as_target(self) -> SageMakerTarget:
        if not self.role.startswith("arn:"):
            raise Invalid(f"not the ARN of a role: {self.role!r}; write arn:aws:iam::123456789012:role/NAME")
        if self.spot and self.max_wait is not None and self.max_wait < self.max_runtime:
            raise Invalid(f"max_wait={self.max_wait} includes max_runtime={self.max_runtime}, and is shorter; raise it")
        network = {"subnets": tuple(self.subnets) or None, "security_groups": tuple(self.security_groups) or None}
        return self._options_of(
            SageMakerTarget,
            role="group",
            max_wait=self.max_wait if self.spot else None,
            retries=0,
            byo={"role": self.role, **network},
        )

    def _describe(self, context: RunContext, variables: Mapping[str, str]) -> Callable[[ReplicaSlot], Job]:
        (group,) = context.spec.replicas

        def describe(replica: ReplicaSlot) -> Job:
            job = job_of(context, group, replica, {**variables, **self.own_variables(replica)}, self.role)
            return replace(job, volume_gib=self.volume_gib)

        return describe
