"""The options of the target `vertex` and the checks of them. Does no I/O."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from skerry.infra.spec.env_secrets_and_data import written_env
from skerry.infra.spec.section import Duration, Section, Size, between, or_default, shaped
from skerry.infra.spec.target_kinds import TargetOptions
from skerry.infra.targets.shared.aws_options import tag_problems
from skerry.infra.targets.shared.check_bucket_name import PREFIX, gcs_problem, s3_problem
from skerry.infra.targets.shared.image_pull_check import image_problems
from skerry.infra.targets.shared.revive_option import revive_problems, warning_text
from skerry.infra.targets.vertex import built_in_accelerators
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.spec.yaml_document import Document, Where
    from skerry.infra.spec_and_store_errors import Problem

_EXAMPLE_IMAGE: Final = "us-central1-docker.pkg.dev/acme-diloco/skerry/replica:gpu"
# Vertex AI, "Configure container settings for custom training": Artifact Registry or Docker Hub. A name whose first
# part is no host is an image of Docker Hub.
_PULLED: Final = re.compile(
    r"[a-z0-9-]+-docker\.pkg\.dev/[^/]+/[^/]+/.+|([a-z]+\.)?gcr\.io/.+|docker\.io/.+|[^/]+"
    r"|(?!localhost/)[^/.:]+/.+"
)
# A project has room for 100 service accounts (IAM quotas), and others need some.
_MOST_ACCOUNTS: Final = 50
# The replica image is built for x86_64, and a job on another processor fails only after it has paid for its machine.
_ARM: Final = ("a4x-", "c4a-", "n4a-", "t2a-")
_REGION: Final = shaped(r"[a-z]+(-[a-z]+)+[0-9]{1,2}", "a region of Google Cloud")
# Resource Manager, "Creating and managing projects": 6 to 30 characters.
_PROJECT: Final = shaped(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", "the id of a project of Google Cloud (not its number)")
_MACHINE: Final = shaped(r"[a-z][a-z0-9]*(-[a-z0-9]+)+", "a type of machine of Google Cloud")
_SERVICE_ACCOUNT: Final = shaped(
    r"[a-z0-9.-]+@[a-z0-9.-]+\.gserviceaccount\.com", "the e-mail address of a service account"
)
# CustomJobSpec.network: a project's number, not its id.
_NETWORK: Final = shaped(r"projects/[0-9]+/global/networks/[a-z0-9-]+", "projects/NUMBER/global/networks/NAME")
_KEY: Final = shaped(
    r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+", "the full name of a key of Cloud KMS"
)


class VertexByo(Section):
    """Your own resources: used and checked, never changed or deleted."""

    service_account: (
        Annotated[
            str,
            _SERVICE_ACCOUNT,
            Field(examples=["trainer@acme-diloco.iam.gserviceaccount.com"]),
        ]
        | None
    ) = None
    """The account that the replicas run as; it must let them use the run's prefix of the store."""
    network: Annotated[str, _NETWORK, Field(examples=["projects/123456789012/global/networks/train"])] | None = None
    """The network that the jobs join, by its project's number; it must be peered with Vertex AI already."""
    key: (
        Annotated[
            str,
            _KEY,
            Field(examples=["projects/acme-diloco/locations/us-central1/keyRings/train/cryptoKeys/disks"]),
        ]
        | None
    ) = None
    """The key that the machines' disks are encrypted with; it must be in the target's region."""


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


