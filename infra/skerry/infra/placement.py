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


def _as_training_instance(text: str) -> str:
    return _matching(text, r"ml\.[a-z][a-z0-9-]*\.[a-z0-9-]+", "a type of machine as SageMaker calls it, ml. first")


def _as_place_in_s3(text: str) -> str:
    return _matching(text, r"s3://[a-z0-9][a-z0-9.-]*[a-z0-9](/[A-Za-z0-9._/-]*)?", "a place in S3: s3://bucket/prefix")


def _as_google_region(text: str) -> str:
    return _matching(text, r"[a-z]+(-[a-z]+)+[0-9]{1,2}", "a region of Google Cloud")


def _as_project(text: str) -> str:
    """Source: Resource Manager, "Creating and managing projects": 6 to 30 characters."""
    return _matching(text, r"[a-z][a-z0-9-]{4,28}[a-z0-9]", "the id of a project of Google Cloud (not its number)")


def _as_google_machine(text: str) -> str:
    return _matching(text, r"[a-z][a-z0-9]*(-[a-z0-9]+)+", "a type of machine of Google Cloud")


def _as_service_account(text: str) -> str:
    return _matching(text, r"[a-z0-9.-]+@[a-z0-9.-]+\.gserviceaccount\.com", "the e-mail address of a service account")


def _as_network(text: str) -> str:
    """Source: CustomJobSpec.network: a project's number, not its id."""
    return _matching(text, r"projects/[0-9]+/global/networks/[a-z0-9-]+", "projects/NUMBER/global/networks/NAME")


def _as_key(text: str) -> str:
    pattern = r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+"
    return _matching(text, pattern, "the full name of a key of Cloud KMS")


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


def _between(least: timedelta, most: timedelta) -> AfterValidator:
    """A time within these bounds, both of them allowed."""

    def check(value: timedelta) -> timedelta:
        if not least <= value <= most:
            raise ValueError(f"must be {words.format_duration(least)} to {words.format_duration(most)}")
        return value

    return AfterValidator(check)


class LocalTarget(Section):
    """Processes on this machine."""

    CLOUD: ClassVar[str | None] = None
    """The cloud whose regions it names; None is this machine."""
    kind: Annotated[Literal["local"], Field(examples=["local"])]
    """Where the replicas run."""
    threads: Annotated[int, Field(ge=1, le=1024, examples=[2])] | None = None
    """CPU threads per replica; by default the cores are shared out evenly."""


class DockerTarget(Section):
    """Containers on this machine's Docker engine, of the spec's `image`."""

    CLOUD: ClassVar[str | None] = None
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

    CLOUD: ClassVar[str | None] = "aws"
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
    max_runtime: (
        Annotated[Duration, _between(timedelta(minutes=1), timedelta(days=365)), Field(examples=["24h"])] | None
    ) = None
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


class SageMakerByo(Section):
    """What is already there and is yours: used and checked, never changed or deleted."""

    role: Annotated[Id, Field(examples=["arn:aws:iam::123456789012:role/trainer"])] | None = None
    """The role of the replicas, by name or ARN; it must let SageMaker act as it, and use the run's prefix of the
    store."""
    subnets: (
        Annotated[
            tuple[Annotated[str, AfterValidator(_as_subnet)], ...],
            Field(min_length=1, max_length=16, examples=[["subnet-0abc1234def567890"]]),
        ]
        | None
    ) = None
    """Ids of the subnets that machines are in; by default SageMaker's own network. They must reach the store."""
    security_groups: (
        Annotated[
            tuple[Annotated[str, AfterValidator(_as_security_group)], ...],
            Field(min_length=1, max_length=5, examples=[["sg-0abc1234def567890"]]),
        ]
        | None
    ) = None
    """Ids of the machines' security groups, in the network of the subnets."""


class SageMakerTarget(Section):
    """Training jobs of SageMaker, each on a machine of its own that is there only while it runs."""

    CLOUD: ClassVar[str | None] = "aws"
    kind: Annotated[Literal["sagemaker"], Field(examples=["sagemaker"])]
    """Where the replicas run."""
    region: Annotated[str, AfterValidator(_as_region), Field(examples=["us-east-1"])]
    """The region; a run may have groups in several."""
    instance: Annotated[str, AfterValidator(_as_training_instance), Field(examples=["ml.g6e.xlarge"])]
    """The type of machine; a replica has one to itself."""
    gpus: Annotated[int, Field(ge=0, le=16, examples=[1])] | None = None
    """GPUs that a replica uses, each by a rank of its own; by default all that the machine has."""
    spot: Annotated[bool, Field(examples=[True])] = False
    """Spare machines at a lower price; of one that is taken back the replica starts again, within max_wait."""
    max_runtime: (
        Annotated[Duration, _between(timedelta(minutes=1), timedelta(days=28)), Field(examples=["24h"])] | None
    ) = None
    """How long one job may run, all its starts together; null is as long as `limits` let the run take, else 5d."""
    max_wait: (
        Annotated[Duration, _between(timedelta(minutes=1), timedelta(days=30)), Field(examples=["48h"])] | None
    ) = None
    """With spot, how long a job may wait and run together, max_runtime at the least; by default twice that."""
    max_pending: (
        Annotated[Duration, _between(timedelta(minutes=30), timedelta(days=28)), Field(examples=["12h"])] | None
    ) = None
    """How long a job may wait for a machine with GPUs before it is given up; null leaves it to SageMaker."""
    retries: Annotated[int, Field(ge=0, le=30, examples=[3])] = 3
    """How often SageMaker starts a job again that failed by its own fault (InternalServerError)."""
    volume: Annotated[Size, Field(ge=1 << 30, le=16 << 40, examples=["100GiB"])] | None = None
    """The machine's disk, for machines without disks of their own; by default 100GiB."""
    kms_key: (
        Annotated[
            str,
            Field(pattern=r"^[a-zA-Z0-9:/_-]+$", max_length=2048, examples=["1234abcd-12ab-34cd-56ef-1234567890ab"]),
        ]
        | None
    ) = None
    """The key that the disk is encrypted with, by its id or ARN; machines with disks of their own take none."""
    output: (
        Annotated[str, AfterValidator(_as_place_in_s3), Field(max_length=1024, examples=["s3://my-bucket/artifacts"])]
        | None
    ) = None
    """Where SageMaker puts what a script leaves in /opt/ml/model, in the region of the machines; by default with the
    run, if its store is in S3."""
    role: Annotated[Literal["replica", "group"], Field(examples=["replica"])] = "group"
    """group: one role for all replicas. replica: each has its own, and may write its own keys alone."""
    byo: Annotated[SageMakerByo, BeforeValidator(or_default)] = SageMakerByo()
    """What is already there and is yours."""

    @property
    def one_role(self) -> bool:
        """Whether all replicas of the group share a role."""
        return self.role == "group" or self.byo.role is not None


