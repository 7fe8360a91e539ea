"""The options of the target `modal` and the checks of them. Does no I/O."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import Field

from skerry.infra.spec.section import Duration, Size, between, shaped
from skerry.infra.spec.target_kinds import TargetOptions
from skerry.infra.targets.shared import check_bucket_name
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.spec.yaml_document import Document, Where
    from skerry.infra.spec_and_store_errors import Problem

LONGEST: Final = timedelta(hours=24)
"""The longest time of a sandbox."""
_NAME: Final = shaped(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "a name of Modal: letters, digits, '.', '_' and '-'")
_GPU: Final = shaped(r"[A-Za-z0-9][A-Za-z0-9-]*[!+]?", "a type of GPU, as Modal names it, without a number")
_WORKSPACE: Final = shaped(r"ac-[A-Za-z0-9]+", "the id of a workspace of Modal, ac-...")
_REMEDY: Final = "write workspace: ac-..., or secrets: [store-keys], a Secret of Modal with its two keys"


class ModalTarget(TargetOptions):
    """Sandboxes of Modal, each a container that runs at most 24 hours and is paid by the second."""

    CLOUD: ClassVar[str | None] = "modal"
    SEES_FOLDERS: ClassVar[bool] = False
    EXAMPLE_IMAGE: ClassVar[str | None] = "ghcr.io/acme/skerry:gpu"
    SAMPLE: ClassVar[str | None] = "sample.yaml"
    RESERVED: ClassVar[tuple[str, ...]] = ("MODAL_*",)

    kind: Annotated[Literal["modal"], Field(examples=["modal"])]  # pyright: ignore[reportIncompatibleVariableOverride]  frozen
    """The kind of target: where the replicas run."""
    environment: Annotated[str, _NAME, Field(examples=["main"])] = "main"
    """The environment of the workspace, which must exist."""
    gpu: Annotated[str, _GPU, Field(examples=["H100"])] | None = None
    """The type of GPU; null is none. Modal may replace H100 by a better one, but not H100!. With a GPU, a creation
    waits until a machine is free, for 21 minutes at most."""
    gpus: Annotated[int, Field(ge=1, le=8, examples=[1])] = 1
    """GPUs of one replica, if `gpu` names a type; it has one rank for each."""
    cpu: Annotated[float, Field(ge=0.125, le=64, examples=[4])] = 1.0
    """CPU cores that a replica requests; it may use more, and pays for what it uses."""
    memory: Annotated[Size, Field(ge=128 << 20, le=336 << 30, examples=["16GiB"])] = 4 << 30
    """Memory that a replica requests; it may use more, and pays for what it uses."""
    secrets: Annotated[tuple[Annotated[str, _NAME], ...], Field(examples=[["store-keys"]])] = ()
    """Secrets of Modal, by name, whose entries become variables of the replicas, such as the keys of the store."""
    workspace: Annotated[str, _WORKSPACE, Field(examples=["ac-1a2b3c"])] | None = None
    """The id of the workspace: a role of AWS then trusts the sandboxes' own tokens, and no keys are needed."""
    max_runtime: Annotated[Duration, between(timedelta(minutes=1), LONGEST), Field(examples=["24h"])] | None = None
    """How long one sandbox may run, at most 24 hours; null is as long as the run."""

    @property
    def region(self) -> str:
        """The environment, which is the region of its resources."""
        return self.environment

    @property
    def ranks(self) -> int:
        """The ranks of a replica."""
        return self.gpus if self.gpu is not None else 1

    @property
    def place(self) -> Place:
        """See TargetOptions.place."""
        return Place(cloud=self.CLOUD, accelerator=self.gpu, accelerators=0 if self.gpu is None else self.gpus)

    @classmethod
    def mirror_schemes(cls, document: Document, index: int) -> tuple[str, ...]:
        """See TargetOptions.mirror_schemes."""
        del document, index
        return ("s3",)

    @classmethod
    def problems(cls, document: Document, groups: Sequence[int]) -> Iterator[Problem]:
        """See TargetOptions.problems."""
        yield from _store_problems(document, groups)
        hours = document.value(("limits", "max_hours"))
        bounded = isinstance(hours, int | float) and hours <= LONGEST / timedelta(hours=1)
        for index in groups:
            where: Where = ("replicas", index, "target")
            if not bounded and document.value((*where, "max_runtime")) is None:
                text = "may run longer than the 24 hours that Modal gives a sandbox; write max_runtime: 24h"
                remedy = "(`skerry up` restarts it), or limits: {max_hours: 24}"
                yield document.problem(where, f"{text} {remedy}")
            if document.value((*where, "gpus")) is not None and document.value((*where, "gpu")) is None:
                yield document.problem((*where, "gpus"), "needs a type as well; write e.g. gpu: H100")


def _store_problems(document: Document, groups: Sequence[int]) -> Iterator[Problem]:
    """Sandboxes reach a bucket in S3, by the role that trusts them or with keys of a Secret."""
    store = document.value(("store",))
    if not isinstance(store, str):
        return
    scheme, _, rest = store.partition("://")
    problem = "sandboxes of Modal reach a store in S3" if scheme != "s3" else None
    problem = problem or check_bucket_name.s3_problem(rest.partition("/")[0])
    if problem is not None:
        yield document.problem(("store",), f"{problem}; write e.g. store: s3://my-bucket/runs")
        return
    for index in groups:
        where: Where = ("replicas", index, "target")
        if not document.value((*where, "secrets")) and document.value((*where, "workspace")) is None:
            yield document.problem(where, f"sandboxes of Modal need access to the store; {_REMEDY}")
