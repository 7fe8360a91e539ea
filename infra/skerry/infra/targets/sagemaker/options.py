"""The options of the target `sagemaker` and the checks of them. Does no I/O."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from skerry.infra.spec import units
from skerry.infra.spec.env_secrets_and_data import LONGEST, written_env
from skerry.infra.spec.section import Duration, Id, Section, Size, between, or_default, shaped
from skerry.infra.spec.target_kinds import TargetOptions
from skerry.infra.targets.shared import aws_options
from skerry.infra.targets.shared.check_bucket_name import s3_problem
from skerry.infra.targets.shared.image_pull_check import image_problems
from skerry.infra.targets.shared.revive_option import revive_problems, warning_text
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.spec.yaml_document import Document, Where
    from skerry.infra.spec_and_store_errors import Problem

_EXAMPLE_IMAGE: Final = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu"
# API reference, AlgorithmSpecification, TrainingImage.
_PULLED: Final = re.compile(r"[0-9]{12}\.dkr\.ecr(-fips)?\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/.+")
# API reference, StoppingCondition: families of machines with accelerators.
_ACCELERATED: Final = re.compile(r"ml\.(g|p|trn)[0-9].*")
# The length of a value in a job's hyperparameters; an environment variable holds 512 (API reference,
# CreateTrainingJob).
_LONGEST_COMMAND: Final = 2500
_INSTANCE: Final = shaped(r"ml\.[a-z][a-z0-9-]*\.[a-z0-9-]+", "a type of machine as SageMaker calls it, ml. first")
_S3_PREFIX: Final = shaped(r"s3://[a-z0-9][a-z0-9.-]*[a-z0-9](/[A-Za-z0-9._/-]*)?", "a place in S3: s3://bucket/prefix")


class SageMakerByo(Section):
    """Your own resources: used and checked, never changed or deleted."""

    role: Annotated[Id, Field(examples=["arn:aws:iam::123456789012:role/trainer"])] | None = None
    """The role of the replicas, by name or ARN; it must let SageMaker act as it, and use the run's prefix of the
    store."""
    subnets: Annotated[aws_options.Subnets, Field(examples=[["subnet-0abc1234def567890"]])] | None = None
    """Ids of the machines' subnets, which must reach the store; by default SageMaker's own network."""
    security_groups: Annotated[aws_options.SecurityGroups, Field(examples=[["sg-0abc1234def567890"]])] | None = None
    """Ids of the machines' security groups, in the network of the subnets."""


class SageMakerTarget(TargetOptions):
    """Training jobs of SageMaker, each on a machine of its own that exists only while it runs."""

    CLOUD: ClassVar[str | None] = "aws"
    EXAMPLE_IMAGE: ClassVar[str | None] = _EXAMPLE_IMAGE
    SAMPLE: ClassVar[str | None] = "sample.yaml"
    RESERVED: ClassVar[tuple[str, ...]] = ("SAGEMAKER_*", "SM_*", "TRAINING_JOB_*")

    kind: Annotated[Literal["sagemaker"], Field(examples=["sagemaker"])]  # pyright: ignore[reportIncompatibleVariableOverride]  frozen
    """The kind of target: where the replicas run."""
    region: Annotated[str, aws_options.REGION, Field(examples=["us-east-1"])]
    """The region; a run may have groups in several."""
    instance: Annotated[str, _INSTANCE, Field(examples=["ml.g6e.xlarge"])]
    """The type of machine; a replica has one to itself."""
    gpus: Annotated[int, Field(ge=0, le=16, examples=[1])] | None = None
    """GPUs that a replica uses, one rank for each; by default all that the machine has."""
    spot: Annotated[bool, Field(examples=[True])] = False
    """Spot machines: cheaper. After its machine was reclaimed a replica starts again, within max_wait."""
    max_runtime: (
        Annotated[Duration, between(timedelta(minutes=1), timedelta(days=28)), Field(examples=["24h"])] | None
    ) = None
    """How long one job may run, all its starts together; null is as long as `limits` allow, else 5d."""
    max_wait: Annotated[Duration, between(timedelta(minutes=1), timedelta(days=30)), Field(examples=["48h"])] | None = (
        None
    )
    """With spot, how long a job may wait and run in total, at least max_runtime; by default twice that."""
    max_pending: (
        Annotated[Duration, between(timedelta(minutes=30), timedelta(days=28)), Field(examples=["12h"])] | None
    ) = None
    """How long a job may wait for a machine with GPUs before it is stopped; null leaves that to SageMaker."""
    retries: Annotated[int, Field(ge=0, le=30, examples=[3])] = 3
    """How often SageMaker restarts a job after an internal failure (InternalServerError)."""
    volume: Annotated[Size, Field(ge=1 << 30, le=16 << 40, examples=["100GiB"])] | None = None
    """The machine's disk, for machines without disks of their own; by default 100GiB."""
    kms_key: (
        Annotated[
            str,
            Field(pattern=r"^[a-zA-Z0-9:/_-]+$", max_length=2048, examples=["1234abcd-12ab-34cd-56ef-1234567890ab"]),
        ]
        | None
    ) = None
    """The key that the disk is encrypted with, by its id or ARN; machines with disks of their own have none."""
    output: Annotated[str, _S3_PREFIX, Field(max_length=1024, examples=["s3://my-bucket/artifacts"])] | None = None
    """Where SageMaker stores the files that a script leaves in /opt/ml/model, in the region of the machines; by default
    with the run, if its store is in S3."""
    role: Annotated[Literal["replica", "group"], Field(examples=["replica"])] = "group"
    """group: one role for all replicas. replica: each has its own and may write only its own keys."""
    revive: Annotated[Literal["peers"], Field(examples=["peers"])] | None = None
    """peers: the replicas of the group start each other's lost jobs again, with no machine that watches. Each may then
    start jobs with the role of the group; null leaves it to `skerry up` and `skerry apply`."""
    revive_after: Annotated[Duration, between(timedelta(seconds=1), timedelta(hours=1)), Field(examples=["3m"])] = (
        timedelta(minutes=3)
    )
    """With revive, for how long a heartbeat must be missing before another replica asks SageMaker about its job."""
    byo: Annotated[SageMakerByo, BeforeValidator(or_default)] = SageMakerByo()
    """Your own resources, which are used and never changed."""

    @property
    def one_role(self) -> bool:
        """True if all replicas of the group share a role."""
        return self.role == "group" or self.byo.role is not None

    @property
    def place(self) -> Place:
        """See TargetOptions.place. Without the option, the number of GPUs is that of the machine, which is not here."""
        gpus = self.gpus or 0
        return Place(cloud=self.CLOUD, region=self.region, machine=self.instance, accelerators=gpus, spot=self.spot)

    @property
    def warning(self) -> str | None:
        """See TargetOptions.warning."""
        return None if self.revive is None else warning_text("training jobs", "role")

    @classmethod
    def problems(cls, document: Document, groups: Sequence[int]) -> Iterator[Problem]:
        """See TargetOptions.problems."""
        yield from aws_options.store_problems(document)
        yield from aws_options.tag_problems(document)
        yield from aws_options.role_problems(document, groups, byo="role", default="group")
        yield from image_problems(
            document, groups, _PULLED, service="SageMaker", registries="ECR", example=_EXAMPLE_IMAGE
        )
        for index in groups:
            target: Where = ("replicas", index, "target")
            yield from _time_problems(document, target)
            yield from _network_problems(document, target)
            yield from _output_problems(document, target)
            yield from revive_problems(document, index)
            yield from _revive_problems(document, index)
            yield from _env_problems(document, index)
        if len(json.dumps(document.entries(("code", "command")))) > _LONGEST_COMMAND:
            text = (
                f"is longer than the {_LONGEST_COMMAND} characters that SageMaker passes to a job; put it into a script"
            )
            yield document.problem(("code", "command"), text)


