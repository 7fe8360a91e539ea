"""The options of the target `aws_batch` and the checks of them. Does no I/O."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from skerry.infra.spec.section import Duration, Id, Section, Size, between, or_default, shaped
from skerry.infra.spec.target_kinds import TargetOptions
from skerry.infra.targets.shared import aws_options
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.spec.yaml_document import Document, Where
    from skerry.infra.spec_and_store_errors import Problem

# Batch User Guide, "Job timeouts".
_SHORTEST_S: Final = 60
_ZONE: Final = shaped(r"[a-z]{2,4}(-[a-z]+)+-[0-9]{1,2}(-[a-z0-9-]+)?[a-z]", "a zone of AWS")
# A whole type: the price of a family, and how many replicas fit on it, cannot be known beforehand.
_INSTANCE_TYPE: Final = shaped(r"[a-z][a-z0-9-]*\.[a-z0-9-]+", "a type of machine with its size, not a family")
_MACHINES: Final = ("instance_profile", "launch_template", "security_groups", "subnets")
# Resources of the user that already contain others.
_CONTAINS: Final = {"queue": ("compute_environment", *_MACHINES), "compute_environment": _MACHINES}


class BatchByo(Section):
    """Your own resources: used and checked, never changed or deleted. By name or ARN, if not stated otherwise."""

    job_role: Annotated[Id, Field(examples=["skerry-replica"])] | None = None
    """The role of the replicas; it must let them use the run's prefix of the store."""
    execution_role: Annotated[Id, Field(examples=["ecsTaskExecutionRole"])] | None = None
    """The role with which ECS pulls the image and writes logs."""
    instance_profile: Annotated[Id, Field(examples=["ecsInstanceRole"])] | None = None
    """The instance profile of the machines."""
    queue: Annotated[Id, Field(examples=["gpu-spot"])] | None = None
    """The job queue; with it no machines are created."""
    compute_environment: Annotated[Id, Field(examples=["gpu-spot"])] | None = None
    """The compute environment; with it only the queue is created."""
    launch_template: Annotated[str, Field(pattern=r"^lt-[0-9a-f]+$", examples=["lt-0abc1234def567890"])] | None = None
    """The id of the machines' launch template; its default version is used."""
    log_group: Annotated[Id, Field(examples=["/skerry/replicas"])] | None = None
    """The log group, by its name."""
    security_groups: Annotated[aws_options.SecurityGroups, Field(examples=[["sg-0abc1234def567890"]])] | None = None
    """Ids of the machines' security groups."""
    subnets: Annotated[aws_options.Subnets, Field(examples=[["subnet-0abc1234def567890"]])] | None = None
    """Ids of the subnets that machines start in; by default those of the region's default VPC."""


BatchAllocation: TypeAlias = Literal[
    "best_fit_progressive",
    "best_fit_progressive_ordered",
    "spot_capacity_optimized",
    "spot_price_capacity_optimized",
]


