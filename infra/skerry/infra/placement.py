"""Where a group's replicas may run: one model for each kind of target, and what all sections of a spec have in common.

A target's options are here and nowhere else; what they need of the rest of the spec stands in `coherence`. Does no I/O.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from skerry.infra import words


class Section(BaseModel):
    """One mapping of the spec: frozen, strict, closed to unknown fields. Docstrings below fields are their help."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


def or_default(value: object) -> object:
    """A section whose lines are all comments is the default one, as if its name was not there."""
    return {} if value is None else value


def _as_region(text: str) -> str:
    return _matching(text, r"[a-z]{2}(-[a-z]+)+-[0-9]{1,2}", "a region of AWS")


def _as_zone(text: str) -> str:
    return _matching(text, r"[a-z]{2}(-[a-z]+)+-[0-9]{1,2}(-[a-z0-9-]+)?[a-z]", "a zone of AWS")


def _as_instance_type(text: str) -> str:
    """A whole type: what a family costs, and how many replicas fit on it, nobody can say beforehand."""
    return _matching(text, r"[a-z][a-z0-9-]*\.[a-z0-9-]+", "a type of machine with its size, not a family")


def _as_subnet(text: str) -> str:
    return _matching(text, r"subnet-[0-9a-f]+", "the id of a subnet")


def _as_security_group(text: str) -> str:
    return _matching(text, r"sg-[0-9a-f]+", "the id of a security group")


def _matching(text: str, pattern: str, what: str) -> str:
    if words.matches(pattern, text):
        return text
    raise ValueError(f"must be {what}")


Duration = Annotated[
    timedelta,
    BeforeValidator(words.parse_duration),
    PlainSerializer(words.format_duration, return_type=str),
    WithJsonSchema({"type": "string", "pattern": words.DURATION_PATTERN}),
]
Size = Annotated[
    int,
    BeforeValidator(words.parse_size),
    PlainSerializer(words.format_size, return_type=str),
    WithJsonSchema({"type": "string", "pattern": words.SIZE_PATTERN}),
]
Id = Annotated[str, Field(min_length=1, max_length=2048)]


class LocalTarget(Section):
    """Processes on this machine."""

    kind: Annotated[Literal["local"], Field(examples=["local"])]
    """Where the replicas run."""
    threads: Annotated[int, Field(ge=1, le=1024, examples=[2])] | None = None
    """CPU threads per replica; by default the cores are shared out evenly."""


class DockerTarget(Section):
    """Containers on this machine's Docker engine, of the spec's `image`."""

    kind: Annotated[Literal["docker"], Field(examples=["docker"])]
    """Where the replicas run."""
    threads: Annotated[int, Field(ge=1, le=1024, examples=[2])] | None = None
    """CPU threads per replica; by default the cores are shared out evenly."""
    network: Annotated[Literal["bridge", "host"], Field(examples=["host"])] = "bridge"
    """host: a container reaches what listens on this machine's loopback, such as a store for trials."""
    gpus: Annotated[bool, Field(examples=[True])] = False
    """Every container gets every GPU."""


class BatchByo(Section):
    """What is already there and is yours: used and checked, never changed or deleted. Names or ARNs, unless told."""

    job_role: Annotated[Id, Field(examples=["skerry-replica"])] | None = None
    """The role of the replicas; it must let them use the run's prefix of the store."""
    execution_role: Annotated[Id, Field(examples=["ecsTaskExecutionRole"])] | None = None
    """The role that ECS takes to fetch the image and to write logs."""
    instance_profile: Annotated[Id, Field(examples=["ecsInstanceRole"])] | None = None
    """The profile of the machines."""
    queue: Annotated[Id, Field(examples=["gpu-spot"])] | None = None
    """The job queue; with it no machines are set up."""
    compute_environment: Annotated[Id, Field(examples=["gpu-spot"])] | None = None
    """The compute environment; with it only the queue is made."""
    launch_template: Annotated[str, Field(pattern=r"^lt-[0-9a-f]+$", examples=["lt-0abc1234def567890"])] | None = None
    """The id of the machines' launch template; its default version is taken."""
    log_group: Annotated[Id, Field(examples=["/skerry/replicas"])] | None = None
    """The log group, by its name."""
    security_groups: (
        Annotated[
            tuple[Annotated[str, AfterValidator(_as_security_group)], ...],
            Field(min_length=1, max_length=5, examples=[["sg-0abc1234def567890"]]),
        ]
        | None
    ) = None
    """Ids of the machines' security groups."""
    subnets: (
        Annotated[
            tuple[Annotated[str, AfterValidator(_as_subnet)], ...],
            Field(min_length=1, max_length=16, examples=[["subnet-0abc1234def567890"]]),
        ]
        | None
    ) = None
    """Ids of the subnets that machines start in; by default those of the region's default VPC."""


