"""The kinds of targets, where replicas run. Targets know nothing of each other.

A kind is one folder with `options.py` (its options and their checks), a sample spec and, if its replicas are jobs in a
cloud, `target.py`; and one line in the table below. Importing this imports no target.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from importlib import resources
from typing import TYPE_CHECKING, Final

from skerry.infra import clouds
from skerry.infra.spec.target_kinds import TargetKinds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.provision.target_and_store_interfaces import Target

# The class of the options of each kind, in the order of the JSON Schema.
_OPTIONS: Final = {
    "local": "skerry.infra.local.options.LocalTarget",
    "docker": "skerry.infra.local.options.DockerTarget",
    "aws_batch": "skerry.infra.targets.aws_batch.options.AwsBatchTarget",
    "sagemaker": "skerry.infra.targets.sagemaker.options.SageMakerTarget",
    "vertex": "skerry.infra.targets.vertex.options.VertexTarget",
    "kubernetes": "skerry.infra.targets.kubernetes.options.KubernetesTarget",
    "slurm": "skerry.infra.targets.slurm.options.SlurmTarget",
    "hf_jobs": "skerry.infra.targets.hf_jobs.options.HfJobsTarget",
    "modal": "skerry.infra.targets.modal.options.ModalTarget",
}


@functools.cache
def kinds() -> TargetKinds:
    """Return all kinds that a spec may name."""
    return TargetKinds(tuple(pkgutil.resolve_name(name) for name in _OPTIONS.values()))


def samples() -> Mapping[str, str]:
    """Return the sample spec of each kind that has one."""
    return {
        options.name(): (resources.files(options.__module__.rpartition(".")[0]) / options.SAMPLE).read_text()
        for options in kinds().options
        if options.SAMPLE is not None
    }


def cloud_of(kind: str) -> str:
    """Return the cloud of a kind of resource, whose name begins with that of the cloud or of a target there.

    Raises LookupError for a kind of resource that belongs to no cloud.
    """
    starts = {**{name: name for name in clouds.NAMES}, **{each.name(): each.CLOUD for each in kinds().options}}
    for start, cloud in starts.items():
        if cloud is not None and kind.startswith(f"{start}_"):
            return cloud
    raise LookupError(kind)


def open_target(kind: str, access: OperatorAccess) -> Target:
    """Open the target of a deployed kind. Does no I/O."""
    return importlib.import_module(f"{__name__}.{kind}.target").open_target(access)
