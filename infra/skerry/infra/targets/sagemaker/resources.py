"""What a replica needs of SageMaker, as a typed resource.

A training job is what it was made as for as long as it is there: whatever changes, it is made anew.
Source: SageMaker API reference, CreateTrainingJob.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.graph import Life, Resource, Text

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class TrainingJob(Resource):
    """One replica. Outputs: name, arn.

    environment: of the container; what is too long for a variable is among the hyperparameters. role: its ARN.
    instance: as SageMaker calls it. max_runtime_s: of all starts together. max_wait_s: with the waiting for spare
    machines; None without. max_pending_s: None leaves it to SageMaker. retries: of failures that are SageMaker's own.
    volume_gib: None where the machine has disks of its own. output: where files that are left in /opt/ml/model go.
    subnets, security_groups: empty is SageMaker's own network.
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
