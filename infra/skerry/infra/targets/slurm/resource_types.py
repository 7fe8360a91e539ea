"""The resource of Slurm, typed: a batch job. It cannot change, so every setting is fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.provision.graph import Life, Resource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.provision.graph import Text


@dataclass(frozen=True, kw_only=True)
class Job(Resource):
    """One replica. Outputs: id (assigned by Slurm), job (name and id, from which both are read back).

    region: the login node, or this machine. folder: of logs and endings, absolute or in the home folder there.
    partition, account, qos, minutes, memory_mib: None is Slurm's default. gpus: text of --gres. attempts: starts after
    errors; a start after the time limit does not count. setup: lines of bash before the command. container: the program
    that runs `image`; None runs `python` without one. mounts: folders that the container gets. extra: for sbatch.
    """

    KIND: ClassVar[str] = "slurm_job"
    LIFE: ClassVar[Life] = Life.JOB
    ALONE: ClassVar[bool] = True
    FIXED: ClassVar[frozenset[str]] = frozenset(
        {
            "region",
            "folder",
            "environment",
            "cpus",
            "attempts",
            "partition",
            "account",
            "qos",
            "minutes",
            "memory_mib",
            "gpus",
            "python",
            "setup",
            "container",
            "image",
            "mounts",
            "extra",
        }
    )

    folder: str
    environment: Mapping[str, Text]
    cpus: int
    attempts: int
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    minutes: int | None = None
    memory_mib: int | None = None
    gpus: str | None = None
    python: str = "python3"
    setup: tuple[str, ...] = ()
    container: str | None = None
    image: str | None = None
    mounts: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
