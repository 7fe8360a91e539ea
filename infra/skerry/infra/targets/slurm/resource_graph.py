"""Builds the jobs of a Slurm cluster from the options of the groups. Pure."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote

from skerry.infra.clouds.aws.s3 import Bucket
from skerry.infra.provision.target_and_store_interfaces import stem_of
from skerry.infra.spec import store_uri
from skerry.infra.targets.slurm.options import SlurmTarget
from skerry.infra.targets.slurm.resource_types import Job
from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.provision.graph import Text
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import Replicas, ReplicaSlot

_MIB = 1 << 20


def build_resources(
    context: RunContext, groups: Sequence[Replicas], store_variables: Mapping[str, str]
) -> tuple[Job, ...]:
    """Return the jobs of these groups. store_variables: to open the store with, without credentials."""
    return tuple(_jobs(context, groups, store_variables))


def _jobs(context: RunContext, groups: Sequence[Replicas], store_variables: Mapping[str, str]) -> Iterator[Job]:
    for group in groups:
        variables = {**store_variables, **context.bucket_regions(Bucket.KIND), **context.variables(group)}
        for replica in context.slots_of(group):
            yield job_of(context, group, replica, variables)


def job_of(context: RunContext, group: Replicas, replica: ReplicaSlot, variables: Mapping[str, Text]) -> Job:
    """Return the job of a replica. variables: of every replica of its group."""
    options = SlurmTarget.of(group)
    folders = [path for path in context.inputs(group).data.values() if path.startswith("/")]
    mirrors = _mirror_folders(context) if options.container is not None else []
    return Job(
        key=replica.slot,
        name=f"{context.stem}-{replica.slot}",
        region=options.region,
        why=f"replica {replica.index} of the run",
        folder=folder_of(options, context.run_uri),
        environment={
            contract.RANKS: str(max(1, options.gpus)),
            **variables,
            contract.SLOT: replica.slot,
        },
        cpus=options.cpus,
        attempts=options.attempts,
        partition=options.partition,
        account=options.account,
        qos=options.qos,
        minutes=_minutes(options, context.hours),
        memory_mib=None if options.memory is None else max(1, options.memory // _MIB),
        gpus=_gpus(options),
        python=options.python,
        # The first write creates the folder of a mirror, but a container can mount none that is missing.
        setup=(*(f"mkdir -p {shlex.quote(folder)}" for folder in mirrors), *options.setup),
        container=options.container,
        image=_image(options, context.image_of(group)),
        mounts=_mounts(context.run_uri, [*mirrors, *folders]) if options.container is not None else (),
        extra=options.extra,
    )


def folder_of(options: SlurmTarget, run: str) -> str:
    """Return the folder of a run's logs and endings."""
    return f"{options.folder.rstrip('/')}/{stem_of(run)}"


def _gpus(options: SlurmTarget) -> str | None:
    if not options.gpus:
        return None
    return ":".join(filter(None, ("gpu", options.gpu_type, str(options.gpus))))


def _minutes(options: SlurmTarget, hours: float | None) -> int | None:
    """Return the time of one start, in whole minutes: that of the options, and not more than that of the run."""
    if options.time is None:
        return None
    minutes = int(options.time.total_seconds()) // 60
    return minutes if hours is None else min(minutes, max(2, -int(-hours * 60 // 1)))


def _image(options: SlurmTarget, image: str) -> str | None:
    """Return an image as the container's program names it: a file, or a reference of a registry."""
    if not image or options.container is None:
        return None
    plain = options.container == "pyxis" or "://" in image or image.startswith("/")
    return image if plain else f"docker://{image}"


def _mounts(run_uri: str, folders: Sequence[str]) -> tuple[str, ...]:
    own = (str(PurePosixPath(_path(run_uri)).parent),) if run_uri.startswith(store_uri.FILE) else ()
    return tuple(dict.fromkeys((*own, *folders)))


def _mirror_folders(context: RunContext) -> list[str]:
    return [_path(line.to) for line in context.spec.replication if line.to.startswith(store_uri.FILE)]


def _path(uri: str) -> str:
    return unquote(uri.removeprefix(store_uri.FILE)).rstrip("/")