class AwsBatchTarget(TargetOptions):
    """Jobs of AWS Batch, each on a machine of EC2 that exists only while it runs."""

    CLOUD: ClassVar[str | None] = "aws"
    EXAMPLE_IMAGE: ClassVar[str | None] = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu"
    SAMPLE: ClassVar[str | None] = "sample.yaml"

    kind: Annotated[Literal["aws_batch"], Field(examples=["aws_batch"])]  # pyright: ignore[reportIncompatibleVariableOverride]  frozen
    """The kind of target: where the replicas run."""
    region: Annotated[str, aws_options.REGION, Field(examples=["us-east-1"])]
    """The region; a run may have groups in several."""
    instance_types: Annotated[
        tuple[Annotated[str, _INSTANCE_TYPE], ...],
        Field(min_length=1, max_length=20, examples=[["g6e.xlarge", "g5.xlarge"]]),
    ]
    """The types of machines that Batch may use; with several types it finds a machine sooner."""
    gpus: Annotated[int, Field(ge=0, le=16, examples=[1])] = 0
    """GPUs of one replica; it has one rank for each."""
    spot: Annotated[bool, Field(examples=[True])] = False
    """Spot machines: cheaper, and AWS may reclaim them with two minutes' notice."""
    vcpus: Annotated[int, Field(ge=1, le=1024, examples=[4])] | None = None
    """vCPUs of one replica; by default its GPUs' share of the smallest type, or all of it without GPUs."""
    memory: Annotated[Size, Field(ge=256 << 20, le=32 << 40, examples=["28GiB"])] | None = None
    """Memory of one replica; by default nine tenths of its share: the machine needs some for itself."""
    shared_memory: Annotated[Size, Field(ge=64 << 20, le=1 << 40, examples=["4GiB"])] | None = None
    """The folder in memory (/dev/shm) of data loaders, counted as memory; by default 2GiB, or half the memory."""
    disk: Annotated[Size, Field(ge=30 << 30, le=16 << 40, examples=["100GiB"])] = 100 << 30
    """The machine's disk: for the image, the code and the files of the script."""
    attempts: Annotated[int, Field(ge=1, le=10, examples=[3])] = 3
    """How often Batch starts a replica in total; a lost machine and a crash use one attempt each."""
    role: Annotated[Literal["replica", "group"], Field(examples=["group"])] = "replica"
    """replica: each has its own role, for its own keys only. group: one role for all; needed above 200 replicas."""
    max_runtime: (
        Annotated[Duration, between(timedelta(minutes=1), timedelta(days=365)), Field(examples=["24h"])] | None
    ) = None
    """How long one attempt may run; null is as long as the run. Then it is stopped and not retried."""
    zones: Annotated[tuple[Annotated[str, _ZONE], ...], Field(min_length=1, examples=[["us-east-1a"]])] | None = None
    """The zones to use; by default all that have a subnet and offer a type."""
    allocation: Annotated[BatchAllocation, Field(examples=["best_fit_progressive"])] | None = None
    """How Batch chooses among the types; by default as AWS recommends for spot and for on-demand machines."""
    byo: Annotated[BatchByo, BeforeValidator(or_default)] = BatchByo()
    """Your own resources, which are used and never changed."""

    @property
    def one_role(self) -> bool:
        """True if all replicas of the group share a role and a job definition."""
        return self.role == "group" or self.byo.job_role is not None

    @property
    def place(self) -> Place:
        """See TargetOptions.place. Batch chooses among several types, so the machine is known only if there is one."""
        machine = self.instance_types[0] if len(self.instance_types) == 1 else None
        return Place(cloud=self.CLOUD, region=self.region, machine=machine, accelerators=self.gpus, spot=self.spot)

    @classmethod
    def problems(cls, document: Document, groups: Sequence[int]) -> Iterator[Problem]:
        """See TargetOptions.problems."""
        yield from aws_options.store_problems(document)
        yield from aws_options.tag_problems(document)
        yield from aws_options.role_problems(document, groups, byo="job_role", default="replica")
        for index in groups:
            yield from _contradictions(document, ("replicas", index, "target"))
        yield from _short_limit(document)


def _contradictions(document: Document, target: Where) -> Iterator[Problem]:
    allocation, spot = document.value((*target, "allocation")), document.value((*target, "spot"))
    if isinstance(allocation, str) and allocation.startswith("spot_") and spot is not True:
        text = f"{allocation} is for spot machines, and these are not"
        yield document.problem((*target, "allocation"), f"{text}; write allocation: best_fit_progressive")
    region, zones = document.value((*target, "region")), document.entries((*target, "zones"))
    for number, zone in enumerate(zones):
        if isinstance(zone, str) and isinstance(region, str) and not zone.startswith(region):
            text = f"{zone} is not in {region}"
            yield document.problem((*target, "zones", number), f"{text}; write e.g. {region}a")
    byo = document.value((*target, "byo"))
    names = [name for name, value in byo.items() if value is not None] if isinstance(byo, dict) else []
    for whole, parts in _CONTAINS.items():
        for name in [name for name in names if whole in names and name in parts]:
            text = f"is not used beside {whole}, which has its own; take one of them out"
            yield document.problem((*target, "byo", name), text, key=True)


def _short_limit(document: Document) -> Iterator[Problem]:
    """The run's limit becomes the time limit of its jobs, and Batch accepts none below a minute."""
    hours = document.value(("limits", "max_hours"))
    if not isinstance(hours, int | float) or isinstance(hours, bool):
        return
    if 0 < hours * 3600 < _SHORTEST_S:
        text = f"is {hours * 3600:.0f} s, and {_SHORTEST_S} s are the least that a job may be limited to"
        yield document.problem(("limits", "max_hours"), f"{text}; write 0.017 or more")
