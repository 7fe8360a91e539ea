"""The options of the target `kubernetes` and the checks of them. Does no I/O."""

from __future__ import annotations

from datetime import timedelta
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal
from urllib.parse import unquote

from pydantic import Field

from skerry.infra.spec.section import Duration, Section, Size, between, shaped
from skerry.infra.spec.store_uri import FILE
from skerry.infra.spec.target_kinds import TargetOptions
from skerry.infra.targets.shared import check_bucket_name
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.spec.yaml_document import Document
    from skerry.infra.spec_and_store_errors import Problem

# A name of a namespace, of a service account, of a Secret, of a claim: RFC 1123, "label" and "subdomain".
_LABEL: Final = shaped(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "a name of Kubernetes: small letters, digits and '-'")
_NAME: Final = shaped(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", "a name of Kubernetes: small letters, digits"
)
_CPU: Final = shaped(r"[0-9]+(\.[0-9]{1,3})?|[1-9][0-9]*m", "a number of CPUs, such as 4, 0.5 or 500m")
_PATH: Final = shaped(r"(/[A-Za-z0-9_.+-]+)+", "an absolute path of letters, digits and . _ + -")
_PROJECT: Final = shaped(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", "the id of a project of Google Cloud")
_KEY: Final = shaped(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", "the key of a label"
)
_VALUE: Final = shaped(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", "the value of a label")


class Toleration(Section):
    """A taint of nodes that the pods may run on in spite of it."""

    key: Annotated[str, _KEY, Field(examples=["nvidia.com/gpu"])]
    """The key of the taint."""
    value: Annotated[str, _VALUE, Field(examples=["present"])] | None = None
    """The value of the taint; null is any."""
    effect: Annotated[Literal["NoSchedule", "PreferNoSchedule", "NoExecute"], Field(examples=["NoSchedule"])] | None = (
        None
    )
    """The effect of the taint; null is any."""


class Claim(Section):
    """A volume claim of yours with the folder of a store in `file://`."""

    name: Annotated[str, _NAME, Field(examples=["shared"])]
    """The PersistentVolumeClaim in the namespace, which several nodes must be able to write (ReadWriteMany)."""
    path: Annotated[str, _PATH, Field(examples=["/shared"])]
    """The folder at which the pods mount it. The machine that runs skerry must mount the same volume there."""
    user: Annotated[int, Field(ge=1, le=(1 << 31) - 1, examples=[1000])] = 10001
    """The id of the user and group of the pods, and so of the files: your own id, if you are to delete them."""


class KubernetesTarget(TargetOptions):
    """Jobs of a Kubernetes cluster, each with one pod at a time. The cluster and its nodes are your own."""

    CLOUD: ClassVar[str | None] = "kubernetes"
    SEES_FOLDERS: ClassVar[bool] = False
    EXAMPLE_IMAGE: ClassVar[str | None] = "ghcr.io/acme/skerry:gpu"
    SAMPLE: ClassVar[str | None] = "sample.yaml"
    RESERVED: ClassVar[tuple[str, ...]] = ("KUBERNETES_*",)

    kind: Annotated[Literal["kubernetes"], Field(examples=["kubernetes"])]  # pyright: ignore[reportIncompatibleVariableOverride]  frozen
    """The kind of target: where the replicas run."""
    context: Annotated[str, Field(min_length=1, examples=["train-cluster"])] | None = None
    """The context of your kubeconfig; null is the current one, or inside a cluster that cluster."""
    namespace: Annotated[str, _LABEL, Field(examples=["train"])] = "default"
    """The namespace, which must exist."""
    cpu: Annotated[str, _CPU, Field(examples=["4"])] = "1"
    """CPUs that a replica requests; it may use more if they are free."""
    memory: Annotated[Size, Field(ge=256 << 20, le=32 << 40, examples=["28GiB"])] = 4 << 30
    """Memory of one replica: above it the replica is killed."""
    gpus: Annotated[int, Field(ge=0, le=16, examples=[1])] = 0
    """GPUs of one replica (nvidia.com/gpu); it has one rank for each."""
    shared_memory: Annotated[Size, Field(ge=64 << 20, le=1 << 40, examples=["4GiB"])] = 1 << 30
    """The folder in memory (/dev/shm) of data loaders, counted as memory when it is used."""
    node_selector: Annotated[
        dict[Annotated[str, _KEY], Annotated[str, _VALUE]],
        Field(examples=[{"cloud.google.com/gke-accelerator": "nvidia-l4"}]),
    ] = {}  # noqa: RUF012  pydantic copies it
    """Labels that a node must have: the kind of GPU, spot machines, a zone."""
    tolerations: Annotated[tuple[Toleration, ...], Field(examples=[[{"key": "nvidia.com/gpu"}]])] = ()
    """Taints to tolerate, in addition to that of GPUs."""
    priority_class: Annotated[str, _NAME, Field(examples=["low"])] | None = None
    """The priority class of the pods."""
    pull_secret: Annotated[str, _NAME, Field(examples=["registry"])] | None = None
    """The Secret with which nodes pull the image; null if they need none."""
    queue: Annotated[str, _LABEL, Field(examples=["research"])] | None = None
    """The local queue of Kueue that admits the jobs."""
    secret: Annotated[str, _NAME, Field(examples=["store-keys"])] | None = None
    """A Secret of yours whose entries become variables of the replicas: the keys that open the store, such as
    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or GOOGLE_SERVICE_ACCOUNT_KEY with the JSON of a key. Without it, the
    store's cloud trusts the service account of each replica."""
    claim: Annotated[Claim, Field(examples=[{"name": "shared", "path": "/shared"}])] | None = None
    """The volume with the store, if that is in `file://`."""
    gke_project: Annotated[str, _PROJECT, Field(examples=["acme-diloco"])] | None = None
    """The project of a GKE cluster, by its id, for a store in Cloud Storage; by default that of the store."""
    attempts: Annotated[int, Field(ge=1, le=10, examples=[4])] = 4
    """How often the cluster starts a replica in total after failures; an eviction is not one, unless this is 1."""
    grace: Annotated[Duration, between(timedelta(seconds=30), timedelta(hours=1)), Field(examples=["60s"])] = timedelta(
        seconds=60
    )
    """The time between SIGTERM and SIGKILL."""
    max_runtime: (
        Annotated[Duration, between(timedelta(minutes=1), timedelta(days=365)), Field(examples=["24h"])] | None
    ) = None
    """How long one job may take, with its pending time and all attempts; null is as long as the run."""

    @property
    def region(self) -> str:
        """The namespace, which is the region of its resources."""
        return self.namespace

    @property
    def place(self) -> Place:
        """See TargetOptions.place."""
        return Place(cloud=self.CLOUD, accelerators=self.gpus)

    @classmethod
    def mirror_schemes(cls, document: Document, index: int) -> tuple[str, ...]:
        """See TargetOptions.mirror_schemes. Only the store's cloud trusts the pods; a Secret has keys of one cloud."""
        home = str(document.value(("store",))).partition("://")[0]
        if document.value(("replicas", index, "target", "secret")) is not None:
            return ("gs",) if home == "gs" else ("s3",)
        return (home,) if home in {"gs", "s3"} else ()

    @classmethod
    def problems(cls, document: Document, groups: Sequence[int]) -> Iterator[Problem]:
        """See TargetOptions.problems."""
        yield from _store_problems(document)
        for index in groups:
            yield from _claim_problems(document, index)
        for index in groups:
            yield from _identity_problems(document, index)
        contexts = {index: document.value(("replicas", index, "target", "context")) for index in groups}
        first = contexts[groups[0]]
        for index, context in contexts.items():
            if context != first:
                text = "a run is in one cluster, and another group is in"
                other = "the current context" if first is None else first
                yield document.problem(
                    ("replicas", index, "target", "context"), f"{text} {other}; write the same context"
                )


def _identity_problems(document: Document, index: int) -> Iterator[Problem]:
    """GKE's accounts are for Cloud Storage only, and a pod with a Secret has no use for them."""
    target = ("replicas", index, "target")
    in_google = str(document.value(("store",))).startswith("gs://")
    if not in_google and document.value((*target, "gke_project")) is not None:
        yield document.problem((*target, "gke_project"), "is only for a store in Cloud Storage; remove it", key=True)


def _claim_problems(document: Document, index: int) -> Iterator[Problem]:
    """A store in a folder is in the volume of a claim, and a claim has no other use."""
    target, store = ("replicas", index, "target"), document.value(("store",))
    claim = document.value((*target, "claim"))
    if not isinstance(store, str) or (claim is not None and not isinstance(claim, dict)):
        return
    folder = PurePosixPath(unquote(store.removeprefix(FILE))) if store.startswith(FILE) else None
    if folder is None and claim is not None:
        yield document.problem((*target, "claim"), f"is only for a store in {FILE}; remove it", key=True)
    elif folder is not None and folder.is_absolute():
        path = None if claim is None else claim.get("path")
        if claim is None:
            text = f"pods find {store} only in a volume; write e.g. claim: {{name: shared, path: {folder}}}"
            yield document.problem(target, text)
        elif isinstance(path, str) and not folder.is_relative_to(path):
            yield document.problem((*target, "claim", "path"), f"is not above the store {store}; write e.g. {folder}")


def _store_problems(document: Document) -> Iterator[Problem]:
    """Pods reach a bucket in S3 or Cloud Storage, and a folder in a volume."""
    store = document.value(("store",))
    if not isinstance(store, str):
        return
    scheme, _, rest = store.partition("://")
    bucket = rest.partition("/")[0]
    if scheme == "s3":
        problem = check_bucket_name.s3_problem(bucket)
    elif scheme == "gs":
        problem = check_bucket_name.gcs_problem(bucket)
    elif scheme == "file":
        if not rest.startswith("/"):
            text = "is beside the spec, where pods cannot find it; write e.g. store: file:///shared/runs"
            yield document.problem(("store",), text)
        return
    else:
        problem, scheme = "jobs on Kubernetes reach a store in S3, Cloud Storage or a volume", "s3"
    if problem is not None:
        yield document.problem(("store",), f"{problem}; write e.g. store: {scheme}://my-bucket/runs")
