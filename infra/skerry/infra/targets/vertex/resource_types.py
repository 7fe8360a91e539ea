"""The resource of Vertex AI, typed: a custom job. It cannot change, so every setting is fixed.

Source: Vertex AI API, projects.locations.customJobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.provision.graph import Life, Resource, Text

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Job(Resource):
    """One replica. Outputs: name (with project, region and number), id (the number, assigned by Vertex AI).

    args: of the image's own entry point. accelerator: its name in gcloud. disk_type: None leaves it to Vertex AI.
    max_wait_s: of a flex start. timeout_s: None is Vertex AI's seven days.
    service_account: its e-mail address. encryption_key: of the machine's disks.
    """

    KIND: ClassVar[str] = "vertex_job"
    LIFE: ClassVar[Life] = Life.JOB
    ALONE: ClassVar[bool] = True
    FIXED: ClassVar[frozenset[str]] = frozenset(
        {
            "region",
            "project",
            "image",
            "args",
            "environment",
            "machine",
            "accelerator",
            "accelerators",
            "disk_gb",
            "disk_type",
            "scheduling",
            "max_wait_s",
            "timeout_s",
            "service_account",
            "network",
            "encryption_key",
        }
    )

    project: str
    image: str
    args: tuple[str, ...]
    environment: Mapping[str, Text]
    machine: str
    accelerator: str | None
    accelerators: int
    disk_gb: int
    disk_type: str | None
    scheduling: str
    max_wait_s: int | None
    timeout_s: int | None
    service_account: Text
    network: str | None = None
    encryption_key: str | None = None