def _network_problems(document: Document, target: Where) -> Iterator[Problem]:
    subnets, security_groups = (document.value((*target, "byo", name)) for name in ("subnets", "security_groups"))
    if (subnets is None) is not (security_groups is None):
        given, missing = ("subnets", "security_groups") if security_groups is None else ("security_groups", "subnets")
        text = f"needs {missing} as well: a machine has both, or is in SageMaker's own network; add {missing}"
        yield document.problem((*target, "byo", given), text, key=True)


def _revive_problems(document: Document, index: int) -> Iterator[Problem]:
    target: Where = ("replicas", index, "target")
    if document.value((*target, "revive")) is None:
        return
    if document.value((*target, "role")) == "replica":
        text = (
            "lets replicas start jobs with each other's roles, so a role for each protects nothing; write role: group"
        )
        yield document.problem((*target, "revive"), text, key=True)
    if document.value((*target, "byo", "role")) is not None:
        text = "needs a role that skerry creates, because its rights name the jobs of the run; remove byo.role"
        yield document.problem((*target, "revive"), text, key=True)


def _env_problems(document: Document, index: int) -> Iterator[Problem]:
    for where in written_env(document, index).values():
        value = document.value(where)
        if isinstance(value, str) and len(value) > LONGEST:
            text = (
                f"has {len(value)} characters, and SageMaker passes at most {LONGEST}; write it into a file of the code"
            )
            yield document.problem(where, text)


def _output_problems(document: Document, target: Where) -> Iterator[Problem]:
    store, output = document.value(("store",)), document.value((*target, "output"))
    example = "write e.g. output: s3://my-bucket/artifacts"
    if output is None and isinstance(store, str) and not store.startswith("s3://"):
        text = "SageMaker needs a place in S3 for the files in /opt/ml/model, and the store is not in S3"
        yield document.problem(target, f"{text}; {example}")
    if isinstance(output, str) and (problem := s3_problem(output[5:].partition("/")[0])) is not None:
        yield document.problem((*target, "output"), f"{problem}; {example}")


def _time_problems(document: Document, target: Where) -> Iterator[Problem]:
    """Times of a job that SageMaker would refuse or ignore."""
    runtime, wait = (_duration(document, (*target, name)) for name in ("max_runtime", "max_wait"))
    if document.value((*target, "max_wait")) is not None and document.value((*target, "spot")) is not True:
        text = "is only for spot machines; remove it, or write spot: true"
        yield document.problem((*target, "max_wait"), text, key=True)
    elif runtime is not None and wait is not None and wait < runtime:
        least = units.format_duration(runtime)
        text = f"includes the running time, and is less than max_runtime: {least}; write max_wait: {least} or more"
        yield document.problem((*target, "max_wait"), text)
    instance, pending = document.value((*target, "instance")), document.value((*target, "max_pending"))
    if pending is not None and isinstance(instance, str) and not _ACCELERATED.fullmatch(instance):
        text = f"has no effect on {instance}: SageMaker applies it to ml.g, ml.p and ml.trn only; remove it"
        yield document.problem((*target, "max_pending"), text, key=True)


def _duration(document: Document, where: Where) -> timedelta | None:
    try:
        return units.parse_duration(document.value(where))
    except ValueError:
        return None
