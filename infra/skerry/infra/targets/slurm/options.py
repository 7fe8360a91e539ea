"""The options of the target `slurm` and the checks of them. Does no I/O."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from skerry.infra.spec.env_secrets_and_data import DATA
from skerry.infra.spec.replication_section import REPLICATION
from skerry.infra.spec.section import Duration, Size, between, shaped
from skerry.infra.spec.target_kinds import TargetOptions
from skerry.infra.targets.slurm.cluster import HERE
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.spec.yaml_document import Document, Where
    from skerry.infra.spec_and_store_errors import Problem

_EXAMPLE_IMAGE: Final = "/shared/images/skerry.sif"
# No text may begin an option of sbatch or ssh of its own, or hold a blank.
_NAME: Final = shaped(r"[A-Za-z0-9_.][A-Za-z0-9_.,@:/+-]*", "a name without blanks, as `sinfo` or `sacctmgr` shows it")
_LOGIN: Final = shaped(
    r"([A-Za-z0-9_.][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.:-]*", "a destination of ssh, e.g. ada@login.acme.org"
)
_PATH: Final = shaped(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*", "a path of letters, digits and . _ / + -")
_OPTION: Final = shaped(r"--[a-z][a-z0-9-]*(=[^\0\n]*)?", "a long option of sbatch, e.g. --constraint=a100")
# Options by which a job is found, stopped, started again and read; those of this section, which are checked; and those
# with which sbatch submits elsewhere, prints no id, or submits nothing.
_OWNED: Final = (
    "account",
    "array",
    "chdir",
    "cluster-constraint",
    "clusters",
    "comment",
    "cpus-per-task",
    "dependency",
    "error",
    "export",
    "export-file",
    "gres",
    "help",
    "input",
    "job-name",
    "mem",
    "no-requeue",
    "nodes",
    "ntasks",
    "open-mode",
    "output",
    "parsable",
    "partition",
    "qos",
    "quiet",
    "requeue",
    "signal",
    "test-only",
    "time",
    "usage",
    "version",
    "wait",
    "wrap",
)


def _as_option(text: str) -> str:
    name = text.removeprefix("--").partition("=")[0]
    # sbatch also takes the beginning of a name for the name.
    if owned := next((own for own in _OWNED if own.startswith(name)), None):
        raise ValueError(f"must not be --{owned}, which skerry sets itself")
    return text


class SlurmTarget(TargetOptions):
    """Batch jobs of a Slurm cluster, submitted on this machine or on a login node."""

    CLOUD: ClassVar[str | None] = "slurm"
    SAMPLE: ClassVar[str | None] = "sample.yaml"
    RESERVED: ClassVar[tuple[str, ...]] = ("SLURM_*", "SBATCH_*", "SRUN_*")

    kind: Annotated[Literal["slurm"], Field(examples=["slurm"])]  # pyright: ignore[reportIncompatibleVariableOverride]  frozen
    """The kind of target: where the replicas run."""
    login: Annotated[str, _LOGIN, Field(examples=["ada@login.acme.org"])] | None = None
    """The login node, a destination of ssh that asks for no password; null submits on this machine."""
    partition: Annotated[str, _NAME, Field(examples=["gpu"])] | None = None
    """The partition; null is the cluster's default."""
    account: Annotated[str, _NAME, Field(examples=["diloco"])] | None = None
    """The account that the jobs are charged to."""
    qos: Annotated[str, _NAME, Field(examples=["normal"])] | None = None
    """The quality of service."""
    time: Annotated[Duration, between(timedelta(minutes=2), timedelta(days=365)), Field(examples=["12h"])] | None = None
    """How long one start may run; null is the partition's default. Before it is over, the replica stops cleanly and its
    job is requeued, so a run may take longer than the partition allows."""
    gpus: Annotated[int, Field(ge=0, le=16, examples=[1])] = 0
    """GPUs of one replica; it has one rank for each."""
    gpu_type: Annotated[str, _NAME, Field(examples=["a100"])] | None = None
    """The type of GPU, as the cluster names it; null is any."""
    cpus: Annotated[int, Field(ge=1, le=1024, examples=[8])] = 1
    """CPUs of one replica."""
    memory: Annotated[Size, Field(ge=1 << 20, le=32 << 40, examples=["28GiB"])] | None = None
    """Memory of one replica; null is the partition's default."""
    attempts: Annotated[int, Field(ge=1, le=100, examples=[3])] = 3
    """How often a replica is started in total before an error is final. A start that Slurm cut short, because of the
    time limit or a lost node, counts, but is always followed by another."""
    folder: Annotated[str, _PATH, Field(examples=["/shared/logs"])] = ".skerry"
    """The folder of the logs, in the home folder of the login, or absolute. All nodes must see it."""
    python: Annotated[str, _PATH, Field(examples=["/shared/venv/bin/python"])] = "python3"
    """The Python with `skerry[runtime]` that runs the replica, e.g. of a virtual environment."""
    setup: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...], Field(examples=[["module load cuda/12.8"]])
    ] = ()
    """Lines of bash to run on the node before the replica starts."""
    container: Annotated[Literal["apptainer", "pyxis"], Field(examples=["apptainer"])] | None = None
    """The program that runs `image` on the node; null runs no image."""
    extra: Annotated[
        tuple[Annotated[str, _OPTION, AfterValidator(_as_option)], ...], Field(examples=[["--constraint=a100"]])
    ] = ()
    """More options of sbatch."""

    @property
    def region(self) -> str:
        """The cluster, by where its jobs are submitted."""
        return self.login or HERE

    @property
    def place(self) -> Place:
        """See TargetOptions.place."""
        return Place(
            cloud=self.CLOUD,
            region=self.region,
            machine=self.partition,
            accelerator=self.gpu_type,
            accelerators=self.gpus,
        )

    @classmethod
    def mirror_schemes(cls, document: Document, index: int) -> tuple[str, ...]:
        """See TargetOptions.mirror_schemes. The credentials for buckets are the nodes' own."""
        del document, index
        return ("file", "gs", "s3")

    @classmethod
    def problems(cls, document: Document, groups: Sequence[int]) -> Iterator[Problem]:
        """See TargetOptions.problems."""
        for index in groups:
            target: Where = ("replicas", index, "target")
            if document.value((*target, "gpu_type")) is not None and document.value((*target, "gpus")) in {None, 0}:
                yield document.problem((*target, "gpu_type"), "needs a number as well; write e.g. gpus: 1")
            container = document.value((*target, "container"))
            image = document.value(("replicas", index, "image")) or document.value(("image",))
            if isinstance(container, str) and image is None:
                text = f"{container} runs an image, and the spec names none; write e.g. image: {_EXAMPLE_IMAGE}"
                yield document.problem((*target, "container"), text)
            yield from _data_problems(document, index)
        yield from _store_problems(document)
        yield from _mirror_problems(document)


