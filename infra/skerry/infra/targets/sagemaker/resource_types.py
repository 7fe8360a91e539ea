"""The resource of SageMaker, typed: a training job.

A training job cannot change; every changed setting replaces it.
Source: SageMaker API reference, CreateTrainingJob.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.provision.graph import Life, Resource, Text

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Job(Resource):
    """One replica. Outputs: name, arn.

    environment: of the container. hyperparameters: variables that are too long for it. role: its ARN. max_runtime_s: of
    all starts together. max_wait_s: including the waiting for spot machines; None without. max_pending_s: None leaves
    it to SageMaker. retries: after internal failures of SageMaker. volume_gib: None for machines with their own disks.
    output: the place for files in /opt/ml/model. subnets, security_groups: empty means SageMaker's own network.
    """

    KIND: ClassVar[str] = "sagemaker_job"
    LIFE: ClassVar[Life] = Life.JOB
    ALONE: ClassVar[bool] = True
    FIXED: ClassVar[frozenset[str]] = frozenset(
        {
            "region",
            "image",
            "environment",
            "hyperparameters",
            "role",
            "instance",
            "spot",
            "max_runtime_s",
            "max_wait_s",
            "max_pending_s",
            "retries",
            "volume_gib",
            "kms_key",
            "output",
            "subnets",
            "security_groups",
        }
    )

    image: str
    environment: Mapping[str, Text]
    role: Text
    instance: str
    max_runtime_s: int
    output: str
    hyperparameters: Mapping[str, str] = field(default_factory=dict[str, str])
    spot: bool = False
    max_wait_s: int | None = None
    max_pending_s: int | None = None
    retries: int = 0
    volume_gib: int | None = None
    kms_key: str | None = None
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
