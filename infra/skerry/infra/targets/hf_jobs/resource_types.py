"""The resource of Hugging Face, typed: a job. It cannot change, so every setting is fixed.

Its region is the namespace: a user or an organization. Source: huggingface_hub, `run_job`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.provision.graph import Life, Resource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.provision.graph import Text


@dataclass(frozen=True, kw_only=True)
class Job(Resource):
    """One replica. Outputs: id.

    flavor: the kind of machine. timeout_s: of the job. secrets: variables of the replica, by the name of the variable
    of the operator's environment that holds the value.
    """

    KIND: ClassVar[str] = "hf_jobs_job"
    LIFE: ClassVar[Life] = Life.JOB
    ALONE: ClassVar[bool] = True
    FIXED: ClassVar[frozenset[str]] = frozenset(
        {"region", "image", "command", "environment", "flavor", "timeout_s", "secrets"}
    )

    image: str
    command: tuple[str, ...]
    environment: Mapping[str, Text]
    flavor: str
    timeout_s: int
    secrets: Mapping[str, str]
