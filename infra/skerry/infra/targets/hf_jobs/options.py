"""The options of the target `hf_jobs` and the checks of them. Does no I/O."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import Field

from skerry.infra.spec.section import Duration, between, shaped
from skerry.infra.spec.target_kinds import TargetOptions
from skerry.infra.targets.shared.store_secrets_option import Secrets, store_problems
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.spec.yaml_document import Document
    from skerry.infra.spec_and_store_errors import Problem

_NAMESPACE: Final = shaped(
    r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?", "a user or an organization of Hugging Face"
)
_FLAVOR: Final = shaped(r"[a-z0-9]+(-[a-z0-9]+)*", "a flavor, as `hf jobs hardware` lists it")
_COUNT: Final = re.compile(r"x(\d+)$")


class HfJobsTarget(TargetOptions):
    """Jobs of Hugging Face, each on a machine of its own that is paid by the minute."""

    CLOUD: ClassVar[str | None] = "huggingface"
    SEES_FOLDERS: ClassVar[bool] = False
    EXAMPLE_IMAGE: ClassVar[str | None] = "ghcr.io/acme/skerry:gpu"
    SAMPLE: ClassVar[str | None] = "sample.yaml"
    RESERVED: ClassVar[tuple[str, ...]] = ("JOB_ID", "ACCELERATOR", "CPU_CORES", "MEMORY")

    kind: Annotated[Literal["hf_jobs"], Field(examples=["hf_jobs"])]  # pyright: ignore[reportIncompatibleVariableOverride]  frozen
    """The kind of target: where the replicas run."""
    namespace: Annotated[str, _NAMESPACE, Field(examples=["acme"])]
    """The user or organization in which the jobs run, and which pays for them."""
    flavor: Annotated[str, _FLAVOR, Field(examples=["l4x1"])]
    """The kind of machine, as `hf jobs hardware` lists it; a replica has one rank for each of its GPUs."""
    secrets: Secrets = {}  # noqa: RUF012  pydantic copies it
    """Secret variables of the replicas, each with the name of the variable of your environment that holds its value
    when the job is created. A store in S3 needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""
    max_runtime: (
        Annotated[Duration, between(timedelta(minutes=1), timedelta(days=365)), Field(examples=["24h"])] | None
    ) = None
    """How long one job may run; null is as long as the run."""

    @property
    def region(self) -> str:
        """The namespace, which is the region of its resources."""
        return self.namespace

    @property
    def place(self) -> Place:
        """See TargetOptions.place."""
        return Place(cloud=self.CLOUD, machine=self.flavor, accelerators=gpus_of(self.flavor))

    @classmethod
    def mirror_schemes(cls, document: Document, index: int) -> tuple[str, ...]:
        """See TargetOptions.mirror_schemes."""
        del document, index
        return ("s3",)

    @classmethod
    def problems(cls, document: Document, groups: Sequence[int]) -> Iterator[Problem]:
        """See TargetOptions.problems."""
        yield from store_problems(document, groups, service="Hugging Face", keyless=lambda _: False)
        limits = [document.value(("limits", name)) for name in ("max_hours", "max_cost_usd")]
        for index in groups:
            where = ("replicas", index, "target")
            if limits == [None, None] and document.value((*where, "max_runtime")) is None:
                text = "has no time limit, and Hugging Face ends such a job after 30 minutes; write max_runtime: 24h"
                yield document.problem(where, f"{text}, or limits: {{max_hours: 24}}")


def gpus_of(flavor: str) -> int:
    """The number of GPUs of a flavor, by its name: a10g-largex4 has four, h200 one, cpu-basic none."""
    if flavor.startswith("cpu-"):
        return 0
    match = _COUNT.search(flavor)
    return 1 if match is None else int(match[1])
