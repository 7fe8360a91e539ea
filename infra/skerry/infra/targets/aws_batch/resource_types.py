"""The resources of AWS Batch, typed.

Batch could change more of a compute environment in place than these resources allow, with effects on running machines
that are hard to predict. So only limits and switches change in place; other changes replace the environment.
Sources: Batch user guide, "Updating compute environments"; API reference, UpdateJobQueue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.provision.graph import Life, Resource, Text
from skerry.infra.targets.aws_batch import metadata_firewall

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class LaunchTemplate(Resource):
    """The machines' start: an encrypted disk, and a metadata service for root only. Outputs: id, name.

    disk_gib: of the root disk. hop_limit: 1 blocks the machine's role for containers behind a bridge. boot: digest of
    the script that blocks it for jobs, which Batch runs in the machine's own network.
    """

    KIND: ClassVar[str] = "aws_launch_template"
    FIXED: ClassVar[frozenset[str]] = frozenset({"region", "disk_gib", "hop_limit", "boot"})

    disk_gib: int
    hop_limit: int = 1
    boot: str = metadata_firewall.digest(metadata_firewall.document())


@dataclass(frozen=True, kw_only=True)
class ComputeEnvironment(Resource):
    """Machines that exist only while there are jobs. Outputs: name, arn.

    allocation: the strategy, in AWS's word. image_type: the family of machine images. max_vcpus: of all machines.
    instance_types: sorted, unless the strategy is ordered. min_vcpus: constant; more would cost money
    without any job.
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
    min_vcpus: int = 0


@dataclass(frozen=True, kw_only=True)
class Queue(Resource):
    """The queue in which jobs wait for machines. Outputs: name, arn.

    compute_environments: their ARNs, in order of preference. hopeless_after_s: a job that none of these machines can
    run is cancelled after this time, with the reason; a job that waits for capacity is not.
    """

    KIND: ClassVar[str] = "aws_batch_queue"
    FIXED: ClassVar[frozenset[str]] = frozenset({"region"})

    compute_environments: tuple[Text, ...]
    priority: int = 1
    hopeless_after_s: int = 600
    enabled: bool = True


@dataclass(frozen=True, kw_only=True)
class JobDefinition(Resource):
    """The container and roles of jobs. Outputs: name, arn (with its revision).

    timeout_s: of one attempt; None is unlimited. environment: of the container. user: never root, which would be root
    on the machine, too.
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
    user: str = metadata_firewall.USER


@dataclass(frozen=True, kw_only=True)
class Job(Resource):
    """One replica. Outputs: id, arn.

    definition, queue: ARNs. log_group: its name. environment: overrides that of the definition.
    """

    KIND: ClassVar[str] = "aws_batch_job"
    LIFE: ClassVar[Life] = Life.JOB
    ALONE: ClassVar[bool] = True
    FIXED: ClassVar[frozenset[str]] = frozenset({"region", "definition", "queue", "environment"})

    definition: Text
    queue: Text
    log_group: Text
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