BatchAllocation: TypeAlias = Literal[
    "best_fit_progressive",
    "best_fit_progressive_ordered",
    "spot_capacity_optimized",
    "spot_price_capacity_optimized",
]


class AwsBatchTarget(Section):
    """Jobs of AWS Batch, each on a machine of EC2 that is there only while it runs."""

    kind: Annotated[Literal["aws_batch"], Field(examples=["aws_batch"])]
    """Where the replicas run."""
    region: Annotated[str, AfterValidator(_as_region), Field(examples=["us-east-1"])]
    """The region; a run may have groups in several."""
    instance_types: Annotated[
        tuple[Annotated[str, AfterValidator(_as_instance_type)], ...],
        Field(min_length=1, max_length=20, examples=[["g6e.xlarge", "g5.xlarge"]]),
    ]
    """What machines may be taken; several of a kind are got sooner than one."""
    gpus: Annotated[int, Field(ge=0, le=16, examples=[1])] = 0
    """GPUs of one replica; with several it has as many ranks."""
    spot: Annotated[bool, Field(examples=[True])] = False
    """Spare machines at a lower price, which may be taken back at two minutes' notice."""
    vcpus: Annotated[int, Field(ge=1, le=1024, examples=[4])] | None = None
    """vCPUs of one replica; by default its GPUs' share of the smallest type, without GPUs all of it."""
    memory: Annotated[Size, Field(ge=256 << 20, le=32 << 40, examples=["28GiB"])] | None = None
    """Memory of one replica; by default nine tenths of its share: the machine needs some for itself."""
    shared_memory: Annotated[Size, Field(ge=64 << 20, le=1 << 40, examples=["4GiB"])] | None = None
    """The folder in memory where data loaders pass batches, counted as memory; by default 2GiB, or half the memory."""
    disk: Annotated[Size, Field(ge=30 << 30, le=16 << 40, examples=["100GiB"])] = 100 << 30
    """The machine's disk: image, code and whatever the script writes."""
    attempts: Annotated[int, Field(ge=1, le=10, examples=[3])] = 3
    """How often Batch starts a replica in all; a lost machine and a crash take one each."""
    role: Annotated[Literal["replica", "group"], Field(examples=["group"])] = "replica"
    """replica: each may write its own keys alone. group: one role for all of them; needed above 200 replicas."""
    max_runtime: Annotated[Duration, Field(ge=timedelta(seconds=60), examples=["24h"])] | None = None
    """How long one attempt may run; null is as long as the run. After that it is stopped and not tried again."""
    zones: (
        Annotated[tuple[Annotated[str, AfterValidator(_as_zone)], ...], Field(min_length=1, examples=[["us-east-1a"]])]
        | None
    ) = None
    """Zones to stay in; by default all that have a subnet and offer a type."""
    allocation: Annotated[BatchAllocation, Field(examples=["best_fit_progressive"])] | None = None
    """How Batch picks among the types; by default what AWS advises for spot and for on-demand machines."""
    byo: Annotated[BatchByo, BeforeValidator(or_default)] = BatchByo()
    """What is already there and is yours."""

    @property
    def one_role(self) -> bool:
        """Whether all replicas of the group share a role, and so a job definition."""
        return self.role == "group" or self.byo.job_role is not None


Target: TypeAlias = LocalTarget | DockerTarget | AwsBatchTarget