class VertexByo(Section):
    """What is already there and is yours: used and checked, never changed or deleted."""

    service_account: (
        Annotated[
            str,
            AfterValidator(_as_service_account),
            Field(examples=["trainer@acme-diloco.iam.gserviceaccount.com"]),
        ]
        | None
    ) = None
    """The account that the replicas run as; it must let them use the run's prefix of the store."""
    network: (
        Annotated[str, AfterValidator(_as_network), Field(examples=["projects/123456789012/global/networks/train"])]
        | None
    ) = None
    """The network that the jobs join, by its project's number; it has to be peered with Vertex AI already."""
    key: (
        Annotated[
            str,
            AfterValidator(_as_key),
            Field(examples=["projects/acme-diloco/locations/us-central1/keyRings/train/cryptoKeys/disks"]),
        ]
        | None
    ) = None
    """The key that the machines' disks are encrypted with; it must lie in the target's region."""


Accelerator: TypeAlias = Literal[
    "nvidia-l4",
    "nvidia-tesla-t4",
    "nvidia-tesla-p4",
    "nvidia-tesla-p100",
    "nvidia-tesla-v100",
    "nvidia-tesla-a100",
    "nvidia-a100-80gb",
    "nvidia-h100-80gb",
    "nvidia-h100-mega-80gb",
    "nvidia-h200-141gb",
    "nvidia-b200",
    "nvidia-rtx-pro-6000",
]


class VertexTarget(Section):
    """Custom jobs of Vertex AI, each on a machine of its own that is there only while it runs."""

    CLOUD: ClassVar[str | None] = "google"
    kind: Annotated[Literal["vertex"], Field(examples=["vertex"])]
    """Where the replicas run."""
    project: Annotated[str, AfterValidator(_as_project), Field(examples=["acme-diloco"])]
    """The project, by its id: jobs are made in it, and paid by it."""
    region: Annotated[str, AfterValidator(_as_google_region), Field(examples=["us-central1"])]
    """The region; a run may have groups in several."""
    machine: Annotated[str, AfterValidator(_as_google_machine), Field(examples=["g2-standard-8"])]
    """The type of machine; a replica has one to itself."""
    accelerator: Annotated[Accelerator, Field(examples=["nvidia-l4"])] | None = None
    """The accelerator; by default what is built into the machine, if anything is."""
    accelerators: Annotated[int, Field(ge=1, le=16, examples=[1])] | None = None
    """How many of them; by default as many as are built in, else one. With several a replica has as many ranks."""
    scheduling: Annotated[Literal["standard", "spot", "flex_start"], Field(examples=["spot"])] = "standard"
    """spot: spare machines at a lower price, which may be taken back at half a minute's notice. flex_start: queue for
    machines that are scarce."""
    max_wait: (
        Annotated[Duration, _between(timedelta(minutes=1), timedelta(days=365)), Field(examples=["48h"])] | None
    ) = None
    """With flex_start, how long a replica may queue before it is given up; null is Vertex AI's own day."""
    max_runtime: (
        Annotated[Duration, _between(timedelta(minutes=1), timedelta(days=365)), Field(examples=["24h"])] | None
    ) = None
    """How long one job may run; null is as long as the run, and without limits Vertex AI's own seven days."""
    disk: Annotated[Size, Field(ge=100 << 30, le=64000 << 30, examples=["200GiB"])] = 100 << 30
    """The machine's disk: image, code and whatever the script writes."""
    disk_type: Annotated[Literal["pd-ssd", "pd-standard", "hyperdisk-balanced"], Field(examples=["pd-ssd"])] | None = (
        None
    )
    """The kind of disk; by default what Vertex AI takes for the machine."""
    role: Annotated[Literal["replica", "group"], Field(examples=["replica"])] = "group"
    """group: one service account for all replicas. replica: each has its own, and may write its own keys alone."""
    byo: Annotated[VertexByo, BeforeValidator(or_default)] = VertexByo()
    """What is already there and is yours."""

    @property
    def one_account(self) -> bool:
        """Whether all replicas of the group share a service account."""
        return self.role == "group" or self.byo.service_account is not None


Target: TypeAlias = LocalTarget | DockerTarget | AwsBatchTarget | SageMakerTarget | VertexTarget