class VertexTarget(TargetOptions):
    """Custom jobs of Vertex AI, each on a machine of its own that exists only while it runs."""

    CLOUD: ClassVar[str | None] = "google"
    EXAMPLE_IMAGE: ClassVar[str | None] = _EXAMPLE_IMAGE
    SAMPLE: ClassVar[str | None] = "sample.yaml"
    RESERVED: ClassVar[tuple[str, ...]] = ("AIP_*", "CLOUD_ML_*", "CLUSTER_SPEC", "TF_CONFIG")

    kind: Annotated[Literal["vertex"], Field(examples=["vertex"])]  # pyright: ignore[reportIncompatibleVariableOverride]  frozen
    """The kind of target: where the replicas run."""
    project: Annotated[str, _PROJECT, Field(examples=["acme-diloco"])]
    """The project, by its id: jobs run in it, and it pays for them."""
    region: Annotated[str, _REGION, Field(examples=["us-central1"])]
    """The region; a run may have groups in several."""
    machine: Annotated[str, _MACHINE, Field(examples=["g2-standard-8"])]
    """The type of machine; a replica has one to itself."""
    accelerator: Annotated[Accelerator, Field(examples=["nvidia-l4"])] | None = None
    """The accelerator; by default the one that is built into the machine."""
    accelerators: Annotated[int, Field(ge=1, le=16, examples=[1])] | None = None
    """How many of them; by default as many as are built in, else one. A replica has one rank for each."""
    scheduling: Annotated[Literal["standard", "spot", "flex_start"], Field(examples=["spot"])] = "standard"
    """spot: cheaper machines, which Google may reclaim with 30 seconds' notice. flex_start: queue for scarce
    machines."""
    max_wait: (
        Annotated[Duration, between(timedelta(minutes=1), timedelta(days=365)), Field(examples=["48h"])] | None
    ) = None
    """With flex_start, how long a replica may queue; null is Vertex AI's default of one day."""
    max_runtime: (
        Annotated[Duration, between(timedelta(minutes=1), timedelta(days=365)), Field(examples=["24h"])] | None
    ) = None
    """How long one job may run; null is as long as the run, or without limits Vertex AI's seven days."""
    disk: Annotated[Size, Field(ge=100 << 30, le=64000 << 30, examples=["200GiB"])] = 100 << 30
    """The machine's disk: for the image, the code and the files of the script."""
    disk_type: Annotated[Literal["pd-ssd", "pd-standard", "hyperdisk-balanced"], Field(examples=["pd-ssd"])] | None = (
        None
    )
    """The kind of disk; by default the one that Vertex AI chooses for the machine."""
    role: Annotated[Literal["replica", "group"], Field(examples=["replica"])] = "group"
    """group: one service account for all replicas. replica: each has its own and may write only its own keys."""
    revive: Annotated[Literal["peers"], Field(examples=["peers"])] | None = None
    """peers: the replicas of the group start each other's lost jobs again, with no machine that watches. Needs a
    byo.service_account that may start jobs; null leaves it to `skerry up` and `skerry apply`."""
    revive_after: Annotated[Duration, between(timedelta(seconds=1), timedelta(hours=1)), Field(examples=["3m"])] = (
        timedelta(minutes=3)
    )
    """With revive, for how long a heartbeat must be missing before another replica asks Vertex AI about its job."""
    byo: Annotated[VertexByo, BeforeValidator(or_default)] = VertexByo()
    """Your own resources, which are used and never changed."""

    @property
    def one_account(self) -> bool:
        """True if all replicas of the group share a service account."""
        return self.role == "group" or self.byo.service_account is not None

    @property
    def place(self) -> Place:
        """See TargetOptions.place."""
        name, count = built_in_accelerators.of_machine(self.machine, self.accelerator, self.accelerators) or (None, 0)
        return Place(
            cloud=self.CLOUD,
            region=self.region,
            machine=self.machine,
            accelerator=name,
            accelerators=count,
            spot=self.scheduling == "spot",
        )

    @property
    def warning(self) -> str | None:
        """See TargetOptions.warning."""
        return None if self.revive is None else warning_text("custom jobs", "service account")

    @classmethod
    def problems(cls, document: Document, groups: Sequence[int]) -> Iterator[Problem]:
        """See TargetOptions.problems."""
        yield from image_problems(
            document,
            groups,
            _PULLED,
            service="Vertex AI",
            registries="Artifact Registry and Docker Hub",
            example=_EXAMPLE_IMAGE,
        )
        for index in groups:
            target: Where = ("replicas", index, "target")
            yield from _machine_problems(document, target)
            yield from _contradictions(document, target)
            yield from _account_problems(document, index)
            yield from revive_problems(document, index)
            yield from _env_problems(document, index)
        yield from _store_problems(document)
        yield from _project_problems(document, groups)


