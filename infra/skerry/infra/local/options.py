"""The options of the targets `local` and `docker`, whose replicas run on this machine. Does no I/O."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from skerry.infra.spec.target_kinds import ThisMachineOptions


class LocalTarget(ThisMachineOptions):
    """Processes on this machine."""

    SAMPLE: ClassVar[str | None] = "sample.yaml"

    kind: Annotated[Literal["local"], Field(examples=["local"])]  # pyright: ignore[reportIncompatibleVariableOverride]  frozen
    """The kind of target: where the replicas run."""


class DockerTarget(ThisMachineOptions):
    """Containers on this machine's Docker engine, of the spec's `image`."""

    EXAMPLE_IMAGE: ClassVar[str | None] = "skerry:cpu"

    kind: Annotated[Literal["docker"], Field(examples=["docker"])]  # pyright: ignore[reportIncompatibleVariableOverride]  frozen
    """The kind of target: where the replicas run."""
    network: Annotated[Literal["bridge", "host"], Field(examples=["host"])] = "bridge"
    """host: a container reaches what listens on this machine's loopback, such as a test store."""
    gpus: Annotated[bool, Field(examples=[True])] = False
    """Every container gets every GPU."""
