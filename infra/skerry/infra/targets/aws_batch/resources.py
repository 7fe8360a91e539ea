"""What a group of replicas needs of AWS Batch, as typed resources.

Batch can change more of a compute environment where it stands than is said here; what it does then to machines that run
is hard to foretell. So only limits and switches change in place, and the rest is made anew beside the old.
Sources: Batch user guide, "Updating compute environments"; API reference, UpdateJobQueue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.graph import Life, Resource, Text
from skerry.infra.targets.aws_batch import boot

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class LaunchTemplate(Resource):
    """How machines start: an encrypted disk, and a metadata service for root alone. Outputs: id, name.

    disk_gib: of the root disk. hop_limit: 1 keeps whatever is behind a bridge from the machine's role; boot: digest of
    the script that keeps jobs from it, which Batch runs in the machine's own network.
    """

    KIND: ClassVar[str] = "aws_launch_template"
    FIXED: ClassVar[frozenset[str]] = frozenset({"region", "disk_gib", "hop_limit", "boot"})

    disk_gib: int
    hop_limit: int = 1
    boot: str = boot.digest(boot.document())


@dataclass(frozen=True, kw_only=True)
class ComputeEnvironment(Resource):
    """Machines that come and go with the jobs; none while there is none. Outputs: name, arn.

    allocation: AWS's word. image_type: AWS's word for the family of machine images. max_vcpus: of all machines.
    Without an order of preference, instance_types are sorted.
    """

    KIND: ClassVar[str] = "aws_batch_environment"
    FIXED: ClassVar[frozenset[str]] = frozenset(
        {
            "region",
            "spot",
            "allocation",
            "instance_types",
            "image_type",
            "subnets",
            "security_groups",
            "instance_profile",
            "launch_template",
            "service_role",
        }
    )

    spot: bool
    allocation: str
    instance_types: tuple[str, ...]
    image_type: str
    max_vcpus: int
    subnets: tuple[str, ...]
    security_groups: tuple[Text, ...]
    instance_profile: Text
    launch_template: Text
    service_role: Text
    enabled: bool = True


@dataclass(frozen=True, kw_only=True)
class Queue(Resource):
    """Where jobs wait for machines. Outputs: name, arn.

    compute_environments: their ARNs, in order of preference. hopeless_after_s: a job that no machine of these could
    ever run is cancelled after so long, with the reason; one that waits for capacity is left waiting.
    """

    KIND: ClassVar[str] = "aws_batch_queue"
    FIXED: ClassVar[frozenset[str]] = frozenset({"region"})

    compute_environments: tuple[Text, ...]
    priority: int = 1
    hopeless_after_s: int = 600
    enabled: bool = True


@dataclass(frozen=True, kw_only=True)
class JobDefinition(Resource):
    """What a job runs, and with which rights. Outputs: name, arn (with its revision).

    timeout_s: of one attempt; None is without end. environment: of the container. user: never root, which on the
    machine would be root, too.
    """

    KIND: ClassVar[str] = "aws_batch_definition"
    FIXED: ClassVar[frozenset[str]] = frozenset(
        {
            "region",
            "image",
            "command",
            "user",
            "environment",
            "gpus",
            "vcpus",
            "memory_mib",
            "shared_memory_mib",
            "job_role",
            "execution_role",
            "log_group",
            "attempts",
            "timeout_s",
        }
    )

    image: str
    command: tuple[str, ...]
    environment: Mapping[str, Text]
    gpus: int
    vcpus: int
    memory_mib: int
    shared_memory_mib: int
    job_role: Text
    execution_role: Text
    log_group: Text
    attempts: int
    timeout_s: int | None
    user: str = boot.USER


@dataclass(frozen=True, kw_only=True)
class Job(Resource):
    """One replica. Outputs: id, arn.

    definition, queue: ARNs. log_group: its name. environment: over the definition's.
    """

    KIND: ClassVar[str] = "aws_batch_job"
    LIFE: ClassVar[Life] = Life.JOB
    ALONE: ClassVar[bool] = True
    FIXED: ClassVar[frozenset[str]] = frozenset({"region", "definition", "queue", "environment"})

    definition: Text
    queue: Text
    log_group: Text
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