def _machine_problems(document: Document, target: Where) -> Iterator[Problem]:
    """Machines and accelerators that Vertex AI would refuse, or with which the script could not run as intended."""
    machine = document.value((*target, "machine"))
    if isinstance(machine, str) and machine.startswith(_ARM):
        text = f"{machine} is an ARM machine, and the replica image is built for x86_64; write e.g. g2-standard-8"
        yield document.problem((*target, "machine"), text)
        return
    named, number = document.value((*target, "accelerator")), document.value((*target, "accelerators"))
    built_in = built_in_accelerators.built_in(machine) if isinstance(machine, str) else None
    if built_in is None:
        if number is not None and named is None:
            text = "needs a name as well; write e.g. accelerator: nvidia-tesla-t4"
            yield document.problem((*target, "accelerators"), text)
        return
    for option, given, fixed in (("accelerator", named, built_in[0]), ("accelerators", number, built_in[1])):
        if given is not None and given != fixed:
            text = f"{machine} has {built_in[1]} {built_in[0]} built in, and takes no others; write {option}: {fixed}"
            yield document.problem((*target, option), text)


def _contradictions(document: Document, target: Where) -> Iterator[Problem]:
    waits = document.value((*target, "max_wait")) is not None
    if waits and document.value((*target, "scheduling")) != "flex_start":
        text = "is only for flex_start; remove it, or write scheduling: flex_start"
        yield document.problem((*target, "max_wait"), text, key=True)
    region, key = document.value((*target, "region")), document.value((*target, "byo", "key"))
    if isinstance(region, str) and isinstance(key, str) and f"/locations/{region}/" not in key:
        text = f"is in another region than the machines; it must be projects/.../locations/{region}/keyRings/..."
        yield document.problem((*target, "byo", "key"), text)


def _env_problems(document: Document, index: int) -> Iterator[Problem]:
    for where in written_env(document, index).values():
        value = document.value(where)
        if isinstance(value, str) and "$(" in value:
            text = "contains $(, which Vertex AI replaces by other variables; set it in the script"
            yield document.problem(where, text)


def _account_problems(document: Document, index: int) -> Iterator[Problem]:
    target: Where = ("replicas", index, "target")
    if document.value((*target, "revive")) is not None and document.value((*target, "byo", "service_account")) is None:
        text = (
            "needs byo: {service_account: ...} with the right to start jobs, which Google grants for a whole project, "
            "and skerry grants nothing there; infra/vertex.md has the commands"
        )
        yield document.problem((*target, "revive"), text, key=True)
    shared = document.value((*target, "role")) != "replica" or document.value((*target, "byo", "service_account"))
    count = document.integer(("replicas", index, "count"))
    if not shared and count is not None and count > _MOST_ACCOUNTS:
        text = f"{count} replicas would need a service account each, and a project has room for 100"
        yield document.problem((*target, "role"), f"{text}; above {_MOST_ACCOUNTS} write role: group")


def _store_problems(document: Document) -> Iterator[Problem]:
    """Jobs of Vertex AI reach a bucket as their service account, or as a role of AWS that trusts it."""
    store = document.value(("store",))
    if not isinstance(store, str):
        return
    scheme, _, rest = store.partition("://")
    if scheme == "s3":  # the bucket has the run's tags
        yield from tag_problems(document)
    example = "write e.g. store: gs://my-bucket/runs"
    if scheme not in {"gs", "s3"}:
        yield document.problem(("store",), f"jobs on Vertex AI reach a store in Cloud Storage or S3; {example}")
    elif (problem := (gcs_problem if scheme == "gs" else s3_problem)(rest.partition("/")[0])) is not None:
        yield document.problem(("store",), f"{problem}; {example}")
    elif not PREFIX.fullmatch(rest):
        text = "a condition of every permission names the run's prefix: letters, digits, '.', '_', '-' and '/'"
        yield document.problem(("store",), f"{text}; {example}")


def _project_problems(document: Document, groups: Sequence[int]) -> Iterator[Problem]:
    """One project holds everything that a run has on Google Cloud."""
    first: str | None = None
    for index in groups:
        where: Where = ("replicas", index, "target", "project")
        project = document.value(where)
        if not isinstance(project, str):
            continue
        first = first or project
        if project != first:
            text = f"a run has one project, and another group is in {first}; write project: {first}"
            yield document.problem(where, text)
