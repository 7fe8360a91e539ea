"""The resources of Modal, typed: an App for each run, and a sandbox for each replica. Their region is the environment.

Source: Modal, "Sandboxes" and `modal.Sandbox.create`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.provision.graph import Life, Resource, Text

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class App(Resource):
    """The App of a run, which holds its sandboxes. Outputs: id."""

    KIND: ClassVar[str] = "modal_app"
    SINGLE: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Job(Resource):
    """One replica. Outputs: id.

    app: the name of its App. gpu: as Modal writes it, H100:2; None is none. memory_mib: a request. timeout_s: of the
    sandbox. secrets: names of Secrets of Modal. identity: the sandbox gets a token of Modal's.
    """

    KIND: ClassVar[str] = "modal_job"
    LIFE: ClassVar[Life] = Life.JOB
    ALONE: ClassVar[bool] = True
    FIXED: ClassVar[frozenset[str]] = frozenset(
        {
            "region",
            "app",
            "image",
            "command",
            "environment",
            "gpu",
            "cpu",
            "memory_mib",
            "timeout_s",
            "secrets",
            "identity",
        }
    )

    app: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, Text]
    gpu: str | None
    cpu: float
    memory_mib: int
    timeout_s: int
    secrets: tuple[str, ...]
    identity: bool = False