def _data_problems(document: Document, index: int) -> Iterator[Problem]:
    for section in ((), ("replicas", index)):
        entries = document.value((*section, DATA))
        for name, path in entries.items() if isinstance(entries, dict) else ():
            if isinstance(path, str) and "://" not in path and not path.startswith("/"):
                text = "is not absolute, and nodes of a cluster do not know the spec's folder"
                yield document.problem((*section, DATA, name), f"{text}; write e.g. {name}: /shared/{name}")


def _store_problems(document: Document) -> Iterator[Problem]:
    store = document.value(("store",))
    if not isinstance(store, str):
        return
    scheme, _, rest = store.partition("://")
    example = "write a folder of a disk that all nodes mount, e.g. store: file:///shared/runs"
    if scheme == "file" and not rest.startswith("/"):
        yield document.problem(("store",), f"is beside the spec, where nodes of a cluster cannot find it; {example}")
    elif scheme not in {"file", "s3", "gs"}:
        yield document.problem(("store",), f"replicas on Slurm use file://, s3:// or gs://; {example}")


def _mirror_problems(document: Document) -> Iterator[Problem]:
    for index in range(len(document.entries((REPLICATION,)))):
        where: Where = (REPLICATION, index, "to")
        to = document.value(where)
        if isinstance(to, str) and to.startswith("file://") and not to.startswith("file:///"):
            text = "is beside the spec, where nodes of a cluster cannot find it; write e.g. to: file:///backup/runs"
            yield document.problem(where, text)
